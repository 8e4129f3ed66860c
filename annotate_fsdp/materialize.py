"""A model on `meta`, sharded or not, to real tensors: initialised, loaded, and nothing left undefined."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from annotate_fsdp.agree import gather_findings
from annotate_fsdp.collect import Node, Tree, collect_tree
from annotate_fsdp.errors import Finding, MaterializeError
from annotate_fsdp.introspect import has_lazy_init, read_units
from annotate_fsdp.loading import load, match_state_dict
from annotate_fsdp.slots import Slot, bits, find_slots, move, put_in_memory

M = TypeVar("M", bound=nn.Module)


def materialize(
    model: M,
    device: torch.device | str | int,
    *,
    init: Callable[[M], object] | None = None,
    state_dict: Mapping[str, Any] | None = None,
) -> M:
    """Give every tensor of `model` that is on `meta` memory on `device` and values, in place.

    Ties, shared buffers, `requires_grad`, storage dtypes and FSDP2's references stay as they are. What
    is on `meta` no longer exists afterwards; what has values keeps them. Values come, in this order, from

    - `init(model)`, called without gradients and with `device` as default device; or, if there is neither
      `init` nor `state_dict`, from each module's own `reset_parameters()`, children first;
    - `state_dict`, whose every key must fit: full (the same plain tensors on every rank) or sharded
      (DTensors), names with or without wrappers, a tied tensor under one of its names or all. It is
      read only, and cast to each tensor's storage dtype, so that fp32 islands stay fp32;
    - `reset_buffers()` of the modules that define it and still have a buffer without values.

    Random values are drawn on each rank for its own shard, so they differ from those of an unsharded
    model; replicas get equal ones. To start from the same weights pass the same `state_dict`.

    Args:
        model: built on `meta`, then sharded or not; no forward may have run.
        device: where the tensors go; parameters of CPU-offloaded units stay on the CPU.
        init: writes into the parameters and buffers it is given.
        state_dict: see above.

    Raises:
        AnnotationError: a key is missing, unexpected or does not fit, or a forward has run (nothing was
            changed); or something was left without values (AF602, AF603). All findings, on every rank.
    """
    place = _device(model, device)
    _free_gathered(model)
    slots = find_slots(model)
    mesh = _mesh(slots)
    fresh = [slot for slot in slots if slot.tensor.is_meta]
    loading = match_state_dict(model, slots, state_dict) if state_dict is not None else None
    findings = list(_check_ready(model, fresh, place))
    _raise_everywhere(mesh, [*findings, *(loading.findings if loading else ())])

    tree = collect_tree(model)
    _move_to_memory(tree, slots, fresh, place)

    def initialise() -> None:
        if init is not None:
            init(model)
        elif loading is None:
            _reset_parameters(tree, fresh)

    def complete() -> None:
        if loading is not None:
            load(loading)
        else:
            _copy_to_replicas(fresh)
        _reset_buffers(tree, fresh)

    for stage in (initialise, complete):
        error = _attempt(stage, place)
        _raise_everywhere(mesh, [_failed(error)] if error else (), original=error)
    _raise_everywhere(mesh, list(_check_written(tree, fresh)))
    return model


def _device(model: object, device: torch.device | str | int) -> torch.device:
    """Return the device, checked; nothing can be said to other ranks without these two arguments."""
    place = torch.device("cpu")
    finding: tuple[str, str, str] | None = None
    if not isinstance(model, nn.Module):
        finding = f"a {type(model).__name__} as model", "it is no torch.nn.Module", "Pass the model"
    try:
        place = torch.empty(0, device=device).device
        if place.type == "meta":
            finding = "device='meta'", "it holds no values", 'Write device="cuda" or device="cpu"'
    except (RuntimeError, TypeError, AssertionError) as error:
        finding = f"device={device!r}", f"torch has no such device here [{error}]", 'Write device="cpu"'
    if finding is not None:
        raise MaterializeError([Finding("AF610", "error", "", *finding)])
    return place


def _free_gathered(model: nn.Module) -> None:
    """Put shards back where a forward has left gathered parameters; values go into the shards."""
    if has_lazy_init(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _attempt(stage: Callable[[], None], place: torch.device) -> Exception | None:
    """Run a stage without gradients and with `place` as default device; return what it raises."""
    try:
        with _quiet(), torch.no_grad(), place:
            stage()
    except Exception as error:
        return error
    return None


def _mesh(slots: Iterable[Slot]) -> DeviceMesh | None:
    """The largest mesh that a tensor lives on: the ranks that must hear of each other's findings."""
    meshes = [slot.tensor.device_mesh for slot in slots if isinstance(slot.tensor, DTensor)]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def _check_ready(model: nn.Module, fresh: Sequence[Slot], place: torch.device) -> Iterator[Finding]:
    if fresh and has_lazy_init(model):
        yield Finding(
            "AF609",
            "error",
            "",
            f"{len(fresh)} tensors on meta, such as {fresh[0].path}",
            "a forward has run through the model, and FSDP2 keeps what it then found",
            "Build and shard the model again, and materialize it before its first forward",
        )
    offloaded = _offloaded(collect_tree(model))
    for slot in fresh:
        tensor = slot.tensor
        if not isinstance(tensor, DTensor) or slot.path in offloaded:
            continue
        if tensor.device_mesh.device_type != place.type:
            wrong = f"it is sharded over a mesh of {tensor.device_mesh.device_type} ranks"
            write = f"Write device={tensor.device_mesh.device_type!r}, or shard it with CPUOffloadPolicy()"
            yield Finding("AF610", "error", slot.path, f"device={str(place)!r}", wrong, write)
            return


def _offloaded(tree: Tree) -> set[str]:
    """FQNs of the parameters that live on the CPU between their uses."""
    units = read_units(tree)
    return {path for u in units if isinstance(u.offload_policy, CPUOffloadPolicy) for path in u.members}


def _raise_everywhere(
    mesh: DeviceMesh | None, findings: Sequence[Finding], original: Exception | None = None
) -> None:
    """Raise on every rank if one has findings; on the rank of an unexpected error, that error."""
    everyones = gather_findings(mesh, findings) if mesh is not None else findings
    if original is not None:
        raise original
    if everyones:
        raise MaterializeError(everyones)


# -- memory ----------------------------------------------------------------------------------------


def _move_to_memory(tree: Tree, slots: Sequence[Slot], fresh: Sequence[Slot], place: torch.device) -> None:
    """Put fresh tensors in memory, each element marked as unwritten, and plain ones on the device."""
    offloaded = _offloaded(tree)
    is_fresh = {id(slot) for slot in fresh}
    for slot in slots:
        tensor = slot.tensor
        if id(slot) in is_fresh:
            device = torch.device("cpu") if slot.path in offloaded else place
            put_in_memory(tensor, device)
        elif not isinstance(tensor, DTensor):
            move(tensor, place)


# -- values ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's remark that random DTensors on CPU are per rank, which `materialize` documents."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        yield


def _reset_parameters(tree: Tree, fresh: Sequence[Slot]) -> None:
    mine = {id(slot.tensor) for slot in fresh}
    for node in _nodes_around(tree, fresh):
        reset = getattr(node.inner, "reset_parameters", None)
        if callable(reset):
            others = [slot for slot in find_slots(node.inner) if id(slot.tensor) not in mine]
            with _keeping(others), _own_randomness(node.inner):
                reset()


def _reset_buffers(tree: Tree, fresh: Sequence[Slot]) -> None:
    unwritten = [slot for slot in fresh if not slot.is_parameter and slot.is_unwritten]
    for node in _nodes_around(tree, unwritten):
        reset = getattr(node.inner, "reset_buffers", None)
        if callable(reset):
            buffers = [slot for slot in find_slots(node.inner) if not slot.is_parameter]
            if any(slot.is_unwritten for slot in buffers):
                with _keeping([slot for slot in buffers if not slot.is_unwritten]):
                    reset()


def _nodes_around(tree: Tree, slots: Sequence[Slot]) -> list[Node]:
    """Return the modules that hold any of `slots` or contain one that does, children first."""
    around = {tree.node_of[id(module)] for slot in slots for module, _ in slot.holders}
    nodes = sorted(tree.nodes, key=lambda node: node.finished)
    for node in nodes:
        if node.index in around:
            around.update(node.parents)
    return [node for node in nodes if node.index in around]


@contextlib.contextmanager
def _keeping(slots: Sequence[Slot]) -> Iterator[None]:
    """Give these tensors their present values back at the end, also if they were replaced."""
    kept = [(slot, slot.tensor, slot.tensor.detach().clone()) for slot in slots]
    yield
    for slot, tensor, values in kept:
        bits(tensor).copy_(bits(values))
        for module, name in slot.holders:
            (module._parameters if slot.is_parameter else module._buffers)[name] = tensor  # type: ignore[assignment]


@contextlib.contextmanager
def _own_randomness(module: nn.Module) -> Iterator[None]:
    """Let ranks that hold different shards draw different numbers, from generators that stay in step.

    On other devices than the CPU, DTensor does that itself. On the CPU every rank would draw the same
    numbers for its shard, so that the rows of a weight repeat.
    """
    sharded = [p for p in module.parameters(recurse=False) if isinstance(p, DTensor)]
    if not sharded or sharded[0].device_mesh.device_type != "cpu":
        yield
        return
    seed = int(torch.randint(2**31, (), device="cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed + _shard_index(sharded[0]))
        yield


def _shard_index(tensor: DTensor) -> int:
    """This rank's position among those that hold different parts of `tensor`."""
    mesh, index = tensor.device_mesh, 0
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            index = index * mesh.size(axis) + mesh.get_local_rank(axis)
    return index


def _copy_to_replicas(fresh: Sequence[Slot]) -> None:
    """Give all replicas of a shard the values of the first, whatever their generators drew."""
    for tensor in (tensor for slot in fresh for tensor in slot.tensors):
        if isinstance(tensor, DTensor):
            mesh, local = tensor.device_mesh, tensor.to_local()
            for axis, placement in enumerate(tensor.placements):
                if isinstance(placement, Replicate) and mesh.size(axis) > 1:
                    values = local.contiguous()
                    dist.broadcast(values, group=mesh.get_group(axis), group_src=0)
                    local.copy_(values)


# -- what is left ----------------------------------------------------------------------------------


def _check_written(tree: Tree, fresh: Sequence[Slot]) -> Iterator[Finding]:
    """AF602, AF603, AF611: everything must have been written by somebody."""
    for slot in fresh:
        if not slot.is_unwritten:
            continue
        method = "reset_parameters" if slot.is_parameter else "reset_buffers"
        has_method = callable(getattr(slot.holders[0][0], method, None))
        wrong = "nobody wrote its values, or not all of them"
        write = f"Write it in {slot.owner}.{method}(), or in materialize(init=...)"
        if not has_method:
            write = f"Define {method}() on {slot.owner}, or write it in materialize(init=...)"
        if slot.is_persistent:
            write += ", or pass it in state_dict"
        code = "AF602" if slot.is_persistent else "AF603"
        yield Finding(code, "error", slot.path, f"a {slot.kind} that was on meta", wrong, write)
    for node in tree.nodes:
        for name, value in vars(node.inner).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield Finding(
                    "AF611",
                    "error",
                    f"{node.path}.{name}" if node.path else name,
                    f"a plain attribute of {node.class_name} on meta",
                    "it is no parameter and no buffer, so nothing gives it values",
                    f"Write self.register_buffer({name!r}, ..., persistent=False), or set it in init",
                )


def _failed(error: Exception) -> Finding:
    declared = f"initialising failed with {type(error).__name__}: {error}"
    return Finding(
        "AF612", "error", "", declared, "the model has no values", "See the traceback of that rank"
    )
