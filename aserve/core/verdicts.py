"""The one rule by which a sequence ends, applied to a whole landing at once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aserve.core.actions import Finish
from aserve.core.plan import FLAG_DONE, FLAG_INVALID, BatchResult
from aserve.core.request import FinishReason
from aserve.core.sequence import Sequence
from aserve.core.slots import SlotBook

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """bool [R] each. is_stop: a stop id past the minimum length. is_end: the length limit. is_bad: no valid token.

    disagrees: the device's done flag is not what the rule says. is_last: any of them.
    """

    is_stop: Mask
    is_end: Mask
    is_bad: Mask
    disagrees: Mask
    is_last: Mask

    def finish(self, row: int, sequence: Sequence, token: int) -> Finish:
        """How the sequence of a row with ``is_last`` ends; in ERROR its token does not count."""
        if self.is_bad[row]:
            return Finish(sequence.id, FinishReason.ERROR, detail="The model gave no valid token.")
        if self.disagrees[row]:
            detail = f"Device and host disagree on whether token {len(sequence.output)} is the last one."
            return Finish(sequence.id, FinishReason.ERROR, detail=detail)
        if self.is_stop[row] and sequence.spec.params.max_tokens:
            return Finish(sequence.id, FinishReason.STOP, stop_token=token)
        return Finish(sequence.id, FinishReason.LENGTH)


def judge(book: SlotBook, slots: NDArray[np.int32], result: BatchResult, vocab_size: int) -> Verdicts:
    """Verdicts on a landing's rows, of which row r belongs to ``slots[r]``. Rows of dead slots are judged too."""
    tokens, length = result.tokens[:, 0], book.length[slots]
    is_stop = np.logical_or.reduce(book.stop_ids[: book.num_stop_rows, slots] == tokens)
    is_stop &= length >= book.min_length[slots]
    is_end = length + 1 >= book.max_length[slots]
    # Without a sign a negative token is a large one.
    is_bad = ((result.flags & FLAG_INVALID) != 0) | (tokens.view(np.uint32) >= vocab_size)
    disagrees = ((result.flags & FLAG_DONE) != 0) != (is_stop | is_end)
    return Verdicts(
        is_stop=is_stop,
        is_end=is_end,
        is_bad=is_bad,
        disagrees=disagrees,
        is_last=is_stop | is_end | is_bad | disagrees,
    )
