"""Real gloo ranks for tests: worker processes that are started once and serve every test.

A call gives each rank a default process group of its own and takes it away again, so that a test which fails,
or leaves a mesh or a group behind, does not disturb the next one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

#: Warnings are errors, in the test process and in the workers, and torch repeats its own each time. These
#: (message pattern, category) are ignored; each has its reason beside it.
IGNORED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = ()

#: A collective that waits longer than this fails on its rank.
COLLECTIVE_TIMEOUT = timedelta(seconds=20)
#: When one rank has failed, the others get this long (in seconds) to answer before its connections are cut.
GRACE = 2.0
#: Imported once in the process that the workers are forked from, so that a worker starts in milliseconds.
PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.checkpoint.state_dict",
)

_RELEASE = b""  # sent to a worker whose process group may now go


class RankError(RuntimeError):
    """A function failed, hung or died on at least one rank; the message says what each rank did."""


@dataclass(frozen=True)
class _Answer:
    """What one rank answered: its pickled value, or its pickled exception and the formatted traceback."""

    payload: bytes
    trace: str | None = None

    def value(self) -> Any:
        return pickle.loads(self.payload)


@dataclass
class _Worker:
    """One worker process, the pipe to it, and the file that gets what it prints."""

    process: ForkServerProcess
    pipe: Connection
    log: Path
    log_start: int = 0

    def end(self) -> None:
        """Kill the process if it does not leave when its pipe closes."""
        self.pipe.close()
        self.process.join(0.5)
        self.process.kill()
        self.process.join()
        self.process.close()

    def printed(self) -> str:
        """What the worker printed during the last call."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")


class Pool:
    """Worker processes that run functions as the ranks of a gloo process group.

    Workers start at the first call that needs them and are reused; `close` ends them.
    """

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self._workers: list[_Worker] = []
        self._count = 0

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 60) -> list[Any]:
        """Call `fn(*args)` on every rank of a fresh process group and return the value of each rank.

        - fn: a function at the top level of an importable module; it reads its rank from `torch.distributed`.
          What it returns must pickle without a process group: plain tensors, not DTensors.
        - world: number of ranks.
        - timeout: seconds until ranks that did not answer are ended.

        Raises `RankError` with the traceback of every rank that failed.
        """
        answers = self._answers(fn, args, world, timeout)
        if any(answer.trace for answer in answers):
            workers = zip(self._workers, answers, strict=False)
            raise RankError(_report(fn, [_fate(worker, answer) for worker, answer in workers]))
        return [answer.value() for answer in answers]

    def outcomes(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 60) -> list[Any]:
        """Like `run`, but return for each rank either its value or the exception that it raised.

        An exception that does not survive pickling becomes a `RuntimeError` with its type and text. The
        traceback is in its `__notes__`. A rank that hangs or dies still raises `RankError`.
        """
        return [answer.value() for answer in self._answers(fn, args, world, timeout)]

    def close(self) -> None:
        """End all workers."""
        self._end_workers()
        self._directory.cleanup()

    def _answers(
        self, fn: Callable[..., Any], args: Sequence[Any], world: int, timeout: float
    ) -> list[_Answer]:
        call = pickle.dumps((fn, args))
        self._start_workers(world)
        self._count += 1
        store = Path(self._directory.name, f"store-{self._count}")
        workers = self._workers[:world]
        answers: dict[int, _Answer] = {}
        try:
            for rank, worker in enumerate(workers):
                worker.log_start = worker.log.stat().st_size
                worker.pipe.send_bytes(pickle.dumps((str(store), rank, world, call)))
            complete = _collect(workers, answers, timeout) and _all_released(workers)
        except (EOFError, OSError):  # a worker died
            complete = False
        except BaseException:  # an interrupt: the workers are in the middle of something
            self._end_workers()
            raise
        if not complete:
            report = _report(fn, [_fate(worker, answers.get(rank)) for rank, worker in enumerate(workers)])
            self._end_workers()
            raise RankError(report)
        store.unlink(missing_ok=True)
        return [answers[rank] for rank in range(world)]

    def _start_workers(self, world: int) -> None:
        if any(not worker.process.is_alive() for worker in self._workers):
            self._end_workers()
        for index in range(len(self._workers), world):
            log = Path(self._directory.name, f"log-{self._count}-{index}")
            log.touch()
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(there, str(log), list(sys.path)), daemon=True
            )
            process.start()
            there.close()
            self._workers.append(_Worker(process, here, log))

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []


def reset_distributed() -> None:
    """Drop the process groups of this process and all that torch caches about them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.device_mesh" in sys.modules:
        sys.modules["torch.distributed.device_mesh"]._mesh_resources.mesh_stack.clear()
    if "torch.distributed.tensor" in sys.modules:
        # The next mesh of the same shape would find sharding decisions that name the dead groups.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@contextlib.contextmanager
def fake_group(size: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a fake process group, for structure only: collectives return nonsense."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        reset_distributed()


def _collect(workers: Sequence[_Worker], answers: dict[int, _Answer], timeout: float) -> bool:
    """Fill `answers` and let the process groups go; False if the time is up before all have answered.

    A rank keeps its group until all ranks have answered, since they may still be reading what it sent. When a
    rank has failed that lasts only for `GRACE`: the others may wait for it in a collective, which its leaving
    ends.
    """
    deadline = time.monotonic() + timeout
    cut = deadline
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    kept: list[Connection] = []
    while waiting:
        now = time.monotonic()
        if now >= deadline:
            return False
        if now >= cut:
            for pipe in kept:
                pipe.send_bytes(_RELEASE)
            kept, cut = [], deadline
        for ready in multiprocessing.connection.wait(list(waiting), cut - now):
            pipe = cast("Connection", ready)
            answer = pickle.loads(pipe.recv_bytes())
            answers[waiting.pop(pipe)] = answer
            kept.append(pipe)
            if answer.trace:
                cut = min(cut, time.monotonic() + GRACE)
    for pipe in kept:
        pipe.send_bytes(_RELEASE)
    return True


def _all_released(workers: Sequence[_Worker]) -> bool:
    """Wait until the process group is gone on every worker."""
    limit = COLLECTIVE_TIMEOUT.total_seconds()
    return all(worker.pipe.poll(limit) and worker.pipe.recv_bytes() == _RELEASE for worker in workers)


def _report(fn: Callable[..., Any], fates: Sequence[tuple[str, str]]) -> str:
    """Put what each rank did, and what it printed, into one message."""
    lines = [f"{getattr(fn, '__name__', fn)} failed; world size {len(fates)}"]
    for rank, (fate, printed) in enumerate(fates):
        lines.append(f"--- rank {rank}: {fate.rstrip()}")
        if printed.strip():
            lines.append(f"--- rank {rank} printed:\n{printed.rstrip()}")
    return "\n".join(lines)


def _fate(worker: _Worker, answer: _Answer | None) -> tuple[str, str]:
    """Say what became of one rank and what it printed; one that did not answer prints where it stands."""
    if answer is not None:
        return answer.trace or "returned a value", worker.printed()
    worker.process.join(0.1)
    if worker.process.exitcode is not None:
        return f"died with exit code {worker.process.exitcode}", worker.printed()
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGUSR1)  # to faulthandler
    time.sleep(0.1)
    return "gave no answer and was ended", worker.printed()


def _serve(pipe: Connection, log: str, path: list[str]) -> None:
    """Answer calls until the pipe closes."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the pool's business
    sys.path[:] = path
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    gc.freeze()  # what torch has built so far stays; collecting after each call then takes no time
    while True:
        try:
            store, rank, world, call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_answer(store, rank, world, call)))
        gc.collect()  # a traceback keeps groups alive
        pipe.recv_bytes()  # the other ranks may still need this one's connections
        reset_distributed()
        pipe.send_bytes(_RELEASE)


def _answer(store: str, rank: int, world: int, call: bytes) -> _Answer:
    """Run one call inside a process group of its own and pickle what comes of it."""
    with warnings.catch_warnings():
        _strict_warnings()
        try:
            file_store = FileStore(store, world)
            file_store.set_timeout(COLLECTIVE_TIMEOUT)
            dist.init_process_group(
                "gloo", store=file_store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
            )
            torch.manual_seed(0)
            fn, args = pickle.loads(call)
            return _Answer(pickle.dumps(fn(*args)))
        except BaseException as error:  # a failing test must not end the worker
            trace = traceback.format_exc()
            error.add_note(f"rank {rank}:\n{trace}")
            return _Answer(_pickled(error), trace)


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception, or a RuntimeError with its text where it does not survive that."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            substitute.add_note(note)
        return pickle.dumps(substitute)
    return payload


def _strict_warnings() -> None:
    """Turn warnings into errors, but for those listed."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for message, category in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
