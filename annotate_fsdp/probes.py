"""What can be asked of a step while it runs: its collectives, the tensors it passes, whether it goes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from annotate_fsdp.collectives import Kind

COLLECTIVES: dict[str, Kind] = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
}

FSDP2_CALLS: dict[Kind, str] = {  # by their names in torch.distributed
    "all_gather": "all_gather_single",
    "reduce_scatter": "reduce_scatter_single",
    "all_reduce": "all_reduce",
}


@dataclass(frozen=True)
class Call:
    """A collective as it is called: its kind, the dtype and size of its larger buffer, the group's size."""

    kind: Kind
    dtype: torch.dtype
    numel: int
    ranks: int


class CountCollectives(TorchDispatchMode):
    """Report every collective that is called.

    `CommDebugMode` counts the same, but its module tracker makes views of all module outputs, which breaks
    models that write into them.

    Args:
        count: called with each collective.
        read: called with each DTensor that an operation takes, and the operation's name.
    """

    supports_higher_order_operators = True

    def __init__(
        self, count: Callable[[Call], None], read: Callable[[torch.Tensor, str], None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.count = count
        self.read = read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            if self.read is not None:
                for tensor in tensors_in((args, kwargs)):
                    if isinstance(tensor, DTensor):
                        self.read(tensor, str(func).removeprefix("aten.").partition(".")[0])
            return NotImplemented  # a DTensor turns it into collectives and plain operations, seen next
        if isinstance(func, torch._ops.OpOverload):
            namespace, _, name = func._schema.name.partition("::")
            if "c10d" in namespace:
                short = name.replace("_", "")
                for start, kind in COLLECTIVES.items():
                    if short.startswith(start):
                        self.count(_call(kind, args))
        return func(*args, **(kwargs or {}))


@contextmanager
def watch_to_local(read: Callable[[torch.Tensor, str], None]) -> Iterator[None]:
    """Report every DTensor whose shard is taken by `to_local`, which is no operation."""
    method = DTensor.to_local

    def to_local(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        read(self, "to_local")
        return method(self, *args, **kwargs)

    DTensor.to_local = to_local  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        DTensor.to_local = method  # type: ignore[method-assign]


@contextmanager
def before_collectives(report: Callable[[Kind], None]) -> Iterator[None]:
    """Report every collective of FSDP2 before it is called.

    `CountCollectives` sees those of others too, but slows every operation down and turns the compiler off.
    """

    def reporting(kind: Kind, call: Callable[..., Any]) -> Callable[..., Any]:
        def reported(*args: Any, **kwargs: Any) -> Any:
            report(kind)
            return call(*args, **kwargs)

        return reported

    with ExitStack() as stack:
        for kind, name in FSDP2_CALLS.items():
            call = getattr(dist, name)
            stack.callback(setattr, dist, name, call)
            setattr(dist, name, reporting(kind, call))
        yield


def _call(kind: Kind, args: Any) -> Call:
    """Read a call off its arguments: buffers, or lists of buffers, and the process group."""
    buffers = list(tensors_in(args))
    numel = max((sum(t.numel() for t in tensors_in(arg)) for arg in args), default=0)
    groups = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    ranks = next((group.size() for arg in groups if (group := _group(arg)) is not None), 0)
    return Call(kind, buffers[0].dtype, numel, ranks)


def _group(boxed: torch.ScriptObject) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(boxed)
    except (RuntimeError, TypeError):  # a reduce operation is boxed too
        return None


def float_dtypes(value: object) -> Iterator[torch.dtype]:
    """Yield the dtypes of the floating tensors in nested containers."""
    return (tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point())


def tensors_in(value: object, seen: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists, tuples, sets and dataclasses: where FSDP2 casts them."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:  # a container that holds itself
        return
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    elif is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, item.name) for item in fields(value)]
    for item in inside:
        yield from tensors_in(item, seen | {id(value)})


def in_backward() -> bool:
    """Whether this is called from inside a backward pass, as recomputation is."""
    return torch._C._current_graph_task_id() != -1
