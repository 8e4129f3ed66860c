"""Norms, rotary embedding, linear layers and storage against slow and obvious arithmetic."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp import materialize
from annotate_fsdp.models.deepseek_v41 import (
    FP32_MODULES,
    DeepseekV41Config,
    DeepseekV41ForCausalLM,
    DeepseekV41YarnConfig,
)
from annotate_fsdp.models.deepseek_v41.attention import DeepseekV41GroupedLinear
from annotate_fsdp.models.deepseek_v41.linear import (
    DeepseekV41FP32Linear,
    DeepseekV41FP32Parameter,
    DeepseekV41Head,
    DeepseekV41Linear,
)
from annotate_fsdp.models.deepseek_v41.norm import DeepseekV41RMSNorm, DeepseekV41VisionRMSNorm
from annotate_fsdp.models.deepseek_v41.rotary import (
    DeepseekV41RotaryEmbedding,
    apply_rotary,
    stretch,
    yarn_range,
)

TINY = DeepseekV41Config.tiny()
BF16, FP32 = torch.bfloat16, torch.float32

seeds = st.integers(0, 2**31 - 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tiny(seed: int = 0, **changes: Any) -> DeepseekV41ForCausalLM:
    torch.manual_seed(seed)
    text = dataclasses.replace(TINY.text_config, **changes)
    return DeepseekV41ForCausalLM(dataclasses.replace(TINY, text_config=text))


@settings(max_examples=25, deadline=None)
@given(seed=seeds, dim=st.integers(1, 9), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_rms_norm_divides_by_the_root_mean_square_and_multiplies_with_the_weight(
    seed: int, dim: int, scale: float
) -> None:
    norm = DeepseekV41RMSNorm(dim, eps=1e-5)
    x = normal(3, dim, seed=seed) * scale
    with torch.no_grad():
        norm.weight.copy_(normal(dim, seed=seed + 1))
        y = norm(x)
    for row, out in zip(x.tolist(), y.tolist(), strict=True):
        root = math.sqrt(sum(value * value for value in row) / dim + 1e-5)
        expected = [v / root * w for v, w in zip(row, norm.weight.tolist(), strict=True)]
        assert out == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_rms_norm_rounds_once_to_the_dtype_of_its_input() -> None:
    norm = DeepseekV41RMSNorm(64, eps=1e-20)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    x = normal(50, 64).bfloat16()
    y = norm(x)
    assert y.dtype == BF16
    assert torch.equal(y, norm(x.float()).bfloat16())
    wide = x.float()
    twice = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-20)).bfloat16() * norm.weight
    assert not torch.equal(twice.bfloat16(), y), "rounding before the weight would be seen"


def test_rms_norm_keeps_rows_of_zeros_at_an_eps_of_1e_20_with_a_finite_gradient() -> None:
    norm = DeepseekV41RMSNorm(8, eps=1e-20)
    x = torch.zeros(2, 8)
    x[1] = normal(8)
    x.requires_grad_()
    y = norm(x)
    y[1].sum().backward()
    assert torch.equal(y[0], torch.zeros(8))
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float16])
def test_vision_norm_computes_in_fp32_and_keeps_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    norm = DeepseekV41VisionRMSNorm(16)
    norm.weight.data.copy_(normal(16, seed=1))
    x = (normal(20, 16) * 1e-3).to(dtype)
    wide = x.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.weight
    y = norm(x)
    assert y.dtype == dtype
    assert norm.weight.dtype == FP32
    assert torch.equal(y, expected.to(dtype))
    without = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True)) * norm.weight
    assert not torch.allclose(y.float(), without, rtol=0.1), "the eps of 1e-6 is felt"


@pytest.mark.parametrize(
    ("layer", "theta", "stretched"), [(0, 1e4, False), (1, 1.6e5, True), (2, 1.6e5, True), (3, 1.6e5, True)]
)
def test_layers_that_compress_have_a_base_of_their_own_and_yarn(
    layer: int, theta: float, stretched: bool
) -> None:
    rotary = DeepseekV41RotaryEmbedding(TINY.text_config, layer)
    cos, sin = rotary(torch.tensor([0, 1, 7, 40]))
    assert (cos.dtype, sin.dtype) == (FP32, FP32)
    frequencies = torch.tensor([theta ** (-2 * i / 8) for i in range(4)])
    if stretched:
        assert TINY.text_config.rope_scaling is not None
        plain, frequencies = frequencies, stretch(frequencies, theta, TINY.text_config.rope_scaling)
        assert not torch.allclose(plain, frequencies)
    for row, position in enumerate((0, 1, 7, 40)):
        for i in range(4):
            angle = position * frequencies[i].item()
            assert cos[row, i].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert sin[row, i].item() == pytest.approx(math.sin(angle), abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, pairs=st.integers(1, 4), rest=st.integers(0, 3))
def test_rotary_multiplies_adjacent_pairs_of_the_last_channels_as_complex_numbers(
    seed: int, pairs: int, rest: int
) -> None:
    x, angles = normal(2, 4, rest + 2 * pairs, seed=seed), normal(4, pairs, seed=seed + 1) * 3
    y = apply_rotary(x, angles.cos(), angles.sin())
    assert torch.equal(y[..., :rest], x[..., :rest])
    turned = torch.view_as_complex(x[..., rest:].reshape(2, 4, pairs, 2).contiguous())
    turned = turned * torch.polar(torch.ones(4, pairs), angles)
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(y[..., rest:], expected, rtol=1e-5, atol=1e-5)
    back = apply_rotary(y, angles.cos(), angles.sin(), inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)


def test_an_angle_of_zero_turns_nothing() -> None:
    x = normal(3, 10)
    assert torch.equal(apply_rotary(x, torch.ones(3, 4), torch.zeros(3, 4)), x)


def test_rotary_turns_bf16_in_fp32_and_rounds_once() -> None:
    x, angles = normal(6, 10).bfloat16(), normal(6, 4, seed=1)
    y = apply_rotary(x, angles.cos(), angles.sin())
    assert y.dtype == BF16
    assert torch.equal(y, apply_rotary(x.float(), angles.cos(), angles.sin()).bfloat16())


def yarn_of(**changes: Any) -> DeepseekV41YarnConfig:
    released = DeepseekV41Config.released().text_config.rope_scaling
    assert released is not None
    return dataclasses.replace(released, **changes)


def test_released_yarn_keeps_fifteen_pairs_and_stretches_those_from_twenty_five_on() -> None:
    assert yarn_range(64, 160000.0, yarn_of()) == (15, 25)


def test_yarns_range_falls_with_the_rotations_and_is_held_to_the_pairs() -> None:
    fast = [yarn_range(64, 1e4, yarn_of(beta_fast=beta))[0] for beta in (1, 4, 16, 64, 256, 1024)]
    slow = [yarn_range(64, 1e4, yarn_of(beta_slow=beta))[1] for beta in (1, 4, 16, 64, 256, 1024)]
    assert fast == sorted(fast, reverse=True)
    assert slow == sorted(slow, reverse=True)
    assert len(set(fast)) == len(set(slow)) == 6
    assert yarn_range(8, 1e4, yarn_of(beta_fast=1e9))[0] == 0
    assert yarn_range(8, 1e4, yarn_of(beta_slow=1e-9))[1] == 7


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.integers(1, 32),
    theta=st.sampled_from([10.0, 1e4, 1.6e5]),
    factor=st.sampled_from([1, 2.5, 16]),
    length=st.sampled_from([1, 64, 4096, 65536]),
    fast=st.sampled_from([1, 8, 32]),
)
def test_yarn_divides_the_slow_pairs_and_goes_over_in_a_line(
    pairs: int, theta: float, factor: float, length: int, fast: float
) -> None:
    yarn = yarn_of(factor=factor, original_max_position_embeddings=length, beta_fast=fast)
    dim = 2 * pairs

    def turning(rotations: float) -> float:
        """The pair, as a fraction, that turns so often over the length."""
        return math.log(length / (2 * math.pi * rotations), theta) * dim / 2

    low, high = max(math.floor(turning(fast)), 0), min(math.ceil(turning(1)), dim - 1)
    frequencies = torch.tensor([theta ** (-i / pairs) for i in range(pairs)])
    out = stretch(frequencies, theta, yarn)
    for i, (before, after) in enumerate(zip(frequencies.tolist(), out.tolist(), strict=True)):
        if i <= low:
            assert after == before
        elif i >= high:
            assert after == pytest.approx(before / factor, rel=1e-6)
        else:
            share = (i - low) / (high - low)
            assert after == pytest.approx(before * (1 - share) + before / factor * share, rel=1e-5)


def test_a_factor_of_one_changes_no_frequency_and_a_larger_one_does() -> None:
    frequencies = 1.6e5 ** (-torch.arange(32) / 32)
    torch.testing.assert_close(stretch(frequencies, 1.6e5, yarn_of(factor=1)), frequencies)
    out = stretch(frequencies, 1.6e5, yarn_of())
    assert torch.equal(out[:16], frequencies[:16])
    assert torch.equal(out[25:], frequencies[25:] / 16)
    assert ((out[16:25] < frequencies[16:25]) & (out[16:25] > frequencies[16:25] / 16)).all()


def test_grouped_linear_multiplies_each_group_with_its_own_rows() -> None:
    linear = DeepseekV41GroupedLinear(3, 4, 5, 0.1)
    assert linear.weight.shape == (15, 4)
    linear.weight.data.copy_(normal(15, 4))
    x = normal(2, 7, 3, 4, seed=1)
    y = linear(x)
    assert y.shape == (2, 7, 3, 5)
    for group in range(3):
        rows = linear.weight[5 * group : 5 * group + 5]
        torch.testing.assert_close(y[:, :, group], x[:, :, group] @ rows.T)


def test_an_fp32_linear_rounds_its_weight_to_the_dtype_of_its_input() -> None:
    linear = DeepseekV41FP32Linear(16, 4, 0.1)
    linear.weight.data.copy_(normal(4, 16))
    x = normal(5, 16, seed=1)
    torch.testing.assert_close(linear(x), x @ linear.weight.T)
    narrow = linear(x.bfloat16())
    assert narrow.dtype == BF16
    assert torch.equal(narrow, torch.nn.functional.linear(x.bfloat16(), linear.weight.bfloat16()))
    assert linear.weight.dtype == FP32


def test_an_fp32_parameter_gives_out_a_copy_whose_gradient_arrives() -> None:
    holder = DeepseekV41FP32Parameter(3)
    value = holder()
    assert value.untyped_storage().data_ptr() != holder.weight.untyped_storage().data_ptr()
    (value * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    with torch.no_grad():
        value.add_(1)
    assert holder.weight.tolist() == [0.0, 0.0, 0.0]
    assert holder.weight.grad is not None
    assert holder.weight.grad.tolist() == [1.0, 2.0, 3.0]


def test_the_head_gives_fp32_logits_from_bf16_and_multiplies_in_fp32() -> None:
    head = DeepseekV41Head(16, 9, 0.1)
    head.weight.data.copy_(normal(9, 16))
    x = normal(5, 16, seed=1).bfloat16()
    logits = head(x)
    assert logits.dtype == FP32
    assert torch.equal(logits, torch.nn.functional.linear(x.float(), head.weight))
    assert head.to(BF16)(x).dtype == BF16


ISLANDS = ("_hc.fn", "_hc.base", "_hc.scale", "sinks_param.weight", "wgate.weight", "compressor.wkv.weight")
VISION_NORMS = ("norm1.weight", "norm2.weight", "vision.norm.weight")


def storage_of(name: str) -> torch.dtype:
    """What a bf16 model stores a parameter in."""
    return FP32 if name.endswith((*ISLANDS, *VISION_NORMS, "lm_head.weight")) else BF16


def test_storage_in_bf16_keeps_the_islands_and_the_routers_biases_in_fp32() -> None:
    model = tiny()
    parameters = dict(model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {FP32}
    assert model.to_storage(BF16) is model
    assert dict(model.named_parameters()) == parameters, "the same Parameter objects"
    for name, parameter in model.named_parameters():
        assert parameter.dtype == storage_of(name), name
    assert {buffer.dtype for buffer in model.buffers()} == {FP32, torch.int64}
    model.to_storage(FP32)
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}


def test_fp32_modules_are_those_whose_parameters_stay_fp32() -> None:
    model = tiny(dtype="bfloat16")
    for name, module in model.named_modules():
        dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
        assert dtypes <= {FP32 if isinstance(module, FP32_MODULES) else BF16}, name


def test_the_configs_dtype_decides_the_storage() -> None:
    for name, parameter in tiny(dtype="bfloat16").named_parameters():
        assert parameter.dtype == storage_of(name), name


def test_storage_in_an_integer_dtype_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^to_storage\(torch.int8\): parameters need a floating-point dtype$"
    ):
        tiny().to_storage(torch.int8)


@pytest.mark.parametrize("quantized", [False, True])
def test_stored_in_bf16_the_model_has_fp32_logits_close_to_those_of_fp32(quantized: bool) -> None:
    model, ids = tiny(cache_fake_quantization=quantized, initializer_range=0.02), torch.arange(60).view(2, 30)
    exact = model(ids)
    logits = model.to_storage(BF16)(ids)
    assert logits.dtype == FP32
    assert not torch.equal(logits, exact)
    assert (logits - exact).norm() < 0.1 * exact.norm()
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == parameter.dtype, name
            assert parameter.grad.isfinite().all(), name


ZEROS = ("sinks_param.weight", "_hc.base", "bias", "bias_vl")
ONES = ("norm.weight", "norm1.weight", "norm2.weight", "_hc.scale", "q_weight", "k_weight")


def check_initial(model: DeepseekV41ForCausalLM) -> None:
    for name, tensor in model.state_dict().items():
        if name.endswith(ZEROS):
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
        elif name.endswith(ONES):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            assert tensor.std().item() == pytest.approx(0.15, rel=0.3), name
            assert abs(tensor.mean().item()) < 0.07, name


def test_a_model_built_on_a_device_is_initialised_by_the_seed() -> None:
    model = tiny()
    check_initial(model)
    assert torch.equal(tiny().lm_head.weight, model.lm_head.weight)
    assert not torch.equal(tiny(1).lm_head.weight, model.lm_head.weight)
    weight = DeepseekV41Linear(300, 300, 0.02).weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert weight.abs().max() > 0.07, "a normal that is not cut"


def test_a_model_built_on_meta_is_initialised_by_materialize() -> None:
    with torch.device("meta"):
        model = DeepseekV41ForCausalLM(TINY)
    materialize(model, "cpu")
    check_initial(model)
    loss = torch.nn.functional.cross_entropy(model(torch.arange(40)[None])[0, :-1], torch.arange(1, 40))
    # logits have the variance of 64 products, 64 * 0.15^2, which adds half of itself to that of a fair guess
    assert loss.item() == pytest.approx(math.log(258) + 64 * 0.15**2 / 2, abs=0.5)
