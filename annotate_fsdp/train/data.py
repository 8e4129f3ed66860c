"""Bytes to train on: the sources of Python's standard library, some files held out.

Every batch is a pure function of (seed, step, global batch size, sequence length); a rank takes its rows of
it, so runs on 1, 2 and 4 ranks see the same global batches.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from annotate_fsdp.train.batches import Batch, stable_hash
from annotate_fsdp.train.settings import UsageError

# Packages that no distribution splits off; sources of others would make the corpus differ more than need be.
PACKAGES = (
    "asyncio",
    "collections",
    "concurrent",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
)
HELD_OUT_ONE_IN = 16
HELD_OUT_WINDOWS = 64


@dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes, each the files' bytes one after the other in the order of their names.

    - train, held_out: uint8 tensors of one dimension.
    """

    train: Tensor
    held_out: Tensor


def list_sources(root: Path) -> list[str]:
    """Return the corpus' files below `root`, sorted, as names with forward slashes."""
    found = [path for path in root.glob("*.py") if not path.name.startswith("_sysconfigdata")]
    for package in PACKAGES:
        found.extend((root / package).rglob("*.py"))
    return sorted(path.relative_to(root).as_posix() for path in found if path.is_file())


def is_held_out(name: str) -> bool:
    """Whether a file is kept from training; depends on its name alone."""
    return stable_hash(name) % HELD_OUT_ONE_IN == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus from `root`, by default the standard library of the running Python.

    Raises:
        UsageError: there are too few sources to train on and to hold out.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    names = list_sources(root)
    corpus = Corpus(
        train=_read(root, (name for name in names if not is_held_out(name))),
        held_out=_read(root, (name for name in names if is_held_out(name))),
    )
    if not len(corpus.train) or not len(corpus.held_out):
        raise UsageError(f"there are not enough Python sources below {root} to train on")
    return corpus


def window_starts(size: int, seed: int, step: int, rows: Iterable[int], length: int) -> list[int]:
    """Return where the given rows of step `step`'s global batch start in `size` bytes.

    Raises:
        UsageError: not even one window fits.
    """
    choices = _count_windows(size, length)
    return [stable_hash(f"{seed}/{step}/{row}") % choices for row in rows]


@dataclass(frozen=True)
class Text:
    """Windows of a corpus, `length` bytes to read and as many to predict."""

    corpus: Corpus
    length: int

    @property
    def held_out_rows(self) -> int:
        """Number of the fixed windows of the held-out bytes."""
        return HELD_OUT_WINDOWS

    @property
    def chance(self) -> None:
        """There are no images to guess."""

    def train(self, seed: int, step: int, rows: Iterable[int]) -> Batch:
        """Return the given rows of a step's global batch."""
        text = self.corpus.train
        return _windows(text, window_starts(len(text), seed, step, rows, self.length), self.length)

    def held_out(self, rows: Iterable[int]) -> Batch:
        """Return some of the held-out windows, by number."""
        choices = _count_windows(len(self.corpus.held_out), self.length)
        starts = [row * choices // HELD_OUT_WINDOWS for row in rows]
        return _windows(self.corpus.held_out, starts, self.length)


def _read(root: Path, names: Iterable[str]) -> Tensor:
    content = bytearray().join((root / name).read_bytes() for name in names)
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _count_windows(size: int, length: int) -> int:
    if size <= length:
        raise UsageError(f"--sequence-length {length} is longer than the text; write at most {size - 1}")
    return size - length


def _windows(text: Tensor, starts: Sequence[int], length: int) -> Batch:
    windows = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return Batch(windows[:, :-1], windows[:, 1:])
