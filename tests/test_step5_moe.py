"""Router and routed experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp.models.step5 import Step5Config
from annotate_fsdp.models.step5.mlp import clamped_swiglu
from annotate_fsdp.models.step5.moe import Step5Experts, Step5MoE, Step5Router


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def config_of(**changes: Any) -> Step5Config:
    return dataclasses.replace(Step5Config.tiny(), **changes)


def moe_of(config: Step5Config, limit: float | None = None) -> Step5MoE:
    torch.manual_seed(0)
    moe = Step5MoE(config, limit)
    for parameter in moe.parameters():
        parameter.data.normal_(std=0.3)
    return moe


def test_router_weights_are_normalised_sigmoids_times_the_scaling_factor() -> None:
    router = Step5Router(config_of(moe_top_k=3, moe_router_scaling_factor=2.5))
    h = normal(7, 96)
    router.weight.data.normal_(std=0.2)
    weights, experts = router(h)
    scores = torch.sigmoid(h @ router.weight.T)
    for token in range(7):
        ranked = sorted(range(8), key=lambda expert: -scores[token, expert].item())
        assert experts[token].tolist() == ranked[:3]
        total = sum(scores[token, expert].item() for expert in ranked[:3])
        expected = torch.tensor([scores[token, expert].item() / total * 2.5 for expert in ranked[:3]])
        torch.testing.assert_close(weights[token], expected)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_router_bias_moves_the_choice_but_is_not_in_the_weights(seed: int) -> None:
    router = Step5Router(config_of(moe_top_k=2))
    router.weight.data.normal_(generator=torch.Generator().manual_seed(seed))
    router.e_score_correction_bias.copy_(normal(8, seed=seed + 1))
    h = normal(5, 96, seed=seed + 2) / 10
    weights, experts = router(h)
    scores = torch.sigmoid(h @ router.weight.T)
    biased = scores + router.e_score_correction_bias
    assert torch.equal(experts, biased.topk(2).indices)
    chosen = scores.gather(-1, experts)
    torch.testing.assert_close(weights, 3.0 * chosen / chosen.sum(-1, keepdim=True))


def test_a_large_bias_brings_an_expert_in_at_its_own_unbiased_weight() -> None:
    router = Step5Router(config_of(moe_top_k=2))
    router.weight.data.zero_()
    router.weight.data[:2, 0] = 4.0
    h = torch.zeros(1, 96)
    h[0, 0] = 1.0
    assert router(h)[1].tolist() == [[0, 1]]
    router.e_score_correction_bias[5] = 1.0
    weights, experts = router(h)
    assert experts.tolist() == [[5, 0]]
    sigmoid = torch.sigmoid(torch.tensor([0.0, 4.0]))
    torch.testing.assert_close(weights[0], 3.0 * sigmoid / sigmoid.sum())


def test_equal_scores_go_to_the_lowest_expert() -> None:
    router = Step5Router(config_of(moe_top_k=3))
    router.weight.data.zero_()
    assert router(normal(4, 96))[1].tolist() == [[0, 1, 2]] * 4


def test_router_computes_in_fp32_and_its_bias_is_a_buffer() -> None:
    router = Step5Router(config_of())
    router.weight.data.normal_(std=0.2)
    h = normal(6, 96).bfloat16()
    expected = router(h.float())
    weights, experts = router(h)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, expected[0])
    assert torch.equal(experts, expected[1])
    assert dict(router.named_buffers()).keys() == {"e_score_correction_bias"}
    assert "e_score_correction_bias" in router.state_dict()
    assert weights.requires_grad


def test_expert_columns_are_gate_then_up_and_stand_on_the_right() -> None:
    experts = Step5Experts(config_of(moe_num_experts=2, moe_top_k=1), limit=None)
    experts.gate_and_up_projs.data.zero_()
    experts.gate_and_up_projs.data[1, :, 0] = normal(96, seed=1)  # expert 1: first column of gate
    experts.gate_and_up_projs.data[1, :, 32] = normal(96, seed=2)  # first column of up
    experts.down_projs.data.zero_()
    experts.down_projs.data[1, 0] = normal(96, seed=3)
    h = normal(1, 96)
    gate, up = h @ normal(96, seed=1), h @ normal(96, seed=2)
    expected = (gate * gate.sigmoid() * up)[:, None] * normal(96, seed=3)
    one = torch.ones(1, 1)
    torch.testing.assert_close(experts(h, one, torch.tensor([[1]])), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(experts(h, one, torch.tensor([[0]])), torch.zeros(1, 96))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), tokens=st.integers(1, 6), slots=st.integers(1, 4))
def test_experts_sum_each_tokens_slots_whoever_is_unused(seed: int, tokens: int, slots: int) -> None:
    experts = Step5Experts(config_of(moe_top_k=slots), limit=0.5)
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    h, weights = normal(tokens, 96, seed=seed + 1), normal(tokens, slots, seed=seed + 2)
    random = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(seed))
    ids = random.argsort(dim=-1)[:, :slots]
    out = experts(h, weights, ids)
    for token in range(tokens):
        expected = torch.zeros(96)
        for slot, expert in enumerate(ids[token].tolist()):
            both = h[token] @ experts.gate_and_up_projs[expert]
            act = clamped_swiglu(both[:32], both[32:], 0.5)
            expected = expected + weights[token, slot] * (act @ experts.down_projs[expert])
        torch.testing.assert_close(out[token], expected, rtol=1e-4, atol=1e-4)


def test_every_expert_gets_a_gradient_zero_where_no_token_went() -> None:
    moe = moe_of(config_of(moe_top_k=1))
    moe(normal(1, 1, 96)).sum().backward()
    used = moe.gate(normal(1, 1, 96))[1].item()
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is not None, name
        touched = parameter.grad.flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert touched == [used], name


def test_experts_round_each_output_and_sum_in_fp32() -> None:
    moe = moe_of(config_of(moe_top_k=4)).to(torch.bfloat16)
    h = normal(3, 96).bfloat16()
    weights, ids = moe.gate(h)
    expected = []
    for token in range(3):
        total = torch.zeros(96)
        for slot, expert in enumerate(ids[token].tolist()):
            both = h[token : token + 1] @ moe.experts.gate_and_up_projs[expert]
            act = clamped_swiglu(both[:, :32], both[:, 32:], None)
            total = total + weights[token, slot] * (act @ moe.experts.down_projs[expert])[0].float()
        expected.append(total.bfloat16())
    out = moe(h[None])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0], torch.stack(expected), rtol=2**-7, atol=1e-2)


def test_moe_treats_every_token_of_a_batch_alike() -> None:
    moe = moe_of(config_of())
    h = normal(2, 5, 96)
    out = moe(h)
    assert out.shape == h.shape
    alone = torch.stack([torch.stack([moe(h[b, s][None, None])[0, 0] for s in range(5)]) for b in range(2)])
    torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-4)
