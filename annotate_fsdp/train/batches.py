"""What a training run reads: batches that are pure functions of seed, step and row, and their loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.train.settings import UsageError

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Some rows of text, with what else the model's forward takes.

    - inputs: int64 `[rows, length]`.
    - targets: int64 `[rows, length]`, the token after each input; `IGNORED` where none is predicted.
    - extra: keyword arguments of forward.
    """

    inputs: Tensor
    targets: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)


class Source(Protocol):
    """Where batches come from; runs on 1, 2 and 4 ranks see the same global batches.

    - held_out_rows: how many rows are kept from training.
    - chance: loss of a model that knows everything about the rows but their images, None without images.
    """

    @property
    def held_out_rows(self) -> int: ...
    @property
    def chance(self) -> float | None: ...
    def train(self, seed: int, step: int, rows: Iterable[int]) -> Batch:
        """Return the given rows of a step's global batch."""

    def held_out(self, rows: Iterable[int]) -> Batch:
        """Return some of the held-out rows, by number."""


def run_batch(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Run a batch; return each row's mean cross-entropy in fp32, and whether all of its targets rank first.

    Rows weigh the same however many targets they have, so that ranks of equally many rows do too.
    """
    logits: Tensor = model(batch.inputs, **batch.extra).float()
    losses = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none", ignore_index=IGNORED)
    is_target = batch.targets != IGNORED
    right = (logits.argmax(-1) == batch.targets) | ~is_target
    return losses.sum(-1) / is_target.sum(-1), right.all(-1)


def rank_rows(batch: int, rank: int, ranks: int) -> range:
    """Return the rows of a global batch that are this rank's; the ranks' rows partition the batch.

    Raises:
        UsageError: the rows cannot be split evenly. Ranks of unequal share would weigh rows unequally,
            as FSDP averages the ranks' gradients.
    """
    if batch % ranks:
        raise UsageError(f"a global batch of {batch} rows cannot be split evenly over {ranks} ranks")
    share = batch // ranks
    return range(rank * share, (rank + 1) * share)


def stable_hash(text: str) -> int:
    """Return 64 bits that are the same on every machine, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
