"""Read GGUF files (versions 2 and 3, little-endian): metadata, and tensors dequantised to floats, with numpy alone.

The layout is that of ggml's GGUF specification: magic, version, counts, key-value pairs, tensor descriptions, data.
Nothing in a file is trusted: every count is held against the bytes that are left before anything of that size is made.

Shape legend: N blocks of a quantised tensor, S sub-blocks in a block, E elements in a (sub-)block, B bytes.
"""

import importlib
import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from aserve.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
FloatType = Literal["float32", "float16", "bfloat16"]
T = TypeVar("T")

_MAGIC = b"GGUF"
_NUM_DIMS_MAX = 4  # ggml's own limit
_ARRAY_DEPTH_MAX = 4  # arrays of arrays are legal and unused; the bound keeps a crafted file off the recursion limit
_CHUNK_ELEMENTS = 1 << 17  # half a megabyte of float32: the passes over a chunk stay in the second-level cache


# --- quantisation types


def _f16(raw_NB: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of each block, as float32 [N, 1]."""
    return np.ascontiguousarray(raw_NB[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(raw_NB: Bytes) -> Bytes:
    """All low nibbles, then all high nibbles of each row: the element order of the 32-element types."""
    return np.concatenate([raw_NB & 0x0F, raw_NB >> 4], axis=1)


def _fifth_bits(raw_NB: Bytes) -> Bytes:
    """32 bits a block, one an element, moved to bit 4."""
    return np.unpackbits(raw_NB, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(raw_NB: Bytes) -> Floats:
    return (_nibbles(raw_NB[:, 2:]).astype(np.float32) - 8) * _f16(raw_NB, 0)


def _q4_1(raw_NB: Bytes) -> Floats:
    out_NE = _nibbles(raw_NB[:, 4:]).astype(np.float32)
    out_NE *= _f16(raw_NB, 0)
    out_NE += _f16(raw_NB, 2)
    return out_NE


def _q5_0(raw_NB: Bytes) -> Floats:
    quants_NE = _nibbles(raw_NB[:, 6:]) | _fifth_bits(raw_NB[:, 2:6])
    return (quants_NE.astype(np.float32) - 16) * _f16(raw_NB, 0)


def _q5_1(raw_NB: Bytes) -> Floats:
    quants_NE = _nibbles(raw_NB[:, 8:]) | _fifth_bits(raw_NB[:, 4:8])
    return quants_NE.astype(np.float32) * _f16(raw_NB, 0) + _f16(raw_NB, 2)


def _q8_0(raw_NB: Bytes) -> Floats:
    return raw_NB[:, 2:].view(np.int8).astype(np.float32) * _f16(raw_NB, 0)


def _k_scales(raw_NB: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K, each [N, 8, 1]: 6 bits each, packed in 12 bytes."""
    low_N4, minimum_N4, both_N4 = raw_NB[:, 4:8], raw_NB[:, 8:12], raw_NB[:, 12:16]
    scales_NS = np.concatenate([low_N4 & 0x3F, (both_N4 & 0x0F) | ((low_N4 >> 2) & 0x30)], axis=1)
    minima_NS = np.concatenate([minimum_N4 & 0x3F, (both_N4 >> 4) | ((minimum_N4 >> 2) & 0x30)], axis=1)
    return (_f16(raw_NB, 0) * scales_NS)[:, :, None], (_f16(raw_NB, 2) * minima_NS)[:, :, None]


def _k_nibbles(raw_NB: Bytes, run: int) -> Bytes:
    """Nibbles in the order of the K types, [N, 8, 32]: for each ``run`` bytes the low nibbles, then the high ones."""
    runs = raw_NB.reshape(len(raw_NB), -1, 1, run)
    return ((runs >> np.array([0, 4], np.uint8)[:, None]) & np.uint8(0x0F)).reshape(len(raw_NB), 8, 32)


def _q4_k(raw_NB: Bytes) -> Floats:
    scales_NS1, minima_NS1 = _k_scales(raw_NB)
    return scales_NS1 * _k_nibbles(raw_NB[:, 16:], 32) - minima_NS1


def _q5_k(raw_NB: Bytes) -> Floats:
    scales_NS1, minima_NS1 = _k_scales(raw_NB)
    high_NSE = (raw_NB[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return scales_NS1 * (_k_nibbles(raw_NB[:, 48:], 32) | (high_NSE << 4)) - minima_NS1


def _q6_k(raw_NB: Bytes) -> Floats:
    high = (raw_NB[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 0x03
    quants_NSE = _k_nibbles(raw_NB[:, :128], 64) | (high.reshape(-1, 8, 32) << 4)
    scales_NS = raw_NB[:, 192:208].view(np.int8) * _f16(raw_NB, 208)
    return (quants_NSE.reshape(-1, 16, 16).astype(np.float32) - 32) * scales_NS[:, :, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantType:
    """A ggml type: elements and bytes of a block, and how [N, B] becomes float32 (None: by the ``gguf`` package)."""

    name: str
    block_elements: int
    block_bytes: int
    decode: Callable[[Bytes], Floats] | None = None


def _type(
    name: str, block_elements: int, block_bytes: int, decode: Callable[[Bytes], Floats] | None = None
) -> QuantType:
    return QuantType(name=name, block_elements=block_elements, block_bytes=block_bytes, decode=decode)


QUANT_TYPES = {
    0: _type("F32", 1, 4, lambda raw_NB: raw_NB.view(np.float32)),
    1: _type("F16", 1, 2, lambda raw_NB: raw_NB.view(np.float16).astype(np.float32)),
    2: _type("Q4_0", 32, 18, _q4_0),
    3: _type("Q4_1", 32, 20, _q4_1),
    6: _type("Q5_0", 32, 22, _q5_0),
    7: _type("Q5_1", 32, 24, _q5_1),
    8: _type("Q8_0", 32, 34, _q8_0),
    10: _type("Q2_K", 256, 84),
    11: _type("Q3_K", 256, 110),
    12: _type("Q4_K", 256, 144, _q4_k),
    13: _type("Q5_K", 256, 176, _q5_k),
    14: _type("Q6_K", 256, 210, _q6_k),
    16: _type("IQ2_XXS", 256, 66),
    17: _type("IQ2_XS", 256, 74),
    18: _type("IQ3_XXS", 256, 98),
    19: _type("IQ1_S", 256, 50),
    20: _type("IQ4_NL", 32, 18),
    21: _type("IQ3_S", 256, 110),
    22: _type("IQ2_S", 256, 82),
    23: _type("IQ4_XS", 256, 136),
    29: _type("IQ1_M", 256, 56),
    30: _type("BF16", 1, 2, lambda raw_NB: (raw_NB.view(np.uint16).astype(np.uint32) << 16).view(np.float32)),
    34: _type("TQ1_0", 256, 54),
    35: _type("TQ2_0", 256, 66),
    39: _type("MXFP4", 32, 17),
}


def to_bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """The bits of ``x`` as bfloat16, rounded to nearest even; not-a-number stays so."""
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= 16
    out = rounded.astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        out[nan] = 0x7FC0
    return out


# --- the file


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is in numpy's order, the file's order reversed; ``start`` counts from the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        return QUANT_TYPES[self.type_id].name


_SCALARS: dict[int, tuple[struct.Struct, np.dtype[Any]]] = {
    0: (struct.Struct("<B"), np.dtype("<u1")),
    1: (struct.Struct("<b"), np.dtype("<i1")),
    2: (struct.Struct("<H"), np.dtype("<u2")),
    3: (struct.Struct("<h"), np.dtype("<i2")),
    4: (struct.Struct("<I"), np.dtype("<u4")),
    5: (struct.Struct("<i"), np.dtype("<i4")),
    6: (struct.Struct("<f"), np.dtype("<f4")),
    7: (struct.Struct("<?"), np.dtype("?")),
    10: (struct.Struct("<Q"), np.dtype("<u8")),
    11: (struct.Struct("<q"), np.dtype("<i8")),
    12: (struct.Struct("<d"), np.dtype("<f8")),
}
_U32, _U64 = _SCALARS[4][0], _SCALARS[10][0]
_STRING, _ARRAY = 8, 9


class _Malformed(Exception):
    """What is wrong with the file, to be completed with its name."""


class _Cursor:
    """A position that moves over the header; every read is bounded by the file's end."""

    __slots__ = ("data", "position")

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, num_bytes: int) -> int:
        """Move over ``num_bytes`` and return where they start."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise _Malformed("it ends in the middle of its header")
        self.position = start + num_bytes
        return start

    def scalar(self, form: struct.Struct) -> Any:
        return form.unpack_from(self.data, self.take(form.size))[0]

    def string(self) -> str:
        length = self.scalar(_U64)
        start = self.take(length)
        return str(self.data[start : start + length], "utf-8")

    def count(self, bytes_each: int, what: str) -> int:
        """A count of things that take at least ``bytes_each`` bytes, refused when the file cannot hold that many."""
        count: int = self.scalar(_U64)
        if count * bytes_each > len(self.data) - self.position:
            raise _Malformed(f"it claims {count} {what}, more than it can hold")
        return count

    def value(self, kind: int, depth: int = 0) -> Any:
        """One metadata value: a number, bool, str, list[str], numpy array of numbers, or list of such arrays."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind][0])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _ARRAY_DEPTH_MAX:
            raise _Malformed(f"it has metadata of unknown type {kind}")
        item_kind = self.scalar(_U32)
        if item_kind in _SCALARS:
            dtype = _SCALARS[item_kind][1]
            count = self.count(dtype.itemsize, "array items")
            return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize))
        count = self.count(8 if item_kind == _STRING else 12, "array items")
        return [self.value(item_kind, depth + 1) for _ in range(count)]


class GgufFile:
    """A GGUF file, opened read-only; the mapping lives as long as the object and the metadata arrays taken from it.

    Raises ModelError, in one sentence, for a file that cannot be read or is not well formed.
    """

    __slots__ = ("_raw", "metadata", "path", "tensors")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"cannot read the GGUF file {path}: {error}.") from error
        self._raw = np.frombuffer(data, np.uint8)
        try:
            self.metadata, self.tensors = _parse(data)
        except (_Malformed, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is not a usable GGUF file: {error}.") from error

    def field(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The metadata value of ``key``; ModelError when it is of another kind, or absent without a default."""
        value = self.metadata.get(key, default)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            problem = "lacks" if value is None else "has an unexpected kind of value for"
            raise ModelError(f"{self.path} {problem} the metadata field {key}.")
        return value

    def read(self, name: str, dtype: FloatType = "float32") -> npt.NDArray[Any]:
        """The tensor ``name``, dequantised and rounded to ``dtype`` (bfloat16 as its bits in uint16), a fresh array.

        Needs twice the result at most. ModelError for a type that nothing here decodes.
        """
        info = self.tensors[name]
        quant = QUANT_TYPES[info.type_id]
        decode = quant.decode or _package_decoder(info, self.path)
        raw_NB = self._raw[info.start : info.start + info.num_bytes].reshape(-1, quant.block_bytes)
        out = np.empty(math.prod(info.shape), np.uint16 if dtype == "bfloat16" else np.dtype(dtype))
        step = max(1, _CHUNK_ELEMENTS // quant.block_elements)
        with np.errstate(all="ignore"):  # a scale may be infinite; the model's own checks see that, not a warning here
            for first in range(0, len(raw_NB), step):
                chunk = decode(np.ascontiguousarray(raw_NB[first : first + step])).reshape(-1)
                start = first * quant.block_elements
                out[start : start + len(chunk)] = to_bfloat16(chunk) if dtype == "bfloat16" else chunk
        return out.reshape(info.shape)


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    cursor = _Cursor(data)
    if data[:4] != _MAGIC:
        raise _Malformed("it does not start with GGUF's magic bytes")
    cursor.take(4)
    version = cursor.scalar(_U32)
    if version not in (2, 3):
        raise _Malformed(f"its version is {version}, and versions 2 and 3 (little-endian) are read")
    num_tensors = cursor.count(8 + 4 + 4 + 8, "tensors")
    num_fields = cursor.count(8 + 4 + 1, "metadata fields")
    metadata = {cursor.string(): cursor.value(cursor.scalar(_U32)) for _ in range(num_fields)}
    described = [_describe(cursor) for _ in range(num_tensors)]

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Malformed("its alignment is not a positive number")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for offset, info in sorted(described, key=lambda item: item[0]):
        # Overlap is refused because a small file could otherwise describe terabytes.
        if info.name in tensors or offset < end or data_start + offset + info.num_bytes > len(data):
            raise _Malformed(f"its tensor {info.name!r} lies beyond its end or over another one")
        end = offset + info.num_bytes
        tensors[info.name] = TensorInfo(
            name=info.name,
            shape=info.shape,
            type_id=info.type_id,
            start=data_start + offset,
            num_bytes=info.num_bytes,
        )
    return metadata, tensors


def _describe(cursor: _Cursor) -> tuple[int, TensorInfo]:
    """The next tensor description and its offset in the data section (``start`` is not known yet)."""
    name = cursor.string()
    num_dims = cursor.scalar(_U32)
    if num_dims > _NUM_DIMS_MAX:
        raise _Malformed(f"its tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.scalar(_U64) for _ in range(num_dims))[::-1]
    type_id = cursor.scalar(_U32)
    quant = QUANT_TYPES.get(type_id)
    if quant is None:
        raise _Malformed(f"its tensor {name!r} has the unknown type {type_id}")
    if 0 in shape or (shape[-1] if shape else 1) % quant.block_elements:
        raise _Malformed(f"its tensor {name!r} has a shape that {quant.name} cannot have")
    num_bytes = math.prod(shape) // quant.block_elements * quant.block_bytes
    offset = cursor.scalar(_U64)
    return offset, TensorInfo(name=name, shape=shape, type_id=type_id, start=0, num_bytes=num_bytes)


def _package_decoder(info: TensorInfo, path: Path) -> Callable[[Bytes], Floats]:
    """The decoder of the optional ``gguf`` package for a type that has none here."""
    try:
        package, quants = importlib.import_module("gguf"), importlib.import_module("gguf.quants")
    except ImportError as error:
        raise ModelError(
            f"{path} holds tensors of type {info.type_name}, which needs the gguf extra: pip install 'aserve[gguf]'."
        ) from error

    def decode(raw_NB: Bytes) -> Floats:
        return np.asarray(quants.dequantize(raw_NB, package.GGMLQuantizationType(info.type_id)), np.float32)

    return decode
