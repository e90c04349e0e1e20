"""Everything that the core knows, in one place: what the stages read, and what they alone write."""

from aserve.core.admission import Limits
from aserve.core.blocks import BlockLedger
from aserve.core.counters import Counters
from aserve.core.done import DoneQueue
from aserve.core.ids import NO_STEP, SequenceId, Slot, StepNumber
from aserve.core.inflight import Inflight
from aserve.core.options import SchedulerOptions
from aserve.core.plan import MAIN_STREAM, PREFILL_STREAM
from aserve.core.prefix import PrefixTable
from aserve.core.ready import ReadyQueue
from aserve.core.sequence import Sequence
from aserve.core.sharing import PrefixSharing
from aserve.core.slots import SlotBook
from aserve.core.transitions import Story
from aserve.core.waiting import WaitingQueue


class State:
    """Base of the scheduler, for the stages that it calls: ``entry``, ``composing``, ``landing`` and ``leaving``.

    num_blocks: KV blocks of the pool. vocab_size bounds the tokens that a landing may bring.
    streams: of the device. marked: PREEMPTING, preempted or on the way to parking: newest step not landed. leaves:
    retired slots that no plan has told the device yet. watermark: blocks that stay free at an admission.
    prefill_is_next: where steps hold either rows or chunks, whose turn it is: theirs that the newest step did not hold.
    """

    def __init__(self, options: SchedulerOptions, *, num_blocks: int, max_model_len: int, vocab_size: int) -> None:
        self.options = options = options.with_sizes()
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.story = Story()
        self.prefix = PrefixTable(options.hash_bits)
        self.ledger = BlockLedger(num_blocks, self.prefix, self.story)
        self.slots = SlotBook(options.max_num_seqs, max_model_len, self.story)
        self.waiting = WaitingQueue()
        self.streams = (MAIN_STREAM, PREFILL_STREAM) if options.prefill == "streams" else (MAIN_STREAM,)
        self.ready = ReadyQueue(self.slots, options)
        self.sharing = PrefixSharing(self.ledger, self.slots, options.block_size)
        self.inflight = Inflight(options.max_inflight)
        self.done = DoneQueue()
        self.parked: dict[SequenceId, Sequence] = {}
        self.sequences: dict[SequenceId, Sequence] = {}
        self.counters = Counters()
        self.newest_step = NO_STEP
        self.marked: list[Sequence] = []
        self.leaves: list[Slot] = []
        self.watermark = int(options.watermark * num_blocks)
        self.prefill_is_next = False

    @property
    def landed(self) -> StepNumber:
        return self.ledger.landed

    @property
    def is_idle(self) -> bool:
        return not (len(self.waiting) or len(self.ready) or len(self.inflight) or self.parked)

    def length_of(self, sequence: Sequence) -> int:
        """Its tokens so far, prompt included."""
        return len(sequence.history) if sequence.slot is None else int(self.slots.length[sequence.slot])

    def limits(self, max_queue_requests: int = 0, max_queue_tokens: int = 0) -> Limits:
        pool_tokens = self.ledger.num_blocks * self.options.block_size
        return Limits(self.max_model_len, pool_tokens, max_queue_requests, max_queue_tokens)


def slot_of(sequence: Sequence) -> Slot:
    assert sequence.slot is not None, f"sequence {sequence.id} owns no slot"
    return sequence.slot
