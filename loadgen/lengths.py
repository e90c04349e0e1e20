"""How long things are: laws over whole numbers, drawn with the generator of whoever asks. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

from loadgen.arrivals import normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Always the same."""

    value: int

    def draw(self, rng: random.Random) -> int:
        """Return the value."""
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Each of ``min`` to ``max`` as likely as the other."""

    min: int
    max: int

    def draw(self, rng: random.Random) -> int:
        """Return one of them."""
        return self.min + int(rng.random() * (self.max - self.min + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Half below ``median``, a long tail above; values outside of ``min`` to ``max`` become the nearest of the two."""

    median: float
    sigma: float
    min: int
    max: int

    def draw(self, rng: random.Random) -> int:
        """Return a value of the law, rounded."""
        return min(self.max, max(self.min, round(self.median * exp(self.sigma * normal(rng)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One of ``values``, each occurrence as likely as the other: the law of a trace without its order."""

    values: Sequence[int] = field(repr=False)

    def draw(self, rng: random.Random) -> int:
        """Return one of them."""
        return self.values[int(rng.random() * len(self.values))]


NOTHING = Fixed(value=0)

Lengths = Fixed | Uniform | LogNormal | Listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How many tokens the server counts for our words: ``overhead_tokens`` a prompt and ``tokens_per_word`` a word.

    The default makes a length in tokens a length in words.
    """

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0

    def words(self, num_tokens: int, *, is_whole_prompt: bool = True) -> int:
        """Return the number of words, at least 1, that is closest to ``num_tokens`` of a whole prompt or of a piece."""
        overhead = self.overhead_tokens if is_whole_prompt else 0.0
        return max(1, round((num_tokens - overhead) / self.tokens_per_word))


IN_WORDS = Calibration()
"""For lengths that are meant in words."""
