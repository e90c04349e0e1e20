"""Products of steps with few rows, where reading weights is what takes time: a norm, a product and what follows in one.

The residual stream travels in three parts: the sum itself, the same times the gain of the norm that comes next, and the
sums of its squares by tile of channels. A norm is then one factor a row behind the product, and no kernel of its own.
One row goes through the plain cores, more go through the tensor cores, with the weight as the tall operand.

Where the device can, a kernel is launched ``EARLY``, before the one in front has ended (programmatic dependent launch,
CUDA Programming Guide): it waits inside, and reads nothing that others wrote until all that came before is done.

Shape suffixes: T rows, K inputs of a product, N outputs, C channels of the stream, X tiles of them, V vocabulary,
I intermediate size, J = 2 I.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aserve.model.kernels.early import can_begin_early, early_launch, let_next_begin, wait_for_former
from aserve.model.kernels.few_rows_tiles import ProductTiles, channel_tile, parted_programs_max

MAX_ROWS: Final = 64
"""With more, the library's products are as fast: arithmetic begins to count."""


_HOLDING_INPUTS = tl.constexpr(2048)
"""One row's loops that go through fewer inputs at a time hold nothing meanwhile: their programs are small and many, and
registers held by each are the room of one in eight (8B: 3.93 ms a step with them, 3.78 without)."""


@triton.jit
def _weights(row_ptr, k, inside, K: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        weight = tl.load(row_ptr + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
    else:
        weight = tl.load(row_ptr + k[None, :], mask=inside[:, None], other=0.0)
    return weight.to(tl.float32)


@triton.jit
def _inputs(x_ptr, k, K: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    else:
        x = tl.load(x_ptr + k)
    return x.to(tl.float32)[None, :]


@triton.jit
def _row_product(
    x_ptr, weight_ptr, output, inside, also_ptrs, has_also, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row by the weight's rows ``output``, float32 [BLOCK_N, 1]; and what lies at ``also_ptrs``, as _product does.

    The next kernel may begin at once: programs of one row are small and many, and fill what room there is evenly.
    """
    place = tl.arange(0, BLOCK_K)
    row_ptr = weight_ptr + output.to(tl.int64)[:, None] * K
    if BLOCK_K >= K:
        # Weights are nobody's result: they are on their way while the kernel in front still runs.
        weight = _weights(row_ptr, place, inside, K, BLOCK_K > K)
        wait_for_former(EARLY)
        let_next_begin(EARLY)
        also = tl.load(also_ptrs, mask=has_also, other=0.0)
        acc = weight * _inputs(x_ptr, place, K, BLOCK_K > K)
    else:
        wait_for_former(EARLY)
        let_next_begin(EARLY)
        HOLDS_ALSO: tl.constexpr = BLOCK_K >= _HOLDING_INPUTS
        if HOLDS_ALSO:
            also = tl.load(also_ptrs, mask=has_also, other=0.0)
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            k = start + place
            acc += _weights(row_ptr, k, inside, K, K % BLOCK_K != 0) * _inputs(x_ptr, k, K, K % BLOCK_K != 0)
        if not HOLDS_ALSO:
            also = tl.load(also_ptrs, mask=has_also, other=0.0)
    return tl.sum(acc, 1)[:, None], also


@triton.jit
def _product(
    x, weight, first_output, also_ptrs, has_also, N: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, NUM_STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Outputs from ``first_output`` on over this program's part of the inputs, float32 [BLOCK_N, BLOCK_T]; and what
    lies at ``also_ptrs``: needed behind the product, asked for ahead of it, so that nobody waits for its way here.

    x, weight: pointers for one row, descriptors for more.
    """
    if BLOCK_T == 1:
        output = first_output + tl.arange(0, BLOCK_N)
        acc, also = _row_product(
            x, weight, output, output < N, also_ptrs, has_also, K, BLOCK_N, BLOCK_K, NUM_STAGES, EARLY
        )  # fmt: skip
    else:
        LENGTH: tl.constexpr = (K + BLOCK_K * PARTS - 1) // (BLOCK_K * PARTS) * BLOCK_K
        begin = tl.program_id(1) * LENGTH
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        wait_for_former(EARLY)
        also = tl.load(also_ptrs, mask=has_also, other=0.0)
        # What lies outside of the tensors is read as zeros.
        for k in tl.range(begin, begin + LENGTH, BLOCK_K, num_stages=NUM_STAGES):
            acc = tl.dot(weight.load([first_output, k]), x.load([0, k]).T, acc)
        let_next_begin(EARLY)
    return acc, also


@triton.jit
def _is_last(acc, output, row, partial_ptr, arrival_ptr, N: tl.constexpr, BLOCK_T: tl.constexpr, PARTS: tl.constexpr):
    """Leaves this program's part in the scratch memory, and says whether all of the tile are there now."""
    place = output[:, None] * BLOCK_T + row[None, :]
    part_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * N * BLOCK_T
    tl.store(part_ptr + place, acc, mask=(output < N)[:, None])
    tl.debug_barrier()  # all threads' stores come before the one thread's count
    is_last = tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") == PARTS - 1
    if is_last:
        tl.store(arrival_ptr, 0)
    return is_last


@triton.jit
def _sum_of_parts(
    output, row, partial_ptr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PARTS: tl.constexpr
):
    """In rising order, whoever came last."""
    place = output[:, None] * BLOCK_T + row[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for part in tl.static_range(PARTS):
        part_ptr = partial_ptr + part * N * BLOCK_T
        acc += tl.load(part_ptr + place, mask=(output < N)[:, None], other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def _squares_at(squares_ptr, row, num_rows, X: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_T: tl.constexpr):
    """Where the sums of each row's squares lie, by tile of channels, and which there are, [BLOCK_X, BLOCK_T]."""
    tile = tl.arange(0, BLOCK_X)
    if BLOCK_T == 1:
        # One row's lie side by side, which is worth saying: they are read four at a time.
        return squares_ptr + tile[:, None], (tile < X)[:, None]
    else:
        return squares_ptr + tile[:, None] * num_rows + row[None, :], (tile < X)[:, None] & (row < num_rows)[None, :]


@triton.jit
def _norm_factor(squares, eps, C: tl.constexpr):
    """1 / root mean square of each row of the stream, [1, BLOCK_T]."""
    return tl.rsqrt(tl.sum(squares, 0) / C + eps)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _norm_product_kernel(
    x, squares_ptr, weight, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, num_rows, eps,
    N: tl.constexpr, K: tl.constexpr, X: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr, PARTS: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    output, row = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    squares_ptrs, has_squares = _squares_at(squares_ptr, row, num_rows, X, BLOCK_X, BLOCK_T)
    acc, squares = _product(
        x, weight, tile * BLOCK_N, squares_ptrs, has_squares, N, K, BLOCK_T, BLOCK_N, BLOCK_K, PARTS, NUM_STAGES, EARLY
    )  # fmt: skip
    if PARTS > 1:
        if not _is_last(acc, output, row, partial_ptr, arrivals_ptr + tile, N, BLOCK_T, PARTS):
            return
        acc = _sum_of_parts(output, row, partial_ptr, N, BLOCK_N, BLOCK_T, PARTS)
    acc *= _norm_factor(squares, eps, K)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + output, mask=output < N, other=0.0).to(tl.float32)[:, None]
    inside = (output < N)[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptr + row[None, :] * N + output[:, None], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    x, squares_ptr, weight, bias_ptr, out_ptr, num_rows, eps,
    I: tl.constexpr, K: tl.constexpr, X: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,  # noqa: E741
    BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    output, row = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    squares_ptrs, has_squares = _squares_at(squares_ptr, row, num_rows, X, BLOCK_X, BLOCK_T)
    if BLOCK_T == 1:
        # A gate and its up side by side, so that the row is gone through once for both.
        both = tl.arange(0, 2 * BLOCK_N)
        column = tile * BLOCK_N + both // 2
        acc, squares = _row_product(
            x, weight, column + both % 2 * I, column < I, squares_ptrs, has_squares, K, 2 * BLOCK_N, BLOCK_K,
            NUM_STAGES, EARLY,
        )  # fmt: skip
        gate, up = tl.split(tl.reshape(acc, [BLOCK_N, 2]))
        gate, up = gate[:, None], up[:, None]
    else:
        gate, up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32), tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        wait_for_former(EARLY)
        squares = tl.load(squares_ptrs, mask=has_squares, other=0.0)
        for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            x_KT = x.load([0, k]).T
            gate = tl.dot(weight.load([tile * BLOCK_N, k]), x_KT, gate)
            up = tl.dot(weight.load([I + tile * BLOCK_N, k]), x_KT, up)
        let_next_begin(EARLY)
    factor = _norm_factor(squares, eps, K)
    gate, up = gate * factor, up * factor
    if HAS_BIAS:
        gate += tl.load(bias_ptr + output, mask=output < I, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_ptr + I + output, mask=output < I, other=0.0).to(tl.float32)[:, None]
    inside = (output < I)[:, None] & (row < num_rows)[None, :]
    product = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row[None, :] * I + output[:, None], product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _product_add_kernel(
    x, weight, bias_ptr, residual_ptr, gain_ptr, scaled_ptr, squares_ptr, partial_ptr, arrivals_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    output, row = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    inside = (output < N)[:, None] & (row < num_rows)[None, :]
    place = row[None, :] * N + output[:, None]
    gain = tl.load(gain_ptr + output, mask=output < N, other=0.0).to(tl.float32)[:, None]
    acc, residual = _product(
        x, weight, tile * BLOCK_N, residual_ptr + place, inside, N, K, BLOCK_T, BLOCK_N, BLOCK_K, PARTS, NUM_STAGES,
        EARLY,
    )  # fmt: skip
    if PARTS > 1:
        if not _is_last(acc, output, row, partial_ptr, arrivals_ptr + tile, N, BLOCK_T, PARTS):
            return
        acc = _sum_of_parts(output, row, partial_ptr, N, BLOCK_N, BLOCK_T, PARTS)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + output, mask=output < N, other=0.0).to(tl.float32)[:, None]
    acc += residual.to(tl.float32)
    # The sum as the stream keeps it, so that what is normalised is what the next layer adds to.
    stored = acc.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + place, stored, mask=inside)
    kept = tl.where(inside, stored.to(tl.float32), 0.0)
    tl.store(scaled_ptr + place, (kept * gain).to(scaled_ptr.dtype.element_ty), mask=inside)
    tl.store(squares_ptr + tile * num_rows + row, tl.sum(kept * kept, 0), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _embed_kernel(
    ids_ptr, embedding_ptr, gain_ptr, residual_ptr, scaled_ptr, squares_ptr, num_rows,
    C: tl.constexpr, X: tl.constexpr, BLOCK_C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    token = tl.load(ids_ptr + row).to(tl.int64)
    stored = tl.load(embedding_ptr + token * C + channel, mask=inside, other=0.0)
    tl.store(residual_ptr + row * C + channel, stored, mask=inside)
    kept = stored.to(tl.float32)
    gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + row * C + channel, (kept * gain).to(scaled_ptr.dtype.element_ty), mask=inside)
    squares = tl.sum(tl.reshape(kept * kept, [BLOCK_C // TILE, TILE]), 1)
    tile = tl.arange(0, BLOCK_C // TILE)
    tl.store(squares_ptr + tile * num_rows + row, squares, mask=tile < X)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The residual stream of a step's rows: the sum, and it times the gain of the norm that comes next, rounded."""

    residual_TC: Tensor
    scaled_TC: Tensor


class FewRowsProducts:
    """The products of one device's steps, and the memory that they share: of steps that run one after another.

    All tensors are contiguous, and of one type that has to have float32's range (the stream times a gain is not a norm
    yet). Of a step, ``embed`` comes first: it and every ``product_add`` leave the squares that the next norm takes.
    """

    def __init__(
        self, *, num_channels: int, num_multiprocessors: int, device: torch.device, early: bool | None = None
    ) -> None:
        """early: whether kernels begin before the ones in front have ended; where the device can, unless given."""
        self.early = can_begin_early(device) if early is None else early
        self._num_channels = num_channels
        self._num_multiprocessors = num_multiprocessors
        num_tiles = max(triton.cdiv(num_channels, channel_tile(num_rows)) * num_rows for num_rows in (1, MAX_ROWS))
        num_programs = parted_programs_max(num_multiprocessors)
        self._squares_XT = torch.zeros(num_tiles, dtype=torch.float32, device=device)
        self._partial = torch.zeros(
            num_programs * channel_tile(MAX_ROWS) * MAX_ROWS, dtype=torch.float32, device=device
        )
        self._arrivals = torch.zeros(num_programs, dtype=torch.int32, device=device)

    def embed(self, token_ids_T: Tensor, embedding_VC: Tensor, next_gain_C: Tensor, *, stream: Stream) -> None:
        """residual = embedding[token_ids]. Ids have to lie in the vocabulary."""
        num_rows, num_channels = stream.residual_TC.shape
        block, tile = triton.next_power_of_2(num_channels), channel_tile(num_rows)
        _embed_kernel[(num_rows,)](
            token_ids_T, embedding_VC, next_gain_C, stream.residual_TC, stream.scaled_TC, self._squares_XT, num_rows,
            C=num_channels, X=triton.cdiv(num_channels, tile), BLOCK_C=max(block, tile), TILE=tile, num_warps=4,
        )  # fmt: skip

    def norm_product(
        self,
        stream: Stream,
        eps: float,
        weight_NC: Tensor,
        bias_N: Tensor | None,
        *,
        tiles: ProductTiles | None = None,
        out_TN: Tensor,
    ) -> None:
        """out = rms_norm(residual) * gain, times weight^T, + bias; of any type."""
        num_rows, num_inputs = stream.scaled_TC.shape
        tiles = tiles or self._tiles(num_rows, weight_NC)
        x, weight = _operands(stream.scaled_TC, weight_NC, tiles)
        _norm_product_kernel[_grid(weight_NC, tiles)](
            x, self._squares_XT, weight, bias_N, out_TN, self._partial, self._arrivals, num_rows, eps,
            N=len(weight_NC), K=num_inputs, **self._norm(num_rows), HAS_BIAS=bias_N is not None,
            PARTS=tiles.parts, **_blocks(tiles), **early_launch(self.early),
        )  # fmt: skip

    def norm_gate_up(
        self,
        stream: Stream,
        eps: float,
        weight_JC: Tensor,
        bias_J: Tensor | None,
        *,
        tiles: ProductTiles | None = None,
        out_TI: Tensor,
    ) -> None:
        """out = silu(gate) * up of rms_norm(residual) * gain. weight: gate's rows, then up's."""
        num_rows, num_inputs = stream.scaled_TC.shape
        size = len(weight_JC) // 2
        tiles = tiles or ProductTiles.of_pairs(num_rows=num_rows, num_inputs=num_inputs)
        x, weight = _operands(stream.scaled_TC, weight_JC, tiles)
        _gate_up_kernel[(triton.cdiv(size, tiles.outputs),)](
            x, self._squares_XT, weight, bias_J, out_TI, num_rows, eps,
            I=size, K=num_inputs, **self._norm(num_rows), HAS_BIAS=bias_J is not None, **_blocks(tiles),
            **early_launch(self.early),
        )  # fmt: skip

    def product_add(
        self,
        x_TK: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        next_gain_C: Tensor,
        *,
        tiles: ProductTiles | None = None,
        stream: Stream,
    ) -> None:
        """residual += x weight^T + bias. tiles: of ``channel_tile`` outputs, or no norm will read the stream."""
        num_rows = len(x_TK)
        tiles = tiles or self._tiles(num_rows, weight_CK)
        x, weight = _operands(x_TK, weight_CK, tiles)
        _product_add_kernel[_grid(weight_CK, tiles)](
            x, weight, bias_C, stream.residual_TC, next_gain_C, stream.scaled_TC, self._squares_XT, self._partial,
            self._arrivals, num_rows, N=len(weight_CK), K=x_TK.shape[1], HAS_BIAS=bias_C is not None,
            PARTS=tiles.parts, **_blocks(tiles), **early_launch(self.early),
        )  # fmt: skip

    def _tiles(self, num_rows: int, weight_NK: Tensor) -> ProductTiles:
        return ProductTiles.of(
            num_rows=num_rows,
            num_outputs=len(weight_NK),
            num_inputs=weight_NK.shape[1],
            num_multiprocessors=self._num_multiprocessors,
        )

    def _norm(self, num_rows: int) -> dict[str, int]:
        num_tiles = triton.cdiv(self._num_channels, channel_tile(num_rows))
        return {"X": num_tiles, "BLOCK_X": triton.next_power_of_2(num_tiles)}


def can_read(weight_NK: Tensor) -> bool:
    """Whether a weight's rows are where the copies to the tensor cores find them: at multiples of 16 bytes."""
    row_bytes = weight_NK.shape[1] * weight_NK.element_size()
    return weight_NK.is_contiguous() and row_bytes % 16 == 0 and weight_NK.data_ptr() % 16 == 0


def _operands(x_TK: Tensor, weight_NK: Tensor, tiles: ProductTiles) -> tuple[Any, Any]:
    if tiles.rows == 1:
        return x_TK, weight_NK
    return (
        TensorDescriptor.from_tensor(x_TK, [tiles.rows, tiles.inputs]),
        TensorDescriptor.from_tensor(weight_NK, [tiles.outputs, tiles.inputs]),
    )


def _grid(weight_NK: Tensor, tiles: ProductTiles) -> tuple[int, int]:
    return triton.cdiv(len(weight_NK), tiles.outputs), tiles.parts


def _blocks(tiles: ProductTiles) -> dict[str, int]:
    return {
        "BLOCK_T": tiles.rows,
        "BLOCK_N": tiles.outputs,
        "BLOCK_K": tiles.inputs,
        "NUM_STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
    }
