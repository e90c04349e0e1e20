"""What can happen to the scheduler, past tense. Each goes through ``Scheduler.handle``."""

from dataclasses import dataclass

from aserve.core.ids import SequenceId, StepNumber
from aserve.core.plan import BatchResult
from aserve.core.request import FinishReason, SequenceSpec


@dataclass(frozen=True, slots=True)
class SequenceSubmitted:
    """A sequence that admission let in (``core/admission.py`` decides before)."""

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The outside ended a sequence: client gone, deadline, fault. Unknown and finished ids are ignored."""

    sequence: SequenceId
    reason: FinishReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StopMatched:
    """Delivery found a stop string that completes with output token ``token_index``; later tokens are waste."""

    sequence: SequenceId
    token_index: int


@dataclass(frozen=True, slots=True)
class ReaderStalled:
    """The sequence's reader has not taken its tokens for too long: it is to leave its slot until it has."""

    sequence: SequenceId


@dataclass(frozen=True, slots=True)
class ReaderCaughtUp:
    """The reader has taken what there was: the sequence may run again."""

    sequence: SequenceId


@dataclass(frozen=True, slots=True)
class LaunchPossible:
    """The loop has a permit: compose one step if the policy says that it is due. has_landed: a step landed just now."""

    has_landed: bool = False


@dataclass(frozen=True, slots=True)
class StepLaunched:
    """The newest composed step is on its way to the device: ``Runner.launch`` has just returned."""

    step: StepNumber


@dataclass(frozen=True, slots=True)
class AlarmRang:
    """The wake-up that ``actions.WakeAt`` asked for at ``asked_s`` has come; how late, ``now`` tells."""

    asked_s: float


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """The newest composed step never reached the device."""

    step: StepNumber
    detail: str


@dataclass(frozen=True, slots=True)
class StepLanded:
    """A step completed; landings of a stream come in launch order."""

    result: BatchResult


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A launched step completed with a fault; it takes its place in the order of landings."""

    step: StepNumber
    detail: str


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """Somebody asked to forget every cached prefix."""


Event = (
    SequenceSubmitted
    | SequenceEnded
    | StopMatched
    | ReaderStalled
    | ReaderCaughtUp
    | LaunchPossible
    | StepLaunched
    | AlarmRang
    | LaunchFailed
    | StepLanded
    | StepFailed
    | CacheFlushed
)
