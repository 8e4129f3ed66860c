"""Step5 for the command line: how it is built, its loss, and its layout as a framework would write it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from annotate_fsdp.models.step5 import Step5Config, Step5ForCausalLM, record_choices
from annotate_fsdp.models.step5.decoder import Step5DecoderLayer
from annotate_fsdp.train.registry import Choices, ModelEntry

_CONFIGS = {"tiny": Step5Config.tiny, "released": Step5Config.released}
_STORAGE = {"fp32": torch.float32, "bf16": torch.bfloat16}
# attributes of a decoder layer that hold fp32 parameters; those of the indexer are in CSA layers only
_FP32_PARTS = (
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.indexer.w_proj",
    "self_attn.indexer.q_norm",
    "self_attn.indexer.k_norm",
    "input_layernorm",
    "post_attention_layernorm",
)


def build(config: str, storage: str) -> Step5ForCausalLM:
    """Build the model of a named configuration on the default device."""
    model = Step5ForCausalLM(_CONFIGS[config]())
    return model.to_storage(_STORAGE[storage])


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, computed in fp32, of `targets` given `inputs`, both [rows, length]."""
    logits: Tensor = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[Choices]:
    """Yield a dict that holds, when the block ends, each layer's regions and experts."""
    found: Choices = {}
    with record_choices(model) as choices:
        yield found
    found.update({f"the regions of layer {layer}": rows for layer, rows in choices.regions.items()})
    found.update({f"the experts of layer {layer}": rows for layer, rows in choices.experts.items()})


def shard_by_hand(model: nn.Module, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy) -> nn.Module:
    """Shard the model with `fully_shard` calls written out, the marks not being read."""
    fp32 = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    # a block casts for itself: its residual stream stays fp32
    block = MixedPrecisionPolicy(mp_policy.param_dtype, mp_policy.reduce_dtype, cast_forward_inputs=False)
    layers = [module for module in model.modules() if isinstance(module, Step5DecoderLayer)]
    for layer in layers:
        for name, part in layer.named_modules():
            if name.replace("_checkpoint_wrapped_module.", "") in _FP32_PARTS:
                fully_shard(part, mesh=mesh, mp_policy=fp32)
    for outermost in model.get_submodule("model.layers").children():
        fully_shard(outermost, mesh=mesh, mp_policy=block)
    fully_shard(model.get_submodule("model.embed_tokens"), mesh=mesh, mp_policy=mp_policy)
    fully_shard(model.get_submodule("model.norm"), mesh=mesh, mp_policy=fp32)
    fully_shard(model.get_submodule("lm_head"), mesh=mesh, mp_policy=mp_policy)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    return model


ENTRY = ModelEntry(
    name="step5",
    configs=tuple(_CONFIGS),
    train_configs=("tiny",),
    build=build,
    layer_classes=(Step5DecoderLayer,),
    loss=next_token_loss,
    record_choices=recorded_choices,
    shard_by_hand=shard_by_hand,
)
