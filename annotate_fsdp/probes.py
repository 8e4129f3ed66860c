"""What can be asked of a step while it runs: its collectives, the tensors it passes, whether it goes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}


class CountCollectives(TorchDispatchMode):
    """Count collectives by kind.

    `CommDebugMode` counts the same, but its module tracker makes views of all module outputs, which breaks
    models that write into them.
    """

    supports_higher_order_operators = True

    def __init__(self, count: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor turns it into collectives and plain operations, seen next
        if isinstance(func, torch._ops.OpOverload):
            namespace, _, name = func._schema.name.partition("::")
            if "c10d" in namespace:
                short = name.replace("_", "")
                for start, kind in COLLECTIVES.items():
                    if short.startswith(start):
                        self.count(kind)
        return func(*args, **(kwargs or {}))


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
