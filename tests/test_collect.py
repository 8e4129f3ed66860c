"""One walk over a model: modules, marks, parameters and who owns them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from annotate_fsdp import AnnotationError, UnitSpec, fsdp_off, fsdp_unit, plan_annotated
from annotate_fsdp.collect import Tree, collect_tree


class Pair(nn.Module):
    """Two children and a parameter of its own."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.first = first
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def linear() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


def nodes(tree: Tree) -> list[tuple[str, list[int], list[str], int]]:
    """(path, parents, aliases, post-order position) of every node."""
    return [(node.path, node.parents, node.aliases, node.finished) for node in tree.nodes]


def messages(model: nn.Module) -> list[str]:
    """What the walk finds wrong."""
    return [str(finding) for finding in collect_tree(model).findings]


def test_nodes_come_in_registration_order_and_finish_children_first() -> None:
    tree = collect_tree(Pair(Pair(linear(), linear()), linear()))
    assert nodes(tree) == [
        ("", [], [], 4),
        ("first", [0], [], 2),
        ("first.first", [1], [], 0),
        ("first.second", [1], [], 1),
        ("second", [0], [], 3),
    ]
    assert [held.path for held in tree.held] == [
        "scale",
        "first.scale",
        "first.first.weight",
        "first.second.weight",
        "second.weight",
    ]


def test_a_shared_module_is_one_node_with_all_its_parents_and_paths() -> None:
    shared = linear()
    tree = collect_tree(Pair(Pair(shared, linear()), Pair(linear(), shared)))
    assert nodes(tree)[2] == ("first.first", [1, 4], ["second.second"], 0)
    assert len(tree.nodes) == 6
    assert [(held.path, held.owners, held.aliases) for held in tree.held if held.owners == [2]] == [
        ("first.first.weight", [2], [])
    ]


def test_a_tied_parameter_is_held_once_with_all_its_owners_and_names() -> None:
    model = Pair(linear(), linear())
    model.second.weight = model.first.weight
    model.second.again = model.first.weight
    tree = collect_tree(model)
    assert [(held.path, held.owners, held.aliases) for held in tree.held] == [
        ("scale", [0], []),
        ("first.weight", [1, 2], ["second.weight", "second.again"]),
    ]


def test_a_slot_without_a_module_or_parameter_is_skipped() -> None:
    model = Pair(linear(), linear())
    model.second = None
    model.register_parameter("absent", None)
    tree = collect_tree(model)
    assert [node.path for node in tree.nodes] == ["", "first"]
    assert [held.path for held in tree.held] == ["scale", "first.weight"]


@pytest.mark.parametrize("wrapper_first", [True, False])
def test_a_module_used_bare_and_in_a_wrapper_is_one_node_and_itself_the_unit(wrapper_first: bool) -> None:
    bare = fsdp_unit(linear())
    wrapped = checkpoint_wrapper(bare)
    model = Pair(wrapped, bare) if wrapper_first else Pair(bare, wrapped)
    tree = collect_tree(model)
    assert nodes(tree) == [("", [], [], 1), ("first", [0, 0], ["second"], 0)]
    assert tree.nodes[1].module is tree.nodes[1].inner is bare
    assert [held.path for held in tree.held] == ["scale", "first.weight"]
    assert [unit.paths for unit in plan_annotated(model)] == [("first",), ("",)]


def test_two_wrappers_of_one_module_are_one_node_and_the_shared_part_is_the_unit() -> None:
    bare = linear()
    inner = checkpoint_wrapper(bare)
    outer = checkpoint_wrapper(inner)
    tree = collect_tree(nn.ModuleList([outer, inner, outer]))
    assert nodes(tree) == [("", [], [], 1), ("0", [0, 0, 0], ["1", "2"], 0)]
    assert tree.nodes[1].module is inner
    assert tree.nodes[1].inner is bare


def test_a_deep_chain_of_modules_is_walked_without_recursion() -> None:
    module: nn.Module = linear()
    for _ in range(3000):
        module = nn.Sequential(module)
    tree = collect_tree(module)
    assert len(tree.nodes) == 3001
    assert tree.held[0].path == ".".join(["0"] * 3000 + ["weight"])


# -- what is wrong with a mark ---------------------------------------------------------------------


def test_a_dtype_mark_that_is_no_dtype_names_the_place() -> None:
    class Named(nn.Module):
        __fsdp_dtype__ = "float32"

    model = Pair(linear(), Named())
    model.first.__fsdp_dtype__ = torch.int64
    model.second.extra = Named()  # the class is said once
    cls = "test_a_dtype_mark_that_is_no_dtype_names_the_place.<locals>.Named"
    assert messages(model) == [
        "AF103 error at first: __fsdp_dtype__=torch.int64 on the instance, but its value is not a "
        "floating-point torch.dtype. Write __fsdp_dtype__ = torch.float32.",
        f"AF103 error at second: __fsdp_dtype__='float32' on class {cls}, but its value is not a "
        "floating-point torch.dtype. Write __fsdp_dtype__ = torch.float32.",
    ]
    model.first.__fsdp_dtype__ = torch.bfloat16
    Named.__fsdp_dtype__ = torch.float32
    assert messages(model) == []


def test_a_unit_mark_that_is_no_unit_spec_names_its_value() -> None:
    model = Pair(linear(), linear())
    model.first.__fsdp_unit__ = True
    assert messages(model) == [
        "AF104 error at first: __fsdp_unit__=True on the instance, but its value is no UnitSpec. "
        "Mark it with fsdp_unit(...)."
    ]
    fsdp_unit(model.first)
    assert messages(model) == []


def test_two_marks_on_one_target_that_disagree_are_both_shown() -> None:
    @fsdp_unit(policy="fp32")
    class Island(nn.Module):
        __fsdp_dtype__ = torch.bfloat16

    cls = "test_two_marks_on_one_target_that_disagree_are_both_shown.<locals>.Island"
    assert messages(Island()) == [
        f"AF105 error at the root module: __fsdp_unit__={UnitSpec(policy='fp32')!r} and "
        f"__fsdp_dtype__=torch.bfloat16 on class {cls}, but the two marks disagree. Keep one of them."
    ]
    Island.__fsdp_dtype__ = torch.float32
    assert messages(Island()) == []


def test_a_cancelled_mark_beside_a_dtype_disagrees() -> None:
    model = fsdp_off(linear())
    model.__fsdp_dtype__ = torch.float32
    assert messages(model) == [
        "AF105 error at the root module: __fsdp_unit__=Off() and __fsdp_dtype__=torch.float32 on the "
        "instance, but the two marks disagree. Keep one of them."
    ]


def test_a_dtype_mark_on_an_instance_is_not_held_against_its_class() -> None:
    @fsdp_unit(policy="bf16")
    class Block(nn.Module):
        pass

    block = Block()
    block.__fsdp_dtype__ = torch.float32
    assert messages(block) == []


@pytest.mark.report(64)
def test_an_unknown_attribute_of_our_kind_is_a_finding_on_class_and_instance() -> None:
    class Typo(nn.Module):
        __fsdp_dytpe__ = torch.float32

    model = Pair(Typo(), linear())
    model.second.__fsdp_units__ = UnitSpec()
    cls = "test_an_unknown_attribute_of_our_kind_is_a_finding_on_class_and_instance.<locals>.Typo"
    assert messages(model) == [
        f"AF106 error at first: __fsdp_dytpe__ on class {cls}, but no attribute of that name has a meaning. "
        "Write __fsdp_unit__ (by fsdp_unit) or __fsdp_dtype__.",
        "AF106 error at second: __fsdp_units__ on the instance, but no attribute of that name has a meaning. "
        "Write __fsdp_unit__ (by fsdp_unit) or __fsdp_dtype__.",
    ]
    del Typo.__fsdp_dytpe__, model.second.__fsdp_units__
    assert messages(model) == []


def test_a_mark_on_a_parameter_is_a_finding() -> None:
    model = linear()
    model.weight.__fsdp_dtype__ = torch.float32
    assert messages(model) == [
        "AF107 error at weight: __fsdp_dtype__ on a Parameter, but an attribute of a Parameter is lost when "
        "it is copied, moved or sharded. Mark the module that owns it."
    ]
    del model.weight.__fsdp_dtype__
    assert messages(model) == []


def test_all_broken_marks_of_a_model_are_listed_at_once() -> None:
    model = Pair(linear(), Pair(linear(), linear()))
    model.first.__fsdp_dtype__ = "fp32"
    model.second.__fsdp_unti__ = 1
    fsdp_unit(model.second.first, policy="fp32").__fsdp_dtype__ = torch.bfloat16
    model.second.second.weight.__fsdp_unit__ = UnitSpec()
    with pytest.raises(AnnotationError) as error:
        plan_annotated(model)
    assert [(finding.code, finding.path) for finding in error.value.findings] == [
        ("AF103", "first"),
        ("AF106", "second"),
        ("AF105", "second.first"),
        ("AF107", "second.second.weight"),
    ]
