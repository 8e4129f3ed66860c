"""What goes wrong while a run trains and saves: a killed rank, a full disk, a planted pickle."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, RankError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from annotate_fsdp import fsdp_unit, shard_annotated
from annotate_fsdp.train import checkpoint, launch
from annotate_fsdp.train.checkpoint import find_checkpoints, load_checkpoint, read_run, save_checkpoint
from annotate_fsdp.train.job import JOB, check_run, train_rank
from annotate_fsdp.train.launch import LaunchError, run_ranks
from annotate_fsdp.train.loop import make_optimizer
from annotate_fsdp.train.settings import TrainSettings, UsageError

SETTINGS = TrainSettings(model="step5", steps=5, batch=4, sequence_length=32, checkpoint_every=1)
SECONDS_TO_END = 30.0


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small sharded model and its optimizer, after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(fsdp_unit(nn.Linear(64, 64)), nn.Linear(64, 64))
    shard_annotated(model, init_device_mesh("cpu", (2,)))
    optimizer = make_optimizer(model, 1e-2)
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


# -- a full disk -----------------------------------------------------------------------------------


def save_on_a_full_disk(root: Path, limit: int) -> tuple[str, list[str]]:
    """Save at step 1, then at step 2 when no file may grow beyond `limit`; the error and what is left."""
    model, optimizer = trained()
    save_checkpoint(root, 1, model, optimizer, {})
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        save_checkpoint(root, 2, model, optimizer, {})
        message = ""
    except UsageError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    torch.distributed.barrier()
    left = sorted(path.name for path in root.iterdir())
    torch.distributed.barrier()
    save_checkpoint(root, 3, model, optimizer, {})
    return message, left


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (9000, "rank 0: [Errno 27] File too large; rank 1: [Errno 27] File too large"),
        (60, "rank 0: [Errno 27] File too large; rank 1: [Errno 27] File too large"),
    ],
    ids=["amid the tensors", "at once"],
)
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_what_was_there(
    ranks: Pool, tmp_path: Path, limit: int, reason: str
) -> None:
    message = (
        f"--checkpoint-dir: {tmp_path / 'step-00000002'} was not written: {reason}; the checkpoints of "
        "before it are whole: mend that and write --resume"
    )
    assert ranks.run(save_on_a_full_disk, tmp_path, limit) == [(message, ["step-00000001"])] * 2
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000001", "step-00000003"]


def save_where_a_call_fails(root: Path, name: str) -> str:
    """Save when a function finds the disk full, if it is named; the message of the error."""
    model, optimizer = trained()
    with pytest.MonkeyPatch.context() as patch:
        if name:
            patch.setattr(name, no_space)
        try:
            save_checkpoint(root, 2, model, optimizer, {})
        except UsageError as error:
            return str(error)
    return ""


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


FULL = "[Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("annotate_fsdp.train.checkpoint.write_atomically", FULL),
        ("pathlib.Path.mkdir", FULL),
        ("pickle.dump", f"rank 0: {FULL}"),
        ("torch.save", f"rank 0: {FULL}; rank 1: {FULL}"),
    ],
    ids=["the run file", "the directory", "the index", "the tensors"],
)
def test_wherever_the_disk_is_full_both_ranks_say_so(
    ranks: Pool, tmp_path: Path, name: str, reason: str
) -> None:
    for message in ranks.run(save_where_a_call_fails, tmp_path, name):
        assert f"was not written: {reason}; " in message
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# -- killed while writing --------------------------------------------------------------------------


def save_and_die(root: Path, victim: int, name: str) -> None:
    """Save at step 1, then die at step 2 when `name` is called, after half of the tensors if it is `save`."""
    model, optimizer = trained()
    save_checkpoint(root, 1, model, optimizer, {})
    owner = torch if name == "save" else checkpoint
    usual, calls = getattr(owner, name), []

    def die(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == (4 if name == "save" else 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*args, **kwargs)

    if torch.distributed.get_rank() == victim:
        setattr(owner, name, die)
    save_checkpoint(root, 2, model, optimizer, {})


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "name"), [(1, "save"), (0, "write_atomically")])
def test_a_checkpoint_that_was_cut_off_is_not_taken_and_makes_room_for_the_next(
    ranks: Pool, tmp_path: Path, victim: int, name: str
) -> None:
    with pytest.raises(RankError, match=f"rank {victim}: died with exit code -9"):
        ranks.run(save_and_die, tmp_path, victim, name)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000001"]
    (tmp_path / ".step-00000009.partial").mkdir(exist_ok=True)
    (tmp_path / "step-00000003").mkdir()  # a copy that was cut off
    assert ranks.run(save_where_a_call_fails, tmp_path, "") == ["", ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


# -- nothing in a checkpoint runs ------------------------------------------------------------------


class Planted:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def save_one(root: Path) -> str:
    return str(save_checkpoint(root, 1, *trained(), {}))


def load_one(path: Path) -> str:
    """Load a checkpoint; the first line of what is wrong with it."""
    try:
        load_checkpoint(path, *trained())
    except UsageError as error:
        return str(error).splitlines()[0]
    return ""


def plant_in_the_index(path: Path, planted: Planted) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(planted))


def plant_in_the_tensors(path: Path, planted: Planted) -> None:
    for file in path.glob("*.distcp"):
        torch.save(planted, file)
        with file.open("ab") as end:
            end.truncate(1 << 16)


def cut_the_index(path: Path, planted: Planted) -> None:
    whole = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(whole[: len(whole) // 2])


def write_another_index(path: Path, planted: Planted) -> None:
    (path / ".metadata").write_bytes(pickle.dumps({}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            plant_in_the_index,
            "the index of {path} cannot be read: it names posix.mkdir, which no index does",
        ),
        (cut_the_index, "the index of {path} cannot be read: "),
        (write_another_index, "the index of {path} cannot be read: it holds something else"),
        (plant_in_the_tensors, "{path} cannot be read: rank 0: "),
    ],
)
def test_nothing_in_a_checkpoint_is_run(ranks: Pool, tmp_path: Path, change: Any, message: str) -> None:
    path = Path(ranks.run(save_one, tmp_path)[0])
    assert ranks.run(load_one, path) == ["", ""]
    change(path, Planted(tmp_path / "planted"))
    for wrong in ranks.run(load_one, path):
        assert wrong.startswith("--resume: " + message.format(path=path)), wrong
    assert not (tmp_path / "planted").exists()


# -- killed in training ----------------------------------------------------------------------------


def train_until_killed(settings: TrainSettings, victim: int, is_time: Callable[[], bool]) -> float:
    """Train on local ranks and kill one; return how long the others lasted, 0 if all had ended."""
    processes: list[subprocess.Popen[bytes]] = []
    killed: list[float] = []
    usual = launch._start

    def start(directory: Path, rank: int) -> subprocess.Popen[bytes]:
        processes.append(usual(directory, rank))
        return processes[-1]

    def kill() -> None:
        while len(processes) < settings.ranks or not is_time():
            time.sleep(0.01)
        if all(process.poll() is None for process in processes):
            killed.append(time.monotonic())
            processes[victim].kill()

    thread = threading.Thread(target=kill)
    words = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_start", start)
        thread.start()
        try:
            run_ranks(JOB, settings.to_dict(), settings.ranks)
        except LaunchError as error:
            words = str(error)
        ended = time.monotonic()
        thread.join()
    assert all(process.poll() is not None for process in processes)
    if not killed or processes[victim].returncode == 0:
        return 0.0
    assert words == f"rank {victim} was ended by SIGKILL; the other ranks were ended"
    return ended - killed[0]


def losses_of(ranks: Pool, settings: TrainSettings, file: Path) -> list[float]:
    """Train on the pool; the losses of its steps."""
    check_run(settings)
    argument = replace(settings, json=str(file)).to_dict()
    assert ranks.run(train_rank, argument, world=settings.ranks, timeout=120) == [0] * settings.ranks
    losses: list[float] = json.loads(file.read_text())["losses"]
    return losses


@pytest.mark.slow
def test_a_killed_run_ends_soon_and_resumes_with_the_losses_of_an_undisturbed_one(
    ranks: Pool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    undisturbed = losses_of(ranks, replace(SETTINGS, checkpoint_dir=str(tmp_path / "whole")), tmp_path / "0")
    draw = random.Random()
    for turn in range(pytestconfig.getoption("--kills")):
        root = tmp_path / f"killed-{turn}"
        settings = replace(SETTINGS, checkpoint_dir=str(root))
        # the first one dies between its second checkpoint and its last, the others whenever
        moment = time.monotonic() + draw.uniform(0, 12)
        wanted, victim = draw.randrange(2, 4), draw.randrange(2)

        def is_time(
            turn: int = turn, root: Path = root, moment: float = moment, wanted: int = wanted
        ) -> bool:
            return len(find_checkpoints(root)) >= wanted if turn == 0 else time.monotonic() > moment

        seconds = train_until_killed(settings, victim, is_time)
        assert seconds < SECONDS_TO_END
        found = find_checkpoints(root)
        done = read_run(found[-1])["step"] if found else 0  # type: ignore[index]
        case = f"turn {turn}: rank {victim} killed after step {done}"
        if done < SETTINGS.steps:
            losses = losses_of(ranks, replace(settings, resume=bool(found)), tmp_path / "1")
            assert losses == undisturbed[done:], case
        assert turn or 1 < done < SETTINGS.steps, case
        shutil.rmtree(root)
