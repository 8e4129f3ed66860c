"""Router, routed experts and the shared expert."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp.models.deepseek_v41 import DeepseekV41Config
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig
from annotate_fsdp.models.deepseek_v41.moe import (
    DeepseekV41Experts,
    DeepseekV41MLP,
    DeepseekV41MoE,
    DeepseekV41Router,
    clamped_swiglu,
)

HIDDEN, INTER, EXPERTS = 64, 48, 8
seeds = st.integers(0, 2**31 - 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def config_of(**changes: Any) -> DeepseekV41TextConfig:
    return dataclasses.replace(DeepseekV41Config.tiny().text_config, **changes)


def router_of(seed: int = 0, **changes: Any) -> DeepseekV41Router:
    router = DeepseekV41Router(config_of(**changes))
    router.weight.data.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    return router


def moe_of(**changes: Any) -> DeepseekV41MoE:
    torch.manual_seed(0)
    moe = DeepseekV41MoE(config_of(**changes))
    for parameter in moe.parameters():
        parameter.data.normal_(std=0.3)
    return moe


def score(logit: float) -> float:
    """sqrt(softplus(logit))."""
    return math.sqrt(math.log1p(math.exp(logit)))


@pytest.mark.parametrize("scale", [1.5, 2.5])
def test_router_weights_are_normalised_roots_of_softplus_times_the_scaling_factor(scale: float) -> None:
    router, h = router_of(num_experts_per_tok=3, routed_scaling_factor=scale), normal(7, HIDDEN)
    weights, experts = router(h)
    logits = h @ router.weight.T
    for token in range(7):
        scores = [score(logit) for logit in logits[token].tolist()]
        ranked = sorted(range(EXPERTS), key=lambda expert: -scores[expert])[:3]
        assert experts[token].tolist() == ranked
        total = sum(scores[expert] for expert in ranked)
        expected = [scores[expert] / total * scale for expert in ranked]
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("changes", [{"norm_topk_prob": False}, {"num_experts_per_tok": 1}])
def test_weights_are_plain_scores_without_normalisation_or_with_a_single_expert(
    changes: dict[str, Any],
) -> None:
    router, h = router_of(**changes), normal(5, HIDDEN)
    weights, experts = router(h)
    logits = (h @ router.weight.T).gather(-1, experts)
    expected = [1.5 * score(logit) for logit in logits.flatten().tolist()]
    assert weights.flatten().tolist() == pytest.approx(expected, rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_text_and_image_tokens_choose_by_their_own_bias_which_is_not_in_the_weights(seed: int) -> None:
    router, h = router_of(seed), normal(6, HIDDEN, seed=seed + 1) / 10
    router.e_score_correction_bias.copy_(normal(EXPERTS, seed=seed + 2))
    router.bias_vl.copy_(normal(EXPERTS, seed=seed + 3))
    is_image = torch.tensor([False, True, False, True, True, False])
    scores = torch.nn.functional.softplus(h @ router.weight.T).sqrt()
    for mask in (is_image, None):
        weights, experts = router(h, mask)
        for token in range(6):
            image = mask is not None and bool(mask[token])
            biased = scores[token] + (router.bias_vl if image else router.e_score_correction_bias)
            assert experts[token].tolist() == biased.topk(2).indices.tolist()
        chosen = scores.gather(-1, experts)
        torch.testing.assert_close(weights, 1.5 * chosen / chosen.sum(-1, keepdim=True))


def test_equal_scores_go_to_the_lowest_expert() -> None:
    router = router_of(num_experts_per_tok=3)
    router.weight.data.zero_()
    assert router(normal(4, HIDDEN))[1].tolist() == [[0, 1, 2]] * 4


def test_the_router_computes_in_fp32_and_its_biases_are_buffers_without_gradient() -> None:
    router, h = router_of(), normal(6, HIDDEN).bfloat16()
    expected = router(h.float())
    weights, experts = router(h)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, expected[0])
    assert torch.equal(experts, expected[1])
    assert weights.requires_grad
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert router.state_dict().keys() == {"weight", "e_score_correction_bias", "bias_vl"}
    narrow = router.to(torch.bfloat16)
    assert narrow(h)[0].dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(
    gate=st.floats(-30, 30, width=32),
    up=st.floats(-30, 30, width=32),
    limit=st.sampled_from([0.0, 0.25, 1.0, 10.0]),
)
def test_swiglu_clamps_the_gate_from_above_before_silu_and_the_linear_part_on_both_sides(
    gate: float, up: float, limit: float
) -> None:
    clamped, linear = (min(gate, limit), max(-limit, min(up, limit))) if limit else (gate, up)
    expected = clamped / (1 + math.exp(-clamped)) * linear
    y = clamped_swiglu(torch.tensor(gate), torch.tensor(up), limit)
    assert y.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_swiglu_passes_no_gradient_where_it_clamps_and_gives_fp32_from_bf16() -> None:
    gate = torch.tensor([12.0, 2.0, -12.0], requires_grad=True)
    up = torch.tensor([2.0, 11.0, -11.0], requires_grad=True)
    clamped_swiglu(gate, up, 10.0).sum().backward()
    assert gate.grad is not None
    assert up.grad is not None
    assert [bool(g) for g in gate.grad] == [False, True, True]
    assert [bool(g) for g in up.grad] == [True, False, False]
    narrow = clamped_swiglu(normal(9).bfloat16(), normal(9, seed=1).bfloat16(), 1.0)
    assert narrow.dtype == torch.float32
    wide = clamped_swiglu(normal(9).bfloat16().float(), normal(9, seed=1).bfloat16().float(), 1.0)
    assert torch.equal(narrow, wide)


def test_expert_columns_are_gate_then_up_and_stand_on_the_right() -> None:
    experts = DeepseekV41Experts(config_of(n_routed_experts=2, num_experts_per_tok=1, swiglu_limit=0))
    experts.gate_and_up_projs.data.zero_()
    experts.gate_and_up_projs.data[1, :, 0] = normal(HIDDEN, seed=1)  # expert 1: first column of gate
    experts.gate_and_up_projs.data[1, :, INTER] = normal(HIDDEN, seed=2)  # first column of up
    experts.down_projs.data.zero_()
    experts.down_projs.data[1, 0] = normal(HIDDEN, seed=3)
    h = normal(1, HIDDEN)
    gate, up = h @ normal(HIDDEN, seed=1), h @ normal(HIDDEN, seed=2)
    expected = (gate * gate.sigmoid() * up)[:, None] * normal(HIDDEN, seed=3)
    one = torch.ones(1, 1)
    torch.testing.assert_close(experts(h, one, torch.tensor([[1]])), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(experts(h, one, torch.tensor([[0]])), torch.zeros(1, HIDDEN))


@settings(max_examples=20, deadline=None)
@given(seed=seeds, count=st.integers(1, 6), slots=st.integers(1, 4))
def test_experts_sum_each_tokens_slots_whoever_is_unused(seed: int, count: int, slots: int) -> None:
    experts = DeepseekV41Experts(config_of(num_experts_per_tok=slots, swiglu_limit=0.5))
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    h, weights = normal(count, HIDDEN, seed=seed + 1), normal(count, slots, seed=seed + 2)
    random = torch.rand(count, EXPERTS, generator=torch.Generator().manual_seed(seed))
    ids = random.argsort(dim=-1)[:, :slots]
    out = experts(h, weights, ids)
    for token in range(count):
        expected = torch.zeros(HIDDEN)
        for slot, expert in enumerate(ids[token].tolist()):
            both = h[token] @ experts.gate_and_up_projs[expert]
            act = clamped_swiglu(both[:INTER], both[INTER:], 0.5)
            expected = expected + weights[token, slot] * (act @ experts.down_projs[expert])
        torch.testing.assert_close(out[token], expected, rtol=1e-4, atol=1e-4)


def test_in_bf16_the_weights_are_applied_in_fp32_before_rounding_and_projecting_down() -> None:
    moe = moe_of(num_experts_per_tok=4, swiglu_limit=2.0).to(torch.bfloat16)
    experts, h = moe.experts, normal(40, HIDDEN).bfloat16()
    weights, ids = moe.gate(h)
    out = experts(h, weights, ids)
    assert out.dtype == torch.bfloat16

    def slow(before: bool) -> Tensor:
        """One token and slot at a time, the weight before or after the projection."""
        rows = []
        for token in range(len(h)):
            total = torch.zeros(HIDDEN)
            for slot, expert in enumerate(ids[token].tolist()):
                gate, up = (h[token] @ experts.gate_and_up_projs[expert]).chunk(2)
                weight = weights[token, slot]
                act = clamped_swiglu(gate, up, 2.0) * (weight if before else 1.0)
                down = (act.bfloat16() @ experts.down_projs[expert]).float()
                total = total + down * (1.0 if before else weight)
            rows.append(total.bfloat16())
        return torch.stack(rows)

    right, wrong = slow(before=True), slow(before=False)
    assert (out == right).float().mean() > 0.97, "all but sums in another order"
    assert (out == wrong).float().mean() < 0.9
    torch.testing.assert_close(out, right, rtol=2**-6, atol=0.05)


def test_every_expert_gets_a_gradient_zero_where_no_token_went() -> None:
    moe = moe_of(num_experts_per_tok=1)
    moe(normal(1, 1, HIDDEN)).sum().backward()
    used = moe.gate(normal(1, 1, HIDDEN))[1].item()
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is not None, name
        touched = parameter.grad.flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert touched == [used], name


def test_the_shared_expert_is_down_of_the_clamped_product_of_gate_and_up() -> None:
    torch.manual_seed(0)
    mlp = DeepseekV41MLP(config_of(swiglu_limit=0.5))
    for parameter in mlp.parameters():
        parameter.data.normal_(std=0.3)
    x = normal(3, HIDDEN)
    gate = (x @ mlp.gate_proj.weight.T).clamp(max=0.5)
    up = (x @ mlp.up_proj.weight.T).clamp(-0.5, 0.5)
    expected = (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5)
    narrow = mlp.to(torch.bfloat16)(x.bfloat16())
    assert narrow.dtype == torch.bfloat16


def test_the_layer_adds_the_shared_expert_without_a_weight() -> None:
    moe, h = moe_of(), normal(2, 5, HIDDEN)
    weights, ids = moe.gate(h)
    routed = moe.experts(h.flatten(0, 1), weights.flatten(0, 1), ids.flatten(0, 1)).view_as(h)
    torch.testing.assert_close(moe(h), routed + moe.shared_experts(h))


def test_the_layer_treats_every_token_of_a_batch_alike() -> None:
    moe, h = moe_of(), normal(2, 5, HIDDEN)
    out = moe(h)
    assert out.shape == h.shape
    alone = torch.stack([torch.stack([moe(h[b, s][None, None])[0, 0] for s in range(5)]) for b in range(2)])
    torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-4)


def test_image_tokens_go_where_their_bias_sends_them() -> None:
    moe, h = moe_of(num_experts_per_tok=1), normal(1, 6, HIDDEN)
    moe.gate.e_score_correction_bias[2] = 100.0
    moe.gate.bias_vl[5] = 100.0
    seen: list[Tensor] = []
    moe.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[2]))
    is_image = torch.tensor([[False, True, True, False, False, True]])
    moe(h, is_image)
    assert seen[0].flatten().tolist() == [2, 5, 5, 2, 2, 5]


def test_no_routed_expert_works_on_padding() -> None:
    moe, h = moe_of(), normal(2, 4, HIDDEN)
    valid = torch.tensor([[True, True, False, False], [True, True, True, False]])
    seen: list[Tensor] = []
    moe.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    out = moe(h, None, valid)
    assert torch.equal(seen[0], h[valid])
    torch.testing.assert_close(out[valid], moe(h)[valid], rtol=1e-4, atol=1e-4)
    assert torch.equal(out[~valid], moe.shared_experts(h)[~valid])
    nothing = moe(h, None, torch.zeros_like(valid))
    torch.testing.assert_close(nothing, moe.shared_experts(h))
