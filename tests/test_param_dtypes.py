"""Single parameters in a dtype of their own: within their unit, turned inside out, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from annotate_fsdp import (
    AnnotationError,
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
FP32 = torch.float32


class Mixer(nn.Module):
    """A raw parameter that computes in fp32 between two projections, as state-space models have."""

    def __init__(self, width: int = 8, more: bool = False) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, width, bias=False)
        self.A_log = nn.Parameter(torch.linspace(0.1, 1.0, width))
        if more:
            self.D = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.rest = nn.ModuleList([nn.Linear(width, width, bias=False)])
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(self.A_log.dtype)
        hidden = self.inputs(x).float() * torch.exp(-self.A_log.float())
        if hasattr(self, "D"):
            self.seen.add(self.D.dtype)
            hidden = hidden + self.D.float()
        return self.rest[0](hidden.to(x.dtype))


class Model(nn.Module):
    def __init__(self, storage: str = "fp32", more: bool = False, **listed: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mixers = nn.ModuleList([Mixer(more=more), Mixer(more=more)])
        if storage == "bf16":
            self.bfloat16()
        for mixer in self.mixers:
            fsdp_unit(mixer, param_dtypes=listed or {"A_log": FP32})
            mixer.A_log.data = mixer.A_log.data.float()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for mixer in self.mixers:
            x = x + mixer(x)
        return x.float().square().mean()


def layout(model: nn.Module, **options: Any) -> list[tuple[str, tuple[str, ...], str]]:
    return [
        (unit.name, unit.members, ", ".join(f"{p}: {d}" for p, d in unit.param_dtypes))
        for unit in plan_annotated(model, mp_policy=BF16, **options)
    ]


INSIDE_OUT = [
    ("mixers.0.inputs, mixers.0.rest.0", ("mixers.0.inputs.weight", "mixers.0.rest.0.weight"), ""),
    ("mixers.0", ("mixers.0.A_log",), ""),
    ("mixers.1.inputs, mixers.1.rest.0", ("mixers.1.inputs.weight", "mixers.1.rest.0.weight"), ""),
    ("mixers.1", ("mixers.1.A_log",), ""),
    ("(root)", ("embed.weight",), ""),
]


@pytest.mark.parametrize("lowering", ["unit", "group", "auto", "fold"])
def test_a_unit_is_turned_inside_out_where_it_stores_two_dtypes(lowering: str) -> None:
    assert layout(Model("bf16"), lowering=lowering) == INSIDE_OUT


def test_the_inner_unit_and_the_outer_one_cast_nothing_and_our_hooks_cast_instead() -> None:
    plan = plan_annotated(Model("bf16"), mp_policy=BF16)
    inner, outer = plan.units[:2]
    assert inner.policy == MixedPrecisionPolicy(torch.bfloat16, FP32, cast_forward_inputs=False)
    assert outer.policy == MixedPrecisionPolicy(FP32, FP32, cast_forward_inputs=False)
    assert (inner.reshard_after_forward, outer.reshard_after_forward) == (False, True)
    assert [str(cast) for cast in outer.casts] == ["mixers.0 (in bf16)"]
    assert outer.why == "turned inside out: mixers.0.A_log in fp32"


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("stored", [FP32, torch.bfloat16])
def test_without_a_policy_the_state_read_back_is_the_plan_too(
    fake_world: Callable[..., None], stored: torch.dtype, dtype: torch.dtype
) -> None:
    fake_world(2)
    model = Model("bf16", A_log=dtype)
    for mixer in model.mixers:
        mixer.A_log.data = mixer.A_log.data.to(stored)
    mesh = init_device_mesh("cpu", (2,))
    plan = plan_annotated(model, mesh, lowering="unit")
    assert plan.owner("mixers.0.A_log").reduce_dtypes == (dtype,)
    shard_annotated(model, mesh, lowering="unit")
    assert plan_of(model) == plan
    assert audit(model).ok


@pytest.mark.skipif(not CAN_FOLD, reason="torch < 2.15 computes a unit in one dtype")
def test_newer_torch_keeps_the_parameter_in_its_unit() -> None:
    assert [row for row in layout(Model()) if row[2]] == [
        (
            f"mixers.{i}",
            (f"mixers.{i}.A_log", f"mixers.{i}.inputs.weight", f"mixers.{i}.rest.0.weight"),
            f"mixers.{i}.A_log: torch.float32",
        )
        for i in range(2)
    ]


@pytest.mark.skipif(CAN_FOLD, reason="torch >= 2.15 computes a unit in several dtypes")
def test_older_torch_turns_the_unit_inside_out_in_every_storage() -> None:
    assert layout(Model()) == INSIDE_OUT


def errors_of(model: nn.Module) -> list[str]:
    with pytest.raises(AnnotationError) as raised:
        plan_annotated(model, mp_policy=BF16)
    return [str(finding) for finding in raised.value.findings]


def test_an_unlisted_parameter_beside_a_listed_one_is_named() -> None:
    first, second = errors_of(Model("bf16", more=True))
    assert first.startswith("AF213 error at mixers.0: param_dtypes={A_log: fp32} (")
    assert (
        "but it holds mixers.0.D beside them, which would compute in that dtype too. List D as well" in first
    )
    assert "mixers.1" in second
    assert layout(Model("bf16", more=True, A_log=FP32, D=FP32))[1] == (
        "mixers.0",
        ("mixers.0.A_log", "mixers.0.D"),
        "",
    )


def test_a_name_that_the_module_does_not_hold_is_an_error_with_the_close_one() -> None:
    first, _ = errors_of(Model(A_logs=FP32))
    assert first == (
        "AF212 error at mixers.0: param_dtypes={'A_logs': torch.float32}, but the module holds no parameter "
        "of that name. Did you mean A_log? Write one of A_log."
    )
    assert "inputs.weight" in errors_of(Model(**{"inputs.weight": FP32}))[0]


def test_parameters_that_no_forward_inside_reaches_are_named() -> None:
    model = Model("bf16")
    model.mixers[0].table = nn.ParameterList([torch.zeros(8, dtype=torch.bfloat16)])
    (only,) = errors_of(model)
    assert "but mixers.0.table.0 lie in no module inside it whose forward runs" in only


def test_an_entry_point_besides_forward_is_refused_where_the_unit_is_turned_inside_out() -> None:
    class Coder(Mixer):
        @fsdp_forward
        def encode(self, x: Tensor) -> Tensor:
            return self(x)

    model = Model("bf16")
    model.mixers[0] = fsdp_unit(Coder().bfloat16(), param_dtypes={"A_log": FP32})
    model.mixers[0].A_log.data = model.mixers[0].A_log.data.float()
    (only,) = errors_of(model)
    assert "but it has @fsdp_forward methods" in only


class Gate(nn.Linear):
    """A projection with another entry point, which its parent calls."""

    @fsdp_forward
    def gate(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self(x))


class Gated(Mixer):
    """Calls the entry point of a module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = Gate(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(self.A_log.dtype)
        return (self.inputs.gate(x).float() * self.A_log.float()).to(x.dtype) + self.rest[0](x)


def gate_gradients() -> bool:
    model = Model("bf16")
    model.mixers[0] = fsdp_unit(Gated().bfloat16(), param_dtypes={"A_log": FP32})
    model.mixers[0].A_log.data = model.mixers[0].A_log.data.float()
    shard_annotated(model, init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=BF16)
    model(torch.zeros(2, 4, dtype=torch.long)).backward()
    return all(parameter.grad is not None for parameter in model.mixers[0].parameters())


def test_an_entry_point_inside_a_unit_turned_inside_out_gathers(ranks: Pool) -> None:
    assert ranks.run(gate_gradients) == [True, True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"A_log": torch.int32},
        {1: FP32},
        "A_log",
        ["A_log"],
        {"A_log": "fp32"},
        ("A_log",),
        (1, 2),
        ((1, 2, 3),),
    ],
)
def test_a_value_that_is_no_dict_of_dtypes_is_refused_by_the_mark(wrong: Any) -> None:
    with pytest.raises(AnnotationError, match=r"param_dtypes=.*but it is no dict of parameter names"):
        fsdp_unit(nn.Linear(2, 2), param_dtypes=wrong)


def train(storage: str, marked: bool) -> tuple[list[Any], set[torch.dtype], tuple[str, ...], list[str]]:
    """Losses and gradients of some steps; unmarked, the reference casts A_log's use itself."""
    torch.manual_seed(0)
    model = Model(storage)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if not marked:  # the same arithmetic with every parameter gathered by the root, in its stored dtype
        for mixer in model.mixers:
            del mixer.__fsdp_unit__
            for linear in (mixer.inputs, mixer.rest[0]):
                fsdp_unit(linear, output_dtype=None)
            fsdp_unit(mixer, policy="fp32", casts_itself=True)
    shard_annotated(model, mesh, mp_policy=BF16, lowering="unit")
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(1 + dist.get_rank())
    record: list[Any] = []
    lines: tuple[str, ...] = ()
    for _ in range(3):
        with observe(model) as seen:
            loss = model(torch.randint(0, 16, (2, 4)))
            loss.backward()
        lines = seen.disagreements
        record += [loss.item(), *(p.grad.full_tensor() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    planned = [str(finding) for finding in audit(model).findings if finding.severity == "error"]
    assert plan_of(model).numel == sum(p.numel() for p in model.parameters())
    return record, model.mixers[0].seen, lines, planned


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.report(5)
def test_it_trains_with_the_numbers_of_single_units_and_the_parameter_in_fp32(
    ranks: Pool, storage: str
) -> None:
    marked, reference = ranks.run(train, storage, True), ranks.run(train, storage, False)
    for (ours, seen, lines, wrong), (theirs, _, _, _) in zip(marked, reference, strict=True):
        assert seen == {FP32}
        assert (lines, wrong) == ((), [])
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other
