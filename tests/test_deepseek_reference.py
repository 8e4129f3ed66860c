"""DeepSeek-V4.1 as a whole against a slow second computation, on small models of every make."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_reference import SlowModel, hash_multipliers, hash_primes, hashed_rows, quantized
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp.models.deepseek_v41 import (
    Choices,
    DeepseekV41Config,
    DeepseekV41ForCausalLM,
    TokenType,
    image_span,
    record_choices,
)
from annotate_fsdp.models.deepseek_v41.engram_hash import DeepseekV41EngramHash
from annotate_fsdp.models.deepseek_v41.quantize import fake_fp8, fake_mxfp4, fake_nvfp4

VOCABULARY, IMAGE_TOKEN = 24, 23
GOLDEN = Path(__file__).parent / "data" / "deepseek_v41_tiny.pt"


@dataclass
class Batch:
    """Sequences as the model takes them, and each one's images."""

    ids: Tensor
    is_valid: Tensor
    types: Tensor
    images: list[list[tuple[Tensor, int, int]]]

    def options(self) -> dict[str, Any]:
        images = [image for row in self.images for image in row]
        options: dict[str, Any] = {"attention_mask": self.is_valid}
        if images:
            options["pixel_values"] = torch.cat([image[0] for image in images])
            options["grid"] = torch.tensor([image[1:] for image in images])
            options["types"] = self.types
        return options


def text_options(draw: st.DrawFn) -> dict[str, Any]:
    """A schedule of segments: a KV source with layers that reuse, choose anew, or read their window only."""
    ratios, sources, index = [0] * draw(st.integers(0, 2)), [], []
    for _ in range(draw(st.integers(0 if ratios else 1, 2))):
        ratio = draw(st.sampled_from([1, 2, 3]))
        sources.append(len(ratios))
        index.append(len(ratios))
        ratios.append(ratio)
        for kind in draw(st.lists(st.sampled_from(["reuse", "reindex", "window"]), max_size=2)):
            if kind == "reindex":
                index.append(len(ratios))
            ratios.append(0 if kind == "window" else ratio)
    layers = draw(st.integers(max(1, len(ratios) - 1), len(ratios)))
    candidate = draw(st.sampled_from([-1, *sources, *sources]))
    engrams = sorted(draw(st.sets(st.integers(0, len(ratios) - 1), max_size=2)))
    groups = draw(st.sampled_from([1, 2]))
    pick = st.sampled_from
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "compress_ratios": ratios,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": index,
        "candidate_source_layer_id": candidate,
        "hidden_size": draw(pick([12, 16])),
        "moe_intermediate_size": draw(pick([6, 8])),
        "num_attention_heads": groups * draw(pick([1, 2])),
        "head_dim": draw(pick([8, 20, 36])),
        "qk_rope_head_dim": draw(pick([2, 4, 8])),
        "q_lora_rank": 10,
        "o_lora_rank": 6,
        "o_groups": groups,
        "n_routed_experts": 4,
        "num_experts_per_tok": draw(pick([1, 2, 3])),
        "sliding_window": draw(pick([1, 3, 5])),
        "index_n_heads": draw(pick([1, 3])),
        "index_head_dim": draw(pick([8, 34])),
        "index_topk": draw(pick([1, 2, 3])),
        "candidate_topk_blocks": draw(pick([1, 2])),
        "candidate_block_size": draw(pick([1, 2, 3])),
        "hc_mult": draw(st.integers(2, 4)),
        "hc_sinkhorn_iters": draw(st.integers(1, 3)),
        "hc_eps": draw(pick([1e-6, 1e-2])),
        "rms_norm_eps": draw(pick([1e-20, 1e-2])),
        "rope_theta": draw(pick([100.0, 10000.0])),
        "compress_rope_theta": 500.0,
        "swiglu_limit": draw(pick([0.0, 0.5, 10.0])),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": 1.3,
        "engram_layer_ids": engrams,
        "engram_max_ngram_size": draw(pick([2, 3, 4])),
        "engram_n_heads": draw(pick([1, 2])),
        "engram_head_dim": 4,
        "engram_vocab_size": draw(pick([1, 8, 50])),
        "engram_pad_token_id": draw(st.integers(0, VOCABULARY - 1)),
        "engram_compressed_vocab_size": draw(st.integers(2, VOCABULARY)),
        "cache_fake_quantization": draw(st.booleans()),
        "dtype": "float32",
    }
    if draw(st.booleans()):
        options["rope_scaling"] = {
            "factor": 4.0,
            "beta_fast": draw(pick([2.0, 8.0])),
            "beta_slow": draw(pick([0.5, 1.0])),
            "original_max_position_embeddings": draw(pick([6, 40])),
        }
    return options


@st.composite
def configs(draw: st.DrawFn) -> DeepseekV41Config:
    options = text_options(draw)
    orders, heads = options["engram_max_ngram_size"] - 1, options["engram_n_heads"]
    primes = hash_primes(len(options["engram_layer_ids"]), orders, heads, options["engram_vocab_size"])
    options["engram_num_embeddings"] = [sum(map(sum, of_layer)) + 1 for of_layer in primes]
    vision = {
        "num_hidden_layers": draw(st.sampled_from([0, 1, 2])),
        "hidden_size": 16,
        "num_attention_heads": draw(st.sampled_from([1, 2])),
        "intermediate_size": 6,
        "patch_size": 2,
        "downsample_ratio": draw(st.sampled_from([1, 2])),
        "rope_theta": 100.0,
    }
    values = {"text_config": options, "vision_config": vision, "image_token_id": IMAGE_TOKEN}
    return DeepseekV41Config.from_dict(values)


@st.composite
def batches(draw: st.DrawFn, config: DeepseekV41Config) -> Batch:
    """One or two sequences of text and images, padded on the right."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    vision, rows = config.vision_config, []
    for _ in range(draw(st.integers(1, 2))):
        types, images = [TokenType.TEXT] * draw(st.integers(0, 4)), []
        for _ in range(draw(st.integers(0, 2)) if vision.num_hidden_layers else 0):
            height, width = draw(st.integers(1, 3)), draw(st.integers(1, 2))
            size = (height * width, 3, vision.patch_size, vision.patch_size)
            images.append((torch.randn(size, generator=seed), height, width))
            types += image_span(height, width, vision.downsample_ratio)
            types += [TokenType.TEXT] * draw(st.integers(0, 4))
        types += [TokenType.TEXT] * max(draw(st.integers(1, 12)) - len(types), 1)
        rows.append((types, images))
    length = max(len(types) for types, _ in rows) + draw(st.integers(0, 3))
    kinds = torch.full((len(rows), length), int(TokenType.TEXT))
    ids = torch.randint(IMAGE_TOKEN, kinds.shape, generator=seed)
    is_valid = torch.zeros(kinds.shape, dtype=torch.bool)
    for i, (types, _) in enumerate(rows):
        kinds[i, : len(types)] = torch.tensor([int(kind) for kind in types])
        is_valid[i, : len(types)] = True
    ids[kinds != TokenType.TEXT] = IMAGE_TOKEN
    return Batch(ids, is_valid, kinds, [images for _, images in rows])


def token_map(config: DeepseekV41Config) -> list[int]:
    return [token * 7 % config.text_config.engram_compressed_vocab_size for token in range(VOCABULARY)]


def random_model(config: DeepseekV41Config, seed: int) -> DeepseekV41ForCausalLM:
    """A model none of whose parameters is at, or near, a value where it does nothing."""
    model = DeepseekV41ForCausalLM(config, token_map(config))
    random = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    for name, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=random)
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "q_weight", "k_weight", "scale")):
            value = 1 + 0.4 * noise
        elif "embed" in name and "patch" not in name:
            value = noise
        elif tensor.ndim == 1:  # sinks, biases, bases, image markers
            value = noise if "bias" not in name else 0.3 * noise
        else:
            inputs = tensor.shape[1]  # of the experts' weights too, whose rows are inputs
            value = noise * 1.1 / inputs**0.5
        tensor.copy_(value)
    return model


def run(model: DeepseekV41ForCausalLM, batch: Batch) -> tuple[Tensor, Choices]:
    with torch.no_grad(), record_choices(model) as choices:
        return model(batch.ids, **batch.options()), choices


def agrees_surely(model: DeepseekV41ForCausalLM, batch: Batch) -> bool:
    """Assert that model and reference choose and compute alike, wherever there is no padding.

    False: something was too close to tell.
    """
    slow = SlowModel(model.config, model.state_dict(), token_map(model.config))
    logits, choices = run(model, batch)
    for row, ids in enumerate(batch.ids.tolist()):
        is_valid = batch.is_valid[row].tolist()
        expected = slow(ids, is_valid, batch.types[row].tolist(), batch.images[row])
        if slow.is_close_call:
            return False
        length = sum(is_valid)
        keys = {layer: of[row][:length] for layer, of in choices.keys.items()}
        candidates = {layer: of[row][:length] for layer, of in choices.candidates.items()}
        experts = {layer: of[row][:length] for layer, of in choices.experts.items()}
        assert {n: [[j for j in at if j >= 0] for at in of] for n, of in keys.items()} == {
            n: of[:length] for n, of in slow.keys.items()
        }
        assert {n: [[j for j, c in enumerate(at) if c] for at in of] for n, of in candidates.items()} == {
            n: of[:length] for n, of in slow.candidates.items()
        }
        assert experts == {n: of[:length] for n, of in slow.experts.items()}
        wanted = torch.from_numpy(expected)[:length]
        torch.testing.assert_close(logits[row, :length].double(), wanted, rtol=0, atol=1e-4)
    return True


@st.composite
def examples(draw: st.DrawFn) -> tuple[DeepseekV41Config, int, Batch]:
    config = draw(configs())
    return config, draw(st.integers(0, 2**31)), draw(batches(config))


seeded = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@settings(seeded, max_examples=20)
@given(examples())
def test_model_equals_the_reference(example: tuple[DeepseekV41Config, int, Batch]) -> None:
    config, seed, batch = example
    assume(agrees_surely(random_model(config, seed), batch))


@pytest.mark.slow
@settings(seeded, max_examples=120)
@given(examples())
def test_more_models_equal_the_reference(example: tuple[DeepseekV41Config, int, Batch]) -> None:
    config, seed, batch = example
    assume(agrees_surely(random_model(config, seed), batch))


def golden_config(golden: dict[str, Any]) -> DeepseekV41Config:
    text = {**golden["text_config"], "cache_fake_quantization": False}
    vision = golden["vision_config"]
    return DeepseekV41Config.from_dict({"text_config": text, "vision_config": vision, "image_token_id": 90})


@pytest.mark.parametrize("kind", ["text", "image"])
def test_reference_gives_the_golden_logits(kind: str) -> None:
    golden = torch.load(GOLDEN, weights_only=True)
    slow = SlowModel(golden_config(golden), golden["state"])
    ids = golden[kind]["ids"][0].tolist()
    if kind == "image":
        image = (golden["pixel_values"], *golden["grid"][0].tolist())
        logits = slow(ids, types=golden["types"][0].tolist(), images=[image])
    else:
        logits = slow(ids)
    torch.testing.assert_close(torch.from_numpy(logits).float(), golden[kind]["logits"][0], rtol=0, atol=1e-4)


def rich_config(**changed: Any) -> DeepseekV41Config:
    """Every part at once: all ratios, a reuse, a choice among candidates, two engrams, images."""
    text = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 5,
        "compress_ratios": [0, 3, 1, 1, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 4],
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "hidden_size": 16,
        "moe_intermediate_size": 8,
        "num_attention_heads": 4,
        "head_dim": 20,
        "qk_rope_head_dim": 4,
        "q_lora_rank": 10,
        "o_lora_rank": 6,
        "o_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 3,
        "index_n_heads": 3,
        "index_head_dim": 8,
        "index_topk": 2,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 3,
        "engram_layer_ids": [0, 3],
        "engram_num_embeddings": [40, 120],
        "engram_max_ngram_size": 3,
        "engram_n_heads": 2,
        "engram_head_dim": 4,
        "engram_vocab_size": 4,
        "engram_compressed_vocab_size": 20,
        "cache_fake_quantization": False,
        "dtype": "float32",
    }
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 6,
        "patch_size": 2,
        "downsample_ratio": 2,
    }
    values = {"text_config": text | changed, "vision_config": vision, "image_token_id": IMAGE_TOKEN}
    return DeepseekV41Config.from_dict(values)


def rich_batch() -> Batch:
    types = [-1, -1, -1, *image_span(3, 2, 2), *[-1] * 11]
    kinds = torch.tensor([types])
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(IMAGE_TOKEN, kinds.shape, generator=random).masked_fill(kinds != -1, IMAGE_TOKEN)
    is_valid = torch.arange(len(types))[None] < len(types) - 2
    return Batch(ids, is_valid, kinds, [[(torch.randn(6, 3, 2, 2, generator=random), 3, 2)]])


@pytest.mark.slow
def test_every_parameter_matters_in_random_models() -> None:
    model, batch = random_model(rich_config(), 0), rich_batch()
    logits, _ = run(model, batch)
    state, other = model.state_dict(), random_model(rich_config(), 1).state_dict()
    kinds: dict[str, list[str]] = {}
    for name in state:
        kinds.setdefault(re.sub(r"\d+", "*", name.removeprefix("model.")), []).append(name)
    unimportant = []
    for kind, names in kinds.items():
        saved = {name: state[name].clone() for name in names}
        for name in names:
            state[name].copy_(other[name])
        if (run(model, batch)[0] - logits)[batch.is_valid].abs().max() < 1e-2:
            unimportant.append(kind)
        for name in names:
            state[name].copy_(saved[name])
    assert unimportant == []


@pytest.mark.parametrize("fake_quantization", [False, True])
def test_model_with_every_part_equals_the_reference(fake_quantization: bool) -> None:
    config = rich_config(cache_fake_quantization=fake_quantization)
    model, batch = random_model(config, 0), rich_batch()
    assert agrees_surely(model, batch)
    changed, _ = run(random_model(rich_config(cache_fake_quantization=not fake_quantization), 0), batch)
    assert not torch.allclose(run(model, batch)[0], changed, atol=1e-2), "quantisation changes nothing"


@settings(seeded, max_examples=60)
@given(
    st.sampled_from([("fp8", fake_fp8), ("mxfp4", fake_mxfp4), ("nvfp4", fake_nvfp4)]),
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=70),
    st.lists(st.integers(-135, 1), min_size=1, max_size=5),
)
def test_quantisers_equal_the_reference_also_at_ties(
    quantiser: tuple[str, Callable[[Tensor], Tensor]], numbers: list[int], exponents: list[int]
) -> None:
    """Integers times powers of two, of other sizes in each block of 16."""
    name, quantise = quantiser
    powers = [2.0 ** exponents[i // 16 % len(exponents)] for i in range(len(numbers))]
    x = torch.tensor([number * power for number, power in zip(numbers, powers, strict=True)])
    expected = torch.from_numpy(quantized(x.double().numpy(), name)).float()
    torch.testing.assert_close(quantise(x), expected, rtol=0, atol=0)


def test_released_hashes_equal_the_reference() -> None:
    config = DeepseekV41Config.released().text_config
    random = torch.Generator().manual_seed(0)
    classes = torch.randint(config.engram_compressed_vocab_size, (config.vocab_size,), generator=random)
    ids = torch.randint(config.vocab_size, (1, 40), generator=random)
    is_blocked = torch.zeros(1, 40, dtype=torch.bool)
    is_blocked[0, [7, 8, 9, 10, 16, 18, 36, 37, 38, 39]] = True
    hashes = DeepseekV41EngramHash(config, classes)
    primes = hash_primes(2, 3, 8, 16000000)
    assert hashes.primes.tolist() == [[p for order in of_layer for p in order] for of_layer in primes]
    assert hashes.primes.sum(-1).tolist() == [384006168, 384016682]
    assert hashes.multipliers.tolist() == [hash_multipliers(config, layer) for layer in (1, 14)]
    for layer, rows in zip((1, 14), hashes(ids, is_blocked), strict=True):
        slow = hashed_rows(config, layer, ids[0].tolist(), is_blocked[0].tolist(), classes.tolist())
        expected = torch.tensor(slow)[~is_blocked[0]]
        assert torch.equal(rows[~is_blocked], expected)
