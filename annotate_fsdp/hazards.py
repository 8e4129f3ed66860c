"""Rules for what torch accepts and runs, though not as meant: a collected tree and its plan to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp.checks import Facts
from annotate_fsdp.collect import Node
from annotate_fsdp.errors import Finding
from annotate_fsdp.marks import UnitSpec
from annotate_fsdp.plan import Unit, dtype_name

MOST_BYTES = 64 * 2**20  # below this a unit is never too large to gather at once


def check_largest_unit(facts: Facts) -> Iterator[Finding]:
    """AF110: a unit with most of the model's bytes saves little memory and overlaps with nothing."""
    units = facts.plan.units
    whole = sum(unit.whole_bytes() for unit in units)
    for unit in units:
        size = unit.whole_bytes()
        if len(units) > 1 and size > whole / 2 and size >= MOST_BYTES:
            yield Finding(
                "AF110",
                "info",
                unit.path,
                f"a unit ({unit.provenance})",
                f"it holds {size / whole:.0%} of the model, {size / 2**20:,.0f} MiB gathered at once",
                "Mark more of the modules inside it, or the class of its repeated block",
            )


def check_stored_below_compute(facts: Facts) -> Iterator[Finding]:
    """AF501: weights stored in less than they compute in lose updates smaller than their spacing."""
    for unit in facts.plan.units:
        low = [p for p in unit.parameters if p.trainable and _is_lower(p.dtype, unit.compute_dtype(p))]
        if low:
            compute = unit.compute_dtype(low[0])
            more = f" and {len(low) - 1} more" if len(low) > 1 else ""
            yield Finding(
                "AF501",
                "warning",
                low[0].path,
                f"{dtype_name(compute)} compute in unit {unit.name}",
                f"it is stored in {dtype_name(low[0].dtype)}{more}, so the optimizer loses small updates",
                f"Store it in {dtype_name(compute)} before sharding: module.to({compute})",
            )


def _is_lower(stored: torch.dtype, compute: torch.dtype) -> bool:
    return stored.is_floating_point and stored.itemsize < compute.itemsize


def check_float8(facts: Facts) -> Iterator[Finding]:
    """AF504: `param_dtype` casts float8 weights as it casts all that float, without their scales."""
    for unit in facts.planned:
        cast = [p for p in unit.parameters if _is_float8(p.dtype) and unit.compute_dtype(p) != p.dtype]
        if cast:
            more = f" and {len(cast) - 1} more" if len(cast) > 1 else ""
            yield Finding(
                "AF504",
                "warning",
                cast[0].path,
                f"stored in {dtype_name(cast[0].dtype)} in unit {unit.name}{more}",
                f"forward sees it cast to {dtype_name(unit.compute_dtype(cast[0]))}, without its scale",
                "Mark its module with @fsdp_unit(policy=MixedPrecisionPolicy()), or store its bits as uint8",
            )


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def check_rounded_output(facts: Facts) -> Iterator[Finding]:
    """AF505: the unit around casts its own output, so an fp32 output inside may be rounded on the way out."""
    for node in facts.tree.nodes:
        said = _output_said(facts, node)
        if said is None or not node.parents:
            continue
        around = _policy_around(facts, facts.tree.nodes[node.parents[0]])
        if around is None or around[1].output_dtype is None or not _is_lower(around[1].output_dtype, said):
            continue
        rounded = dtype_name(around[1].output_dtype)
        yield Finding(
            "AF505",
            "warning",
            node.path,
            f"output_dtype={said}",
            f"the unit around it, {around[0]}, casts what it returns to {rounded}",
            f"Give {around[0]} output_dtype={said}, or none, unless this output stays inside it",
        )


def _output_said(facts: Facts, node: Node) -> torch.dtype | None:
    """The output dtype that a module's mark asks for."""
    if not isinstance(node.mark, UnitSpec) or node.path not in facts.policies:
        return None
    given = node.mark.policy
    is_said = node.mark.output_dtype is not None or isinstance(given, MixedPrecisionPolicy)
    return facts.policies[node.path].output_dtype if is_said else None


def _policy_around(facts: Facts, node: Node) -> tuple[str, MixedPrecisionPolicy] | None:
    """Name and policy of the nearest unit or island that a module is or lies in."""
    while node.path not in facts.policies:
        if not node.parents:
            return None
        node = facts.tree.nodes[node.parents[0]]
    return node.path or "(root)", facts.policies[node.path]


def check_buffers(facts: Facts) -> Iterator[Finding]:
    """AF506: FSDP2 casts no buffer, so those of a module may not have the dtype it computes in."""
    for node in facts.tree.nodes:
        if not any(buffer is not None for buffer in node.inner._buffers.values()):
            continue
        around = _policy_around(facts, node)
        compute = around[1].param_dtype if around else None
        if around is None or compute is None:
            continue
        for name, buffer in node.inner._buffers.items():
            if buffer is None or not buffer.is_floating_point() or buffer.dtype.itemsize < 2:
                continue
            is_statistic = isinstance(node.inner, nn.modules.batchnorm._NormBase)
            if buffer.dtype == compute or not (is_statistic or _is_lower(buffer.dtype, compute)):
                continue  # tables of more precision than the weights are common and do no harm
            yield Finding(
                "AF506",
                "warning",
                f"{node.path}.{name}" if node.path else name,
                f"a buffer in {dtype_name(buffer.dtype)}",
                f"its module computes in {dtype_name(compute)} (unit {around[0]}); FSDP2 casts no buffers",
                f"Mark {node.class_name} with the policy of its buffers"
                if is_statistic and not _is_lower(buffer.dtype, compute)
                else f"Convert it before sharding: buffer.to({compute})",
            )


def check_frozen_beside_trainable(facts: Facts) -> Iterator[Finding]:
    """AF507: one unit's gather and its gradient buffers follow its trainable and frozen parameters alike."""
    for unit in facts.planned:
        frozen = _bytes_of(unit, trainable=False)
        trainable = _bytes_of(unit, trainable=True)
        if frozen and trainable:
            yield Finding(
                "AF507",
                "info",
                unit.path,
                f"{trainable / 2**10:,.1f} KiB trainable beside {frozen / 2**10:,.1f} KiB frozen",
                "the unit gathers both again in backward",
                "Mark what is frozen as a unit of its own if memory or time is short",
            )


def _bytes_of(unit: Unit, *, trainable: bool) -> int:
    chosen = (p for p in unit.parameters if p.trainable is trainable and p.dtype.is_floating_point)
    return sum(p.local_numel * unit.compute_dtype(p).itemsize for p in chosen)


def check_empty_units(facts: Facts) -> Iterator[Finding]:
    """AF207: a marked module without parameters of its own shards nothing."""
    nodes = facts.by_path
    for unit in facts.planned:
        if unit.members or unit.path == "" or not isinstance(nodes[unit.path].mark, UnitSpec):
            continue
        reason = (
            "its parameters belong to other units" if unit.excluded else "it has no parameters of its own"
        )
        yield Finding(
            "AF207",
            "info",
            unit.path,
            f"a unit ({unit.provenance})",
            f"{reason}: it only casts its inputs and outputs",
            "Take the mark away with fsdp_off if that is not meant",
        )


def check_lost_buffers(facts: Facts) -> Iterator[Finding]:
    """AF601: a non-persistent buffer on meta is in no state dict and must be computed again."""
    for node in facts.tree.nodes:
        unsaved = node.inner._non_persistent_buffers_set
        for name in sorted(unsaved) if unsaved else ():
            buffer = node.inner._buffers.get(name)
            if buffer is None or not buffer.is_meta or hasattr(node.inner, "reset_buffers"):
                continue
            yield Finding(
                "AF601",
                "info",
                f"{node.path}.{name}" if node.path else name,
                "a non-persistent buffer on meta",
                "no state dict holds it, and materializing leaves it undefined",
                f"Define reset_buffers() on {node.class_name}, or compute it in materialize(init=...)",
            )


HAZARDS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_largest_unit,
    check_stored_below_compute,
    check_empty_units,
    check_float8,
    check_rounded_output,
    check_buffers,
    check_frozen_beside_trainable,
    check_lost_buffers,
)


def run_hazards(facts: Facts) -> list[Finding]:
    """Return the findings of every rule of this file, in their order; none is an error."""
    return [finding for rule in HAZARDS for finding in rule(facts)]
