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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from annotate_fsdp import Plan, plan_of, shard_annotated
from annotate_fsdp.lowering import CAN_FOLD
from annotate_fsdp.train.batches import rank_rows, run_batch
from annotate_fsdp.train.registry import find_model, find_source

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOWERINGS = ("unit", "group", "auto", "fold")
STEPS = 5

Record = list[tuple[Any, ...]]


def reference_model(case: Case) -> nn.Module:
    """A reference model at its tiny size."""
    torch.manual_seed(0)
    entry = find_model(case.model)
    model = entry.build("tiny", case.storage)
    if case.checkpointing == "block":
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=checkpoint_wrapper,
            check_fn=lambda module: isinstance(module, entry.layer_classes),
        )
    return model


def run_reference(case: Case, lowering: str) -> tuple[Record, Plan]:
    """Train a reference model on text, or on images; two microbatches a step with `"accumulate"`."""
    images = case.form == "images"
    entry = find_model(case.model)
    source = find_source(entry, "tiny", images, 16)
    model = shard_annotated(reference_model(case), mesh_of(case), mp_policy=BF16, lowering=lowering)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    record: Record = []
    microbatches = 2 if case.schedule == "accumulate" else 1
    for step in range(STEPS):
        losses = []
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            rows = rank_rows(case.world, dist.get_rank(), case.world)
            loss = run_batch(model, source.train(0, step * microbatches + microbatch, rows))[0].mean()
            loss.backward()
            losses.append(loss.item())
        grads = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        optimizer.step()
        optimizer.zero_grad()
        record.append((losses, norm.full_tensor().item(), grads))
    return record, plan_of(model)


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
    if case.model != "islands":
        return run_reference(case, lowering)
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


QUICK = [
    Case(form="default", member="no_grad", checkpointing="sub-block"),
    Case(member="skipped", schedule="two forwards", mesh="2x2"),
    Case(storage="bf16", form="output", frozen=True, schedule="accumulate"),
]
CASES = [
    Case(compiled=True),
    Case(form="default"),
    Case(form="output", checkpointing="block", mesh="4"),
    Case(storage="bf16", schedule="evaluate"),
    Case(member="detached", checkpointing="block"),
    Case(member="unused", schedule="accumulate"),
    Case(form="default", frozen=True, mesh="2x2"),
    Case(compiled=True, form="default", storage="bf16"),
    Case("step5", schedule="accumulate"),
    Case("step5", storage="bf16", checkpointing="block", mesh="2x2"),
    Case("deepseek_v41", checkpointing="block"),
    Case("deepseek_v41", storage="bf16", form="images"),
]


def check(ranks: Pool, case: Case) -> None:
    for found in ranks.run(compare, case, world=case.world, timeout=300):
        assert [difference for _, difference, _, _ in found] == [""] * len(LOWERINGS)
        assert all(lowered for lowering, _, _, lowered in found if lowering != "unit")


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_lowering_has_the_numbers_of_one_unit_for_each_mark(ranks: Pool, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_lowering_has_the_numbers_of_one_unit_for_each_mark_in_more_cases(
    ranks: Pool, case: Case
) -> None:
    check(ranks, case)
