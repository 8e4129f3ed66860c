"""The same numbers to the bit under every lowering: losses and full gradients of five AdamW steps."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowering_models import WIDTH, Block, Case, islands
from pool import Pool
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from annotate_fsdp import Plan, Step, observe, plan_annotated, plan_of, shard_annotated
from annotate_fsdp.collectives import KINDS, Kind
from annotate_fsdp.probes import before_collectives
from annotate_fsdp.train.batches import rank_rows, run_batch
from annotate_fsdp.train.registry import find_model, find_source

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOWERINGS = ("unit", "group", "auto", "fold")
STEPS = 5
OFF = (1, 3)  # the steps in which a block is skipped or idle

Record = list[tuple[Any, ...]]
Counts = dict[Kind, int]


@dataclass
class Run:
    """What a training run gave, and its collectives in each step: those called, and those predicted."""

    record: Record
    plan: Plan
    called: list[Counts]
    predicted: list[Counts]


@contextmanager
def counted(calls: list[Counts]) -> Iterator[None]:
    """Append how many collectives of each kind are called; a dispatch mode would turn the compiler off."""
    counts: Counts = dict.fromkeys(KINDS, 0)

    def count(kind: Kind) -> None:
        counts[kind] += 1

    with before_collectives(count):
        yield
    calls.append(counts)


def predicted(case: Case, plan: Plan, step: int) -> Counts:
    """The collectives of one step of a case."""
    modules = [path for path in plan.sequence if path]
    blocks = [f"layers.{index}" for index in range(2)]
    tail = [path for path in modules if path == "tail" and case.member in ("no_grad", "detached", "unused")]
    recomputed = {
        "block": blocks,
        "reentrant": blocks,
        "sub-block": [path for path in modules if ".attention." in path or ".mlp." in path],
        "none": [],
    }[case.checkpointing]
    skipped = [path for path in modules if path == "tail" and case.member in ("skipped", "idle")]
    if case.member in ("skipped", "idle") and step in OFF:
        skipped.append("layers.0")
    plain = Step(
        skipped=tuple(skipped),
        without_gradient=tuple(tail),
        without_input_gradient=tuple(tail if case.member != "unused" else []),
        recomputed=tuple(recomputed),
    )
    steps = [plain]
    if case.schedule == "accumulate":
        steps = [replace(plain, synchronizes=False)] * 2 + [plain]
    elif case.schedule == "two forwards":
        steps = [replace(plain, order=plan.sequence * 2)]
    elif case.schedule == "evaluate":
        steps = [replace(plain, backward=False), replace(plain, evaluated=True)]
    counts = [plan.collectives(each).counts() for each in steps]
    if case.member == "idle" and step in OFF:  # gathered in vain, in forward and in backward
        counts.append({"all_gather": 2 * len(steps), "reduce_scatter": 0, "all_reduce": 0})
    return {kind: sum(each[kind] for each in counts) for kind in KINDS}


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


def run_reference(case: Case, lowering: str) -> Run:
    """Train a reference model on text, or on images; two microbatches a step with `"accumulate"`."""
    images = case.form == "images"
    entry = find_model(case.model)
    source = find_source(entry, "tiny", images, 16)
    model = shard_annotated(reference_model(case), mesh_of(case), mp_policy=BF16, lowering=lowering)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    record: Record = []
    called: list[Counts] = []
    planned: list[Counts] = []
    microbatches = 2 if case.schedule == "accumulate" else 1
    for step in range(STEPS):
        losses = []
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            rows = rank_rows(case.world, dist.get_rank(), case.world)
            batch = source.train(0, step * microbatches + microbatch, rows)
            with counted(called), observe(model) if step == 0 else nullcontext() as observation:
                loss = run_batch(model, batch)[0].mean()
                loss.backward()
            losses.append(loss.item())
            if observation is None:  # the steps are alike
                planned.append(planned[microbatch])
                continue
            assert observation.disagreements == (), observation.disagreements
            planned.append(observation.planned_collectives.counts())
        grads = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        optimizer.step()
        optimizer.zero_grad()
        record.append((losses, norm.full_tensor().item(), grads))
    return Run(record, plan_of(model), called, planned)


def mesh_of(case: Case) -> DeviceMesh:
    if case.mesh == "2x2":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (case.world,))


def compile_block(model: nn.Module) -> None:
    """Compile the last block, in one graph where nothing in it is an FSDP module; the first stays eager."""
    torch._dynamo.reset()
    *_, block = (module for module in model.modules() if type(module).__name__.endswith("Block"))
    nested = any(isinstance(each, FSDPModule) for each in block.modules() if each is not block)
    block.compile(backend="aot_eager", fullgraph=not nested)


def run_case(case: Case, lowering: str) -> Run:
    """Train a case; what torch's compiler itself warns of is no fault of the model's."""
    if case.model != "islands":
        return run_reference(case, lowering)
    with warnings.catch_warnings():
        if case.compiled:
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            warnings.filterwarnings("ignore", message=".*should not be instantiated. Methods on autograd")
        return train_case(case, lowering)


def train_case(case: Case, lowering: str) -> Run:
    """Train on this rank's own batches; the record has losses, norms and full gradients of each step."""
    model = islands(case)
    shard_annotated(model, mesh_of(case), mp_policy=BF16, lowering=lowering)
    if case.compiled:
        compile_block(model)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    torch.manual_seed(100 + dist.get_rank())
    record: Record = []
    called: list[Counts] = []

    def batch() -> Tensor:
        return torch.randint(0, 32, (2, 8))

    for step in range(STEPS):
        block = next(module for module in model.modules() if isinstance(module, Block))
        block.is_on = not (case.member == "skipped" and step in OFF)
        block.is_idle = case.member == "idle" and step in OFF
        with counted(called):
            losses = run_step(case, model, batch)
        grads = {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if case.schedule.endswith(" late"):
            run_late(model, case.schedule)
            hidden = [n for n, p in model.named_parameters() if p.grad is None and grads[n] is not None]
            assert case.schedule == "gradients late" or hidden == []
        optimizer.step()
        optimizer.zero_grad()
        record.append((losses, norm.full_tensor().item(), grads))
    plan = plan_of(model)
    return Run(record, plan, called, [predicted(case, plan, step) for step in range(STEPS)])


def run_late(model: Any, schedule: str) -> None:
    """A forward that no backward follows, between a backward and the optimizer's step."""
    tokens = torch.zeros(2, 8, dtype=torch.long)
    if schedule == "gradients late":
        model(tokens)
        return
    with torch.no_grad():
        if schedule == "evaluate late":
            model(tokens)
        elif schedule == "method late":
            model.score(tokens)
        elif schedule == "part late":
            model.layers[0](torch.zeros(2, 8, WIDTH, dtype=torch.bfloat16))
        else:
            broken = model.layers[1].register_forward_hook(interrupt)
            with pytest.raises(EOFError):
                model(tokens)
            broken.remove()


def interrupt(*_: object) -> None:
    raise EOFError


def run_step(case: Case, model: Any, batch: Callable[[], Tensor]) -> list[float]:
    """Forwards and backwards of one step; the values of what they returned."""
    if case.schedule == "accumulate":
        losses = []
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            loss = model(batch())
            loss.backward()
            losses.append(loss.item())
        return losses
    if case.schedule == "two forwards":
        first, second = model(batch()), model(batch())
        (first + second).backward()
        return [first.item(), second.item()]
    seen = []
    if case.schedule == "evaluate":
        with torch.no_grad():
            seen.append(model(batch()).item())
    loss = model(batch())
    assert loss.dtype == torch.float32
    loss.backward()
    return [*seen, loss.item()]


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


def compare(case: Case) -> list[tuple[str, str, int]]:
    """Return (lowering, difference to `unit`, modules grouped or folded) of each lowering.

    Where two lowerings have one plan, one of them is run.
    """
    reference = run_case(case, "unit")
    assert reference.called == reference.predicted, (reference.called, reference.predicted)
    runs: list[tuple[Plan, str]] = []
    found = []
    for lowering in LOWERINGS[1:]:
        model = islands(case) if case.model == "islands" else reference_model(case)
        planned = plan_annotated(model, mesh_of(case), mp_policy=BF16, lowering=lowering)
        known = [differs for plan, differs in runs if plan == planned]
        if not known:
            run = run_case(case, lowering)
            assert run.called == run.predicted, (lowering, run.called, run.predicted)
            differs = difference(reference.record, run.record) or ("" if run.plan == planned else "the plan")
            runs.append((planned, differs))
            known = [differs]
        found.append((lowering, known[0], sum(len(unit.casts) for unit in planned)))
    assert reference.plan != runs[0][0]
    return found


AXES: dict[str, tuple[Any, ...]] = {
    "member": ("used", "no_grad", "detached", "unused", "skipped"),
    "schedule": ("plain", "accumulate", "two forwards", "evaluate"),
    "form": ("casts itself", "default", "output"),
    "checkpointing": ("none", "block", "sub-block"),
    "mesh": ("2", "4", "2x2"),
    "storage": ("fp32", "bf16"),
    "frozen": (False, True),
    "compiled": (False, True),
}
PAIRS = {
    frozenset({(one, here), (other, there)})
    for one, other in combinations(AXES, 2)
    for here in AXES[one]
    for there in AXES[other]
}


def pairs_of(case: Case) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset({(a, getattr(case, a)), (b, getattr(case, b))}) for a, b in combinations(AXES, 2)}


def pairwise() -> list[Case]:
    """Few cases that hold every pair of values, of which compiled ones and four ranks cost most."""
    draw = random.Random(0)
    missing, cases = set(PAIRS), []
    while missing:
        wanted = dict(min(missing, key=lambda pair: sorted(map(str, pair))))
        tried = [
            Case(**{axis: wanted.get(axis, draw.choice(values)) for axis, values in AXES.items()})
            for _ in range(200)
        ]
        cases.append(
            max(tried, key=lambda case: len(pairs_of(case) & missing) - 4 * case.compiled - case.world)
        )
        missing -= pairs_of(cases[-1])
    return cases


QUICK = [
    Case(form="default", member="no_grad", checkpointing="sub-block"),
    Case(member="skipped", schedule="two forwards", mesh="2x2"),
    Case(storage="bf16", form="output", frozen=True, schedule="accumulate"),
]
REFERENCE = [
    Case(checkpointing="reentrant"),
    Case(checkpointing="reentrant", schedule="accumulate", member="no_grad"),
    Case(checkpointing="reentrant", schedule="accumulate", member="skipped", form="default", mesh="2x2"),
    Case(checkpointing="reentrant", member="unused", storage="bf16", frozen=True),
    Case(member="idle", form="default"),
    Case(member="idle", storage="bf16", schedule="accumulate", mesh="2x2"),
    Case("step5", schedule="accumulate"),
    Case("step5", storage="bf16", checkpointing="block", mesh="2x2"),
    Case("deepseek_v41", storage="bf16", form="images", checkpointing="block"),
]


def test_the_cases_cover_every_pair() -> None:
    assert set().union(*map(pairs_of, pairwise())) >= PAIRS


def check(ranks: Pool, case: Case) -> None:
    for found in ranks.run(compare, case, world=case.world, timeout=300):
        assert [differs for _, differs, _ in found] == [""] * 3
        assert all(lowered for _, _, lowered in found)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_lowering_has_the_numbers_of_one_unit_for_each_mark(ranks: Pool, case: Case) -> None:
    check(ranks, case)


def with_and_without_evaluation(lowering: str, schedule: str) -> str:
    """The difference that a forward between backward and the optimizer's step makes to training."""
    case = Case(form="default")
    plain = train_case(case, lowering)
    evaluated = train_case(replace(case, schedule=schedule), lowering)
    return difference(plain.record, evaluated.record)


@pytest.mark.parametrize("lowering", ["unit", "group", "fold"])
@pytest.mark.parametrize("schedule", ["evaluate", "method", "raise", "part", "gradients"])
def test_a_forward_before_the_optimizers_step_changes_nothing(
    ranks: Pool, lowering: str, schedule: str
) -> None:
    """FSDP2 itself keeps what it gathered for the root, and would train on with weights of the past."""
    assert ranks.run(with_and_without_evaluation, lowering, f"{schedule} late") == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*pairwise(), *REFERENCE], ids=str)
def test_every_lowering_has_the_numbers_of_one_unit_for_each_mark_in_more_cases(
    ranks: Pool, case: Case
) -> None:
    check(ranks, case)
