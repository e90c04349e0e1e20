"""Rotary position embedding: frequencies by name, and the turn itself.

Shape suffixes: T tokens, A heads, D head_dim, F = D / 2 frequencies. Heads are laid out in halves: dimension i turns
together with dimension i + D / 2.
"""

import math

import torch
from torch import Tensor

from aserve.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [F], radians a position turns each pair of dimensions by."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies_F = 1.0 / (rope.theta**exponents_F)
    if rope.kind == "linear":
        return frequencies_F / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies_F)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies_F, head_dim)
    return frequencies_F


def cos_sin(
    frequencies_F: Tensor, positions_T: Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[T, 1, D] each, for ``rotate_``: sin carries the sign of the half that it is added to.

    Computed anew each step, which at 1 to 512 tokens costs less than a table of all positions would in memory.
    """
    angles_TF = positions_T.unsqueeze(-1).to(torch.float32) * frequencies_F
    cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
    cos_TD = torch.cat((cos_TF, cos_TF), -1)
    sin_TD = torch.cat((-sin_TF, sin_TF), -1)
    if attention_factor != 1.0:
        cos_TD, sin_TD = cos_TD * attention_factor, sin_TD * attention_factor
    return cos_TD.to(dtype).unsqueeze(1), sin_TD.to(dtype).unsqueeze(1)


def rotate_(x_TAD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
    """Turns the heads in place (x may be a strided view)."""
    swapped_TAD = x_TAD.roll(x_TAD.shape[-1] // 2, -1)
    torch.addcmul(x_TAD * cos_T1D, swapped_TAD, sin_T1D, out=x_TAD)


def _llama3(rope: RopeConfig, frequencies_F: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended linearly."""
    low_wave = rope.original_max_positions / rope.low_freq_factor
    high_wave = rope.original_max_positions / rope.high_freq_factor
    waves_F = 2 * math.pi / frequencies_F
    stretched_F = frequencies_F / rope.factor
    kept_F = (rope.original_max_positions / waves_F - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended_F = (1 - kept_F) * stretched_F + kept_F * frequencies_F
    between_F = torch.where(waves_F > low_wave, stretched_F, blended_F)
    return torch.where(waves_F < high_wave, frequencies_F, between_F)


def _yarn(rope: RopeConfig, frequencies_F: Tensor, head_dim: int) -> Tensor:
    """YaRN, "NTK by parts" (arXiv 2309.00071, section 3.2): a ramp over the dimensions blends stretched into kept."""

    def dimension_of(num_turns: float) -> float:
        """The dimension whose wave turns that often within the original context."""
        waves = rope.original_max_positions / (num_turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp_F = ((torch.arange(len(frequencies_F), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies_F / rope.factor * ramp_F + frequencies_F * (1 - ramp_F)
