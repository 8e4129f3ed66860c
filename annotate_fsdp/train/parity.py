"""Hold the sharded run against an unsharded one, step by step, before it is trusted with a longer one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from annotate_fsdp.train.batches import rank_rows
from annotate_fsdp.train.loop import Trainer, full_tensor, mean_over_ranks, plain_name
from annotate_fsdp.train.settings import TrainSettings, UsageError

PARITY_STEPS = 3
TOLERANCE = 1e-5


@dataclass(frozen=True)
class ParityReport:
    """How far a sharded run is from the unsharded one.

    - steps, ranks: how long and on how many.
    - tolerance: the largest relative difference allowed.
    - largest, where: the largest max|a - b| / max|b| of the losses and full gradients, and of which.
    - same_choices: whether every discrete choice was the same.
    """

    steps: int
    ranks: int
    tolerance: float
    largest: float
    where: str
    same_choices: bool

    @property
    def holds(self) -> bool:
        """Whether the sharded run may be taken for the unsharded one."""
        return self.same_choices and self.largest <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data; a difference without a scale is None."""
        largest = self.largest if math.isfinite(self.largest) else None
        return {**asdict(self), "largest": largest, "holds": self.holds}

    def __str__(self) -> str:
        return (
            f"parity with the unsharded model, {self.steps} steps on {self.ranks} ranks: "
            f"largest relative difference {self.largest:.3g} at {self.where}, {self.tolerance:g} allowed; "
            f"{'the same' if self.same_choices else 'OTHER'} discrete choices: "
            f"{'holds' if self.holds else 'DOES NOT HOLD'}"
        )


def check_comparable(settings: TrainSettings) -> None:
    """Reject dtypes under which a sharded run cannot be held against an unsharded one.

    Raises:
        UsageError: it says why.
    """
    if (settings.mp, settings.storage) != ("fp32", "fp32"):
        raise UsageError(
            "--check-parity needs --mp fp32 and --storage fp32: bf16 rounds gradients before they are summed "
            "over the ranks, so a sharded run differs from an unsharded one by more than any fault would"
        )


def compare(sharded: Trainer, unsharded: Trainer) -> ParityReport:
    """Run both for `PARITY_STEPS` steps, each with its own optimizer; compare losses and full gradients.

    The unsharded one is the only rank of its own world, and so computes the whole global batch.
    """
    rows = rank_rows(sharded.settings.batch, sharded.rank, sharded.ranks)
    differences: dict[str, float] = {}
    same = True
    for step in range(PARITY_STEPS):
        with sharded.entry.record_choices(sharded.model) as chosen:
            loss = torch.tensor(mean_over_ranks(sharded.backward(step)), dtype=torch.float64)
        with unsharded.entry.record_choices(unsharded.model) as choices:
            expected = unsharded.backward(step)
        same = same and chosen == {name: made[rows.start : rows.stop] for name, made in choices.items()}
        found = {"the loss": relative_difference(loss, expected)}
        found.update(_gradient_differences(sharded.model, unsharded.model))
        differences = {name: max(value, differences.get(name, 0.0)) for name, value in found.items()}
        sharded.update(step)
        unsharded.update(step)
    where = max(differences, key=differences.__getitem__)
    return ParityReport(
        steps=PARITY_STEPS,
        ranks=sharded.ranks,
        tolerance=TOLERANCE,
        largest=_largest_over_ranks(differences[where]),
        where=where,
        same_choices=_largest_over_ranks(0.0 if same else 1.0) == 0.0,
    )


def relative_difference(value: Tensor | None, expected: Tensor | None) -> float:
    """Return max|value - expected| / max|expected|; infinite where only one exists, is zero or is finite."""
    if value is None or expected is None:
        return 0.0 if value is expected else math.inf
    difference = (value.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    if difference == 0.0:
        return 0.0
    ratio = difference / scale if scale else math.inf
    return math.inf if math.isnan(ratio) else ratio


def _gradient_differences(sharded: nn.Module, unsharded: nn.Module) -> dict[str, float]:
    """Return the relative difference of every full gradient; gathers one parameter at a time."""
    expected = {plain_name(name): parameter.grad for name, parameter in unsharded.named_parameters()}
    found: dict[str, float] = {}
    for name, parameter in sharded.named_parameters():
        gradient = None if parameter.grad is None else full_tensor(parameter.grad)
        found[plain_name(name)] = relative_difference(gradient, expected.pop(plain_name(name)))
    assert not expected
    return found


def _largest_over_ranks(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found: float = largest.item()
    return found
