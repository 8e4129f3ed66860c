"""The indexer: scores, the choice of compressed keys, candidates, and that nothing of it is trained."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM, record_choices
from annotate_fsdp.models.deepseek_v41.compressor import Compressed, visible_keys
from annotate_fsdp.models.deepseek_v41.indexer import (
    DeepseekV41Indexer,
    score_keys,
    select_candidates,
    select_keys,
)
from annotate_fsdp.models.deepseek_v41.quantize import fake_mxfp4
from annotate_fsdp.models.deepseek_v41.rotary import DeepseekV41RotaryEmbedding, apply_rotary

SOURCE, SINGLE, REINDEX = 1, 3, 4  # index sources of the tiny config: ratio 2, ratio 1 and narrowing, ratio 1


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_of(**changes: Any) -> Any:
    return dataclasses.replace(DeepseekV41Config.tiny().text_config, **changes)


def lively(**changes: Any) -> DeepseekV41ForCausalLM:
    """A tiny model whose weights are large enough for every part to matter."""
    torch.manual_seed(0)
    tiny = DeepseekV41Config.tiny()
    model = DeepseekV41ForCausalLM(dataclasses.replace(tiny, text_config=text_of(**changes)))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


def tokens(length: int) -> Tensor:
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))


class Bench:
    """An indexer with all that a layer gives to it."""

    def __init__(self, layer: int, length: int, seed: int = 0, **changes: Any) -> None:
        torch.manual_seed(seed)
        config = text_of(**changes)
        self.indexer = DeepseekV41Indexer(config, layer)
        for parameter in self.indexer.parameters():
            parameter.data.normal_(std=0.3)
        rotary = DeepseekV41RotaryEmbedding(config, layer)
        width = length // self.indexer.ratio
        self.x, self.latent = normal(1, length, 64, seed=seed + 1), normal(1, length, 48, seed=seed + 2)
        self.unrotated = normal(1, width, 32, seed=seed + 3)
        self.table = rotary(torch.arange(length))
        self.key_table = rotary(torch.arange(width) * self.indexer.ratio)

    def run(self, state: Compressed, valid: Tensor | None = None) -> Compressed:
        makes = self.indexer.wk is not None
        return self.indexer(
            self.x,
            self.latent,
            state,
            valid,
            self.table,
            self.unrotated if makes else None,
            self.key_table if makes else None,
        )

    def queries(self) -> Tensor:
        heads = (self.latent @ self.indexer.wq_b.weight.T).view(1, -1, self.indexer.heads, 32)
        cos, sin = self.table
        return torch.stack([apply_rotary(heads[:, :, h], cos, sin) for h in range(heads.shape[2])], dim=2)

    def weights(self) -> Tensor:
        return self.x @ self.indexer.weights_proj.weight.T / (32 * self.indexer.heads) ** 0.5


def test_indexers_are_frozen_and_everything_else_trains() -> None:
    model = lively()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".indexer." not in name), name
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    prefixes = {name.split(".indexer.")[0] for name in frozen}
    assert prefixes == {f"model.layers.{layer}.attn" for layer in (SOURCE, SINGLE, REINDEX)}


def test_an_optimizer_of_what_trains_leaves_the_indexers_as_they_are() -> None:
    model = lively()
    before = copy.deepcopy(model.state_dict())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    images = ("model.vision.", "model.aligner.", "model.image_")
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens(20)).square().mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        frozen = ".indexer." in name
        assert (parameter.grad is None) == (frozen or name.startswith(images)), name
        assert not frozen or torch.equal(parameter, before[name]), name
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_the_choice_is_made_without_gradient() -> None:
    bench = Bench(SOURCE, 12)
    bench.x.requires_grad_()
    bench.latent.requires_grad_()
    bench.unrotated.requires_grad_()
    state = bench.run(Compressed(kv=normal(1, 6, 32).requires_grad_()))
    assert state.kv is None, "the keys that are read are the attention's to hand on"
    assert state.index_keys is not None
    assert not state.index_keys.requires_grad


def test_a_score_is_the_weighted_sum_of_rectified_products_over_the_heads() -> None:
    q, k, w = normal(2, 3, 4, 5), normal(2, 6, 5, seed=1), normal(2, 3, 4, seed=2)
    scores = score_keys(q, k, w)
    assert scores.shape == (2, 3, 6)
    assert scores.min() < 0, "weights may be negative"
    for b in range(2):
        for position in range(3):
            for key in range(6):
                expected = 0.0
                for head in range(4):
                    pairs = zip(q[b, position, head].tolist(), k[b, key].tolist(), strict=True)
                    expected += w[b, position, head].item() * max(sum(x * y for x, y in pairs), 0.0)
                assert scores[b, position, key].item() == pytest.approx(expected, abs=1e-5)


def test_scores_are_in_the_dtype_of_the_model() -> None:
    q, k, w = normal(1, 3, 4, 5).bfloat16(), normal(1, 6, 5).bfloat16(), normal(1, 3, 4).bfloat16()
    scores = score_keys(q, k, w)
    assert scores.dtype == torch.bfloat16
    products = torch.einsum("bshd,bwd->bshw", q, k).relu() * w.unsqueeze(-1)
    assert products.dtype == torch.bfloat16
    assert torch.equal(scores, products.sum(2))


levels = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0])  # few, so that ties are common


@settings(max_examples=25, deadline=None)
@given(data=st.data(), width=st.integers(0, 8), topk=st.integers(1, 9))
def test_a_query_keeps_the_best_allowed_keys_ascending_and_then_minus_one(
    data: st.DataObject, width: int, topk: int
) -> None:
    drawn = data.draw(st.lists(levels, min_size=2 * width, max_size=2 * width))
    scores = torch.tensor(drawn).view(1, 2, width)
    permitted = data.draw(st.lists(st.booleans(), min_size=2 * width, max_size=2 * width))
    allowed = torch.tensor(permitted, dtype=torch.bool).view(1, 2, width)
    chosen = select_keys(scores, allowed, topk)
    assert chosen.dtype == torch.int64
    assert chosen.shape == (1, 2, min(topk, width))
    for position in range(2):
        row, keys = chosen[0, position].tolist(), allowed[0, position].nonzero().flatten().tolist()
        found = [key for key in row if key != -1]
        count = min(topk, len(keys))
        assert row == sorted(set(found)) + [-1] * (min(topk, width) - count)
        assert len(found) == count
        assert set(found) <= set(keys)
        best = sorted((scores[0, position, key].item() for key in keys), reverse=True)
        assert sorted((scores[0, position, key].item() for key in found), reverse=True) == best[:count]


def test_a_forbidden_key_is_never_chosen_however_good_and_never_uses_up_a_choice() -> None:
    scores = torch.tensor([[[9.0, -5.0, 8.0, -4.0, 7.0, -torch.inf]]])
    allowed = torch.tensor([[[False, True, False, True, False, False]]])
    assert select_keys(scores, allowed, 3).tolist() == [[[1, 3, -1]]]
    assert select_keys(scores, allowed, 1).tolist() == [[[3]]]
    assert select_keys(scores, torch.zeros_like(allowed), 2).tolist() == [[[-1, -1]]]


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    length=st.integers(1, 14),
    ratio=st.integers(1, 2),
    blocks=st.integers(1, 5),
    size=st.integers(1, 4),
)
def test_candidates_are_the_last_visible_block_and_the_best_others(
    data: st.DataObject, length: int, ratio: int, blocks: int, size: int
) -> None:
    width = length // ratio
    drawn = data.draw(st.lists(levels, min_size=length * width, max_size=length * width))
    scores = torch.tensor(drawn).view(1, length, width)
    visible = visible_keys(length, ratio, scores.device)
    allowed = (torch.arange(width) < visible[:, None])[None]
    candidates = select_candidates(scores, allowed, visible, blocks, size)
    assert candidates.shape == (1, length, width)
    assert not (candidates & ~allowed).any()
    for position in range(length):
        seen = int(visible[position])
        kept = candidates[0, position]
        assert int(kept.sum()) <= blocks * size
        members = [range(start, min(start + size, seen)) for start in range(0, seen, size)]
        whole = [bool(kept[list(block)].all()) for block in members]
        assert whole == [bool(kept[list(block)].any()) for block in members], "blocks are kept as a whole"
        assert sum(whole) == min(blocks, len(members))
        if members:
            assert whole[-1]
            best = [scores[0, position, list(block)].max().item() for block in members[:-1]]
            left = [value for value, is_kept in zip(best, whole, strict=False) if is_kept]
            assert sorted(left, reverse=True) == sorted(best, reverse=True)[: len(left)]


def test_a_block_is_as_good_as_its_best_allowed_key() -> None:
    scores = torch.tensor([[[0.0, 5.0, 9.0, 1.0, 4.0, 4.0, 0.0, 0.0]]])
    allowed = torch.tensor([[[True, True, False, True, True, True, True, True]]])
    candidates = select_candidates(scores, allowed, torch.tensor([8]), blocks=2, size=2)
    assert candidates.tolist() == [[[True, True, False, False, False, False, True, True]]]


@pytest.mark.parametrize("layer", [SOURCE, SINGLE])
@pytest.mark.parametrize("length", [2, 13])
def test_a_source_makes_keys_and_chooses_by_project_norm_rotate_score(layer: int, length: int) -> None:
    bench = Bench(layer, length, index_topk=3)
    state = bench.run(Compressed())
    indexer = bench.indexer
    assert indexer.wk is not None
    assert indexer.k_norm is not None
    keys = apply_rotary(indexer.k_norm(bench.unrotated @ indexer.wk.weight.T), *bench.key_table)
    assert state.index_keys is not None
    torch.testing.assert_close(state.index_keys, keys)
    visible = (torch.arange(length) + 1) // indexer.ratio
    allowed = (torch.arange(length // indexer.ratio) < visible[:, None])[None]
    scores = score_keys(bench.queries(), keys, bench.weights())
    assert state.chosen is not None
    assert torch.equal(state.chosen, select_keys(scores, allowed, 3))
    assert (state.candidates is None) == (layer == SOURCE)


def test_the_weights_of_the_heads_are_divided_by_the_roots_of_dim_and_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, seen = Bench(SINGLE, 5), list[Tensor]()

    def note(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        seen.append(weights)
        return score_keys(queries, keys, weights)

    monkeypatch.setattr("annotate_fsdp.models.deepseek_v41.indexer.score_keys", note)
    bench.run(Compressed())
    expected = bench.x @ bench.indexer.weights_proj.weight.T / math.sqrt(32) / math.sqrt(4)
    torch.testing.assert_close(seen[0], expected)


def test_the_narrowing_source_is_not_held_to_its_own_candidates() -> None:
    bench = Bench(SINGLE, 40, candidate_topk_blocks=2, candidate_block_size=2, index_topk=12)
    state = bench.run(Compressed())
    assert state.chosen is not None
    assert state.candidates is not None
    assert int(state.candidates[0, 39].sum()) == 4
    assert (state.chosen[0, 39] >= 0).all(), "twelve keys, of which at most four are candidates"


def test_a_reindexing_layer_chooses_among_the_candidates_with_the_sources_keys() -> None:
    sizes = {"candidate_topk_blocks": 3, "candidate_block_size": 2, "index_topk": 4}
    state = Bench(SINGLE, 40, **sizes).run(Compressed())
    bench = Bench(REINDEX, 40, seed=5, **sizes)
    assert bench.indexer.wk is bench.indexer.k_norm is None
    after = bench.run(state)
    assert after.index_keys is after.candidates is None, "it makes a choice only"
    assert state.index_keys is not None
    assert state.candidates is not None
    assert after.chosen is not None
    scores = score_keys(bench.queries(), state.index_keys, bench.weights())
    allowed = torch.ones(40, 40, dtype=torch.bool).tril()[None]
    assert torch.equal(after.chosen, select_keys(scores, allowed & state.candidates, 4))
    free = bench.run(state._replace(candidates=None)).chosen
    assert free is not None
    assert torch.equal(free, select_keys(scores, allowed, 4))
    assert not torch.equal(free, after.chosen)


def test_a_source_forgets_the_candidates_of_the_one_before() -> None:
    state = Bench(SINGLE, 12).run(Compressed())
    assert state.candidates is not None
    after = Bench(SOURCE, 12).run(state)
    assert after.candidates is None
    assert after.index_keys is not None
    assert after.index_keys.shape[1] == 6


def test_keys_with_a_padded_token_are_not_chosen() -> None:
    valid = torch.arange(12)[None] < 7
    state = Bench(SOURCE, 12).run(Compressed(), valid)
    assert state.chosen is not None
    assert int(state.chosen.max()) == 2, "keys 0, 1, 2 hold tokens 0 to 5; key 3 holds the padded token 7"
    assert state.chosen[0, 5].tolist() == [0, 1, 2, -1, -1, -1]


def test_queries_and_keys_are_rounded_to_fp4() -> None:
    plain, rounded = Bench(SINGLE, 60), Bench(SINGLE, 60, cache_fake_quantization=True)
    before, after = plain.run(Compressed()), rounded.run(Compressed())
    assert before.index_keys is not None
    assert after.index_keys is not None
    assert after.chosen is not None
    keys = fake_mxfp4(before.index_keys)
    assert torch.equal(after.index_keys, keys)
    allowed = torch.ones(60, 60, dtype=torch.bool).tril()[None]
    queries = plain.queries()
    scores = score_keys(fake_mxfp4(queries), keys, plain.weights())
    assert torch.equal(after.chosen, select_keys(scores, allowed, 16))
    unrounded = select_keys(score_keys(queries, keys, plain.weights()), allowed, 16)
    assert not torch.equal(after.chosen, unrounded)


def test_recorded_choices_are_what_the_modules_returned_and_end_with_the_context() -> None:
    model, ids = lively(), tokens(30)
    states: dict[int, Compressed] = {}
    routed: dict[int, Tensor] = {}
    for layer, block in enumerate(model.model.layers.values()):

        def note(_: object, __: object, out: Any, layer: int = layer) -> None:
            states[layer] = out[2]

        def note_experts(_: object, __: object, out: Any, layer: int = layer) -> None:
            routed[layer] = out[1]

        block.register_forward_hook(note)
        block.ffn.gate.register_forward_hook(note_experts)
    with record_choices(model) as choices:
        model(ids)
    sources = (SOURCE, SINGLE, REINDEX)
    assert choices.keys == {layer: states[layer].chosen.tolist() for layer in sources}  # type: ignore[union-attr]
    assert choices.candidates == {SINGLE: states[SINGLE].candidates.tolist()}  # type: ignore[union-attr]
    assert choices.experts == {layer: of.tolist() for layer, of in routed.items()}
    assert choices.experts.keys() == set(range(5))
    before = copy.deepcopy(choices)
    model(tokens(7))
    assert choices == before


def test_a_later_kv_source_after_the_candidates_chooses_freely_again() -> None:
    model = lively(
        num_hidden_layers=4,
        compress_ratios=(1, 1, 1, 1),
        kv_source_layer_ids=(0, 2),
        index_source_layer_ids=(0, 1, 2, 3),
        candidate_source_layer_id=0,
        candidate_topk_blocks=1,
        candidate_block_size=2,
        index_topk=8,
        engram_layer_ids=(),
        engram_num_embeddings=(),
    )
    with record_choices(model) as choices:
        model(tokens(20))
    last = [[key for key in choices.keys[layer][0][19] if key >= 0] for layer in range(4)]
    assert [len(keys) for keys in last] == [8, 2, 8, 8]
    assert last[1] == [18, 19], "one block, and the last visible one is always kept"
