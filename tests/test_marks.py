"""Marks are data in one attribute: who carries one, which wins, and that nothing else changes."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from annotate_fsdp import AnnotationError, UnitSpec, fsdp_forward, fsdp_ignore, fsdp_off, fsdp_unit
from annotate_fsdp.collect import collect_tree
from annotate_fsdp.marks import Ignore, Off, forward_methods

FP32 = UnitSpec(policy="fp32")


@fsdp_unit(policy="fp32")
class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ChildNorm(Norm):
    pass


@fsdp_unit(group="pickled")
def make_linear(width: int, *, bias: bool = True) -> nn.Linear:
    """Make a linear layer."""
    return nn.Linear(width, width, bias=bias)


def marks_of(model: nn.Module) -> dict[str, tuple[object, str]]:
    """Path -> (mark, provenance) of every marked module."""
    return {node.path: (node.mark, node.provenance) for node in collect_tree(model).nodes if node.mark}


def mark_of(module: nn.Module) -> object:
    """The mark of one module, as the planner sees it."""
    return collect_tree(module).root.mark


def refusal(error: pytest.ExceptionInfo[AnnotationError]) -> str:
    """The whole message of an error."""
    return str(error.value)


# -- where a mark can stand ------------------------------------------------------------------------


def test_a_class_comes_back_as_the_same_class() -> None:
    class Plain(nn.Module):
        pass

    before = set(vars(Plain))
    assert fsdp_unit(Plain) is Plain
    assert set(vars(Plain)) - before == {"__fsdp_unit__"}


def test_an_instance_comes_back_as_the_same_instance() -> None:
    linear = nn.Linear(2, 2)
    before = set(vars(linear))
    assert fsdp_unit(linear, policy="fp32") is linear
    assert type(linear) is nn.Linear
    assert set(vars(linear)) - before == {"__fsdp_unit__"}
    assert mark_of(linear) == FP32


def test_the_decorator_with_and_without_parentheses_says_the_same() -> None:
    @fsdp_unit
    class Bare(nn.Module):
        pass

    @fsdp_unit()
    class Called(nn.Module):
        pass

    assert mark_of(Bare()) == mark_of(Called()) == UnitSpec()


def test_a_marked_instance_leaves_its_class_and_its_siblings_alone() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    fsdp_unit(first)
    assert mark_of(second) is None
    assert "__fsdp_unit__" not in vars(nn.Linear)


def test_dtype_shorthand_on_an_instance_and_in_a_class_body() -> None:
    class Island(nn.Module):
        __fsdp_dtype__ = torch.float32

    linear = nn.Linear(2, 2)
    linear.__fsdp_dtype__ = torch.bfloat16
    assert marks_of(Island()) == {
        "": (
            UnitSpec(policy=torch.float32),
            "class test_dtype_shorthand_on_an_instance_and_in_a_class_body.<locals>.Island",
        )
    }
    assert marks_of(linear) == {"": (UnitSpec(policy=torch.bfloat16), "instance")}


def test_dtype_shorthand_beside_a_unit_mark_that_says_the_same() -> None:
    @fsdp_unit(policy="fp32", reshard_after_forward=False)
    class Island(nn.Module):
        __fsdp_dtype__ = torch.float32

    assert mark_of(Island()) == UnitSpec(policy="fp32", reshard_after_forward=False)


# -- factories -------------------------------------------------------------------------------------


class Factories:
    @fsdp_unit(policy="fp32")
    def method(self, width: int) -> nn.Linear:
        return nn.Linear(width, 1)

    @fsdp_unit(policy="fp32")
    @classmethod
    def class_outside(cls, width: int) -> nn.Linear:
        return nn.Linear(width, 2)

    @classmethod
    @fsdp_unit(policy="fp32")
    def class_inside(cls, width: int) -> nn.Linear:
        assert cls is Factories
        return nn.Linear(width, 3)

    @fsdp_unit(policy="fp32")
    @staticmethod
    def static_outside(width: int) -> nn.Linear:
        return nn.Linear(width, 4)

    @staticmethod
    @fsdp_unit(policy="fp32")
    def static_inside(width: int) -> nn.Linear:
        return nn.Linear(width, 5)


@pytest.mark.parametrize("owner", [Factories, Factories()], ids=["class", "instance"])
@pytest.mark.parametrize(
    ("name", "outputs"),
    [("class_outside", 2), ("class_inside", 3), ("static_outside", 4), ("static_inside", 5)],
)
def test_a_class_or_static_method_marks_what_it_returns(owner: Any, name: str, outputs: int) -> None:
    made = getattr(owner, name)(7)
    assert (made.in_features, made.out_features) == (7, outputs)
    assert marks_of(made) == {"": (FP32, "instance")}


def test_a_method_marks_what_it_returns() -> None:
    assert marks_of(Factories().method(3)) == {"": (FP32, "instance")}
    assert marks_of(Factories.method(Factories(), 3)) == {"": (FP32, "instance")}


def test_a_factory_keeps_name_docstring_and_signature() -> None:
    assert make_linear.__name__ == "make_linear"
    assert make_linear.__doc__ == "Make a linear layer."
    assert str(inspect.signature(make_linear)) == "(width: 'int', *, bias: 'bool' = True) -> 'nn.Linear'"
    assert str(inspect.signature(Factories().method)) == "(width: 'int') -> 'nn.Linear'"
    assert inspect.isfunction(inspect.unwrap(make_linear))


def test_a_factory_is_pickled_and_copied_by_reference() -> None:
    assert pickle.loads(pickle.dumps(make_linear)) is make_linear
    assert copy.copy(make_linear) is make_linear
    assert copy.deepcopy({"make": make_linear})["make"] is make_linear


def test_a_factory_that_returns_no_module_says_so_when_it_is_called() -> None:
    @fsdp_unit
    def broken() -> int:
        return 3

    with pytest.raises(AnnotationError) as error:
        broken()
    name = "test_a_factory_that_returns_no_module_says_so_when_it_is_called.<locals>.broken"
    assert refusal(error) == (
        "1 finding; nothing was sharded\n"
        f"  AF102 error at the result of {name}: fsdp_unit on a int, but only a Module class, a Module or a "
        "function that returns a Module can be marked. Mark the module itself."
    )


# -- which mark wins -------------------------------------------------------------------------------


def test_a_subclass_inherits_and_the_nearest_class_in_the_mro_wins() -> None:
    @fsdp_unit(policy="bf16")
    class Base(nn.Module):
        pass

    @fsdp_unit(policy="fp32")
    class Middle(Base):
        pass

    class Leaf(Middle):
        pass

    class Mixed(Leaf, Base):
        pass

    prefix = "class test_a_subclass_inherits_and_the_nearest_class_in_the_mro_wins.<locals>."
    assert marks_of(Leaf()) == {"": (FP32, f"{prefix}Middle")}
    assert marks_of(Mixed()) == {"": (FP32, f"{prefix}Middle")}
    assert marks_of(Base()) == {"": (UnitSpec(policy="bf16"), f"{prefix}Base")}


def test_a_subclass_shorthand_beats_the_base_class_mark() -> None:
    class Wide(Norm):
        __fsdp_dtype__ = torch.float64

    assert mark_of(Wide()) == UnitSpec(policy=torch.float64)


def test_an_instance_beats_its_class() -> None:
    norm = fsdp_unit(Norm(), policy="bf16")
    assert marks_of(norm) == {"": (UnitSpec(policy="bf16"), "instance")}
    norm = Norm()
    norm.__fsdp_dtype__ = torch.float64
    assert marks_of(norm) == {"": (UnitSpec(policy=torch.float64), "instance")}


def test_marking_again_replaces_the_mark() -> None:
    linear = fsdp_unit(fsdp_unit(nn.Linear(2, 2), policy="bf16"), policy="fp32")
    assert mark_of(linear) == FP32


def test_off_on_a_subclass_and_on_an_instance_cancels_the_mark() -> None:
    @fsdp_off
    class Quiet(Norm):
        pass

    norm = Norm()
    assert fsdp_off(norm) is norm
    assert mark_of(Quiet()) == Off()
    assert mark_of(norm) == Off()
    assert mark_of(Norm()) == FP32


def test_ignore_on_a_class_and_on_an_instance() -> None:
    @fsdp_ignore(synced=True)
    class Table(nn.Module):
        pass

    linear = nn.Linear(2, 2)
    assert fsdp_ignore(linear) is linear
    assert mark_of(Table()) == Ignore(synced=True)
    assert mark_of(linear) == Ignore()


# -- what a mark survives and leaves alone ---------------------------------------------------------


def test_marks_survive_deepcopy_and_pickle() -> None:
    model = nn.Sequential(Norm(), ChildNorm(), fsdp_unit(nn.Linear(4, 4), group="g"), nn.Linear(4, 4))
    model[3].__fsdp_dtype__ = torch.float32
    expected = {
        "0": (FP32, "class Norm"),
        "1": (FP32, "class Norm"),
        "2": (UnitSpec(group="g"), "instance"),
        "3": (UnitSpec(policy=torch.float32), "instance"),
    }
    assert marks_of(model) == expected
    assert marks_of(copy.deepcopy(model)) == expected
    assert marks_of(pickle.loads(pickle.dumps(model))) == expected


def test_marks_survive_to_half_and_to_empty() -> None:
    linear = fsdp_unit(nn.Linear(2, 2), policy="fp32")
    linear.__fsdp_dtype__ = torch.float32
    for moved in (linear.to(torch.bfloat16), linear.half(), linear.to("meta"), linear.to_empty(device="cpu")):
        assert moved is linear
        assert marks_of(moved) == {"": (FP32, "instance")}


def test_module_compile_keeps_the_mark_and_is_one_module() -> None:
    linear = fsdp_unit(nn.Linear(2, 2), policy="fp32")
    linear.compile(backend="eager")
    assert marks_of(nn.Sequential(linear)) == {"0": (FP32, "instance")}


def test_marks_leave_state_dict_and_names_alone() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    marked = copy.deepcopy(plain)
    fsdp_unit(marked[0], policy="fp32")
    marked[1].__fsdp_dtype__ = torch.float32
    fsdp_ignore(marked)
    assert list(marked.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in marked.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in marked.named_buffers()] == []
    assert repr(marked) == repr(plain)


# -- wrappers --------------------------------------------------------------------------------------


def test_a_checkpoint_wrapped_module_is_one_unit_and_the_wrapper_is_what_is_sharded() -> None:
    model = nn.Sequential(fsdp_unit(nn.Linear(2, 2), policy="fp32"))
    model[0] = checkpoint_wrapper(model[0])
    assert hasattr(model[0], "__fsdp_unit__")  # the wrapper forwards attributes: a trap
    tree = collect_tree(model)
    assert [(node.path, node.mark) for node in tree.nodes] == [("", None), ("0", FP32)]
    assert tree.nodes[1].module is model[0]
    assert tree.nodes[1].class_name == "Linear"
    assert [held.path for held in tree.held] == ["0.weight", "0.bias"]


def test_a_compiled_wrapper_of_a_checkpoint_wrapper_of_a_marked_class_is_one_unit() -> None:
    wrapped = torch.compile(checkpoint_wrapper(Norm()), backend="eager")
    model = nn.ModuleDict({"norm": wrapped, "plain": Norm()})
    assert marks_of(model) == {"norm": (FP32, "class Norm"), "plain": (FP32, "class Norm")}
    assert [held.path for held in collect_tree(model).held] == ["norm.weight", "plain.weight"]


def test_a_mark_on_the_wrapper_beats_the_one_inside() -> None:
    wrapper = fsdp_unit(checkpoint_wrapper(Norm()), policy="bf16")
    assert marks_of(wrapper) == {"": (UnitSpec(policy="bf16"), "instance")}


def test_a_mark_on_a_compiled_wrapper_stays_on_the_wrapper() -> None:
    linear = nn.Linear(2, 2)
    compiled = torch.compile(linear, backend="eager")
    assert fsdp_unit(compiled) is compiled
    assert "__fsdp_unit__" not in vars(linear)
    assert mark_of(compiled) == UnitSpec()


def test_no_module_is_asked_for_its_truth() -> None:
    class Untrue(nn.Module):
        def __bool__(self) -> bool:
            raise AssertionError("asked for its truth")

        def __len__(self) -> int:
            raise AssertionError("asked for its length")

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = checkpoint_wrapper(fsdp_unit(Untrue()))

    @fsdp_unit
    def make() -> nn.Module:
        return Untrue()

    assert marks_of(Parent()) == {"child": (UnitSpec(), "instance")}
    assert mark_of(make()) == UnitSpec()
    assert mark_of(fsdp_off(fsdp_ignore(Untrue()))) == Off()


# -- entry points ----------------------------------------------------------------------------------


def test_a_forward_method_is_the_same_function_and_subclasses_inherit_its_mark() -> None:
    def encode(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    class Model(nn.Module):
        run = fsdp_forward(encode)

        @fsdp_forward
        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def helper(self) -> None:
            pass

    class Child(Model):
        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    assert Model.run is encode
    assert forward_methods(Model) == forward_methods(Child) == ("decode", "run")


@pytest.mark.parametrize(
    ("method", "kind", "name"),
    [
        (staticmethod(make_linear), "staticmethod", "make_linear"),
        (Norm, "type", "Norm"),
        (3, "int", "int"),
    ],
)
def test_a_forward_mark_on_something_else_says_where_it_belongs(method: Any, kind: str, name: str) -> None:
    with pytest.raises(AnnotationError) as error:
        fsdp_forward(method)
    assert refusal(error) == (
        "1 finding; nothing was sharded\n"
        f"  AF102 error at {name}: fsdp_forward on a {kind}, but only a method that takes self can gather "
        "its unit's parameters. Put @fsdp_forward closest to the function."
    )


# -- what cannot be meant --------------------------------------------------------------------------


def test_an_unknown_option_is_named_with_those_that_exist() -> None:
    with pytest.raises(AnnotationError) as error:
        fsdp_unit(polcy="fp32", goup="x")  # type: ignore[call-arg]
    known = "policy, casts_itself, reduce_dtype, output_dtype, reshard_after_forward, offload_policy, group"
    known += ", param_dtypes, conditional"
    assert refusal(error) == (
        "2 findings; nothing was sharded\n"
        "  AF101 error at fsdp_unit: fsdp_unit(polcy='fp32'), but there is no such option. "
        f"Did you mean policy? Write one of {known}.\n"
        "  AF101 error at fsdp_unit: fsdp_unit(goup='x'), but there is no such option. "
        f"Did you mean group? Write one of {known}."
    )


DTYPE = "Write a torch.dtype such as torch.float32"
POLICY = (
    "a policy is a name, a torch.dtype, a MixedPrecisionPolicy or a callable that makes one",
    'Write policy="fp32", policy=torch.float32 or policy=MixedPrecisionPolicy(...)',
)
RESHARD = (
    "it is no value that FSDP2 knows",
    'Write True, False, a world size to reshard to, or "except_last"',
)
OUTPUT = ('it is neither a floating-point torch.dtype nor "enclosing" nor None', DTYPE)


@pytest.mark.parametrize(
    ("option", "value", "wrong", "write"),
    [
        ("policy", torch.int8, "parameters cannot compute in it", DTYPE),
        ("policy", 3, *POLICY),
        ("policy", None, *POLICY),
        ("policy", nn.Linear, *POLICY),
        ("reduce_dtype", "fp32", "it is not a floating-point torch.dtype", DTYPE),
        ("reduce_dtype", torch.int32, "it is not a floating-point torch.dtype", DTYPE),
        ("output_dtype", "fp32", *OUTPUT),
        ("output_dtype", torch.bool, *OUTPUT),
        ("casts_itself", 1, "it is not a bool", "Write True or False"),
        ("reshard_after_forward", "last", *RESHARD),
        ("reshard_after_forward", 0, *RESHARD),
        ("reshard_after_forward", -2, *RESHARD),
        ("reshard_after_forward", 1.5, *RESHARD),
        ("offload_policy", True, "it is no OffloadPolicy", "Write CPUOffloadPolicy()"),
        ("group", "", "a group is a non-empty name", 'Write group="norms"'),
        ("group", 3, "a group is a non-empty name", 'Write group="norms"'),
    ],
)
def test_a_value_without_meaning_is_refused_at_decoration(
    option: str, value: object, wrong: str, write: str
) -> None:
    with pytest.raises(AnnotationError) as error:
        fsdp_unit(**{option: value})  # type: ignore[call-overload]
    assert refusal(error) == (
        "1 finding; nothing was sharded\n"
        f"  AF101 error at fsdp_unit: fsdp_unit({option}={value!r}), but {wrong}. {write}."
    )


def test_every_option_takes_its_good_values() -> None:
    spec = UnitSpec(
        policy=lambda base: base,
        casts_itself=True,
        reduce_dtype=torch.float32,
        output_dtype=None,
        reshard_after_forward="except_last",
        offload_policy=CPUOffloadPolicy(),
        group="g",
    )
    linear = fsdp_unit(
        nn.Linear(2, 2),
        policy=spec.policy,
        casts_itself=True,
        reduce_dtype=torch.float32,
        output_dtype=None,
        reshard_after_forward="except_last",
        offload_policy=CPUOffloadPolicy(),
        group="g",
    )
    assert mark_of(linear) == spec
    assert UnitSpec(reshard_after_forward=4).reshard_after_forward == 4


def test_a_policy_that_is_taken_verbatim_leaves_no_room_for_other_dtypes() -> None:
    verbatim = MixedPrecisionPolicy(param_dtype=torch.float32)
    with pytest.raises(AnnotationError) as error:
        fsdp_unit(policy=verbatim, casts_itself=True, output_dtype=torch.float32)
    wrong = "a MixedPrecisionPolicy is taken verbatim"
    write = "Put the dtype into the MixedPrecisionPolicy, or name a policy instead"
    assert refusal(error) == (
        "2 findings; nothing was sharded\n"
        f"  AF101 error at fsdp_unit: fsdp_unit(casts_itself=True), but {wrong}. {write}.\n"
        f"  AF101 error at fsdp_unit: fsdp_unit(output_dtype=torch.float32), but {wrong}. {write}."
    )


@pytest.mark.parametrize(
    ("mark", "decorator"), [(fsdp_unit, "fsdp_unit"), (fsdp_off, "fsdp_off"), (fsdp_ignore, "fsdp_ignore")]
)
def test_a_mark_on_a_parameter_names_the_owner_as_the_place(mark: Any, decorator: str) -> None:
    with pytest.raises(AnnotationError) as error:
        mark(nn.Parameter(torch.ones(1)))
    assert refusal(error) == (
        "1 finding; nothing was sharded\n"
        f"  AF102 error at Parameter: {decorator} on a Parameter, but a mark on a Parameter is lost when it "
        "is copied or sharded. Mark the module that owns it."
    )


@pytest.mark.parametrize(
    ("mark", "decorator", "target", "name"),
    [
        (fsdp_unit, "fsdp_unit", "fp32", "str"),
        (fsdp_unit, "fsdp_unit", dict, "type"),
        (fsdp_off, "fsdp_off", make_linear, "_MarkedFactory"),
        (fsdp_ignore, "fsdp_ignore", len, "builtin_function_or_method"),
    ],
)
def test_a_mark_on_something_that_is_no_module_is_refused(
    mark: Any, decorator: str, target: Any, name: str
) -> None:
    with pytest.raises(AnnotationError) as error:
        mark(target)
    where = getattr(target, "__qualname__", "str")
    assert refusal(error) == (
        "1 finding; nothing was sharded\n"
        f"  AF102 error at {where}: {decorator} on a {name}, but only a Module class, a Module or a function "
        "that returns a Module can be marked. Mark the module itself."
    )


def test_an_error_survives_pickling_with_its_findings() -> None:
    with pytest.raises(AnnotationError) as error:
        UnitSpec(policy=torch.int8, group="")
    again = pickle.loads(pickle.dumps(error.value))
    assert type(again) is AnnotationError
    assert again.findings == error.value.findings
    assert [finding.code for finding in again.findings] == ["AF101", "AF101"]
    assert str(again) == str(error.value)
