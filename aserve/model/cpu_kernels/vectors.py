"""Three inner loops as LLVM vectors, written out: sums stay in registers over the whole loop.

Numba's own loops leave that to LLVM's vectoriser, which does not: it unrolls loops of constant length before it looks
at them and keeps sums in memory where arrays might overlap (a page's 64 x 32 keys: 5 us, and 0.2 as below).

Arguments are addresses (``array.ctypes.data``) and counts, checked by nobody; what the compiler has to know are
constants of the calling kernel. An array tells the type behind an address: int8, float32, or bfloat16 as uint16. Lanes
are of float32; LLVM splits vectors that the processor does not have.

Shape suffixes: M rows, K inputs, G query heads of a kv head, D head_dim, P tokens of a block.
"""

from math import gcd
from typing import Any, Final, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

Kind = Literal["bfloat16", "int8", "float32"]

LANES: Final = 16
"""Of one register of 512 bits."""

_SUMS_MAX: Final = 16
"""Registers' worth of sums: half of AVX-512's, a quarter more than AVX2 has."""

_FLOAT, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FAST: Final = ("reassoc", "contract")


def _floats(num_lanes: int) -> ir.VectorType:
    return ir.VectorType(_FLOAT, num_lanes)


class _Code:
    """The instructions that the loops are made of."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def pointer(self, address: ir.Value, index: ir.Value, item: ir.Type, vector: ir.Type) -> ir.Value:
        """To a vector that begins at ``index`` items from ``address``."""
        items = self.builder.inttoptr(address, item.as_pointer())
        return self.builder.bitcast(self.builder.gep(items, [index]), vector.as_pointer())

    def load(self, address: ir.Value, index: ir.Value, kind: Kind, lanes: int) -> ir.Value:
        builder = self.builder
        if kind == "float32":
            return builder.load(self.pointer(address, index, _FLOAT, _floats(lanes)), align=4)
        if kind == "int8":
            narrow = builder.load(self.pointer(address, index, _I8, ir.VectorType(_I8, lanes)), align=1)
            return builder.sitofp(narrow, _floats(lanes))
        wide = ir.VectorType(_I32, lanes)
        narrow = builder.load(self.pointer(address, index, _I16, ir.VectorType(_I16, lanes)), align=2)
        bits = builder.shl(builder.zext(narrow, wide), ir.Constant(wide, [16] * lanes))
        return builder.bitcast(bits, _floats(lanes))

    def store(self, value: ir.Value, address: ir.Value, index: ir.Value) -> None:
        self.builder.store(value, self.pointer(address, index, _FLOAT, value.type), align=4)

    def spread(self, scalar: ir.Value, lanes: int) -> ir.Value:
        """One value in all lanes."""
        vector = self.builder.insert_element(ir.Constant(_floats(lanes), ir.Undefined), scalar, _I32(0))
        return self.builder.shuffle_vector(
            vector, ir.Constant(_floats(lanes), ir.Undefined), ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
        )

    def load_spread(self, address: ir.Value, index: ir.Value, lanes: int) -> ir.Value:
        return self.spread(self.builder.load(self.pointer(address, index, _FLOAT, _FLOAT), align=4), lanes)

    def add_product(self, into: ir.Value, a: ir.Value, b: ir.Value) -> None:
        """into, a variable on the stack that LLVM keeps in a register, += a * b."""
        product = self.builder.fmul(a, b, flags=_FAST)
        self.builder.store(self.builder.fadd(self.builder.load(into), product, flags=_FAST), into)

    def variables(self, count: int, lanes: int) -> list[ir.Value]:
        found = [cgutils.alloca_once(self.builder, _floats(lanes)) for _ in range(count)]
        for variable in found:
            self.builder.store(ir.Constant(_floats(lanes), [0.0] * lanes), variable)
        return found

    def prefetch(self, address: ir.Value, index: ir.Value, item: ir.Type) -> None:
        """Ask for the cache line at ``index`` items from ``address``; any address is harmless."""
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = _I32(0), _I32(2), _I32(1)
        self.builder.call(function, [self.pointer(address, index, item, _I8), read, keep, data])

    def totals(self, vectors: list[ir.Value]) -> list[ir.Value]:
        """Each vector's sum of its lanes. Their number is a power of two, at most a vector's lanes.

        Two vectors become one that holds both their sums' halves, until there is one: log2 steps for all together.
        """
        builder, lanes = self.builder, vectors[0].type.count
        count, width = len(vectors), lanes  # vectors[i] holds sums i, i + step, ... in parts of ``width`` lanes
        while len(vectors) > 1:
            low = [start + i for start in range(0, 2 * lanes, width) for i in range(width // 2)]
            high = [index + width // 2 for index in low]
            half = len(vectors) // 2
            vectors = [self._add_shuffled(vectors[i], vectors[i + half], low, high) for i in range(half)]
            width //= 2
        vector = vectors[0]
        while width > 1:
            low = [start + i for start in range(0, vector.type.count, width) for i in range(width // 2)]
            vector = self._add_shuffled(vector, vector, low, [index + width // 2 for index in low])
            width //= 2
        # The first pairing put its second half last: lane i is the sum whose index has i's bits in reverse order.
        num_bits = count.bit_length() - 1
        order = [int(f"{index:0{num_bits}b}"[::-1], 2) if num_bits else 0 for index in range(count)]
        return [builder.extract_element(vector, _I32(order[index])) for index in range(count)]

    def _add_shuffled(self, a: ir.Value, b: ir.Value, low: list[int], high: list[int]) -> ir.Value:
        parts = (
            self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))
            for lanes in (low, high)
        )
        return self.builder.fadd(*parts, flags=_FAST)


def _kind(array: Any) -> Kind:
    return {types.int8: "int8", types.uint16: "bfloat16", types.float32: "float32"}[array.dtype]  # type: ignore[return-value]


def _check(*values: Any) -> tuple[int, ...] | None:
    """What the caller's constants are; None sends numba to its error where one is not known when it compiles."""
    if not all(isinstance(value, types.IntegerLiteral) for value in values):
        return None
    return tuple(value.literal_value for value in values)


@intrinsic(prefer_literal=True)
def dot_rows(typingctx, weight_NK, weight, x, out, num_inputs, num_rows):
    """out[m] = sum over k of weight[k] * x[m, k], for a constant number of rows: a power of two up to 16.

    weight: a row of weight_NK. x: float32 [M, K]; out: float32 [M]. K is a
    multiple of 16. Each weight is read and widened once for all rows.
    """
    constants = _check(num_rows)
    if constants is None:
        return None
    rows, kind = constants[0], _kind(weight_NK)
    parts = 4 if rows == 1 else 2 if rows <= 4 else 1  # sums a row: an addition waits four cycles for the one before

    def generate(context, builder, signature, values):
        _, weight, x, out, num_inputs, _ = values
        code = _Code(builder)
        sums = code.variables(rows * parts, LANES)
        starts = [builder.mul(num_inputs, _I64(row)) for row in range(rows)]

        def step(index: ir.Value, count: int) -> None:
            for part in range(count):
                at = builder.add(index, _I64(part * LANES))
                w = code.load(weight, at, kind, LANES)
                for row in range(rows):
                    code.add_product(
                        sums[row * parts + part], w, code.load(x, builder.add(starts[row], at), "float32", LANES)
                    )

        width = _I64(parts * LANES)
        whole = builder.mul(builder.udiv(num_inputs, width), width)
        with cgutils.for_range_slice(builder, _I64(0), whole, width, intp=_I64) as (index, _):
            step(index, parts)
        if parts > 1:
            with cgutils.for_range_slice(builder, whole, num_inputs, _I64(LANES), intp=_I64) as (index, _):
                step(index, 1)
        row_sums = []
        for row in range(rows):
            first, *others = (builder.load(variable) for variable in sums[row * parts : (row + 1) * parts])
            for other in others:
                first = builder.fadd(first, other, flags=_FAST)
            row_sums.append(first)
        for row, total in enumerate(code.totals(row_sums)):
            builder.store(total, code.pointer(out, _I64(row), _FLOAT, _FLOAT))
        return context.get_dummy_value()

    return types.void(weight_NK, weight, x, out, num_inputs, num_rows), generate


def _multiply_page(
    builder: ir.IRBuilder, kind: Kind, factors: ir.Value, page: ir.Value, next_page: ir.Value, count: ir.Value,
    out: ir.Value, *, num_heads: int, num_factors: int, width: int, adds: bool,
) -> None:  # fmt: skip
    """out[g, n] = or += sum over k < count of factors[g, k] * page[k, n].

    factors: float32 [G, num_factors]; page: of ``kind``, [.., width]; out: float32 [G, width]. next_page is prefetched.
    As many columns at a time as have their sums of all heads in registers.
    """
    code = _Code(builder)
    lanes = gcd(width, LANES)
    item, line = (_FLOAT, 16) if kind == "float32" else (_I16, 32)
    per_pass = max(1, _SUMS_MAX // num_heads) * lanes
    for start in range(0, width, per_pass):
        places = range(start, min(start + per_pass, width), lanes)
        sums = code.variables(num_heads * len(places), lanes)
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            row = builder.mul(loop.index, _I64(width))
            if start == 0:
                for place in range(0, width, line):
                    code.prefetch(next_page, builder.add(row, _I64(place)), item)
            columns = [code.load(page, builder.add(row, _I64(place)), kind, lanes) for place in places]
            for head in range(num_heads):
                factor = code.load_spread(factors, builder.add(loop.index, _I64(head * num_factors)), lanes)
                for part, column in enumerate(columns):
                    code.add_product(sums[head * len(places) + part], factor, column)
        for head in range(num_heads):
            for part, place in enumerate(places):
                at, total = _I64(head * width + place), builder.load(sums[head * len(places) + part])
                if adds:
                    total = builder.fadd(code.load(out, at, "float32", lanes), total)
                code.store(total, out, at)


@intrinsic(prefer_literal=True)
def score_page(typingctx, memory, keys, next_keys, q, out, group, head_dim, block_size):
    """out[g, p] = sum over d of q[g, d] * keys[d, p]. keys: of memory's type, [D, P]; q, out: float32.

    next_keys: the page that comes next, fetched meanwhile: the processor's own prefetching ends with a page of memory.
    """
    constants = _check(group, head_dim, block_size)
    if constants is None:
        return None
    num_heads, dim, num_tokens = constants

    def generate(context, builder, signature, values):
        _, keys, next_keys, q, out, *_ = values
        _multiply_page(
            builder, _kind(memory), q, keys, next_keys, _I64(dim), out,
            num_heads=num_heads, num_factors=dim, width=num_tokens, adds=False,
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(memory, keys, next_keys, q, out, group, head_dim, block_size), generate


@intrinsic(prefer_literal=True)
def add_page(typingctx, memory, values, next_values, weight, num_tokens, out, group, head_dim, block_size):
    """out[g, d] += sum over p of weight[g, p] * values[p, d], for the first tokens of a page; the others are not read.

    values: of memory's type, [P, D]; weight: float32 [G, P]; out: float32 [G, D].
    """
    constants = _check(group, head_dim, block_size)
    if constants is None:
        return None
    num_heads, dim, page_tokens = constants

    def generate(context, builder, signature, arguments):
        _, values, next_values, weight, num_tokens, out, *_ = arguments
        _multiply_page(
            builder, _kind(memory), weight, values, next_values, num_tokens, out,
            num_heads=num_heads, num_factors=page_tokens, width=dim, adds=True,
        )  # fmt: skip
        return context.get_dummy_value()

    return types.void(memory, values, next_values, weight, num_tokens, out, group, head_dim, block_size), generate


@intrinsic
def highest(typingctx, values, count):
    """The largest of ``count`` >= 1 float32; any of them where one is NaN."""

    def generate(context, builder, signature, arguments):
        values, count = arguments
        code = _Code(builder)

        def larger(a: ir.Value, b: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        first = builder.load(code.pointer(values, _I64(0), _FLOAT, _FLOAT), align=4)
        best, rest = cgutils.alloca_once(builder, _floats(LANES)), cgutils.alloca_once(builder, _FLOAT)
        builder.store(code.spread(first, LANES), best)
        whole = builder.mul(builder.udiv(count, _I64(LANES)), _I64(LANES))
        with cgutils.for_range_slice(builder, _I64(0), whole, _I64(LANES), intp=_I64) as (index, _):
            builder.store(larger(builder.load(best), code.load(values, index, "float32", LANES)), best)
        builder.store(first, rest)
        with cgutils.for_range_slice(builder, whole, count, _I64(1), intp=_I64) as (index, _):
            value = builder.load(code.pointer(values, index, _FLOAT, _FLOAT), align=4)
            builder.store(larger(builder.load(rest), value), rest)
        found, vector = builder.load(rest), builder.load(best)
        for lane in range(LANES):
            found = larger(found, builder.extract_element(vector, _I32(lane)))
        return found

    return types.float32(types.intp, types.intp), generate
