"""What a Step5 configuration may hold, and what the message says when it holds something else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from annotate_fsdp.models.fields import Broken, Released, broken_counts, broken_positives, is_number

if TYPE_CHECKING:
    from annotate_fsdp.models.step5.config import Step5Config, Step5SparseConfig

LayerType = Literal["sliding_attention", "full_attention"]

LAYER_TYPES: tuple[LayerType, ...] = ("sliding_attention", "full_attention")
PER_LAYER = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")
COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_attention_groups",
    "head_dim",
    "sliding_window",
    "moe_num_experts",
    "moe_top_k",
    "moe_intermediate_size",
    "share_expert_dim",
)
SPARSE_COUNTS = (
    "proxy_dim",
    "sparse_indexer_rope_dim",
    "sparse_indexer_num_heads",
    "topk",
    "region_block_size",
)

# What the released configuration also says. The model does not read these: they describe serving,
# storage or the tokenizer, or (the two of the sparse configuration) have no effect on the output.
IGNORED_KEYS = frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "max_position_embeddings",
        "max_seq_len",
        "model_type",
        "pad_token_id",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "yarn_only_types",
    }
)
IGNORED_SPARSE_KEYS = frozenset({"softmax_variant", "ssmax_s_granularity"})

# Switches that the release sets and this model knows in that position only.
FIXED_VALUES: Mapping[str, Any] = {
    "att_impl_type": "GQA",
    "fp32_residual_connection": True,
    "need_fp32_gate": True,
    "norm_dtype": "float32",
    "norm_expert_weight": True,
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
}
FIXED_SPARSE_VALUES: Mapping[str, Any] = {
    "apply_to_layer_types": ["full_attention"],
    "attention_impl": "sparse_gqa",
    "compression_method": "csa_block_compress",
    "csa_z_norm_type": "none",
    "enabled": True,
    "k_norm_type": "layernorm",
    "num_k_heads": 1,
    "q_norm_type": "rmsnorm",
    "use_rope": True,
}
# A second name for what another field holds.
DUPLICATES: Mapping[str, str] = {
    "num_experts_per_tok": "moe_top_k",
    "num_sliding_attention_heads": "num_attention_heads",
}


TOP = Released(model="Step5Config", ignored=IGNORED_KEYS, fixed=FIXED_VALUES)
SPARSE = Released(
    model="Step5Config",
    prefix="sparse_config.",
    ignored=IGNORED_SPARSE_KEYS | {"num_provider_groups"},  # which `released_fields` checks
    fixed=FIXED_SPARSE_VALUES,
)


def released_fields(values: Mapping[str, Any], known: set[str], required: Collection[str]) -> dict[str, Any]:
    """Return the fields among the released configuration's `values`; refuse what this model has not."""
    chosen: dict[str, Any] = {}
    layers = values.get("num_hidden_layers")
    for name, value in values.items():
        if name in PER_LAYER and isinstance(value, list | tuple) and isinstance(layers, int):
            chosen[name] = tuple(value)[:layers]
        elif name in known:
            chosen[name] = value
        elif name == "rope_scaling":
            # with factor 1 the released scaling formula is the identity
            if value is not None and not (isinstance(value, Mapping) and value.get("factor") == 1):
                TOP.fail(name, value, "this model has plain rotary embeddings only (None, or factor 1.0)")
        elif name in DUPLICATES:
            _check_duplicate(name, value, DUPLICATES[name], values)
        else:
            TOP.check_other(name, value, known)
    TOP.check_missing(required, chosen)
    sparse = values["sparse_config"]
    if isinstance(sparse, Mapping) and "num_provider_groups" in sparse:
        name = "sparse_config.num_provider_groups"
        _check_duplicate(name, sparse["num_provider_groups"], "num_attention_groups", values)
    return chosen


def released_sparse_fields(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields among the released sparse configuration's `values`, likewise; all are required."""
    for name, value in values.items():
        if name not in known:
            SPARSE.check_other(name, value, known)
    chosen = {name: value for name, value in values.items() if name in known}
    SPARSE.check_missing(known, chosen)
    return chosen


def _check_duplicate(name: str, value: object, original: str, values: Mapping[str, Any]) -> None:
    if value != values.get(original):
        TOP.fail(name, value, f"it must equal {original}, {values.get(original)!r}")


def broken_sparse_rules(sparse: Step5SparseConfig) -> Iterator[Broken]:
    """Yield what is wrong with the indexer's sizes."""
    yield from broken_counts(sparse, SPARSE_COUNTS)
    rope, proxy = sparse.sparse_indexer_rope_dim, sparse.proxy_dim
    if rope % 2 or rope > proxy:
        yield "sparse_indexer_rope_dim", rope, f"it must be even and at most proxy_dim, {proxy}"


def broken_rules(config: Step5Config, sparse_type: type[Step5SparseConfig]) -> Iterator[Broken]:
    """Yield what is wrong with `config`: sizes, then lists, then how they fit.

    A later rule may rely on an earlier one: read the first only.
    """
    yield from broken_counts(config, COUNTS)
    layers, groups, sparse = config.num_hidden_layers, config.num_attention_groups, config.sparse_config
    for name in (*PER_LAYER, "moe_layer_list"):
        value = getattr(config, name)
        if not isinstance(value, tuple):
            yield name, value, "it must be a list"
        if name in PER_LAYER and len(value) != layers:
            yield name, value, f"it must hold one entry for each of {layers} layers, not {len(value)}"
    for layer in range(layers):
        yield from _broken_layer_rules(config, layer)
    for index in config.moe_layer_list:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < layers:
            yield "moe_layer_list", config.moe_layer_list, f"its entries must be layers in 0..{layers - 1}"
    if len(set(config.moe_layer_list)) != len(config.moe_layer_list):
        yield "moe_layer_list", config.moe_layer_list, "a layer may be listed once only"
    if config.num_attention_heads % groups:
        rule = f"it must be a multiple of num_attention_groups, {groups}"
        yield "num_attention_heads", config.num_attention_heads, rule
    if config.moe_top_k > config.moe_num_experts:
        yield "moe_top_k", config.moe_top_k, f"it must be at most moe_num_experts, {config.moe_num_experts}"
    yield from broken_positives(config, ("rms_norm_eps", "moe_router_scaling_factor"))
    if config.tie_word_embeddings is not False:
        yield "tie_word_embeddings", config.tie_word_embeddings, "this model knows False only"
    if not isinstance(config.indexer_fp8_rounding, bool):
        yield "indexer_fp8_rounding", config.indexer_fp8_rounding, "it must be True or False"
    if not isinstance(sparse, sparse_type):
        yield "sparse_config", sparse, "it must be a Step5SparseConfig or a dict of its fields"
    if sparse.sparse_indexer_num_heads % groups:
        rule = f"it must be a multiple of num_attention_groups, {groups}"
        yield "sparse_config.sparse_indexer_num_heads", sparse.sparse_indexer_num_heads, rule


def _broken_layer_rules(config: Step5Config, layer: int) -> Iterator[Broken]:
    """Yield what is wrong with the entries of one layer in the per-layer lists."""
    kind = config.layer_types[layer]
    if kind not in LAYER_TYPES:
        yield f"layer_types[{layer}]", kind, f"it must be one of {', '.join(LAYER_TYPES)}"
    theta = config.rope_theta[layer]
    if not is_number(theta) or theta <= 0:
        yield f"rope_theta[{layer}]", theta, "it must be a positive number"
    factor = config.partial_rotary_factors[layer]
    where = f"partial_rotary_factors[{layer}]"
    if not is_number(factor) or not 0 < factor <= 1:
        yield where, factor, "it must be above 0 and at most 1"
    if config.rotary_dim(layer) % 2 or config.rotary_dim(layer) == 0:
        rotating = f"{config.rotary_dim(layer)} of {config.head_dim} channels would rotate"
        yield where, factor, f"{rotating}; that number must be even and not 0"
    for name in ("swiglu_limits", "swiglu_limits_shared"):
        limit = getattr(config, name)[layer]
        if limit is not None and (not is_number(limit) or limit < 0):
            yield f"{name}[{layer}]", limit, "it must be None, 0 or a positive number"
