"""Start local ranks and end with them: one that dies takes the others along, and none outlives the parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from annotate_fsdp.train.settings import UsageError
from annotate_fsdp.train.worker import find_job, outcome_file, process_group

POLL_SECONDS = 0.05
# ranks that lose a peer fail too; wait this long for the words of all, to report the one that began it
GRACE_SECONDS = 0.5
KILL_AFTER_SECONDS = 3.0
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LaunchError(Exception):
    """A rank failed or died; the others were ended."""


def torchrun_world() -> tuple[int, int] | None:
    """Return (rank, ranks) when this process is itself a rank that torchrun started, else None."""
    if not all(os.environ.get(name) for name in TORCHRUN_VARIABLES):
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run_here(target: str, argument: Mapping[str, Any]) -> int:
    """Do the job as the rank that torchrun made of this process; return the job's exit code."""
    world = torchrun_world()
    assert world is not None
    with process_group("env://", *world):
        return find_job(target)(dict(argument))


def run_ranks(target: str, argument: Mapping[str, Any], ranks: int) -> int:
    """Run `"package.module:function"` on `ranks` new local processes; return its exit code.

    Each rank calls `function(argument)` inside a gloo process group that meets at a file, so no port is
    taken. `argument` travels as JSON.

    Raises:
        UsageError: a rank found a mistake of the user.
        LaunchError: a rank raised anything else, or died.
    """
    with tempfile.TemporaryDirectory(prefix="annotate-fsdp-") as name:
        directory = Path(name)
        job = {"target": target, "argument": dict(argument), "ranks": ranks}
        (directory / "job.json").write_text(json.dumps(job), encoding="utf-8")
        processes: list[subprocess.Popen[bytes]] = []
        with _sigterm_raises():
            try:
                for rank in range(ranks):
                    processes.append(_start(directory, rank))
                _wait(directory, processes)
            finally:
                codes = [process.poll() for process in processes]
                _end(processes)
        return _judge(directory, codes)


def _start(directory: Path, rank: int) -> subprocess.Popen[bytes]:
    # a pipe on stdin tells the rank when this process is gone, even if it was killed; -P, as what lies in the
    # current directory may not hide a module
    command = [sys.executable, "-P", "-m", "annotate_fsdp.train.worker", str(directory), str(rank)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=_rank_environment())


def _rank_environment() -> dict[str, str]:
    """Return the environment of a rank: the same import path, one thread, and the loopback interface."""
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment.setdefault("OMP_NUM_THREADS", "1")
    # gloo would ask the host name for an address, which need not resolve on a laptop or in a container
    for loopback in {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment


def _wait(directory: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when all ranks have ended well, or shortly after one has not."""
    while True:
        codes = [process.poll() for process in processes]
        silent = [code == 0 and not outcome_file(directory, rank).exists() for rank, code in enumerate(codes)]
        if any(codes) or any(silent):
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and any(process.poll() is None for process in processes):
                time.sleep(POLL_SECONDS)
            return
        if all(code == 0 for code in codes):
            return
        time.sleep(POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End every rank that still runs, and reap all of them."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + KILL_AFTER_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _judge(directory: Path, codes: Sequence[int | None]) -> int:
    """Return the job's exit code, or raise for the rank that ended the run.

    A killed rank leaves no word, and its death makes the others fail: it comes first. Next come mistakes
    of the user, then the failure that was written earliest.
    """
    outcomes: dict[int, dict[str, Any]] = {}
    times: dict[int, float] = {}
    for rank in range(len(codes)):
        file = outcome_file(directory, rank)
        if file.exists():
            outcomes[rank] = json.loads(file.read_text(encoding="utf-8"))
            times[rank] = file.stat().st_mtime
    for rank, code in enumerate(codes):
        if code is not None and rank not in outcomes:
            raise LaunchError(f"rank {rank} {_describe(code)}; the other ranks were ended")
    for rank in sorted(outcomes, key=times.__getitem__):
        if outcomes[rank]["kind"] == "usage":
            raise UsageError(outcomes[rank]["message"])
    for rank in sorted(outcomes, key=times.__getitem__):
        if outcomes[rank]["kind"] == "failed":
            raise LaunchError(f"rank {rank} failed:\n{outcomes[rank]['message']}")
    return max(int(outcome["code"]) for outcome in outcomes.values())


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} before its job was done"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind this process, so that its ranks are ended; only a main thread may do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
