"""Who computes what in a step's attention, worked out on the device once a step and read by every layer.

A row of one token becomes one or more *items*, ranges of its cached tokens; a chunk becomes *tiles* of queries. Grids
are sized for the worst case, programs beyond the plan's counts return at once: so a captured graph serves any lengths.
A long row among short ones is cut finer than they are, because the length of an item comes from the step's tokens
together: with N of them and a target of P items, no item has more than N / P tokens (rounded up to ITEM_TOKENS).

Shape suffixes: S sequences, W items, X tiles, F fields, H kv heads, G query heads a kv head, D head_dim.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.model.kernels.attention_tiles import ChunkTiles, DecodeTiles, target_programs

NUM_FIELDS: Final = 8
"""int32 words of an item or a tile: 32 bytes, one sector.

Item: query row, slot, first token, end, index of the split, number of splits, sequence, -.
Tile: first query row, slot, position of the first query, queries, -.
"""

ITEM_TOKENS: Final = 64
"""Items begin at multiples of it from their row's first token on: no attention kernel's step straddles two."""


@triton.jit(do_not_specialize=["num_sequences"])
def _plan_kernel(
    slots_ptr, starts_ptr, context_lens_ptr, items_ptr, tiles_ptr, counts_ptr, num_sequences,
    WINDOW: tl.constexpr, TARGET: tl.constexpr, FIXED: tl.constexpr, QUANTUM: tl.constexpr,
    TILE_QUERIES: tl.constexpr, F: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    sequence = tl.arange(0, BLOCK_S)
    inside = sequence < num_sequences
    start = tl.load(starts_ptr + sequence, mask=inside, other=0)
    num_queries = tl.load(starts_ptr + sequence + 1, mask=inside, other=0) - start
    context = tl.load(context_lens_ptr + sequence, mask=inside, other=0)
    slot = tl.load(slots_ptr + sequence, mask=inside, other=0)

    is_row = inside & (num_queries == 1)
    first = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else tl.zeros_like(context)
    num_tokens = tl.where(is_row, context - first, 0)
    length = FIXED if FIXED > 0 else tl.cdiv(tl.sum(num_tokens.to(tl.int64)), TARGET).to(tl.int32)
    length = tl.maximum(tl.cdiv(length, QUANTUM), 1) * QUANTUM
    num_splits = tl.maximum(tl.cdiv(num_tokens, length), 1)
    if FIXED == 0:  # even parts, whose last one is not a stump
        length = tl.maximum(tl.cdiv(tl.cdiv(num_tokens, num_splits), QUANTUM), 1) * QUANTUM
        num_splits = tl.maximum(tl.cdiv(num_tokens, length), 1)
    num_splits = tl.where(is_row, num_splits, 0)
    base = tl.cumsum(num_splits) - num_splits
    tl.store(counts_ptr, tl.sum(num_splits))
    for split in tl.range(0, tl.max(num_splits)):
        chosen = split < num_splits
        item_ptr = items_ptr + (base + split) * F
        begin = first + split * length
        tl.store(item_ptr, start, mask=chosen)
        tl.store(item_ptr + 1, slot, mask=chosen)
        tl.store(item_ptr + 2, begin, mask=chosen)
        tl.store(item_ptr + 3, tl.minimum(begin + length, context), mask=chosen)
        tl.store(item_ptr + 4, tl.zeros_like(base) + split, mask=chosen)
        tl.store(item_ptr + 5, num_splits, mask=chosen)
        tl.store(item_ptr + 6, sequence, mask=chosen)

    if TILE_QUERIES > 0:
        is_chunk = inside & (num_queries > 1) & (context > 0)
        num_tiles = tl.where(is_chunk, tl.cdiv(num_queries, TILE_QUERIES), 0)
        base = tl.cumsum(num_tiles) - num_tiles
        tl.store(counts_ptr + 1, tl.sum(num_tiles))
        for index in tl.range(0, tl.max(num_tiles)):
            chosen = index < num_tiles
            # The last queries see the most tokens: they go first, so that nobody starts a long tile at the end.
            tile_ptr = tiles_ptr + (base + num_tiles - 1 - index) * F
            query = index * TILE_QUERIES
            tl.store(tile_ptr, start + query, mask=chosen)
            tl.store(tile_ptr + 1, slot, mask=chosen)
            tl.store(tile_ptr + 2, context - num_queries + query, mask=chosen)
            tl.store(tile_ptr + 3, tl.minimum(num_queries - query, TILE_QUERIES), mask=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """One step's work and the scratch memory for it; steps that run one after another may share it.

    items_WF, tiles_XF: int32. counts_2: int32, items and tiles of the step. partial_WHGD, lse_WHG: float32, results of
    items whose row has several. arrivals_SH: int32, how many of a row's items are done; zero between launches.
    window: the plan's sliding window, 0 for none. tile_queries: queries of a tile, 0 without chunks.
    """

    items_WF: Tensor
    tiles_XF: Tensor
    counts_2: Tensor
    partial_WHGD: Tensor
    lse_WHG: Tensor
    arrivals_SH: Tensor
    decode_tiles: DecodeTiles
    chunk_tiles: ChunkTiles
    window: int
    tile_queries: int
    target_items: int
    fixed_tokens: int

    @classmethod
    def allocate(
        cls,
        *,
        num_sequences: int,
        num_chunk_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_multiprocessors: int,
        dtype: torch.dtype,
        decode_tiles: DecodeTiles | None = None,
        chunk_tiles: ChunkTiles | None = None,
        num_programs: int | None = None,
        window: int = 0,
        fixed_tokens: int = 0,
        context_max: int = 0,
        device: torch.device | str,
    ) -> "AttentionPlan":
        """For steps of at most so many sequences and tokens in chunks (0: none has more than one token).

        num_programs: about how many of them should share the rows' tokens, over all kv heads. It and the tiles come
        from the tables of ``attention_tiles``, unless given. fixed_tokens > 0 makes items of that length whatever else
        is in the step (a row's result then does not depend on its neighbours); ``context_max`` bounds their number.
        """
        group = num_heads // num_kv_heads
        decode_tiles = decode_tiles or DecodeTiles.of(head_dim=head_dim, dtype=dtype)
        chunk_tiles = chunk_tiles or ChunkTiles.of(head_dim=head_dim, dtype=dtype, num_tokens=num_chunk_tokens)
        assert group <= chunk_tiles.rows, f"{group} heads share a kv head, a tile has {chunk_tiles.rows} rows"
        num_programs = num_programs or target_programs(num_sequences, num_multiprocessors)
        target_items = max(1, num_programs // num_kv_heads)
        if fixed_tokens:
            num_items = num_sequences * triton.cdiv(context_max, fixed_tokens)
        else:
            num_items = num_sequences + target_items
        tile_queries = chunk_tiles.rows // group if num_chunk_tokens else 0
        num_tiles = num_sequences + num_chunk_tokens // tile_queries if tile_queries else 0

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            items_WF=zeros(num_items, NUM_FIELDS, dtype=torch.int32),
            tiles_XF=zeros(num_tiles, NUM_FIELDS, dtype=torch.int32),
            counts_2=zeros(2, dtype=torch.int32),
            partial_WHGD=zeros(num_items, num_kv_heads, group, head_dim, dtype=torch.float32),
            lse_WHG=zeros(num_items, num_kv_heads, group, dtype=torch.float32),
            arrivals_SH=zeros(num_sequences, num_kv_heads, dtype=torch.int32),
            decode_tiles=decode_tiles,
            chunk_tiles=chunk_tiles,
            window=window,
            tile_queries=tile_queries,
            target_items=target_items,
            fixed_tokens=fixed_tokens,
        )

    def fill(self, slots_S: Tensor, query_starts: Tensor, context_lens_S: Tensor) -> None:
        """Plan a step. query_starts: int32 [S + 1]; a sequence without queries takes no part.

        context_lens: the step's own tokens included. 0 marks a sequence that is done: its row's result will be zero,
        its chunk's is left as it is.
        """
        num_sequences = len(slots_S)
        _plan_kernel[(1,)](
            slots_S, query_starts, context_lens_S, self.items_WF, self.tiles_XF, self.counts_2, num_sequences,
            WINDOW=self.window, TARGET=self.target_items, FIXED=self.fixed_tokens, QUANTUM=ITEM_TOKENS,
            TILE_QUERIES=self.tile_queries, F=NUM_FIELDS, BLOCK_S=max(16, triton.next_power_of_2(num_sequences)),
            num_warps=4,
        )  # fmt: skip
