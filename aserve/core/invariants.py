"""An independent recount of the core's state. Every fixture runs it; debug builds run it while serving."""

from collections import Counter

from aserve.core.ids import BlockId
from aserve.core.inflight import InflightStep
from aserve.core.state import State
from aserve.core.transitions import BlockState, SequenceState, SlotState
from aserve.errors import InvariantViolated

_RUNNING = (SequenceState.PREFILLING, SequenceState.DECODING, SequenceState.PREEMPTING)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise InvariantViolated(sentence)


def check(core: State) -> None:
    """Raise InvariantViolated if anything disagrees with a recount from scratch. Costs a pass over all blocks."""
    _check_blocks(core)
    _check_queues(core)
    _check_slots(core)
    _check_streams(core)
    if core.is_idle:
        _check_idle(core)


def check_reads(core: State, step: InflightStep) -> None:
    """I8: no block that a step was composed with was handed out again before the step landed."""
    assert step.reads is not None
    blocks, generations = step.reads
    changed = blocks[core.ledger.generation[blocks] != generations]
    _require(not len(changed), f"step {step.plan.step} read blocks {changed.tolist()} that were handed out again")
    free = [block for block in blocks.tolist() if core.ledger.state(BlockId(block)) is BlockState.FREE]
    _require(not free, f"step {step.plan.step} read blocks {free} that had become free")


def _check_blocks(core: State) -> None:
    ledger = core.ledger
    blocks = [BlockId(block) for block in range(1, ledger.num_blocks + 1)]
    states = Counter(ledger.state(block) for block in blocks)
    counted = (states[BlockState.FREE], states[BlockState.CACHED], states[BlockState.PENDING])
    kept = (ledger.num_free, ledger.num_cached, ledger.num_pending)
    _require(counted == kept, f"free, cached, pending blocks: counted {counted}, the ledger says {kept}")
    users: Counter[BlockId] = Counter(block for s in core.ready for block in s.blocks)
    for block in blocks:
        state, references = ledger.state(block), ledger.references(block)
        if state is BlockState.READONLY:
            _require(references == users[block] >= 1, f"block {block}: {references} references, {users[block]} users")
        else:
            _require(references == 0, f"block {block} is {state} with {references} references")
        if state is BlockState.WRITING:
            _require(users[block] == 1, f"block {block} is writing with {users[block]} owners")
        if state in (BlockState.FREE, BlockState.CACHED, BlockState.PENDING):
            _require(users[block] == 0, f"block {block} is {state} but listed by a sequence")
        if state is BlockState.PENDING:
            _require(ledger.fence(block) > ledger.landed, f"block {block} is pending behind a fence that has passed")
        if state is BlockState.CACHED:
            _require(core.prefix.has(block), f"block {block} is cached without a hash")
    for block in core.prefix.blocks():
        held = ledger.state(block) in (BlockState.READONLY, BlockState.CACHED)
        _require(held, f"block {block} is in the prefix table but {ledger.state(block)}")


def _check_queues(core: State) -> None:
    waiting, ready = list(core.waiting), list(core.ready)
    for name, queue in (("waiting", waiting), ("ready", ready)):
        orders = [sequence.order for sequence in queue]
        _require(orders == sorted(orders), f"the {name} queue is out of order")
    _require(all(s.state is SequenceState.WAITING for s in waiting), "a sequence in the waiting queue is not waiting")
    _require(all(not s.blocks and s.slot is None for s in waiting), "a waiting sequence owns blocks or a slot")
    _require(all(s.state in _RUNNING for s in ready), "a sequence in the ready queue does not run")
    tokens = sum(s.num_uncached_at_door for s in waiting)
    _require(tokens == core.waiting.num_tokens, f"{tokens} tokens wait, the queue says {core.waiting.num_tokens}")
    parked = core.parked.values()
    _require(all(s.state is SequenceState.PARKED and s.is_stalled for s in parked), "a parked sequence is not stalled")
    _require(all(not s.blocks and s.slot is None for s in parked), "a parked sequence owns blocks or a slot")
    num_known = len(waiting) + len(ready) + len(parked) + len(core.done)
    _require(num_known == len(core.sequences), f"{num_known} sequences in queues, {len(core.sequences)} known")


def _check_slots(core: State) -> None:
    book, size = core.slots, core.options.block_size
    states = Counter(book.state)
    counted = (states[SlotState.FREE], states[SlotState.RETIRING], states[SlotState.BOUND])
    kept = (book.num_free, book.num_retiring, len(core.ready))
    _require(counted == kept, f"free, retiring, bound slots: counted {counted}, kept {kept}")
    num_rows: Counter[int] = Counter()
    num_computed: dict[int, int] = {}  # of slots in flight: where the oldest step that lists them starts
    for step in core.inflight:
        num_rows.update(step.rows.slots[step.rows.owned()].tolist())
        starts = [*step.plan.rows.tolist(), *((chunk.slot, chunk.start) for chunk in step.plan.chunks)]
        for slot, start in starts:
            num_computed[slot] = min(num_computed.get(slot, start), start)
    for sequence in core.ready:
        slot = sequence.slot
        assert slot is not None
        _require(book.owner[slot] is sequence, f"slot {slot} is not owned by sequence {sequence.id}, which claims it")
        position, length = int(book.position[slot]), int(book.length[slot])
        came_with = book.tokens[slot, : sequence.goal].tolist()
        _require(came_with == sequence.history.tolist(), f"slot {slot} does not hold the tokens that it was bound with")
        capacity = len(sequence.blocks) * size
        room = min(capacity, sequence.max_length - 1)
        _require(int(book.room[slot]) == room, f"slot {slot}: room for {book.room[slot]} tokens, not {room}")
        _require(position <= capacity, f"slot {slot} was launched beyond its blocks")
        computed = min(num_computed.get(slot, position), position)
        if sequence.num_published * size > computed:
            raise InvariantViolated(f"sequence {sequence.id} published blocks that are not computed")
        _require(sequence.num_published == computed // size, f"sequence {sequence.id} keeps full blocks unpublished")
        # The token that each row in flight samples comes behind all that are launched.
        unlanded = position + 1 - length if position >= sequence.goal else 0
        _require(num_rows[slot] == unlanded, f"slot {slot}: {num_rows[slot]} rows in flight, not {unlanded}")
        readable = [core.ledger.state(block) is BlockState.READONLY for block in sequence.blocks]
        expected = [index < sequence.num_published for index in range(len(readable))]
        _require(
            readable == expected,
            f"sequence {sequence.id}: its readonly blocks are not its {sequence.num_published} published",
        )
    stop_ids = Counter(token for sequence in core.ready for token in sequence.spec.params.stop_token_ids)
    _require(book.stop_ids == stop_ids, "the stop ids are not those of the bound sequences")


def _check_streams(core: State) -> None:
    """Nothing orders steps of two streams: they list no slot in common, and fences ask for both."""
    slots: dict[int, set[int]] = {}
    for step in core.inflight:
        listed = [*step.plan.rows[:, 0].tolist(), *(chunk.slot for chunk in step.plan.chunks)]
        slots.setdefault(step.plan.stream, set()).update(listed)
    common = set.intersection(*slots.values()) if len(slots) > 1 else set()
    _require(not common, f"slots {sorted(common)} are in flight on two streams")
    oldest = min((step.plan.step for step in core.inflight), default=core.newest_step + 1)
    _require(core.landed == oldest - 1, f"step {oldest} has not landed, but {core.landed} steps count as landed")


def _check_idle(core: State) -> None:
    """I1 and I4: at idle nothing is writing, readonly or pending, and everything has been given back."""
    ledger = core.ledger
    _require(ledger.num_free + ledger.num_cached == ledger.num_blocks, "blocks are held though nothing runs")
    _require(core.slots.num_free == core.slots.max_num_seqs, "slots are held though nothing runs")
    _require(not core.sequences, f"{len(core.sequences)} sequences are known though nothing runs")
    _require(core.waiting.num_tokens == 0, "tokens wait though nothing waits")
