"""The sparse indexer: summaries, scores, the choice of regions and its ties."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp.models.step5 import Step5Config
from annotate_fsdp.models.step5.indexer import (
    Step5IndexerWeightProjection,
    Step5SparseIndexer,
    causal,
    score_regions,
    select_regions,
    summarize_regions,
    visible_tokens,
)
from annotate_fsdp.models.step5.rotary import apply_rotary


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def indexer_of(**changes: Any) -> Step5SparseIndexer:
    """An indexer of the tiny sizes with weights large enough to have opinions."""
    torch.manual_seed(0)
    indexer = Step5SparseIndexer(dataclasses.replace(Step5Config.tiny(), **changes), layer=2)
    for parameter in indexer.parameters():
        parameter.data.normal_(std=0.3)
    return indexer


def chosen(regions: Tensor) -> list[list[list[int]]]:
    """ids[position][group] of a batch of one."""
    return [[group.nonzero().flatten().tolist() for group in position] for position in regions[0]]


def test_a_summary_is_the_gate_weighted_mean_of_a_regions_keys_channel_by_channel() -> None:
    keys, gates = normal(2, 11, 3), normal(2, 11, 3, seed=1)
    summaries = summarize_regions(keys, gates, region=4)
    assert summaries.shape == (2, 2, 3), "the incomplete third region has none"
    for batch in range(2):
        for region in range(2):
            for channel in range(3):
                tokens = range(4 * region, 4 * region + 4)
                weights = [gates[batch, t, channel].exp().item() for t in tokens]
                total = sum(w * keys[batch, t, channel].item() for w, t in zip(weights, tokens, strict=True))
                mean = total / sum(weights)
                assert summaries[batch, region, channel].item() == pytest.approx(mean, abs=1e-6)


def test_a_score_is_the_weighted_sum_of_rectified_products_over_the_groups_heads() -> None:
    q, w, summaries = normal(1, 3, 2, 4, 5), normal(1, 3, 2, 4, seed=1), normal(1, 6, 5, seed=2)
    scores = score_regions(q, w, summaries)
    assert scores.shape == (1, 3, 2, 6)
    assert scores.min() < 0, "negative head weights make negative scores"
    for position in range(3):
        for group in range(2):
            for region in range(6):
                expected = 0.0
                for head in range(4):
                    products = zip(
                        q[0, position, group, head].tolist(), summaries[0, region].tolist(), strict=True
                    )
                    dot = sum(a * b for a, b in products)
                    expected += w[0, position, group, head].item() * max(dot, 0.0)
                assert scores[0, position, group, region].item() == pytest.approx(expected, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    length=st.integers(1, 20),
    region=st.integers(1, 5),
    topk=st.integers(1, 4),
)
def test_a_query_keeps_the_best_past_regions_and_its_own(
    data: st.DataObject, length: int, region: int, topk: int
) -> None:
    values = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0])  # few, so that ties are common
    count = length // region
    flat = data.draw(st.lists(values, min_size=length * count, max_size=length * count))
    scores = torch.tensor(flat).view(1, length, 1, count)
    regions = chosen(select_regions(scores, topk, region))
    for position in range(length):
        own = position // region
        by_rank = sorted(range(own), key=lambda r: (-scores[0, position, 0, r].item(), r))
        assert regions[position][0] == sorted([*by_rank[:topk], own])


def test_minus_zero_ties_with_zero_and_the_lowest_region_wins() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 0.0]]).expand(20, 5).view(1, 20, 1, 5)
    regions = chosen(select_regions(scores, topk=2, region=4))
    assert regions[16] == [[0, 1, 4]]
    assert regions[19] == [[0, 1, 4]]


def test_a_region_of_the_future_or_the_own_incomplete_one_never_uses_up_a_choice() -> None:
    scores = torch.arange(5.0).expand(1, 20, 1, 5)  # the later the better
    regions = chosen(select_regions(scores, topk=2, region=4))
    assert regions[3] == [[0]]
    assert regions[4] == [[0, 1]]
    assert regions[11] == [[0, 1, 2]]
    assert regions[15] == [[1, 2, 3]]


def test_a_query_sees_its_regions_tokens_up_to_itself() -> None:
    regions = torch.zeros(1, 6, 2, 3, dtype=torch.bool)
    regions[0, 5, 0, [0, 2]] = True
    regions[0, 5, 1, [1, 2]] = True
    regions[0, 4, 0, 2] = True
    visible = visible_tokens(regions, region=2)
    assert visible.shape == (1, 2, 6, 6)
    assert visible[0, :, 5].nonzero().tolist() == [
        [0, 0],
        [0, 1],
        [0, 4],
        [0, 5],
        [1, 2],
        [1, 3],
        [1, 4],
        [1, 5],
    ]
    assert visible[0, 0, 4].nonzero().flatten().tolist() == [4], "position 5 is of its region, but later"


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 12), window=st.integers(1, 14))
def test_a_window_holds_the_query_and_the_window_minus_one_tokens_before_it(length: int, window: int) -> None:
    seen = causal(length, torch.device("cpu"), window)
    for i in range(length):
        assert seen[i].nonzero().flatten().tolist() == list(range(max(0, i - window + 1), i + 1))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
def test_the_choice_is_made_of_the_parts_in_the_order_project_norm_rotate_summarize_score(
    length: int,
) -> None:
    indexer = indexer_of()
    h = normal(1, length, 96)
    cos, sin = indexer.rotary_emb(length, h.device)
    q = indexer.q_norm((h @ indexer.q_proj.weight.T).view(1, length, 4, 16))
    q = torch.stack([apply_rotary(q[:, :, head], cos, sin) for head in range(4)], dim=2)
    k = apply_rotary(indexer.k_norm(h @ indexer.k_proj.weight.T), cos, sin)
    w = (h @ indexer.w_proj.weight.T) / 2**0.5  # two heads a group
    summaries = summarize_regions(k, h @ indexer.z_proj.weight.T, 8)
    by_group = [
        score_regions(q[:, :, None, 2 * g : 2 * g + 2], w[:, :, None, 2 * g : 2 * g + 2], summaries)
        for g in range(2)
    ]
    expected = select_regions(torch.cat(by_group, dim=2), topk=3, region=8)
    regions = indexer(h)
    assert regions.shape == (1, length, 2, -(-length // 8))
    assert torch.equal(regions, expected)


def test_groups_choose_for_themselves_and_more_than_topk_regions_compete() -> None:
    regions = chosen(indexer_of()(normal(1, 128, 96)))
    assert len(regions[127][0]) == 4
    assert any(position[0] != position[1] for position in regions)
    assert any(position[0] != list(range(len(position[0]))) for position in regions)


def test_fp8_rounding_casts_summaries_through_bf16_and_queries_straight_to_e4m3() -> None:
    plain, rounded = indexer_of(), indexer_of(indexer_fp8_rounding=True)
    h = normal(1, 128, 96)
    cos, sin = plain.rotary_emb(128, h.device)
    q = plain.q_norm((h @ plain.q_proj.weight.T).view(1, 128, 2, 2, 16))
    q = apply_rotary(q.transpose(1, 3), cos, sin).transpose(1, 3)
    k = apply_rotary(plain.k_norm(h @ plain.k_proj.weight.T), cos, sin)
    w = plain.w_proj(h).view(1, 128, 2, 2) / 2**0.5
    summaries = summarize_regions(k, h @ plain.z_proj.weight.T, 8)
    q8 = q.to(torch.float8_e4m3fn).float()
    s8 = summaries.bfloat16().to(torch.float8_e4m3fn).float()
    expected = select_regions(score_regions(q8, w, s8), 3, 8)
    assert torch.equal(rounded(h), expected)
    assert not torch.equal(plain(h), expected), "the rounding changes what is chosen"
    assert not torch.equal(select_regions(score_regions(q, w, s8), 3, 8), expected), "queries round too"
    assert not torch.equal(select_regions(score_regions(q8, w, summaries), 3, 8), expected), "so do summaries"


def test_the_head_weight_projection_multiplies_with_its_weight_rounded_to_the_activations_dtype() -> None:
    projection = Step5IndexerWeightProjection(96, 4)
    projection.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    h = normal(5, 96)
    torch.testing.assert_close(projection(h), h @ projection.weight.T)
    narrow = projection(h.bfloat16())
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, (h.bfloat16() @ projection.weight.bfloat16().T).float())
    assert projection.weight.dtype == torch.float32


def test_the_choice_is_made_without_gradient() -> None:
    indexer = indexer_of()
    tracked: list[bool] = []
    for module in (indexer.q_proj, indexer.k_proj, indexer.z_proj, indexer.w_proj):
        module.register_forward_hook(lambda _, __, output: tracked.append(output.requires_grad))
    indexer(normal(1, 16, 96).requires_grad_())
    assert tracked == [False] * 4
    assert all(parameter.requires_grad for parameter in indexer.parameters())
