"""A model's parameters and buffers by identity: who holds them, their memory, whether they have values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from annotate_fsdp.collect import WRAPPER_CHILDREN, original_class

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class Slot:
    """One parameter or buffer, by identity.

    - names: its FQNs, wrapper names left out; several if it is tied or lies in a shared module.
    - holders: (module, attribute) for each place that holds it.
    - is_parameter: else it is a buffer.
    - is_persistent: whether a state dict holds it.
    """

    names: list[str]
    holders: list[tuple[nn.Module, str]]
    is_parameter: bool
    is_persistent: bool

    @property
    def path(self) -> str:
        """Its first FQN."""
        return self.names[0]

    @property
    def kind(self) -> str:
        """What to call it in a message."""
        if self.is_parameter:
            return "parameter"
        return "buffer" if self.is_persistent else "non-persistent buffer"

    @property
    def owner(self) -> str:
        """Name of the class that holds it."""
        return original_class(self.holders[0][0]).__name__

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that its first holder holds now."""
        return next(iter(self.tensors))

    @property
    def is_unwritten(self) -> bool:
        """Whether any of its tensors lacks values."""
        return any(map(is_unwritten, self.tensors))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What its holders hold now: one tensor, unless somebody replaced it in one of them."""
        held = [
            (module._parameters if self.is_parameter else module._buffers).get(n)
            for module, n in self.holders
        ]
        return list({id(tensor): tensor for tensor in held if tensor is not None}.values())


def find_slots(model: nn.Module) -> list[Slot]:
    """Return every parameter and buffer of `model` once, in registration order."""
    slots: dict[int, Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor, is_parameter in _own_tensors(module):
            name = plain_name(f"{prefix}.{attribute}" if prefix else attribute)
            persistent = is_parameter or attribute not in module._non_persistent_buffers_set
            slot = slots.setdefault(id(tensor), Slot([], [], is_parameter, False))
            slot.names += [name] if name not in slot.names else []
            slot.is_persistent |= persistent
            if (module, attribute) not in slot.holders:
                slot.holders.append((module, attribute))
    return list(slots.values())


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, True
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer, False


def plain_name(name: str) -> str:
    """Return an FQN without the names that wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_CHILDREN)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, on this rank, as integers that share its memory."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        with torch.no_grad():
            local = local.to_local()
    if local.is_complex():
        local = torch.view_as_real(local)
    return local.view(_BITS[local.itemsize])


def put_in_memory(tensor: torch.Tensor, device: torch.device) -> None:
    """Give a tensor that is on `meta` memory on `device`, each element marked as unwritten."""
    _swap(tensor, _empty_like(tensor, device))
    bits(tensor).fill_(_unwritten_mark(tensor.dtype))


def move(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a plain tensor with its values to `device`."""
    if tensor.device != device:
        _swap(tensor, tensor.detach().to(device))


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    with torch.no_grad():
        local = torch.empty_like(tensor.to_local(), device=device)
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _swap(tensor: torch.Tensor, real: torch.Tensor) -> None:
    """Make `tensor` what `real` is, the same object for all that refer to it: ties, FSDP2, optimizers."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
        if getattr(tensor, "_has_grad_dtype_override", False):  # torch >= 2.15
            real.grad_dtype = tensor.grad_dtype
    for name, value in vars(tensor).items():
        vars(real).setdefault(name, value)
    if tensor.is_leaf and tensor.grad is not None:
        tensor.grad = None
    torch.utils.swap_tensors(tensor, real)


def _unwritten_mark(dtype: torch.dtype) -> int:
    """The integer whose bits say "unwritten": a NaN that no computation returns, or an unlikely number."""
    pattern = b"\xff" if dtype.is_floating_point or dtype.is_complex else b"\xa5"
    size = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    return int.from_bytes(pattern * size, "little", signed=size > 1)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether any float, or all of the integers or bools, of this rank's part were never written."""
    if tensor.is_meta:
        return True
    marked = bits(tensor) == _unwritten_mark(tensor.dtype)
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(marked.any())
    return marked.numel() > 0 and bool(marked.all())
