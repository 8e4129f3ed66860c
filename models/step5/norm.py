"""The norms of Step5. Each computes in fp32 for itself and rounds once, to its output's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.step5.linear import round_to


def additive_rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dim, rounded to `dtype` once.

    Args:
        x: `[..., dim]`, any floating dtype.
        weight: `[dim]`; zero leaves the normalised value as it is.
        eps: added to the mean square.
        dtype: of the result.
    """
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * (1.0 + weight.float())).to(dtype)


@fsdp_unit(policy="fp32", casts_itself=True)
class Step5RMSNorm(nn.Module):
    """Normalise by the root mean square with an additive, zero-initialised fp32 weight `[dim]`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to zero, a scale of one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x` `[..., dim]` normalised, in `dtype` (None: that of `x`)."""
        return additive_rms_norm(x, self.weight, self.eps, dtype or x.dtype)


@fsdp_unit(policy="fp32", casts_itself=True)
class Step5IndexerRMSNorm(nn.Module):
    """Normalise the indexer's queries; the fp32 weight `[dim]` is rounded to the activations' dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to zero, a scale of one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` `[..., dim]` normalised, in its own dtype."""
        return additive_rms_norm(x, round_to(self.weight, x.dtype), self.eps, x.dtype)


@fsdp_unit(policy="fp32", casts_itself=True)
class Step5IndexerLayerNorm(nn.Module):
    """Normalise the indexer's keys by mean and variance, the variance as E[x^2] - E[x]^2.

    The fp32 weight and bias `[dim]` are rounded to the activations' dtype.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` `[..., dim]` normalised, in its own dtype."""
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        variance = wide.square().mean(-1, keepdim=True) - mean.square()
        normed = (wide - mean) * torch.rsqrt(variance + self.eps)
        return (normed * round_to(self.weight, x.dtype) + round_to(self.bias, x.dtype)).to(x.dtype)
