"""Attention over the window and the compressed keys against a computation with explicit loops."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM
from annotate_fsdp.models.deepseek_v41.attention import (
    DeepseekV41Attention,
    attend,
    chosen_mask,
    local_keys,
)
from annotate_fsdp.models.deepseek_v41.compressor import (
    Compressed,
    DeepseekV41Compressor,
    visible_keys,
    whole_groups,
)
from annotate_fsdp.models.deepseek_v41.quantize import fake_fp8, fake_nvfp4
from annotate_fsdp.models.deepseek_v41.rotary import apply_rotary

WINDOW, SOURCE, REUSE, SINGLE, REINDEX = range(5)  # layers of the tiny config
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_of(**changes: Any) -> Any:
    return dataclasses.replace(DeepseekV41Config.tiny().text_config, **changes)


def attention_of(layer: int, seed: int = 0, **changes: Any) -> DeepseekV41Attention:
    torch.manual_seed(seed)
    attention = DeepseekV41Attention(text_of(**changes), layer)
    for parameter in attention.parameters():
        parameter.data.normal_(std=0.3)
    return attention


def lively(**changes: Any) -> DeepseekV41ForCausalLM:
    """A tiny model whose weights are large enough for every part to matter."""
    torch.manual_seed(0)
    tiny = DeepseekV41Config.tiny()
    model = DeepseekV41ForCausalLM(dataclasses.replace(tiny, text_config=text_of(**changes)))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


def slow_attention(attention: DeepseekV41Attention, x: Tensor, state: Compressed) -> Tensor:
    """Attention of one row, head by head and query by query, over the keys of `state` that it chose."""
    length, dim = x.shape[1], 32
    latent = attention.q_norm(x[0] @ attention.wq_a.weight.T)
    queries = (latent @ attention.wq_b.weight.T).view(length, 4, dim)
    cos, sin = attention.rotary_emb(torch.arange(length))
    keys = apply_rotary(attention.kv_norm(x[0] @ attention.wkv.weight.T), cos, sin)
    heads = torch.zeros(length, 4, dim)
    for i in range(length):
        read = [keys[j] for j in range(max(0, i - attention.window + 1), i + 1)]
        if attention.ratio:
            assert state.kv is not None
            assert state.chosen is not None
            read += [state.kv[0, j] for j in state.chosen[0, i].tolist() if j >= 0]
        table = torch.stack(read)
        for head in range(4):
            query = apply_rotary(queries[i, head], cos[i], sin[i])
            shares = (table @ query / math.sqrt(dim)).exp()
            total = shares.sum() + attention.attn_sink[head].exp()
            heads[i, head] = apply_rotary(shares @ table / total, cos[i], sin[i], inverse=True)
    wo_a = attention.wo_a.weight.view(2, 32, 64)
    groups = [heads[:, 2 * g : 2 * g + 2].reshape(length, 64) @ wo_a[g].T for g in range(2)]
    return (torch.cat(groups, dim=-1) @ attention.wo_b.weight.T)[None]


def test_a_layer_without_compression_reads_its_window_only() -> None:
    attention, x = attention_of(WINDOW, sliding_window=5), normal(1, 20, 64)
    out, state = attention(x, Compressed())
    assert state == Compressed()
    torch.testing.assert_close(out, slow_attention(attention, x, state), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", [SOURCE, SINGLE])
def test_a_source_reads_its_window_and_the_keys_that_it_chose(source: int) -> None:
    attention = attention_of(source, sliding_window=3, index_topk=4)
    x = normal(1, 21, 64)
    out, state = attention(x, Compressed())
    assert state.kv is not None
    assert state.chosen is not None
    assert state.kv.shape == (1, 21 // attention.ratio, 32)
    assert state.chosen.shape == (1, 21, 4)
    assert (state.chosen[0, -1] >= 0).all()
    torch.testing.assert_close(out, slow_attention(attention, x, state), rtol=1e-4, atol=1e-4)


def test_a_later_layer_reads_the_sources_keys_and_makes_none() -> None:
    _, state = attention_of(SOURCE)(normal(1, 21, 64), Compressed())
    attention, x = attention_of(REUSE, seed=1), normal(1, 21, 64, seed=1)
    out, made = attention(x, state)
    assert made == Compressed()
    assert state.after(made) is state
    torch.testing.assert_close(out, slow_attention(attention, x, state), rtol=1e-4, atol=1e-4)


def test_a_reindexing_layer_replaces_the_choice_and_keeps_the_keys() -> None:
    _, state = attention_of(SINGLE, index_topk=3)(normal(1, 21, 64), Compressed())
    attention, x = attention_of(REINDEX, seed=1, index_topk=3), normal(1, 21, 64, seed=1)
    out, made = attention(x, state)
    assert made.kv is made.index_keys is made.candidates is None
    after = state.after(made)
    assert after.kv is state.kv
    assert after.index_keys is state.index_keys
    assert after.candidates is state.candidates
    assert state.chosen is not None
    assert after.chosen is not None
    assert not torch.equal(after.chosen, state.chosen)
    torch.testing.assert_close(out, slow_attention(attention, x, after), rtol=1e-4, atol=1e-4)


def test_a_source_replaces_all_that_came_before() -> None:
    _, state = attention_of(SINGLE)(normal(1, 8, 64), Compressed())
    assert state.candidates is not None
    after = state.after(attention_of(SOURCE)(normal(1, 8, 64), state)[1])
    assert after.candidates is None
    assert after.kv is not None
    assert after.index_keys is not None
    assert after.kv.shape[1] == after.index_keys.shape[1] == 4


def test_the_gradient_of_a_later_layer_reaches_the_sources_compressor() -> None:
    source, reuse = attention_of(SOURCE), attention_of(REUSE, seed=1)
    x = normal(1, 12, 64).requires_grad_()
    _, state = source(x, Compressed())
    reuse(x.detach(), state)[0].square().sum().backward()
    assert source.compressor is not None
    for name, parameter in source.compressor.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert source.wkv.weight.grad is None, "only the compressed keys are shared"


def test_local_keys_are_stored_in_fp8_and_compressed_ones_in_fp4() -> None:
    plain, rounded = attention_of(SOURCE), attention_of(SOURCE, cache_fake_quantization=True)
    x = normal(1, 12, 64)
    _, state = plain(x, Compressed())
    _, stored = rounded(x, Compressed())
    assert state.kv is not None
    assert stored.kv is not None
    assert torch.equal(stored.kv, fake_nvfp4(state.kv))
    assert not torch.equal(stored.kv, state.kv)
    window = attention_of(WINDOW, cache_fake_quantization=True, sliding_window=1)
    cos, sin = window.rotary_emb(torch.arange(12))
    keys = fake_fp8(apply_rotary(window.kv_norm(x[0] @ window.wkv.weight.T), cos, sin))
    seen: list[Tensor] = []
    window.wo_a.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    window.sinks_param.weight.data.fill_(-100.0)  # a window of one then gives each head the key itself
    window(x, Compressed())
    expected = apply_rotary(keys, cos, sin, inverse=True).repeat(1, 4).view(1, 12, 2, 64)
    torch.testing.assert_close(seen[0], expected)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), heads=st.integers(1, 3), keys=st.integers(1, 6))
def test_attend_is_a_softmax_over_the_allowed_keys_with_the_sink_in_the_denominator_only(
    seed: int, heads: int, keys: int
) -> None:
    q, k = normal(2, 3, heads, 4, seed=seed), normal(2, keys, 4, seed=seed + 1)
    allowed = torch.rand(2, 3, keys, generator=torch.Generator().manual_seed(seed)) < 0.5
    sinks = normal(heads, seed=seed + 2)
    out = attend(q, k, allowed, sinks, 0.7)
    for b in range(2):
        for i in range(3):
            for h in range(heads):
                total, value = math.exp(sinks[h].item()), torch.zeros(4)
                for j in allowed[b, i].nonzero().flatten().tolist():
                    share = math.exp(0.7 * (q[b, i, h] @ k[b, j]).item())
                    total, value = total + share, value + share * k[b, j]
                torch.testing.assert_close(out[b, i, h], value / total, rtol=1e-4, atol=1e-5)


def test_a_query_without_an_allowed_key_returns_zero_and_a_large_sink_takes_everything() -> None:
    q, k = normal(1, 2, 1, 4), normal(1, 3, 4, seed=1)
    allowed = torch.tensor([[[False] * 3, [True] * 3]])
    assert torch.equal(attend(q, k, allowed, torch.zeros(1), 1.0)[0, 0], torch.zeros(1, 4))
    taken = attend(q, k, allowed, torch.full((1,), 50.0), 1.0)[0, 1]
    torch.testing.assert_close(taken, torch.zeros(1, 4))
    none = attend(q, k, allowed, torch.full((1,), -50.0), 1.0)[0, 1]
    torch.testing.assert_close(none[0], (k[0] @ q[0, 1, 0]).softmax(0) @ k[0])


def test_attend_computes_bf16_in_fp32_and_rounds_once() -> None:
    q, k = normal(1, 5, 2, 8).bfloat16(), normal(1, 7, 8, seed=1).bfloat16()
    allowed, sinks = torch.ones(1, 5, 7, dtype=torch.bool), normal(2, seed=2)
    out = attend(q, k, allowed, sinks, 0.5)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attend(q.float(), k.float(), allowed, sinks, 0.5).bfloat16())


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 12), window=st.integers(1, 14))
def test_a_window_holds_the_query_and_the_window_minus_one_tokens_before_it(length: int, window: int) -> None:
    seen = local_keys(torch.arange(length), window)
    for i in range(length):
        assert seen[i].nonzero().flatten().tolist() == list(range(max(0, i - window + 1), i + 1))


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_a_compressed_key_is_visible_from_its_last_token_on(ratio: int) -> None:
    visible = visible_keys(13, ratio, CPU).tolist()
    for position in range(13):
        whole = [j for j in range(13 // ratio) if (j + 1) * ratio - 1 <= position]
        assert visible[position] == len(whole)


def test_a_compressed_key_is_valid_if_all_of_its_tokens_are() -> None:
    valid = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
    assert whole_groups(valid, 2).tolist() == [[True, False, False], [True, True, True]]
    assert whole_groups(valid, 1).tolist() == valid.tolist()


def test_minus_one_chooses_no_key() -> None:
    chosen = torch.tensor([[[0, 2, -1], [-1, -1, -1]]])
    assert chosen_mask(chosen, 4).tolist() == [[[True, False, True, False], [False] * 4]]


def compressor_of(ratio: int) -> DeepseekV41Compressor:
    torch.manual_seed(0)
    ratios = (0, ratio, ratio, 1, 1)
    compressor = DeepseekV41Compressor(text_of(compress_ratios=ratios), SOURCE)
    for parameter in compressor.parameters():
        parameter.data.normal_(std=0.3)
    return compressor


@pytest.mark.parametrize("ratio", [2, 3])
def test_a_compressed_key_is_the_gated_mean_of_its_tokens_and_an_incomplete_rest_is_dropped(
    ratio: int,
) -> None:
    compressor, x = compressor_of(ratio), normal(2, 11, 64)
    assert compressor.wgate is not None
    keys = compressor(x)
    assert keys.shape == (2, 11 // ratio, 32)
    values, gates = x @ compressor.wkv.weight.T, x @ compressor.wgate.weight.T
    for b in range(2):
        for j in range(11 // ratio):
            pooled = torch.zeros(32)
            for channel in range(32):
                tokens = range(j * ratio, (j + 1) * ratio)
                weights = [gates[b, t, channel].exp().item() for t in tokens]
                total = sum(w * values[b, t, channel].item() for w, t in zip(weights, tokens, strict=True))
                pooled[channel] = total / sum(weights)
            torch.testing.assert_close(keys[b, j], compressor.norm(pooled), rtol=1e-4, atol=1e-4)
    later = x.clone()
    later[:, 11 // ratio * ratio :] += 1
    assert torch.equal(compressor(later), keys)


def test_at_ratio_one_every_token_is_projected_and_normed() -> None:
    compressor, x = compressor_of(1), normal(2, 5, 64)
    assert compressor.wgate is None
    torch.testing.assert_close(compressor(x), compressor.norm(x @ compressor.wkv.weight.T))


def test_pooling_bf16_is_fp32_with_one_rounding_and_ratio_one_projects_in_bf16() -> None:
    x = normal(2, 6, 64).bfloat16()
    two = compressor_of(2)
    assert two.wgate is not None
    values, gates = (x.float() @ part.weight.T for part in (two.wkv, two.wgate))
    pooled = (values.view(2, 3, 2, 32) * gates.view(2, 3, 2, 32).softmax(2)).sum(2).bfloat16()
    assert two(x).dtype == torch.bfloat16
    torch.testing.assert_close(two(x), two.norm(pooled), rtol=2**-7, atol=0)
    projected: list[Tensor] = []
    two.norm.register_forward_pre_hook(lambda _, inputs: projected.append(inputs[0]))
    two(x)
    torch.testing.assert_close(projected[0], pooled, rtol=2**-7, atol=0)
    one = compressor_of(1)
    narrow = torch.nn.functional.linear(x, one.wkv.weight.bfloat16())
    assert torch.equal(one(x), one.norm(narrow))


def test_a_compressed_key_turns_by_the_angle_of_its_first_token() -> None:
    attention, x = attention_of(SOURCE), normal(1, 9, 64)
    assert attention.compressor is not None
    _, state = attention(x, Compressed())
    assert state.kv is not None
    unrotated = attention.compressor(x)
    for j in range(4):
        cos, sin = attention.rotary_emb(torch.tensor([2 * j]))
        torch.testing.assert_close(state.kv[0, j], apply_rotary(unrotated[0, j : j + 1], cos, sin)[0])


@pytest.mark.parametrize("quantized", [False, True])
def test_no_logit_depends_on_a_later_token(quantized: bool) -> None:
    model = lively(cache_fake_quantization=quantized, sliding_window=5, index_topk=6)
    length = 25
    ids = torch.randint(256, (length,), generator=torch.Generator().manual_seed(0))
    rows = ids.repeat(length, 1)
    later = torch.arange(length) >= torch.arange(length)[:, None]  # row p: everything from p on is other
    rows = torch.where(later, (rows + 1) % 256, rows)
    before, after = model(ids[None])[0], model(rows)
    for position in range(length):
        torch.testing.assert_close(after[position, :position], before[:position], rtol=1e-3, atol=1e-3)
        assert (after[position, position] - before[position]).abs().max() > 0.1


def test_a_token_far_outside_the_window_is_read_through_the_compressed_keys() -> None:
    model, ids = lively(sliding_window=2, index_topk=64), torch.arange(40)[None]
    other = ids.clone()
    other[0, 0] = 200
    change = (model(other)[0, -1] - model(ids)[0, -1]).abs().max()
    assert change > 1e-3


LENGTHS = (17, 1, 8)


def padded_batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(256, (3, 17), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(17) < torch.tensor(LENGTHS)[:, None]


# 16 index heads: with few, many scores are zero, and which of them are taken depends on how many there are
@pytest.mark.parametrize("changes", [{"index_topk": 64}, {"index_topk": 3, "index_n_heads": 16}])
def test_a_padded_row_has_the_logits_of_the_row_alone(changes: dict[str, Any]) -> None:
    model = lively(sliding_window=4, candidate_topk_blocks=3, **changes)
    ids, mask = padded_batch()
    logits = model(ids, attention_mask=mask)
    assert logits.isfinite().all()
    for row, length in enumerate(LENGTHS):
        alone = model(ids[row : row + 1, :length])[0]
        torch.testing.assert_close(logits[row, :length], alone, rtol=1e-3, atol=1e-3)
    other = torch.where(mask, ids, (ids + 7) % 256)
    torch.testing.assert_close(model(other, attention_mask=mask.long())[mask], logits[mask])


def test_attention_returns_zero_at_padding() -> None:
    _, mask = padded_batch()
    for layer in (WINDOW, SOURCE, SINGLE):
        out, _ = attention_of(layer)(normal(3, 17, 64), Compressed(), mask)
        assert torch.equal(out[~mask], torch.zeros_like(out[~mask]))
        assert out[mask].abs().min(dim=-1).values.max() > 0


def test_a_padded_key_is_not_read_even_where_it_would_be_visible() -> None:
    valid = torch.ones(1, 9, dtype=torch.bool)
    valid[0, 4] = False
    x = normal(1, 9, 64)
    other = x.clone()
    other[0, 4] += 1
    for layer in (WINDOW, SOURCE, SINGLE):
        attention = attention_of(layer)
        assert torch.equal(attention(x, Compressed(), valid)[0], attention(other, Compressed(), valid)[0])
        assert not torch.equal(attention(x, Compressed())[0], attention(other, Compressed())[0])


def test_a_mask_without_padding_is_no_mask() -> None:
    model, (ids, mask) = lively(), padded_batch()
    assert torch.equal(model(ids, attention_mask=torch.ones_like(mask)), model(ids))


def test_padding_on_the_left_and_a_mask_of_another_shape_are_refused() -> None:
    model, (ids, mask) = lively(), padded_batch()
    for wrong in (mask.flip(1), torch.tensor([[True, False, True]]).repeat(3, 6)[:, :17]):
        with pytest.raises(
            ValueError, match=r"^attention_mask: padding must stand on the right of each row$"
        ):
            model(ids, attention_mask=wrong)
    with pytest.raises(ValueError, match=r"^attention_mask: \[3, 16\] for ids \[3, 17\]$"):
        model(ids, attention_mask=mask[:, :16])


@pytest.mark.parametrize("candidate", [-1, 1, 3])
def test_short_sequences_run(candidate: int) -> None:
    model = lively(candidate_source_layer_id=candidate)
    for length in (1, 3):
        logits = model(torch.arange(length)[None])
        assert logits.shape == (1, length, 258)
        assert logits.isfinite().all()


def test_a_row_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    model, ids = lively(), padded_batch()[0]
    torch.testing.assert_close(model(ids)[1:2], model(ids[1:2]), rtol=1e-3, atol=1e-3)
