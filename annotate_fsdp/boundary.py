"""The cast hooks at the boundary of a module that is grouped or folded, in place of FSDP2's own."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from annotate_fsdp.errors import Finding, FoldedCallError
from annotate_fsdp.plan import Cast


class Boundary:
    """The two hooks of one module: what FSDP2's would do at its boundary, were it a unit of its own.

    A unit of FSDP2 puts one node of the autograd graph before its inputs. Without it the gradients of a
    tensor used inside and outside of the module would be added in another order, and rounded otherwise.

    FSDP2's own casts cannot serve. A group's would be applied to the root's output when a member does not
    run, and a folded module is no FSDP module.

    Args:
        cast: what to cast.
        unit: name of the unit that gathers the module's parameters.
        owner, name: where one of these parameters is found, to see whether it is gathered.
    """

    def __init__(self, cast: Cast, unit: str, owner: nn.Module, name: str) -> None:
        self.cast = cast
        self.unit = unit
        self.owner = owner
        self.name = name

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the inputs and join their gradients; refuse a call outside of the unit's forward."""
        if self.cast.is_folded and isinstance(self.owner._parameters[self.name], DTensor):
            raise FoldedCallError([self._not_gathered()])
        if self.cast.inputs is not None:
            args, kwargs = cast_floats(args, self.cast.inputs), cast_floats(kwargs, self.cast.inputs)
        return _join_gradients(args, kwargs) if torch.is_grad_enabled() else (args, kwargs)

    def after(self, module: nn.Module, args: object, output: Any) -> Any:
        """Cast the output."""
        return output if self.cast.outputs is None else cast_floats(output, self.cast.outputs)

    def install(self, module: nn.Module) -> None:
        """Put the hooks where `fully_shard` puts its own: inputs before all hooks, outputs after all."""
        module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after)

    def _not_gathered(self) -> Finding:
        return Finding(
            "AF304",
            "error",
            self.cast.path,
            f"a module folded into unit {self.unit or '(root)'}",
            "it was called outside of that unit's forward, so its parameters are not gathered",
            'Call it inside that forward, or shard with lowering="group" or "unit", without conditional=True',
        )


def boundary_of(module: nn.Module) -> Boundary | None:
    """Return the boundary whose hooks are on `module`, None if there is none."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Boundary)), None)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with the floating tensors in it cast, in the containers that FSDP2 looks into.

    Dicts, lists, tuples, named tuples, sets and dataclasses are made anew; other objects are left as they
    are.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if is_dataclass(value) and not isinstance(value, type):
        changes = {item.name: cast_floats(getattr(value, item.name), dtype) for item in fields(value)}
        return replace(value, **changes)
    if isinstance(value, OrderedDict):
        made = value.__class__()
        for key, item in value.items():
            made[key] = cast_floats(item, dtype)
        return made
    if isinstance(value, dict):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        if isinstance(value, nn.utils.rnn.PackedSequence):
            return value  # as FSDP2 leaves it
        return type(value)(*[cast_floats(item, dtype) for item in value])
    if isinstance(value, list | tuple | set):
        return type(value)([cast_floats(item, dtype) for item in value])
    return value


class _Join(torch.autograd.Function):
    """The identity of several tensors: their gradients are complete before any is handed on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: object, output: object) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def _join_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs with all tensors that require a gradient passed through one node."""
    tensors = grad_tensors((args, kwargs))
    if not tensors:
        return args, kwargs
    join: Any = _Join.apply
    joined = list(join(*tensors))
    return _put(args, joined), _put(kwargs, joined)


def grad_tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors that require a gradient in the containers that FSDP2 looks into for them."""
    tensors: list[torch.Tensor] = []
    _collect(value, tensors)
    return tensors


def _collect(value: Any, tensors: list[torch.Tensor]) -> None:
    """Append the tensors that require a gradient."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            tensors.append(value)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            _collect(getattr(value, item.name), tensors)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, tensors)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, tensors)


def _put(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` with the first of `tensors` in the places that `_collect` found, and take them away.

    A container that holds none of them is the same object: the module may write into it.
    """
    if isinstance(value, torch.Tensor):
        return tensors.pop(0) if value.requires_grad else value
    if is_dataclass(value) and not isinstance(value, type):
        old = {item.name: getattr(value, item.name) for item in fields(value)}
        new = {name: _put(each, tensors) for name, each in old.items()}
        changes = {name: each for name, each in new.items() if each is not old[name]}
        return replace(value, **changes) if changes else value
    if isinstance(value, dict):
        made = {key: _put(each, tensors) for key, each in value.items()}
        if all(each is value[key] for key, each in made.items()):
            return value
        return made if type(value) is dict else type(value)(made)
    if isinstance(value, list | tuple):
        items = [_put(each, tensors) for each in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
