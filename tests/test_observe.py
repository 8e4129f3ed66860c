"""What a real step did, held against the plan: it agrees when it should, and says no when it should not."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from annotate_fsdp import (
    AnnotationError,
    Observation,
    fsdp_forward,
    fsdp_unit,
    observe,
    plan_annotated,
    shard_annotated,
)
from annotate_fsdp.probes import tensors_in

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


class Norm(nn.Module):
    """Computes in fp32 and returns its input's dtype, as self-casting norms do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


@fsdp_unit
class Block(nn.Module):
    def __init__(self, size: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(size)
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class AddingBlock(Block):
    """A missing cast after its norm goes unnoticed, where a Linear would raise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.norm(x)


class Model(nn.Module):
    def __init__(
        self, norm: Callable[[int], nn.Module] = nn.LayerNorm, block: type[Block] = Block, blocks: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([block(8, norm) for _ in range(blocks)])
        self.head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


def default_island(size: int) -> nn.Module:
    return fsdp_unit(nn.LayerNorm(size), policy="fp32")


def casting_island(size: int) -> nn.Module:
    return fsdp_unit(Norm(size), policy="fp32", casts_itself=True)


def kept_island(size: int) -> nn.Module:
    """Its output stays fp32, and what follows it casts."""
    island = fsdp_unit(nn.LayerNorm(size), policy="fp32", output_dtype=torch.float32)
    return nn.Sequential(island, fsdp_unit(nn.Linear(size, size)))


def cast_lost_by_mark(size: int) -> nn.Module:
    return fsdp_unit(nn.LayerNorm(size), policy="fp32", output_dtype=None)


IDS = torch.arange(6)


def sharded(norm: Callable[[int], nn.Module], **options: Any) -> Model:
    torch.manual_seed(0)
    return shard_annotated(
        Model(norm, **options), init_device_mesh("cpu", _world()), mp_policy=BF16, lowering="unit"
    )


def _world() -> tuple[int]:
    return (torch.distributed.get_world_size(),)


def step(model: nn.Module) -> torch.Tensor:
    loss = model(IDS).float().square().mean()
    loss.backward()
    return loss.detach()


def observe_step(model: nn.Module, plan: Any = None, run: Callable[[nn.Module], Any] = step) -> Observation:
    with observe(model, plan) as observation:
        run(model)
    return observation


def hooks_of(model: nn.Module) -> list[Any]:
    """Everything a watcher could have left on a module or on its FSDP state."""
    found: list[Any] = []
    for module in model.modules():
        found += [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks]
        if isinstance(module, FSDPModule):
            found += list(vars(module._get_fsdp_state()))
    return found


def report(observation: Observation) -> dict[str, Any]:
    return {**observation.to_dict(), "text": str(observation)}


# -- agreement -------------------------------------------------------------------------------------


def agree(norm: Callable[[int], nn.Module], wrapped: bool) -> tuple[dict[str, Any], list[str], bool]:
    torch.manual_seed(0)
    model = Model(norm)
    if wrapped:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    shard_annotated(model, init_device_mesh("cpu", _world()), mp_policy=BF16, lowering="unit")
    before = hooks_of(model)
    observation = observe_step(model)
    with warnings.catch_warnings(), CommDebugMode() as counted:
        warnings.simplefilter("ignore")  # it makes views of all outputs, and FSDP2 warns of them
        step(model)
    kinds = [
        str(op).rpartition(".")[2].strip("_") for op, n in counted.get_comm_counts().items() for _ in range(n)
    ]
    return report(observation), kinds, hooks_of(model) == before


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("norm", [default_island, casting_island, kept_island])
def test_a_marked_model_agrees_with_its_plan(ranks: Any, norm: Any, wrapped: bool) -> None:
    for result, kinds, is_clean in ranks.run(agree, norm, wrapped):
        assert result["agrees"], result["disagreements"]
        assert is_clean
        units = {unit["paths"][0]: unit for unit in result["units"]}
        island = "blocks.0.norm.0" if norm is kept_island else "blocks.0.norm"
        assert units[island]["param_dtypes"] == ["fp32"]
        assert units[island]["input_dtypes"] == (["bf16"] if norm is casting_island else ["fp32"])
        assert units[island]["output_dtypes"] == (["fp32"] if norm is kept_island else ["bf16"])
        assert units["blocks.0"]["param_dtypes"] == units["blocks.0"]["output_dtypes"] == ["bf16"]
        assert units["blocks.0"]["calls"] == units[island]["calls"] == 1
        assert units[""]["input_dtypes"] == []
        assert units[island]["recomputes"] == units["blocks.0"]["recomputes"] == int(wrapped)
        assert result["collectives"] == {
            "all_gather": kinds.count("allgather_base"),
            "reduce_scatter": kinds.count("reduce_scatter_base"),
            "all_reduce": 0,
        }
        assert result["collectives"] == result["planned_collectives"]
        assert result["backward"]
        assert json.loads(json.dumps(result)) == result
        assert max(map(len, result["text"].splitlines())) < 100
        rounded = [note for note in result["notes"] if "rounded" in note]
        assert bool(rounded) == (norm is default_island)


def replicated() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return report(observe_step(shard_annotated(Model(default_island), mesh, mp_policy=BF16, lowering="unit")))


def test_replicas_agree_and_their_all_reduces_are_counted(ranks: Any) -> None:
    for result in ranks.run(replicated, world=4):
        assert result["agrees"], result["disagreements"]
        assert result["collectives"] == {"all_gather": 9, "reduce_scatter": 5, "all_reduce": 5}
        assert result["collectives"] == result["planned_collectives"]


def test_the_report_reads_as_a_table(ranks: Any) -> None:
    (result, _, _), _ = ranks.run(agree, default_island, False)
    assert result["text"] == "\n".join(
        [
            "Model, one step observed: agrees with the plan",
            "",
            "collectives: 9 all-gather (plan: 9), 5 reduce-scatter (plan: 5), 0 all-reduce (plan: 0)",
            f"{'unit':35} n   class          calls again params inputs    returned  coll",
            " ".join("-" * width for width in (35, 3, 14, 5, 5, 6, 9, 9, 4)),
            f"{'blocks.{0-1}.norm':35} 2   LayerNorm      1     0     fp32   fp32      fp32>bf16 3",
            f"{'blocks.{0-1}':35} 2   Block          1     0     bf16   bf16      bf16      3",
            f"{'(root)':35} 1   Model          1     0     bf16   -         bf16      2",
            "",
            "notes",
            "  - blocks.0.norm, blocks.1.norm: returned fp32 and were rounded to bf16 at the unit's "
            "boundary;",
            "    write output_dtype=torch.float32 where that is not meant",
        ]
    )


# -- planted faults --------------------------------------------------------------------------------


def fault(kind: str) -> dict[str, Any]:
    """Shard by hand, with a fault, a model whose plan comes from marks."""
    torch.manual_seed(0)
    model = Model(default_island, AddingBlock)
    plan = plan_annotated(copy.deepcopy(model), world_size=_world()[0], mp_policy=BF16, lowering="unit")
    mesh = init_device_mesh("cpu", _world())
    island = MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16, True)
    for index, block in enumerate(model.blocks):
        policy = island
        if index == 1 and kind == "dtype":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16, True)
        if index == 1 and kind == "cast":
            policy = FP32
        if index == 1 and kind == "input":
            policy = MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16, False)
        if index == 1 and kind == "group":
            fully_shard([block.norm, block.linear], mesh=mesh, mp_policy=policy)
        elif not (index == 1 and kind == "missing"):
            fully_shard(block.norm, mesh=mesh, mp_policy=policy)
        if index == 1 and kind == "extra":
            fully_shard(block.linear, mesh=mesh, mp_policy=BF16)
        fully_shard(block, mesh=mesh, mp_policy=BF16)
    if kind != "root":
        fully_shard(model, mesh=mesh, mp_policy=BF16)

    def run(model: nn.Module) -> None:
        if kind == "input":
            model.blocks[1].norm.float().register_forward_pre_hook(lambda m, args: None)
        if kind == "root":
            model.blocks[1](torch.ones(2, 8)).sum().backward()
        else:
            step(model)

    return report(observe_step(model, plan, run))


STATE = "in the plan (here) and in FSDP2's state (there)"
ISLAND = (
    "MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)"
)
INPUT = f"the plan casts its inputs to fp32, but forward saw bf16. Shard it with {ISLAND}"
OUTPUT = f"the plan casts its output to bf16, but it returned fp32. Shard it with {ISLAND}"


@pytest.mark.parametrize(
    ("kind", "path", "expected"),
    [
        (
            "dtype",
            "blocks.1.norm",
            [
                f"{STATE}, param_dtype is fp32 here, bf16 there. Shard it with {ISLAND}, "
                "as shard_annotated does",
                "the plan computes in fp32, but inside forward blocks.1.norm.weight, blocks.1.norm.bias were "
                f"bf16. Shard it with {ISLAND}",
                INPUT,
            ],
        ),
        (
            "cast",
            "blocks.1.norm",
            [
                f"{STATE}, output_dtype is bf16 here, None there. Shard it with {ISLAND}, "
                "as shard_annotated does",
                OUTPUT,
            ],
        ),
        (
            "missing",
            "blocks.1.norm",
            [
                f"the plan makes a unit of LayerNorm ({ISLAND}), but FSDP2 has none here, and inside "
                "forward its parameters were bf16. Shard it with shard_annotated, or by fully_shard before "
                "its parent"
            ],
        ),
        (
            "extra",
            "blocks.1.linear",
            [
                "the plan has no unit here, but FSDP2 made one of Linear. Mark it with fsdp_unit, or do not "
                "shard it by hand"
            ],
        ),
        (
            "group",
            "blocks.1.norm",
            [
                "the plan makes one unit of it, but FSDP2 has [blocks.1.norm, blocks.1.linear]. Shard it "
                "with shard_annotated, or pass these modules to fully_shard in one list"
            ],
        ),
        ("input", "blocks.1.norm", [INPUT]),
        (
            "root",
            "(root)",
            [
                "the plan makes a unit of Model (MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                "reduce_dtype=torch.float32)), but FSDP2 has none here. Shard it with shard_annotated, or by "
                "fully_shard before its parent"
            ],
        ),
    ],
)
def test_a_planted_fault_is_named_by_path(ranks: Any, kind: str, path: str, expected: list[str]) -> None:
    for result in ranks.run(fault, kind):
        assert not result["agrees"]
        found = result["disagreements"]
        assert {f"{path}: {sentence}" for sentence in expected} <= set(found), found
        assert "DISAGREES with the plan" in result["text"]


def no_fault() -> dict[str, Any]:
    return fault("none")


def test_the_same_layout_by_hand_agrees(ranks: Any) -> None:
    for result in ranks.run(no_fault):
        assert result["disagreements"] == []


def lost_cast(norm: Callable[[int], nn.Module]) -> list[Any]:
    observation = observe_step(sharded(norm, block=AddingBlock, blocks=1))
    return [observation.disagreements, observation.notes]


def test_a_block_whose_output_an_inner_unit_changed_is_named(ranks: Any) -> None:
    for disagreements, _ in ranks.run(lost_cast, cast_lost_by_mark):
        assert disagreements == (
            "blocks.0: the plan computes in bf16, but it returned fp32 because blocks.0.norm inside it "
            "returned fp32. Write output_dtype=torch.bfloat16 on it",
        )


def crash() -> tuple[str, Any]:
    """A norm that nobody casts back feeds a Linear, which refuses."""
    model = sharded(cast_lost_by_mark)
    plan = plan_annotated(Model(default_island), world_size=_world()[0], mp_policy=BF16, lowering="unit")
    with pytest.raises(RuntimeError) as caught, observe(model, plan) as observation:
        step(model)
    return str(caught.value), observation.disagreements


def test_a_step_that_crashed_is_explained(ranks: Any) -> None:
    for error, disagreements in ranks.run(crash):
        assert "must have the same dtype" in error
        assert f"blocks.0.norm: {OUTPUT}" in disagreements


def unsharded() -> str:
    with pytest.raises(AnnotationError) as caught, observe(Model()):
        pass
    return str(caught.value)


def test_a_model_that_is_not_sharded_is_refused() -> None:
    assert "no module of the model is sharded" in unsharded()


# -- what is recorded ------------------------------------------------------------------------------


def nothing_run() -> tuple[bool, Any, str]:
    observation = observe_step(sharded(default_island), run=lambda model: None)
    return observation.agrees, observation.disagreements, str(observation)


def test_without_a_forward_it_cannot_agree(ranks: Any) -> None:
    for agrees, disagreements, text in ranks.run(nothing_run):
        assert not agrees
        assert disagreements == (
            "nothing was recorded, so nothing is known. Run a forward inside `with observe(model)`",
        )
        assert "nothing was recorded" in text


def several_steps() -> tuple[Any, ...]:
    model = sharded(default_island)

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(IDS)

    def train(model: nn.Module) -> None:
        for _ in range(3):
            step(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # an all-reduce that is not the step's

    def accumulate(model: nn.Module) -> None:
        (model(IDS).sum() + model(IDS).sum()).backward()

    return tuple(
        (o.agrees, o.backward, o.unit("blocks.0").calls, o.collectives.counts()["all_reduce"], o.notes)
        for o in (observe_step(model, run=run) for run in (train, evaluate, accumulate))
    )


def test_only_the_first_forward_and_backward_are_recorded(ranks: Any) -> None:
    for train, evaluate, accumulate in ranks.run(several_steps):
        assert train[:4] == (True, True, 1, 0)
        assert evaluate[:4] == (True, False, 1, 0)
        assert accumulate[:4] == (True, False, 1, 0)
        assert "no backward was recorded" in evaluate[4]


class Looping(Model):
    """Runs its first block twice and its last one never."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.blocks[0](self.blocks[0](x))
        return self.head(checkpoint(self.blocks[1], x, use_reentrant=False))


def loop() -> tuple[Any, ...]:
    model = Looping(default_island, blocks=3)
    shard_annotated(model, init_device_mesh("cpu", _world()), mp_policy=BF16, lowering="unit")
    observation = observe_step(model)
    calls = {unit.path: (unit.calls, unit.recomputes) for unit in observation.units}
    return observation.agrees, calls, observation.notes


def test_calls_and_recomputations_are_counted_apart(ranks: Any) -> None:
    for agrees, calls, notes in ranks.run(loop):
        assert agrees
        assert calls["blocks.0"] == calls["blocks.0.norm"] == (2, 0)
        assert calls["blocks.1"] == calls["blocks.1.norm"] == (1, 1)
        assert calls["blocks.2"] == calls["blocks.2.norm"] == (0, 0)
        assert "not run: blocks.2.norm, blocks.2" in notes


class Encoder(Model):
    @fsdp_forward
    def encode(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.embed(ids) * scale)


def encode(by_hand: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Encoder(default_island, blocks=1)
    plan = plan_annotated(copy.deepcopy(model), world_size=_world()[0], mp_policy=BF16, lowering="unit")
    mesh = init_device_mesh("cpu", _world())
    if by_hand:  # with a root that computes in fp32
        fully_shard(
            model.blocks[0].norm,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16, True),
        )
        fully_shard(model.blocks[0], mesh=mesh, mp_policy=BF16)
        fully_shard(model, mesh=mesh, mp_policy=FP32)
        register_fsdp_forward_method(model, "encode")
    else:
        shard_annotated(model, mesh, mp_policy=BF16, lowering="unit")
    before = hooks_of(model)

    def run(model: Any) -> None:
        model.encode(IDS, torch.ones(1)).float().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    observation = observe_step(model, plan, run)
    root = observation.unit("")
    facts = (root.calls, root.input_dtypes, root.param_dtypes, root.output_dtypes, root.sharded)
    rest = (observation.backward, observation.collectives.counts()["all_reduce"], hooks_of(model) == before)
    return facts, rest, observation.disagreements


def test_a_registered_forward_method_is_an_entry_too(ranks: Any) -> None:
    bf16 = (torch.bfloat16,)
    for facts, rest, disagreements in ranks.run(encode, False):
        assert facts == (1, bf16, bf16, bf16, ())
        assert rest == (True, 0, True)
        assert disagreements == ()


def test_a_wrong_dtype_inside_a_forward_method_is_named(ranks: Any) -> None:
    for _, _, disagreements in ranks.run(encode, True):
        assert (
            "(root): the plan computes in bf16, but inside forward embed.weight, head.weight, head.bias were "
            "fp32. Shard it with MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        ) in disagreements


class Tied(Model):
    def __init__(self) -> None:
        super().__init__(default_island, blocks=1)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        fsdp_unit(self.embed)
        fsdp_unit(self.head)


def tied() -> tuple[Any, ...]:
    model = shard_annotated(Tied(), init_device_mesh("cpu", _world()), mp_policy=BF16, lowering="unit")
    observation = observe_step(model)
    unit = observation.unit("head")
    return observation.agrees, observation.disagreements, unit.paths, unit.calls, unit.param_dtypes


def test_modules_that_share_a_unit_are_one_observation(ranks: Any) -> None:
    for agrees, disagreements, paths, calls, dtypes in ranks.run(tied):
        assert agrees, disagreements
        assert (paths, calls, dtypes) == (("embed", "head"), 2, (torch.bfloat16,))


def compiled() -> tuple[Any, ...]:
    model = Model(default_island)
    for block in model.blocks:
        block.compile(backend="eager")
    shard_annotated(model, init_device_mesh("cpu", _world()), mp_policy=BF16, lowering="unit")
    observation = observe_step(model)
    with warnings.catch_warnings():  # dynamo looks at .grad of everything
        warnings.simplefilter("ignore")
        step(model)
    again = observe_step(model)
    assert again.agrees, again.disagreements
    return observation.agrees, observation.unit("blocks.0.norm").param_dtypes, observation.notes


def test_compiled_modules_are_observed_uncompiled(ranks: Any) -> None:
    for agrees, dtypes, notes in ranks.run(compiled):
        assert agrees
        assert dtypes == (torch.float32,)
        assert "compiled modules ran uncompiled while they were observed" in notes


def raising() -> tuple[bool, bool, bool]:
    model = sharded(default_island)
    before = hooks_of(model)

    class Stop(Exception):
        pass

    try:
        with observe(model) as observation:
            model(IDS)
            raise Stop
    except Stop:
        pass
    clean = hooks_of(model) == before
    model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    before = hooks_of(model)
    try:
        with observe(model) as observation:
            model(IDS)
    except ZeroDivisionError:
        pass
    return clean, hooks_of(model) == before, observation.unit("blocks.0").calls == 1


def test_an_exception_inside_leaves_no_hooks(ranks: Any) -> None:
    assert ranks.run(raising) == [(True, True, True)] * 2


class WritesIntoOutputs(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x += self.blocks[0](x.clone())
        return self.head(x)


def same_bits() -> tuple[torch.Tensor, torch.Tensor]:
    losses = []
    for watch in (True, False):
        torch.manual_seed(0)
        model = WritesIntoOutputs(default_island, blocks=1)
        shard_annotated(model, init_device_mesh("cpu", _world()), mp_policy=BF16, lowering="unit")
        if watch:
            with observe(model):
                step(model)
        else:
            step(model)
        grad = model.blocks[0].linear.weight.grad
        losses.append(torch.cat([grad.full_tensor().flatten(), step(model).view(1)]))
    return losses[0], losses[1]


def test_observing_changes_no_value(ranks: Any) -> None:
    for observed, alone in ranks.run(same_bits):
        assert torch.equal(observed, alone)


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    more: Any = None


def test_tensors_are_found_where_fsdp_casts_them() -> None:
    x = torch.ones(1)
    itself: list[Any] = [x]
    itself.append(itself)
    for value in (x, [x], (x,), {"a": {"b": x}}, Batch(x), [Batch(torch.ones(1), {"c": x})], itself):
        assert any(found is x for found in tensors_in(value))
    assert list(tensors_in([1, "a", None, Batch])) == []
