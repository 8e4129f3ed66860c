"""The rules: for each a bad case with its whole message, and a good case beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import fake_group
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard

from annotate_fsdp import (
    AnnotationError,
    audit,
    fsdp_forward,
    fsdp_ignore,
    fsdp_unit,
    plan_annotated,
    shard_annotated,
)
from annotate_fsdp.catalogue import CATALOGUE
from annotate_fsdp.cli import main

TESTS = Path(__file__).parent


@fsdp_unit
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Holder(nn.Module):
    """Parameters and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    @fsdp_forward
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.angles


class SelfMadeTable(Table):
    def reset_buffers(self) -> None:
        self.angles.copy_(torch.arange(4.0))


def blocks(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(Block(), Block(), *more)


def findings(model: nn.Module, **options: Any) -> list[str]:
    return [str(finding) for finding in audit(model, **options).findings]


@pytest.mark.report(63)
def test_a_model_without_a_mark_would_be_one_unit() -> None:
    assert findings(nn.Sequential(nn.Linear(4, 4))) == [
        "AF109 error at the root module: no module carries a mark, but all 20 parameters would be gathered "
        "at once, as one unit. Mark the repeated block's class with @fsdp_unit."
    ]
    assert findings(nn.Sequential(fsdp_unit(nn.Linear(4, 4)))) == []


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList([nn.Linear(4, 4)]),
        nn.ModuleDict({"a": nn.Linear(4, 4)}),
        nn.ParameterList([nn.Parameter(torch.ones(4))]),
        nn.ParameterDict({"a": nn.Parameter(torch.ones(4))}),
        Holder(),
    ],
    ids=lambda container: type(container).__name__,
)
@pytest.mark.report(55)
def test_a_mark_on_what_has_no_forward_is_named(container: nn.Module) -> None:
    name = type(container).__name__
    model = blocks()
    model[1].extra = fsdp_unit(container)
    assert findings(model) == [
        f"AF201 error at 1.extra: a unit (instance) on {name}, but {name} does not define forward, so "
        "nothing would gather its parameters. Mark the modules inside it, or the module that uses it."
    ]
    del container.__fsdp_unit__
    assert findings(model) == []


def test_a_container_with_a_forward_of_its_own_may_be_a_unit() -> None:
    class Stack(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)

    assert findings(fsdp_unit(Stack([nn.Linear(4, 4)]))) == []


def test_a_root_without_forward_may_own_nothing() -> None:
    root = Holder()
    root.block = Block()
    assert findings(root) == [
        "AF201 error at the root module: a unit (default: the root is always a unit) on Holder, but Holder "
        "does not define forward, so nothing would gather its parameters. Shard the module that calls it."
    ]
    del root.weight
    assert findings(root) == []
    assert len(findings(nn.ModuleList([Block()]))) == 1


@pytest.mark.report(80)
def test_a_scalar_deep_down_is_named_with_its_whole_path() -> None:
    model = blocks()
    model[1].norm.scale = nn.Parameter(torch.tensor(1.0))
    assert findings(model) == [
        "AF202 error at 1.norm.scale: a 0-dim parameter in unit 1, but FSDP2 shards dimension 0, which it "
        "does not have. Store it with shape [1], or put it into ignored_params and keep it frozen."
    ]
    model[1].norm.scale = nn.Parameter(torch.ones(1))
    assert findings(model) == []


def test_a_parameter_that_is_not_contiguous_is_named() -> None:
    model = blocks()
    weight = nn.Parameter(torch.ones(2, 4).t())
    model[1].linear.extra = weight
    assert findings(model) == [
        "AF211 error at 1.linear.extra: a parameter of shape [4, 2] with strides [1, 4], but FSDP2 cannot "
        "shard memory that is not contiguous. Store it as nn.Parameter(parameter.detach().contiguous())."
    ]
    model[1].linear.extra = nn.Parameter(weight.detach().contiguous())
    assert findings(model) == []


def test_a_dtype_that_torch_does_not_compute_in_is_named_wherever_it_was_said() -> None:
    float8 = torch.float8_e4m3fn
    end = "but torch does not compute in it. Write torch.bfloat16, torch.float16 or torch.float32."
    model = blocks(fsdp_unit(nn.Linear(4, 4), policy=MixedPrecisionPolicy(torch.bfloat16, float8)))
    fsdp_unit(model[0], output_dtype=float8)
    assert findings(model) == [
        f"AF503 error at 0: output_dtype=torch.float8_e4m3fn (instance), {end}",
        f"AF503 error at 2: reduce_dtype=torch.float8_e4m3fn (instance), {end}",
    ]
    policy = MixedPrecisionPolicy(param_dtype=torch.int32)
    assert {text[:5] for text in findings(blocks(), mp_policy=policy)} == {"AF503"}


def test_a_callable_policy_is_named_alike_on_every_rank() -> None:
    def nothing(base: MixedPrecisionPolicy) -> None:
        return None

    model = blocks()
    fsdp_unit(model[0], policy=nothing)  # type: ignore[arg-type]  # the mistake under test
    (text,) = findings(model)
    assert "nothing (instance), but the callable returned a NoneType" in text
    assert "0x" not in text


@pytest.mark.report(1)
def test_two_trainable_storage_dtypes_in_one_unit_are_named() -> None:
    model = blocks()
    model[0].norm.bfloat16()
    assert findings(model) == [
        "AF203 error at 0.norm.weight: trainable bf16 in unit 0, but the unit stores trainable parameters "
        "of 2 dtypes: 2 bf16 such as 0.norm.weight; 2 fp32 such as 0.linear.weight. "
        "Mark 0.norm as a unit of its own, or store all in one dtype."
    ]
    model[0].norm.requires_grad_(False)
    assert [text[:5] for text in findings(model)] == ["AF507"]  # a frozen parameter is not reduced
    model[0].norm.requires_grad_(True)
    fsdp_unit(model[0].norm)
    assert findings(model) == []


def test_a_unit_that_owns_nothing_is_mentioned() -> None:
    assert findings(blocks(fsdp_unit(nn.ReLU()))) == [
        "AF207 info at 2: a unit (instance), but it has no parameters of its own: it only casts its inputs "
        "and outputs. Take the mark away with fsdp_off if that is not meant."
    ]


@pytest.mark.report(70, 84)
def test_an_ignored_trainable_parameter_needs_somebody_who_reduces_it() -> None:
    model = blocks()
    fsdp_ignore(model[1].norm)
    expected = (
        "{} error at 1.norm.{}: {}, but it is trainable and nobody reduces its gradient, so every rank "
    )
    expected += "would train its own. Freeze it, or say fsdp_ignore(module, synced=True) if somebody else "
    expected += "reduces it."
    names = ("weight", "bias")
    assert findings(model) == [expected.format("AF208", name, "fsdp_ignore") for name in names]
    assert findings(blocks()) == []
    fsdp_ignore(model[1].norm, synced=True)
    assert findings(model) == []
    del model[1].norm.__fsdp_unit__
    ignored = set(model[1].norm.parameters())
    assert findings(model, ignored_params=ignored) == [
        expected.format("AF208", name, "in ignored_params") for name in names
    ]
    model[1].norm.requires_grad_(False)
    assert findings(model, ignored_params=ignored) == []


@pytest.mark.report(50)
def test_an_entry_point_of_a_module_that_is_no_unit_is_named() -> None:
    assert findings(blocks(Encoder())) == [
        "AF209 error at 2: @fsdp_forward on Encoder.encode, but the module is no unit, so calling it would "
        "gather nothing. Mark the class with @fsdp_unit, or mark the enclosing unit's method that calls it."
    ]
    assert findings(blocks(fsdp_unit(Encoder()))) == []


def test_an_entry_point_that_the_enclosing_unit_calls_is_fine() -> None:
    @fsdp_unit
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder.encode(x)

    assert findings(nn.Sequential(Outer())) == []


@pytest.mark.report(86)
def test_a_buffer_that_no_state_dict_holds_is_mentioned() -> None:
    with torch.device("meta"):
        model, good = blocks(Table()), blocks(SelfMadeTable())
    assert findings(model) == [
        "AF601 info at 2.angles: a non-persistent buffer on meta, but no state dict holds it, and "
        "materializing leaves it undefined. Define reset_buffers() on Table, or compute it in "
        "materialize(init=...)."
    ]
    assert findings(good) == []
    assert findings(blocks(Table())) == []  # it has its values


@pytest.mark.report(4)
def test_weights_stored_below_their_compute_dtype_are_a_warning() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    model = blocks()
    assert findings(model, mp_policy=policy) == []
    model[1].linear.bfloat16()
    model[1].norm.bfloat16()
    assert findings(model, mp_policy=policy) == [
        "AF501 warning at 1.norm.weight: fp32 compute in unit 1, but it is stored in bf16 and 3 more, so the "
        "optimizer loses small updates. Store it in fp32 before sharding: module.to(torch.float32)."
    ]


def meshes() -> dict[str, tuple[DeviceMesh, DataParallelMeshDims | None]]:
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    return {
        "3-D": (cube, None),
        "unnamed 2-D": (init_device_mesh("cpu", (2, 4)), None),
        "unknown axis": (cube, DataParallelMeshDims(shard="d")),
        "an axis twice": (cube, DataParallelMeshDims(shard="a", replicate="a")),
        "order": (cube, DataParallelMeshDims(shard=("c", "b"))),
        "nothing to shard over": (cube, DataParallelMeshDims(replicate="a")),
        "named 2-D": (init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s")), None),
        "named axes": (cube, DataParallelMeshDims(shard="a", replicate="b")),
    }


AXES = 'Pass dp_mesh_dims=DataParallelMeshDims(shard="...", replicate="...").'


def test_meshes_that_fsdp_cannot_shard_over_are_named() -> None:
    expected = {
        "3-D": [
            "AF401 error at the root module: a mesh of 3 axes ('a', 'b', 'c'), but FSDP2 shards over one "
            f"axis or two. {AXES}"
        ],
        "unnamed 2-D": [
            "AF402 error at the root module: a mesh of 2 axes (unnamed), but a 2-D mesh replicates over axis "
            '0 and shards over axis 1, which must be named. Pass mesh_dim_names=("replicate", "shard") to '
            "init_device_mesh."
        ],
        "unknown axis": [
            f"AF403 error at the root module: dp_mesh_dims={DataParallelMeshDims(shard='d')} on a mesh of 3 "
            f"axes ('a', 'b', 'c'), but 'd' is not among its axes. {AXES}"
        ],
        "an axis twice": [
            f"AF403 error at the root module: dp_mesh_dims={DataParallelMeshDims(shard='a', replicate='a')} "
            f"on a mesh of 3 axes ('a', 'b', 'c'), but it names an axis twice. {AXES}"
        ],
        "order": [
            f"AF403 error at the root module: dp_mesh_dims={DataParallelMeshDims(shard=('c', 'b'))} on a "
            f"mesh of 3 axes ('a', 'b', 'c'), but ('c', 'b') is not in the order of its axes. {AXES}"
        ],
        "nothing to shard over": [
            f"AF403 error at the root module: dp_mesh_dims={DataParallelMeshDims(replicate='a')} on a mesh "
            f"of 3 axes ('a', 'b', 'c'), but it names no axis to shard over. {AXES}"
        ],
        "named 2-D": [],
        "named axes": [],
    }
    with fake_group(8):
        assert {
            name: findings(blocks(), mesh=mesh, dp_mesh_dims=dims) for name, (mesh, dims) in meshes().items()
        } == expected


def state_of(model: nn.Module) -> list[Any]:
    """Everything that sharding changes: classes, attributes, parameter objects."""
    return [
        (type(module), sorted(vars(module)), [id(p) for p in module.parameters(recurse=False)])
        for module in model.modules()
    ]


def string_for_a_dtype(model: nn.Sequential) -> Callable[[], None]:
    model[0].norm.__fsdp_dtype__ = "float32"
    return lambda: delattr(model[0].norm, "__fsdp_dtype__")


def unknown_policy(model: nn.Sequential) -> Callable[[], None]:
    fsdp_unit(model[0].norm, policy="fp23")
    return lambda: vars(model[0].norm).pop("__fsdp_unit__", None)


def unknown_attribute(model: nn.Sequential) -> Callable[[], None]:
    model[1].__fsdp_dytpe__ = torch.float32
    return lambda: delattr(model[1], "__fsdp_dytpe__")


def two_marks(model: nn.Sequential) -> Callable[[], None]:
    fsdp_unit(model[1].norm, policy="bf16").__fsdp_dtype__ = torch.float32
    return lambda: delattr(model[1].norm, "__fsdp_dtype__")


def scalar(model: nn.Sequential) -> Callable[[], None]:
    model[1].linear.scale = nn.Parameter(torch.tensor(2.0))
    return lambda: delattr(model[1].linear, "scale")


def storage(model: nn.Sequential) -> Callable[[], None]:
    model[0].linear.bfloat16()
    return lambda: model[0].linear.float()  # type: ignore[return-value]  # only called


def container(model: nn.Sequential) -> Callable[[], None]:
    model[1].extra = fsdp_unit(nn.ModuleList([nn.Linear(4, 4)]))
    return lambda: delattr(model[1], "extra")


def contradicting_tie(model: nn.Sequential) -> Callable[[], None]:
    fsdp_unit(model[0].linear, policy="fp32")
    fsdp_unit(model[1].linear, policy="bf16")
    model[0].linear.weight = model[1].linear.weight
    return lambda: setattr(model[0].linear, "weight", nn.Parameter(torch.ones(4, 4)))


def ignored(model: nn.Sequential) -> Callable[[], None]:
    fsdp_ignore(model[1].norm)
    return lambda: vars(model[1].norm).pop("__fsdp_unit__", None)


MISTAKES = {
    "AF103": string_for_a_dtype,
    "AF108": unknown_policy,
    "AF106": unknown_attribute,
    "AF105": two_marks,
    "AF202": scalar,
    "AF203": storage,
    "AF201": container,
    "AF204": contradicting_tie,
    "AF208": ignored,
}


@pytest.mark.parametrize("code", MISTAKES)
@pytest.mark.report(73)
def test_a_mistake_leaves_the_model_untouched_and_a_corrected_call_works(code: str) -> None:
    with fake_group(2):
        mesh, model = init_device_mesh("cpu", (2,)), blocks()
        correct = MISTAKES[code](model)
        before = state_of(model)
        with pytest.raises(AnnotationError) as error:
            shard_annotated(model, mesh)
        assert {finding.code for finding in error.value.findings} == {code}
        assert all(finding.path for finding in error.value.findings)
        assert state_of(model) == before
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
        correct()
        shard_annotated(model, mesh)
        assert isinstance(model, FSDPModule)


@pytest.mark.parametrize(("first", "second"), [("AF103", "AF202"), ("AF204", "AF201"), ("AF106", "AF208")])
def test_all_mistakes_are_listed_at_once(first: str, second: str) -> None:
    model = blocks()
    MISTAKES[first](model)
    MISTAKES[second](model)
    with pytest.raises(AnnotationError) as error:
        plan_annotated(model)
    assert {finding.code for finding in error.value.findings} == {first, second}
    assert str(error.value).startswith(f"{len(error.value.findings)} findings; nothing was sharded\n")


@pytest.mark.report(69)
def test_a_model_sharded_in_part_is_an_error_unless_it_is_to_be_kept() -> None:
    with fake_group(2):
        mesh, model = init_device_mesh("cpu", (2,)), blocks()
        fully_shard(model[0], mesh=mesh)
        with pytest.raises(AnnotationError) as error:
            shard_annotated(model, mesh)
        assert [str(finding) for finding in error.value.findings] == [
            "AF301 error at 0: FSDP2 was applied before to 0, but a module can be sharded only once. "
            'Pass existing="keep" to leave these units as they are, or build the model again.'
        ]
        assert not isinstance(model[1], FSDPModule)
        shard_annotated(model, mesh, existing="keep")
        assert isinstance(model, FSDPModule)
        again = plan_annotated(model, mesh, existing="keep")
        assert {unit.lowering for unit in again} == {"kept"}


def test_a_checkpoint_wrapped_block_is_one_unit() -> None:
    model = nn.Sequential(checkpoint_wrapper(Block()), Block())
    assert [unit.paths for unit in plan_annotated(model)] == [("0",), ("1",), ("",)]
    assert findings(model) == []


def written(files: Iterable[Path]) -> set[str]:
    return {code for file in files for code in re.findall(r"AF\d{3}", file.read_text())}


def test_every_code_is_in_the_catalogue_and_held_by_a_test() -> None:
    package = Path(audit.__code__.co_filename).parent
    listed = [rule.code for rule in CATALOGUE]
    assert listed == sorted(set(listed))
    assert written(set(package.rglob("*.py")) - {package / "catalogue.py"}) == set(listed)
    assert set(listed) <= written(TESTS.glob("test_*.py"))


def test_every_finding_is_as_severe_as_the_catalogue_says() -> None:
    severity = {rule.code: rule.severity for rule in CATALOGUE}
    found = 0
    for file in Path(audit.__code__.co_filename).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Finding":
                code, severe = call.args[:2]
                assert isinstance(severe, ast.Constant), file
                codes = [each.value for each in ast.walk(code) if isinstance(each, ast.Constant)]
                known = [each for each in codes if each in severity]
                assert all(severity[each] == severe.value for each in known), (file, codes)
                found += 1
    assert found > 50


def test_the_readme_lists_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings"]) == 0
    assert capsys.readouterr().out in (TESTS.parent / "README.md").read_text()


def test_an_error_names_once_what_is_wrong_in_every_layer() -> None:
    layers = [Block() for _ in range(91)]
    for layer in layers:
        layer.norm.scale = nn.Parameter(torch.tensor(1.0))
    model = nn.Sequential(*layers[:90], nn.Sequential(layers[90]))
    with pytest.raises(AnnotationError) as error:
        plan_annotated(model)
    assert len(error.value.findings) == 91
    head, folded, single = str(error.value).splitlines()
    assert head == "91 findings; nothing was sharded"
    assert folded.startswith("  AF202 error at 0.norm.scale: a 0-dim parameter in unit 0, but FSDP2 ")
    assert folded.endswith(" keep it frozen. (and 89 more like it)")
    assert single.startswith("  AF202 error at 90.0.norm.scale: a 0-dim parameter in unit 90.0, but FSDP2 ")
    assert "like it" not in single


def test_mixed_storage_inside_one_marked_module_is_not_answered_with_another_mark() -> None:
    model = blocks()
    fsdp_unit(model[0].linear)
    model[0].linear.weight.data = model[0].linear.weight.data.bfloat16()
    (finding,) = findings(model)
    assert finding.startswith("AF203 error at 0.linear.")
    assert finding.endswith(". Store all in one dtype.")
