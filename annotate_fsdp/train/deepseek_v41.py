"""DeepSeek-V4.1 for the command line: how it is built, its choices and its images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from annotate_fsdp.models.deepseek_v41 import (
    DeepseekV41Block,
    DeepseekV41Config,
    DeepseekV41ForCausalLM,
    DeepseekV41VisionBlock,
    record_choices,
)
from annotate_fsdp.train.batches import Source
from annotate_fsdp.train.digits import load_digits
from annotate_fsdp.train.registry import Choices, ModelEntry

_CONFIGS = {"tiny": DeepseekV41Config.tiny, "released": DeepseekV41Config.released}
_STORAGE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(config: str, storage: str) -> DeepseekV41ForCausalLM:
    """Build the model of a named configuration on the default device."""
    return DeepseekV41ForCausalLM(_CONFIGS[config]()).to_storage(_STORAGE[storage])


def images(config: str) -> Source:
    """Return digits, cut into the patches of a named configuration."""
    return load_digits(_CONFIGS[config]())


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[Choices]:
    """Yield a dict that holds, when the block ends, each layer's compressed keys, candidates and experts."""
    found: Choices = {}
    with record_choices(model) as choices:
        yield found
    found.update({f"the keys of layer {layer}": rows for layer, rows in choices.keys.items()})
    found.update({f"the candidates of layer {layer}": rows for layer, rows in choices.candidates.items()})
    found.update({f"the experts of layer {layer}": rows for layer, rows in choices.experts.items()})


ENTRY = ModelEntry(
    name="deepseek_v41",
    configs=tuple(_CONFIGS),
    train_configs=("tiny",),
    build=build,
    layer_classes=(DeepseekV41Block, DeepseekV41VisionBlock),
    record_choices=recorded_choices,
    images=images,
)
