"""Marks to a plan: which modules are units, in which order, who owns what, and how much that is."""

from __future__ import annotations

import copy
import gc
import pickle
import statistics
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import bfloat16, float32, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from annotate_fsdp import (
    AnnotationError,
    MeshSpec,
    Plan,
    Unit,
    fsdp_forward,
    fsdp_ignore,
    fsdp_off,
    fsdp_unit,
    plan_annotated,
)
from annotate_fsdp.plan import ParamInfo, order_units
from annotate_fsdp.planner import GROUP_STAYS_GATHERED, TIE_STAYS_GATHERED

BF16 = MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)


class Holder(nn.Module):
    """Children by name; runs them in order."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


@fsdp_unit
class Block(Holder):
    """A unit."""


@fsdp_unit
class Other(Holder):
    """A unit of another class."""


def linear(width: int = 2, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(width, width, bias=bias)


def layout(model: nn.Module, **options: Any) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(paths, members) of every unit, in application order."""
    return [(unit.paths, unit.members) for unit in plan_annotated(model, **options, lowering="unit")]


def reshards(model: nn.Module, **options: Any) -> dict[str, bool | int]:
    """Path of each unit -> its reshard flag."""
    return {
        unit.name: unit.reshard_after_forward for unit in plan_annotated(model, **options, lowering="unit")
    }


def refusal(model: nn.Module, **options: Any) -> list[str]:
    """The findings that planning raises, as text."""
    with pytest.raises(AnnotationError) as error:
        plan_annotated(model, **options, lowering="unit")
    return [str(finding) for finding in error.value.findings]


# -- order -----------------------------------------------------------------------------------------


def test_children_come_before_parents_in_post_order_and_the_root_is_last() -> None:
    model = Holder(
        embed=fsdp_unit(linear()),
        first=Block(norm=fsdp_unit(linear(), policy="fp32"), mlp=linear()),
        second=Block(inner=Block(norm=fsdp_unit(linear()))),
        head=linear(),
    )
    assert layout(model) == [
        (("embed",), ("embed.weight",)),
        (("first.norm",), ("first.norm.weight",)),
        (("first",), ("first.mlp.weight",)),
        (("second.inner.norm",), ("second.inner.norm.weight",)),
        (("second.inner",), ()),
        (("second",), ()),
        (("",), ("head.weight",)),
    ]


def test_the_root_is_a_unit_with_and_without_a_mark() -> None:
    marked, plain = Block(a=Block(b=linear())), Holder(a=Block(b=linear()))
    assert layout(marked) == layout(plain) == [(("a",), ("a.b.weight",)), (("",), ())]
    assert [unit.provenance for unit in plan_annotated(plain, lowering="unit")] == [
        "class Block",
        "default: the root is always a unit",
    ]
    assert [unit.provenance for unit in plan_annotated(marked, lowering="unit")] == [
        "class Block",
        "class Block",
    ]


def test_a_cancelled_mark_leaves_its_parameters_to_the_unit_around() -> None:
    model = Holder(a=Block(b=fsdp_off(Block(c=linear()))), d=fsdp_off(Block(e=linear())))
    assert layout(model) == [(("a",), ("a.b.c.weight",)), (("",), ("d.e.weight",))]


def test_a_group_comes_before_what_surrounds_any_of_its_members() -> None:
    model = Holder(
        a=fsdp_unit(linear(), group="g"), b=Block(c=linear()), d=fsdp_unit(linear(), group="g"), e=linear()
    )
    assert layout(model) == [
        (("a", "d"), ("a.weight", "d.weight")),
        (("b",), ("b.c.weight",)),
        (("",), ("e.weight",)),
    ]


def test_units_are_ordered_by_what_must_come_first_then_by_position() -> None:
    def unit(*paths: str) -> Unit:
        return Unit(paths, (), BF16, True, None, OffloadPolicy())

    # the root holds x and y; x holds x.a; y holds y.b; the unit (x.a, y.b) must come before both
    finished = {"x.a": 0, "x": 1, "y.b": 2, "y": 3, "": 4}
    parents = {"": [], "x": [""], "y": [""], "x.a": ["x"], "y.b": ["y"]}
    units = [unit(""), unit("y"), unit("x"), unit("x.a", "y.b")]
    ordered = order_units(units, finished, parents)
    assert [each.paths for each in ordered] == [("x.a", "y.b"), ("x",), ("y",), ("",)]
    units = [unit(""), unit("x", "y.b"), unit("y"), unit("x.a")]
    ordered = order_units(units, finished, parents)
    assert [each.paths for each in ordered] == [("x.a",), ("x", "y.b"), ("y",), ("",)]


# -- policies in the tree --------------------------------------------------------------------------


@pytest.mark.report(26)
def test_an_output_is_cast_to_the_dtype_of_the_nearest_unit_above() -> None:
    model = Holder(
        a=fsdp_unit(
            Holder(b=fsdp_unit(Holder(c=linear()), policy="bf16"), d=fsdp_unit(linear(), policy="fp32")),
            policy="fp32",
        ),
        e=fsdp_unit(linear(), policy="fp32"),
    )
    policies = {unit.path: unit.policy for unit in plan_annotated(model, mp_policy=BF16, lowering="unit")}
    assert policies == {
        "a.b": MixedPrecisionPolicy(bfloat16, float32, float32),
        "a.d": MixedPrecisionPolicy(float32, float32, float32),
        "a": MixedPrecisionPolicy(float32, float32, bfloat16),
        "e": MixedPrecisionPolicy(float32, float32, bfloat16),
        "": BF16,
    }


def test_only_the_root_keeps_the_callers_output_dtype() -> None:
    base = MixedPrecisionPolicy(bfloat16, float32, float32)
    model = Holder(a=Block(b=linear()))
    policies = {unit.path: unit.policy for unit in plan_annotated(model, mp_policy=base, lowering="unit")}
    assert policies == {"a": BF16, "": base}


def test_a_policy_name_that_resolves_to_nothing_names_the_module() -> None:
    model = Holder(a=fsdp_unit(linear(), policy="fp23"), b=fsdp_unit(linear(), policy="norms"))
    assert refusal(model, policies={"norm": float32}) == [
        "AF108 error at a: policy='fp23' (instance), but no policy has that name. Did you mean 'fp32'? Write "
        "one of 'bf16', 'fp16', 'fp32', 'inherit', 'norm', or name it in policies={'fp23': ...}.",
        "AF108 error at b: policy='norms' (instance), but no policy has that name. Did you mean 'norm'? "
        "Write one of 'bf16', 'fp16', 'fp32', 'inherit', 'norm', or name it in policies={'norms': ...}.",
    ]


# -- reshard ---------------------------------------------------------------------------------------


def tree_for_reshard(**options: Any) -> nn.Module:
    """Two nested levels of units; `options` mark the outer one."""
    return Holder(
        a=fsdp_unit(Holder(b=Block(c=linear()), g=linear()), **options), d=Block(e=linear()), f=linear()
    )


def test_units_reshard_by_default_and_the_root_does_not() -> None:
    assert reshards(tree_for_reshard()) == {"a.b": True, "a": True, "d": True, "(root)": False}


def test_the_callers_reshard_flag_is_for_units_that_say_nothing() -> None:
    assert reshards(tree_for_reshard(), reshard_after_forward=False) == {
        "a.b": False,
        "a": False,
        "d": False,
        "(root)": False,
    }
    assert reshards(tree_for_reshard(), reshard_after_forward=True)["(root)"] is False


def test_an_inner_unit_takes_the_flag_of_the_nearest_unit_around_before_the_callers() -> None:
    assert reshards(tree_for_reshard(reshard_after_forward=False)) == {
        "a.b": False,
        "a": False,
        "d": True,
        "(root)": False,
    }
    model = tree_for_reshard(reshard_after_forward=True)
    assert reshards(model, reshard_after_forward=False) == {
        "a.b": True,
        "a": True,
        "d": False,
        "(root)": False,
    }


def test_a_marked_root_says_how_it_and_everything_below_reshards() -> None:
    model = fsdp_unit(tree_for_reshard(), reshard_after_forward=True)
    assert reshards(model, reshard_after_forward=False) == {"a.b": True, "a": True, "d": True, "(root)": True}


def test_except_last_keeps_the_last_of_each_class_in_each_container() -> None:
    def blocks() -> nn.ModuleList:
        return nn.ModuleList([Block(a=linear()), Other(a=linear()), Block(a=linear()), linear()])

    model = Holder(first=blocks(), second=blocks())
    expected = {
        "first.0": True,
        "first.1": False,
        "first.2": False,
        "second.0": True,
        "second.1": False,
        "second.2": False,
        "(root)": False,
    }
    assert reshards(model, reshard_after_forward="except_last") == expected
    fsdp_unit(model.second[2], reshard_after_forward="except_last")
    assert reshards(model) == expected | {"first.1": True, "first.2": True, "second.1": True}


def test_what_lies_inside_takes_the_resolved_flag_not_the_words() -> None:
    inner = [Block(x=Block(y=linear()), z=linear()) for _ in range(2)]
    model = Holder(
        layers=nn.ModuleList(fsdp_unit(block, reshard_after_forward="except_last") for block in inner)
    )
    assert reshards(model) == {
        "layers.0.x": True,
        "layers.0": True,
        "layers.1.x": False,
        "layers.1": False,
        "(root)": False,
    }


def test_a_number_of_ranks_to_reshard_to() -> None:
    model = tree_for_reshard(reshard_after_forward=2)
    assert reshards(model, world_size=8) == {"a.b": 2, "a": 2, "d": True, "(root)": False}
    assert reshards(model, world_size=(4, 2)) == {"a.b": True, "a": True, "d": True, "(root)": False}
    assert reshards(model) == {"a.b": 2, "a": 2, "d": True, "(root)": False}
    one = tree_for_reshard(reshard_after_forward=1)
    assert reshards(one, world_size=8) == {"a.b": False, "a": False, "d": True, "(root)": False}


def test_a_number_of_ranks_that_does_not_divide_is_refused() -> None:
    model = Holder(a=fsdp_unit(linear(), reshard_after_forward=3))
    assert refusal(model, world_size=8) == [
        "AF206 error at a: reshard_after_forward=3, but it does not divide the 8 ranks that shard. "
        "Write True, False or a divisor between (here: 2, 4)."
    ]
    assert refusal(model, world_size=(8, 2)) == [
        "AF206 error at a: reshard_after_forward=3, but it does not divide the 2 ranks that shard. "
        "Write True, False or a divisor between (here: none)."
    ]


def test_a_number_of_ranks_is_no_bool_for_comparison() -> None:
    ours, theirs = (
        plan_annotated(Holder(a=fsdp_unit(linear(), reshard_after_forward=flag)), lowering="unit")
        for flag in (True, 1)
    )
    assert list(ours.differences(theirs)) == ["a: reshard_after_forward is True here, 1 there"]


# -- groups ----------------------------------------------------------------------------------------


def test_groups_are_per_enclosing_unit_and_stay_gathered() -> None:
    def block() -> Block:
        return Block(
            q=fsdp_unit(linear(), group="norms", policy="fp32"),
            k=fsdp_unit(linear(), group="norms", policy="fp32"),
            other=fsdp_unit(linear(), group="alone"),
            plain=linear(),
        )

    plan = plan_annotated(Holder(a=block(), b=block()), lowering="unit")
    assert [(unit.paths, unit.reshard_after_forward, unit.why, unit.provenance) for unit in plan] == [
        (("a.q", "a.k"), False, GROUP_STAYS_GATHERED, "instance, group 'norms'"),
        (("a.other",), True, "", "instance"),
        (("a",), True, "", "class Block"),
        (("b.q", "b.k"), False, GROUP_STAYS_GATHERED, "instance, group 'norms'"),
        (("b.other",), True, "", "instance"),
        (("b",), True, "", "class Block"),
        (("",), False, "", "default: the root is always a unit"),
    ]


def test_members_of_a_group_that_disagree_name_both_paths() -> None:
    model = Holder(
        a=fsdp_unit(linear(), group="g", policy="fp32", reshard_after_forward=True),
        b=fsdp_unit(linear(), group="g", reshard_after_forward=False, offload_policy=CPUOffloadPolicy()),
        c=fsdp_unit(linear(), group="g", policy="fp32", offload_policy=OffloadPolicy()),
    )
    why = (
        "but both hold one parameter or share one unit, which can have one policy only. "
        "Give both the same mark."
    )
    assert refusal(model, mp_policy=BF16) == [
        f"AF204 error at a: policy param_dtype=fp32, output_dtype=bf16 here and param_dtype=bf16, "
        f"output_dtype=None at b, {why}",
        f"AF204 error at a: reshard_after_forward True here and False at b, {why}",
        f"AF204 error at b: offload_policy {CPUOffloadPolicy()} here and {OffloadPolicy()} at c, {why}",
    ]


def test_a_group_takes_what_one_of_its_members_says() -> None:
    offload = CPUOffloadPolicy()
    model = Holder(
        a=fsdp_unit(linear(), group="g"),
        b=fsdp_unit(linear(), group="g", reshard_after_forward=True, offload_policy=offload),
    )
    (unit, _) = plan_annotated(model, lowering="unit")
    assert (unit.paths, unit.reshard_after_forward, unit.offload_policy) == (("a", "b"), True, offload)


# -- ties ------------------------------------------------------------------------------------------


def tied(model: nn.Module, *owners: str, name: str = "weight") -> nn.Module:
    """Make the parameter `name` of all `owners` the first one's."""
    first, *others = (model.get_submodule(owner) for owner in owners)
    for other in others:
        setattr(other, name, getattr(first, name))
    return model


@pytest.mark.report(39)
def test_tied_modules_that_are_both_tagged_are_one_unit() -> None:
    model = tied(
        Holder(embed=fsdp_unit(linear()), block=Block(a=linear()), head=fsdp_unit(linear())), "embed", "head"
    )
    plan = plan_annotated(model, lowering="unit")
    assert [(unit.paths, unit.members, unit.reshard_after_forward) for unit in plan] == [
        (("embed", "head"), ("embed.weight",), False),
        (("block",), ("block.a.weight",), True),
        (("",), (), False),
    ]
    assert plan.units[0].why == TIE_STAYS_GATHERED
    assert plan.units[0].provenance == "instance; tied"
    assert plan.units[0].parameters[0].aliases == ("head.weight",)
    assert plan.numel == 8


@pytest.mark.report(40)
def test_a_tie_that_reaches_the_roots_leftovers_goes_to_the_root() -> None:
    model = tied(Holder(embed=fsdp_unit(linear(bias=True)), head=linear()), "embed", "head")
    assert layout(model) == [(("embed",), ("embed.bias",)), (("",), ("embed.weight",))]
    assert plan_annotated(model, lowering="unit").units[0].excluded == ("embed.weight",)


def test_tied_children_of_two_units_are_one_unit_of_their_own() -> None:
    model = tied(Holder(a=Block(x=linear(), y=linear()), b=Block(x=linear())), "a.x", "b.x")
    plan = plan_annotated(model, mp_policy=BF16, lowering="unit")
    assert [(unit.paths, unit.members, unit.provenance) for unit in plan] == [
        (("a.x", "b.x"), ("a.x.weight",), "default; tied"),
        (("a",), ("a.y.weight",), "class Block"),
        (("b",), (), "class Block"),
        (("",), (), "default: the root is always a unit"),
    ]
    assert plan.units[0].policy == MixedPrecisionPolicy(bfloat16, float32, None, cast_forward_inputs=False)


def test_a_tie_inside_one_unit_stays_there() -> None:
    model = tied(Holder(a=Block(x=linear(), y=Holder(z=linear()))), "a.x", "a.y.z")
    assert layout(model) == [(("a",), ("a.x.weight",)), (("",), ())]


def test_a_tie_between_a_unit_and_one_around_it_goes_to_the_outer_one() -> None:
    model = tied(Holder(a=Block(x=linear(), y=Block(z=linear()))), "a.x", "a.y.z")
    assert layout(model) == [(("a.y",), ()), (("a",), ("a.x.weight",)), (("",), ())]


def test_a_three_way_tie_is_one_unit() -> None:
    model = tied(Holder(a=Block(x=linear()), b=Block(x=linear()), c=fsdp_unit(linear())), "a.x", "b.x", "c")
    assert layout(model) == [
        (("a.x", "b.x", "c"), ("a.x.weight",)),
        (("a",), ()),
        (("b",), ()),
        (("",), ()),
    ]


def test_a_chain_of_ties_is_one_unit() -> None:
    model = Holder(
        a=fsdp_unit(linear(bias=True)), b=fsdp_unit(linear(bias=True)), c=fsdp_unit(linear(bias=True))
    )
    tied(tied(model, "a", "b"), "b", "c", name="bias")
    assert layout(model) == [
        (("a", "b", "c"), ("a.weight", "a.bias", "b.bias", "c.weight")),
        (("",), ()),
    ]


def test_a_tied_bias_takes_its_owners_weights_along() -> None:
    model = tied(
        Holder(a=Block(x=linear(bias=True)), b=Block(x=linear(bias=True))), "a.x", "b.x", name="bias"
    )
    assert layout(model) == [
        (("a.x", "b.x"), ("a.x.weight", "a.x.bias", "b.x.weight")),
        (("a",), ()),
        (("b",), ()),
        (("",), ()),
    ]


def test_a_tie_of_two_members_of_different_groups_makes_one_unit_of_both_groups_in_tree_order() -> None:
    model = Holder(
        a=fsdp_unit(linear(), group="g"),
        b=fsdp_unit(linear(), group="h"),
        c=fsdp_unit(linear(), group="g"),
        d=fsdp_unit(linear(), group="h"),
    )
    assert layout(tied(model, "c", "d")) == [
        (("a", "b", "c", "d"), ("a.weight", "b.weight", "c.weight")),
        (("",), ()),
    ]


def test_a_tie_with_a_module_inside_the_other_owner_names_the_outer_module_only() -> None:
    outer = linear()
    outer.child = linear()
    model = tied(Holder(a=Block(x=outer), b=Block(y=linear())), "a.x", "a.x.child", "b.y")
    assert layout(model) == [(("a.x", "b.y"), ("a.x.weight",)), (("a",), ()), (("b",), ()), (("",), ())]


def test_marks_of_tied_modules_that_contradict_name_both_paths() -> None:
    why = (
        "but both hold one parameter or share one unit, which can have one policy only. "
        "Give both the same mark."
    )
    model = tied(Holder(embed=fsdp_unit(linear(), policy="fp32"), head=fsdp_unit(linear())), "embed", "head")
    assert refusal(model, mp_policy=BF16) == [
        "AF204 error at embed: policy param_dtype=fp32, output_dtype=bf16 here and param_dtype=bf16, "
        f"output_dtype=None at head, {why}"
    ]
    model = tied(Holder(embed=fsdp_unit(linear(), policy="fp32"), head=linear()), "embed", "head")
    assert refusal(model, mp_policy=BF16) == [
        f"AF204 error at head.weight: compute and reduce bf16/fp32 here and fp32/fp32 at embed.weight, {why}"
    ]
    model = tied(Holder(a=fsdp_unit(Holder(x=linear()), policy="fp32"), b=Block(x=linear())), "a.x", "b.x")
    assert refusal(model, mp_policy=BF16) == [
        f"AF204 error at a.x: policy param_dtype=fp32 here and param_dtype=bf16 at b.x, {why}"
    ]
    outer = fsdp_unit(linear(), policy="fp32")
    outer.child = fsdp_unit(linear())
    model = tied(Holder(a=outer, b=fsdp_unit(linear(), policy="fp32")), "a", "a.child", "b")
    assert refusal(model)[0].startswith("AF204 error at a.child: mark UnitSpec(policy='inherit'")


def test_ties_that_need_each_other_in_a_circle_are_refused() -> None:
    first, second = fsdp_unit(linear()), fsdp_unit(linear())
    first.inner, second.inner = linear(), linear()
    model = tied(tied(Holder(m=first, n=second), "m", "n.inner"), "n", "m.inner")
    assert refusal(model) == [
        "AF210 error at m: one unit with m, n.inner, but units that share weights lie inside each other in a "
        "circle. Untie one of the weights."
    ]


@pytest.mark.report(44)
def test_a_tie_made_after_a_first_plan_is_seen_by_the_next() -> None:
    model = Holder(embed=fsdp_unit(linear()), head=fsdp_unit(linear()))
    assert layout(model) == [(("embed",), ("embed.weight",)), (("head",), ("head.weight",)), (("",), ())]
    tied(model, "embed", "head")
    assert layout(model) == [(("embed", "head"), ("embed.weight",)), (("",), ())]


# -- shared modules --------------------------------------------------------------------------------


def test_a_module_in_two_units_is_a_unit_of_its_own_and_stays_gathered() -> None:
    shared = Holder(x=linear())
    plan = plan_annotated(
        Holder(a=Block(s=shared, y=linear()), b=Block(s=shared, y=linear())), lowering="unit"
    )
    assert [(unit.paths, unit.members, unit.reshard_after_forward) for unit in plan] == [
        (("a.s",), ("a.s.x.weight",), False),
        (("a",), ("a.y.weight",), True),
        (("b",), ("b.y.weight",), True),
        (("",), (), False),
    ]
    assert plan.units[0].provenance == "default: shared by 'a' and 'b'"


def test_a_module_in_a_unit_and_at_the_root_belongs_to_the_root() -> None:
    shared = linear()
    model = Holder(a=Block(s=shared, y=linear()), s=shared)
    assert layout(model) == [(("a",), ("a.y.weight",)), (("",), ("a.s.weight",))]


def test_a_tagged_module_in_two_units_is_one_unit() -> None:
    shared = fsdp_unit(linear(), policy="fp32")
    model = Holder(a=Block(s=shared), b=Block(s=shared))
    assert layout(model) == [(("a.s",), ("a.s.weight",)), (("a",), ()), (("b",), ()), (("",), ())]


def shared_between_dtypes(**options: Any) -> nn.Module:
    shared = fsdp_unit(linear(), **options)
    return Holder(a=fsdp_unit(Holder(s=shared), policy="fp32"), b=Block(s=shared))


def test_a_tagged_module_shared_by_units_of_two_dtypes_cannot_cast_back_to_both() -> None:
    assert refusal(shared_between_dtypes(policy="fp32"), mp_policy=BF16) == [
        "AF205 error at a.s: shared by a (torch.float32) and b (torch.bfloat16), but its output cannot be "
        "cast back to two compute dtypes. Give both users one compute dtype, or mark the shared module with "
        "output_dtype=...."
    ]


@pytest.mark.parametrize(
    "options",
    [{"output_dtype": float32}, {"output_dtype": None}, {"casts_itself": True}, {"policy": BF16}],
    ids=["output dtype", "no output cast", "casts itself", "verbatim"],
)
def test_a_shared_module_that_is_not_cast_back_may_stand_between_two_dtypes(options: Any) -> None:
    plan = plan_annotated(
        shared_between_dtypes(**{"policy": "fp32", **options}), mp_policy=BF16, lowering="unit"
    )
    assert plan.unit("a.s").members == ("a.s.weight",)


def test_an_untagged_module_shared_by_units_of_two_dtypes_is_refused() -> None:
    shared = linear()
    model = Holder(a=fsdp_unit(Holder(s=shared), policy="fp32"), b=Block(s=shared))
    assert refusal(model, mp_policy=BF16) == [
        "AF204 error at a.s: compute and reduce fp32/fp32 here and bf16/fp32 at b, but both hold one "
        "parameter or share one unit, which can have one policy only. Give both the same mark."
    ]


def test_what_lies_inside_a_librarys_own_unit_takes_its_reshard_flag_from_the_marks_around() -> None:
    shared = Holder(inner=Block(x=linear()), y=linear())
    model = Holder(a=Block(s=shared, z=linear()), b=Block(s=shared, z=linear()))
    assert reshards(model) == {"a.s.inner": True, "a.s": False, "a": True, "b": True, "(root)": False}


def test_shared_modules_inside_shared_modules() -> None:
    inner = linear()
    shared = Holder(i=inner, w=linear())
    model = Holder(a=Block(s=shared), b=Block(s=shared, i=inner))
    assert layout(model) == [
        (("a.s.i",), ("a.s.i.weight",)),
        (("a.s",), ("a.s.w.weight",)),
        (("a",), ()),
        (("b",), ()),
        (("",), ()),
    ]


# -- ignored parameters ----------------------------------------------------------------------------


def test_ignored_parameters_belong_to_no_unit_and_each_unit_knows_those_below() -> None:
    model = Holder(a=Block(x=linear(), y=linear()), z=linear()).requires_grad_(False)
    plan = plan_annotated(model, ignored_params={model.a.x.weight, model.z.weight}, lowering="unit")
    assert [(unit.paths, unit.members, unit.excluded) for unit in plan] == [
        (("a",), ("a.y.weight",), ("a.x.weight",)),
        (("",), (), ("z.weight",)),
    ]
    assert plan.ignored == ("a.x.weight", "z.weight")


@pytest.mark.parametrize("kind", [set, list, tuple, frozenset, iter, lambda p: (each for each in p)])
def test_ignored_parameters_may_come_as_any_iterable(kind: Any) -> None:
    model = Holder(a=Block(x=linear()), z=linear()).requires_grad_(False)
    plan = plan_annotated(model, ignored_params=kind(list(model.a.parameters())), lowering="unit")
    assert plan.ignored == ("a.x.weight",)


def test_an_ignored_module_takes_everything_below_out_of_fsdp() -> None:
    region = fsdp_ignore(Block(x=linear(), y=Block(z=linear()))).requires_grad_(False)
    plan = plan_annotated(Holder(a=Block(r=region, w=linear())), lowering="unit")
    assert [(unit.paths, unit.members) for unit in plan] == [(("a",), ("a.w.weight",)), (("",), ())]
    assert plan.ignored == ("a.r.x.weight", "a.r.y.z.weight")


@pytest.mark.parametrize("region_first", [True, False])
def test_a_module_shared_with_an_ignored_one_is_ignored_wherever_it_comes_first(region_first: bool) -> None:
    shared = linear().requires_grad_(False)
    region, block = fsdp_ignore(Holder(s=shared)), Block(s=shared, w=linear())
    model = Holder(r=region, b=block) if region_first else Holder(b=block, r=region)
    plan = plan_annotated(model, lowering="unit")
    assert [(unit.paths, unit.members) for unit in plan] == [(("b",), ("b.w.weight",)), (("",), ())]
    assert plan.ignored == ("r.s.weight" if region_first else "b.s.weight",)


def test_a_weight_tied_to_an_ignored_module_is_ignored() -> None:
    model = tied(Holder(r=fsdp_ignore(linear()), b=Block(x=linear())), "r", "b.x").requires_grad_(False)
    plan = plan_annotated(model, lowering="unit")
    assert [(unit.paths, unit.members, unit.excluded) for unit in plan] == [
        (("b",), (), ("r.weight",)),
        (("",), (), ("r.weight",)),
    ]


# -- entry points, empty units ---------------------------------------------------------------------


def test_forward_methods_of_units_are_listed_with_their_path() -> None:
    @fsdp_unit
    class Coder(Holder):
        @fsdp_forward
        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return x

        @fsdp_forward
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x

        @fsdp_forward
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    plan = plan_annotated(Holder(a=Coder(x=linear())), lowering="unit")
    assert [unit.forward_methods for unit in plan] == [(("a", "decode"), ("a", "encode")), ()]


def test_a_unit_without_parameters_neither_reshards_nor_offloads_nor_costs() -> None:
    model = Holder(a=fsdp_unit(nn.ReLU(), policy="fp32", offload_policy=CPUOffloadPolicy()), b=linear())
    unit = plan_annotated(model, mp_policy=BF16, world_size=4, lowering="unit").unit("a")
    assert (unit.members, unit.reshard_after_forward, unit.offload_policy) == ((), False, OffloadPolicy())
    assert unit.policy == MixedPrecisionPolicy(float32, float32, bfloat16)
    assert unit.collectives().counts() == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    assert (unit.compute_dtypes, unit.storage_dtypes, unit.reduce_dtypes) == ((), (), ())


# -- the plan as data ------------------------------------------------------------------------------


def small_plan(**changes: Any) -> Plan:
    """A plan of two units; `changes` are made to the first."""
    fields: dict[str, Any] = {
        "paths": ("a",),
        "members": ("a.weight", "a.bias"),
        "policy": BF16,
        "reshard_after_forward": True,
        "mesh": MeshSpec(1, 4),
        "offload_policy": OffloadPolicy(),
    }
    root = Unit(("",), ("w",), BF16, False, MeshSpec(1, 4), OffloadPolicy())
    return Plan((Unit(**(fields | changes)), root), MeshSpec(1, 4))


def test_equal_plans_are_equal_and_hash_alike_whatever_their_reasons() -> None:
    plan = small_plan()
    other = small_plan(provenance="a rule", why="so", lowering="kept", class_names=("X",), excluded=("q",))
    assert plan == other
    assert hash(plan) == hash(other)
    assert list(plan.differences(other)) == []
    assert plan == pickle.loads(pickle.dumps(plan))
    assert plan != "a plan"


def test_members_in_another_order_and_an_unknown_mesh_make_no_difference() -> None:
    assert small_plan() == small_plan(members=("a.bias", "a.weight"))
    assert small_plan() == small_plan(mesh=None)
    assert small_plan() == small_plan(mesh=MeshSpec(1, 4, ("dp",)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"members": ("a.weight",)}, "a: parameters is a.bias here, none besides there"),
        ({"policy": MixedPrecisionPolicy(float32, float32)}, "a: param_dtype is bf16 here, fp32 there"),
        (
            {"policy": MixedPrecisionPolicy(bfloat16, float32, cast_forward_inputs=False)},
            "a: cast_forward_inputs is True here, False there",
        ),
        ({"reshard_after_forward": False}, "a: reshard_after_forward is True here, False there"),
        ({"mesh": MeshSpec(2, 2)}, "a: mesh is 4 ranks here, 2x2 ranks there"),
        (
            {"offload_policy": CPUOffloadPolicy()},
            "a: offload_policy is OffloadPolicy() here, CPUOffloadPolicy(pin_memory=True) there",
        ),
    ],
)
def test_each_difference_in_layout_is_one_line(changes: Any, expected: str) -> None:
    assert list(small_plan().differences(small_plan(**changes))) == [expected]
    assert small_plan() != small_plan(**changes)


def test_units_that_only_one_plan_has_are_named() -> None:
    assert list(small_plan().differences(small_plan(paths=("b",)))) == [
        "a: a unit here, none there",
        "b: no unit here, one there",
    ]


def test_another_order_of_the_same_units_is_a_difference() -> None:
    plan = small_plan()
    turned = Plan(plan.units[::-1], plan.mesh)
    assert list(plan.differences(turned)) == ["the units are applied in another order"]


def test_a_unit_and_an_owner_are_found_by_name_and_a_wrong_name_lists_the_right_ones() -> None:
    plan = small_plan()
    assert plan.unit("a") is plan.units[0]
    assert plan.unit("") is plan.owner("w") is plan.units[1]
    assert list(plan) == list(plan.units)
    assert len(plan) == 2
    with pytest.raises(KeyError) as error:
        plan.unit("b")
    assert error.value.args == ("no unit at 'b'; units: a, (root)",)
    with pytest.raises(KeyError) as error:
        plan.owner("b.weight")
    assert error.value.args == ("no unit owns 'b.weight'",)


def marked_model(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return Holder(
            a=Block(norm=fsdp_unit(linear(3), policy="fp32"), x=linear(5, bias=True)),
            b=Block(x=linear(5)),
        )


def test_a_fingerprint_is_the_same_for_the_same_model_on_any_device() -> None:
    plans = [
        plan_annotated(marked_model(device), world_size=2, lowering="unit") for device in ("cpu", "meta")
    ]
    assert plans[0].fingerprint() == plans[1].fingerprint()
    assert len(plans[0].fingerprint()) == 64
    assert (
        plan_annotated(copy.deepcopy(marked_model()), lowering="unit").fingerprint() != plans[0].fingerprint()
    )  # no mesh


def change_nothing(model: Any) -> None:
    pass


def change_mark(model: Any) -> None:
    fsdp_unit(model.b, policy="fp32")


def change_dtype(model: Any) -> None:
    model.b.bfloat16()


def change_flag(model: Any) -> None:
    model.b.requires_grad_(False)


def change_shape(model: Any) -> None:
    model.b.x = linear(6)


def change_order(model: Any) -> None:
    model.a.x.weight, model.a.x.bias = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5, 5))


@pytest.mark.parametrize("change", [change_mark, change_dtype, change_flag, change_shape, change_order])
def test_a_fingerprint_tells_apart_what_the_ranks_must_hold_in_common(change: Any) -> None:
    model, other, same = marked_model(), marked_model(), marked_model()
    change(other)
    change_nothing(same)
    plan = plan_annotated(model, lowering="unit")
    assert plan_annotated(same, lowering="unit").fingerprint() == plan.fingerprint()
    assert plan_annotated(other, lowering="unit").fingerprint() != plan.fingerprint()


def test_a_parameter_named_like_a_fact_hides_no_difference() -> None:
    def model(policy: str) -> nn.Module:
        made = fsdp_unit(Holder(a=linear()), policy=policy)
        made.policy = nn.Parameter(torch.ones(1))
        return made

    assert (
        plan_annotated(model("fp32"), lowering="unit").fingerprint()
        != plan_annotated(model("bf16"), lowering="unit").fingerprint()
    )


def test_a_plan_as_data_reads_as_written() -> None:
    plan = plan_annotated(
        Holder(a=fsdp_unit(linear(3), policy="fp32")), mp_policy=BF16, world_size=(2, 2), lowering="unit"
    )
    assert plan.to_dict() == {
        "mesh": [2, 2],
        "numel": 9,
        "collectives": {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1},
        "collectives_by_phase": {
            "forward": {
                "all_gather": {"count": 1, "bytes": {"float32": 48}},
                "reduce_scatter": {"count": 0, "bytes": {}},
                "all_reduce": {"count": 0, "bytes": {}},
            },
            "backward": {
                "all_gather": {"count": 1, "bytes": {"float32": 48}},
                "reduce_scatter": {"count": 1, "bytes": {"float32": 48}},
                "all_reduce": {"count": 1, "bytes": {"float32": 24}},
            },
        },
        "ignored": [],
        "units": [
            {
                "paths": ["a"],
                "class_names": ["Linear"],
                "members": ["a.weight"],
                "policy": {
                    "param_dtype": "fp32",
                    "reduce_dtype": "fp32",
                    "output_dtype": "bf16",
                    "cast_forward_inputs": True,
                },
                "reshard_after_forward": True,
                "mesh": [2, 2],
                "offload": "none",
                "lowering": "unit",
                "why": "",
                "provenance": "instance",
                "storage_bytes": {"fp32": 36},
                "compute_dtypes": ["fp32"],
                "reduce_dtypes": ["fp32"],
                "numel": 9,
                "trainable": True,
                "sharded_bytes": 24,
                "gathered_bytes": 48,
                "collectives": {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1},
                "excluded": [],
                "forward_methods": [],
                "param_dtypes": {},
                "reduces_unused": False,
                "islands": [],
            },
            {
                "paths": [""],
                "class_names": ["Holder"],
                "members": [],
                "policy": {
                    "param_dtype": "bf16",
                    "reduce_dtype": "fp32",
                    "output_dtype": None,
                    "cast_forward_inputs": True,
                },
                "reshard_after_forward": False,
                "mesh": [2, 2],
                "offload": "none",
                "lowering": "unit",
                "why": "",
                "provenance": "default: the root is always a unit",
                "storage_bytes": {},
                "compute_dtypes": [],
                "reduce_dtypes": [],
                "numel": 0,
                "trainable": False,
                "sharded_bytes": 0,
                "gathered_bytes": 0,
                "collectives": {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0},
                "excluded": [],
                "forward_methods": [],
                "param_dtypes": {},
                "reduces_unused": False,
                "islands": [],
            },
        ],
    }


def test_collectives_of_frozen_kept_gathered_and_replicated_units() -> None:
    def collectives(world_size: Any, *, reshard: bool, trainable: bool) -> tuple[int, ...]:
        model = Holder(a=fsdp_unit(linear(), reshard_after_forward=reshard)).requires_grad_(trainable)
        return tuple(
            plan_annotated(model, world_size=world_size, lowering="unit").collectives().counts().values()
        )

    assert collectives(4, reshard=True, trainable=True) == (2, 1, 0)
    assert collectives(4, reshard=False, trainable=True) == (1, 1, 0)
    assert collectives(4, reshard=True, trainable=False) == (1, 0, 0)
    assert collectives((2, 2), reshard=True, trainable=True) == (2, 1, 1)
    assert collectives((4, 1), reshard=False, trainable=True) == (0, 0, 1)


SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3)
DTYPES = st.sampled_from([float32, bfloat16, torch.float64, torch.int8])


@given(
    parameters=st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=4),
    shard=st.integers(1, 9),
    compute=st.none() | st.sampled_from([float32, bfloat16]),
)
def test_bytes_equal_those_of_padded_chunks(parameters: Any, shard: int, compute: Any) -> None:
    stored = gathered = whole = 0
    infos = []
    for number, (shape, dtype) in enumerate(parameters):
        infos.append(ParamInfo(f"p{number}", tuple(shape), tuple(shape), dtype, False))
        tensor = torch.empty(shape, dtype=dtype)
        chunk = tensor.chunk(shard)[0].numel()  # the first chunk is the longest; the others are padded to it
        stored += chunk * dtype.itemsize
        gathered += chunk * shard * (compute or dtype).itemsize
        whole += tensor.numel() * dtype.itemsize
    unit = Unit(
        ("",),
        tuple(info.path for info in infos),
        MixedPrecisionPolicy(compute),
        True,
        MeshSpec(3, shard),
        OffloadPolicy(),
        parameters=tuple(infos),
    )
    assert unit.sharded_bytes() == stored
    assert unit.gathered_bytes() == gathered
    assert sum(unit.bytes_by_dtype().values()) == whole


# -- any tree --------------------------------------------------------------------------------------


@st.composite
def random_models(draw: st.DrawFn) -> nn.Module:
    """A random tree with random marks, shared modules, ties and ignored parts; all in fp32."""
    made: list[nn.Module] = []

    def build(depth: int) -> nn.Module:
        if made and draw(st.integers(0, 9)) == 0:
            return draw(st.sampled_from(made))  # shared
        if depth == 0 or draw(st.booleans()):
            module: nn.Module = nn.Linear(2, 2, bias=draw(st.booleans()))
            if made and draw(st.integers(0, 5)) == 0:
                tied_to = draw(st.sampled_from(made))
                if isinstance(tied_to, nn.Linear):
                    module.weight = tied_to.weight
        else:
            names = [f"c{number}" for number in range(draw(st.integers(1, 3)))]
            module = Holder(**{name: build(depth - 1) for name in names})
            if draw(st.booleans()):
                module.own = nn.Parameter(torch.ones(3))
        kind = draw(st.integers(0, 5))
        if kind <= 1:
            fsdp_unit(module, reshard_after_forward=draw(st.sampled_from([None, True, "except_last"])))
        elif kind == 2:
            fsdp_unit(module, group=draw(st.sampled_from(["g", "h"])))
        elif kind == 3 and draw(st.integers(0, 3)) == 0:
            fsdp_ignore(module, synced=True)
        made.append(module)
        return module

    return Holder(root=build(3), marked=fsdp_unit(linear()))


def plan_or_refusal(model: nn.Module) -> Plan | tuple[str, ...]:
    """The plan, or the codes of what is wrong (ties may run in a circle)."""
    try:
        return plan_annotated(model, world_size=4, lowering="unit")
    except AnnotationError as error:
        return tuple(finding.code for finding in error.findings)


@settings(max_examples=150, deadline=None)
@given(model=random_models())
def test_every_parameter_of_any_tree_is_in_exactly_one_unit_or_ignored(model: nn.Module) -> None:
    plan = plan_or_refusal(model)
    if not isinstance(plan, Plan):
        assert set(plan) <= {"AF204", "AF210"}
        return
    owned = [member for unit in plan for member in unit.members]
    assert sorted([*owned, *plan.ignored]) == sorted(name for name, _ in model.named_parameters())
    assert plan.units[-1].paths == ("",)
    position = {path: number for number, unit in enumerate(plan) for path in unit.paths}
    assert len(position) == sum(len(unit.paths) for unit in plan)
    for path, at in position.items():
        if path:
            parents = [path.rpartition(".")[0]]
            while parents[-1]:
                parents.append(parents[-1].rpartition(".")[0])
            assert all(position[parent] > at for parent in parents if parent in position)


@settings(max_examples=75, deadline=None)
@given(model=random_models())
def test_the_plan_of_a_copy_and_of_a_meta_model_is_the_same(model: nn.Module) -> None:
    before = {name: id(value) for name, value in model.named_parameters()}
    plan = plan_or_refusal(model)
    assert {name: id(value) for name, value in model.named_parameters()} == before
    meta = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    for twin in (copy.deepcopy(model), copy.deepcopy(model, meta)):
        again = plan_or_refusal(twin)
        assert again == plan
        if isinstance(plan, Plan) and isinstance(again, Plan):
            assert again.fingerprint() == plan.fingerprint()
            assert again.to_dict() == plan.to_dict()


# -- speed -----------------------------------------------------------------------------------------


def big_model(modules: int) -> nn.Module:
    """About `modules` modules on meta: blocks of six, with shared, tied and grouped parts."""

    def block() -> Block:
        norm = fsdp_unit(nn.LayerNorm(4), policy="fp32", group="norms")
        return Block(norm=norm, a=linear(), b=linear(), more=nn.Sequential(linear()))

    with torch.device("meta"):
        blocks = [block() for _ in range(modules // 6)]
    for first, second in zip(blocks[::8], blocks[1::8], strict=False):
        first.a.weight = second.a.weight
        first.more = second.more
    return Holder(layers=nn.ModuleList(blocks))


def planning_time(model: nn.Module) -> float:
    """Processor seconds of one plan under the default lowering: waiting for a busy machine does not count."""
    gc.collect()
    start = time.process_time()
    plan_annotated(model, world_size=64)
    return time.process_time() - start


def per_module(small: int, large: int, repeats: int) -> tuple[float, float]:
    """Return the time for the large model and the ratio of the times per module: medians in alternation."""
    models = big_model(small), big_model(large)
    times = [(planning_time(models[0]), planning_time(models[1])) for _ in range(repeats)]
    first, second = (statistics.median(column) for column in zip(*times, strict=True))
    return second, second / large / (first / small)


def test_planning_ten_thousand_modules_takes_under_a_second_and_time_grows_with_the_tree_only() -> None:
    seconds, ratio = per_module(2_000, 10_000, 5)
    assert seconds < 1
    assert ratio < 1.5


def test_planning_is_linear_in_the_units_inside_one_unit() -> None:
    """Each of them asks for the dtype that the root computes in, which holds many parameters."""

    def flat(units: int) -> nn.Module:
        with torch.device("meta"):
            pairs = [(linear(), fsdp_unit(nn.LayerNorm(4), policy="fp32")) for _ in range(units)]
        return nn.Sequential(*(module for pair in pairs for module in pair))

    small, large = (statistics.median(planning_time(flat(units)) for _ in range(3)) for units in (400, 3200))
    assert large / small < 2 * 8


@pytest.mark.slow
def test_planning_is_linear_up_to_a_hundred_thousand_modules() -> None:
    _, ratio = per_module(10_000, 100_000, 2)
    assert ratio <= 1.3
