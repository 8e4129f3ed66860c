"""Hold the sharded run against a reference, step by step, before it is trusted with a longer one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from annotate_fsdp.train.data import rank_rows
from annotate_fsdp.train.loop import Trainer, full_tensor, mean_over_ranks
from annotate_fsdp.train.registry import Choices

PARITY_STEPS = 3
FP32_TOLERANCE = 1e-5


@dataclass(frozen=True)
class ParityReport:
    """How far a sharded run is from its reference.

    - reference: what it was compared with.
    - steps, ranks: how long and on how many.
    - tolerance: the largest relative difference allowed; zero means equal to the bit.
    - largest, where: the largest max|a - b| / max|b| of the losses and full gradients, and of which.
    - same_choices: whether every discrete choice was the same.
    - holds: the verdict.
    """

    reference: str
    steps: int
    ranks: int
    tolerance: float
    largest: float
    where: str
    same_choices: bool

    @property
    def holds(self) -> bool:
        """Whether the sharded run may be taken for the reference."""
        return self.same_choices and self.largest <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return {**asdict(self), "holds": self.holds}

    def __str__(self) -> str:
        allowed = f"at most {self.tolerance:g} allowed" if self.tolerance else "equality to the bit asked for"
        choices = "the same" if self.same_choices else "DIFFERENT"
        where = f" at {self.where}" if self.largest else ""
        return (
            f"parity with {self.reference}, {self.steps} steps on {self.ranks} ranks: "
            f"largest relative difference {self.largest:.3g}{where} ({allowed}), "
            f"{choices} discrete choices: {'holds' if self.holds else 'DOES NOT HOLD'}"
        )


def compare(sharded: Trainer, reference: Trainer, description: str, tolerance: float) -> ParityReport:
    """Run both for `PARITY_STEPS` steps, each with its own optimizer, and compare losses and full gradients.

    The reference is either unsharded, as the only rank of its own world and so on the whole global batch,
    or sharded over the same ranks on the same rows.
    """
    rows = rank_rows(sharded.settings.batch, sharded.rank, sharded.ranks)
    differences: dict[str, float] = {}
    same = True
    for step in range(PARITY_STEPS):
        loss, chosen = _backward(sharded, step)
        expected, theirs = _backward(reference, step)
        if reference.ranks == 1:
            theirs = {name: chosen_by[rows.start : rows.stop] for name, chosen_by in theirs.items()}
        else:
            expected = torch.tensor(mean_over_ranks(expected), dtype=torch.float64)
        same = same and chosen == theirs
        mean = torch.tensor(mean_over_ranks(loss), dtype=torch.float64)
        _note(differences, "the loss", relative_difference(mean, expected.double()))
        for name, difference in _gradient_differences(sharded.model, reference.model).items():
            _note(differences, name, difference)
        sharded.update(step)
        reference.update(step)
    where = max(differences, key=differences.__getitem__)
    return ParityReport(
        reference=description,
        steps=PARITY_STEPS,
        ranks=sharded.ranks,
        tolerance=tolerance,
        largest=_largest_over_ranks(differences[where]),
        where=where,
        same_choices=_largest_over_ranks(0.0 if same else 1.0) == 0.0,
    )


def relative_difference(value: Tensor | None, expected: Tensor | None) -> float:
    """Return max|value - expected| / max|expected|; infinite if only one is there, finite or not zero."""
    if value is None or expected is None:
        return 0.0 if value is expected else float("inf")
    difference = (value.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    if difference == 0.0:
        return 0.0
    ratio = difference / scale if scale else float("inf")
    return ratio if ratio == ratio else float("inf")


def _backward(trainer: Trainer, step: int) -> tuple[Tensor, Choices]:
    with trainer.entry.record_choices(trainer.model) as choices:
        loss = trainer.backward(step)
    return loss, choices


def _gradient_differences(sharded: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Return the relative difference of every full gradient; gathers one parameter at a time."""
    expected = {_plain(name): parameter.grad for name, parameter in reference.named_parameters()}
    found: dict[str, float] = {}
    for name, parameter in sharded.named_parameters():
        theirs = expected.pop(_plain(name))
        whole = None if parameter.grad is None else full_tensor(parameter.grad)
        found[_plain(name)] = relative_difference(whole, None if theirs is None else full_tensor(theirs))
    assert not expected
    return found


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def _note(differences: dict[str, float], name: str, value: float) -> None:
    differences[name] = max(differences.get(name, 0.0), value)


def _largest_over_ranks(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
