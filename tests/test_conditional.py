"""Modules that some ranks skip: no collective of their own, and the numbers of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp import (
    AnnotationError,
    PlanMismatchError,
    audit,
    fsdp_forward,
    fsdp_unit,
    observe,
    plan_annotated,
    plan_of,
    shard_annotated,
)
from annotate_fsdp.lowering import CAN_FOLD

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Tower(nn.Module):
    """Holds a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = fsdp_unit(nn.Linear(4, 4))
        self.outer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


@fsdp_unit
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.each = nn.ModuleList(fsdp_unit(nn.Linear(4, 4), conditional=True) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int | None) -> torch.Tensor:
        x = self.gate(x)
        return x if which is None else x + self.each[which](x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = fsdp_unit(nn.Linear(4, 4))
        self.tower = fsdp_unit(Tower(), conditional=True)
        self.experts = Experts()

    def forward(self, x: torch.Tensor, tower: bool, which: int | None) -> torch.Tensor:
        x = self.text(x)
        if tower:
            x = x + self.tower(x)
        return self.experts(x, which).square()


#: (uses the tower, which expert) by rank, of each step
STEPS: list[tuple[tuple[bool, int | None], tuple[bool, int | None]]] = [
    ((True, 0), (False, 1)),
    ((False, None), (False, 2)),
    ((False, 0), (False, 0)),
    ((False, None), (True, None)),
]


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    found = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[name] = None if grad is None else grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def reference(world: int) -> list[dict[str, torch.Tensor | None]]:
    """The unsharded model: the mean over ranks of the loss of each."""
    model, found = make(), []
    for step in STEPS:
        model.zero_grad()
        sum(model(inputs(r), *step[r % 2]).sum() for r in range(world)).div(world).backward()  # type: ignore[union-attr]
        found.append(gradients(model))
    return found


def sharded(lowering: str, shape: tuple[int, ...]) -> tuple[list[dict[str, Any]], bool, list[str]]:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make()
    plan = plan_annotated(model, mesh, lowering=lowering)
    shard_annotated(model, mesh, lowering=lowering)
    found, disagreements = [], []
    rank = dist.get_rank()
    for step in STEPS:
        model.zero_grad()
        with observe(model, cross_rank=True) as observation:
            model(inputs(rank), *step[rank % 2]).sum().backward()
        disagreements += observation.disagreements
        found.append(gradients(model))
        assert observation.collectives == plan.collectives()
    return found, plan_of(model) == plan, disagreements


@pytest.mark.parametrize(("lowering", "shape"), [("auto", (2,)), ("unit", (2,)), ("auto", (2, 2))])
def test_gradients_are_the_mean_over_the_ranks_and_none_where_nobody_used_the_unit(
    ranks: Pool, lowering: str, shape: tuple[int, ...]
) -> None:
    world = 2 * len(shape)
    expected = reference(world)
    assert expected[1]["tower.outer.weight"] is None
    for found, is_planned, disagreements in ranks.run(sharded, lowering, shape, world=world):
        assert is_planned
        assert disagreements == []
        for here, there in zip(found, expected, strict=True):
            assert {name for name, grad in here.items() if grad is None} == {
                name for name, grad in there.items() if grad is None
            }
            for name, grad in here.items():
                torch.testing.assert_close(grad, there[name])


def accumulated() -> dict[str, Any]:
    """Three microbatches, of which the last reduces."""
    model = shard_annotated(make(), init_device_mesh("cpu", (2,)))
    rank = dist.get_rank()
    for number, step in enumerate(STEPS[:3]):
        model.set_requires_gradient_sync(number == 2)
        model(inputs(rank), *step[rank]).sum().backward()
    return gradients(model)


def test_microbatches_that_do_not_reduce_count_as_use(ranks: Pool) -> None:
    model = make()
    for step in STEPS[:3]:
        sum(model(inputs(r), *step[r]).sum() for r in range(2)).div(2).backward()  # type: ignore[union-attr]
    expected = gradients(model)
    for found in ranks.run(accumulated):
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(fsdp_unit(nn.Linear(1, 1, bias=False), conditional=True) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.each[which](x)


def sixteen() -> list[float]:
    model = Pair()
    fsdp_unit(model)
    shard_annotated(model, init_device_mesh("cpu", (2,)))
    rank = dist.get_rank()
    model(torch.full((1, 1), 32.0), rank).sum().backward()
    return [float(expert.weight.grad.full_tensor()) for expert in model.each]


@pytest.mark.report(57)
def test_experts_of_different_ranks_are_not_summed(ranks: Pool) -> None:
    assert ranks.run(sixteen) == [[16.0, 16.0], [16.0, 16.0]]


# -- the plan --------------------------------------------------------------------------------------


def test_conditional_units_join_the_nearest_unit_that_every_rank_runs() -> None:
    plan = plan_annotated(make(), lowering="unit")
    assert [unit.name for unit in plan] == ["text", "experts", "(root)"]
    root, experts = plan.unit(""), plan.unit("experts")
    assert [island.path for island in root.islands] == ["tower.inner", "tower"]
    assert [island.why for island in root.islands] == [
        "conditional, joined (root): 80 B, fp32 stored in an fp32 unit",
        "conditional, joined (root): 80 B, fp32 stored in an fp32 unit",
    ]
    assert [unit.reduces_unused for unit in plan] == [False, True, True]
    assert len(experts.members) == 8
    assert "conditional, joined experts" in str(audit(make(), lowering="unit").to_json())


def test_what_conditional_units_joined_is_no_member_of_a_group() -> None:
    model = make()
    for module in (model.text, model.experts):
        fsdp_unit(module, policy="fp32")
    model.other = fsdp_unit(nn.Linear(4, 4), policy="fp32")
    plan = plan_annotated(model)
    assert [unit.name for unit in plan] == ["text, other", "experts", "(root)"]
    assert plan.unit("experts").why == "own unit: conditional units joined it"


@pytest.mark.report(59)
def test_frozen_conditional_units_need_no_zeros() -> None:
    model = make()
    model.tower.requires_grad_(False)
    root = plan_annotated(model).unit("")
    assert [island.path for island in root.islands] == ["tower.inner", "tower"]
    assert not root.reduces_unused


class Entered(nn.Linear):
    @fsdp_forward
    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def other_dtype(model: Model) -> None:
    model.tower.bfloat16()


def entered(model: Model) -> None:
    model.tower.inner = fsdp_unit(Entered(4, 4))


def the_root(model: Model) -> None:
    fsdp_unit(model, conditional=True)


def a_group(model: Model) -> None:
    model.tower.more = fsdp_unit(nn.Linear(4, 4), group="g")
    fsdp_unit(model.tower.inner, group="g")


@pytest.mark.parametrize(
    ("change", "path", "wrong"),
    [
        (other_dtype, "tower", "stored in bf16 beside fp32"),
        (entered, "tower.inner", "it has @fsdp_forward methods"),
        (the_root, "", "nothing is around the root"),
        (a_group, "tower.inner", "tower.inner, tower.more are one unit"),
    ],
)
def test_a_conditional_unit_that_can_join_none_is_an_error(
    change: Callable[[Model], None], path: str, wrong: str
) -> None:
    model = make()
    model.anchor = nn.Linear(4, 4)
    change(model)
    with pytest.raises(AnnotationError) as error:
        plan_annotated(model)
    (finding,) = [each for each in error.value.findings if each.path == path]
    assert finding.code == "AF214"
    assert finding.wrong == (
        f"it cannot join the unit around it: {wrong}, and a rank that skips a unit of its own "
        "hangs the others"
    )
    inside = [name for name, _ in model.named_parameters() if not path or name.startswith(f"{path}.")]
    assert all(name in finding.declared for name in inside)


def test_an_fp32_unit_joins_a_bf16_one_where_torch_can_compute_in_both() -> None:
    model = make()
    fsdp_unit(model.tower, policy="fp32", conditional=True)
    if CAN_FOLD:
        plan = plan_annotated(model, mp_policy=BF16)
        assert dict(plan.unit("").param_dtypes)["tower.outer.weight"] == torch.float32
        return
    with pytest.raises(AnnotationError) as error:
        plan_annotated(model, mp_policy=BF16)
    assert [finding.path for finding in error.value.findings] == ["tower"]
    assert "computes in one dtype a unit" in error.value.findings[0].wrong


def marked_on_one_rank() -> str:
    model = make()
    if dist.get_rank() == 1:
        fsdp_unit(model.tower, conditional=False)
        fsdp_unit(model.tower.inner)
    try:
        shard_annotated(model, init_device_mesh("cpu", (2,)), lowering="unit")
    except PlanMismatchError as error:
        return str(error.findings[0])
    return ""


def test_ranks_of_which_one_has_the_mark_are_told_so(ranks: Pool) -> None:
    first, second = ranks.run(marked_on_one_rank)
    assert first == second
    assert "AF701" in first


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_the_option_is_a_bool(value: Any) -> None:
    with pytest.raises(AnnotationError, match="conditional"):
        fsdp_unit(nn.Linear(4, 4), conditional=value)


def test_what_lies_deep_inside_a_conditional_unit_is_conditional_too() -> None:
    deep: nn.Module = fsdp_unit(nn.Linear(2, 2))
    for _ in range(1500):
        deep = fsdp_unit(nn.Sequential(deep))
    model = nn.Sequential(nn.Linear(2, 2), fsdp_unit(nn.Sequential(deep), conditional=True))
    (unit,) = plan_annotated(model)
    assert unit.reduces_unused
    assert len(unit.members) == 4
