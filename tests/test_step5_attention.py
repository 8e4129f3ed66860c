"""Attention of sliding and full layers against a computation with explicit loops."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp.models.step5 import Step5Config
from annotate_fsdp.models.step5.attention import Step5Attention, attend
from annotate_fsdp.models.step5.rotary import apply_rotary

SLIDING, FULL = 0, 2  # layers of the tiny config


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention_of(layer: int, **changes: Any) -> Step5Attention:
    torch.manual_seed(0)
    attention = Step5Attention(dataclasses.replace(Step5Config.tiny(), **changes), layer)
    for parameter in attention.parameters():
        parameter.data.normal_(std=0.3)
    return attention


def with_topk(topk: int) -> dict[str, Any]:
    return {"sparse_config": dataclasses.replace(Step5Config.tiny().sparse_config, topk=topk)}


def slow_attention(attention: Step5Attention, h: Tensor, seen: Any) -> Tensor:
    """Attention head by head; `seen(i)` lists the positions that query i reads."""
    length = h.shape[1]
    rows = h[0] @ attention.qkv_proj.weight.T  # [S, 2 groups * (2 queries, key, value) * 24]
    cos, sin = attention.rotary_emb(length, h.device)
    gates = torch.sigmoid(h[0] @ attention.g_proj.weight.T)  # [S, 4]
    heads = []
    for head in range(4):
        at = head // 2 * 4 * 24
        q, k, v = (rows[:, at + 24 * part : at + 24 * (part + 1)] for part in (head % 2, 2, 3))
        q, k = apply_rotary(attention.q_norm(q), cos, sin), apply_rotary(attention.k_norm(k), cos, sin)
        out = []
        for i in range(length):
            js = seen(i)
            weights = torch.softmax(k[js] @ q[i] / math.sqrt(24), dim=0)
            out.append(weights @ v[js] * gates[i, head])
        heads.append(torch.stack(out))
    return (torch.cat(heads, dim=-1) @ attention.o_proj.weight.T)[None]


def test_sliding_attention_reads_the_window_including_the_query() -> None:
    attention = attention_of(SLIDING, sliding_window=5)
    h = normal(1, 20, 96)
    expected = slow_attention(attention, h, lambda i: list(range(max(0, i - 4), i + 1)))
    torch.testing.assert_close(attention(h), expected, rtol=1e-4, atol=1e-4)


def test_a_window_of_one_reads_the_querys_own_value_only() -> None:
    attention = attention_of(SLIDING, sliding_window=1)
    h = normal(1, 6, 96)
    values = (h @ attention.qkv_proj.weight.T).view(1, 6, 2, 4, 24)[:, :, :, 3:]  # [1, S, G, 1, D]
    gates = torch.sigmoid(h @ attention.g_proj.weight.T).view(1, 6, 2, 2, 1)
    expected = (values * gates).reshape(1, 6, 96) @ attention.o_proj.weight.T
    torch.testing.assert_close(attention(h), expected, rtol=1e-4, atol=1e-4)


def test_full_attention_is_causal_attention_while_every_region_is_chosen() -> None:
    attention = attention_of(FULL, **with_topk(4))
    h = normal(1, 40, 96)  # 5 regions: 4 in the past of the last queries, and their own
    expected = slow_attention(attention, h, lambda i: list(range(i + 1)))
    torch.testing.assert_close(attention(h), expected, rtol=1e-4, atol=1e-4)


def test_full_attention_reads_less_as_soon_as_a_region_is_left_out() -> None:
    every, fewer = attention_of(FULL, **with_topk(4)), attention_of(FULL, **with_topk(3))
    h = normal(1, 40, 96)
    same = torch.isclose(every(h), fewer(h), rtol=1e-4, atol=1e-4).all(-1)[0]
    assert same[:32].all()
    assert not same[32:].any()


def test_each_groups_heads_read_the_groups_regions() -> None:
    attention = attention_of(FULL, **with_topk(1))
    h = normal(1, 40, 96)
    assert attention.indexer is not None
    regions = attention.indexer(h)[0]  # [S, G, 5]
    assert not torch.equal(regions[:, 0], regions[:, 1])
    for group in range(2):

        def seen(i: int, group: int = group) -> list[int]:
            return [j for j in range(i + 1) if regions[i, group, j // 8]]

        only = torch.zeros(4, 1)
        only[2 * group : 2 * group + 2] = 1
        mask = only.expand(4, 24).reshape(96)
        kept = attention_of(FULL, **with_topk(1))
        kept.o_proj.weight.data.mul_(mask)
        torch.testing.assert_close(kept(h), slow_attention(kept, h, seen), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [SLIDING, FULL])
def test_only_the_leading_third_rotates_on_full_layers(layer: int) -> None:
    attention = attention_of(layer)
    assert attention.rotary_emb.dim == (24 if layer == SLIDING else 8)
    assert attention.rotary_emb.theta == (1e4 if layer == SLIDING else 1e7)
    assert (attention.indexer is None) == (layer == SLIDING)
    if attention.indexer is not None:
        assert (attention.indexer.rotary_emb.dim, attention.indexer.rotary_emb.theta) == (4, 1e7)


def test_the_gate_scales_each_head_before_the_output_projection() -> None:
    attention = attention_of(SLIDING)
    h = normal(1, 10, 96)
    attention.o_proj.weight.data.copy_(torch.eye(96))
    attention.g_proj.weight.data.zero_()
    half = attention(h)  # sigmoid(0) everywhere
    attention.g_proj.weight.data[2].copy_(h[0, 3] * 10)
    opened = attention(h)
    gate = torch.sigmoid(10 * (h[0] @ h[0, 3]))
    torch.testing.assert_close(opened[0, :, 48:72], 2 * half[0, :, 48:72] * gate[:, None])
    assert torch.equal(opened[..., :48], half[..., :48])
    assert torch.equal(opened[..., 72:], half[..., 72:])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), groups=st.integers(1, 3), heads=st.integers(1, 3))
def test_attend_is_a_softmax_over_the_visible_keys_of_the_group(seed: int, groups: int, heads: int) -> None:
    q, k = normal(2, groups, heads, 5, 4, seed=seed), normal(2, groups, 1, 5, 4, seed=seed + 1)
    v = normal(2, groups, 1, 5, 4, seed=seed + 2)
    random = torch.rand(2, groups, 5, 5, generator=torch.Generator().manual_seed(seed)) < 0.5
    visible = random | torch.eye(5, dtype=torch.bool)
    out = attend(q, k, v, visible)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in (2, groups, heads, 5))).reshape(-1, 4).tolist():
        batch, group, head, i = at
        js = visible[batch, group, i].nonzero().flatten()
        weights = torch.softmax(k[batch, group, 0, js] @ q[batch, group, head, i] / 2.0, dim=0)
        torch.testing.assert_close(out[batch, group, head, i], weights @ v[batch, group, 0, js])
