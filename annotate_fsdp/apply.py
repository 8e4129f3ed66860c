"""Apply a plan: the only file that calls `fully_shard`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from annotate_fsdp.boundary import Boundary
from annotate_fsdp.collect import Held, Node, Tree, is_on_mesh
from annotate_fsdp.errors import Finding, PartlyShardedError
from annotate_fsdp.introspect import (
    ForgetUnused,
    FreeAfterEvaluation,
    FreeOutdated,
    GatherAgain,
    Settled,
    data_parallel_mesh,
    place_full_mesh,
)
from annotate_fsdp.plan import Plan, Unit


def apply_plan(tree: Tree, plan: Plan, mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None) -> None:
    """Shard the modules of `tree` as `plan` says, unit by unit, in place.

    A unit's full parameters are let go before the next unit is sharded; `tree` then holds the sharded ones.

    Raises:
        PartlyShardedError: `fully_shard` failed although every check had passed; the model is then sharded
            in part and must be built again.
    """
    nodes = {node.path: node for node in tree.nodes}
    modules = {path: node.module for path, node in nodes.items()}
    held = {each.path: each for each in tree.held}
    places = {each.path: _place(tree, each) for each in tree.held}
    meshes = _mesh_arguments(mesh, dp_mesh_dims)
    done: list[str] = []
    for unit in plan.units:
        if unit.lowering == "kept":
            continue
        targets = [modules[path] for path in unit.paths]
        try:
            fully_shard(
                targets if len(targets) > 1 else targets[0],
                mp_policy=_policy(unit, held),
                offload_policy=unit.offload_policy,
                reshard_after_forward=unit.reshard_after_forward,
                ignored_params={held[path].parameter for path in unit.excluded} or None,
                **meshes(unit, held),
            )
        except Exception as error:
            raise PartlyShardedError([_failed_midway(unit, done, error)]) from error
        done.append(unit.name)
        for path in unit.members:  # whoever held the full one would keep its memory, on the device too
            owner, name = places[path]
            parameter = owner._parameters[name]
            assert parameter is not None
            held[path].parameter = parameter
        if unit.gathers_again:
            for target in targets:
                GatherAgain(target).install()
        if unit.reduces_unused:
            ForgetUnused(modules[unit.path]).install()
        for cast in unit.casts:
            Boundary(cast, unit.path, *places[cast.parameter]).install(modules[cast.path])
    sharded = {unit.path: _sharded_module(nodes[unit.path]) for unit in plan.units}
    for unit in plan.units:
        if unit.lowering == "kept":
            continue
        Settled.install(modules[unit.path], unit.name)
        for path, method in unit.forward_methods:
            register_fsdp_forward_method(modules[path], method)
        forward, backward = plan.ahead[unit.path]
        if forward:
            sharded[unit.path].set_modules_to_forward_prefetch([sharded[path] for path in forward])
        if backward:
            sharded[unit.path].set_modules_to_backward_prefetch([sharded[path] for path in backward])
    _free_in_time([unit for unit in plan.units if unit.lowering != "kept"], modules)


def _free_in_time(units: list[Unit], modules: dict[str, nn.Module]) -> None:
    """Put hooks on the modules of `units`, so that what stays gathered is never used once it is outdated."""
    freed = [unit for unit in units if unit.is_freed_after_evaluation]
    for unit in freed:
        outdated = FreeOutdated(modules[unit.path])
        for path in unit.paths:
            modules[path].register_forward_pre_hook(outdated, prepend=True)
    if not freed:
        return
    evaluation = FreeAfterEvaluation(modules[unit.path] for unit in freed)
    scattered = any(unit.path for unit in freed)  # what belongs to the root alone is gathered by it alone
    parts = [path for unit in units for path in unit.paths if path] if scattered else []
    evaluation.watch(modules[""], (modules[path] for path in parts))
    for path, method in (pair for unit in units for pair in unit.forward_methods):
        evaluation.watch_method(modules[path], method)


def _sharded_module(node: Node) -> FSDPModule:
    """The module of a wrapper chain that is sharded."""
    module = node.module if isinstance(node.module, FSDPModule) else node.inner
    assert isinstance(module, FSDPModule)
    return module


def _place(tree: Tree, held: Held) -> tuple[nn.Module, str]:
    """Where a parameter is found, also after it was replaced."""
    return tree.nodes[held.owners[0]].inner, held.path.rpartition(".")[2]


def _policy(unit: Unit, held: dict[str, Held]) -> MixedPrecisionPolicy:
    """The unit's policy, with the dtypes of the members that compute in another one."""
    if not unit.param_dtypes:
        return unit.policy
    dtypes = {id(held[path].parameter): dtype for path, dtype in unit.param_dtypes}

    def own_dtype(parameter: nn.Parameter) -> torch.dtype | None:
        return dtypes.get(id(parameter))

    # a field that only torch >= 2.15 has; the plan names no such dtypes on older ones
    return replace(unit.policy, param_dtype_override_fn=own_dtype)  # type: ignore[call-arg, unused-ignore]


def _mesh_arguments(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> Any:
    """Return a function that gives a unit's mesh arguments.

    Under `dp_mesh_dims` FSDP2 itself takes DTensors on the full mesh only. A unit of other parameters is
    sharded over the data-parallel axes, and so is one that holds both, its full-mesh DTensors placed one
    by one.
    """
    if dims is None:
        return lambda unit, held: {"mesh": mesh}
    whole = {"mesh": mesh, "dp_mesh_dims": dims}
    axes = data_parallel_mesh(mesh, dims)

    def arguments(unit: Unit, held: dict[str, Held]) -> dict[str, Any]:
        on_mesh = [is_on_mesh(held[path].parameter, mesh) for path in unit.members]
        if on_mesh and all(on_mesh):
            return whole
        if any(on_mesh):
            return {"mesh": axes, "shard_placement_fn": place_full_mesh(mesh, dims)}
        return {"mesh": axes}

    return arguments


def _failed_midway(unit: Unit, done: list[str], error: Exception) -> Finding:
    sharded = ", ".join(done) or "none"
    return Finding(
        "AF801",
        "error",
        unit.path,
        f"unit {unit.name} [{type(error).__name__}: {error}]",
        f"fully_shard failed after these units were sharded: {sharded}",
        "Build the model again before another call, and report this as a missing check",
    )
