"""Partial rotary position embedding in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Step5RotaryEmbedding(nn.Module):
    """Make the rotary table of positions 0, 1, ...; it keeps no state, so nothing can round it.

    Args:
        dim: channels R that rotate, even.
        theta: base of the frequencies theta^(-2i/R), i < R/2, in radians per position.
    """

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim = dim
        self.theta = theta

    def forward(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, each `[length, R/2]` in fp32."""
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        positions = torch.arange(length, device=device, dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / self.theta**exponents)
        return angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        """Show dim and theta when printed."""
        return f"dim={self.dim}, theta={self.theta:g}"


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2), i < R/2, of the leading R channels; leave the others as they are.

    Args:
        x: `[..., S, D]` with D >= R; rotated in fp32, rounded to its own dtype.
        cos: `[S, R/2]` in fp32.
        sin: `[S, R/2]` in fp32.
    """
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)
