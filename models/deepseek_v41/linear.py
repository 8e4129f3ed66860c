"""Linear and embedding layers with the initialisation of DeepSeek-V4.1, and parameters that stay in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit


class DeepseekV41Linear(nn.Linear):
    """Project: `[..., in] -> [..., out]`; weight `[out, in]`, bias `[out]` if asked for.

    The weight is drawn from a normal of standard deviation `std`, as all weights of this model are.
    """

    def __init__(self, in_features: int, out_features: int, std: float, *, bias: bool = False) -> None:
        self.std = std  # read while the base class initialises
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise the weight in place and set the bias to zero."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class DeepseekV41Embedding(nn.Embedding):
    """Look up: `[...]` of ids `-> [..., dim]`; weight `[rows, dim]`, drawn likewise."""

    def __init__(self, rows: int, dim: int, std: float) -> None:
        self.std = std
        super().__init__(rows, dim)

    def reset_parameters(self) -> None:
        """Initialise the weight in place."""
        nn.init.normal_(self.weight, std=self.std)


@fsdp_unit(policy="fp32", casts_itself=True)
class DeepseekV41FP32Linear(nn.Module):
    """Project with an fp32 weight `[out, in]` that is rounded to the input's dtype."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight in place."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]` for `x` `[..., in]`, in its dtype."""
        return F.linear(x, self.weight.to(x.dtype))


@fsdp_unit(policy="fp32", casts_itself=True)
class DeepseekV41FP32Parameter(nn.Module):
    """Hold one fp32 parameter `[size]`, initially zero, so that it can be a unit of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameter to zero."""
        nn.init.zeros_(self.weight)

    def forward(self) -> Tensor:
        """Return a copy of the value `[size]`, which stays good when the unit frees its parameter."""
        return self.weight.clone()


@fsdp_unit(policy="fp32", output_dtype=torch.float32)
class DeepseekV41Head(DeepseekV41Linear):
    """Project to logits in fp32: `[..., hidden] -> [..., vocab]`; the weight is stored in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of `x`, computed in the weight's dtype."""
        return F.linear(x.to(self.weight.dtype), self.weight)
