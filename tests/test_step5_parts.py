"""Norms, rotary embedding and clamped SwiGLU against slow and obvious arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotate_fsdp.models.step5.linear import Step5Embedding, Step5Linear
from annotate_fsdp.models.step5.mlp import Step5MLP, clamped_swiglu
from annotate_fsdp.models.step5.norm import Step5IndexerLayerNorm, Step5IndexerRMSNorm, Step5RMSNorm
from annotate_fsdp.models.step5.rotary import Step5RotaryEmbedding, apply_rotary

seeds = st.integers(0, 2**31 - 1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25, deadline=None)
@given(seed=seeds, dim=st.integers(1, 9), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_rms_norm_divides_by_the_root_mean_square_and_adds_one_to_the_weight(
    seed: int, dim: int, scale: float
) -> None:
    norm = Step5RMSNorm(dim, eps=1e-5)
    x = normal(3, dim, seed=seed) * scale
    with torch.no_grad():
        norm.weight.copy_(normal(dim, seed=seed + 1))
        y = norm(x)
    for row, out in zip(x.tolist(), y.tolist(), strict=True):
        root = math.sqrt(sum(value * value for value in row) / dim + 1e-5)
        expected = [v / root * (1 + w) for v, w in zip(row, norm.weight.tolist(), strict=True)]
        assert out == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_rms_norm_starts_with_a_scale_of_one() -> None:
    y = Step5RMSNorm(64, eps=1e-5)(normal(5, 64) * 7)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(5))


def test_rms_norm_rounds_once_to_the_dtype_asked_for() -> None:
    norm = Step5RMSNorm(64, eps=1e-5)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    x = normal(50, 64)
    exact = norm(x)
    assert exact.dtype == torch.float32
    assert torch.equal(norm(x, torch.bfloat16), exact.bfloat16())
    twice = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).bfloat16() * (1 + norm.weight)
    assert not torch.equal(twice.bfloat16(), exact.bfloat16()), "rounding twice would be seen"
    narrow = x.bfloat16()
    assert torch.equal(norm(narrow), norm(narrow.float()).bfloat16())


def test_indexer_rms_norm_rounds_its_weight_to_the_dtype_of_the_activations() -> None:
    norm = Step5IndexerRMSNorm(8, eps=1e-5)
    norm.weight.data.fill_(0.3)  # no bf16 number
    x = normal(4, 8)
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(norm(x), x * root * 1.3)
    narrow = x.bfloat16()
    wide = narrow.float()
    weight = 1 + torch.tensor(0.3).bfloat16().float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.equal(norm(narrow), expected.bfloat16())


def test_indexer_layer_norm_uses_weight_and_bias_as_they_are_and_rounds_both() -> None:
    norm = Step5IndexerLayerNorm(8, eps=1e-5)
    norm.weight.data.copy_(normal(8, seed=1))
    norm.bias.data.copy_(normal(8, seed=2))
    x = normal(4, 8) + 0.5
    expected = torch.nn.functional.layer_norm(x, (8,), norm.weight, norm.bias, 1e-5)
    torch.testing.assert_close(norm(x), expected)
    narrow = x.bfloat16()
    rounded = (norm.weight.bfloat16().float(), norm.bias.bfloat16().float())
    expected = torch.nn.functional.layer_norm(narrow.float(), (8,), *rounded, 1e-5)
    assert norm(narrow).dtype == torch.bfloat16
    torch.testing.assert_close(norm(narrow).float(), expected, rtol=2**-8, atol=1e-5)


def test_indexer_layer_norm_computes_the_variance_as_a_difference_of_moments() -> None:
    x = torch.tensor([[1000.0, 1000.25, 999.75, 1000.5]])
    mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    by_moments = (x - mean) * torch.rsqrt(square - mean.square() + 1e-5)
    by_distances = (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-5)
    y = Step5IndexerLayerNorm(4, eps=1e-5)(x)
    assert torch.equal(y, by_moments)
    assert not torch.allclose(y, by_distances, rtol=0.01)


def test_rotary_table_holds_the_angles_position_times_theta_to_the_minus_2i_over_r() -> None:
    cos, sin = Step5RotaryEmbedding(6, theta=100.0)(5, torch.device("cpu"))
    for position in range(5):
        for i in range(3):
            angle = position * 100.0 ** (-2 * i / 6)
            assert cos[position, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert sin[position, i].item() == pytest.approx(math.sin(angle), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, half=st.integers(1, 4), rest=st.integers(0, 3), theta=st.sampled_from([10.0, 1e4, 1e7]))
def test_rotary_turns_the_pairs_of_both_halves_and_leaves_the_remaining_channels(
    seed: int, half: int, rest: int, theta: float
) -> None:
    x = normal(2, 4, 2 * half + rest, seed=seed)
    cos, sin = Step5RotaryEmbedding(2 * half, theta)(4, torch.device("cpu"))
    y = apply_rotary(x, cos, sin)
    assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])
    for position in range(4):
        for i in range(half):
            turn = torch.polar(torch.tensor(1.0), torch.tensor(position * theta ** (-i / half)))
            pair = torch.complex(x[:, position, i], x[:, position, i + half]) * turn
            torch.testing.assert_close(y[:, position, i], pair.real, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(y[:, position, i + half], pair.imag, rtol=1e-5, atol=1e-5)


def test_rotary_makes_scores_depend_on_the_distance_only() -> None:
    q, k = normal(8), normal(8, seed=1)
    cos, sin = Step5RotaryEmbedding(8, 100.0)(20, torch.device("cpu"))
    turned_q = apply_rotary(q.expand(20, 8), cos, sin)
    turned_k = apply_rotary(k.expand(20, 8), cos, sin)
    scores = turned_q @ turned_k.T
    for distance in range(5):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert (scores[5, 5] - scores[5, 0]).abs() > 0.1


def test_rotary_rotates_bf16_in_fp32_and_rounds_once() -> None:
    x = normal(6, 10).bfloat16()
    cos, sin = Step5RotaryEmbedding(8, 1e4)(6, torch.device("cpu"))
    y = apply_rotary(x, cos, sin)
    assert torch.equal(y, apply_rotary(x.float(), cos, sin).bfloat16())
    assert (cos.dtype, sin.dtype, y.dtype) == (torch.float32, torch.float32, torch.bfloat16)


@settings(max_examples=60, deadline=None)
@given(
    gate=st.floats(-30, 30, width=32),
    up=st.floats(-30, 30, width=32),
    limit=st.sampled_from([None, 0, 0.0, 0.25, 1.0, 7.0]),
)
def test_swiglu_clamps_after_silu_from_above_and_the_linear_part_on_both_sides(
    gate: float, up: float, limit: float | None
) -> None:
    silu = gate / (1 + math.exp(-gate))
    if limit:
        silu, linear = min(silu, limit), max(-limit, min(up, limit))
    else:
        linear = up
    y = clamped_swiglu(torch.tensor(gate), torch.tensor(up), limit)
    assert y.item() == pytest.approx(silu * linear, rel=1e-4, abs=1e-6)


def test_swiglu_clamp_is_not_before_silu_and_not_symmetric() -> None:
    one = torch.tensor(1.0)
    above = clamped_swiglu(torch.tensor(2.0), one, 1.0)
    assert above.item() == 1.0  # silu(2) = 1.76; clamping before would give silu(1) = 0.73
    below = clamped_swiglu(torch.tensor(-1.0), one, 0.2)
    assert below.item() == pytest.approx(-0.2 / (1 + math.e))  # silu(-1) = -0.27, though below -0.2


def test_swiglu_passes_no_gradient_where_it_clamps() -> None:
    gate = torch.tensor([8.0, 2.0], requires_grad=True)
    up = torch.tensor([2.0, 9.0], requires_grad=True)
    clamped_swiglu(gate, up, 7.0).sum().backward()
    assert gate.grad is not None
    assert up.grad is not None
    assert gate.grad[0] == 0
    assert gate.grad[1] != 0
    assert up.grad[0] == 7
    assert up.grad[1] == 0


def test_swiglu_computes_bf16_in_fp32_and_rounds_once() -> None:
    gate, up = normal(200).bfloat16() * 4, normal(200, seed=1).bfloat16() * 4
    y = clamped_swiglu(gate, up, 2.0)
    assert torch.equal(y, clamped_swiglu(gate.float(), up.float(), 2.0).bfloat16())
    assert not torch.equal(y, torch.nn.functional.silu(gate).clamp(max=2.0) * up.clamp(-2.0, 2.0))


def test_mlp_is_down_of_the_clamped_product_of_gate_and_up() -> None:
    torch.manual_seed(0)
    mlp = Step5MLP(4, 6, limit=0.5)
    for parameter in mlp.parameters():
        parameter.data.normal_()
    x = normal(3, 4)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    act = (gate * gate.sigmoid()).clamp(max=0.5) * up.clamp(-0.5, 0.5)
    torch.testing.assert_close(mlp(x), act @ mlp.down_proj.weight.T)


@pytest.mark.parametrize("make", [lambda: Step5Linear(200, 300), lambda: Step5Embedding(200, 300)])
def test_weights_start_from_a_normal_of_deviation_0_02_cut_at_three_deviations(make: object) -> None:
    assert callable(make)
    torch.manual_seed(0)
    weight = make().weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert weight.mean().item() == pytest.approx(0, abs=5e-4)
    assert weight.abs().max().item() <= 0.06 + 1e-6
