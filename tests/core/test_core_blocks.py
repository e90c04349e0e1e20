"""The KV ledger and the prefix table: each move of a block, its fence, and who may hit what."""

import pytest

from aserve.core.blocks import BlockLedger
from aserve.core.ids import NO_STEP, BlockId, StepNumber
from aserve.core.prefix import ROOT, PrefixEntry, PrefixTable
from aserve.core.transitions import BlockState, Story


@pytest.fixture
def ledger():
    return BlockLedger(8, PrefixTable(), Story())


def published(ledger: BlockLedger, tokens: bytes | None = b"tokens", *, parent: int = ROOT) -> BlockId:
    """A readonly block with one reference; hashed by its tokens unless they are None."""
    [block] = ledger.allocate(1)
    ledger.publish(block)
    if tokens is not None:
        ledger.prefix.enter(tokens.ljust(32, b"\0"), parent, tokens, "", block)
    return block


def cached(ledger: BlockLedger, tokens: bytes, *, fence: int = 0) -> BlockId:
    block = published(ledger, tokens)
    ledger.release(block, StepNumber(fence))
    return block


# --- moves and fences


def test_an_allocated_block_has_one_writer_and_a_new_generation(ledger):
    """free -> writing: no references, and a generation that it never had before."""
    [block] = ledger.allocate(1)

    assert (ledger.state(block), ledger.references(block)) == (BlockState.WRITING, 0)
    assert ledger.generation[block] == 1


def test_each_allocation_of_a_block_is_another_generation():
    """A block that comes round again can be told from its earlier lives."""
    ledger = BlockLedger(1, PrefixTable(), Story())
    for expected in (1, 2, 3):
        [block] = ledger.allocate(1)
        assert ledger.generation[block] == expected
        ledger.release(block, NO_STEP)


def test_too_large_an_allocation_takes_nothing(ledger):
    """Nine of eight blocks: None, nothing allocated and nothing evicted."""
    block = cached(ledger, b"a")

    assert ledger.allocate(9) is None
    assert (ledger.num_free, ledger.state(block)) == (7, BlockState.CACHED)


def test_a_given_up_block_waits_for_its_owners_newest_step(ledger):
    """writing -> pending -> free, at the landing of the fence and not a step earlier."""
    [block] = ledger.allocate(1)
    ledger.release(block, StepNumber(5))
    states = []
    for landed in (4, 5):
        ledger.advance(StepNumber(landed))
        states.append(ledger.state(block))

    assert states == [BlockState.PENDING, BlockState.FREE]


def test_a_block_whose_fence_has_passed_is_free_in_the_same_call(ledger):
    """Nothing in flight can touch it, so it does not wait."""
    ledger.advance(StepNumber(5))
    [block] = ledger.allocate(1)
    ledger.release(block, StepNumber(5))

    assert (ledger.state(block), ledger.num_free) == (BlockState.FREE, 8)


def test_the_last_reference_decides(ledger):
    """readonly stays so while somebody refers to it; then it is cached if hashed, and pending if not."""
    hashed, private = published(ledger), published(ledger, None)
    ledger.acquire(hashed)
    ledger.release(hashed, StepNumber(3))
    shared = (ledger.state(hashed), ledger.references(hashed))
    ledger.release(hashed, StepNumber(2))
    ledger.release(private, StepNumber(2))

    assert shared == (BlockState.READONLY, 1)
    assert (ledger.state(hashed), ledger.references(hashed)) == (BlockState.CACHED, 0)
    assert ledger.state(private) is BlockState.PENDING


def test_a_fence_is_the_newest_of_all_owners(ledger):
    """An early owner's later step still counts when the last owner leaves with an older one."""
    block = published(ledger)
    ledger.acquire(block)
    ledger.release(block, StepNumber(7))
    ledger.release(block, StepNumber(2))

    assert ledger.fence(block) == 7


def test_a_hit_needs_no_fence(ledger):
    """cached -> readonly even while its last owner's step is in flight: readers do not disturb each other."""
    block = cached(ledger, b"a", fence=9)
    ledger.acquire(block)

    assert (ledger.state(block), ledger.references(block), ledger.num_cached) == (BlockState.READONLY, 1, 0)


# --- eviction


def test_the_longest_unused_block_is_evicted_first(ledger):
    """Order of release, not of allocation; a hit and its release make a block the newest."""
    first, second, third = (cached(ledger, tokens) for tokens in (b"a", b"b", b"c"))
    ledger.acquire(first)
    ledger.release(first, NO_STEP)
    ledger.allocate(5 + 1)

    assert [ledger.prefix.has(block) for block in (first, second, third)] == [True, False, True]


def test_blocks_behind_a_fence_are_not_evicted(ledger):
    """Evicting them frees nothing yet; they are coming, not available."""
    fenced, passed = cached(ledger, b"a", fence=4), cached(ledger, b"b")

    assert (ledger.num_available, ledger.num_coming) == (7, 1)
    assert ledger.allocate(7) is not None
    assert (ledger.state(fenced), ledger.state(passed)) == (BlockState.CACHED, BlockState.WRITING)
    ledger.advance(StepNumber(4))
    assert ledger.allocate(1) == [fenced]


def test_an_evicted_block_leaves_the_table_in_the_same_call(ledger):
    """Whoever is handed the block, nobody can hit it any more."""
    block = cached(ledger, b"a")
    ledger.allocate(8)

    assert (len(ledger.prefix), ledger.state(block)) == (0, BlockState.WRITING)


def test_a_flush_forgets_all_and_takes_nothing_from_users(ledger):
    """Cached blocks go, behind their fences; blocks in use stay with their users and are not cached afterwards."""
    used, fenced, passed = published(ledger, b"a"), cached(ledger, b"b", fence=3), cached(ledger, b"c")
    flushed = ledger.flush()
    states = [ledger.state(block) for block in (used, fenced, passed)]
    ledger.release(used, NO_STEP)

    assert flushed == 2
    assert len(ledger.prefix) == 0
    assert states == [BlockState.READONLY, BlockState.PENDING, BlockState.FREE]
    assert ledger.state(used) is BlockState.FREE


# --- the prefix table


def entry(table: PrefixTable, tokens: bytes, block: int, *, parent: int = ROOT, salt: str = "") -> PrefixEntry | None:
    return table.enter(tokens.ljust(32, b"\0"), parent, tokens, salt, BlockId(block))


@pytest.mark.parametrize(
    ("tokens", "parent", "salt"), [(b"other", ROOT, ""), (b"tokens", ROOT + 1, ""), (b"tokens", ROOT, "salt")]
)
def test_a_hit_compares_all_content(tokens, parent, salt):
    """With one bit of hash half of all keys collide: the same key and other tokens, parent or salt is no hit."""
    table = PrefixTable(hash_bits=1)
    digest = bytes(32)
    table.enter(digest, ROOT, b"tokens", "", BlockId(1))

    assert table.find(digest, ROOT, b"tokens", "").block == 1
    assert table.find(digest, parent, tokens, salt) is None


def test_a_taken_key_leaves_the_newcomer_private():
    """The first entry stays, the second block is not in the table."""
    table = PrefixTable(hash_bits=1)

    assert entry(table, b"\x01", 1) is not None
    assert entry(table, b"\x02", 2) is None
    assert table.blocks() == [1]


def test_a_prefix_id_is_never_used_twice():
    """A child of an evicted parent cannot be hit through a new parent of the same content."""
    table = PrefixTable()
    first = entry(table, b"parent", 1)
    entry(table, b"child", 2, parent=first.prefix_id)
    table.remove(BlockId(1))
    second = entry(table, b"parent", 3)

    assert second.prefix_id != first.prefix_id
    assert table.find(b"child".ljust(32, b"\0"), second.prefix_id, b"child", "") is None
