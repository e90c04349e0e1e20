"""From a Hugging Face folder to a model that runs: which code computes it, and its weights checked name by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aserve.errors import ModelError
from aserve.model.attention.pages import PageAttention
from aserve.model.attention.tiled import TiledAttention
from aserve.model.batch import LanguageModel
from aserve.model.config import ModelConfig
from aserve.model.cpu_decoder import CpuDecoder, require_int8_support
from aserve.model.decoder import Decoder, ReadTensor, tensor_shapes
from aserve.model.linear import PackedLinear, PlainLinear
from aserve.model.reference import ReferenceModel

_NAMES_LISTED_MAX = 4
"""Of the tensors at fault in one sentence; their number is told as well."""


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: Literal["auto", "dummy"] = "auto",
    reference: bool = False,
    quantization: Literal["none", "int8", "auto"] = "none",
) -> LanguageModel:
    """Blocks for as long as the weights take to read.

    load_format: dummy makes random weights of the config's shape and reads no others.
    reference: float32 whatever ``dtype``, and logits that do not depend on the batch to the bit.
    quantization: int8 rounds the weights of a native bfloat16 decoder, auto where it can; see ``CpuDecoder``.
    Raises ModelError, one sentence, for whatever keeps this folder from being served.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    dtype = torch.float32 if reference else dtype
    if quantization == "auto":
        is_able = not reference and CpuDecoder.is_supported(config, dtype, torch.device(device))
        quantization = "int8" if is_able else "none"
    if quantization != "none" and (reference or config.decoder is None):
        what = "reference mode" if reference else f"{config.model_type} models, which run transformers' own code"
        raise ModelError(f"model.quantization is not available for {what}.")
    if quantization == "int8":
        require_int8_support(config, dtype, torch.device(device))
    model: LanguageModel
    if config.decoder is None:
        from aserve.model.fallback import load_fallback  # loads transformers' modelling code, seconds that others save

        model = load_fallback(
            folder, config, dtype=dtype, device=device, dummy=load_format == "dummy", reference=reference
        )
    else:
        read = open_weights(folder, config, dtype=dtype, device=device, is_dummy=load_format == "dummy")
        if reference:
            # Its forwards always have 16 rows, where packed weights are a fifth faster in float32 too.
            linear = PackedLinear if PackedLinear.is_available(torch.device(device)) else PlainLinear
            model = Decoder(config, read, dtype=dtype, attention=TiledAttention(), linear=linear)
        elif CpuDecoder.is_supported(config, dtype, torch.device(device)):
            model = CpuDecoder(config, read, quantization=quantization)
        else:
            model = Decoder(config, read, dtype=dtype, attention=PageAttention(), layout="rows")
    return ReferenceModel(model) if reference else model


def open_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, is_dummy: bool = False
) -> ReadTensor:
    """The tensors that the native decoder of this config wants, checked by name and shape, read when asked for.

    Dummy weights are made where they will be. Raises ModelError.
    """
    assert config.decoder is not None
    shapes = tensor_shapes(config.decoder, config.vocab_size)
    device = torch.device(device)
    checkpoint = _DummyCheckpoint(shapes, dtype, device) if is_dummy else open_checkpoint(folder)
    _check(folder, checkpoint.shapes(), shapes, is_tied=config.decoder.tied_embeddings)
    return lambda name: checkpoint.read(name).to(device=device, dtype=dtype)


class Checkpoint:
    """The tensors of a folder's weight files, read one at a time."""

    def __init__(self, folder: Path, file_of: Mapping[str, str]) -> None:
        self._folder = folder
        self._file_of = file_of
        self._open_files: dict[str, Any] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        try:
            return {name: tuple(self._file(name).get_slice(name).get_shape()) for name in self._file_of}
        except SafetensorError as error:  # a tensor that is not in the file which the index names
            raise ModelError(f"{self._folder} has weights that its index does not fit: {_first_line(error)}") from error

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open_files:
            self._open_files[file] = _open_safetensors(self._folder / file)
        return self._open_files[file]


class PickledCheckpoint:
    """A ``pytorch_model.bin``, unpickled as tensors only and mapped rather than read."""

    def __init__(self, path: Path) -> None:
        try:
            self._tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # whatever unpickling a foreign file may raise
            raise ModelError(f"{path} cannot be read as weights: {_first_line(error)}") from error
        if not isinstance(self._tensors, dict) or not all(isinstance(x, Tensor) for x in self._tensors.values()):
            raise ModelError(f"{path} is not a table of tensors by name.")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class _DummyCheckpoint:
    """Random weights, the same in each run on one kind of device: norms of one, matrices scaled to keep activations
    near one."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = shapes
        # On a CPU in float32, so that precisions can be compared; on a device as they will be, billions in a second.
        self._where: dict[str, Any] = {} if device.type == "cpu" else {"device": device, "dtype": dtype}
        self._generator = torch.Generator(device)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        self._generator.manual_seed(crc32(name.encode()))  # whatever order a decoder reads them in
        return torch.randn(shape, generator=self._generator, **self._where).mul_(shape[1] ** -0.5)


def open_checkpoint(folder: Path) -> Checkpoint | PickledCheckpoint:
    """The folder's weights: an index of several safetensors files, one of them, or a pickled file."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            files = sorted(set(map(str, weight_map.values())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} cannot be read as an index of weights.") from error
        absent = [file for file in files if not (folder / file).exists()]
        if absent:
            raise ModelError(f"{folder} lacks weight files that its index names: {_listed(absent)}.")
        return Checkpoint(folder, weight_map)
    single = folder / "model.safetensors"
    if single.exists():
        return Checkpoint(folder, dict.fromkeys(_open_safetensors(single).keys(), single.name))
    pickled = folder / "pytorch_model.bin"
    if pickled.exists():
        return PickledCheckpoint(pickled)
    raise ModelError(f"{folder} has no weights: neither model.safetensors, nor its index, nor pytorch_model.bin.")


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {_first_line(error)}") from error


def _check(
    folder: Path, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], *, is_tied: bool
) -> None:
    # Old checkpoints carry buffers that are computed here, tied ones sometimes a second copy of the embedding.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")}
    faults = []
    if missing := sorted(expected.keys() - found.keys()):
        faults.append(f"lacks {_listed(missing)}")
    if unexpected := sorted(found.keys() - expected.keys() - ignored):
        faults.append(f"has unexpected {_listed(unexpected)}")
    misshaped = [
        f"{name} ({_dimensions(found[name])} instead of {_dimensions(shape)})"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if misshaped:
        faults.append(f"has the wrong shape for {_listed(misshaped)}")
    if faults:
        raise ModelError(f"The checkpoint in {folder} does not fit its config.json: it {' and '.join(faults)}.")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_LISTED_MAX])
    more = len(names) - _NAMES_LISTED_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def _dimensions(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
