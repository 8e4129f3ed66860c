"""Checkpoints by torch's DCP: complete or not there at all, and readable on any number of ranks.

A checkpoint is a directory `step-00000120` with DCP's files and a `run.json` of our own. It is written under
another name, made durable, and renamed when it is whole; `run.json` lists every file with its size, so that
a copy which was cut off is told apart as well. Our own state is JSON and tensors, which DCP reads with
`weights_only`. DCP's index is a pickle: `IndexReader` makes nothing of it but the records of an index, so
that no checkpoint can run code.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from annotate_fsdp.train.files import sync_directory, write_atomically
from annotate_fsdp.train.loop import plain_name
from annotate_fsdp.train.settings import UsageError, option_name

RUN_FILE = "run.json"
INDEX_FILE = ".metadata"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
_METADATA = "torch.distributed.checkpoint.metadata"
# what DCP's index of tensors is made of; none of it does anything but hold values
_RECORDS = {
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
}


class IndexReader(FileSystemReader):
    """Reads a checkpoint of DCP, and makes nothing of its pickled index but the records of an index.

    Raises:
        UsageError: the index is no index of tensors.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index."""
        try:
            with (Path(self.path) / INDEX_FILE).open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
        ) as error:
            raise UsageError(f"--resume: the index of {self.path} cannot be read: {error}") from error
        if not isinstance(metadata, Metadata):
            raise UsageError(f"--resume: the index of {self.path} cannot be read: it holds something else")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _RECORDS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index does")


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

    Raises:
        UsageError: nothing was written, on every rank; the checkpoints of before are as they were.
    """
    target = checkpoint_path(root, step)
    partial = root / f".{target.name}.partial"
    state = {**_model_state(model), **_optimizer_state(model, optimizer)}
    try:
        _on_first_rank(lambda: _begin(root, partial))
        save(state, storage_writer=FileSystemWriter(partial, sync_files=True))
        _on_first_rank(lambda: _finish(partial, target, step, identity))
    except (CheckpointException, OSError) as error:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # what is there takes the room of the next one
        raise UsageError(
            f"--checkpoint-dir: {target} was not written: {_reason(error)}; the checkpoints of before it are "
            f"whole: mend that and write --resume"
        ) from error
    return target


def _begin(root: Path, partial: Path) -> None:
    """Make room: what a run that was killed left half written is of no use."""
    root.mkdir(exist_ok=True)
    for old in root.glob(".step-*.partial"):
        shutil.rmtree(old)
    partial.mkdir()


def _finish(partial: Path, target: Path, step: int, identity: Mapping[str, Any]) -> None:
    """Say what belongs to the checkpoint, and give it its name."""
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    run = {"format": FORMAT, "step": step, "identity": dict(identity), "files": files}
    write_atomically(partial / RUN_FILE, json.dumps(run, indent=1))
    if target.exists():  # not complete, or the run would not have come to this step again
        shutil.rmtree(target)
    partial.rename(target)
    sync_directory(target.parent)


def _on_first_rank(act: Callable[[], None]) -> None:
    """Do something on one rank; all wait for it, and raise the OSError that it raised."""
    wrong = [""]
    if dist.get_rank() == 0:
        try:
            act()
        except OSError as error:
            wrong = [str(error)]
    dist.broadcast_object_list(wrong, 0)
    if wrong[0]:
        raise OSError(wrong[0])


def _reason(error: BaseException) -> str:
    """Say in a line what made a checkpoint fail; torch puts the errors of all ranks into one exception."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {each[0]}" for rank, each in sorted(error.failures.items()))


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into a sharded model and its fresh optimizer; called by every rank.

    Raises:
        UsageError: its tensors are not those of the model, or cannot be read.
    """
    reader = IndexReader(path)
    stored = reader.read_metadata().state_dict_metadata
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
    try:
        load(state, storage_reader=reader)
    except CheckpointException as error:
        raise UsageError(f"--resume: {path} cannot be read: {_reason(error)}") from error


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
