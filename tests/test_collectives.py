"""The collectives that a plan predicts, against literals and against those that FSDP2 really calls."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import fake_group
from torch import bfloat16, float32, nn, uint8
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from annotate_fsdp import (
    AnnotationError,
    Collective,
    Collectives,
    Plan,
    Step,
    fsdp_unit,
    observe,
    plan_annotated,
    shard_annotated,
)
from annotate_fsdp.probes import Call, CountCollectives

BF16 = MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).to(x.dtype)


class Block(nn.Module):
    """A unit of 30 parameters with a unit of 5 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = fsdp_unit(Scale(5), policy="fp32", casts_itself=True)
        self.linear = nn.Linear(5, 5)
        fsdp_unit(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = self.through(index, block, x)
        return self.head(x)

    def through(self, index: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


IDS = torch.arange(6)
COUNTS = ("all_gather", "reduce_scatter", "all_reduce")


def counts(collectives: Collectives) -> tuple[int, ...]:
    return tuple(collectives.counts()[kind] for kind in COUNTS)


def gather(unit: str, phase: Any, dtype: torch.dtype, numel: int, ranks: int = 2) -> Collective:
    return Collective("all_gather", unit, phase, dtype, numel, ranks)


def reduce(unit: str, numel: int, ranks: int = 2) -> Collective:
    return Collective("reduce_scatter", unit, "backward", float32, numel, ranks)


# -- literals, without a process group -------------------------------------------------------------


def test_the_plain_step_gathers_ahead_in_backward_and_reduces_each_unit_once() -> None:
    plan = plan_annotated(Model(blocks=1), world_size=2, mp_policy=BF16, lowering="unit")
    assert plan.collectives().calls == (
        gather("", "forward", bfloat16, 8 * 5 + 4 * 5 + 4),
        gather("blocks.0", "forward", bfloat16, 6 * 5 + 6),
        gather("blocks.0.norm", "forward", float32, 6),
        gather("blocks.0", "backward", bfloat16, 36),
        gather("blocks.0.norm", "backward", float32, 6),
        reduce("blocks.0.norm", 6),
        reduce("blocks.0", 36),
        reduce("", 64),
    )


def test_replicas_reduce_what_each_rank_has_left_of_the_gradients() -> None:
    plan = plan_annotated(Model(blocks=1), world_size=(3, 2), mp_policy=BF16, lowering="unit")
    assert plan.collectives().of("blocks.0").backward.calls == (
        gather("blocks.0", "backward", bfloat16, 36),
        reduce("blocks.0", 36),
        Collective("all_reduce", "blocks.0", "backward", float32, 18, 3),
    )


def test_without_a_mesh_nothing_is_padded_and_the_ranks_are_not_known() -> None:
    calls = (
        plan_annotated(Model(blocks=1), mp_policy=BF16, lowering="unit").collectives().of("blocks.0").calls
    )
    assert calls[0] == gather("blocks.0", "forward", bfloat16, 30, ranks=0)


def test_a_unit_by_itself_has_a_gradient_go_through_it() -> None:
    plan = plan_annotated(Model().requires_grad_(False), world_size=2, lowering="unit")
    assert len(plan.collectives().backward) == 0
    assert counts(plan.unit("blocks.0").collectives()) == (2, 0, 0)
    assert counts(
        plan_annotated(Model(), world_size=(2, 2), lowering="unit").unit("blocks.0").collectives()
    ) == (2, 1, 1)


def test_without_its_sequence_a_plan_goes_by_the_order_of_its_units() -> None:
    plan = plan_annotated(Model(), world_size=2, lowering="unit")
    expected = plan.collectives(Step(skipped=("blocks.0",)))
    for sequence in ((), plan.sequence[1:-1], ("gone", *plan.sequence)):
        assert replace(plan, sequence=sequence).collectives(Step(skipped=("blocks.0",))) == expected


def test_one_rank_calls_nothing() -> None:
    assert len(plan_annotated(Model(), world_size=1, lowering="unit").collectives()) == 0


def test_sums_by_phase_and_unit_are_data() -> None:
    collectives = plan_annotated(Model(blocks=1), world_size=2, mp_policy=BF16, lowering="unit").collectives()
    assert collectives.counts() == {"all_gather": 5, "reduce_scatter": 3, "all_reduce": 0}
    assert collectives.bytes()["all_gather"] == {bfloat16: 2 * (64 + 36 + 36), float32: 4 * (6 + 6)}
    assert {unit: len(calls) for unit, calls in collectives.by_unit().items()} == {
        "": 2,
        "blocks.0": 3,
        "blocks.0.norm": 3,
    }
    data = collectives.to_dict()
    assert data["backward"]["reduce_scatter"] == {"count": 3, "bytes": {"float32": 4 * (6 + 36 + 64)}}
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (Step(), (13, 7, 0)),
        (Step(backward=False), (7, 0, 0)),
        (Step(synchronizes=False), (13, 0, 0)),
        (Step(skipped=("blocks.1",)), (9, 5, 0)),
        (Step(without_gradient=("blocks.1",)), (12, 5, 0)),  # blocks.1 is gathered ahead all the same
        (Step(recomputed=("blocks.0", "blocks.1", "blocks.2")), (13, 7, 0)),
        (Step(gathered=("",)), (12, 7, 0)),
        (Step(evaluated=True), (13, 7, 0)),  # what the evaluation ran last is the root, which is gathered
    ],
    ids=str,
)
def test_a_step_changes_what_is_gathered_and_reduced(step: Step, expected: tuple[int, ...]) -> None:
    assert (
        counts(plan_annotated(Model(), world_size=2, mp_policy=BF16, lowering="unit").collectives(step))
        == expected
    )


def test_two_forwards_before_one_backward_gather_twice_and_reduce_once() -> None:
    plan = plan_annotated(Model(), world_size=2, mp_policy=BF16, lowering="unit")
    collectives = plan.collectives(Step(order=plan.sequence * 2))
    assert counts(collectives) == (1 + 4 * 6, 7, 0)


def test_a_frozen_beginning_is_gathered_ahead_by_one_unit_only() -> None:
    model = Model()
    for part in (model.embed, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)
    plan = plan_annotated(model, world_size=2, mp_policy=BF16, lowering="unit")
    backward = plan.collectives().backward
    assert {unit: counts(calls) for unit, calls in backward.by_unit().items()} == {
        "blocks.1": (1, 0, 0),
        "blocks.2": (1, 1, 0),
        "blocks.2.norm": (1, 1, 0),
        "": (0, 1, 0),
    }


def test_a_path_that_no_unit_has_is_an_error_that_names_the_close_one() -> None:
    plan = plan_annotated(Model(), world_size=2, lowering="unit")
    with pytest.raises(AnnotationError) as caught:
        plan.collectives(Step(skipped=("block.1",)))
    assert str(caught.value) == (
        "1 finding; nothing was sharded\n"
        "  AF108 error at block.1: Step(skipped=...) names 'block.1', but no unit of the plan has a module "
        "there. Did you mean 'blocks.1'? Write paths of modules in the plan's units."
    )


def test_one_path_that_is_no_tuple_is_an_error() -> None:
    with pytest.raises(AnnotationError) as caught:
        Step(skipped="blocks.1")  # type: ignore[arg-type]  # the mistake
    assert str(caught.value) == (
        "1 finding; nothing was sharded\n"
        "  AF108 error at the root module: skipped='blocks.1', but it takes several paths. "
        "Write skipped=('blocks.1',)."
    )


# -- what FSDP2 calls on real ranks ----------------------------------------------------------------


def train(model: nn.Module) -> None:
    model(IDS).float().square().mean().backward()


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(IDS)


def accumulate(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    train(model)


def two_forwards(model: nn.Module) -> None:
    (model(IDS).float().sum() + model(IDS).float().sum()).backward()


PLAIN_STEP = Step()


@dataclass(frozen=True)
class Case:
    """A model, how it is sharded, what a step does and how that is said."""

    build: Callable[[], nn.Module]
    step: Step = PLAIN_STEP
    run: Callable[[Any], None] = train
    options: tuple[tuple[str, Any], ...] = (("mp_policy", BF16),)
    mesh: tuple[int, ...] = (2,)


class Skipping(Model):
    def through(self, index: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if index == 1 else block(x)


class Detaching(Model):
    def through(self, index: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + block(x).detach() if index == 1 else block(x)


class Repeating(Model):
    def through(self, index: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(block(x)) if index == 1 else block(x)


class Checkpointing(Model):
    def through(self, index: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


class Reentrant(Model):
    def through(self, index: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=True)


class CheckpointingDetached(Model):
    """The norm in a block that runs again has a part in no gradient."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.register_forward_hook(lambda module, args, output: output.detach())

    def through(self, index: int, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


def wrapped() -> nn.Module:
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


class OnlyBlocks(Model):
    """The root holds nothing, so that the last block is the last unit to run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = fsdp_unit(self.embed)
        self.head = fsdp_unit(self.head)


class Siblings(nn.Module):
    """Two modules share a unit."""

    def __init__(self, last: bool = True) -> None:
        super().__init__()
        self.first = fsdp_unit(Scale(5), group="scales", reshard_after_forward=False)
        self.middle = fsdp_unit(nn.Linear(5, 5))
        self.second = fsdp_unit(Scale(5), group="scales", reshard_after_forward=False)
        self.last = last

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(ids.float()[None, :5]))
        return self.second(x) if self.last else x


def siblings() -> nn.Module:
    return Siblings()


def sibling_left_out() -> nn.Module:
    return Siblings(last=False)


def frozen() -> nn.Module:
    model = Model()
    for part in (model.embed, model.blocks[0], model.blocks[2].norm):
        part.requires_grad_(False)
    return model


class Mixed(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.head.weight.float().t() + self.head.bias


def mixed() -> nn.Module:
    model = Mixed()
    model.head.weight.data = model.head.weight.data.bfloat16()
    model.head.weight.requires_grad_(False)
    return model


def deep() -> nn.Module:
    inner = fsdp_unit(nn.Sequential(fsdp_unit(nn.Linear(5, 5)), nn.Linear(5, 5)))
    outer = fsdp_unit(nn.Sequential(nn.Linear(5, 5), inner, fsdp_unit(nn.Linear(5, 5))))
    return nn.Sequential(nn.Embedding(7, 5), outer, nn.Linear(5, 3))


PLAIN = (
    *("blocks.0.norm", "blocks.0", "blocks.1.norm", "blocks.1"),
    *("blocks.2.norm", "blocks.2", ""),
)
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
CASES = {
    "resharded": Case(Model),
    "kept": Case(Model, options=(("mp_policy", BF16), ("reshard_after_forward", False))),
    "resharded to fewer": Case(Model, options=(("mp_policy", BF16), ("reshard_after_forward", 2)), mesh=(4,)),
    "replicated": Case(Model, mesh=(2, 2)),
    "replicated once": Case(Model, mesh=(1, 2)),
    "offloaded": Case(
        Model, options=(("mp_policy", BF16), ("offload_policy", CPUOffloadPolicy(pin_memory=False)))
    ),
    "one rank": Case(Model, mesh=(1,)),
    "no policy": Case(Model, options=()),
    "two modules in a unit": Case(siblings, options=()),
    "one of two modules": Case(sibling_left_out, Step(skipped=("second",)), options=()),
    "frozen": Case(frozen),
    "mixed storage": Case(mixed, options=()),
    "three deep": Case(deep),
    "skipped": Case(Skipping, Step(skipped=("blocks.1",))),
    "detached": Case(Detaching, Step(without_gradient=("blocks.1",))),
    "repeated": Case(Repeating, Step(order=(*PLAIN[:4], *PLAIN[2:]))),
    "evaluated, then trained": Case(Model, Step(evaluated=True)),
    "evaluated, freed, then trained": Case(OnlyBlocks, Step(evaluated=True)),
    "evaluated": Case(Model, Step(backward=False), evaluate),
    "not synchronized": Case(Model, Step(synchronizes=False), accumulate),
    "two forwards": Case(Model, Step(order=PLAIN * 2), two_forwards),
    "wrapped": Case(wrapped, Step(recomputed=BLOCKS)),
    "checkpointed": Case(Checkpointing, Step(recomputed=BLOCKS)),
    "gathered ahead": Case(Model, options=(("mp_policy", BF16), ("prefetch", (1, 2)))),
    "gathered ahead, one detached": Case(
        Detaching, Step(without_gradient=("blocks.1",)), options=(("mp_policy", BF16), ("prefetch", (2, 3)))
    ),
    "gathered ahead, two forwards": Case(
        Model,
        Step(order=PLAIN * 2),
        two_forwards,
        options=(("mp_policy", BF16), ("prefetch", (2, 1))),
    ),
    "checkpointed reentrantly": Case(Reentrant, Step(recomputed=BLOCKS)),
    "checkpointed twice": Case(Checkpointing, Step(recomputed=BLOCKS, order=PLAIN * 2), two_forwards),
    "checkpointed, part of it detached": Case(
        CheckpointingDetached,
        Step(recomputed=BLOCKS, without_gradient=("blocks.0.norm", "blocks.1.norm", "blocks.2.norm")),
    ),
}


def mesh_of(case: Case) -> Any:
    return init_device_mesh("cpu", case.mesh, mesh_dim_names=("replicate", "shard")[-len(case.mesh) :])


def sharded(case: Case, lowering: str = "unit") -> nn.Module:
    model: Any = shard_annotated(case.build(), mesh_of(case), lowering=lowering, **dict(case.options))
    if case.step.evaluated:
        evaluate(model)
        if not case.step.gathered:
            model.reshard()
    return model


def step_after(case: Case, plan: Plan) -> Step:
    """The case's step in the plan's units."""
    order = case.step.order and tuple(path for path in case.step.order if path in plan.sequence)
    return replace(case.step, order=order)


def counted_by_torch(case: Case, lowering: str) -> dict[str, int] | None:
    if case.step.order is not None:
        return None  # its module tracker fails when a module runs twice
    model = sharded(case, lowering)
    with warnings.catch_warnings(), CommDebugMode() as counter:
        warnings.simplefilter("ignore")  # it makes views of all outputs, and FSDP2 warns of them
        case.run(model)
    names = {
        "allgather_base": "all_gather",
        "reduce_scatter_base": "reduce_scatter",
        "allreduce": "all_reduce",
    }
    return {names[str(op).rpartition(".")[2].strip("_")]: n for op, n in counter.get_comm_counts().items()}


def measure(name: str, lowering: str = "unit") -> dict[str, Any]:
    """What our probe, the prediction, torch's own counter and an observation say of one step."""
    case = CASES[name]
    model, calls = sharded(case, lowering), list[Call]()
    with CountCollectives(calls.append):
        case.run(model)
    model = sharded(case, lowering)
    with observe(model) as observation:
        case.run(model)
    plan = plan_annotated(case.build(), mesh_of(case), lowering=lowering, **dict(case.options))
    step = step_after(case, plan)
    return {
        "real": calls,
        "predicted": plan.collectives(step),
        "first forward": len(plan.collectives(replace(step, order=None)).forward),
        "counted": counted_by_torch(case, lowering),
        "disagreements": observation.disagreements,
        "observed": observation.collectives,
        "planned": observation.planned_collectives,
    }


QUICK = ("resharded", "replicated", "skipped", "not synchronized", "two forwards", "checkpointed")
# a group recomputed by reentrant checkpointing is reduced at the end, or with its first module: same calls in
# another order; test_lowering_numbers.py counts them
# a folded module is no unit, so that a step cannot say what happens to it alone
LOWERED = [
    name for name in CASES if name not in ("checkpointed reentrantly", "checkpointed, part of it detached")
]


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_what_ranks_call(ranks: Any, name: str) -> None:
    compare_with_ranks(ranks, name, "unit")


@pytest.mark.parametrize("lowering", ["group", "fold"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in LOWERED]
)
def test_the_prediction_is_what_ranks_call_when_units_are_grouped_or_folded(
    ranks: Any, name: str, lowering: str
) -> None:
    compare_with_ranks(ranks, name, lowering)


def compare_with_ranks(ranks: Any, name: str, lowering: str) -> None:
    case = CASES[name]
    for result in ranks.run(measure, name, lowering, world=torch.Size(case.mesh).numel()):
        predicted = result["predicted"]
        assert [Call(c.kind, c.dtype, c.numel, c.ranks) for c in predicted] == result["real"]
        if result["counted"] is not None:
            assert Counter(result["counted"]) == Counter(call.kind for call in result["real"])
        assert result["disagreements"] == ()
        if case.run is two_forwards:  # only the first forward is observed
            predicted = Collectives(predicted.forward.calls[: result["first forward"]])
        assert result["observed"] == result["planned"] == predicted


def test_mixed_storage_is_sent_as_bytes(ranks: Any) -> None:
    for result in ranks.run(measure, "mixed storage"):
        assert uint8 in {call.dtype for call in result["real"]}


# -- what an observation says of it ----------------------------------------------------------------


def tamper(kind: str) -> dict[str, Any]:
    """Observe a step in which somebody gathers or frees by hand, or one after a microbatch."""
    model: Any = sharded(CASES["resharded"])
    if kind == "switched":
        model.blocks[1].set_requires_gradient_sync(False)
        train(model)
        model.blocks[1].set_requires_gradient_sync(True)

    with observe(model) as observation:
        loss = model(IDS).float().square().mean()
        if kind == "freed":
            model.reshard()
        if kind == "gathered":
            model.blocks[0].unshard()
            model.blocks[0].reshard()
        loss.backward()
    return {**observation.to_dict(), "text": str(observation), "root": observation.unit("").collectives}


def test_a_unit_that_is_freed_by_hand_is_named(ranks: Any) -> None:
    for result in ranks.run(tamper, "freed"):
        assert result["disagreements"] == [
            "(root): in this step the plan has 1 all-gather and 1 reduce-scatter, but FSDP2 called 2 "
            "all-gathers and 1 reduce-scatter. Do not call unshard() or reshard() in between, nor set what "
            "FSDP2 gathers ahead"
        ]
        assert not result["agrees"]
        assert "14 all-gather (plan: 13)" in result["text"]
        assert result["root"] == {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 0}
        assert result["units"][-1]["collectives"] == result["root"]


def test_a_unit_that_is_gathered_by_hand_is_named(ranks: Any) -> None:
    for result in ranks.run(tamper, "gathered"):
        (text,) = result["disagreements"]
        assert text.startswith(
            "blocks.0: in this step the plan has 2 all-gathers and 1 reduce-scatter, but FSDP2 called 3 "
        )


def test_gradients_that_an_earlier_microbatch_left_are_no_disagreement(ranks: Any) -> None:
    for result in ranks.run(tamper, "switched"):
        assert result["disagreements"] == []


class Summing(Model):
    """Sums over ranks by itself, as a loss or a router may."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids)
        torch.distributed.all_reduce(torch.ones(3))
        return logits


def summing() -> tuple[Any, ...]:
    with observe(sharded(Case(Summing))) as observation:
        pass
    model = sharded(Case(Summing))
    with observe(model) as observation:
        train(model)
    return observation.agrees, observation.collectives.counts()["all_reduce"], observation.notes


def test_what_the_model_calls_itself_is_noted_apart(ranks: Any) -> None:
    for agrees, count, notes in ranks.run(summing):
        assert agrees
        assert count == 0
        assert "called by the model itself, not by FSDP2: 1 all-reduce" in notes


# -- random trees ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A random module: its parameter comes first, then its children, each used as `mode` says."""

    marked: bool
    size: int
    trainable: bool
    reshard: bool | None
    mode: str
    children: tuple[Tree, ...]


class Branch(nn.Module):
    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.modes = [child.mode for child in tree.children]
        self.weight = nn.Parameter(torch.ones(tree.size), tree.trainable) if tree.size else None
        self.parts = nn.ModuleList(Branch(child) for child in tree.children)
        if tree.marked:
            fsdp_unit(self, reshard_after_forward=tree.reshard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            x = x * self.weight.mean()
        for mode, part in zip(self.modes, self.parts, strict=True):
            if mode == "detached":
                x = x + part(x).detach()
            elif mode == "recomputed":
                x = checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)
            elif mode != "skipped":
                x = part(part(x) if mode == "twice" else x)
        return x


def step_of(tree: Tree, path: str = "") -> tuple[list[str], dict[str, list[str]]]:
    """The order in which units end, and the units of each mode."""
    order: list[str] = []
    modes: dict[str, list[str]] = {"skipped": [], "detached": [], "recomputed": []}
    for index, child in enumerate(tree.children):
        name = f"{path}.parts.{index}" if path else f"parts.{index}"
        inner, inner_modes = step_of(child, name)
        order += inner * (2 if child.mode == "twice" else 0 if child.mode == "skipped" else 1)
        for mode, paths in inner_modes.items():
            modes[mode] += paths
        if child.mode in modes:
            modes[child.mode].append(name)
    return ([*order, path] if tree.marked or not path else order), modes


MODES = st.sampled_from(["plain", "plain", "plain", "skipped", "detached", "recomputed", "twice"])


def trees(children: st.SearchStrategy[tuple[Tree, ...]]) -> st.SearchStrategy[Tree]:
    return st.builds(
        Tree,
        marked=st.booleans(),
        size=st.integers(0, 5),
        trainable=st.sampled_from([True, True, False]),
        reshard=st.sampled_from([None, True, False]),
        mode=MODES,
        children=children,
    ).map(lambda tree: tree if tree.marked or tree.mode == "twice" else replace(tree, mode="plain"))


TREES = st.recursive(
    trees(st.just(())),
    lambda inner: trees(st.lists(inner, min_size=1, max_size=4).map(tuple)),
    max_leaves=8,
)


@given(TREES, st.sampled_from([(2,), (4,), (2, 2)]), st.sampled_from([1, 1, 2]))
@settings(deadline=None, max_examples=40)
def test_random_trees_call_what_is_predicted(tree: Tree, shape: tuple[int, ...], forwards: int) -> None:
    with fake_group(torch.Size(shape).numel()):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = fsdp_unit(Branch(tree))
        order, modes = step_of(tree)
        plan = plan_annotated(model, mesh)
        shard_annotated(model, mesh, check_ranks=False)
        calls: list[Call] = []
        with (
            warnings.catch_warnings(),
            observe(model) as observation,
            CountCollectives(calls.append),
        ):
            warnings.simplefilter("ignore")  # that a module which does nothing returns a view of its input
            loss = sum(model(torch.ones(2)).sum() for _ in range(forwards))
            if loss.requires_grad:
                loss.backward()
        step = Step(
            order=tuple(order) * forwards,
            without_gradient=tuple(modes["detached"]),
            recomputed=tuple(modes["recomputed"]),
        )
        predicted = plan.collectives(step)
        assert Counter(Call(c.kind, c.dtype, c.numel, c.ranks) for c in predicted) == Counter(calls)
        assert observation.disagreements == ()
        if forwards == 1:  # of two, the first alone is observed
            assert observation.collectives.counts() == predicted.counts()
