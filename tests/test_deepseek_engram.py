"""The engram: primes, hashes of n-grams, and memories gated into the streams."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp import AnnotationError, materialize
from annotate_fsdp.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM, image_span
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig
from annotate_fsdp.models.deepseek_v41.engram import DeepseekV41Engram
from annotate_fsdp.models.deepseek_v41.engram_hash import (
    DeepseekV41EngramHash,
    checked_token_map,
    hash_numbers,
    shifted,
)
from annotate_fsdp.models.deepseek_v41.primes import ngram_primes

LARGEST = 2**63 - 1
TWO = {"engram_layer_ids": (0, 3), "engram_num_embeddings": (4000, 4000)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_of(**changes: Any) -> DeepseekV41TextConfig:
    return dataclasses.replace(DeepseekV41Config.tiny().text_config, **changes)


def config_of(**changes: Any) -> DeepseekV41Config:
    return dataclasses.replace(DeepseekV41Config.tiny(), text_config=text_of(**changes))


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, number))


@pytest.mark.parametrize("start", [1, 2, 3, 24, 500, 503, 504])
def test_primes_are_the_next_ones_from_the_vocabulary_size_up_each_used_once(start: int) -> None:
    primes = ngram_primes(2, 5, start)
    expected = [number for number in range(start, start + 200) if is_prime(number)][:10]
    assert primes == (tuple(expected[:5]), tuple(expected[5:]))


@pytest.mark.parametrize("config", [text_of(**TWO), DeepseekV41Config.released().text_config])
def test_multipliers_are_odd_drawn_by_layer_and_keep_every_product_within_int64(
    config: DeepseekV41TextConfig,
) -> None:
    primes, multipliers = hash_numbers(config)
    classes = config.engram_compressed_vocab_size
    assert primes.dtype == multipliers.dtype == torch.int64
    assert multipliers.shape == (2, config.engram_max_ngram_size)
    for row, layer in zip(multipliers.tolist(), config.engram_layers, strict=True):
        drawn = np.random.default_rng(10007 * layer).integers(0, LARGEST // classes // 2, size=len(row))
        assert row == [2 * int(number) + 1 for number in drawn]
        assert all(number % 2 for number in row)
        assert all(0 < number * (classes - 1) <= LARGEST for number in row)
        assert max(row) > LARGEST // classes // 100, "the whole range is used"


def test_offsets_give_each_head_the_rows_of_its_prime() -> None:
    hashes = DeepseekV41EngramHash(text_of(**TWO))
    for primes, offsets in zip(hashes.primes.tolist(), hashes.offsets.tolist(), strict=True):
        assert offsets == [sum(primes[:head]) for head in range(6)]
        assert sum(primes) <= 4000
    rows = hashes(torch.randint(258, (4, 50), generator=torch.Generator().manual_seed(0)))
    assert rows.shape == (2, 4, 50, 6)
    assert rows.dtype == torch.int64
    for layer in range(2):
        for head in range(6):
            low = int(hashes.offsets[layer, head])
            of = rows[layer, ..., head]
            assert of.min() >= low
            assert of.max() < low + int(hashes.primes[layer, head])


def slow_rows(
    hashes: DeepseekV41EngramHash, ids: list[int], blocked: list[bool], token_map: list[int]
) -> list[list[list[int]]]:
    """rows[layer][position][head] of one sequence."""
    config = hashes.config
    pad = token_map[config.engram_pad_token_id]
    rows = []
    for layer in range(len(config.engram_layers)):
        primes, multipliers = hashes.primes[layer].tolist(), hashes.multipliers[layer].tolist()
        of_layer = []
        for position in range(len(ids)):
            mixed, crossed, of_position = token_map[ids[position]] * multipliers[0], False, []
            for shift in range(1, config.engram_max_ngram_size):
                back = position - shift
                crossed = crossed or back < 0 or blocked[back]
                mixed ^= (pad if crossed else token_map[ids[back]]) * multipliers[shift]
                for _ in range(config.engram_n_heads):
                    head = len(of_position)
                    of_position.append(mixed % primes[head] + sum(primes[:head]))
            of_layer.append(of_position)
        rows.append(of_layer)
    return rows


@settings(max_examples=25, deadline=None)
@given(data=st.data(), length=st.integers(1, 9), order=st.integers(2, 4), heads=st.integers(1, 3))
def test_rows_are_rolling_hashes_that_see_the_pad_class_beyond_the_start_and_blocked_positions(
    data: st.DataObject, length: int, order: int, heads: int
) -> None:
    token_map = [(7 * token + 3) % 100 for token in range(260)]
    config = text_of(
        **TWO | {"engram_num_embeddings": (9999, 9999)},
        engram_max_ngram_size=order,
        engram_n_heads=heads,
        engram_compressed_vocab_size=100,
    )
    hashes = DeepseekV41EngramHash(config, token_map)
    ids = data.draw(st.lists(st.integers(0, 259), min_size=2 * length, max_size=2 * length))
    blocked = data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length))
    tensors = (torch.tensor(ids).view(2, length), torch.tensor(blocked).view(2, length))
    for mask in (tensors[1], None):
        rows = hashes(tensors[0], mask)
        for b in range(2):
            at = slice(b * length, (b + 1) * length)
            closed = [False] * length if mask is None else blocked[at]
            assert rows[:, b].tolist() == slow_rows(hashes, ids[at], closed, token_map)


def test_the_start_of_a_sequence_looks_back_on_pad_tokens() -> None:
    hashes = DeepseekV41EngramHash(text_of())
    alone = hashes(torch.tensor([[5, 6]]))
    after_pads = hashes(torch.tensor([[256, 256, 256, 5, 6]]))
    assert torch.equal(alone, after_pads[:, :, 3:])
    assert not torch.equal(alone, hashes(torch.tensor([[0, 0, 0, 5, 6]]))[:, :, 3:])


def test_heads_of_the_two_grams_come_first() -> None:
    hashes = DeepseekV41EngramHash(text_of())
    rows = hashes(torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4]]))[0, :, 3]
    assert (rows[1] == rows[0]).tolist() == [True, True] + [False] * 4, "two back: 3-grams and 4-grams"
    assert (rows[2] == rows[0]).tolist() == [True] * 4 + [False] * 2, "three back: 4-grams"


def test_shifted_fills_the_start_with_zeros() -> None:
    assert shifted(torch.tensor([[1, 2, 3]]), 2).tolist() == [[0, 0, 1]]
    assert shifted(torch.tensor([[1, 2, 3]]), 5).tolist() == [[0, 0, 0]]
    assert shifted(torch.tensor([[True, True]]), 1).tolist() == [[False, True]]


def test_a_map_gives_tokens_of_one_class_the_same_rows() -> None:
    token_map = [token // 2 for token in range(258)]
    hashes = DeepseekV41EngramHash(text_of(engram_compressed_vocab_size=129), torch.tensor(token_map))
    rows = hashes(torch.tensor([[4, 6, 8], [5, 7, 9], [4, 6, 10]]))[0]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0, 2], rows[2, 2])


MAPS: list[tuple[Any, str, dict[str, Any]]] = [
    (torch.zeros(258, device="meta", dtype=torch.int64), "it has no values", {}),
    ([[0] * 258], "it must be a list of integers, one for each token id", {}),
    (torch.zeros(258), "it must be a list of integers, one for each token id", {}),
    (torch.zeros(258, dtype=torch.complex64), "it must be a list of integers, one for each token id", {}),
    ([True] * 258, "it must be a list of integers, one for each token id", {}),
    ([0] * 257, "it has 257 entries for a vocabulary of 258", {}),
    ([0] * 257 + [258], "its values must lie in 0..257 (engram_compressed_vocab_size)", {}),
    ([0] * 257 + [-1], "its values must lie in 0..257 (engram_compressed_vocab_size)", {}),
    ([0] * 258, "it has no entry for engram_pad_token_id, 258", {"engram_pad_token_id": 258}),
]


@pytest.mark.parametrize(("token_map", "message", "changes"), MAPS, ids=lambda value: str(value)[:30])
def test_a_map_that_does_not_fit_is_refused(token_map: Any, message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape('token_map: ' + message)}$"):
        DeepseekV41ForCausalLM(config_of(**changes), token_map)


def test_a_map_at_the_border_is_accepted() -> None:
    narrow = torch.full((258,), 257, dtype=torch.int16)
    assert checked_token_map(text_of(), narrow).dtype == torch.int64
    longer = [0] * 259
    assert len(checked_token_map(text_of(engram_pad_token_id=258), longer)) == 259


def test_a_vocabulary_that_is_not_the_compressed_one_needs_a_map() -> None:
    message = (
        "the engram of a vocabulary of 258 tokens hashes 100 classes, but no token_map says which; pass the "
        "tokenizer's map to DeepseekV41ForCausalLM(config, token_map=...)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DeepseekV41ForCausalLM(config_of(engram_compressed_vocab_size=100))


def test_a_pad_token_beyond_the_vocabulary_needs_a_map() -> None:
    config = config_of(engram_pad_token_id=258)
    message = (
        "engram_pad_token_id is 258, beyond the vocabulary of 258 tokens, and no token_map says its class"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DeepseekV41ForCausalLM(config)
    ids = torch.arange(4)[None]
    assert DeepseekV41ForCausalLM(config, [*range(258), 0])(ids).isfinite().all()
    assert DeepseekV41ForCausalLM(config_of(engram_pad_token_id=257))(ids).isfinite().all()


def test_the_hashs_numbers_are_not_saved_and_come_back_after_meta() -> None:
    config = config_of(**TWO, engram_compressed_vocab_size=100)
    token_map = [token % 100 for token in range(258)]
    real = DeepseekV41ForCausalLM(config, token_map)
    assert real.model.engram_hash is not None
    assert real.model.engram_hash.state_dict() == {}
    assert not any("engram_hash" in name for name in real.state_dict())
    with torch.device("meta"):
        model = DeepseekV41ForCausalLM(config, token_map)
    assert model.model.engram_hash is not None
    assert all(buffer.is_meta for buffer in model.model.engram_hash.buffers())
    materialize(model, "cpu", state_dict=real.state_dict())
    buffers = dict(real.model.engram_hash.named_buffers())
    assert buffers.keys() == {"token_map", "primes", "offsets", "multipliers"}
    for name, buffer in model.model.engram_hash.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids), real(ids))


def test_a_model_on_meta_that_needs_a_map_says_so_when_it_gets_values() -> None:
    with torch.device("meta"):
        model = DeepseekV41ForCausalLM(config_of(engram_compressed_vocab_size=100))
    with pytest.raises((ValueError, AnnotationError), match="but no token_map says which"):
        materialize(model, "cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"engram_layer_ids": (), "engram_num_embeddings": ()},
        {"engram_layer_ids": (3,), "num_hidden_layers": 3},
    ],
)
def test_a_model_without_an_active_engram_layer_has_no_hash_and_needs_no_map(changes: dict[str, Any]) -> None:
    model = DeepseekV41ForCausalLM(config_of(engram_compressed_vocab_size=7, **changes))
    assert model.model.engram_hash is None
    assert all(block.engram is None for block in model.model.layers.values())
    assert model(torch.arange(4)[None]).isfinite().all()


def test_fewer_layers_leave_the_numbers_of_the_first_engrams_alone() -> None:
    whole = DeepseekV41EngramHash(text_of(**TWO))
    cut = DeepseekV41EngramHash(text_of(**TWO, num_hidden_layers=2))
    assert torch.equal(cut.primes, whole.primes[:1])
    assert torch.equal(cut.multipliers, whole.multipliers[:1])


def engram_of(streams: int = 2, **changes: Any) -> DeepseekV41Engram:
    torch.manual_seed(0)
    engram = DeepseekV41Engram(text_of(hc_mult=streams, hidden_size=6, **changes), 0)
    for parameter in engram.parameters():
        parameter.data.normal_(std=0.5)
    return engram


@pytest.mark.parametrize("streams", [1, 3])
def test_the_gate_is_a_signed_root_of_the_product_of_normed_stream_and_key(streams: int) -> None:
    engram = engram_of(streams, rms_norm_eps=0.2)
    x, rows = normal(2, 3, streams, 6), torch.arange(36).view(2, 3, 6)
    out = engram(x, rows)
    for b in range(2):
        for p in range(3):
            memory = torch.cat([engram.embed.weight[row] for row in rows[b, p].tolist()])
            made = engram.wkv.weight @ memory
            value = made[6 * streams :]
            for s in range(streams):
                key, stream = made[6 * s : 6 * s + 6], x[b, p, s]
                g = sum(
                    (a * q * k * c).item()
                    for a, q, k, c in zip(stream, engram.q_weight[s], engram.k_weight[s], key, strict=True)
                )
                for vector in (stream, key):
                    g /= math.sqrt(sum(v * v for v in vector.tolist()) / 6 + 0.2)
                g /= math.sqrt(6)
                gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(g), 1e-6)), g)))
                torch.testing.assert_close(out[b, p, s], stream + gate * value, rtol=1e-4, atol=1e-5)


def test_a_product_of_zero_opens_the_gate_by_half() -> None:
    engram = engram_of()
    engram.q_weight.data.zero_()
    x, rows = normal(1, 2, 2, 6), torch.arange(12).view(1, 2, 6)
    value = engram.wkv(engram.embed(rows).flatten(-2))[..., 12:]
    torch.testing.assert_close(engram(x, rows), x + 0.5 * value.unsqueeze(2))


def test_blocked_tokens_keep_their_streams() -> None:
    engram, x, rows = engram_of(), normal(2, 3, 2, 6), torch.arange(36).view(2, 3, 6)
    blocked = torch.tensor([[True, False, False], [False, True, True]])
    out, free = engram(x, rows, blocked), engram(x, rows)
    assert torch.equal(out[blocked], x[blocked])
    assert torch.equal(out[~blocked], free[~blocked])
    assert (free[blocked] != x[blocked]).any()


def test_bf16_streams_stay_bf16_and_the_gate_is_fp32() -> None:
    engram = engram_of().to(torch.bfloat16)
    x, rows = normal(2, 3, 2, 6).bfloat16(), torch.arange(36).view(2, 3, 6)
    out = engram(x, rows)
    assert out.dtype == torch.bfloat16
    made = engram.wkv(engram.embed(rows).flatten(-2))
    keys, value = made[..., :12].float().view(2, 3, 2, 6), made[..., 12:].float()
    wide, weight = x.float(), engram.q_weight.float() * engram.k_weight.float()
    norms = wide.square().mean(-1).rsqrt() * keys.square().mean(-1).rsqrt()
    score = (wide * weight * keys).sum(-1) * norms / math.sqrt(6)
    gate = (score.sign() * score.abs().sqrt()).sigmoid()
    expected = (wide + gate.unsqueeze(-1) * value.unsqueeze(2)).bfloat16()
    torch.testing.assert_close(out, expected, rtol=2**-8, atol=1e-6)
    assert (out == expected).float().mean() > 0.95


def test_every_part_of_the_engram_gets_a_gradient_and_only_looked_up_rows_do() -> None:
    engram, rows = engram_of(), torch.arange(36).view(2, 3, 6)
    engram(normal(2, 3, 2, 6), rows).square().sum().backward()
    for name, parameter in engram.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert engram.embed.weight.grad is not None
    assert engram.embed.weight.grad.any(dim=1).nonzero().flatten().tolist() == list(range(36))


def test_the_model_gives_each_engram_layer_its_rows_and_blocks_images_and_padding() -> None:
    torch.manual_seed(0)
    model = DeepseekV41ForCausalLM(config_of(**TWO))
    hashes = model.model.engram_hash
    assert hashes is not None
    seen: list[tuple[Tensor, Tensor]] = []
    for layer in ("0", "3"):
        engram = model.model.layers[layer].engram
        assert engram is not None
        engram.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[1], inputs[2])))
    span = image_span(2, 2, 2)
    ids = torch.tensor([[1, 2, *[257] * 4, 3, 4, 5, 256]])
    types = torch.tensor([[-1, -1, *span, -1, -1, -1, -1]])
    mask = torch.tensor([[True] * 9 + [False]])
    model(ids, normal(4, 3, 2, 2), [(2, 2)], types, mask)
    blocked = (types >= 0) | ~mask
    rows = hashes(ids, blocked)
    assert len(seen) == 2
    for layer, (looked_up, where) in enumerate(seen):
        assert torch.equal(looked_up, rows[layer])
        assert torch.equal(where, blocked)
    assert not torch.equal(rows[0], rows[1])
    torch.testing.assert_close(rows[:, :, 6:9], hashes(ids[:, 6:9]), msg="text after an image starts anew")
