"""The one rule by which a sequence ends: which rows of a landing it may concern, and what it says of such a row."""

from collections.abc import KeysView

from aserve.core.actions import Finish
from aserve.core.plan import FLAG_DONE, FLAG_INVALID
from aserve.core.request import FinishReason
from aserve.core.sequence import Sequence


def may_end(tokens: list[int], flags: list[int], stop_ids: KeysView[int], vocab_size: int) -> list[int]:
    """Rows whose token may end their sequence before its length limit: all of those, and few others.

    tokens, flags: of each row. stop_ids: of all sequences that have a slot.
    """
    # Python's own loops: at the few hundred rows of a step numpy's calls cost more, most of all where they come in a
    # cold cache, as they do in a server.
    rows: list[int] = []
    if any(flags):
        rows += [row for row, flag in enumerate(flags) if flag]
    if not stop_ids.isdisjoint(tokens) or max(tokens) >= vocab_size or min(tokens) < 0:
        rows += [row for row, token in enumerate(tokens) if token in stop_ids or not 0 <= token < vocab_size]
    return rows


def judge(sequence: Sequence, position: int, token: int, flags: int, vocab_size: int) -> Finish | None:
    """How the sequence ends with the token at ``position``, or None; in ERROR the token does not count."""
    params = sequence.spec.params
    if flags & FLAG_INVALID or not 0 <= token < vocab_size:
        return Finish(sequence.id, FinishReason.ERROR, detail="The model gave no valid token.")
    num_output = position - sequence.num_prompt
    is_stop = num_output >= params.min_tokens and token in params.stop_token_ids
    is_end = num_output + 1 >= params.max_tokens
    if bool(flags & FLAG_DONE) != (is_stop or is_end):
        detail = f"Device and host disagree on whether token {num_output} is the last one."
        return Finish(sequence.id, FinishReason.ERROR, detail=detail)
    if is_stop and params.max_tokens:
        return Finish(sequence.id, FinishReason.STOP, stop_token=token)
    return Finish(sequence.id, FinishReason.LENGTH) if is_end else None
