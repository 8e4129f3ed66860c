"""Ranks that do not run the same step: each is told in which unit they part, and none waits for a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from annotate_fsdp import StepMismatchError, fsdp_unit, observe, shard_annotated
from annotate_fsdp.lockstep import Announcement, Lockstep

#: Far below the 20 s after which a collective gives up.
AT_ONCE = 10


@fsdp_unit
class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + 0.0


class Experts(nn.Module):
    """All in one unit; each rank uses the one that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.each[which](x) + 0.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = Part()
        self.vision = Part()
        self.head = Part()
        self.experts = fsdp_unit(Experts())

    def forward(self, x: torch.Tensor, vision: bool = True, head: bool = True, which: int = 0) -> Any:
        x = self.text(x)
        if vision:
            x = x + self.vision(x)
        if head:
            x = self.head(x)
        return self.experts(x, which)


def skips_in_the_middle(model: Model, x: torch.Tensor, rank: int) -> None:
    model(x, vision=rank == 0)


def skips_in_the_middle_elsewhere(model: Model, x: torch.Tensor, rank: int) -> None:
    model(x, vision=rank == 1)


def stops_after_the_forward(model: Model, x: torch.Tensor, rank: int) -> None:
    loss = model(x).sum()
    if rank == 0:
        loss.backward()


def forwards_once_more(model: Model, x: torch.Tensor, rank: int) -> None:
    for _ in range(1 + rank):
        model(x).sum().backward()


def raises(model: Model, x: torch.Tensor, rank: int) -> None:
    if rank == 1:
        raise OSError("no such batch")
    model(x)


def uses_its_own_expert(model: Model, x: torch.Tensor, rank: int) -> None:
    model(x, which=rank).sum().backward()


def run_with_difference(run: Callable[[Model, torch.Tensor, int], None], by_hand: bool = False) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    if by_hand:
        for part in (model.text, model.vision, model.head, model.experts):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        shard_annotated(model, mesh)
    x = torch.ones(2, 4)
    with observe(model, cross_rank=True) as observation:
        model(x).sum().backward()
    assert observation.agrees
    start = time.monotonic()
    try:
        with observe(model, cross_rank=True):
            run(model, x, dist.get_rank())
    finally:
        assert time.monotonic() - start < AT_ONCE


def call(unit: str, kind: str = "all-gather", phase: str = "forward", more: str = "") -> str:
    count = 40 if unit == "experts" and kind == "all-gather" else 20  # elements of two experts, or of one
    return f"the {kind} of unit '{unit}' in {phase} (fp32, {count} elements){more}"


def message(path: str, number: int, first: str, second: str, rank: int = 1) -> str:
    return (
        f"AF703 error at {path or 'the root module'}: call {number} of the step is {first} on rank 0, but "
        f"it is {second} on rank {rank}: such ranks wait for each other or mix up numbers. "
        "Run the same units and use the same parameters in each step on every rank, or mark what some ranks "
        "skip with conditional=True."
    )


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (skips_in_the_middle, message("vision", 2, call("vision"), call("head"))),
        (skips_in_the_middle_elsewhere, message("vision", 2, call("head"), call("vision"))),
        (
            stops_after_the_forward,
            message("experts", 6, call("experts", phase="backward"), "the end of the observed block"),
        ),
        (forwards_once_more, message("text", 14, "the end of the observed block", call("text"))),
        (
            uses_its_own_expert,
            message(
                "experts",
                8,
                call("experts", "reduce-scatter", "backward", " with the gradient of ")
                + "experts.each.0.weight, experts.each.0.bias",
                call("experts", "reduce-scatter", "backward", " with the gradient of ")
                + "experts.each.1.weight, experts.each.1.bias",
            ),
        ),
    ],
)
@pytest.mark.report(58)
def test_every_rank_is_told_where_they_part(
    ranks: Pool, run: Callable[[Model, torch.Tensor, int], None], expected: str
) -> None:
    for error in ranks.outcomes(run_with_difference, run):
        assert isinstance(error, StepMismatchError), error
        assert [str(finding) for finding in error.findings] == [expected]


def test_a_model_sharded_by_hand_is_watched_too(ranks: Pool) -> None:
    for error in ranks.outcomes(run_with_difference, skips_in_the_middle, True):
        assert isinstance(error, StepMismatchError), error
        assert error.findings[0].path == "vision"


def test_what_one_rank_raises_the_others_are_told(ranks: Pool) -> None:
    first, second = ranks.outcomes(run_with_difference, raises)
    assert isinstance(second, OSError)
    assert isinstance(first, StepMismatchError)
    assert first.findings[0].path == "text"
    assert first.findings[0].wrong.startswith("it is an exception: OSError: no such batch on rank 1: ")


def test_of_more_ranks_the_first_that_differs_is_named(ranks: Pool) -> None:
    for error in ranks.outcomes(run_with_difference, skips_in_the_middle_elsewhere, world=3):
        assert isinstance(error, StepMismatchError), error
        assert "rank 0" in error.findings[0].declared
        assert "rank 1" in error.findings[0].wrong


def wait_in_vain() -> None:
    lockstep = Lockstep([0, 1], timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        time.sleep(1)
    lockstep.announce(Announcement("the all-gather of unit 'text'", "text"))


def test_a_rank_that_says_nothing_is_not_waited_for_forever(ranks: Pool) -> None:
    first, second = ranks.outcomes(wait_in_vain)
    assert isinstance(first, StepMismatchError)
    assert [str(finding) for finding in first.findings] == [
        "AF704 error at text: call 1 of the step is the all-gather of unit 'text' on rank 0, but nothing was "
        "heard from rank 1 for 0.5 s. Run the same step on every rank, inside "
        "observe(model, cross_rank=True)."
    ]
    assert isinstance(second, StepMismatchError)
    assert "it has waited in vain on rank 0" in second.findings[0].declared


def test_one_process_has_nobody_to_compare_with(fake_world: Callable[..., None]) -> None:
    fake_world(8)
    model = shard_annotated(Model(), init_device_mesh("cpu", (8,)))
    with observe(model, cross_rank=True) as observation:
        model(torch.ones(2, 4)).sum().backward()
    assert observation.agrees
