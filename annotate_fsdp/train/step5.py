"""Step5 for the command line: how it is built, and its choices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from annotate_fsdp.models.step5 import Step5Config, Step5ForCausalLM, record_choices
from annotate_fsdp.models.step5.decoder import Step5DecoderLayer
from annotate_fsdp.train.registry import Choices, ModelEntry

_CONFIGS = {"tiny": Step5Config.tiny, "released": Step5Config.released}
_STORAGE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(config: str, storage: str) -> Step5ForCausalLM:
    """Build the model of a named configuration on the default device."""
    model = Step5ForCausalLM(_CONFIGS[config]())
    return model.to_storage(_STORAGE[storage])


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[Choices]:
    """Yield a dict that holds, when the block ends, each layer's regions and experts."""
    found: Choices = {}
    with record_choices(model) as choices:
        yield found
    found.update({f"the regions of layer {layer}": rows for layer, rows in choices.regions.items()})
    found.update({f"the experts of layer {layer}": rows for layer, rows in choices.experts.items()})


ENTRY = ModelEntry(
    name="step5",
    configs=tuple(_CONFIGS),
    train_configs=("tiny",),
    build=build,
    layer_classes=(Step5DecoderLayer,),
    record_choices=recorded_choices,
)
