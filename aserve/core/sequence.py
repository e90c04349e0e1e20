"""A sequence while the scheduler knows it."""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aserve.core.ids import NO_STEP, BlockId, SequenceId, Slot, StepNumber
from aserve.core.prefix import ROOT, DigestChain
from aserve.core.request import SequenceSpec
from aserve.core.transitions import SEQUENCE, SequenceMove, SequenceState, Story, move


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """An identity, written by the scheduler only.

    order: the place in policy order, smaller first; kept over preemption. chain: digests of its full blocks.
    history: int32, prompt and output as of when it last got or gave back a slot; what comes between is in
    ``SlotBook.tokens``. goal: tokens that its present prefill has to cover, all of ``history``. num_published: its
    leading blocks that are readonly.
    prefix_tip: prefix id of the last published block, None once its chain left the table (key taken by other content).
    last_step: its newest launched step, right once it has given back its slot; before that ``SlotBook.last_step`` is.
    num_passed_over: steps in which a later one went before it. is_stalled: its reader does not read.
    """

    spec: SequenceSpec
    order: tuple[int, int]
    chain: DigestChain
    salt: str
    shares_prefix: bool
    history: NDArray[np.int32] = field(init=False)
    state: SequenceState = SequenceState.WAITING
    slot: Slot | None = None
    blocks: list[BlockId] = field(default_factory=list)
    goal: int = 0
    last_step: StepNumber = NO_STEP
    num_published: int = 0
    prefix_tip: int | None = ROOT
    join_due: bool = False
    num_admissions: int = 0
    num_preemptions: int = 0
    is_stalled: bool = False
    num_passed_over: int = 0
    num_prompt_logprobs: int = 0
    num_uncached_at_door: int = 0

    def __post_init__(self) -> None:
        self.history = self.spec.prompt

    @property
    def id(self) -> SequenceId:
        return self.spec.id

    @property
    def num_prompt(self) -> int:
        return len(self.spec.prompt)

    @property
    def is_over(self) -> bool:
        return self.state is SequenceState.FINISHED or self.state is SequenceState.RELEASED

    @property
    def max_length(self) -> int:
        return len(self.spec.prompt) + self.spec.params.max_tokens

    def move(self, step: SequenceMove, story: Story) -> None:
        self.state = move(SEQUENCE, "sequence", self.id, self.state, step, story)


by_order: Final = attrgetter("order")
"""The key of every queue in policy order."""
