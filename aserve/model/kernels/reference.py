"""What the kernels compute, in plain torch and float32. The sampler's reference is ``aserve.model.sampler``.

Shape suffixes: T tokens, R rows, C channels, I intermediate size, J = 2 I, N columns of the QKV product, A query heads,
H kv heads, D head_dim, F = D / 2, S slots, P positions, B block-table entries, L cached tokens, Q queries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, gain_C: Tensor, eps: float) -> Tensor:
    """Rounded once, at the end, to the dtype of ``x``."""
    return F.rms_norm(x.float(), (x.shape[-1],), gain_C.float(), eps).to(x.dtype)


def silu_mul(gate_up_TJ: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate_TI, up_TI = gate_up_TJ.float().chunk(2, -1)
    return (F.silu(gate_TI) * up_TI).to(gate_up_TJ.dtype)


def rotate_and_cache(
    qkv_TN: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    rope_table_PD: Tensor,
    kv_layer: Tensor,
    *,
    qk_norm_AHD: Tensor | None = None,
    eps: float = 1e-6,
    uses_rope: bool = True,
) -> Tensor:
    """q turned, [T, A, D]; K and V are written to ``kv_layer``, [2, H, blocks, tokens of a block, D]."""
    _, num_kv_heads, _, _, head_dim = kv_layer.shape
    heads = qkv_TN.float().view(len(qkv_TN), -1, head_dim)
    qk, v_THD = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if qk_norm_AHD is not None:
        qk = F.rms_norm(qk, (head_dim,), None, eps) * qk_norm_AHD.float()
    if uses_rope:
        cos, sin = rope_table_PD[positions_T.long()].unsqueeze(1).chunk(2, -1)
        first, second = qk.chunk(2, -1)
        qk = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    q_TAD, k_THD = qk[:, :-num_kv_heads], qk[:, -num_kv_heads:]
    slots = kv_layer.view(2, num_kv_heads, -1, head_dim)
    slots[:, :, slot_mapping_T.long()] = torch.stack((k_THD, v_THD)).transpose(1, 2).to(kv_layer.dtype)
    return q_TAD.to(qkv_TN.dtype)


def paged_attention(
    q_TAD: Tensor,
    kv_layer: Tensor,
    block_tables_SB: Tensor,
    slots: list[int],
    query_starts: list[int],
    context_lens: list[int],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Each query over its own sequence's tokens up to itself, by the definition. kv_layer: [2, H, blocks, tokens, D].

    Rows of sequences whose context is 0, and rows of no sequence, are zero.
    """
    num_kv_heads, block_size, head_dim = kv_layer.shape[1], kv_layer.shape[3], kv_layer.shape[4]
    group = q_TAD.shape[1] // num_kv_heads
    out_TAD = torch.zeros(q_TAD.shape, dtype=torch.float32, device=q_TAD.device)
    for index, (slot, context) in enumerate(zip(slots, context_lens, strict=True)):
        start, end = query_starts[index], query_starts[index + 1]
        if context == 0 or end == start:
            continue
        blocks = block_tables_SB[slot, : -(-context // block_size)].long()
        k_HLD, v_HLD = (kv_layer[i, :, blocks].reshape(num_kv_heads, -1, head_dim)[:, :context].float() for i in (0, 1))
        k_ALD, v_ALD = k_HLD.repeat_interleave(group, 0), v_HLD.repeat_interleave(group, 0)
        score_AQL = torch.einsum("qad,ald->aql", q_TAD[start:end].float(), k_ALD) * scale
        if softcap:
            score_AQL = torch.tanh(score_AQL / softcap) * softcap
        position_Q1 = torch.arange(context - (end - start), context, device=q_TAD.device).unsqueeze(1)
        token_L = torch.arange(context, device=q_TAD.device)
        hidden_QL = token_L > position_Q1
        if window:
            hidden_QL = hidden_QL | (token_L <= position_Q1 - window)
        weight_AQL = score_AQL.masked_fill(hidden_QL, float("-inf")).softmax(-1)
        out_TAD[start:end] = torch.einsum("aql,ald->qad", weight_AQL, v_ALD)
    return out_TAD.to(q_TAD.dtype)
