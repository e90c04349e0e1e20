"""The seams of the engine: what a device and a tokenizer have to offer. Fakes for tests are in ``aserve.testing``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aserve.core.ids import StepNumber
from aserve.core.plan import BatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What the device side decided at start. num_blocks: KV blocks that the ledger may hand out (ids 1..num_blocks).

    max_model_len: already cut to the pool. eos_ids: the model's end-of-sequence ids. device: for people, such as
    "cpu, bfloat16, 2 threads". weight_bytes and kv_bytes_per_token serve statistics only.
    """

    model_name: str
    device: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    eos_ids: tuple[int, ...] = ()
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


class Flight(Protocol):
    """A launched step. Awaiting it gives the result once the step has landed, or raises the step's fault.

    Faults: ``errors.DeviceLost`` is sticky and ends the engine; any other exception fails this step's sequences only.
    A second await gives the same outcome. Cancelling an await does not cancel the step.
    """

    step: StepNumber

    def __await__(self) -> Any: ...

    def done(self) -> bool:
        """Whether awaiting would return at once."""
        ...


class Runner(Protocol):
    """The device. One plan at a time, in order of steps, from the loop's thread."""

    @property
    def info(self) -> RunnerInfo: ...

    def launch(self, plan: BatchPlan) -> Flight:
        """Start the step and return at once; never blocks the loop. Raises if the step could not be started."""
        ...

    def statistics(self) -> dict[str, float]:
        """Plain figures for ``/v1/stats``."""
        ...

    async def aclose(self) -> None:
        """Wait for what is in flight, then free the device."""
        ...


class TextDecoder(Protocol):
    """Turns one sequence's tokens into text, incrementally (``text/detokenizer.py``)."""

    def push(self, token: int) -> str:
        """Text that this token completes; empty while it holds half a character."""
        ...

    def finish(self) -> str:
        """What is still held, invalid bytes as U+FFFD. Once, at the end."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back (``text/tokenizer.py``). Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Ids below this are decodable."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def bos_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Tokens of ``text``. Markers such as <|im_end|> in it are plain text unless ``parse_special``."""
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """The raw bytes of one token (empty for ids beyond the vocabulary)."""
        ...

    def decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder: ...


class Observer(Protocol):
    """Where the engine's timings go (``obs/metrics.py``), in seconds. Called on the hot path: must be cheap."""

    def queue_time(self, seconds: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float, num: int = 1) -> None:
        """``num`` tokens came so long after the one before them."""
        ...

    def step_landed(self, seconds: float, num_rows: int, num_prefill_tokens: int) -> None: ...

    def request_rejected(self, reason: str) -> None: ...

    def request_finished(
        self, reason: str, seconds: float, first_token_s: float | None, num_output_tokens: int
    ) -> None: ...


class NullObserver:
    """Observes nothing."""

    def queue_time(self, seconds: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float, num: int = 1) -> None: ...

    def step_landed(self, seconds: float, num_rows: int, num_prefill_tokens: int) -> None: ...

    def request_rejected(self, reason: str) -> None: ...

    def request_finished(
        self, reason: str, seconds: float, first_token_s: float | None, num_output_tokens: int
    ) -> None: ...
