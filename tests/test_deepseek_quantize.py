"""Fake quantisation of the cache against rounding number by number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp.models.deepseek_v41.quantize import (
    FP4_LEVELS,
    fake_fp8,
    fake_mxfp4,
    fake_nvfp4,
    next_power_of_two,
    round_to_e4m3,
    round_to_fp4,
)


def nearest(value: float, largest: float, least_exponent: int, bits: int) -> float:
    """`value` rounded half to even to `bits` of fraction, the exponent held from below, and saturated."""
    size = min(abs(value), largest)
    exponent = max(math.frexp(size)[1] - 1, least_exponent) if size else least_exponent
    step = 2.0 ** (exponent - bits)
    return math.copysign(round(size / step) * step, value)


def e4m3(value: float) -> float:
    return nearest(value, 448.0, -6, 3)


def e2m1(value: float) -> float:
    return nearest(value, 6.0, 0, 1)


def power_of_two_above(value: float) -> float:
    return 2.0 ** math.ceil(math.log2(value))


class Format(NamedTuple):
    """A function under test, and what it should do to one group of channels."""

    fake: Callable[..., Tensor]
    block: int
    scale: Callable[[float], float]  # of the largest magnitude
    rounded: Callable[[float], float]
    normal: float  # from which magnitude on its scale is exact enough to be found again


def fp32(value: float) -> float:
    return float(np.float32(value))


FORMATS = {
    "fp8": Format(fake_fp8, 32, lambda m: power_of_two_above(fp32(max(m, fp32(1e-4)) / 448)), e4m3, 0.0),
    "mxfp4": Format(fake_mxfp4, 32, lambda m: power_of_two_above(max(m, 6 * 2.0**-126) / 6), e2m1, 0.0),
    "nvfp4": Format(fake_nvfp4, 16, lambda m: e4m3(fp32(max(m, 6 * 2.0**-9) / 6)), e2m1, 6 * 2.0**-6),
}
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))


def slow(form: Format, row: list[float], block: int) -> list[float]:
    out: list[float] = []
    for start in range(0, len(row), block):
        group = row[start : start + block]
        scale = form.scale(max(abs(value) for value in group))
        out += [form.rounded(fp32(value / scale)) * scale for value in group]
    return out


scales = st.sampled_from([1e-6, 1e-3, 0.02, 1.0, 30.0, 1e4])


@st.composite
def rows(draw: st.DrawFn) -> list[float]:
    """Channels of about one magnitude, of any number, some of them zero."""
    scale = draw(scales)
    values = st.one_of(st.just(0.0), st.floats(-1, 1, width=32))
    return [fp32(value * scale) for value in draw(st.lists(values, min_size=1, max_size=70))]


@every_format
def test_every_channel_is_rounded_with_the_scale_of_its_group(form: Format) -> None:
    @settings(max_examples=25, deadline=None)
    @given(row=rows(), block=st.sampled_from([form.block, 3, 5]))
    def check(row: list[float], block: int) -> None:
        out = form.fake(torch.tensor([row, row]), block)
        assert out.shape == (2, len(row))
        assert out[0].tolist() == out[1].tolist() == slow(form, row, block)
        assert form.fake(torch.tensor(row)).tolist() == slow(form, row, form.block)

    check()


@every_format
def test_rounding_again_changes_nothing_and_signs_do_not_matter(form: Format) -> None:
    @settings(max_examples=25, deadline=None)
    @given(row=rows())
    def check(row: list[float]) -> None:
        x = torch.tensor(row)
        out = form.fake(x)
        assert torch.equal(form.fake(-x), -out)
        groups = torch.nn.functional.pad(x, (0, -len(row) % form.block)).view(-1, form.block)
        if bool((groups.abs().amax(-1) >= form.normal).all()):
            assert torch.equal(form.fake(out), out)

    check()


@every_format
def test_values_are_levels_times_the_scale(form: Format) -> None:
    x = torch.randn(50, 3 * form.block, generator=torch.Generator().manual_seed(0))
    levels = {float(v) for v in FP4_LEVELS}
    if form.rounded is e4m3:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        levels = set(every[every.isfinite()].abs().tolist())
    for group, out in zip(
        x.view(-1, form.block).tolist(), form.fake(x).view(-1, form.block).tolist(), strict=True
    ):
        scale = form.scale(max(map(abs, group)))
        assert {abs(value) / scale for value in out} <= levels
        assert max(abs(a - b) for a, b in zip(group, out, strict=True)) <= max(map(abs, group)) / 5


@every_format
def test_the_gradient_is_that_of_the_identity(form: Format) -> None:
    x = torch.linspace(-3, 3, 40, requires_grad=True)
    weight = torch.arange(40.0)
    (form.fake(x) * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)
    assert not torch.equal(form.fake(x), x)


@every_format
def test_bf16_stays_bf16_and_holds_the_rounded_values(form: Format) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = form.fake(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.float(), form.fake(x.float())), "no second rounding"


@every_format
@pytest.mark.parametrize("channels", [1, 15, 17, 33])
def test_the_last_group_may_be_short_and_its_filling_changes_nothing(form: Format, channels: int) -> None:
    x = torch.randn(2, channels, generator=torch.Generator().manual_seed(0))
    filled = torch.nn.functional.pad(x, (0, -channels % form.block))
    assert torch.equal(form.fake(x), form.fake(filled)[:, :channels])
    assert form.fake(x).shape == x.shape


@every_format
def test_zeros_stay_zero_and_the_input_is_left_alone(form: Format) -> None:
    assert torch.equal(form.fake(torch.zeros(3, 40)), torch.zeros(3, 40))
    x = torch.randn(40, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    form.fake(x).add_(1)
    assert torch.equal(x, before)


def test_fp8_scales_by_the_least_power_of_two_that_holds_the_largest() -> None:
    assert fake_fp8(torch.tensor([448.0, 1.0 + 1 / 16])).tolist() == [448.0, 1.0], "scale 1, a tie to even"
    assert fake_fp8(torch.tensor([449.0, 17 / 8])).tolist() == [448.0, 2.0], "scale 2: 224.5 and 1.0625"
    assert fake_fp8(torch.tensor([224.0, 17 / 32])).tolist() == [224.0, 0.5], "scale 1/2"
    tiny = torch.tensor([1e-7])
    scale = 2.0**-22  # the least power of two that is at least 1e-4 / 448
    assert fake_fp8(tiny).item() == e4m3(tiny.item() / scale) * scale
    assert fake_fp8(torch.tensor([1e-10])).item() == 0.0


def test_fp4_ties_go_to_the_even_level() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert round_to_fp4(middles).tolist() == expected
    assert round_to_fp4(-middles).tolist() == [-value for value in expected]
    assert round_to_fp4(torch.tensor([5.01, 6.0, 99.0, -99.0])).tolist() == [6.0, 6.0, 6.0, -6.0]
    assert fake_mxfp4(torch.tensor([6.0, *middles.tolist()])).tolist() == [6.0, *expected]
    assert fake_mxfp4(torch.tensor([3.0, *(middles / 2).tolist()])).tolist() == [
        3.0,
        *(value / 2 for value in expected),
    ]


def test_mxfp4_takes_a_power_of_two_and_nvfp4_an_e4m3_number() -> None:
    x = torch.tensor([7.0, 1.0])
    assert fake_mxfp4(x).tolist() == [8.0, 1.0], "scale 2: 3.5 and 0.5"
    assert fake_nvfp4(x).tolist() == [6.75, 1.125], "7/6 rounds to 9/8: 6 and 1"
    assert fake_nvfp4(torch.tensor([6.0 * 500])).tolist() == [6.0 * 448], "the scale saturates"
    least = 2.0**-9
    assert fake_nvfp4(torch.tensor([least, least / 8])).tolist() == [least, 0.0], "scale 2^-9 from below"
    assert fake_mxfp4(torch.tensor([2.0**-126])).tolist() == [2.0**-126]


def test_groups_have_scales_of_their_own() -> None:
    x = torch.cat((torch.full((16,), 0.01), torch.full((16,), 6.0)))
    assert fake_nvfp4(x)[0] > 0
    assert fake_mxfp4(x)[0] == 0, "one group of 32"
    assert torch.equal(fake_mxfp4(x, 16)[:16], fake_mxfp4(x[:16]))


@settings(max_examples=25, deadline=None)
@given(value=st.floats(-600, 600, width=32))
def test_both_roundings_are_nearest_even_and_saturate(value: float) -> None:
    x = torch.tensor([value])
    assert round_to_e4m3(x).item() == e4m3(value)
    assert round_to_fp4(x).item() == e2m1(value)


@settings(max_examples=25, deadline=None)
@given(exponent=st.integers(-126, 126))
def test_a_power_of_two_is_its_own_ceiling_and_the_next_number_has_the_next(exponent: int) -> None:
    power = torch.tensor([2.0**exponent])
    assert next_power_of_two(power).item() == 2.0**exponent
    above = torch.nextafter(power, torch.tensor([torch.inf]))
    assert next_power_of_two(above).item() == 2.0 ** (exponent + 1)
