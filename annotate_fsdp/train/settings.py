"""All options of one training run, and what is wrong with them, before any rank is started."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

MP_CHOICES = ("bf16", "fp32")
STORAGE_CHOICES = ("fp32", "bf16")
LOWERING_CHOICES = ("auto", "unit", "group", "fold")
DEFAULT_RANKS = 2


class UsageError(Exception):
    """The caller asked for something that cannot be done; the message is one clear line."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run.

    - model, config: what to train, by their names in the registry.
    - ranks: number of ranks.
    - steps, stop_after: the run has `steps` steps; it ends early once `stop_after` steps are done.
    - mp: compute dtype of everything that is no fp32 island; gradients are always reduced in fp32.
    - storage: dtype that the parameters, and with them the optimizer state, are kept in.
    - lowering: as in `shard_annotated`.
    - images: train on images with text rather than on text.
    - activation_checkpointing: recompute each decoder layer in the backward.
    - check_parity: compare with a reference run before training.
    - checkpoint_dir, checkpoint_every, resume: where and how often to save, and whether to go on from there.
    - seed: decides the initial weights and the batches.
    - batch, sequence_length: rows of the global batch, and bytes predicted per row.
    - lr: peak learning rate of AdamW.
    - json: file to write the run's figures to.
    """

    model: str
    config: str = "tiny"
    ranks: int = DEFAULT_RANKS
    steps: int = 80
    stop_after: int | None = None
    mp: str = "bf16"
    storage: str = "fp32"
    lowering: str = "auto"
    images: bool = False
    activation_checkpointing: bool = False
    check_parity: bool = False
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    seed: int = 0
    batch: int = 8
    sequence_length: int = 128
    lr: float = 3e-3
    json: str | None = None

    @property
    def last_step(self) -> int:
        """Number of steps that are done when this run ends."""
        return self.steps if self.stop_after is None else self.stop_after

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON-able data; `TrainSettings(**data)` makes them again."""
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """Return the options that a resumed run must share, for its losses to be those of an unbroken run.

        Ranks, lowering and activation checkpointing may change; so may `steps`, on which the learning-rate
        schedule does not depend.
        """
        names = ("model", "config", "images", "mp", "storage", "seed", "batch", "sequence_length", "lr")
        return {name: getattr(self, name) for name in names}


def option_name(field: str) -> str:
    """Return the command-line spelling of a settings field."""
    return "MODEL" if field == "model" else "--" + field.replace("_", "-")


def check_settings(settings: TrainSettings) -> None:
    """Reject options that cannot work; reads the file system but changes nothing.

    Raises:
        UsageError: with one line that names the option and what to write.
    """
    _check_numbers(settings)
    if settings.batch % settings.ranks:
        raise UsageError(
            f"--batch {settings.batch} cannot be split evenly over {settings.ranks} ranks: "
            f"write a multiple of {settings.ranks}"
        )
    if settings.stop_after is not None and settings.stop_after > settings.steps:
        raise UsageError(f"--stop-after {settings.stop_after} lies beyond --steps {settings.steps}")
    for name in ("checkpoint_every", "resume", "stop_after"):
        if getattr(settings, name) and settings.checkpoint_dir is None:
            raise UsageError(f"{option_name(name)} needs --checkpoint-dir")
    if settings.json is not None:
        check_writable_file(settings.json, "--json")
    if settings.checkpoint_dir is not None:
        _check_checkpoint_dir(Path(settings.checkpoint_dir), settings.resume)


def _check_numbers(settings: TrainSettings) -> None:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name != "seed" and isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UsageError(f"{option_name(field.name)} {value}: write a number of at least 1")
    if not 0 <= settings.seed < 2**63:
        raise UsageError(f"--seed {settings.seed}: write a number from 0 to 2**63 - 1")
    if not (math.isfinite(settings.lr) and settings.lr > 0):
        raise UsageError(f"--lr {settings.lr}: write a positive number")


def check_writable_file(name: str, option: str) -> None:
    """Reject a file to write whose directory does not exist, or that is a directory itself."""
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"{option} {name}: that is a directory; write the name of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {name}: the directory {path.parent} does not exist")
    _check_writable_directory(path.parent, f"{option} {name}")


def _check_checkpoint_dir(path: Path, resume: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UsageError(f"--checkpoint-dir {path}: that is not a directory")
    if resume and not path.is_dir():
        raise UsageError(f"--resume: the directory {path} does not exist")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--checkpoint-dir {path}: the directory {path.absolute().parent} does not exist")
    _check_writable_directory(path if path.is_dir() else path.absolute().parent, f"--checkpoint-dir {path}")


def _check_writable_directory(path: Path, option: str) -> None:
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: nothing may be written to the directory {path}")
