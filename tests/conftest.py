"""Fixtures that every test file shares."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the machine; read when torch is imported

import torch
from pool import IGNORED_WARNINGS, Pool, fake_group


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a longer search for faults be asked for; see `test_faults.py` and `test_fuzz.py`."""
    parser.addoption("--kills", type=int, default=1, help="how many training runs to kill at random moments")
    parser.addoption("--fuzz-examples", type=int, default=440, help="random models of the slow fuzz test")


def pytest_configure(config: pytest.Config) -> None:
    """Give the test process the exceptions to `filterwarnings = error` that the workers have."""
    torch.set_warn_always(True)
    for message, category in IGNORED_WARNINGS:
        name = f"{category.__module__}.{category.__qualname__}"
        config.addinivalue_line("filterwarnings", f"ignore:{message}:{name}")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Real gloo ranks, `ranks.run(fn, *args, world=2)`; workers start at first use and are kept."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def fake_world() -> Iterator[Callable[..., None]]:
    """`fake_world(size)` makes the test process rank 0 of a fake process group until the test ends."""
    with contextlib.ExitStack() as stack:

        def start(size: int, rank: int = 0) -> None:
            stack.enter_context(fake_group(size, rank))

        yield start
