"""What a Step5 configuration accepts, and what it says to the rest."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from annotate_fsdp.models.step5 import Step5Config, Step5SparseConfig


def released_values() -> dict[str, Any]:
    """The released configuration as its file writes it: lists, 3 prediction layers, switches, extras."""
    layer_types = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 23
    return {
        "architectures": ["Step5ForCausalLM"],
        "att_impl_type": "GQA",
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "fp32_residual_connection": True,
        "head_dim": 192,
        "hidden_size": 4096,
        "intermediate_size": 13824,
        "layer_types": layer_types + ["sliding_attention"] * 3,
        "max_position_embeddings": 1048576,
        "max_seq_len": 1048576,
        "moe_intermediate_size": 1536,
        "moe_layer_list": list(range(3, 91)),
        "moe_num_experts": 352,
        "moe_router_scaling_factor": 3.0,
        "moe_top_k": 8,
        "need_fp32_gate": True,
        "norm_dtype": "float32",
        "norm_expert_weight": True,
        "num_attention_groups": 4,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 92,
        "num_sliding_attention_heads": 64,
        "partial_rotary_factors": [1.0, 1.0, 1.0, 1 / 3] * 23 + [1.0] * 3,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "llama3", "factor": 1.0, "low_freq_factor": 1.0},
        "rope_theta": [1e4, 1e4, 1e4, 1e7] * 23 + [1e4] * 3,
        "share_expert_dim": 1536,
        "sliding_window": 512,
        "sparse_config": {
            "apply_to_layer_types": ["full_attention"],
            "attention_impl": "sparse_gqa",
            "compression_method": "csa_block_compress",
            "csa_z_norm_type": "none",
            "enabled": True,
            "k_norm_type": "layernorm",
            "num_k_heads": 1,
            "num_provider_groups": 4,
            "proxy_dim": 256,
            "q_norm_type": "rmsnorm",
            "region_block_size": 8,
            "softmax_variant": "ssmax",
            "sparse_indexer_num_heads": 16,
            "sparse_indexer_rope_dim": 32,
            "ssmax_s_granularity": "q_head",
            "topk": 512,
            "use_rope": True,
        },
        "swiglu_limits": [7.0] * 92,
        "swiglu_limits_shared": [7.0] * 92,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_head_wise_attn_gate": True,
        "use_moe": True,
        "use_moe_router_bias": True,
        "vocab_size": 128896,
        "yarn_only_types": ["full_attention"],
    }


def test_released_equals_the_released_configuration_file() -> None:
    assert Step5Config.from_dict(released_values()) == Step5Config.released()


@pytest.mark.parametrize("config", [Step5Config.tiny(), Step5Config.released()], ids=["tiny", "released"])
def test_a_config_survives_the_way_through_a_dict_and_can_be_a_key(config: Step5Config) -> None:
    assert Step5Config.from_dict(dataclasses.asdict(config)) == config
    assert Step5Config(**dataclasses.asdict(config)) == config
    assert {config: 1}[Step5Config.from_dict(dataclasses.asdict(config))] == 1


def test_tiny_pairs_each_attention_with_each_feed_forward() -> None:
    tiny = Step5Config.tiny()
    kinds = {(kind, layer in tiny.moe_layer_list) for layer, kind in enumerate(tiny.layer_types)}
    assert len(kinds) == 4


def test_rotary_dim_rounds_to_the_nearest_integer() -> None:
    released = Step5Config.released()
    assert [released.rotary_dim(layer) for layer in range(4)] == [192, 192, 192, 64]
    thirds = (0.33,) * 4  # 24 * 0.33 = 7.92
    assert dataclasses.replace(Step5Config.tiny(), partial_rotary_factors=thirds).rotary_dim(0) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0, but it must be a positive integer"),
        ({"hidden_size": 96.0}, "hidden_size is 96.0, but it must be a positive integer"),
        ({"sliding_window": True}, "sliding_window is True, but it must be a positive integer"),
        (
            {"num_attention_heads": 5},
            "num_attention_heads is 5, but it must be a multiple of num_attention_groups, 2",
        ),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', but it must be a list"),
        (
            {"rope_theta": (1e4,)},
            "rope_theta is (10000.0,), but it must hold one entry for each of 4 layers, not 1",
        ),
        (
            {"layer_types": ("sliding_attention", "linear", "full_attention", "full_attention")},
            "layer_types[1] is 'linear', but it must be one of sliding_attention, full_attention",
        ),
        ({"rope_theta": (1.0, 1.0, 0, 1.0)}, "rope_theta[2] is 0, but it must be a positive number"),
        (
            {"partial_rotary_factors": (1.0, 1.0, 1.0, 1.5)},
            "partial_rotary_factors[3] is 1.5, but it must be above 0 and at most 1",
        ),
        (
            {"partial_rotary_factors": (1.0, 0.125, 1.0, 1.0)},
            "partial_rotary_factors[1] is 0.125, but 3 of 24 channels would rotate; "
            "that number must be even and not 0",
        ),
        (
            {"swiglu_limits": (7.0, -1.0, 7.0, 7.0)},
            "swiglu_limits[1] is -1.0, but it must be None, 0 or a positive number",
        ),
        (
            {"swiglu_limits_shared": (7.0, 7.0, float("nan"), 7.0)},
            "swiglu_limits_shared[2] is nan, but it must be None, 0 or a positive number",
        ),
        ({"moe_layer_list": (1, 4)}, "moe_layer_list is (1, 4), but its entries must be layers in 0..3"),
        ({"moe_layer_list": (1, 1)}, "moe_layer_list is (1, 1), but a layer may be listed once only"),
        ({"moe_top_k": 9}, "moe_top_k is 9, but it must be at most moe_num_experts, 8"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0, but it must be a positive number"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but this model knows False only"),
        ({"indexer_fp8_rounding": 1}, "indexer_fp8_rounding is 1, but it must be True or False"),
        (
            {"sparse_config": None},
            "sparse_config is None, but it must be a Step5SparseConfig or a dict of its fields",
        ),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape('Step5Config: ' + message)}$"):
        dataclasses.replace(Step5Config.tiny(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 0}, "sparse_config.topk is 0, but it must be a positive integer"),
        (
            {"sparse_indexer_rope_dim": 18},
            "sparse_config.sparse_indexer_rope_dim is 18, but it must be even and at most proxy_dim, 16",
        ),
        (
            {"sparse_indexer_rope_dim": 3},
            "sparse_config.sparse_indexer_rope_dim is 3, but it must be even and at most proxy_dim, 16",
        ),
        (
            {"sparse_indexer_num_heads": 3},
            "sparse_config.sparse_indexer_num_heads is 3, but it must be a multiple of "
            "num_attention_groups, 2",
        ),
    ],
)
def test_a_bad_indexer_size_is_named_with_its_value_and_rule(changes: dict[str, Any], message: str) -> None:
    sparse = dataclasses.asdict(Step5Config.tiny().sparse_config) | changes
    with pytest.raises(ValueError, match=f"^{re.escape('Step5Config: ' + message)}$"):
        dataclasses.replace(Step5Config.tiny(), sparse_config=Step5SparseConfig(**sparse))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_topk": 8}, "moe_topk is 8, but there is no such field; the fields are "),
        (
            {"use_head_wise_attn_gate": False},
            "use_head_wise_attn_gate is False, but this model knows True only",
        ),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4, but it must equal moe_top_k, 8"),
        (
            {"num_sliding_attention_heads": 96},
            "num_sliding_attention_heads is 96, but it must equal num_attention_heads, 64",
        ),
        (
            {"rope_scaling": {"factor": 8.0}},
            "rope_scaling is {'factor': 8.0}, but this model has plain rotary embeddings only "
            "(None, or factor 1.0)",
        ),
        (
            {"sparse_config": {"enabled": False}},
            "sparse_config.enabled is False, but this model knows True only",
        ),
        (
            {"sparse_config": {"num_provider_groups": 8}},
            "sparse_config.num_provider_groups is 8, but it must equal num_attention_groups, 4",
        ),
        (
            {"sparse_config": {"top_k": 8}},
            "sparse_config.top_k is 8, but there is no such field; the fields are ",
        ),
        (
            {"sparse_config": {"topk": 8}},
            "Step5Config: no value for sparse_config.proxy_dim, sparse_config.sparse_indexer_rope_dim, ",
        ),
    ],
)
def test_a_file_that_asks_for_another_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Step5Config.from_dict(released_values() | changes)


def test_missing_fields_are_all_named() -> None:
    values = released_values()
    del values["head_dim"], values["vocab_size"]
    with pytest.raises(
        ValueError, match=r"^Step5Config: no value for vocab_size, head_dim; there is no default$"
    ):
        Step5Config.from_dict(values)
