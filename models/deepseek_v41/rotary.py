"""Rotary position embedding of the trailing channels, in fp32, with YaRN for the compressed layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig, DeepseekV41YarnConfig


class DeepseekV41RotaryEmbedding(nn.Module):
    """Make the rotary tables of given positions; it keeps no state, so nothing can round it.

    Layers that read compressed keys have a base of their own and YaRN, for local and compressed keys alike.
    """

    def __init__(self, config: DeepseekV41TextConfig, layer: int) -> None:
        super().__init__()
        is_compressed = config.compress_ratios[layer] > 0
        self.dim = config.qk_rope_head_dim
        self.theta = config.compress_rope_theta if is_compressed else config.rope_theta
        self.yarn = config.rope_scaling if is_compressed else None

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, each `[len(positions), R/2]` in fp32."""
        exponents = torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float32) / self.dim
        frequencies = 1.0 / self.theta**exponents
        if self.yarn is not None:
            frequencies = stretch(frequencies, self.theta, self.yarn)
        angles = torch.outer(positions.float(), frequencies)
        return angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        """Show the settings when printed."""
        return f"dim={self.dim}, theta={self.theta:g}, yarn={self.yarn}"


def yarn_range(dim: int, theta: float, yarn: DeepseekV41YarnConfig) -> tuple[int, int]:
    """Return (low, high): pairs up to `low` keep their frequency, those from `high` on are divided in full.

    The pair that turns n times over the original length L is dim * ln(L / (2 pi n)) / (2 ln theta); `low`
    is that of `beta_fast` rounded down, `high` that of `beta_slow` rounded up, held to 0 .. dim - 1.
    """

    def pair(rotations: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), dim - 1)


def stretch(frequencies: Tensor, theta: float, yarn: DeepseekV41YarnConfig) -> Tensor:
    """Return `frequencies` `[R/2]`, in radians per position, with the slow ones divided by `yarn.factor`."""
    low, high = yarn_range(2 * len(frequencies), theta, yarn)
    pairs = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    share = ((pairs - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return frequencies / yarn.factor * share + frequencies * (1.0 - share)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last R channels; leave the others as they are.

    Args:
        x: `[..., D]` with D >= R; rotated in fp32, rounded to its own dtype.
        cos: fp32, `[..., R/2]` that broadcasts against the pairs of `x`.
        sin: likewise.
        inverse: rotate back.
    """
    size = 2 * cos.shape[-1]
    rest, turning = x.split([x.shape[-1] - size, size], dim=-1)
    even, odd = torch.unflatten(turning.float(), -1, (-1, 2)).unbind(-1)
    sin = -sin if inverse else sin
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((rest, turned.to(x.dtype)), dim=-1)
