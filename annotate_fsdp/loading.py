"""A state dict held against a model's tensors, and copied into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from annotate_fsdp.errors import Finding
from annotate_fsdp.plan import dtype_name
from annotate_fsdp.slots import Slot, bits, plain_name

EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class Loading:
    """A state dict matched with a model: what goes where, and what is wrong with it."""

    tensors: tuple[tuple[Slot, torch.Tensor], ...]
    extra: tuple[tuple[nn.Module, Any], ...]
    findings: tuple[Finding, ...]


def match_state_dict(model: nn.Module, slots: Iterable[Slot], state_dict: Mapping[str, Any]) -> Loading:
    """Match a full or sharded state dict with the model's tensors; nothing is changed.

    Keys may contain wrapper names. A tied tensor may be given under one of its names or under several,
    with the same values.
    """
    values = {plain_name(key): value for key, value in state_dict.items()}
    extra = dict(_extra_states(model))
    slots = list(slots)
    known = {name for slot in slots if slot.is_persistent for name in slot.names} | extra.keys()
    unexpected = [key for key in values if key not in known]
    findings: list[Finding] = []
    tensors: list[tuple[Slot, torch.Tensor]] = []
    for slot in slots:
        given = [name for name in slot.names if name in values]
        if not slot.is_persistent:
            continue
        if not given:
            findings.append(_missing(slot.path, _describe(slot), unexpected))
            continue
        wrong = [finding for name in given for finding in _check_value(slot, name, values[name])]
        if not wrong and any(_differ(values[given[0]], values[name]) for name in given[1:]):
            wrong.append(_two_values(slot, given))
        findings += wrong
        if not wrong:
            tensors.append((slot, values[given[0]]))
    findings += [_missing(key, "extra state of its module", unexpected) for key in extra if key not in values]
    hidden = {name for slot in slots if not slot.is_persistent for name in slot.names}
    findings += [_unexpected(key, key in hidden, known) for key in unexpected]
    extras = tuple((module, values[key]) for key, module in extra.items() if key in values)
    return Loading(tuple(tensors), extras, tuple(findings))


def load(loading: Loading) -> None:
    """Copy what was matched into the model: values are cut to this rank's shard and cast to its dtype."""
    with torch.no_grad():
        for slot, value in loading.tensors:
            for tensor in slot.tensors:
                _copy(tensor, value)
    for module, state in loading.extra:
        module.set_extra_state(state)


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    target, value = target.detach(), value.detach()
    if not isinstance(target, DTensor):
        target.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        return
    mesh, placements = target.device_mesh, target.placements
    if not isinstance(value, DTensor) or value.device_mesh != mesh or value.placements != placements:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        # every rank has the whole value and keeps its own part: no communication
        value = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    target.to_local().copy_(value.to_local())


def _extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield plain_name(f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE), module


def _check_value(slot: Slot, name: str, value: object) -> Iterator[Finding]:
    target = slot.tensor
    if not isinstance(value, torch.Tensor) or value.is_meta:
        what = "a tensor on meta" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        wrong = f"the state dict gives {what}, which has no values"
        yield Finding("AF607", "error", name, _describe(slot), wrong, "Give a tensor with values")
    elif tuple(value.shape) != tuple(target.shape):
        wrong = f"the state dict gives {list(value.shape)}"
        write = "Build the model with the checkpoint's configuration"
        if isinstance(target, DTensor) and not isinstance(value, DTensor):
            write += "; a plain tensor must be the whole one, not a shard"
        yield Finding("AF606", "error", name, _describe(slot), wrong, write)
    elif _number_kind(value.dtype) != _number_kind(target.dtype):
        wrong = f"the state dict gives {dtype_name(value.dtype)}, another kind of number"
        yield Finding("AF607", "error", name, _describe(slot), wrong, "Convert it before loading")


def _number_kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values differ, as far as this rank can tell without the others."""
    placements = [value.placements if isinstance(value, DTensor) else None for value in (one, other)]
    if one is other or placements[0] != placements[1]:
        return False
    here, there = bits(one), bits(other)
    return here.dtype != there.dtype or not torch.equal(here, there.to(here.device))


def _describe(slot: Slot) -> str:
    shape = "x".join(map(str, slot.tensor.shape))
    tied = f", tied to {', '.join(slot.names[1:])}" if len(slot.names) > 1 else ""
    return f"a {slot.kind} of {slot.owner}, {dtype_name(slot.tensor.dtype)} [{shape}]{tied}"


def _missing(name: str, declared: str, unexpected: Iterable[str]) -> Finding:
    close = get_close_matches(name, unexpected, n=1)
    write = f"Rename the key {close[0]!r} to it" if close else "Add it, or untie or remove it from the model"
    return Finding("AF604", "error", name, declared, "the state dict does not hold it", write)


def _unexpected(name: str, is_hidden: bool, known: Iterable[str]) -> Finding:
    if is_hidden:
        wrong, write = "the model's buffer of that name is not persistent", "Take it out of the state dict"
    else:
        close = get_close_matches(name, known, n=1)
        wrong = "the model has no parameter or buffer of that name"
        write = f"Rename it to {close[0]!r}" if close else "Take it out of the state dict"
    return Finding("AF605", "error", name, "a key of the state dict", wrong, write)


def _two_values(slot: Slot, given: list[str]) -> Finding:
    wrong = f"the state dict gives different values for {' and '.join(given)}"
    return Finding("AF608", "error", slot.path, _describe(slot), wrong, "Keep one of the keys, or untie them")
