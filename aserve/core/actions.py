"""What the scheduler wants done, imperative. The engine carries them out in order."""

from dataclasses import dataclass
from typing import Literal

from aserve.core.ids import SequenceId, StepNumber
from aserve.core.plan import BatchPlan, Logprobs
from aserve.core.request import FinishReason

LaunchReason = Literal["idle", "landing", "lead", "depth"]
"""Why a step is launched now: nothing was out; a step has just landed (others may be out); the predicted work of the
device has fallen to the lead; the policy wants more steps out than there are, whatever they take."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Hand the plan to the runner now, and tell by ``events.StepLaunched`` or ``LaunchFailed`` what came of it.

    lead_s: predicted work of the device before this step. predicted_s: what the step itself is predicted to take. None
    where the policy predicts nothing.
    """

    plan: BatchPlan
    reason: LaunchReason = "depth"
    lead_s: float | None = None
    predicted_s: float | None = None


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Tell by ``events.AlarmRang`` when ``when_s`` has come, and ask again by ``LaunchPossible``. The newest counts; no
    step is due before it, unless one lands."""

    when_s: float


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """The sequence left the waiting queue at ``at_s``; ``cached_tokens`` of its prompt came from the prefix cache.

    Comes again when a preempted sequence resumes (``resumed``): usage counts the first one only.
    """

    sequence: SequenceId
    cached_tokens: int
    resumed: bool
    at_s: float


@dataclass(frozen=True, slots=True)
class NoteRequeue:
    """A preempted sequence gave back its slot and blocks at ``at_s``: it waits, and StartPrefill comes again for it."""

    sequence: SequenceId
    at_s: float


@dataclass(frozen=True, slots=True)
class DeliverTokens:
    """The tokens that a landing brought, by column and in row order, at least one.

    rows: of ``logprobs``. num_decoded: so many of them come from decode rows, which no sequence's first token does.
    """

    step: StepNumber
    sequences: list[SequenceId]
    tokens: list[int]
    rows: list[int]
    num_decoded: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class DeliverPromptLogprobs:
    """Logprobs of the prompt's tokens from index ``first`` on (the first token of a prompt has none)."""

    sequence: SequenceId
    first: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Finish:
    """The sequence is over. Sent exactly once for each, after its last DeliverTokens.

    stop_token: the stop id that ended it, which is part of the output count but not of the text.
    """

    sequence: SequenceId
    reason: FinishReason
    stop_token: int | None = None
    detail: str = ""


Action = Launch | WakeAt | StartPrefill | NoteRequeue | DeliverTokens | DeliverPromptLogprobs | Finish
