"""One rank: its process group, its watch over the parent, and the word it leaves when it ends."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from annotate_fsdp.errors import AnnotationError
from annotate_fsdp.train.files import write_atomically
from annotate_fsdp.train.settings import UsageError

Job = Callable[[dict[str, Any]], int]
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def outcome_file(directory: Path, rank: int) -> Path:
    """Return where a rank writes how it ended."""
    return directory / f"outcome-{rank}.json"


def find_job(target: str) -> Job:
    """Import `"package.module:function"`."""
    module, _, name = target.partition(":")
    job: Job = getattr(importlib.import_module(module), name)
    return job


@contextmanager
def process_group(init_method: str, rank: int, ranks: int) -> Iterator[None]:
    """Hold a gloo process group for the length of the block.

    A block that raises leaves the group to the end of the process: taking it down could wait for a peer.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT
    )
    yield
    dist.destroy_process_group()


def end_with_parent() -> None:
    """End this process when the parent's end of stdin closes, however the parent ended."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def run_rank(directory: Path, rank: int) -> int:
    """Do the job that the parent left in `directory`; leave an outcome beside it."""
    job = json.loads((directory / "job.json").read_text(encoding="utf-8"))
    outcome: dict[str, Any]
    try:
        with process_group((directory / "store").absolute().as_uri(), rank, job["ranks"]):
            outcome = {"kind": "returned", "code": find_job(job["target"])(job["argument"])}
    except (UsageError, AnnotationError) as error:
        outcome = {"kind": "usage", "message": str(error)}
    except Exception:
        outcome = {"kind": "failed", "message": traceback.format_exc()}
    write_atomically(outcome_file(directory, rank), json.dumps(outcome))
    return 0 if outcome["kind"] == "returned" else 1


def main() -> None:
    """Run one rank: `python -m annotate_fsdp.train.worker DIRECTORY RANK`, stdin held by the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the ranks
    end_with_parent()
    code = run_rank(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # the interpreter's own way out joins threads that a failed collective may have left waiting
    os._exit(code)


if __name__ == "__main__":
    main()
