"""What a DeepSeek-V4.1 configuration accepts, and what it says to the rest."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotate_fsdp.models.deepseek_v41 import (
    DeepseekV41Config,
    DeepseekV41ForCausalLM,
    DeepseekV41TextConfig,
    DeepseekV41VisionConfig,
    DeepseekV41YarnConfig,
)
from annotate_fsdp.models.deepseek_v41.config_rules import COUNTS, IGNORED_KEYS, POSITIVES, SEQUENCES

NAN, INFINITY = float("nan"), float("inf")
YARN_FIELDS = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
VISION_COUNTS = ("hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "downsample_ratio")


def text_of(**changes: Any) -> DeepseekV41TextConfig:
    return dataclasses.replace(DeepseekV41Config.tiny().text_config, **changes)


def vision_of(**changes: Any) -> DeepseekV41VisionConfig:
    return dataclasses.replace(DeepseekV41Config.tiny().vision_config, **changes)


def says(message: str) -> str:
    """The pattern of a whole message."""
    return f"^{re.escape('DeepseekV41Config: ' + message)}$"


def text_values() -> dict[str, Any]:
    """The released language part as its file writes it: lists, switches, the draft model's numbers."""
    return {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "moe_intermediate_size": 2304,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "compress_rope_theta": 160000,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
        "dtype": "bfloat16",
    }


def vision_values() -> dict[str, Any]:
    return {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    }


def released_values(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": text_values(),
        "vision_config": vision_values(),
        "image_token_id": 129264,
        "dtype": "bfloat16",
        "pad_token_id": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    } | changes


def test_released_equals_the_released_configuration_file() -> None:
    assert DeepseekV41Config.from_dict(released_values()) == DeepseekV41Config.released()


def test_released_holds_every_number_of_its_file_and_rounds_the_cache() -> None:
    released = dataclasses.asdict(DeepseekV41Config.released())
    text = {key: tuple(v) if isinstance(v, list) else v for key, v in text_values().items()}
    fields = released["text_config"].keys() & text.keys()
    assert released["text_config"].keys() - fields == {"cache_fake_quantization"}
    assert released["vision_config"].pop("initializer_range") == 0.02
    text["rope_scaling"] = {name: text["rope_scaling"][name] for name in YARN_FIELDS}
    assert released["text_config"] == {n: text[n] for n in fields} | {"cache_fake_quantization": True}
    assert released["vision_config"] == {n: vision_values()[n] for n in released["vision_config"]}
    assert released["image_token_id"] == 129264


def test_the_released_layers_have_these_roles() -> None:
    text = DeepseekV41Config.released().text_config
    assert text.engram_layers == (1, 14)
    assert text.engram_heads == 24
    roles = []
    for layer in range(text.num_hidden_layers):
        kv, index = layer in text.kv_source_layer_ids, layer in text.index_source_layer_ids
        name = "full" if kv else "reindex" if index else "reuse"
        roles.append((name if text.compress_ratios[layer] else "window", text.compress_ratios[layer]))
    two = [("full", 2)] + [("reuse", 2)] * 5
    one = [("full", 1)] + [("reuse", 1)] * 3 + ([("reindex", 1)] + [("reuse", 1)] * 3) * 4
    assert roles == [("window", 0)] * 2 + two * 3 + one


CONFIGS = [DeepseekV41Config.tiny(), DeepseekV41Config.released()]


@pytest.mark.parametrize("config", CONFIGS, ids=["tiny", "released"])
def test_a_config_survives_the_way_through_a_dict_and_can_be_a_key(config: DeepseekV41Config) -> None:
    values = dataclasses.asdict(config)
    assert DeepseekV41Config.from_dict(values) == config
    assert DeepseekV41Config(**values) == config
    assert {config: 1}[DeepseekV41Config.from_dict(values)] == 1


def test_lists_and_dicts_become_tuples_and_configs() -> None:
    tiny = DeepseekV41Config.tiny()
    values = dataclasses.asdict(tiny)
    for name in SEQUENCES:
        values["text_config"][name] = list(values["text_config"][name])
    config = DeepseekV41Config(**values)
    assert config == tiny
    assert all(isinstance(getattr(config.text_config, name), tuple) for name in SEQUENCES)
    assert isinstance(config.text_config, DeepseekV41TextConfig)
    assert isinstance(config.text_config.rope_scaling, DeepseekV41YarnConfig)
    assert isinstance(config.vision_config, DeepseekV41VisionConfig)


def test_tiny_has_every_part() -> None:
    text = DeepseekV41Config.tiny().text_config
    assert text.engram_layers
    assert text.candidate_source_layer_id in text.kv_source_layer_ids
    assert set(text.index_source_layer_ids) - set(text.kv_source_layer_ids)
    assert set(text.compress_ratios) == {0, 1, 2}
    assert text.rope_scaling is not None
    assert DeepseekV41Config.tiny().vision_config.num_hidden_layers


def test_fewer_layers_take_the_first_layers_of_the_whole_schedule() -> None:
    values = released_values(text_config=text_values() | {"num_hidden_layers": 9})
    config = DeepseekV41Config.from_dict(values)
    released = DeepseekV41Config.released()
    assert config.text_config == dataclasses.replace(released.text_config, num_hidden_layers=9)
    assert len(config.text_config.compress_ratios) == 43
    assert config.text_config.engram_layers == (1,)
    cut = dataclasses.replace(DeepseekV41Config.tiny(), text_config=text_of(num_hidden_layers=2))
    model = DeepseekV41ForCausalLM(cut).model
    assert list(model.layers) == ["0", "1"]
    whole = DeepseekV41ForCausalLM(DeepseekV41Config.tiny()).state_dict()
    shapes = {name: tensor.shape for name, tensor in whole.items() if ".layers." not in name}
    shapes |= {name: tensor.shape for name, tensor in whole.items() if re.search(r"layers\.[01]\.", name)}
    assert {f"model.{name}": tensor.shape for name, tensor in model.state_dict().items()} == {
        name: shape for name, shape in shapes.items() if name != "lm_head.weight"
    }


# The least value of each count, where it needs another field, or a rule keeps it above one.
LEAST: dict[str, dict[str, int]] = {
    "num_attention_heads": {"num_attention_heads": 1, "o_groups": 1},
    "head_dim": {"head_dim": 8},
    "index_head_dim": {"index_head_dim": 8},
    "qk_rope_head_dim": {"qk_rope_head_dim": 2},
    "n_routed_experts": {"n_routed_experts": 2},
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_positive_integer(name: str) -> None:
    for value in (0, -1, 64.0, True, "8", None):
        message = f"text_config.{name} is {value!r}, but it must be a positive integer"
        with pytest.raises(ValueError, match=says(message)):
            text_of(**{name: value})
    changes = LEAST.get(name, {name: 1})
    assert getattr(text_of(**changes), name) == changes[name]


@pytest.mark.parametrize("name", POSITIVES)
def test_a_number_is_positive_and_finite(name: str) -> None:
    for value in (0, 0.0, -1e-9, NAN, INFINITY, True, "1", None):
        message = f"text_config.{name} is {value!r}, but it must be a positive number"
        with pytest.raises(ValueError, match=says(message)):
            text_of(**{name: value})
    assert getattr(text_of(**{name: 2}), name) == 2
    assert getattr(text_of(**{name: 1.5}), name) == 1.5


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_is_a_list_of_integers_none_of_them_negative(name: str) -> None:
    for value in ("01", None, (0, -1), (0.0,), (True,), 3):
        rule = "it must be a list of integers, none of them negative"
        with pytest.raises(ValueError, match=says(f"text_config.{name} is {value!r}, but {rule}")):
            text_of(**{name: value})


RULES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (
        {"num_attention_heads": 5},
        "num_attention_heads is 5, but it must be a multiple of o_groups, 2",
        {"num_attention_heads": 6},
    ),
    (
        {"qk_rope_head_dim": 7},
        "qk_rope_head_dim is 7, but it must be even and at most head_dim and index_head_dim, 32",
        {"qk_rope_head_dim": 6},
    ),
    (
        {"qk_rope_head_dim": 18, "head_dim": 16},
        "qk_rope_head_dim is 18, but it must be even and at most head_dim and index_head_dim, 16",
        {"qk_rope_head_dim": 16, "head_dim": 16},
    ),
    (
        {"qk_rope_head_dim": 18, "index_head_dim": 16},
        "qk_rope_head_dim is 18, but it must be even and at most head_dim and index_head_dim, 16",
        {"qk_rope_head_dim": 16, "index_head_dim": 16},
    ),
    (
        {"num_experts_per_tok": 9},
        "num_experts_per_tok is 9, but it must be at most n_routed_experts, 8",
        {"num_experts_per_tok": 8},
    ),
    (
        {"swiglu_limit": -0.5},
        "swiglu_limit is -0.5, but it must be 0 (no clamp) or a positive number",
        {"swiglu_limit": 0},
    ),
    (
        {"swiglu_limit": None},
        "swiglu_limit is None, but it must be 0 (no clamp) or a positive number",
        {"swiglu_limit": 0.5},
    ),
    (
        {"norm_topk_prob": 1},
        "norm_topk_prob is 1, but it must be True or False",
        {"norm_topk_prob": False},
    ),
    (
        {"cache_fake_quantization": None},
        "cache_fake_quantization is None, but it must be True or False",
        {"cache_fake_quantization": True},
    ),
    (
        {"dtype": "float16"},
        "dtype is 'float16', but it must be one of bfloat16, float32",
        {"dtype": "bfloat16"},
    ),
    (
        {"rope_scaling": 16},
        "rope_scaling is 16, but it must be None, or YaRN's fields as a dict",
        {"rope_scaling": None},
    ),
    (
        {"compress_rope_theta": 1.0},
        "compress_rope_theta is 1.0, but it must be above 1 where YaRN stretches it",
        {"compress_rope_theta": 1.0, "rope_scaling": None},
    ),
    (
        {"compress_rope_theta": 1},
        "compress_rope_theta is 1, but it must be above 1 where YaRN stretches it",
        {"compress_rope_theta": 1.01},
    ),
    (
        {"num_hidden_layers": 6},
        "compress_ratios is (0, 2, 2, 1, 1), but it must hold an entry for each of 6 layers, not 5",
        {"num_hidden_layers": 5},
    ),
    (
        {"kv_source_layer_ids": (3, 1)},
        "kv_source_layer_ids is (3, 1), but its entries must increase",
        {"kv_source_layer_ids": (1, 3)},
    ),
    (
        {"index_source_layer_ids": (1, 3, 3)},
        "index_source_layer_ids is (1, 3, 3), but its entries must increase",
        {"index_source_layer_ids": (1, 3)},
    ),
    (
        {"index_source_layer_ids": (1, 3, 5)},
        "index_source_layer_ids is (1, 3, 5), but 5 is beyond the 5 entries of compress_ratios",
        {"index_source_layer_ids": (1, 3, 4)},
    ),
    (
        {"kv_source_layer_ids": (1, 3, 7)},
        "kv_source_layer_ids is (1, 3, 7), but 7 is beyond the 5 entries of compress_ratios",
        {"kv_source_layer_ids": (1, 3, 4)},
    ),
    (
        {"kv_source_layer_ids": (0, 1, 3)},
        "kv_source_layer_ids is (0, 1, 3), but layer 0 has compress ratio 0 and so nothing to give",
        {"kv_source_layer_ids": (1, 3)},
    ),
    (
        {"index_source_layer_ids": (0, 1, 3)},
        "index_source_layer_ids is (0, 1, 3), but layer 0 has compress ratio 0 and so nothing to give",
        {"index_source_layer_ids": (1, 2, 3)},
    ),
    (
        {"index_source_layer_ids": (1, 4)},
        "kv_source_layer_ids is (1, 3), but each must be one of index_source_layer_ids, (1, 4)",
        {"index_source_layer_ids": (1, 3)},
    ),
    (
        {"compress_ratios": (2, 2, 2, 1, 1)},
        "compress_ratios is (2, 2, 2, 1, 1), but layer 0 compresses, but no KV source comes before it",
        {"compress_ratios": (0, 2, 2, 1, 1)},
    ),
    (
        {"compress_ratios": (0, 2, 4, 1, 1)},
        "compress_ratios is (0, 2, 4, 1, 1), but layer 2 reads layer 1, whose ratio is 2, not 4",
        {"compress_ratios": (0, 4, 4, 1, 1)},
    ),
    (
        {"compress_ratios": (0, 2, 1, 1, 1)},
        "compress_ratios is (0, 2, 1, 1, 1), but layer 2 reads layer 1, whose ratio is 2, not 1",
        {"compress_ratios": (0, 2, 0, 1, 1)},
    ),
    (
        {"candidate_source_layer_id": 4},
        "candidate_source_layer_id is 4, but it must be -1 or one of kv_source_layer_ids, (1, 3)",
        {"candidate_source_layer_id": 1},
    ),
    (
        {"candidate_source_layer_id": 3.0},
        "candidate_source_layer_id is 3.0, but it must be -1 or one of kv_source_layer_ids, (1, 3)",
        {"candidate_source_layer_id": 3},
    ),
    (
        {"candidate_source_layer_id": -2},
        "candidate_source_layer_id is -2, but it must be -1 or one of kv_source_layer_ids, (1, 3)",
        {"candidate_source_layer_id": -1},
    ),
    (
        {"engram_layer_ids": (2, 0), "engram_num_embeddings": (9999, 9999)},
        "engram_layer_ids is (2, 0), but its entries must increase",
        {"engram_layer_ids": (0, 2), "engram_num_embeddings": (9999, 9999)},
    ),
    (
        {"engram_num_embeddings": (9999, 9999)},
        "engram_num_embeddings is (9999, 9999), but it must hold one row count for each of "
        "engram_layer_ids, (0,)",
        {"engram_num_embeddings": (9999,)},
    ),
    (
        {"engram_max_ngram_size": 1},
        "engram_max_ngram_size is 1, but it must be 2 or more",
        {"engram_max_ngram_size": 2},
    ),
    (
        {"engram_pad_token_id": -1},
        "engram_pad_token_id is -1, but it must be a token id",
        {"engram_pad_token_id": 0},
    ),
    (  # the six primes from 500 up: 503, 509, 521, 523, 541, 547
        {"engram_num_embeddings": (3143,)},
        "engram_num_embeddings is (3143,), but the hashes of layer 0 reach 3144 rows",
        {"engram_num_embeddings": (3144,)},
    ),
]


@pytest.mark.parametrize(("changes", "message", "fine"), RULES, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named_with_its_value_and_rule_and_its_border_is_fine(
    changes: dict[str, Any], message: str, fine: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=says(f"text_config.{message}")):
        text_of(**changes)
    config = text_of(**fine)
    assert {name: getattr(config, name) for name in fine} == fine


@pytest.mark.parametrize("name", YARN_FIELDS)
def test_yarn_takes_positive_numbers(name: str) -> None:
    yarn = dataclasses.asdict(DeepseekV41Config.tiny().text_config)["rope_scaling"]
    for value in (0, -1.0, NAN, "16", None):
        message = f"text_config.rope_scaling.{name} is {value!r}, but it must be a positive number"
        with pytest.raises(ValueError, match=says(message)):
            text_of(rope_scaling=yarn | {name: value})
    scaling = text_of(rope_scaling=yarn | {name: 2}).rope_scaling
    assert getattr(scaling, name) == 2


@pytest.mark.parametrize("name", VISION_COUNTS)
def test_a_count_of_the_tower_is_a_positive_integer(name: str) -> None:
    for value in (0, -1, 2.0, True):
        message = f"vision_config.{name} is {value!r}, but it must be a positive integer"
        with pytest.raises(ValueError, match=says(message)):
            vision_of(**{name: value})
    least = 8 if name == "hidden_size" else 1
    assert getattr(vision_of(**{name: least}), name) == least


@pytest.mark.parametrize(
    ("changes", "message", "fine"),
    [
        (
            {"num_hidden_layers": -1},
            "num_hidden_layers is -1, but it must be 0 (no tower) or a positive integer",
            {"num_hidden_layers": 0},
        ),
        ({"rope_theta": 0.0}, "rope_theta is 0.0, but it must be a positive number", {"rope_theta": 1}),
        (
            {"hidden_size": 34, "num_attention_heads": 4},
            "hidden_size is 34, but hidden_size / num_attention_heads, 34 / 4, must be an integer "
            "divisible by 4",
            {"hidden_size": 48, "num_attention_heads": 4},
        ),
        (
            {"hidden_size": 36, "num_attention_heads": 6},
            "hidden_size is 36, but hidden_size / num_attention_heads, 36 / 6, must be an integer "
            "divisible by 4",
            {"hidden_size": 24, "num_attention_heads": 6},
        ),
    ],
)
def test_a_bad_size_of_the_tower_is_named_with_its_value_and_rule(
    changes: dict[str, Any], message: str, fine: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=says(f"vision_config.{message}")):
        vision_of(**changes)
    config = vision_of(**fine)
    assert {name: getattr(config, name) for name in fine} == fine


def test_the_image_token_is_an_id_of_the_vocabulary_unless_there_is_no_tower() -> None:
    tiny = DeepseekV41Config.tiny()
    for value in (258, -1, 1.0, None):
        message = f"image_token_id is {value!r}, but it must be a token id below 258"
        with pytest.raises(ValueError, match=says(message)):
            dataclasses.replace(tiny, image_token_id=value)
    assert dataclasses.replace(tiny, image_token_id=0).image_token_id == 0
    without = dataclasses.replace(tiny, vision_config=vision_of(num_hidden_layers=0), image_token_id=258)
    assert without.image_token_id == 258


@pytest.mark.parametrize(
    ("name", "kind"),
    [("text_config", "DeepseekV41TextConfig"), ("vision_config", "DeepseekV41VisionConfig")],
)
def test_a_part_is_a_config_or_a_dict(name: str, kind: str) -> None:
    message = f"{name} is None, but it must be a {kind} or a dict of its fields"
    with pytest.raises(ValueError, match=says(message)):
        dataclasses.replace(DeepseekV41Config.tiny(), **{name: None})


FIXED: list[tuple[str, object, str]] = [
    ("attention_bias", True, "False"),
    ("attention_dropout", 0.1, "0.0"),
    ("hidden_act", "gelu", "'silu'"),
    ("n_shared_experts", 2, "1"),
    ("num_key_value_heads", 2, "1"),
    ("scoring_func", "sigmoid", "'sqrtsoftplus'"),
    ("tie_word_embeddings", True, "False"),
    ("topk_method", "greedy", "'noaux_tc'"),
]


@pytest.mark.parametrize(("name", "value", "only"), FIXED)
def test_a_switch_in_another_position_is_refused_wherever_it_stands(
    name: str, value: object, only: str
) -> None:
    message = f"{name} is {value!r}, but this model knows {only} only"
    with pytest.raises(ValueError, match=says(message)):
        DeepseekV41Config.from_dict(released_values(**{name: value}))
    with pytest.raises(ValueError, match=says(f"text_config.{message}")):
        DeepseekV41Config.from_dict(released_values(text_config=text_values() | {name: value}))


def test_rope_scaling_of_another_kind_is_refused() -> None:
    for key in ("rope_type", "type"):
        scaling = text_values()["rope_scaling"] | {key: "linear"}
        message = f"text_config.rope_scaling.{key} is 'linear', but this model knows 'yarn' only"
        with pytest.raises(ValueError, match=says(message)):
            DeepseekV41Config.from_dict(
                released_values(text_config=text_values() | {"rope_scaling": scaling})
            )


@pytest.mark.parametrize(
    ("part", "known"),
    [
        ("", "image_token_id, text_config, vision_config"),
        ("text_config", None),
        ("vision_config", None),
        ("rope_scaling", "beta_fast, beta_slow, factor, original_max_position_embeddings"),
    ],
)
def test_an_unknown_key_is_named_with_the_fields_that_exist(part: str, known: str | None) -> None:
    values = released_values()
    inner = values["text_config"]["rope_scaling"] if part == "rope_scaling" else values.get(part, values)
    inner["top_k"] = 3
    where = {"": "", "rope_scaling": "text_config.rope_scaling."}.get(part, f"{part}.")
    cls = {"text_config": DeepseekV41TextConfig, "vision_config": DeepseekV41VisionConfig}.get(part)
    names = known if cls is None else ", ".join(sorted(field.name for field in dataclasses.fields(cls)))
    message = f"{where}top_k is 3, but there is no such field; the fields are {names}"
    with pytest.raises(ValueError, match=says(message)):
        DeepseekV41Config.from_dict(values)


@pytest.mark.parametrize("name", sorted(IGNORED_KEYS))
def test_a_key_that_changes_no_output_is_ignored_in_every_part(name: str) -> None:
    values = released_values(**{name: "whatever"})
    values["text_config"][name] = values["vision_config"][name] = ["whatever"]
    assert DeepseekV41Config.from_dict(values) == DeepseekV41Config.released()


def test_the_keys_of_the_draft_model_and_of_preprocessing_are_ignored() -> None:
    draft = {name for name in text_values() if name.startswith("dspark")}
    assert draft | {"num_nextn_predict_layers", "max_image_tokens", "min_pixels", "max_wh_ratio"} <= set(
        IGNORED_KEYS
    )
    assert len(draft) == 6


def test_missing_fields_are_all_named() -> None:
    values = released_values()
    del values["text_config"]["head_dim"], values["text_config"]["vocab_size"]
    message = "no value for text_config.vocab_size, text_config.head_dim; there is no default"
    with pytest.raises(ValueError, match=says(message)):
        DeepseekV41Config.from_dict(values)
    with pytest.raises(ValueError, match=says("no value for text_config; there is no default")):
        DeepseekV41Config.from_dict({})
    values = released_values()
    del values["text_config"]["rope_scaling"]["factor"]
    message = "no value for text_config.rope_scaling.factor; there is no default"
    with pytest.raises(ValueError, match=says(message)):
        DeepseekV41Config.from_dict(values)


def is_possible(layers: int, ratios: list[int], kv: list[int], index: list[int], candidate: int) -> bool:
    """Whether every compressing layer knows whose keys it reads, and every source has something to give."""
    if layers > len(ratios):
        return False
    for ids in (kv, index):
        if any(later <= earlier for earlier, later in pairwise(ids)):
            return False
        if any(layer not in range(len(ratios)) or not ratios[layer] for layer in ids):
            return False
    if any(layer not in index for layer in kv):
        return False
    for layer in range(len(ratios)):
        before = [source for source in kv if source <= layer]
        if ratios[layer] and (not before or ratios[max(before)] != ratios[layer]):
            return False
    return candidate in [-1, *kv]


def test_a_schedule_is_accepted_exactly_when_every_layer_finds_its_source() -> None:
    seen: Counter[bool] = Counter()
    ids = st.lists(st.integers(0, 5), max_size=3)
    segments = st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=3)), min_size=1, max_size=3
    )

    @st.composite
    def schedules(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[int], int]:
        """One that is possible, with each list then replaced by any other now and then."""
        ratios: list[int] = []
        kv: list[int] = []
        index: list[int] = []
        for ratio, roles in draw(segments):
            if ratio:
                kv.append(len(ratios))
                index.append(len(ratios))
                ratios.append(ratio)
            for role in roles:  # 0: window only, 1: reuse, 2: reindex
                index += [len(ratios)] * (role == 2 and ratio > 0)
                ratios.append(ratio if role else 0)
        candidate = draw(st.sampled_from([-1, *kv]))
        layers = draw(st.integers(1, max(len(ratios), 1)))
        broken = draw(st.integers(0, 7))
        if broken in (1, 2) and ratios:  # one layer with a ratio of its own
            ratios[draw(st.integers(0, len(ratios) - 1))] = draw(st.integers(0, 2))
        return (
            draw(st.integers(1, 8)) if broken == 3 else layers,
            draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)) if broken == 4 else ratios,
            draw(ids) if broken == 5 else kv,
            draw(ids) if broken == 6 else index,
            draw(st.integers(-2, 5)) if broken == 7 else candidate,
        )

    @settings(max_examples=200, deadline=None)
    @given(schedule=schedules())
    def check(schedule: tuple[int, list[int], list[int], list[int], int]) -> None:
        layers, ratios, kv, index, candidate = schedule
        try:
            text_of(
                num_hidden_layers=layers,
                compress_ratios=ratios,
                kv_source_layer_ids=kv,
                index_source_layer_ids=index,
                candidate_source_layer_id=candidate,
            )
        except ValueError:
            accepted = False
        else:
            accepted = True
        assert accepted == is_possible(layers, ratios, kv, index, candidate)
        seen[accepted] += 1

    check()
    assert min(seen[True], seen[False]) > 20
