"""Round to the values that a low-precision cache can hold, with the gradient of the identity."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0
FP4_MAX = 6.0
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fake_fp8(x: Tensor, block: int = 32) -> Tensor:
    """Round to e4m3, each `block` channels scaled by a power of two: the local keys' cache.

    The scale is the least power of two that is at least max(max|x|, 1e-4) / 448.
    """

    def scale_and_round(groups: Tensor, largest: Tensor) -> Tensor:
        scale = next_power_of_two(largest.clamp(min=1e-4) / FP8_MAX)
        return round_to_e4m3(groups / scale) * scale

    return _fake(x, block, scale_and_round)


def fake_mxfp4(x: Tensor, block: int = 32) -> Tensor:
    """Round to fp4, each `block` channels scaled by a power of two: the indexer's keys and queries.

    The scale is the least power of two that is at least max(max|x|, 6 * 2^-126) / 6.
    """

    def scale_and_round(groups: Tensor, largest: Tensor) -> Tensor:
        scale = next_power_of_two(largest.clamp(min=FP4_MAX * 2.0**-126) / FP4_MAX)
        return round_to_fp4(groups / scale) * scale

    return _fake(x, block, scale_and_round)


def fake_nvfp4(x: Tensor, block: int = 16) -> Tensor:
    """Round to fp4, each `block` channels scaled by an e4m3 number: the compressed keys' cache.

    The scale is max(max|x|, 6 * 2^-9) / 6 rounded to e4m3.
    """

    def scale_and_round(groups: Tensor, largest: Tensor) -> Tensor:
        scale = round_to_e4m3(largest.clamp(min=FP4_MAX * 2.0**-9) / FP4_MAX)
        return round_to_fp4(groups / scale) * scale

    return _fake(x, block, scale_and_round)


def next_power_of_two(x: Tensor) -> Tensor:
    """Return the least power of two that is at least `x`, exactly; `x` is fp32 and positive."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def round_to_e4m3(x: Tensor) -> Tensor:
    """Return fp32 `x` rounded to the nearest e4m3 number, ties to even, and to +-448 beyond."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def round_to_fp4(x: Tensor) -> Tensor:
    """Return fp32 `x` rounded to the nearest of `FP4_LEVELS`, either sign, ties to the even level."""
    levels = torch.tensor(FP4_LEVELS, device=x.device)
    middles = (levels[1:] + levels[:-1]) / 2
    size = x.abs().clamp(max=FP4_MAX)
    lower = torch.bucketize(size, middles)  # a tie goes to the level below
    upper = torch.bucketize(size, middles, right=True)  # and here to the one above
    return torch.where(lower % 2 == 0, levels[lower], levels[upper]).copysign(x)


def _fake(x: Tensor, block: int, scale_and_round: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Round `x` `[..., C]` in groups of `block` channels, the last one filled with zeros."""
    channels = x.shape[-1]
    with torch.no_grad():
        wide = F.pad(x.float(), (0, -channels % block)).unflatten(-1, (-1, block))
        rounded = scale_and_round(wide, wide.abs().amax(-1, keepdim=True))
        value = rounded.flatten(-2)[..., :channels].to(x.dtype)
    straight_through: Callable[[Tensor, Tensor], Tensor] = _StraightThrough.apply
    return straight_through(x, value)


class _StraightThrough(torch.autograd.Function):
    """Return the second tensor with the gradient that goes to the first."""

    @staticmethod
    def forward(_: object, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
