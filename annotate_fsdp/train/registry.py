"""The models that the command line knows by name, and what training has to know about one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from annotate_fsdp.train.batches import Source
from annotate_fsdp.train.data import Text, load_corpus
from annotate_fsdp.train.settings import UsageError

# name -> module with an ENTRY; imported when asked for, so that the names alone cost nothing
_ENTRIES = {
    "deepseek_v41": "annotate_fsdp.train.deepseek_v41",
    "step5": "annotate_fsdp.train.step5",
}

# what a forward chose, by name; the outermost list has an entry for each row of the batch
Choices = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """What the command line needs of a model.

    - name: its name on the command line.
    - configs: names of its configurations; `train_configs` are those small enough to train here.
    - build: (config name, `"fp32"` or `"bf16"`) -> the model, its parameters stored in that dtype except for
      the fp32 islands, on the default device, drawn from torch's global generator.
    - layer_classes: the classes whose instances are recomputed with `--activation-checkpointing`.
    - record_choices: model -> context manager that yields a dict, filled when the block ends, of the discrete
      choices of the latest forward inside it.
    - images: config name -> images with text to train on; None if the model takes no images.
    """

    name: str
    configs: tuple[str, ...]
    train_configs: tuple[str, ...]
    build: Callable[[str, str], nn.Module]
    layer_classes: tuple[type[nn.Module], ...]
    record_choices: Callable[[nn.Module], AbstractContextManager[Choices]]
    images: Callable[[str], Source] | None = None


def model_names() -> tuple[str, ...]:
    """Return the names that `find_model` knows, sorted."""
    return tuple(sorted(_ENTRIES))


def find_model(name: str) -> ModelEntry:
    """Return the entry of a model.

    Raises:
        UsageError: there is no such model; the message lists those that exist.
    """
    if name not in _ENTRIES:
        raise UsageError(f"there is no model {name!r}; write one of {', '.join(model_names())}")
    entry: ModelEntry = importlib.import_module(_ENTRIES[name]).ENTRY
    return entry


def find_source(entry: ModelEntry, config: str, images: bool, length: int) -> Source:
    """Return what to train on: images with their names, or text in windows of `length` bytes.

    Raises:
        UsageError: there is nothing of the kind here, or not for this model.
    """
    if not images:
        return Text(load_corpus(), length)
    if entry.images is None:
        raise UsageError(f"--images: {entry.name} takes no images")
    return entry.images(config)


def check_config(entry: ModelEntry, config: str, *, train: bool) -> None:
    """Reject a configuration that the model does not have, or that is not there to be trained.

    Raises:
        UsageError: the message lists those that exist.
    """
    known = entry.train_configs if train else entry.configs
    if config not in known:
        raise UsageError(f"--config {config}: {entry.name} offers {', '.join(known)} here")
