"""The norms of DeepSeek-V4.1. Each computes in fp32 for itself and rounds once, to its input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit

VISION_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim, in fp32, rounded to the dtype of `x`.

    Args:
        x: `[..., dim]`; a row of zeros stays zero, however small eps is.
        weight: `[dim]`.
        eps: added to the mean square.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


class DeepseekV41RMSNorm(nn.Module):
    """Normalise by the root mean square; the weight `[dim]` belongs to the unit around it."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` `[..., dim]` normalised, in its own dtype."""
        return rms_norm(x, self.weight, self.eps)


@fsdp_unit(policy="fp32", casts_itself=True)
class DeepseekV41VisionRMSNorm(nn.Module):
    """Normalise patches; the weight `[dim]` is fp32 in storage and in computation."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` `[..., dim]` normalised, in its own dtype."""
        return rms_norm(x, self.weight, VISION_EPS)
