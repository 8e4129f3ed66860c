"""Local ranks: they end together, say which one began it, and never outlive the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from annotate_fsdp.train.launch import LaunchError, run_ranks
from annotate_fsdp.train.settings import UsageError

HERE = "test_train_launch"


def add_up(argument: dict[str, Any]) -> int:
    """Return the sum of all ranks' numbers, once it has been written down."""
    total = torch.tensor(dist.get_rank() + argument["base"])
    dist.all_reduce(total)
    Path(argument["file"], str(dist.get_rank())).write_text(str(total.item()))
    return int(total)


def die(argument: dict[str, Any]) -> int:
    """Kill rank 1 while rank 0 waits for it in a collective that would last for minutes."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return 0


def leave(argument: dict[str, Any]) -> int:
    """End rank 1 behind the launcher's back; rank 0 sleeps and notices nothing."""
    if dist.get_rank() == 1:
        os._exit(0)
    time.sleep(60)
    return 0


def fail(argument: dict[str, Any]) -> int:
    """Raise on rank 1 while rank 0 waits."""
    if dist.get_rank() == 1:
        raise ArithmeticError("planted")
    time.sleep(60)
    return 0


def object_to_it(argument: dict[str, Any]) -> int:
    """Find a mistake of the user."""
    raise UsageError("planted")


def wait_forever(argument: dict[str, Any]) -> int:
    """Write this rank's process id down and sleep."""
    Path(argument["directory"], f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
    time.sleep(600)
    return 0


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # a process that nobody has reaped yet has ended all the same
    return not Path(f"/proc/{pid}/stat").exists() or ") Z " not in Path(f"/proc/{pid}/stat").read_text()


def test_ranks_meet_and_return_the_jobs_exit_code(tmp_path: Path) -> None:
    assert run_ranks(f"{HERE}:add_up", {"base": 1, "file": str(tmp_path)}, 2) == 3
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["3", "3"]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("die", "rank 1 was ended by SIGKILL; the other ranks were ended"),
        ("fail", "rank 1 failed:\n.*ArithmeticError: planted\n"),
    ],
)
def test_rank_that_dies_or_fails_ends_the_others_within_seconds(job: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match=f"(?s)^{message}$"):
        run_ranks(f"{HERE}:{job}", {}, 2)
    assert time.monotonic() - started < 30  # most of it is the start of two ranks


def test_rank_that_leaves_without_a_word_ends_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError) as error:
        run_ranks(f"{HERE}:leave", {}, 2)
    assert time.monotonic() - started < 30
    assert (
        str(error.value)
        == "rank 1 ended with exit code 0 before its job was done; the other ranks were ended"
    )


def test_mistake_found_by_a_rank_is_the_users() -> None:
    with pytest.raises(UsageError) as error:
        run_ranks(f"{HERE}:object_to_it", {}, 1)
    assert str(error.value) == "planted"


def start_waiting(directory: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a launcher with two ranks that sleep; return it and the ranks' process ids."""
    code = (
        # what a shell starts in the background ignores the signal
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from annotate_fsdp.train.launch import run_ranks; "
        f"run_ranks('{HERE}:wait_forever', {{'directory': {str(directory)!r}}}, 2)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    files = [directory / "pid-0", directory / "pid-1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        assert launcher.poll() is None
        time.sleep(0.05)
    return launcher, [int(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_no_rank_outlives_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    launcher, pids = start_waiting(tmp_path)
    launcher.send_signal(number)
    assert launcher.wait(10) != 0
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank is still there"
        time.sleep(0.05)
