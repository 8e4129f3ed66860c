"""What forward saw, held against the plan: disagreements, notes, and one observation for each unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp.collectives import Collectives, Kind
from annotate_fsdp.observation import UnitObservation, dtype_names
from annotate_fsdp.plan import Island, Plan, Unit, dtype_name

Dtypes = dict[torch.dtype, None]  # a set that keeps its order


@dataclass(eq=False)
class Seen:
    """One module while it is recorded: what the plan says of it, what FSDP2 holds, what forward saw."""

    path: str
    class_name: str
    planned: Unit | None
    actual: Unit | None
    island: Island | None = None
    calls: int = 0
    recomputes: int = 0
    parameters: dict[str, Dtypes] = field(default_factory=dict)
    sharded: dict[str, None] = field(default_factory=dict)
    inputs: Dtypes = field(default_factory=dict)
    raw_outputs: Dtypes = field(default_factory=dict)
    outputs: Dtypes = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its path, printable."""
        return self.path or "(root)"

    @property
    def policy(self) -> MixedPrecisionPolicy | None:
        """What the plan casts at its boundary, whoever does it; None if the plan does not know it."""
        if self.island is not None:
            return self.island.policy
        return self.planned.policy if self.planned is not None else None


def compare_with_plan(plan: Plan, actual: Plan, seen: Sequence[Seen]) -> Iterator[str]:
    """Yield what differs: FSDP2's state from the plan, then what forward saw from the plan."""
    if not any(one.calls for one in seen):
        yield "nothing was recorded, so nothing is known. Run a forward inside `with observe(model)`"
    for one in seen:
        if one.planned is None:
            yield (
                f"{one.name}: the plan has no unit here, but FSDP2 made one of {one.class_name}. "
                "Mark it with fsdp_unit, or do not shard it by hand"
            )
        elif one.actual is None:
            yield _missing_unit(one, one.planned)
    actual_at = {path: unit for unit in actual.units for path in unit.paths}
    for unit in plan.units:
        found = {id(actual_at[path]): actual_at[path] for path in unit.paths if path in actual_at}
        there = list(found.values())
        if [other.paths for other in there] == [unit.paths]:
            yield from _state_differences(unit, there[0])
        elif len(unit.paths) > 1 or any(len(other.paths) > 1 for other in there):
            yield (
                f"{unit.name}: the plan makes one unit of it, but FSDP2 has "
                f"{' and '.join(f'[{other.name}]' for other in there) or 'none'}. "
                "Shard it with shard_annotated, or pass these modules to fully_shard in one list"
            )
    for one in seen:
        if one.planned is not None and one.actual is not None:
            yield from _forward_differences(one, one.planned)
    for outer, inner in _handed_on(seen):
        if inner.policy is not None and inner.policy.cast_forward_inputs:
            dtype = next(iter(outer.inputs))
            yield f"{_handed_on_text(outer, inner)}. Write output_dtype={dtype} on it"


def reads_of_shards(reads: Mapping[str, Iterable[str]], bypassed: Iterable[str]) -> Iterator[str]:
    """Yield what was used without being gathered.

    Args:
        reads: FQNs of parameters that were read while sharded, with the operations that did.
        bypassed: paths of modules whose forward was called directly.
    """
    for path in bypassed:
        yield (
            f"{path or '(root)'}: its forward was called directly, past the hooks that gather its "
            "parameters. Call the module itself"
        )
    for path, by in reads.items():
        owner = path.rpartition(".")[0]
        yield (
            f"{path}: {', '.join(by)} read it while it was sharded, so it saw this rank's part or failed. "
            f"Call the module, mark the method that reads it with fsdp_forward, or read it inside "
            f'`with gathered(model, "{owner or path}")`'
        )


def compare_collectives(plan: Plan, actual: Plan, planned: Collectives, real: Collectives) -> Iterator[str]:
    """Yield the units for which FSDP2 called other collectives than the plan has for the step that ran.

    Nothing is said where the units differ: that changes the collectives of their neighbours too.
    """
    if [unit.paths for unit in plan.units] != [unit.paths for unit in actual.units]:
        return
    mine, theirs, none = planned.by_unit(), real.by_unit(), Collectives(())
    for unit in plan.units:
        here = mine.get(unit.path, none).counts()
        there = theirs.get(unit.path, none).counts()
        if here != there:
            yield (
                f"{unit.name}: in this step the plan has {_counts(here)}, but FSDP2 called {_counts(there)}. "
                "Do not call unshard() or reshard() in between, nor set what FSDP2 gathers ahead"
            )


def _counts(counts: dict[Kind, int]) -> str:
    words = [
        f"{count} {kind.replace('_', '-')}{'' if count == 1 else 's'}"
        for kind, count in counts.items()
        if count
    ]
    return " and ".join(words) or "no collective"


def notes_on(seen: Sequence[Seen], backward: bool) -> Iterator[str]:
    """Yield what equals the plan but may not be meant."""
    idle = [one.name for one in seen if not one.calls + one.recomputes]
    if idle and len(idle) < len(seen):
        yield f"not run: {_some(idle)}"
    if not backward and any(one.calls for one in seen):
        yield "no backward was recorded"
    rounded: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for one in seen:
        for raw in one.raw_outputs:
            for final in one.outputs:
                if raw.itemsize > final.itemsize and raw not in one.outputs and one.actual is not None:
                    rounded.setdefault((raw, final), []).append(one.name)
    for (raw, final), names in rounded.items():
        yield (
            f"{_some(names)}: returned {dtype_name(raw)} and {'was' if len(names) == 1 else 'were'} rounded "
            f"to {dtype_name(final)} at the unit's boundary; write output_dtype={raw} where that is not meant"
        )
    for outer, inner in _handed_on(seen):
        if inner.policy is not None and not inner.policy.cast_forward_inputs:
            yield f"{_handed_on_text(outer, inner)}; it casts for itself, so let it cast its output back"


def summarize(
    seen: Sequence[Seen], units: Iterable[Unit], collectives: Collectives
) -> Iterator[UnitObservation]:
    """Yield one observation for each unit, its modules together."""
    calls, none = collectives.by_unit(), Collectives(())
    by_path = {one.path: one for one in seen}
    for unit in units:
        parts = [by_path[path] for path in unit.paths if path in by_path]
        if parts:
            yield UnitObservation(
                paths=tuple(one.path for one in parts),
                class_names=tuple(one.class_name for one in parts),
                calls=sum(one.calls for one in parts),
                recomputes=sum(one.recomputes for one in parts),
                param_dtypes=_union(dtypes for one in parts for dtypes in one.parameters.values()),
                sharded=tuple(dict.fromkeys(name for one in parts for name in one.sharded)),
                input_dtypes=_union(one.inputs for one in parts),
                raw_output_dtypes=_union(one.raw_outputs for one in parts),
                output_dtypes=_union(one.outputs for one in parts),
                collectives=calls.get(unit.path, none).counts(),
            )


def _missing_unit(one: Seen, planned: Unit) -> str:
    dtypes = _union(one.parameters.values())
    seen = f", and inside forward its parameters were {dtype_names(dtypes)}" if dtypes else ""
    return (
        f"{one.name}: the plan makes a unit of {one.class_name} ({_policy(planned.policy)}), but FSDP2 has "
        f"none here{seen}. Shard it with shard_annotated, or by fully_shard before its parent"
    )


def _state_differences(planned: Unit, actual: Unit) -> Iterator[str]:
    """Yield how FSDP2 holds a unit otherwise than planned."""
    for difference in Plan((planned,)).differences(Plan((actual,))):
        what = difference.removeprefix(f"{planned.name}: ")
        yield (
            f"{planned.name}: in the plan (here) and in FSDP2's state (there), {what}. "
            f"Shard it with {_policy(planned.policy)}, as shard_annotated does"
        )


def _forward_differences(one: Seen, planned: Unit) -> Iterator[str]:
    """Yield what forward saw otherwise than planned."""
    policy = one.policy or planned.policy
    write = f"Shard it with {_policy(policy)}"
    computes = {parameter.path: planned.compute_dtype(parameter) for parameter in planned.parameters}
    wrong: dict[tuple[torch.dtype, str], list[str]] = {}
    for path, dtypes in one.parameters.items():
        expected = computes.get(path)
        if expected is not None and any(dtype != expected for dtype in dtypes):
            wrong.setdefault((expected, dtype_names(dtypes)), []).append(path)
    for (expected, names), paths in wrong.items():
        yield (
            f"{one.name}: the plan computes in {dtype_name(expected)}, but inside forward {_some(paths)} "
            f"{'was' if len(paths) == 1 else 'were'} {names}. {write}"
        )
    if one.sharded:
        yield (
            f"{one.name}: the plan gathers its parameters before forward, but {_some(list(one.sharded))} "
            "was still sharded there. Call the module itself, not its forward or a parent's copy of it"
        )
    compute = policy.param_dtype
    if policy.cast_forward_inputs and compute is not None and any(d != compute for d in one.inputs):
        yield (
            f"{one.name}: the plan casts its inputs to {dtype_name(compute)}, but forward saw "
            f"{dtype_names(one.inputs)}. {write}"
        )
    output = policy.output_dtype
    if output is not None and any(dtype != output for dtype in one.outputs):
        yield (
            f"{one.name}: the plan casts its output to {dtype_name(output)}, but it returned "
            f"{dtype_names(one.outputs)}. {write}"
        )


def _handed_on(seen: Sequence[Seen]) -> Iterator[tuple[Seen, Seen]]:
    """Yield (outer, inner) where a unit's output left its compute dtype because of a unit inside it.

    Only where all its floating inputs had the compute dtype, none of its outputs has it, and the inner
    unit computes in, and returned, what the outer one returned, although nobody asked for that dtype.
    """
    for outer in seen:
        around = outer.policy
        compute = around.param_dtype if around is not None else None
        if compute is None or around is None or around.output_dtype is not None:
            continue
        if set(outer.inputs) != {compute} or not outer.raw_outputs or compute in outer.raw_outputs:
            continue
        prefix = f"{outer.path}." if outer.path else ""
        for inner in seen:
            policy = inner.policy
            if inner is outer or not inner.path.startswith(prefix) or policy is None:
                continue
            dtype = policy.param_dtype
            if policy.output_dtype is None and dtype in outer.raw_outputs and dtype in inner.outputs:
                yield outer, inner


def _handed_on_text(outer: Seen, inner: Seen) -> str:
    return (
        f"{outer.name}: the plan computes in {dtype_names(outer.inputs)}, but it returned "
        f"{dtype_names(outer.raw_outputs)} because {inner.name} inside it returned "
        f"{dtype_names(inner.outputs)}"
    )


def _policy(policy: MixedPrecisionPolicy) -> str:
    """The policy as one writes it."""
    default = MixedPrecisionPolicy()
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    changed = (f"{n}={getattr(policy, n)}" for n in names if getattr(policy, n) != getattr(default, n))
    return f"MixedPrecisionPolicy({', '.join(changed)})"


def _union(groups: Iterable[Iterable[torch.dtype]]) -> tuple[torch.dtype, ...]:
    return tuple(dict.fromkeys(dtype for group in groups for dtype in group))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
