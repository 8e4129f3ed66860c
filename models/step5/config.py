"""Sizes and options of Step5, under the field names of the released configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from annotate_fsdp.models.fields import required_fields
from annotate_fsdp.models.step5.config_rules import (
    LAYER_TYPES,
    PER_LAYER,
    SPARSE,
    TOP,
    LayerType,
    broken_rules,
    broken_sparse_rules,
    released_fields,
    released_sparse_fields,
)


@dataclass(frozen=True, kw_only=True)
class Step5SparseConfig:
    """Sizes of the indexer that chooses which regions a full-attention layer reads.

    - proxy_dim: channels P of an indexer head.
    - sparse_indexer_rope_dim: leading channels of each head that rotate.
    - sparse_indexer_num_heads: query heads, divided evenly among the KV groups.
    - topk: regions strictly before the query's own that a query keeps, at most.
    - region_block_size: tokens in one region.

    Raises:
        ValueError: a size that no indexer can have.
    """

    proxy_dim: int
    sparse_indexer_rope_dim: int
    sparse_indexer_num_heads: int
    topk: int
    region_block_size: int

    def __post_init__(self) -> None:
        for name, value, rule in broken_sparse_rules(self):
            SPARSE.fail(name, value, rule)


@dataclass(frozen=True, kw_only=True)
class Step5Config:
    """Sizes and options of a Step5 text model.

    Sequences may be given as lists and `sparse_config` as a dict; per-layer ones hold one entry a layer.

    - num_attention_groups: KV groups, each of `num_attention_heads / num_attention_groups` query heads.
    - layer_types: `"sliding_attention"` (window) or `"full_attention"` (chosen regions).
    - sliding_window: positions that a query of a sliding layer reads, its own included.
    - rope_theta: rotary base.
    - partial_rotary_factors: rotating share of `head_dim`, which is rounded to the nearest integer.
    - moe_layer_list: indices of the layers with routed and shared experts; the others have a dense MLP.
    - share_expert_dim: width of the shared expert.
    - moe_router_scaling_factor: what the routing weights of a token sum to.
    - swiglu_limits: clamp of the routed experts' activations; 0 or None clamps nothing.
    - swiglu_limits_shared: the same for shared experts and dense MLPs.
    - indexer_fp8_rounding: round the indexer's queries and region summaries to e4m3 before they are
      scored, as the released kernels do.

    Raises:
        ValueError: a field that no model can have; the message names field, value and rule.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_attention_groups: int
    head_dim: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int
    rope_theta: tuple[float, ...]
    partial_rotary_factors: tuple[float, ...]
    moe_layer_list: tuple[int, ...]
    moe_num_experts: int
    moe_top_k: int
    moe_intermediate_size: int
    share_expert_dim: int
    moe_router_scaling_factor: float
    swiglu_limits: tuple[float | None, ...]
    swiglu_limits_shared: tuple[float | None, ...]
    sparse_config: Step5SparseConfig
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    indexer_fp8_rounding: bool = True

    def __post_init__(self) -> None:
        for name in (*PER_LAYER, "moe_layer_list"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.sparse_config, Mapping):
            sparse = released_sparse_fields(self.sparse_config, required_fields(Step5SparseConfig))
            object.__setattr__(self, "sparse_config", Step5SparseConfig(**sparse))
        for name, value, rule in broken_rules(self, Step5SparseConfig):
            TOP.fail(name, value, rule)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from the released configuration's names and values.

        Entries of per-layer lists beyond `num_hidden_layers` belong to the release's prediction layers,
        which this model leaves out; they are dropped. Keys that cannot change the output are ignored
        (`config_rules.IGNORED_KEYS`).

        Raises:
            ValueError: a key is unknown or missing, or asks for something that this model has not.
        """
        known = {field.name for field in fields(cls)}
        return cls(**released_fields(values, known, required_fields(cls)))

    @classmethod
    def released(cls) -> Self:
        """Return the released configuration: 92 layers, 598,476,021,504 parameters."""
        full = tuple(index % 4 == 3 for index in range(92))
        return cls(
            vocab_size=128896,
            hidden_size=4096,
            num_hidden_layers=92,
            intermediate_size=13824,
            num_attention_heads=64,
            num_attention_groups=4,
            head_dim=192,
            layer_types=tuple(LAYER_TYPES[is_full] for is_full in full),
            sliding_window=512,
            rope_theta=tuple(1e7 if is_full else 1e4 for is_full in full),
            partial_rotary_factors=tuple(1 / 3 if is_full else 1.0 for is_full in full),
            moe_layer_list=tuple(range(3, 91)),
            moe_num_experts=352,
            moe_top_k=8,
            moe_intermediate_size=1536,
            share_expert_dim=1536,
            moe_router_scaling_factor=3.0,
            swiglu_limits=(7.0,) * 92,
            swiglu_limits_shared=(7.0,) * 92,
            sparse_config=Step5SparseConfig(
                proxy_dim=256,
                sparse_indexer_rope_dim=32,
                sparse_indexer_num_heads=16,
                topk=512,
                region_block_size=8,
            ),
        )

    @classmethod
    def tiny(cls) -> Self:
        """Return a byte-level model that trains on a CPU.

        Four layers pair each kind of attention with each kind of feed-forward. At 128 positions a query
        of a full-attention layer reads at most 4 of 16 regions. Without e4m3 rounding, so that sums of
        another order choose the same regions.
        """
        return cls(
            vocab_size=256,
            hidden_size=96,
            num_hidden_layers=4,
            intermediate_size=192,
            num_attention_heads=4,
            num_attention_groups=2,
            head_dim=24,
            layer_types=("sliding_attention", "sliding_attention", "full_attention", "full_attention"),
            sliding_window=16,
            rope_theta=(1e4, 1e4, 1e7, 1e7),
            partial_rotary_factors=(1.0, 1.0, 1 / 3, 1 / 3),
            moe_layer_list=(1, 2),
            moe_num_experts=8,
            moe_top_k=2,
            moe_intermediate_size=32,
            share_expert_dim=32,
            moe_router_scaling_factor=3.0,
            swiglu_limits=(7.0,) * 4,
            swiglu_limits_shared=(7.0,) * 4,
            sparse_config=Step5SparseConfig(
                proxy_dim=16,
                sparse_indexer_rope_dim=4,
                sparse_indexer_num_heads=4,
                topk=3,
                region_block_size=8,
            ),
            indexer_fp8_rounding=False,
        )

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key and one value."""
        return self.num_attention_heads // self.num_attention_groups

    def rotary_dim(self, layer: int) -> int:
        """Return how many leading channels of a head rotate in `layer`."""
        return round(self.head_dim * self.partial_rotary_factors[layer])
