"""Tiny random models of each family, saved by transformers, and a paged driver that feeds ForwardBatches to a model."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from aserve.model.batch import ForwardBatch, LanguageModel
from aserve.model.kv_tensors import KVTensors

VOCAB_SIZE = 97

_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Weights so small that a wrong mask or rotation would hide in the tolerance teach nothing.
    "initializer_range": 0.2,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", _rope("linear", factor=4.0)),
    "llama-llama3": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-yarn-mscale": (
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.5, truncate=False),
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 6}),
    "smollm-tied": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
}

FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "olmo2": ("olmo2", {}),
    "phi": ("phi", {}),
    "granite": ("granite", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "llama-dynamic-rope": ("llama", _rope("dynamic", factor=2.0)),
}


def hf_model(model_type: str, **overrides: Any) -> Any:
    """A random float32 model in eval mode; norms and biases random too, so that none can be left out unnoticed."""
    values = {
        key: value for key, value in {**_SMALL, **overrides}.items() if value is not None or key == "sliding_window"
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (0.0 if name.endswith("bias") else 1.0))
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """The folder as transformers writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Sets keys of config.json; None removes them."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def hf_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' own logits for every token of the prompt, [T, V] float32."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0].float()
    return logits


@dataclass
class PagedDriver:
    """Sequences by name over shuffled blocks; every block that a sequence has not written holds NaN."""

    model: LanguageModel
    block_size: int = 16
    num_blocks: int = 96
    max_blocks: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv = KVTensors.allocate(self.model.kv_shape, num_blocks=self.num_blocks, block_size=self.block_size)
        self.kv.poison()
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)) + 1
        self._free: list[int] = order.tolist()

    def step(
        self, rows: dict[str, int] | None = None, chunks: dict[str, Sequence[int]] | None = None
    ) -> dict[str, Tensor]:
        """One forward of decode rows (one token each), then chunks. Returns logits_TV of each sequence's tokens."""
        work = [(name, [token]) for name, token in (rows or {}).items()]
        work += [(name, list(tokens)) for name, tokens in (chunks or {}).items()]
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, tokens in work:
            start = self.lengths.get(name, 0)
            table = self.tables.setdefault(name, [])
            for position in range(start, start + len(tokens)):
                if position // self.block_size == len(table):
                    table.append(self._free.pop())
                slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
                positions.append(position)
            token_ids += tokens
            starts.append(len(token_ids))
            self.lengths[name] = start + len(tokens)
        names = [name for name, _ in work]
        width = max(self.max_blocks, *(len(self.tables[name]) for name in names))
        tables = torch.tensor([self.tables[name] + [0] * (width - len(self.tables[name])) for name in names])
        context_lens = [self.lengths[name] for name in names]
        logits = self.model.forward(
            ForwardBatch(
                token_ids_T=torch.tensor(token_ids),
                positions_T=torch.tensor(positions),
                slot_mapping_T=torch.tensor(slots),
                block_tables_SB=tables.int(),
                context_lens_S=torch.tensor(context_lens, dtype=torch.int32),
                context_lens=context_lens,
                query_starts=starts,
                num_decode_rows=len(rows or {}),
                logit_rows_R=torch.arange(len(token_ids)),
            ),
            self.kv,
        )
        assert logits.dtype == torch.float32
        return {name: logits[start:stop] for name, start, stop in zip(names, starts, starts[1:], strict=False)}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids, the special ones left out."""
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def one_chunk(tokens: Sequence[int], logit_rows: list[int]) -> ForwardBatch:
    """A single sequence's first chunk in blocks 1, 2, ... of 16."""
    num_tokens = len(tokens)
    return ForwardBatch(
        token_ids_T=torch.tensor(list(tokens)),
        positions_T=torch.arange(num_tokens),
        slot_mapping_T=torch.arange(num_tokens) + 16,
        block_tables_SB=torch.arange(1, num_tokens // 16 + 2, dtype=torch.int32).unsqueeze(0),
        context_lens_S=torch.tensor([num_tokens], dtype=torch.int32),
        context_lens=[num_tokens],
        query_starts=[0, num_tokens],
        num_decode_rows=0,
        logit_rows_R=torch.tensor(logit_rows, dtype=torch.int64),
    )
