"""Sizes and options of DeepSeek-V4.1, under the field names of the released configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, cast

from annotate_fsdp.models.deepseek_v41.config_rules import (
    SEQUENCES,
    TEXT,
    TOP,
    VISION,
    YARN,
    broken_rules,
    broken_text_rules,
    broken_vision_rules,
    broken_yarn_rules,
)
from annotate_fsdp.models.fields import Released, required_fields

StorageDtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class DeepseekV41YarnConfig:
    """YaRN's stretch of the compressed layers' rotary frequencies; it has no effect on magnitudes.

    - factor: by which the slow frequencies are divided.
    - beta_fast, beta_slow: rotations over the original length, above and below which a frequency is kept,
      and is divided in full.
    - original_max_position_embeddings: that length, in positions.

    Raises:
        ValueError: a field is no positive number.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name, value, rule in broken_yarn_rules(self):
            YARN.fail(name, value, rule)


@dataclass(frozen=True, kw_only=True)
class DeepseekV41TextConfig:
    """Sizes and options of the language part.

    Sequences may be given as lists and `rope_scaling` as a dict. The lists describe the whole released
    schedule: a smaller `num_hidden_layers` takes its first layers.

    - qk_rope_head_dim: trailing channels of a head, and of an indexer head, that rotate.
    - q_lora_rank, o_lora_rank: inner sizes of the query's and of each output group's projection.
    - sliding_window: positions that a query reads uncompressed, its own included.
    - compress_ratios: tokens in one compressed key of each layer; 0: the layer reads its window only.
    - kv_source_layer_ids: layers that make compressed keys; later layers read the latest ones made.
    - index_source_layer_ids: layers that choose which of them are read; later layers reuse the choice.
    - index_topk: compressed keys that a query reads, at most.
    - candidate_source_layer_id: KV source that narrows the choice of later layers to its best
      `candidate_topk_blocks` blocks of `candidate_block_size` keys; -1: none does.
    - hc_mult: residual streams s. hc_sinkhorn_iters: rounds of normalisation of the s x s mix.
    - swiglu_limit: clamp of the experts' activations; 0 clamps nothing.
    - engram_layer_ids, engram_num_embeddings: layers with an n-gram memory, and the rows of each table.
    - engram_max_ngram_size: N; the hashes cover the last 2, ..., N tokens, each `engram_n_heads` times.
    - engram_vocab_size: from where the hashes' prime moduli are taken upwards.
    - engram_compressed_vocab_size: number of distinct values in the token map that the model is given.
    - initializer_range: standard deviation of the initial weights.
    - cache_fake_quantization: round what a cache would hold to fp8, nvfp4 and mxfp4, as the released
      kernels do, with the gradient of the identity.
    - dtype: storage of all parameters but the fp32 islands.

    Raises:
        ValueError: a field that no model can have; the message names field, value and rule.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    moe_intermediate_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: DeepseekV41YarnConfig | None = None
    swiglu_limit: float = 10.0
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    initializer_range: float = 0.02
    cache_fake_quantization: bool = True
    dtype: StorageDtype = "bfloat16"

    def __post_init__(self) -> None:
        for name in SEQUENCES:
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.rope_scaling, Mapping):
            yarn = _released(DeepseekV41YarnConfig, self.rope_scaling, YARN)
            object.__setattr__(self, "rope_scaling", DeepseekV41YarnConfig(**yarn))
        if not isinstance(self.rope_scaling, DeepseekV41YarnConfig | None):
            TEXT.fail("rope_scaling", self.rope_scaling, "it must be None, or YaRN's fields as a dict")
        for name, value, rule in broken_text_rules(self):
            TEXT.fail(name, value, rule)

    @property
    def engram_layers(self) -> tuple[int, ...]:
        """The engram layers among the first `num_hidden_layers`."""
        return tuple(layer for layer in self.engram_layer_ids if layer < self.num_hidden_layers)

    @property
    def engram_heads(self) -> int:
        """Rows that a token looks up in one table: the heads of every n-gram order."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


@dataclass(frozen=True, kw_only=True)
class DeepseekV41VisionConfig:
    """Sizes of the vision tower and of the aligner.

    - num_hidden_layers: 0 leaves out tower, aligner and image tokens.
    - patch_size: pixels on a patch's edge.
    - downsample_ratio: patches on the edge of the square that becomes one image token.
    - initializer_range: standard deviation of the initial weights, the aligner's too.

    Raises:
        ValueError: a field that no tower can have; the message names field, value and rule.
    """

    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name, value, rule in broken_vision_rules(self):
            VISION.fail(name, value, rule)


@dataclass(frozen=True, kw_only=True)
class DeepseekV41Config:
    """A whole model: its two parts, which may be given as dicts, and the id that image tokens carry.

    Raises:
        ValueError: a field that no model can have; the message names field, value and rule.
    """

    text_config: DeepseekV41TextConfig
    vision_config: DeepseekV41VisionConfig = field(default_factory=DeepseekV41VisionConfig)
    image_token_id: int = 129264

    def __post_init__(self) -> None:
        parts: tuple[tuple[str, type, Released], ...] = (
            ("text_config", DeepseekV41TextConfig, TEXT),
            ("vision_config", DeepseekV41VisionConfig, VISION),
        )
        for name, cls, keys in parts:
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, cls(**_released(cls, value, keys)))
        for name, value, rule in broken_rules(self, DeepseekV41TextConfig, DeepseekV41VisionConfig):
            TOP.fail(name, value, rule)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from the released configuration's names and values.

        Keys that cannot change the output are ignored (`config_rules.IGNORED_KEYS`); among them are those
        of the draft model.

        Raises:
            ValueError: a key is unknown or missing, or asks for something that this model has not.
        """
        return cls(**_released(cls, values, TOP))

    @classmethod
    def released(cls) -> Self:
        """Return the released configuration: 40 layers, 748,979,922,544 parameters."""
        return cls(
            text_config=DeepseekV41TextConfig(
                vocab_size=129280,
                hidden_size=5120,
                num_hidden_layers=40,
                moe_intermediate_size=2304,
                num_attention_heads=64,
                head_dim=512,
                qk_rope_head_dim=64,
                q_lora_rank=1280,
                o_lora_rank=1024,
                o_groups=8,
                n_routed_experts=384,
                num_experts_per_tok=6,
                sliding_window=128,
                compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
                kv_source_layer_ids=(2, 8, 14, 20),
                index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
                index_n_heads=32,
                index_head_dim=128,
                index_topk=512,
                candidate_source_layer_id=20,
                rope_scaling=DeepseekV41YarnConfig(
                    factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
                ),
                engram_layer_ids=(1, 14),
                engram_num_embeddings=(384006168, 384016682),
            )
        )

    @classmethod
    def tiny(cls) -> Self:
        """Return a byte-level model that trains on a CPU and has every part, with fp32 storage.

        Ids 0 to 255 are bytes, 256 pads and 257 stands for images. The five layers are: window only with
        an engram, KV source at ratio 2, reuse, KV and candidate source at ratio 1, reindex. Without fake
        quantisation, so that sums of another order choose the same keys. The initial weights are as much
        larger than the release's as the sums over them are shorter, so that activations are as large.
        """
        return cls(
            text_config=DeepseekV41TextConfig(
                vocab_size=258,
                hidden_size=64,
                num_hidden_layers=5,
                moe_intermediate_size=48,
                num_attention_heads=4,
                head_dim=32,
                qk_rope_head_dim=8,
                q_lora_rank=48,
                o_lora_rank=32,
                o_groups=2,
                n_routed_experts=8,
                num_experts_per_tok=2,
                sliding_window=16,
                compress_ratios=(0, 2, 2, 1, 1),
                kv_source_layer_ids=(1, 3),
                index_source_layer_ids=(1, 3, 4),
                index_n_heads=4,
                index_head_dim=32,
                index_topk=16,
                candidate_source_layer_id=3,
                candidate_topk_blocks=6,
                candidate_block_size=4,
                hc_mult=2,
                hc_sinkhorn_iters=3,
                rope_scaling=DeepseekV41YarnConfig(
                    factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=64
                ),
                engram_layer_ids=(0,),
                engram_num_embeddings=(3200,),
                engram_vocab_size=500,
                engram_n_heads=2,
                engram_head_dim=16,
                engram_pad_token_id=256,
                engram_compressed_vocab_size=258,
                initializer_range=0.15,
                cache_fake_quantization=False,
                dtype="float32",
            ),
            vision_config=DeepseekV41VisionConfig(
                num_hidden_layers=2,
                hidden_size=32,
                num_attention_heads=2,
                intermediate_size=64,
                patch_size=2,
                downsample_ratio=2,
                initializer_range=0.15,
            ),
            image_token_id=257,
        )


def _released(cls: type, values: Mapping[str, Any], keys: Released) -> dict[str, Any]:
    """Return the fields of `cls` among `values`; refuse what this model has not."""
    known = [f.name for f in fields(cast("Any", cls))]
    for name, value in values.items():
        if name not in known:
            keys.check_other(name, value, known)
    chosen = {name: value for name, value in values.items() if name in known}
    keys.check_missing(required_fields(cls), chosen)
    return chosen
