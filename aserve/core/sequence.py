"""A sequence while the scheduler knows it."""

from dataclasses import dataclass, field

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
    goal: tokens that its present prefill has to cover. num_published: its leading blocks that are readonly.
    prefix_tip: prefix id of the last published block, None once its chain left the table (key taken by other content).
    last_step: its newest launched step, right once it has given back its slot; before that ``SlotBook.last_step`` is.
    num_passed_over: steps in which a later one went before it. is_stalled: its reader does not read.
    """

    spec: SequenceSpec
    order: tuple[int, int]
    chain: DigestChain
    salt: str
    shares_prefix: bool
    state: SequenceState = SequenceState.WAITING
    output: list[int] = field(default_factory=list)
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

    @property
    def id(self) -> SequenceId:
        return self.spec.id

    @property
    def num_prompt(self) -> int:
        return len(self.spec.prompt)

    def __len__(self) -> int:
        return len(self.spec.prompt) + len(self.output)

    @property
    def is_over(self) -> bool:
        return self.state is SequenceState.FINISHED or self.state is SequenceState.RELEASED

    @property
    def max_length(self) -> int:
        return len(self.spec.prompt) + self.spec.params.max_tokens

    def tokens(self, start: int, end: int) -> NDArray[np.int32]:
        """Tokens [start, end) of prompt and output together."""
        prompt = self.spec.prompt
        if end <= len(prompt):
            return prompt[start:end]
        tail = np.array(self.output[max(0, start - len(prompt)) : end - len(prompt)], np.int32)
        return np.concatenate((prompt[start:], tail)) if start < len(prompt) else tail

    def move(self, step: SequenceMove, story: Story) -> None:
        self.state = move(SEQUENCE, "sequence", self.id, self.state, step, story)
