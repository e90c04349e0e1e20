"""The seams of the engine: what a device and a tokenizer have to offer. Fakes for tests are in ``aserve.testing``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from aserve.core.actions import LaunchReason
from aserve.core.ids import SequenceId, StepNumber
from aserve.core.plan import BatchPlan
from aserve.core.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What the device side decided at start. num_blocks: KV blocks that the ledger may hand out (ids 1..num_blocks).

    max_model_len: already cut to the pool. max_num_batched_tokens: of a step, where the options leave it to the device;
    0 is a CPU's usual number. eos_ids: the model's end-of-sequence ids. device: for people, such as
    "cpu, bfloat16, 2 threads". weight_bytes and kv_bytes_per_token serve statistics only.
    """

    model_name: str
    device: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int = 0
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

    def go_on(self) -> None:
        """Do the next bit of what a launch has left to later turns of the loop, if there is any: called where this turn
        may be a long one. Never raises."""
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


class AlarmClock(Protocol):
    """One ring at a time, on the loop's thread (``device/alarm.py``, or ``loop.LoopAlarm`` where that is missing)."""

    def set(self, delay_s: float) -> None:
        """Ring once, in ``delay_s``; an earlier setting that has not rung is forgotten."""
        ...

    def close(self) -> None:
        """Never ring again. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaunch:
    """A step was handed to the device. Times are the engine's clock; a step whose launch raises has a landing alone.

    composed_s: before it was composed. handed_s: before ``Runner.launch``. launched_s: after that had returned.
    stream: the device's, as in the plan. num_rows: decode rows. num_chunks, num_prefill_tokens: of prompts.
    num_inflight: with this one.
    reason: why now (``core.actions.LaunchReason``).
    lead_s: predicted device work that was left before this step, when it was composed.
    predicted_end_s: when the device is thought to be done with this step. Both None where the policy predicts nothing.
    bubble_s: how long the device had stood idle beside work, 0 behind another step or after a want of work.
    """

    step: StepNumber
    stream: int
    composed_s: float
    handed_s: float
    launched_s: float
    num_rows: int
    num_chunks: int
    num_prefill_tokens: int
    num_inflight: int
    reason: LaunchReason
    lead_s: float | None
    predicted_end_s: float | None
    bubble_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLanding:
    """A step came back, told of after the launches that its landing led to. Times as in ``StepLaunch``.

    started_s: its launch or its stream's landing before it, whichever was later: when the device began, as far as the
    host saw.
    committed_s: after its tokens were with delivery, first ones with their readers, and before launches that are due.
    num_eligible: sequences that could have had a place in it at that moment; more than its rows and chunks where some
    came too late for it. num_wasted_rows: rows of sequences that had ended. predicted_s: time on the device as it was
    predicted, or None. failed: it never reached the device, or came back with a fault.
    """

    step: StepNumber
    stream: int
    launched_s: float
    started_s: float
    landed_s: float
    committed_s: float
    num_rows: int
    num_chunks: int
    num_prefill_tokens: int
    num_eligible: int
    num_wasted_rows: int
    predicted_s: float | None
    failed: bool


RequestPhase = Literal["queued", "prefill", "decode", "parked", "ended"]
"""Where a sequence is: waiting for its first step, or for another one after a preemption or a reader that lagged;
computing its prompt, or prompt and output again; decoding; off the device while its reader lags; over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMove:
    """A sequence of a request got into ``phase``.

    index: of the choice. num_tokens: of the prompt where it is queued for the first time, of those found in the prefix
    cache where it prefills, of the output where it has ended; else 0. finish_reason: where it has ended.
    """

    sequence: SequenceId
    request_id: str
    index: int
    phase: RequestPhase
    at_s: float
    num_tokens: int = 0
    finish_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """An accepted sequence ended. Times are the engine's clock, None for what it did not come to.

    started_s: when its first step was composed; not again after a preemption. first_token_s, last_token_s: when they
    were delivered. num_cached_tokens: of the prompt, found in the prefix cache at that first step. n: sequences of its
    prompt. num_output_tokens_max: the longest output among these, told with the last of them to end.
    """

    reason: FinishReason
    submitted_s: float
    started_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_tokens: int
    n: int
    num_output_tokens_max: int | None


class Observer(Protocol):
    """Where the engine's timings go (``obs/metrics.py``), in seconds. Called on the hot path: must be cheap."""

    def request_started(self, wait_s: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """The first step of a sequence was composed, so long after its arrival."""
        ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float, num: int = 1) -> None:
        """``num`` tokens came so long after the one before them. Those that went out together share their time."""
        ...

    def step_launched(self, launch: StepLaunch) -> None: ...

    def step_landed(self, landing: StepLanding) -> None: ...

    def delivered(self, start_s: float, end_s: float, num_tokens: int) -> None:
        """One slice of delivery, between two turns of the loop."""
        ...

    def request_moved(self, move: RequestMove) -> None:
        """Some four times for each sequence, the last one "ended"."""
        ...

    def request_rejected(self, reason: str) -> None:
        """The engine turned a call away. reason: the error's code, "invalid_request" where it has none."""
        ...

    def request_finished(self, end: RequestEnd) -> None: ...


class NullObserver:
    """Observes nothing."""

    def request_started(self, wait_s: float, num_prompt_tokens: int, num_cached_tokens: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float, num: int = 1) -> None: ...

    def step_launched(self, launch: StepLaunch) -> None: ...

    def step_landed(self, landing: StepLanding) -> None: ...

    def delivered(self, start_s: float, end_s: float, num_tokens: int) -> None: ...

    def request_moved(self, move: RequestMove) -> None: ...

    def request_rejected(self, reason: str) -> None: ...

    def request_finished(self, end: RequestEnd) -> None: ...
