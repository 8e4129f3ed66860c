"""NVIDIA NeMo AutoModel: what it calls on a model class's attribute `parallelizer`, carried out by marks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar, cast

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

from annotate_fsdp.collect import collect_tree, wrapper_chain
from annotate_fsdp.errors import AnnotationError, Finding
from annotate_fsdp.lowering import check_lowering
from annotate_fsdp.marks import UnitSpec
from annotate_fsdp.shard import (
    Prepared,
    ShardOptions,
    agree_on,
    check_call,
    mesh_findings,
    prepare,
    shard_annotated,
    shard_part,
)

M = TypeVar("M", bound=nn.Module)

#: The axes that replicate and shard, where a mesh has them; the first pair whose second axis exists counts.
DATA_PARALLEL_AXES = (
    ("dp_replicate", "dp_shard_cp"),
    ("dp_replicate", "dp_shard"),
    ("dp_replicate", "dp"),
    ("replicate", "shard"),
)


class AnnotatedModelParallelizer:
    """Shard a model by its marks where NeMo AutoModel asks the model's class how.

    Set an instance as the class attribute `parallelizer`. `parallelize` shards a whole model; where the
    framework shards module by module itself, `_fully_shard_module` carries out each of its calls.

    Args:
        lowering: of `parallelize`, as for `shard_annotated`; module by module it is always `"unit"`.

    Raises:
        AnnotationError: there is no such lowering.
    """

    #: Tells the framework's mixture-of-experts path to call `_fully_shard_module` instead of `fully_shard`.
    _customizes_moe_fsdp: ClassVar[bool] = True

    def __init__(self, lowering: str = "auto") -> None:
        if wrong := list(check_lowering(lowering)):
            raise AnnotationError(wrong)
        self.lowering = lowering

    def parallelize(self, model: M, mesh_context: object) -> M:
        """Shard every marked module of `model` over the data-parallel axes of the context's mesh.

        Works in place and returns the same model. `mesh_context` is read by attribute, and one that is
        missing is None:

        - device_mesh: see `data_parallel_mesh`.
        - mp_policy, offload_policy, reshard_after_forward: of its `strategy_config`, else its own; as for
          `shard_annotated`.
        - activation_checkpointing: True wraps the layers before they are sharded; see `checkpoint_layers`.
        - reapply_trainability: called on the model before anything is planned.
        - ep_size or moe_mesh, tp_plan with tp_size: experts on a mesh of their own, and tensor parallelism,
          are not applied here, and asking for them is an error.

        Raises:
            AnnotationError: the context asks for what is not done here, or as `shard_annotated`; the model
                is as it was.
            PlanMismatchError: as `shard_annotated`.
        """
        strategy = getattr(mesh_context, "strategy_config", None)
        mesh = data_parallel_mesh(getattr(mesh_context, "device_mesh", None))
        options: dict[str, Any] = {
            name: _read(name, strategy, mesh_context)
            for name in ("mp_policy", "offload_policy", "reshard_after_forward")
        }
        options["lowering"] = self.lowering
        was_trainable: list[tuple[nn.Parameter, bool]] = []

        def make() -> Prepared:
            check_call(model, mesh)
            if findings := list(_check_context(mesh_context)):
                raise AnnotationError(findings)
            if (reapply := _read("reapply_trainability", mesh_context, strategy)) is not None:
                was_trainable.extend((each, each.requires_grad) for each in model.parameters())
                reapply(model)
            return prepare(model, mesh, None, cast("ShardOptions", options))

        try:
            prepared = agree_on(mesh, make)
        except Exception:
            for parameter, flag in was_trainable:
                parameter.requires_grad_(flag)
            raise
        if _read("activation_checkpointing", mesh_context, strategy):
            checkpoint_layers(prepared)
        return shard_annotated(model, mesh, **cast("ShardOptions", options))

    def islands(self, module: nn.Module) -> Iterable[nn.Module]:
        """Yield the marked modules at or below `module` whose mark names a policy of its own.

        These are what `_fully_shard_module` gives units of their own; a subclass may narrow them.
        """
        for node in collect_tree(module).nodes:
            if isinstance(node.mark, UnitSpec) and node.mark.policy != "inherit":
                yield node.module

    def _fully_shard_module(self, module: M, **kwargs: Any) -> M:
        """Shard `module` in place as `fully_shard` would, its `islands` before it, and return it.

        Args:
            module: one piece of a model; one that is sharded already comes back as it is.
            **kwargs: those of `fully_shard`: mesh, mp_policy, offload_policy, reshard_after_forward,
                ignored_params; see `shard_part`.

        Raises:
            AnnotationError: as `shard_part`; nothing was sharded.
            PlanMismatchError: likewise.
        """
        return shard_part(module, kwargs.pop("mesh", None), self.islands(module), **kwargs)


def data_parallel_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the part of `mesh` that a model is replicated and sharded over.

    - 1-D, or 2-D without names: `mesh` itself.
    - else the axes that exist of dp_replicate and dp_shard_cp (which may be flattened), of dp_replicate and
      dp_shard, of dp_replicate and dp, or of replicate and shard.

    Raises:
        AnnotationError: it is no mesh of this rank, none of these axes exists, they stand in another order,
            or context-parallel ranks would be left out.
    """
    if findings := list(mesh_findings(mesh)):
        raise AnnotationError(findings)
    assert mesh is not None
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 or (mesh.ndim == 2 and not names):
        return mesh
    declared = f"a mesh of {mesh.ndim} axes {names or '(unnamed)'}"
    for replicate, shard in DATA_PARALLEL_AXES:
        if not names or _axis(mesh, shard) is None:
            continue
        if _axis_size(mesh, "cp") > 1 and shard != "dp_shard_cp":
            wrong = f"the ranks of 'cp' would not reduce their gradients with those of {shard!r}"
            write = f'Flatten the two: mesh["{shard}", "cp"]._flatten("dp_shard_cp")'
            raise AnnotationError([Finding("AF403", "error", "", declared, wrong, write)])
        axes = (shard,) if _axis(mesh, replicate) is None else (replicate, shard)
        if (found := _axis(mesh, axes)) is not None:
            return found
        wrong, write = f"{axes} is not in the order of its axes", "Name the axis that replicates first"
        raise AnnotationError([Finding("AF403", "error", "", declared, wrong, write)])
    known = ", ".join(shard for _, shard in DATA_PARALLEL_AXES)
    wrong, write = "none of them is one to shard over", f"Name one of them {known}"
    raise AnnotationError([Finding("AF403", "error", "", declared, wrong, write)])


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module under all wrappers such as `checkpoint_wrapper`."""
    *_, inner = wrapper_chain(module)
    return inner


def checkpoint_layers(prepared: Prepared) -> None:
    """Wrap the planned units that stand in a ModuleList or ModuleDict in torch's `checkpoint_wrapper`.

    Only those that compute as the caller says (policy `"inherit"`), and none that is wrapped already.
    """
    tree, units = prepared.tree, {path for unit in prepared.plan.units for path in unit.paths}
    for node in tree.nodes:
        chain = wrapper_chain(node.module)
        is_layer = isinstance(node.mark, UnitSpec) and node.mark.policy == "inherit" and node.path in units
        if not is_layer or any(isinstance(each, CheckpointWrapper) for each in chain):
            continue
        wrapper: nn.Module | None = None
        for container in (tree.nodes[parent].inner for parent in node.parents):
            if not isinstance(container, nn.ModuleList | nn.ModuleDict):
                continue
            wrapper = wrapper or checkpoint_wrapper(node.module)
            for name, child in container._modules.items():
                if child is node.module:
                    container._modules[name] = wrapper


def _check_context(context: object) -> Iterator[Finding]:
    """Yield what the context asks for and `parallelize` does not do."""
    strategy = getattr(context, "strategy_config", None)

    def wrong(declared: str, why: str, write: str) -> Finding:
        return Finding("AF108", "error", "", declared, why, write)

    experts = max(
        _read("ep_size", context, strategy) or 1, _axis_size(getattr(context, "moe_mesh", None), "ep")
    )
    if experts > 1:
        why = "experts on a mesh of their own are not sharded here"
        yield wrong(f"ep_size={experts}", why, "Leave such a model to a path that calls _fully_shard_module")
    tensor = max(
        _read("tp_size", context, strategy) or 1, _axis_size(getattr(context, "device_mesh", None), "tp")
    )
    if tensor > 1 and _read("tp_plan", context, strategy) is not None:
        why = "tensor parallelism is not applied here"
        yield wrong(f"a tp_plan with tp_size={tensor}", why, "Apply it before, and pass tp_plan=None")
    checkpointing = _read("activation_checkpointing", context, strategy)
    if not isinstance(checkpointing, bool | None):
        write = "Write True or False, or wrap the modules before"
        yield wrong(f"activation_checkpointing={checkpointing!r}", "it is not a bool", write)
    reapply = _read("reapply_trainability", context, strategy)
    if reapply is not None and not callable(reapply):
        write = "Pass a function of the model"
        yield wrong(f"reapply_trainability={reapply!r}", "it cannot be called", write)


def _read(name: str, *places: object) -> Any:
    """Return the attribute of the first of `places` that has it, None if none has."""
    return next((getattr(place, name) for place in places if hasattr(place, name)), None)


def _axis(mesh: DeviceMesh, axes: str | tuple[str, ...]) -> DeviceMesh | None:
    """Return the sub-mesh of named axes, flattened ones among them; None if there is none."""
    with warnings.catch_warnings():
        # torch gives no other way to a flattened axis; where it will give none, it is as if not flattened
        warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
        try:
            return mesh[axes]
        except KeyError:
            return None


def _axis_size(mesh: object, axis: str) -> int:
    """Return the size of a named axis, 1 where there is none."""
    found = _axis(mesh, axis) if isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names else None
    return found.size() if found is not None else 1
