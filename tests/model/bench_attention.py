"""What attention costs in a decode step, by SmolLM2-135M's shape and dummy weights.

    python tests/model/bench_attention.py --threads 2 --rows 16 --context 1024

Times whole steps, then the same steps with attention left out; the difference is attention (where it is a part of its
own: steps of few rows are one call). Prints the least
milliseconds of the repeats, the share, and the rate at which the cache was read. On a machine that others use too,
``--cpu-time`` counts this process's own time, shared out over its threads (set OMP_WAIT_POLICY=passive).
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from aserve.model.attention import StepAttention
from aserve.model.batch import ForwardBatch, LanguageModel
from aserve.model.cpu_decoder import CpuDecoder
from aserve.model.cpu_kernels.few_rows import ROWS_MAX
from aserve.model.decoder import Decoder
from aserve.model.kv_tensors import KVTensors
from aserve.model.loader import load_model

SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class NoAttention:
    """Stands in for the kernel: every step's queries come back as they are."""

    def plan(self, batch: ForwardBatch, kv: KVTensors) -> StepAttention:
        return lambda q_TAD, layer, *, scale, window=None: q_TAD.contiguous()


def decode_batch(num_rows: int, context: int, block_size: int) -> tuple[ForwardBatch, int]:
    """Rows of equal length over shuffled blocks; also the number of blocks."""
    blocks_a_row = -(-context // block_size)
    tables_SB = (torch.randperm(num_rows * blocks_a_row) + 1).view(num_rows, blocks_a_row)
    last = context - 1
    return ForwardBatch(
        token_ids_T=torch.randint(0, 49152, (num_rows,)),
        positions_T=torch.full((num_rows,), last),
        slot_mapping_T=tables_SB[:, -1] * block_size + last % block_size,
        block_tables_SB=tables_SB.int(),
        context_lens_S=torch.full((num_rows,), context, dtype=torch.int32),
        context_lens=[context] * num_rows,
        query_starts=list(range(num_rows + 1)),
        num_decode_rows=num_rows,
        logit_rows_R=torch.arange(num_rows),
    ), num_rows * blocks_a_row


def chunk_batch(num_tokens: int, block_size: int) -> tuple[ForwardBatch, int]:
    """A first chunk whose last token's logits are wanted."""
    num_blocks = -(-num_tokens // block_size)
    return ForwardBatch(
        token_ids_T=torch.randint(0, 49152, (num_tokens,)),
        positions_T=torch.arange(num_tokens),
        slot_mapping_T=torch.arange(num_tokens) + block_size,
        block_tables_SB=torch.arange(1, num_blocks + 1, dtype=torch.int32).unsqueeze(0),
        context_lens_S=torch.tensor([num_tokens], dtype=torch.int32),
        context_lens=[num_tokens],
        query_starts=[0, num_tokens],
        num_decode_rows=0,
        logit_rows_R=torch.tensor([num_tokens - 1]),
    ), num_blocks


def least_ms(
    model: LanguageModel, batch: ForwardBatch, kv: KVTensors, repeats: int, clock: Callable[[], float]
) -> float:
    times_ms = []
    for _ in range(repeats + 1):
        start = clock()
        model.forward(batch, kv)
        times_ms.append((clock() - start) * 1e3)
    return min(times_ms[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16, 32])
    parser.add_argument("--context", type=int, nargs="*", default=[32, 1024])
    parser.add_argument("--chunk", type=int, nargs="*", default=[512])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    clock = (lambda: time.process_time() / arguments.threads) if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMOLLM2_135M))
        model = load_model(folder, dtype=dtype, load_format="dummy", reference=arguments.reference)
    for num_rows in arguments.rows:
        for context in arguments.context:
            batch, num_blocks = decode_batch(num_rows, context, arguments.block_size)
            kv = KVTensors.allocate(model.kv_shape, num_blocks=num_blocks, block_size=arguments.block_size)
            whole_ms = least_ms(model, batch, kv, arguments.repeats, clock)
            line = f"decode {num_rows:3} rows x {context:5}: {whole_ms:7.1f} ms, {num_rows / whole_ms * 1e3:6.0f} tok/s"
            if isinstance(model, Decoder) or (isinstance(model, CpuDecoder) and num_rows > ROWS_MAX):
                kernel, model._attention = model._attention, NoAttention()
                rest_ms = least_ms(model, batch, kv, arguments.repeats, clock)
                model._attention = kernel
                attention_ms = whole_ms - rest_ms
                read_bytes = num_rows * context * model.kv_shape.bytes_per_token
                line += (
                    f"; attention {attention_ms:6.1f} ms = {attention_ms / whole_ms:4.0%},"
                    f" cache read at {read_bytes / attention_ms / 1e6:5.1f} GB/s"
                )
            print(line, flush=True)  # noqa: T201
    for num_tokens in arguments.chunk:
        batch, num_blocks = chunk_batch(num_tokens, arguments.block_size)
        kv = KVTensors.allocate(model.kv_shape, num_blocks=num_blocks, block_size=arguments.block_size)
        print(f"chunk {num_tokens:5} tokens: {least_ms(model, batch, kv, 3, clock):7.1f} ms", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
