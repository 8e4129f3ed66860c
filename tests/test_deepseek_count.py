"""DeepSeek-V4.1 at its released size: names, shapes, storage and the number of parameters of every part."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn

from annotate_fsdp.models.deepseek_v41 import (
    DeepseekV41Block,
    DeepseekV41Config,
    DeepseekV41ForCausalLM,
    DeepseekV41VisionBlock,
)
from annotate_fsdp.models.deepseek_v41.primes import ngram_primes

BF16, FP32 = torch.bfloat16, torch.float32
KV_SOURCES, INDEX_SOURCES = (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36)
ENGRAMS = {1: 384006168, 14: 384016682}


@pytest.fixture(scope="module")
def released() -> DeepseekV41ForCausalLM:
    with torch.device("meta"):
        return DeepseekV41ForCausalLM(DeepseekV41Config.released())


def total(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_released_has_748_979_922_544_parameters_all_on_meta(released: DeepseekV41ForCausalLM) -> None:
    assert total(released) == 748_979_922_544
    assert {tensor.device.type for tensor in [*released.parameters(), *released.buffers()]} == {"meta"}


def test_released_stores_839_tensors_in_bf16_and_353_in_fp32(released: DeepseekV41ForCausalLM) -> None:
    tensors, numbers = Counter[torch.dtype](), Counter[torch.dtype]()
    for parameter in released.parameters():
        tensors[parameter.dtype] += 1
        numbers[parameter.dtype] += parameter.numel()
    assert tensors == {BF16: 839, FP32: 353}
    assert numbers == {BF16: 748_260_265_984, FP32: 719_656_560}


def test_the_indexers_and_nothing_else_are_frozen(released: DeepseekV41ForCausalLM) -> None:
    frozen = {name for name, parameter in released.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in released.named_parameters() if ".indexer." in name}
    assert sum(released.get_parameter(name).numel() for name in frozen) == 43_516_416


COMPONENTS = {
    r"model\.embed_tokens\.weight": 661_913_600,
    r"lm_head\.weight": 661_913_600,
    r"model\.layers\.\d+\.attn\.(?!compressor|indexer).*": 5_064_696_320,
    r"model\.layers\.\d+\.attn\.compressor\..*": 18_352_128,
    r"model\.layers\.\d+\.attn\.indexer\..*": 43_516_416,
    r"model\.layers\.\d+\.ffn\.gate\.weight": 78_643_200,
    r"model\.layers\.\d+\.ffn\.experts\..*": 543_581_798_400,
    r"model\.layers\.\d+\.ffn\.shared_experts\..*": 1_415_577_600,
    r"model\.layers\.\d+\.(attn|ffn)_norm\.weight": 409_600,
    r"model\.layers\.\d+\.(attn|ffn)_hc\..*": 39_323_760,
    r"model\.layers\.\d+\.engram\.embed\.weight": 196_613_849_600,
    r"model\.layers\.\d+\.engram\.wkv\.weight": 314_572_800,
    r"model\.layers\.\d+\.engram\.[qk]_weight": 81_920,
    r"model\.norm\.weight": 5_120,
    r"model\.vision\..*": 411_842_560,
    r"model\.aligner\..*": 73_410_560,
    r"model\.image_(start|end|newline)": 15_360,
}


def test_every_part_has_its_number_of_parameters(released: DeepseekV41ForCausalLM) -> None:
    counts: Counter[str] = Counter()
    for name, parameter in released.named_parameters():
        (component,) = [pattern for pattern in COMPONENTS if re.fullmatch(pattern, name)]
        counts[component] += parameter.numel()
    assert counts == COMPONENTS
    assert sum(COMPONENTS.values()) == 748_979_922_544


def test_every_layer_has_the_number_of_its_role(released: DeepseekV41ForCausalLM) -> None:
    expected = dict.fromkeys(range(40), 13_754_511_222)
    expected |= dict.fromkeys((2, 8), 13_765_226_998) | {20: 13_762_605_558}
    expected |= dict.fromkeys((24, 28, 32, 36), 13_759_917_942)
    expected |= {1: 112_217_417_590, 14: 112_230_824_950}
    assert {int(layer): total(block) for layer, block in released.model.layers.items()} == expected


@pytest.mark.parametrize(
    ("layer", "part", "count"),
    [
        (0, "attn", 126_617_408),
        (2, "attn.compressor", 5_243_392),
        (14, "attn.compressor", 5_243_392),
        (20, "attn.compressor", 2_621_952),
        (2, "attn.indexer", 5_472_384),
        (24, "attn.indexer", 5_406_720),
        (39, "ffn_hc", 491_547),
        (39, "ffn.experts", 384 * 35_389_440),
    ],
)
def test_a_part_of_a_layer_has_its_number(
    layer: int, part: str, count: int, released: DeepseekV41ForCausalLM
) -> None:
    assert total(released.model.layers[str(layer)].get_submodule(part)) == count


def test_engram_tables_have_a_row_for_every_residue_of_their_primes() -> None:
    text = DeepseekV41Config.released().text_config
    primes = ngram_primes(2, text.engram_heads, text.engram_vocab_size)
    assert [len(of) for of in primes] == [24, 24]
    assert [sum(of) for of in primes] == list(ENGRAMS.values()) == list(text.engram_num_embeddings)


EVERY_BLOCK = {
    "attn.wq_a.weight": ((1280, 5120), BF16),
    "attn.q_norm.weight": ((1280,), BF16),
    "attn.wq_b.weight": ((32768, 1280), BF16),
    "attn.wkv.weight": ((512, 5120), BF16),
    "attn.kv_norm.weight": ((512,), BF16),
    "attn.wo_a.weight": ((8192, 4096), BF16),
    "attn.wo_b.weight": ((5120, 8192), BF16),
    "attn.sinks_param.weight": ((64,), FP32),
    "ffn.gate.weight": ((384, 5120), BF16),
    "ffn.gate.e_score_correction_bias": ((384,), FP32),
    "ffn.gate.bias_vl": ((384,), FP32),
    "ffn.experts.gate_and_up_projs": ((384, 5120, 4608), BF16),
    "ffn.experts.down_projs": ((384, 2304, 5120), BF16),
    "ffn.shared_experts.up_proj.weight": ((2304, 5120), BF16),
    "ffn.shared_experts.gate_proj.weight": ((2304, 5120), BF16),
    "ffn.shared_experts.down_proj.weight": ((5120, 2304), BF16),
    "attn_norm.weight": ((5120,), BF16),
    "ffn_norm.weight": ((5120,), BF16),
    "attn_hc.fn": ((24, 20480), FP32),
    "attn_hc.base": ((24,), FP32),
    "attn_hc.scale": ((3,), FP32),
    "ffn_hc.fn": ((24, 20480), FP32),
    "ffn_hc.base": ((24,), FP32),
    "ffn_hc.scale": ((3,), FP32),
}
INDEXER = {
    "attn.indexer.wq_b.weight": ((4096, 1280), BF16),
    "attn.indexer.weights_proj.weight": ((32, 5120), BF16),
}
KV_SOURCE = {
    "attn.compressor.wkv.weight": ((512, 5120), FP32),
    "attn.compressor.norm.weight": ((512,), BF16),
    "attn.indexer.wk.weight": ((128, 512), BF16),
    "attn.indexer.k_norm.weight": ((128,), BF16),
}
POOLING = {"attn.compressor.wgate.weight": ((512, 5120), FP32)}
ENGRAM = {
    "engram.q_weight": ((4, 5120), BF16),
    "engram.k_weight": ((4, 5120), BF16),
    "engram.wkv.weight": ((25600, 6144), BF16),
}
VISION_BLOCK = {
    "norm1.weight": ((1024,), FP32),
    "attn.wqkv.weight": ((3072, 1024), BF16),
    "attn.wqkv.bias": ((3072,), BF16),
    "attn.wo.weight": ((1024, 1024), BF16),
    "attn.wo.bias": ((1024,), BF16),
    "norm2.weight": ((1024,), FP32),
    "mlp.w1.weight": ((5632, 1024), BF16),
    "mlp.w2.weight": ((1024, 2816), BF16),
}
AROUND = {
    "model.image_start": ((5120,), BF16),
    "model.image_end": ((5120,), BF16),
    "model.image_newline": ((5120,), BF16),
    "model.embed_tokens.weight": ((129280, 5120), BF16),
    "model.norm.weight": ((5120,), BF16),
    "model.vision.patch_embed.proj.weight": ((1024, 588), BF16),
    "model.vision.patch_embed.proj.bias": ((1024,), BF16),
    "model.vision.norm.weight": ((1024,), FP32),
    "model.aligner.w1.weight": ((5120, 9216), BF16),
    "model.aligner.w1.bias": ((5120,), BF16),
    "model.aligner.w2.weight": ((5120, 5120), BF16),
    "model.aligner.w2.bias": ((5120,), BF16),
    "lm_head.weight": ((129280, 5120), FP32),
}


def test_released_names_shapes_and_dtypes_are_the_checkpoints(released: DeepseekV41ForCausalLM) -> None:
    expected = dict(AROUND)
    for layer in range(40):
        parts = dict(EVERY_BLOCK)
        parts |= INDEXER if layer in INDEX_SOURCES else {}
        parts |= KV_SOURCE if layer in KV_SOURCES else {}
        parts |= POOLING if layer in (2, 8, 14) else {}
        if layer in ENGRAMS:
            parts |= ENGRAM | {"engram.embed.weight": ((ENGRAMS[layer], 256), BF16)}
        expected |= {f"model.layers.{layer}.{name}": value for name, value in parts.items()}
    for layer in range(32):
        expected |= {f"model.vision.blocks.{layer}.{name}": value for name, value in VISION_BLOCK.items()}
    state = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in released.state_dict().items()}
    assert state == expected


def test_children_stand_in_the_order_of_the_reference(released: DeepseekV41ForCausalLM) -> None:
    def children(module: nn.Module) -> list[str]:
        return [name for name, _ in module.named_children()]

    assert children(released) == ["model", "lm_head"]
    around = ["embed_tokens", "engram_hash", "layers", "norm", "vision", "aligner"]
    assert children(released.model) == around
    layers = released.model.layers
    assert isinstance(layers, nn.ModuleDict)
    assert children(layers) == [str(layer) for layer in range(40)]
    block = ["attn", "ffn", "attn_norm", "ffn_norm", "attn_hc", "ffn_hc"]
    assert children(layers["0"]) == block
    assert children(layers["1"]) == [*block, "engram"]
    projections = ["wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b", "sinks_param", "rotary_emb"]
    assert children(layers["3"].attn) == projections
    assert children(layers["24"].attn) == [*projections, "indexer"]
    assert children(layers["20"].attn) == [*projections, "compressor", "indexer"]
    assert children(layers["2"].attn.compressor) == ["wkv", "norm", "wgate"]
    assert children(layers["0"].ffn) == ["gate", "experts", "shared_experts"]
    assert children(released.model.vision) == ["patch_embed", "blocks", "norm"]


def test_blocks_and_attention_have_the_names_that_frameworks_look_for(
    released: DeepseekV41ForCausalLM,
) -> None:
    for block in released.model.layers.values():
        assert isinstance(block, DeepseekV41Block)
        assert block.self_attn is block.attn
        assert block.mlp is block.ffn
        assert block.attn.attn_sink is block.attn.sinks_param.weight
    assert not any(".self_attn." in name or ".mlp.gate" in name for name, _ in released.named_parameters())
    kinds = Counter(type(module) for module in released.modules())
    assert (kinds[DeepseekV41Block], kinds[DeepseekV41VisionBlock]) == (40, 32)


def test_the_routers_biases_are_saved_and_the_hashes_numbers_are_not(
    released: DeepseekV41ForCausalLM,
) -> None:
    buffers = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in released.named_buffers()}
    biases = {
        f"model.layers.{layer}.ffn.gate.{name}": ((384,), FP32)
        for layer in range(40)
        for name in ("e_score_correction_bias", "bias_vl")
    }
    numbers = {
        "model.engram_hash.token_map": ((129280,), torch.int64),
        "model.engram_hash.primes": ((2, 24), torch.int64),
        "model.engram_hash.offsets": ((2, 24), torch.int64),
        "model.engram_hash.multipliers": ((2, 4), torch.int64),
    }
    assert buffers == biases | numbers
    assert buffers.keys() & released.state_dict().keys() == biases.keys()


def test_the_rotary_embedding_keeps_no_tensor(released: DeepseekV41ForCausalLM) -> None:
    for block in released.model.layers.values():
        assert [*block.attn.rotary_emb.parameters(), *block.attn.rotary_emb.buffers()] == []


def test_without_engrams_552_051_418_224_parameters_are_left(released: DeepseekV41ForCausalLM) -> None:
    engrams = [released.model.layers[str(layer)].engram for layer in ENGRAMS]
    assert total(released) - sum(map(total, engrams)) == 552_051_418_224
