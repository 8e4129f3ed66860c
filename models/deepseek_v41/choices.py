"""Watch the model's discrete choices: compressed keys, candidates and experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from annotate_fsdp.models.deepseek_v41.block import DeepseekV41Block
from annotate_fsdp.models.deepseek_v41.compressor import Compressed
from annotate_fsdp.models.deepseek_v41.indexer import DeepseekV41Indexer
from annotate_fsdp.models.deepseek_v41.moe import DeepseekV41Router


@dataclass
class Choices:
    """What the latest forward chose, by layer index.

    - keys: `keys[layer][batch][position]` lists compressed keys, ascending, then -1; index sources.
    - candidates: `candidates[layer][batch][position]` has a bool for each compressed key; the source.
    - experts: `experts[layer][batch][position]` lists expert ids, best first.
    """

    keys: dict[int, list[list[list[int]]]] = field(default_factory=dict)
    candidates: dict[int, list[list[list[bool]]]] = field(default_factory=dict)
    experts: dict[int, list[list[list[int]]]] = field(default_factory=dict)


@contextmanager
def record_choices(model: nn.Module) -> Iterator[Choices]:
    """Record, while the context is open, what every forward of `model` chooses.

    Works on any module that holds blocks, sharded or wrapped too; layers are numbered in the order of
    registration. Each forward (also a recomputed one) replaces what the one before left. Outside the
    context nothing is recorded and nothing costs.
    """
    choices = Choices()
    blocks = [module for module in model.modules() if isinstance(module, DeepseekV41Block)]
    with ExitStack() as hooks:
        for layer, block in enumerate(blocks):
            for module in block.modules():
                if isinstance(module, DeepseekV41Indexer):
                    hooks.enter_context(module.register_forward_hook(partial(_note_keys, choices, layer)))
                elif isinstance(module, DeepseekV41Router):
                    hooks.enter_context(module.register_forward_hook(partial(_note_experts, choices, layer)))
        yield choices


def _note_keys(choices: Choices, layer: int, module: nn.Module, _: object, state: Compressed) -> None:
    assert isinstance(module, DeepseekV41Indexer)
    assert state.chosen is not None
    choices.keys[layer] = state.chosen.tolist()
    if module.narrows and state.candidates is not None:
        choices.candidates[layer] = state.candidates.tolist()


def _note_experts(
    choices: Choices, layer: int, _: nn.Module, __: object, routed: tuple[Tensor, Tensor]
) -> None:
    """Keep the ids of the router's output, (weights, experts), each `[B, S, k]`."""
    choices.experts[layer] = routed[1].tolist()
