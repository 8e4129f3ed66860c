"""The two calls of a framework: plan a marked model, and shard it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

from annotate_fsdp.agree import check_agreement
from annotate_fsdp.apply import apply_plan
from annotate_fsdp.checks import Facts, run_checks
from annotate_fsdp.collect import Tree, collect_tree
from annotate_fsdp.errors import AnnotationError, Finding
from annotate_fsdp.hazards import run_hazards
from annotate_fsdp.introspect import read_units
from annotate_fsdp.inversion import Inverter
from annotate_fsdp.lowering import (
    CAN_FOLD,
    GROUP_BYTES,
    MERGE_BELOW,
    Surroundings,
    check_lowering,
    join_conditional,
    lower_plan,
)
from annotate_fsdp.marks import PLAN_ATTRIBUTE, Policy, Reshard, UnitSpec, did_you_mean
from annotate_fsdp.plan import MeshSpec, Plan
from annotate_fsdp.planner import Planner, PlanOptions
from annotate_fsdp.policies import check_policies

M = TypeVar("M", bound=nn.Module)
WorldSize = int | tuple[int, int]


class ShardOptions(TypedDict, total=False):
    """The keyword options that `shard_annotated`, `plan_annotated` and `audit` share.

    - mp_policy: precision of every unit whose mark names none; `MixedPrecisionPolicy()` if None.
    - offload_policy: as in `fully_shard`.
    - reshard_after_forward: for units whose mark, and whose enclosing units' marks, say nothing; None is
      FSDP2's default (True). The root never reshards unless it is marked to.
    - ignored_params: parameters that FSDP leaves alone; each unit gets those below it.
    - dp_mesh_dims: which axes of a larger mesh are data-parallel.
    - policies: names that marks may use, to a policy, dtype or callable.
    - lowering: `"auto"` (group what is small), `"group"`, `"fold"` (fold what may be folded, group what is
      left; torch >= 2.15) or `"unit"` (each tagged module its own call); see `lowering.lower_plan`.
    - merge_below: bytes in the compute dtype, without padding, up to which a unit is small enough to be
      grouped or folded; 4 MiB.
    - group_bytes: such bytes that one group holds at most; more makes further groups; 32 MiB.
    - prefetch: (forward depth, backward depth): how many units ahead each unit gathers, in the order in which
      the units run, nested ones included; 0 is what FSDP2 does by itself (none in forward beyond what its
      streams overlap, one in backward). Each costs the memory of a gathered unit.
    - existing: `"error"`, or `"keep"` to leave units alone that are sharded already.
    - check_ranks: exchange the plan's fingerprint over the mesh before sharding.
    """

    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    reshard_after_forward: Reshard | None
    ignored_params: Iterable[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    policies: Mapping[str, Policy] | None
    lowering: str
    merge_below: int
    group_bytes: int
    prefetch: tuple[int, int]
    existing: Literal["error", "keep"]
    check_ranks: bool


class PartOptions(TypedDict, total=False):
    """The keyword options of `shard_part`: those of `fully_shard`, each None if left out."""

    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    reshard_after_forward: bool | int | None
    ignored_params: Iterable[nn.Parameter] | None


@dataclass(frozen=True)
class Prepared:
    """A plan with everything that was found on the way to it."""

    tree: Tree
    plan: Plan
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that stop sharding."""
        return tuple(finding for finding in self.findings if finding.severity == "error")


def shard_annotated(model: M, mesh: DeviceMesh, **options: Unpack[ShardOptions]) -> M:
    """Shard every tagged module of `model` with FSDP2, children before parents and the root last.

    Works in place and returns the same model. Everything is checked, and all ranks of `mesh` agree on
    the plan, before the first module is sharded.

    Args:
        model: carries marks; on a device or on `meta`.
        mesh: 1-D (FSDP), 2-D with named axes (HSDP: replicate, shard), or any with `dp_mesh_dims`.
        **options: see `ShardOptions`.

    Raises:
        AnnotationError: marks, options or the model are wrong, on this rank or another; all findings
            are listed, on every rank, and nothing was sharded.
        PlanMismatchError: the ranks hold different plans; nothing was sharded.
    """

    def make() -> Prepared:
        check_call(model, mesh)
        return prepare(model, mesh, None, options)

    with _garbage_collector_paused():
        prepared = agree_on(mesh, make, check_ranks=options.get("check_ranks", True))
        apply_plan(prepared.tree, prepared.plan, mesh, options.get("dp_mesh_dims"))
    vars(model)[PLAN_ATTRIBUTE] = prepared.plan
    return model


def shard_part(
    module: M, mesh: DeviceMesh, islands: Iterable[nn.Module] = (), **options: Unpack[PartOptions]
) -> M:
    """Shard one piece of a model as a framework's own `fully_shard` call would, its islands before it.

    Works in place and returns the same module. Only the marks of `islands` count, not that of `module` nor
    any other. `module` takes the caller's words as they are: a reshard flag of None is left to FSDP2, which
    takes False for what turns out to be the root. An island takes the policy of its mark, and the caller's
    reshard flag unless its mark says one. What is sharded already, and what lies inside it, is left alone.
    Checks and agreement are those of `shard_annotated`, but nothing need be marked, and the parameters that
    the framework ignores may be trainable.

    Args:
        module: on a device or on `meta`; may be a wrapper.
        mesh: as for `shard_annotated`.
        islands: modules below `module`, or their wrappers; those without a unit mark do not count.
        **options: see `PartOptions`.

    Raises:
        AnnotationError: as `shard_annotated`; nothing was sharded.
        PlanMismatchError: likewise.
    """

    def make() -> Prepared:
        check_call(module, mesh)
        return prepare(module, mesh, None, cast("ShardOptions", options), islands=tuple(islands))

    prepared = agree_on(mesh, make)
    apply_plan(prepared.tree, prepared.plan, mesh, None)
    return module


def agree_on(mesh: DeviceMesh, make: Callable[[], Prepared], *, check_ranks: bool = True) -> Prepared:
    """Return what `make` prepares, once it is free of errors and the same on every rank of `mesh`.

    Args:
        mesh: its ranks must all call this.
        make: what it raises is an error of every rank.
        check_ranks: False asks nobody else.

    Raises:
        AnnotationError: there are findings on this rank or another, the same list on every rank.
        PlanMismatchError: the ranks hold different plans.
    """
    if unusable := list(mesh_findings(mesh)):
        raise AnnotationError(unusable)  # there is nobody to agree with
    prepared: Prepared | None = None
    try:
        prepared = make()
        errors = prepared.errors
    except AnnotationError as error:
        errors = error.findings
    except Exception as error:
        if check_ranks:
            check_agreement(mesh, None, (_unexpected(error),))
        raise
    if check_ranks:
        check_agreement(mesh, prepared.plan if prepared else None, errors)
    if errors or prepared is None:
        raise AnnotationError(errors)
    return prepared


def plan_annotated(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    world_size: WorldSize | None = None,
    **options: Unpack[ShardOptions],
) -> Plan:
    """Return what `shard_annotated` would do, without a process group and without touching the model.

    Args:
        model: carries marks; may be on `meta`.
        mesh: as for `shard_annotated`; only its shape is read.
        world_size: instead of a mesh, the number of ranks, or (replicate, shard) for HSDP. With neither,
            the plan has no mesh and counts bytes unsharded.
        **options: see `ShardOptions`.

    Raises:
        AnnotationError: what would be wrong, all findings at once.
    """
    check_call(model, mesh)
    prepared = prepare(model, mesh, world_size, options)
    if prepared.errors:
        raise AnnotationError(prepared.errors)
    return prepared.plan


def prepare(
    model: nn.Module,
    mesh: DeviceMesh | None,
    world_size: WorldSize | None,
    options: ShardOptions,
    *,
    read_only: bool = False,
    with_hazards: bool = False,
    islands: Iterable[nn.Module] | None = None,
) -> Prepared:
    """Collect, plan and check; an option that has no meaning is a finding, and its default is used.

    Args:
        read_only: plan as if nothing were sharded yet, to hold a sharded model against it.
        with_hazards: look also for what runs, though not as meant.
        islands: `model` is a part of a model, and only the marks of these count; see `shard_part`.
    """
    is_part = islands is not None
    options, wrong = _usable_options(options, PartOptions if is_part else ShardOptions)
    spec, wrong_size = mesh_spec(mesh, world_size, options.get("dp_mesh_dims"))
    existing = "read" if read_only else "keep" if is_part else options.get("existing", "error")
    with _garbage_collector_paused():
        tree = collect_tree(model)
        if islands is not None:
            _forget_other_marks(tree, islands)
        kept = read_units(tree) if existing == "keep" else ()
        planner = Planner(tree, _plan_options(options, spec, is_part), kept)
        plan = planner.plan()
        facts = Facts(tree, plan, mesh, options.get("dp_mesh_dims"), existing)
        checked = run_checks(facts, is_part=is_part)
        found = [*wrong, *wrong_size, *tree.findings, *planner.findings, *checked]
        found += run_hazards(facts) if with_hazards else []
        if not any(finding.severity == "error" for finding in found):
            plan, wrong_dtypes = _lowered(planner, plan, options, "unit" if is_part else None)
            found += wrong_dtypes
    return Prepared(tree, plan, tuple(dict.fromkeys(found)))


def _lowered(
    planner: Planner, plan: Plan, options: ShardOptions, always: str | None
) -> tuple[Plan, list[Finding]]:
    """Return how `plan` is carried out, under the lowering `always` if there is one, and what cannot be."""
    lowering = always or options.get("lowering", "auto")
    is_plain = not any(unit.param_dtypes for unit in plan.units) and not planner.has_conditional
    if lowering == "unit" and is_plain:
        return plan, []
    nodes = planner.tree.nodes
    sites = planner.sites()
    inverter = Inverter(planner.tree, sites, CAN_FOLD)
    plan = inverter.plan(plan)
    if inverter.findings:
        return plan, inverter.findings
    surroundings = Surroundings(
        sites=sites,
        finished={node.path: node.finished for node in nodes},
        parents={node.path: [nodes[parent].path for parent in node.parents] for node in nodes},
        registered={held.path: position for position, held in enumerate(planner.tree.held)},
    )
    plan, wrong = join_conditional(plan, surroundings)
    if wrong:
        return plan, wrong
    merge_below = options.get("merge_below", MERGE_BELOW)
    group_bytes = options.get("group_bytes", GROUP_BYTES)
    return lower_plan(plan, surroundings, lowering, merge_below=merge_below, group_bytes=group_bytes), []


def _forget_other_marks(tree: Tree, islands: Iterable[nn.Module]) -> None:
    """Keep the marks of `islands` only, and of those only where a unit can still be made below the root.

    The root keeps its entry points: whoever shards it, they are entry points of its unit.
    """
    counted = {tree.node_of[id(island)] for island in islands if id(island) in tree.node_of}
    counted -= {0, *tree.inside_sharded}
    for node in tree.nodes:
        if node.index in counted and isinstance(node.mark, UnitSpec):
            continue
        node.mark, node.provenance = None, ""
        if node is not tree.root:
            node.entry_points = ()


@contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """Planning and sharding make many objects that stay; the collector would walk all of them, many times.

    Full parameters are freed as they are sharded: no cycle of references holds them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def mesh_spec(
    mesh: DeviceMesh | None, world_size: WorldSize | None, dims: DataParallelMeshDims | None
) -> tuple[MeshSpec | None, list[Finding]]:
    """Return the data-parallel shape of a mesh or world size, None if neither says one, and what is wrong."""
    if world_size is None:
        return (_mesh_shape(mesh, dims) if mesh is not None else None), []
    write = "Write world_size=64, or world_size=(8, 8) for 8 replicas of 8 shards"
    pair = world_size if isinstance(world_size, tuple) else (1, world_size)
    if len(pair) != 2 or not all(type(size) is int and size > 0 for size in pair):
        spec, wrong = None, "it is no number of ranks"
    else:
        spec, wrong = MeshSpec(*pair), ""
    if mesh is not None:
        shape = _mesh_shape(mesh, dims)
        if spec is not None and spec != shape:
            wrong, write = f"the mesh has {shape}", "Pass one of the two"
        spec = shape
    findings = [Finding("AF108", "error", "", f"world_size={world_size!r}", wrong, write)] if wrong else []
    return spec, findings


def _mesh_shape(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> MeshSpec:
    names = tuple(mesh.mesh_dim_names or ())
    if dims is None:
        sizes = (1, mesh.size(0)) if mesh.ndim == 1 else (mesh.size(0), mesh.size(1))
        return MeshSpec(*sizes, names)
    size = {name: mesh.size(axis) for axis, name in enumerate(names)}
    replicate, shard = (
        _product(size.get(name, 1) for name in axes) for axes in (dims.replicate_names, dims.shard_names)
    )
    return MeshSpec(replicate, shard, names)


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _plan_options(options: ShardOptions, spec: MeshSpec | None, is_part: bool) -> PlanOptions:
    return PlanOptions(
        mp_policy=options.get("mp_policy") or MixedPrecisionPolicy(),
        offload_policy=options.get("offload_policy") or OffloadPolicy(),
        reshard_after_forward=options.get("reshard_after_forward"),
        ignored=frozenset(id(parameter) for parameter in options.get("ignored_params") or ()),
        policies=dict(options.get("policies") or {}),
        mesh=spec,
        is_part=is_part,
        prefetch=options.get("prefetch", (0, 0)),
    )


def check_call(model: object, mesh: object) -> None:
    """Refuse a model that is no module and a mesh that is no mesh of this rank; None is no mesh yet.

    Raises:
        AnnotationError: either is wrong.
    """
    findings = list(mesh_findings(mesh)) if mesh is not None else []
    if not isinstance(model, nn.Module):
        declared = f"a {type(model).__name__} as model"
        findings.append(Finding("AF108", "error", "", declared, "it is no torch.nn.Module", "Pass the model"))
    if findings:
        raise AnnotationError(findings)


def mesh_findings(mesh: object) -> Iterator[Finding]:
    """Yield why the ranks of `mesh` cannot talk to each other from here."""
    if not isinstance(mesh, DeviceMesh):
        declared = f"a {type(mesh).__name__} as mesh"
        write = 'Write mesh=init_device_mesh("cuda", (world_size,))'
        yield Finding("AF108", "error", "", declared, "it is no DeviceMesh", write)
    elif mesh.get_coordinate() is None:
        declared = f"a mesh of ranks {mesh.mesh.flatten().tolist()}"
        write = "Call it on the ranks of the mesh only"
        yield Finding("AF404", "error", "", declared, "this rank is not one of them", write)


def _usable_options(options: ShardOptions, kind: type) -> tuple[ShardOptions, list[Finding]]:
    """Return the options of `kind` that mean something, iterables run through; a finding for each other."""
    given: dict[str, Any] = dict(options)
    ignored = given.get("ignored_params")
    if isinstance(ignored, Iterable) and not isinstance(ignored, str | torch.Tensor):
        given["ignored_params"] = tuple(ignored)
    findings = []
    for name, finding in _check_options(given, kind):
        findings.append(finding)
        if not (name == "policies" and isinstance(given.get(name), Mapping)):  # its other names still count
            given.pop(name, None)
    return cast("ShardOptions", given), findings


def _check_options(options: Mapping[str, Any], kind: type) -> list[tuple[str, Finding]]:
    """Return (option, finding) for each option that does not exist or whose value has no meaning."""
    found: list[tuple[str, Finding]] = []

    def wrong(name: str, why: str, write: str) -> None:
        declared = f"{name}={options.get(name)!r}"
        found.append((name, Finding("AF108", "error", "", declared, why, write)))

    known = list(kind.__annotations__)
    for name in options:
        if name not in known:
            meant = did_you_mean(name, known)
            wrong(name, "there is no such option", f"{meant}Write one of {', '.join(known)}")
    types: dict[str, tuple[type, str]] = {
        "mp_policy": (MixedPrecisionPolicy, "Write MixedPrecisionPolicy(param_dtype=torch.bfloat16)"),
        "offload_policy": (OffloadPolicy, "Write CPUOffloadPolicy()"),
        "dp_mesh_dims": (DataParallelMeshDims, 'Write DataParallelMeshDims(shard="dp")'),
        "policies": (Mapping, 'Write policies={"name": MixedPrecisionPolicy(...)}'),
    }
    for name, (cls, write) in types.items():
        if not isinstance(options.get(name), cls | None):
            wrong(name, f"it is no {cls.__name__}", write)
    reshard = options.get("reshard_after_forward")
    is_count = isinstance(reshard, int) and (isinstance(reshard, bool) or reshard > 0)
    is_by_place = reshard == "except_last" and kind is ShardOptions
    if reshard is not None and not is_by_place and not is_count:
        last = '"except_last"' if kind is ShardOptions else "None"
        write = f"Write True, False, a world size to reshard to, or {last}"
        wrong("reshard_after_forward", "it is no value that FSDP2 knows", write)
    for name in ("merge_below", "group_bytes"):
        size = options.get(name, 0)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            wrong(name, "it is no number of bytes", f"Write {name}=4 * 2**20, or 0 to group nothing")
    depths = options.get("prefetch", (0, 0))
    if not (isinstance(depths, tuple) and len(depths) == 2 and all(map(_is_depth, depths))):
        wrong(
            "prefetch",
            "it is no pair of depths",
            "Write prefetch=(1, 2): one unit in forward, two in backward",
        )
    if options.get("existing", "error") not in ("error", "keep"):
        wrong("existing", "it has no meaning", 'Write existing="error" or existing="keep"')
    if not isinstance(options.get("check_ranks", True), bool):
        wrong("check_ranks", "it is not a bool", "Write True or False")
    ignored = options.get("ignored_params")
    if ignored is not None and not _all_parameters(ignored):
        wrong("ignored_params", "it holds something else than parameters", "Pass a set of nn.Parameter")
    policies = options.get("policies")
    policies = policies if isinstance(policies, Mapping) else {}
    for name, problem in check_policies(policies):
        declared = f"policies={{{name!r}: {policies[name]!r}}}"
        found.append(("policies", Finding("AF108", "error", "", declared, problem.wrong, problem.write)))
    found += [("lowering", finding) for finding in check_lowering(options.get("lowering", "auto"))]
    return found


def _is_depth(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _all_parameters(ignored: object) -> bool:
    return isinstance(ignored, tuple) and all(isinstance(value, torch.Tensor) for value in ignored)


def _unexpected(error: Exception) -> Finding:
    return Finding(
        "AF702",
        "error",
        "",
        f"planning failed with {type(error).__name__}: {error}",
        "this rank cannot shard the model",
        "See the traceback of that rank",
    )
