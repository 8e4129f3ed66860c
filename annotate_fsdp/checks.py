"""One pure function per rule: a collected tree and its plan to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

from annotate_fsdp.collect import Node, Tree, dtensor_of, original_class
from annotate_fsdp.errors import Finding
from annotate_fsdp.marks import Ignore, UnitSpec
from annotate_fsdp.plan import Plan, Unit, dtype_name


@dataclass(frozen=True)
class Facts:
    """What a rule may look at.

    - existing: `"error"` or `"keep"`, what to do about modules that are sharded already; `"read"` when
      nothing will be sharded and the model is only looked at.
    """

    tree: Tree
    plan: Plan
    mesh: DeviceMesh | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    existing: str = "error"

    @cached_property
    def by_path(self) -> dict[str, Node]:
        """The nodes by FQN."""
        return {node.path: node for node in self.tree.nodes}

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their first FQN."""
        return {held.path: held.parameter for held in self.tree.held}

    @cached_property
    def policies(self) -> dict[str, MixedPrecisionPolicy]:
        """The policies by the FQNs of the units' modules."""
        return {path: unit.policy for unit in self.plan.units for path in unit.paths}

    @property
    def planned(self) -> Iterator[Unit]:
        """The units that are still to be sharded."""
        return (unit for unit in self.plan.units if unit.lowering != "kept")


def run_checks(facts: Facts, *, is_part: bool = False) -> list[Finding]:
    """Return the findings of every rule, in the order of the rules.

    Args:
        facts: what to check.
        is_part: a framework shards the model piece by piece; see `WHOLE_MODEL_RULES`.
    """
    rules = (rule for rule in RULES if not (is_part and rule in WHOLE_MODEL_RULES))
    return [finding for rule in rules for finding in rule(facts)]


def check_marked(facts: Facts) -> Iterator[Finding]:
    """AF109: a model without a single unit mark would become one unit."""
    if not any(isinstance(node.mark, UnitSpec) for node in facts.tree.nodes):
        count = sum(held.parameter.numel() for held in facts.tree.held)
        yield Finding(
            "AF109",
            "error",
            "",
            "no module carries a mark",
            f"all {count:,} parameters would be gathered at once, as one unit",
            "Mark the repeated block's class with @fsdp_unit",
        )


def check_forward_defined(facts: Facts) -> Iterator[Finding]:
    """AF201: FSDP2 gathers a unit when its forward is called; a container or holder has none."""
    nodes = facts.by_path
    for unit in facts.planned:
        for path in unit.paths:
            node = nodes[path]
            if node.has_forward or (path == "" and not unit.members and not _is_bare_list(node)):
                continue
            yield Finding(
                "AF201",
                "error",
                path,
                f"a unit ({unit.provenance}) on {node.class_name}",
                f"{node.class_name} does not define forward, so nothing would gather its parameters",
                "Mark the modules inside it, or the module that uses it"
                if path
                else "Shard the module that calls it",
            )


def _is_bare_list(node: Node) -> bool:
    return isinstance(node.inner, nn.ModuleList | nn.ModuleDict)


def check_scalars(facts: Facts) -> Iterator[Finding]:
    """AF202: FSDP2 shards dimension 0, which a scalar does not have."""
    for unit in facts.planned:
        for parameter in unit.parameters:
            if not parameter.shape:
                yield Finding(
                    "AF202",
                    "error",
                    parameter.path,
                    f"a 0-dim parameter in unit {unit.name}",
                    "FSDP2 shards dimension 0, which it does not have",
                    "Store it with shape [1], or put it into ignored_params and keep it frozen",
                )


def check_contiguous(facts: Facts) -> Iterator[Finding]:
    """AF211: FSDP2 cuts a parameter's memory into shards, so it must lie in order."""
    for unit in facts.planned:
        for path in unit.members:
            parameter = facts.parameters[path]
            data = dtensor_of(parameter)
            local = parameter if data is None else data.to_local()
            if not local.is_contiguous():
                yield Finding(
                    "AF211",
                    "error",
                    path,
                    f"a parameter of shape {list(local.shape)} with strides {list(local.stride())}",
                    "FSDP2 cannot shard memory that is not contiguous",
                    "Store it as nn.Parameter(parameter.detach().contiguous())",
                )


def check_policy_dtypes(facts: Facts) -> Iterator[Finding]:
    """AF503: parameters, reductions and outputs need a dtype that torch computes in."""
    for unit in facts.planned:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(unit.policy, name)
            if dtype is not None and not (dtype.is_floating_point and dtype.itemsize >= 2):
                yield Finding(
                    "AF503",
                    "error",
                    unit.path,
                    f"{name}={dtype} ({unit.provenance})",
                    "torch does not compute in it",
                    "Write torch.bfloat16, torch.float16 or torch.float32",
                )


def check_storage_dtypes(facts: Facts) -> Iterator[Finding]:
    """AF203: the trainable parameters of a unit are reduced in one buffer and need one dtype."""
    for unit in facts.planned:
        first: dict[torch.dtype, str] = {}
        count: dict[torch.dtype, int] = {}
        apart = dict(unit.param_dtypes)  # may become a unit of their own
        for parameter in unit.parameters:
            if parameter.trainable and parameter.path not in apart:
                first.setdefault(parameter.dtype, parameter.path)
                count[parameter.dtype] = count.get(parameter.dtype, 0) + 1
        if len(first) > 1:
            dtypes = sorted(first, key=lambda dtype: count[dtype])
            odd = first[dtypes[0]]
            owner = odd.rpartition(".")[0]
            listed = "; ".join(f"{count[d]} {dtype_name(d)} such as {first[d]}" for d in dtypes)
            yield Finding(
                "AF203",
                "error",
                odd,
                f"trainable {dtype_name(dtypes[0])} in unit {unit.name}",
                f"the unit stores trainable parameters of {len(first)} dtypes: {listed}",
                "Store all in one dtype"
                if owner in unit.paths
                else f"Mark {owner} as a unit of its own, or store all in one dtype",
            )


def check_existing(facts: Facts) -> Iterator[Finding]:
    """AF301: a module that is sharded already cannot be sharded again."""
    if facts.existing != "error" or not facts.tree.has_sharded:
        return
    sharded = [node.path for node in facts.tree.nodes if node.is_sharded]
    some = ", ".join(path or "(root)" for path in sharded[:5])
    more = f" and {len(sharded) - 5} more" if len(sharded) > 5 else ""
    yield Finding(
        "AF301",
        "error",
        sharded[0],
        f"FSDP2 was applied before to {some}{more}",
        "a module can be sharded only once",
        'Pass existing="keep" to leave these units as they are, or build the model again',
    )


def check_inside_sharded(facts: Facts) -> Iterator[Finding]:
    """AF302: children are sharded before their parent, so a mark inside a sharded unit comes too late."""
    if facts.existing != "keep":
        return
    nodes = facts.tree.nodes
    inside = facts.tree.inside_sharded
    planned = {path: unit for unit in facts.planned for path in unit.paths}
    for node in nodes:
        if node.index in inside and node.path in planned:
            outer = nodes[inside[node.index]].path
            yield Finding(
                "AF302",
                "error",
                node.path,
                f"a unit ({planned[node.path].provenance})",
                f"{outer or 'the root module'} around it is sharded already and holds its parameters",
                "Shard it first, or take its mark away with fsdp_off",
            )


def check_ignored(facts: Facts) -> Iterator[Finding]:
    """AF208: nobody reduces the gradient of an ignored parameter, so the ranks would drift apart."""
    ignored = set(facts.plan.ignored)
    for held in facts.tree.held:
        if held.path not in ignored or not held.parameter.requires_grad:
            continue
        mark = next((m for owner in held.owners if (m := _ignore_mark(facts.tree, owner))), None)
        if mark is not None and mark.synced:
            continue
        if mark is None and dtensor_of(held.parameter) is not None:
            continue  # the caller manages it on a mesh of its own
        yield Finding(
            "AF208",
            "error",
            held.path,
            "fsdp_ignore" if mark else "in ignored_params",
            "it is trainable and nobody reduces its gradient, so every rank would train its own",
            "Freeze it, or say fsdp_ignore(module, synced=True) if somebody else reduces it",
        )


def _ignore_mark(tree: Tree, index: int) -> Ignore | None:
    """The nearest `fsdp_ignore` around a node, on any way from the root to it."""
    nearest = [index]
    while nearest:
        for node in (tree.nodes[each] for each in nearest):
            if isinstance(node.mark, Ignore):
                return node.mark
        nearest = list(dict.fromkeys(parent for each in nearest for parent in tree.nodes[each].parents))
    return None


def check_forward_methods(facts: Facts) -> Iterator[Finding]:
    """AF209: an entry point of a module that is no unit gathers nothing."""
    units = {path for unit in facts.plan.units for path in unit.paths}
    nodes = facts.tree.nodes
    for node in nodes:
        if node.path in units:
            continue
        for method in node.entry_points:
            if any(method in _names_called(nodes[index]) for index in _around(nodes, node)):
                continue
            yield Finding(
                "AF209",
                "error",
                node.path,
                f"@fsdp_forward on {node.class_name}.{method}",
                "the module is no unit, so calling it would gather nothing",
                "Mark the class with @fsdp_unit, or mark the enclosing unit's method that calls it",
            )


def _around(nodes: list[Node], node: Node) -> Iterator[int]:
    """Indices of the modules around `node`, innermost first."""
    while node.parents:
        yield node.parents[0]
        node = nodes[node.parents[0]]


def _names_called(node: Node) -> set[str]:
    """Attribute names that the entry points of a module mention in their code."""
    cls = original_class(node.inner)
    names: set[str] = set()
    for method in ("forward", *node.entry_points):
        code = getattr(getattr(cls, method, None), "__code__", None)
        if code is not None:
            names.update(code.co_names)
    return names


def check_mesh(facts: Facts) -> Iterator[Finding]:
    """AF401 to AF403: FSDP2 shards over one axis, and replicates over one more if both are named."""
    mesh, dims = facts.mesh, facts.dp_mesh_dims
    if mesh is None:
        return
    names = mesh.mesh_dim_names
    declared = f"a mesh of {mesh.ndim} axes {names or '(unnamed)'}"
    axes = 'Pass dp_mesh_dims=DataParallelMeshDims(shard="...", replicate="...")'
    if dims is None and mesh.ndim > 2:
        yield Finding("AF401", "error", "", declared, "FSDP2 shards over one axis or two", axes)
    elif dims is None and mesh.ndim == 2 and names is None:
        wrong = "a 2-D mesh replicates over axis 0 and shards over axis 1, which must be named"
        write = 'Pass mesh_dim_names=("replicate", "shard") to init_device_mesh'
        yield Finding("AF402", "error", "", declared, wrong, write)
    if dims is not None and (wrong := _wrong_axes(dims, tuple(names or ()))):
        yield Finding("AF403", "error", "", f"dp_mesh_dims={dims} on {declared}", wrong, axes)


def _wrong_axes(dims: DataParallelMeshDims, names: tuple[str, ...]) -> str:
    """Why a mesh with these axes cannot be sharded by `dims`; empty if it can."""
    asked = (*dims.shard_names, *dims.replicate_names)
    if unknown := [name for name in asked if name not in names]:
        return f"{', '.join(map(repr, unknown))} is not among its axes"
    if not dims.shard_names:
        return "it names no axis to shard over"
    if len(set(asked)) < len(asked):
        return "it names an axis twice"
    for group in (dims.shard_names, dims.replicate_names):
        if list(group) != sorted(group, key=names.index):
            return f"{group} is not in the order of its axes"
    return ""


def check_tensor_parallel(facts: Facts) -> Iterator[Finding]:
    """AF405: a DTensor parameter must live on other axes than FSDP's, or replicate over those."""
    mesh, dims = facts.mesh, facts.dp_mesh_dims
    if mesh is None or (facts.existing != "keep" and facts.tree.has_sharded):
        return  # sharded already: its DTensors are FSDP's own
    for unit in facts.planned:
        if any(facts.by_path[path].index in facts.tree.inside_sharded for path in unit.paths):
            continue  # too late for FSDP anyway; its DTensors may be FSDP's own
        for path in unit.members:
            data = dtensor_of(facts.parameters[path])
            if data is None:
                continue
            if dims is not None and type(unit.reshard_after_forward) is int:
                yield Finding(
                    "AF206",
                    "error",
                    unit.path,
                    f"reshard_after_forward={unit.reshard_after_forward} with dp_mesh_dims",
                    f"FSDP2 reshards DTensors such as {path} to all ranks or none",
                    "Write True or False",
                )
            wrong = _why_not(data, mesh, dims)
            if wrong:
                yield Finding(
                    "AF405",
                    "error",
                    path,
                    f"a DTensor with placements {data.placements}",
                    wrong,
                    "Keep the data-parallel axes for FSDP, or put it into ignored_params",
                )


def _why_not(data: DTensor, mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> str:
    """Why FSDP2 could not shard a DTensor over `mesh`; empty if it can."""
    ours = set((*dims.shard_names, *dims.replicate_names) if dims else mesh.mesh_dim_names or ())
    theirs = data.device_mesh.mesh_dim_names or ()
    if data.device_mesh == mesh and data.device_mesh is not mesh:
        return "its mesh equals the one passed in, but was built separately"
    if dims is not None and data.device_mesh is mesh:
        placed = zip(theirs, data.placements, strict=True)
        split = [name for name, placement in placed if name in ours and not isinstance(placement, Replicate)]
        return f"it is not Replicate() on the data-parallel axes {split}" if split else ""
    if data.device_mesh is mesh or ours.intersection(theirs):
        return f"its mesh {theirs or '(unnamed)'} has axes that FSDP shards over"
    return ""


def check_one_mesh(facts: Facts) -> Iterator[Finding]:
    """AF406: norms of gradients on two meshes cannot be put together, so no call could clip them.

    A mesh over other ranks, such as that of expert parallelism, is the caller's business.
    """
    mesh = facts.mesh
    if mesh is None or facts.existing != "keep" or facts.dp_mesh_dims is not None:
        return
    ranks = sorted(mesh.mesh.flatten().tolist())
    for unit in facts.plan.units:
        data = dtensor_of(facts.parameters[unit.members[0]]) if unit.members else None
        if unit.lowering != "kept" or data is None or data.device_mesh == mesh:
            continue
        other = data.device_mesh
        if sorted(other.mesh.flatten().tolist()) == ranks:
            yield Finding(
                "AF406",
                "error",
                unit.path,
                f"sharded before over {_mesh_text(other)}",
                f"the mesh passed in, {_mesh_text(mesh)}, has the same ranks and is another: clipping fails",
                "Pass the mesh that it was sharded with",
            )


def _mesh_text(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ("(unnamed)",) * mesh.ndim
    return "a mesh of " + " x ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_marked,
    check_mesh,
    check_existing,
    check_inside_sharded,
    check_forward_defined,
    check_scalars,
    check_contiguous,
    check_policy_dtypes,
    check_storage_dtypes,
    check_ignored,
    check_forward_methods,
    check_tensor_parallel,
    check_one_mesh,
)

# A piece that a framework shards need carry no mark; what it ignores and over what meshes, it manages itself.
WHOLE_MODEL_RULES = (check_marked, check_ignored, check_one_mesh)
