"""Watch the model's discrete choices: regions and experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from torch import Tensor, nn

from annotate_fsdp.models.step5.decoder import Step5DecoderLayer
from annotate_fsdp.models.step5.indexer import Step5SparseIndexer
from annotate_fsdp.models.step5.moe import Step5Router


@dataclass
class Choices:
    """What the latest forward chose, by layer index.

    - regions: `regions[layer][batch][position][group]` lists region ids, ascending; full-attention layers.
    - experts: `experts[layer][batch][position]` lists expert ids, best first; MoE layers.
    """

    regions: dict[int, list[list[list[list[int]]]]] = field(default_factory=dict)
    experts: dict[int, list[list[list[int]]]] = field(default_factory=dict)


@contextmanager
def record_choices(model: nn.Module) -> Iterator[Choices]:
    """Record, while the context is open, the regions and experts that every forward of `model` chooses.

    Works on any module that holds decoder layers, sharded or wrapped too; layers are numbered in the order
    of registration. Each forward (also a recomputed one) replaces what the one before left. Outside the
    context nothing is recorded and nothing costs.
    """
    choices = Choices()
    layers = [module for module in model.modules() if isinstance(module, Step5DecoderLayer)]
    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            for module in layer.modules():
                if isinstance(module, Step5SparseIndexer):
                    hooks.enter_context(module.register_forward_hook(partial(_note_regions, choices, index)))
                elif isinstance(module, Step5Router):
                    hooks.enter_context(module.register_forward_hook(partial(_note_experts, choices, index)))
        yield choices


def _note_regions(choices: Choices, layer: int, _: nn.Module, __: object, regions: Tensor) -> None:
    """Keep the ids of the regions that the indexer's output, bool `[B, S, G, R]`, marks."""
    ids = range(regions.shape[-1])
    choices.regions[layer] = [
        [[list(compress(ids, group)) for group in position] for position in sequence]
        for sequence in regions.tolist()
    ]


def _note_experts(
    choices: Choices, layer: int, _: nn.Module, __: object, routed: tuple[Tensor, Tensor]
) -> None:
    """Keep the ids of the router's output, (weights, experts), each `[B, S, k]`."""
    choices.experts[layer] = routed[1].tolist()
