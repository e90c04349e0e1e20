"""The model's options: what to load, in which precision, in how much memory. Importing this loads no torch."""

from dataclasses import dataclass, field
from typing import Any, Literal


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Section ``[model]``. Nothing that a model brings is ever executed: code from a hub or a folder is not trusted."""

    model: str = _option(
        "", "A Hugging Face folder, a GGUF file or a hub id; empty takes the default model, fetched once."
    )
    served_model_name: tuple[str, ...] = _option((), "Names that requests may use; empty takes the model's own.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _option(
        "auto",
        "Precision of weights and cache: auto is bfloat16 where the device computes it natively; float16 is for GPUs.",
    )
    quantization: Literal["none", "int8", "auto"] = _option(
        "none",
        "int8 rounds weights, on a CPU with native bfloat16: half as much to read at few rows; auto: where it can.",
    )
    device: Literal["auto", "cpu", "cuda"] = _option(
        "auto", "Where the model runs; auto takes a GPU where there is one."
    )
    device_wait: Literal["auto", "timer", "thread", "poll"] = _option(
        "auto",
        "How a GPU step's end is noticed: a timer set to its predicted end, a waiting thread, or polling.",
    )
    threads: int = _option(
        0,
        "Threads of a forward on the CPU; 0 takes the cores that this process may use, of three or more all but one.",
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = _option(
        "auto", "How weights are stored; dummy makes random ones from the config alone."
    )
    reference: bool = _option(False, "float32, one kernel path and fixed splits: the same tokens in any batch, slowly.")
    kv_cache_gib: float = _option(0.0, "Memory of the KV pool; 0 takes a bounded share of what is free.")
    gpu_memory_utilization: float = _option(
        0.9, "Share of the free device memory that weights, workspace and KV pool may fill."
    )
    generation_config: Literal["auto", "off"] = _option(
        "auto", "Whether sampling defaults come from the model's generation_config.json."
    )
    cache_dir: str = _option("", "Where fetched and converted models are kept; empty takes the user's cache folder.")
