"""What a DeepSeek-V4.1 configuration may hold, and what the message says when it holds something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from annotate_fsdp.models.deepseek_v41.primes import ngram_primes
from annotate_fsdp.models.fields import (
    Broken,
    Released,
    broken_counts,
    broken_positives,
    is_count,
    is_number,
)

if TYPE_CHECKING:
    from annotate_fsdp.models.deepseek_v41.config import (
        DeepseekV41Config,
        DeepseekV41TextConfig,
        DeepseekV41VisionConfig,
    )

MODEL = "DeepseekV41Config"
STORAGE_DTYPES = ("bfloat16", "float32")
SEQUENCES = (
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "engram_layer_ids",
    "engram_num_embeddings",
)
COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "moe_intermediate_size",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
)
POSITIVES = (
    "initializer_range",
    "rms_norm_eps",
    "hc_eps",
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
)

# What a released configuration also says. The model does not read these: they describe serving, storage,
# the tokenizer, image preprocessing, or the draft model, which is another model.
IGNORED_KEYS = frozenset(
    {
        "architectures",
        "attribute_map",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "max_position_embeddings",
        "model_type",
        "pad_token_id",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "num_nextn_predict_layers",
        "dspark_block_size",
        "dspark_noise_token_id",
        "noise_token_id",
        "dspark_target_layer_ids",
        "dspark_markov_rank",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
        "max_image_tokens",
        "min_pixels",
        "max_wh_ratio",
    }
)
# Switches that the release sets and this model knows in that position only.
FIXED_VALUES: Mapping[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}

TOP = Released(model=MODEL, ignored=IGNORED_KEYS | {"dtype"}, fixed=FIXED_VALUES)
TEXT = Released(model=MODEL, prefix="text_config.", ignored=IGNORED_KEYS, fixed=FIXED_VALUES)
VISION = Released(model=MODEL, prefix="vision_config.", ignored=IGNORED_KEYS | {"dtype"}, fixed=FIXED_VALUES)
YARN = Released(model=MODEL, prefix="text_config.rope_scaling.", fixed={"rope_type": "yarn", "type": "yarn"})


def broken_text_rules(config: DeepseekV41TextConfig) -> Iterator[Broken]:
    """Yield what is wrong with the language part; a later rule may rely on an earlier one: read the first."""
    yield from broken_counts(config, COUNTS)
    yield from broken_positives(config, POSITIVES)
    for name in SEQUENCES:
        value = getattr(config, name)
        if not isinstance(value, tuple) or not all(is_count(entry, 0) for entry in value):
            yield name, value, "it must be a list of integers, none of them negative"
    heads, groups = config.num_attention_heads, config.o_groups
    if heads % groups:
        yield "num_attention_heads", heads, f"it must be a multiple of o_groups, {groups}"
    rope, most = config.qk_rope_head_dim, min(config.head_dim, config.index_head_dim)
    if rope % 2 or rope > most:
        rule = f"it must be even and at most head_dim and index_head_dim, {most}"
        yield "qk_rope_head_dim", rope, rule
    if config.num_experts_per_tok > config.n_routed_experts:
        rule = f"it must be at most n_routed_experts, {config.n_routed_experts}"
        yield "num_experts_per_tok", config.num_experts_per_tok, rule
    if not is_number(config.swiglu_limit) or config.swiglu_limit < 0:
        yield "swiglu_limit", config.swiglu_limit, "it must be 0 (no clamp) or a positive number"
    for name in ("norm_topk_prob", "cache_fake_quantization"):
        if not isinstance(getattr(config, name), bool):
            yield name, getattr(config, name), "it must be True or False"
    if config.dtype not in STORAGE_DTYPES:
        yield "dtype", config.dtype, f"it must be one of {', '.join(STORAGE_DTYPES)}"
    if config.rope_scaling is not None and config.compress_rope_theta <= 1:
        yield "compress_rope_theta", config.compress_rope_theta, "it must be above 1 where YaRN stretches it"
    yield from _broken_schedule(config)
    yield from _broken_engram(config)


def _broken_schedule(config: DeepseekV41TextConfig) -> Iterator[Broken]:
    """Yield what is wrong with which layer compresses, indexes and shares."""
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    if len(ratios) < layers:
        rule = f"it must hold an entry for each of {layers} layers, not {len(ratios)}"
        yield "compress_ratios", ratios, rule
    kv, index = config.kv_source_layer_ids, config.index_source_layer_ids
    for name, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        if list(ids) != sorted(set(ids)):
            yield name, ids, "its entries must increase"
        if outside := [layer for layer in ids if layer >= len(ratios)]:
            yield name, ids, f"{outside[0]} is beyond the {len(ratios)} entries of compress_ratios"
        if plain := [layer for layer in ids if ratios[layer] == 0]:
            yield name, ids, f"layer {plain[0]} has compress ratio 0 and so nothing to give"
    if not set(kv) <= set(index):
        yield "kv_source_layer_ids", kv, f"each must be one of index_source_layer_ids, {index}"
    source: int | None = None
    for layer, ratio in enumerate(ratios):
        source = layer if layer in kv else source
        if ratio and source is None:
            yield "compress_ratios", ratios, f"layer {layer} compresses, but no KV source comes before it"
        elif ratio and source is not None and ratios[source] != ratio:
            rule = f"layer {layer} reads layer {source}, whose ratio is {ratios[source]}, not {ratio}"
            yield "compress_ratios", ratios, rule
    candidate = config.candidate_source_layer_id
    if candidate != -1 and not (is_count(candidate, 0) and candidate in kv):
        rule = f"it must be -1 or one of kv_source_layer_ids, {kv}"
        yield "candidate_source_layer_id", candidate, rule


def _broken_engram(config: DeepseekV41TextConfig) -> Iterator[Broken]:
    ids, rows = config.engram_layer_ids, config.engram_num_embeddings
    if list(ids) != sorted(set(ids)):
        yield "engram_layer_ids", ids, "its entries must increase"
    if len(rows) != len(ids):
        rule = f"it must hold one row count for each of engram_layer_ids, {ids}"
        yield "engram_num_embeddings", rows, rule
    if not is_count(config.engram_max_ngram_size, 2):
        yield "engram_max_ngram_size", config.engram_max_ngram_size, "it must be 2 or more"
    if not is_count(config.engram_pad_token_id, 0):
        yield "engram_pad_token_id", config.engram_pad_token_id, "it must be a token id"
    if not ids:
        return
    orders = config.engram_max_ngram_size - 1
    primes = ngram_primes(len(ids), orders * config.engram_n_heads, config.engram_vocab_size)
    for layer, have, needed in zip(ids, rows, map(sum, primes), strict=True):
        if have < needed:
            rule = f"the hashes of layer {layer} reach {needed} rows"
            yield "engram_num_embeddings", rows, rule


def broken_yarn_rules(scaling: object) -> Iterator[Broken]:
    """Yield what is wrong with YaRN's numbers."""
    yield from broken_positives(
        scaling, ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
    )


def broken_vision_rules(config: DeepseekV41VisionConfig) -> Iterator[Broken]:
    """Yield what is wrong with the tower's sizes."""
    if not is_count(config.num_hidden_layers, 0):
        yield "num_hidden_layers", config.num_hidden_layers, "it must be 0 (no tower) or a positive integer"
    counts = ("hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "downsample_ratio")
    yield from broken_counts(config, counts)
    yield from broken_positives(config, ("rope_theta", "initializer_range"))
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads or hidden // heads % 4:
        rule = f"hidden_size / num_attention_heads, {hidden} / {heads}, must be an integer divisible by 4"
        yield "hidden_size", hidden, rule


def broken_rules(config: DeepseekV41Config, text: type, vision: type) -> Iterator[Broken]:
    """Yield what is wrong with the whole."""
    for name, kind in (("text_config", text), ("vision_config", vision)):
        if not isinstance(getattr(config, name), kind):
            yield name, getattr(config, name), f"it must be a {kind.__name__} or a dict of its fields"
    vocabulary = config.text_config.vocab_size
    if not is_count(config.image_token_id, 0) or (
        config.vision_config.num_hidden_layers and config.image_token_id >= vocabulary
    ):
        yield "image_token_id", config.image_token_id, f"it must be a token id below {vocabulary}"
