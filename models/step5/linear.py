"""Linear and embedding layers with the initialisation that Step5 uses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

INIT_STD = 0.02


def init_weight(weight: Tensor) -> None:
    """Fill `weight` in place from a normal of standard deviation 0.02, cut at three deviations.

    The release documents no initialisation; 0.02 is what its predecessor's implementation uses.
    """
    nn.init.trunc_normal_(weight, std=INIT_STD, a=-3 * INIT_STD, b=3 * INIT_STD)


class Step5Linear(nn.Linear):
    """Project without a bias: `[..., in] -> [..., out]`; weight `[out, in]`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Initialise the weight in place."""
        init_weight(self.weight)


class Step5Embedding(nn.Embedding):
    """Look tokens up: `[...]` of token ids `-> [..., hidden]`; weight `[vocab, hidden]`."""

    def reset_parameters(self) -> None:
        """Initialise the weight in place."""
        init_weight(self.weight)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in fp32 with the values that `dtype` can hold; at fp32 nothing changes."""
    return x.to(dtype).float()
