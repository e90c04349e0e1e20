"""The sequences of one call: every prompt is continued ``n`` times, each time with a key of its own."""

import secrets
from collections.abc import Iterator

from aserve.core.ids import SequenceId
from aserve.core.request import SamplingParams, SequenceSpec
from aserve.engine.generation import GenerationRequest


def sequence_specs(
    request: GenerationRequest, params: SamplingParams, ids: Iterator[int], now: float
) -> list[SequenceSpec]:
    """In order of the choices. The first child of each prompt leads the others, which wait for its blocks.

    params: in place of the request's, with all stop ids. ids: of the process. A seed is drawn where none was sent.
    """
    seed = secrets.randbits(64) if request.seed is None else request.seed
    specs: list[SequenceSpec] = []
    for prompt in request.prompts:
        leader: SequenceId | None = None
        for child in range(request.n):
            sequence = SequenceId(next(ids))
            specs.append(
                SequenceSpec(
                    id=sequence,
                    prompt=prompt,
                    params=params,
                    seed=child_seed(seed, child),
                    priority=request.priority,
                    arrival_s=now,
                    cache_salt=request.cache_salt,
                    leader=leader,
                    leads=child == 0 and request.n > 1,
                )
            )
            leader = leader or sequence
    return specs


def child_seed(seed: int, index: int) -> int:
    """The 64-bit key of a group's child: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of seed and index."""
    mask = (1 << 64) - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
