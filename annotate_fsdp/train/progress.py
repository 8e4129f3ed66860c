"""Show how training goes: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# (steps done, loss of the latest)
Report = Callable[[int, float], None]
LINES = 10


@contextmanager
def show_progress(first: int, last: int, *, visible: bool) -> Iterator[Report]:
    """Yield a function to call after each step of a run that goes from `first` to `last` steps done.

    rich draws a bar when it is installed and stdout is a terminal; else about ten plain lines appear. Ranks
    that are not `visible` show nothing.
    """
    if not visible:
        yield lambda done, loss: None
    elif sys.stdout.isatty() and _has_rich():
        with _bar(first, last) as report:
            yield report
    else:
        yield _lines(first, last)


def _has_rich() -> bool:
    try:
        import rich.progress  # noqa: F401  # only whether it is there
    except ImportError:
        return False
    return True


@contextmanager
def _bar(first: int, last: int) -> Iterator[Report]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    text, loss_text = TextColumn("{task.description}"), TextColumn("loss {task.fields[loss]}")
    with Progress(text, BarColumn(), MofNCompleteColumn(), loss_text, TimeRemainingColumn()) as bar:
        task = bar.add_task("training", total=last, completed=first, loss="-")
        yield lambda done, loss: bar.update(task, completed=done, loss=f"{loss:.4f}")


def _lines(first: int, last: int) -> Report:
    every = max(1, (last - first) // LINES)

    def report(done: int, loss: float) -> None:
        if (done - first) % every == 0 or done == last:
            print(f"step {done}/{last}  loss {loss:.4f}", flush=True)

    return report
