"""The same numbers to the bit under every lowering: losses and full gradients of five AdamW steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowering_models import Block, Case, islands
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from annotate_fsdp import Plan, plan_of, shard_annotated
from annotate_fsdp.lowering import CAN_FOLD

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOWERINGS = ("unit", "group", "auto", "fold")
STEPS = 5

Record = list[tuple[Any, ...]]


def mesh_of(case: Case) -> DeviceMesh:
    if case.mesh == "2x2":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (case.world,))


def compile_blocks(model: nn.Module, lowering: str) -> None:
    torch._dynamo.reset()
    for module in model.modules():
        if type(module).__name__.endswith("Block"):
            module.compile(backend="aot_eager", fullgraph=lowering == "fold" and CAN_FOLD)


def run_case(case: Case, lowering: str) -> tuple[Record, Plan]:
    """Train a case; what torch's compiler itself warns of is no fault of the model's."""
    with warnings.catch_warnings():
        if case.compiled:
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            warnings.filterwarnings("ignore", message=".*should not be instantiated. Methods on autograd")
        return train_case(case, lowering)


def train_case(case: Case, lowering: str) -> tuple[Record, Plan]:
    """Train on this rank's own batches; return losses, norms and full gradients of each step."""
    model = islands(case)
    shard_annotated(model, mesh_of(case), mp_policy=BF16, lowering=lowering)
    if case.compiled:
        compile_blocks(model, lowering)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    torch.manual_seed(100 + dist.get_rank())
    record: Record = []

    def batch() -> Tensor:
        return torch.randint(0, 32, (2, 8))

    for step in range(STEPS):
        for block in (module for module in model.modules() if isinstance(module, Block)):
            block.is_on = True
        if case.member == "skipped" and step in (1, 3):
            next(module for module in model.modules() if isinstance(module, Block)).is_on = False
        if case.schedule == "evaluate":
            with torch.no_grad():
                record.append(("evaluated", model(batch()).item()))
        if case.schedule == "accumulate":
            losses = []
            for microbatch in range(3):
                model.set_requires_gradient_sync(microbatch == 2)
                loss = model(batch())
                loss.backward()
                losses.append(loss.item())
        elif case.schedule == "two forwards":
            first, second = model(batch()), model(batch())
            (first + second).backward()
            losses = [first.item(), second.item()]
        else:
            loss = model(batch())
            assert loss.dtype == torch.float32
            loss.backward()
            losses = [loss.item()]
        grads = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        record.append((losses, norm.full_tensor().item(), grads))
    return record, plan_of(model)


def difference(here: Any, there: Any) -> str:
    """The first thing in which two records differ, "" if they are equal to the bit."""
    for step, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        if mine[:-1] != theirs[:-1] or not isinstance(mine[-1], dict):
            if mine != theirs:
                return f"step {step}: {mine[:-1]} against {theirs[:-1]}"
            continue
        for name, grad in mine[-1].items():
            other = theirs[-1][name]
            if (grad is None) != (other is None) or (grad is not None and not torch.equal(grad, other)):
                return f"step {step}: the gradient of {name}: {grad} against {other}"
    return ""


def compare(case: Case) -> list[tuple[str, str, int, int]]:
    """Return (lowering, difference to `unit`, units, modules grouped or folded) of each lowering."""
    reference, plan = run_case(case, "unit")
    found = [("unit", "", len(plan), 0)]
    for lowering in LOWERINGS[1:]:
        record, plan = run_case(case, lowering)
        lowered = sum(len(unit.casts) for unit in plan.units)
        found.append((lowering, difference(reference, record), len(plan), lowered))
    return found


CASES = [
    Case(),
    Case(form="default"),
    Case(form="output"),
    Case(storage="bf16"),
    Case(checkpointing="block"),
    Case(checkpointing="sub-block"),
    Case(compiled=True),
    Case(schedule="accumulate"),
    Case(schedule="two forwards"),
    Case(schedule="evaluate"),
    Case(member="no_grad"),
    Case(member="detached"),
    Case(member="unused"),
    Case(member="skipped"),
    Case(frozen=True),
    Case(mesh="4"),
    Case(mesh="2x2"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_lowering_has_the_numbers_of_one_unit_for_each_mark(ranks: Pool, case: Case) -> None:
    for found in ranks.run(compare, case, world=case.world, timeout=120):
        assert [difference for _, difference, _, _ in found] == [""] * len(LOWERINGS)
        print(found)
        assert all(lowered for lowering, _, _, lowered in found if lowering != "unit")
