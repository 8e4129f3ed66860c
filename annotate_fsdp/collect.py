"""Walk a model once: its modules, marks, parameters and who owns them, seen through wrappers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from annotate_fsdp.errors import Finding
from annotate_fsdp.marks import (
    DTYPE_ATTRIBUTE,
    KNOWN_ATTRIBUTES,
    UNIT_ATTRIBUTE,
    Ignore,
    Mark,
    Off,
    UnitSpec,
    forward_methods,
    is_float_dtype,
)
from annotate_fsdp.policies import policy_dtype

# A module whose only child has one of these names is that child's wrapper: checkpoint_wrapper,
# torch.compile's OptimizedModule. Their names are left out of every path.
WRAPPER_CHILDREN = ("_checkpoint_wrapped_module", "_orig_mod")
_FSDP_NAME = re.compile(r"__fsdp_\w*__")


@dataclass(eq=False, slots=True)
class Node:
    """One module of the tree, wrappers included.

    - index: position in registration order (a parent before its children); the root is 0.
    - path: FQN of the first place it is registered at, wrapper names left out.
    - module: what `fully_shard` is called on: the outermost wrapper.
    - inner: the module under all wrappers.
    - parents: indices of the modules that register it; more than one if it is shared.
    - aliases: the other paths it is registered at.
    - mark, provenance: its mark and where that comes from.
    - finished: position in post-order (children before parents).
    - entry_points: names of the methods that `fsdp_forward` marks.
    """

    index: int
    path: str
    module: nn.Module
    inner: nn.Module
    parents: list[int]
    aliases: list[str] = field(default_factory=list)
    mark: Mark | None = None
    provenance: str = ""
    finished: int = -1
    entry_points: tuple[str, ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 was already applied to it."""
        return isinstance(self.module, FSDPModule) or isinstance(self.inner, FSDPModule)

    @property
    def class_name(self) -> str:
        """Name of its class as the author wrote it."""
        return original_class(self.inner).__name__

    @property
    def has_forward(self) -> bool:
        """Whether calling it runs code of its own, or a method is marked as entry point."""
        own = vars(self.inner).get("forward") is not None
        of_class = getattr(original_class(self.inner), "forward", None)
        return own or of_class is not nn.Module.forward or bool(self.entry_points)


@dataclass(eq=False, slots=True)
class Held:
    """One parameter, by identity: its first FQN, its other FQNs and the nodes that own it directly."""

    parameter: nn.Parameter
    path: str
    owners: list[int]
    aliases: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Tree:
    """The collected model: nodes in registration order, parameters by first FQN, findings on the way."""

    nodes: list[Node]
    held: list[Held]
    findings: list[Finding]
    node_of: dict[int, int]  # id(module) -> index, also for wrappers

    @property
    def root(self) -> Node:
        """The model itself."""
        return self.nodes[0]

    @cached_property
    def has_sharded(self) -> bool:
        """Whether FSDP2 was already applied to any of the modules."""
        classes = {type(module) for node in self.nodes for module in (node.module, node.inner)}
        return any(issubclass(cls, FSDPModule) for cls in classes)

    @cached_property
    def inside_sharded(self) -> dict[int, int]:
        """Index of each node inside a sharded module -> index of that module."""
        inside: dict[int, int] = {}
        if not self.has_sharded:
            return inside
        for node in sorted(self.nodes, key=lambda n: n.finished, reverse=True):
            for parent in node.parents:
                if self.nodes[parent].is_sharded:
                    inside[node.index] = parent
                elif parent in inside:
                    inside[node.index] = inside[parent]
        return inside


def dtensor_of(parameter: nn.Parameter) -> DTensor | None:
    """Return the data of a parameter that is a DTensor, None for a plain one."""
    return cast("DTensor", parameter.data) if isinstance(parameter, DTensor) else None


def is_on_mesh(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    """Whether a parameter is a DTensor on the whole of `mesh`."""
    data = dtensor_of(parameter)
    return data is not None and data.device_mesh == mesh


def original_class(module: nn.Module) -> type:
    """Return the class the author wrote; `fully_shard` puts a generated one in its place."""
    cls = type(module)
    if not issubclass(cls, FSDPModule):
        return cls
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


def collect_tree(model: nn.Module) -> Tree:
    """Walk `model` once and return what was found; nothing is changed.

    Linear in modules and parameters. Shared modules and tied parameters are found by identity.
    """
    tree = Tree([], [], [], {})
    held_by_id: dict[int, Held] = {}
    classes: dict[type, _ClassFacts] = {}
    finished = 0
    # (module, path, parent); a finished node is pushed again as None with its index
    stack: list[tuple[nn.Module | None, str, int]] = [(model, "", -1)]
    while stack:
        module, path, parent = stack.pop()
        if module is None:
            tree.nodes[parent].finished = finished
            finished += 1
            continue
        chain = wrapper_chain(module)
        node = _known_node(tree, chain)
        if node is not None:
            node.parents.append(parent)
            node.aliases.append(path)
            continue
        node = _new_node(tree, chain, path, parent)
        _read_marks(node, chain, classes, tree.findings)
        _hold_parameters(node, tree, held_by_id)
        stack.append((None, "", node.index))
        if children := node.inner._modules:
            dot = f"{path}." if path else ""
            stack += [
                (child, dot + name, node.index)
                for name, child in reversed(children.items())
                if child is not None
            ]
    return tree


def wrapper_chain(module: nn.Module) -> list[nn.Module]:
    """Return `module` and what it wraps, outermost first."""
    chain = [module]
    while len(children := chain[-1]._modules) == 1:
        ((name, child),) = children.items()
        if child is None or name not in WRAPPER_CHILDREN:
            break
        chain.append(child)
    return chain


def _known_node(tree: Tree, chain: list[nn.Module]) -> Node | None:
    """Return the node of a module that was reached before, if any; `chain` is what is met this time.

    Only a wrapper that both places go through can be the unit: the outermost one they share.
    """
    known = [module for module in chain if id(module) in tree.node_of]
    if not known:
        return None
    node = tree.nodes[tree.node_of[id(known[0])]]
    if all(module is not node.module for module in known):
        node.module = known[0]
    for module in chain:
        tree.node_of[id(module)] = node.index
    return node


def _new_node(tree: Tree, chain: list[nn.Module], path: str, parent: int) -> Node:
    node = Node(len(tree.nodes), path, chain[0], chain[-1], [parent] if parent >= 0 else [])
    tree.nodes.append(node)
    for wrapper in chain:
        tree.node_of[id(wrapper)] = node.index
    return node


def _hold_parameters(node: Node, tree: Tree, held_by_id: dict[int, Held]) -> None:
    if not (parameters := node.inner._parameters):
        return
    dot = f"{node.path}." if node.path else ""
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        path = dot + name
        held = held_by_id.get(id(parameter))
        if held is None:
            held_by_id[id(parameter)] = held = Held(parameter, path, [node.index])
            tree.held.append(held)
            if parameter.__dict__:
                _refuse_parameter_marks(parameter, path, tree.findings)
            continue
        held.aliases.append(path)
        if node.index not in held.owners:
            held.owners.append(node.index)


def _refuse_parameter_marks(parameter: nn.Parameter, path: str, findings: list[Finding]) -> None:
    for name in vars(parameter):
        if _FSDP_NAME.fullmatch(name):
            findings.append(
                Finding(
                    "AF107",
                    "error",
                    path,
                    f"{name} on a Parameter",
                    "an attribute of a Parameter is lost when it is copied, moved or sharded",
                    "Mark the module that owns it",
                )
            )


@dataclass(eq=False)
class _ClassFacts:
    """What the walk reads once for each class; findings are said once, at its first instance."""

    mark: Mark | None
    provenance: str
    findings: list[Finding]
    entry_points: tuple[str, ...]


def _read_marks(
    node: Node, chain: list[nn.Module], classes: dict[type, _ClassFacts], findings: list[Finding]
) -> None:
    """Set the node's mark: the instance's, outermost wrapper of `chain` first, else its class's."""
    for module in chain:
        if not (names := _mark_names(vars(module))):
            continue
        mark, wrong = _mark_in(vars(module), names, node.path, "the instance")
        findings += wrong
        if mark is not None and node.mark is None:
            node.mark, node.provenance = mark, "instance"
    facts = classes.get(type(node.inner))
    if facts is None:
        cls = original_class(node.inner)
        facts = classes.get(cls)
        if facts is None:
            facts = classes[cls] = _ClassFacts(*_class_mark(cls, node.path), forward_methods(cls))
            findings += facts.findings
        classes[type(node.inner)] = facts
    node.entry_points = facts.entry_points
    if node.mark is None and facts.mark is not None:
        node.mark, node.provenance = facts.mark, facts.provenance


def _class_mark(cls: type, path: str) -> tuple[Mark | None, str, list[Finding]]:
    """Return the nearest mark in the MRO, its provenance, and what is wrong in any of the classes."""
    found: Mark | None = None
    provenance = ""
    findings: list[Finding] = []
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        mark, wrong = _mark_in(vars(base), _mark_names(vars(base)), path, f"class {base.__qualname__}")
        findings += wrong
        if mark is not None and found is None:
            found, provenance = mark, f"class {base.__qualname__}"
    return found, provenance, findings


def _mark_names(attributes: Mapping[str, object]) -> list[str]:
    """Return the names in one namespace that are, or were meant to be, marks."""
    if "__fsdp_" not in "\0".join(attributes):  # the fastest look at them all
        return []
    return [name for name in attributes if name.startswith("__fsdp_")]


def _mark_in(
    attributes: Mapping[str, object], names: list[str], path: str, place: str
) -> tuple[Mark | None, list[Finding]]:
    """Read the mark out of one namespace; a broken mark still counts as a plain unit mark."""
    findings = [
        Finding(
            "AF106",
            "error",
            path,
            f"{name} on {place}",
            "no attribute of that name has a meaning",
            f"Write {UNIT_ATTRIBUTE} (by fsdp_unit) or {DTYPE_ATTRIBUTE}",
        )
        for name in sorted(names)
        if _FSDP_NAME.fullmatch(name) and name not in KNOWN_ATTRIBUTES
    ]
    unit: Mark | None = None
    by_dtype: UnitSpec | None = None
    if UNIT_ATTRIBUTE in attributes:
        unit, wrong = _unit_value(attributes[UNIT_ATTRIBUTE], path, place)
        findings += wrong
    if DTYPE_ATTRIBUTE in attributes:
        by_dtype, wrong = _dtype_value(attributes[DTYPE_ATTRIBUTE], path, place)
        findings += wrong
    if unit is not None and by_dtype is not None and not findings and not _say_the_same(unit, by_dtype):
        findings.append(
            Finding(
                "AF105",
                "error",
                path,
                f"{UNIT_ATTRIBUTE}={unit!r} and {DTYPE_ATTRIBUTE}={by_dtype.policy!r} on {place}",
                "the two marks disagree",
                "Keep one of them",
            )
        )
    return unit or by_dtype, findings


def _unit_value(value: object, path: str, place: str) -> tuple[Mark, list[Finding]]:
    if isinstance(value, UnitSpec | Off | Ignore):
        return value, []
    finding = Finding(
        "AF104",
        "error",
        path,
        f"{UNIT_ATTRIBUTE}={value!r} on {place}",
        "its value is no UnitSpec",
        "Mark it with fsdp_unit(...)",
    )
    return UnitSpec(), [finding]


def _dtype_value(value: object, path: str, place: str) -> tuple[UnitSpec, list[Finding]]:
    if is_float_dtype(value):
        return UnitSpec(policy=value), []  # type: ignore[arg-type]  # is_float_dtype says it is a dtype
    finding = Finding(
        "AF103",
        "error",
        path,
        f"{DTYPE_ATTRIBUTE}={value!r} on {place}",
        "its value is not a floating-point torch.dtype",
        f"Write {DTYPE_ATTRIBUTE} = torch.float32",
    )
    return UnitSpec(), [finding]


def _say_the_same(unit: Mark, by_dtype: UnitSpec) -> bool:
    return isinstance(unit, UnitSpec) and policy_dtype(unit.policy) == by_dtype.policy
