"""Checkpoints by torch's DCP: complete or not there at all, and readable on any number of ranks.

A checkpoint is a directory `step-00000120` with DCP's files and a `run.json` of our own. It is written under
another name, made durable, and renamed when it is whole; `run.json` lists every file with its size, so that
a copy which was cut off is told apart as well. DCP keeps its index in a pickle, which only DCP itself reads:
resume from directories that you trust, as with any torch checkpoint. Our own state is JSON and tensors.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from annotate_fsdp.train.files import sync_directory, write_atomically
from annotate_fsdp.train.loop import plain_name
from annotate_fsdp.train.settings import UsageError, option_name

RUN_FILE = "run.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")


def checkpoint_path(root: Path, step: int) -> Path:
    """Return where the checkpoint after `step` steps lives."""
    return root / f"step-{step:08d}"


def read_run(path: Path) -> dict[str, Any] | None:
    """Return what a checkpoint says of itself, or None unless every file it lists is there in full."""
    try:
        run: dict[str, Any] = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
        whole = all((path / name).stat().st_size == size for name, size in run["files"].items())
        return run if whole and run["format"] == FORMAT and run["step"] == _step_of(path) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints below `root`, oldest step first."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if read_run(path) is not None)


def check_resume(root: Path, identity: Mapping[str, Any], last_step: int) -> int:
    """Return the step of the checkpoint that a run would go on from.

    Raises:
        UsageError: there is none, it is of another run, or nothing is left to do.
    """
    found = find_checkpoints(root)
    if not found:
        raise UsageError(f"--resume: there is no complete checkpoint in {root}")
    run = read_run(found[-1])
    assert run is not None
    for name, value in identity.items():
        if run["identity"].get(name) != value:
            raise UsageError(
                f"--resume: {found[-1]} was written with {option_name(name)} {run['identity'].get(name)}, "
                f"not {value}"
            )
    step = int(run["step"])
    if step >= last_step:
        raise UsageError(
            f"--resume: {found[-1]} is already at step {step}; write a larger --steps or --stop-after"
        )
    return step


def check_fresh(root: Path) -> None:
    """Reject a directory that already holds a run, which a new run must not mix with.

    Raises:
        UsageError: it names the checkpoint.
    """
    found = find_checkpoints(root)
    if found:
        raise UsageError(f"--checkpoint-dir: {found[-1]} exists; write --resume or another directory")


def save_checkpoint(
    root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, identity: Mapping[str, Any]
) -> Path:
    """Write model, optimizer and step; called by every rank, and whole on disk when it returns.

    There is no random state to keep: batches are functions of the seed and the step, and no layer draws.
    """
    target = checkpoint_path(root, step)
    partial = root / f".{target.name}.partial"
    first = dist.get_rank() == 0
    if first:
        root.mkdir(exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    dist.barrier()
    state = {**_model_state(model), **_optimizer_state(model, optimizer)}
    save(state, storage_writer=FileSystemWriter(partial, sync_files=True))
    dist.barrier()
    if first:
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        run = {"format": FORMAT, "step": step, "identity": dict(identity), "files": files}
        write_atomically(partial / RUN_FILE, json.dumps(run, indent=1))
        if target.exists():  # not complete, or the run would not have come to this step again
            shutil.rmtree(target)
        partial.rename(target)
        sync_directory(root)
    dist.barrier()
    return target


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into a sharded model and its fresh optimizer; called by every rank.

    Raises:
        UsageError: its tensors are not those of the model.
    """
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {name: entry.size for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    state = _model_state(model)
    theirs = {name: size for name, size in sizes.items() if name.startswith("model/")}
    if theirs != {name: value.size() for name, value in state.items()}:
        raise UsageError(f"--resume: {path} holds the tensors of another model")
    parameters = _named_parameters(model)
    # a parameter that never had a gradient has no optimizer state, so the stored names say what to make
    for name in sizes.keys() - theirs.keys():
        _, parameter, key = name.split("/")
        values = optimizer.state[parameters[parameter]]
        values[key] = torch.zeros(()) if key == "step" else torch.zeros_like(parameters[parameter])
        state[name] = values[key]
    load(state, storage_reader=FileSystemReader(path))


def _step_of(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that they have without activation checkpointing."""
    return {plain_name(name): value for name, value in model.named_parameters()}


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    state = get_model_state_dict(model)
    return {f"model/{name}": value for name, value in state.items() if isinstance(value, Tensor)}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer/{name}/{key}": value
        for name, parameter in _named_parameters(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
