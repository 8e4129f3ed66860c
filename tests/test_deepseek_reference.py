"""DeepSeek-V4.1 as a whole against a slow second computation, on small models of every make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_reference import SlowModel, hash_primes
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
