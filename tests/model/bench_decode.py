"""What a step costs by rows and precision, by SmolLM2-135M's shape and dummy weights.

    python tests/model/bench_decode.py --threads 2

Decode steps at several rows and contexts, then first chunks. Prints the least of the repeats in milliseconds of wall
time, and beside it the process's own time shared out over its threads: the one to go by where others use the machine.
``bench_attention.py`` tells attention's share. ``overhead`` is a step of one token through all layers of a shape so
small that little but calls counts.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_attention import SMOLLM2_135M, chunk_batch, decode_batch

from aserve.model.batch import ForwardBatch, LanguageModel
from aserve.model.kv_tensors import KVTensors
from aserve.model.loader import load_model

PRECISIONS = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "quantization": "int8"},
}
POINTS = [(1, 128), (8, 128), (16, 128), (32, 128), (16, 1024)]


def make_model(config: dict[str, object], precision: str) -> LanguageModel:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load_model(folder, load_format="dummy", **PRECISIONS[precision])  # type: ignore[arg-type]


def least_ms(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Of wall time and of the process's, after one more to warm up."""
    step()
    times = []
    for _ in range(repeats):
        wall, process = time.perf_counter(), time.process_time()
        step()
        times.append((time.perf_counter() - wall, (time.process_time() - process) / torch.get_num_threads()))
    wall_s, process_s = (min(column) for column in zip(*times, strict=True))
    return wall_s * 1e3, process_s * 1e3


def report(
    name: str, model: LanguageModel, batch: ForwardBatch, num_blocks: int, arguments: argparse.Namespace
) -> None:
    kv = KVTensors.allocate(model.kv_shape, num_blocks=num_blocks, block_size=arguments.block_size)
    kv.memory.fill_(0.01)  # untouched pages would all be the same one
    wall_ms, process_ms = least_ms(lambda: model.forward(batch, kv), arguments.repeats)
    rate = len(batch.token_ids_T) / wall_ms * 1e3
    line = f"{name:24} {wall_ms:7.1f} ms  ({process_ms:6.1f} of its own)  {rate:6.0f} tokens/s"
    print(line, flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=list(PRECISIONS), nargs="*", default=list(PRECISIONS))
    parser.add_argument("--chunk", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    for precision in arguments.precision:
        thin = SMOLLM2_135M | {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 64, "head_dim": 16}
        thin_batch, thin_blocks = decode_batch(1, 1, arguments.block_size)
        thin_batch.token_ids_T.zero_()
        report(f"{precision} overhead", make_model(thin, precision), thin_batch, thin_blocks, arguments)
        model = make_model(SMOLLM2_135M, precision)
        for num_rows, context in POINTS:
            batch, num_blocks = decode_batch(num_rows, context, arguments.block_size)
            report(f"{precision} {num_rows} x {context}", model, batch, num_blocks, arguments)
        for num_tokens in arguments.chunk:
            batch, num_blocks = chunk_batch(num_tokens, arguments.block_size)
            report(f"{precision} prefill {num_tokens}", model, batch, num_blocks, arguments)
        del model
        gc.collect()


if __name__ == "__main__":
    main()
