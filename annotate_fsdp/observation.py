"""What a step did, held against a plan, as data and text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp.plan import Plan, Unit, dtype_name

SCHEMA = "annotate_fsdp.observation/1"
WIDTH = 99
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a path component that is a number

Dtypes = dict[torch.dtype, None]  # a set that keeps its order


@dataclass(eq=False)
class Seen:
    """One module while it is recorded: what the plan says of it, what FSDP2 holds, what forward saw."""

    path: str
    class_name: str
    planned: Unit | None
    actual: Unit | None
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


@dataclass(frozen=True)
class UnitObservation:
    """What one unit did in the recorded step; only floating tensors count.

    - paths, class_names: of its modules; several if they share a unit.
    - calls: forward calls outside of backward, all modules together.
    - recomputes: calls inside backward, which activation checkpointing makes.
    - param_dtypes: dtypes of its parameters right before forward, as gathered.
    - sharded: FQNs of parameters that were still shards there.
    - input_dtypes: as forward saw them, after FSDP's cast.
    - raw_output_dtypes, output_dtypes: before and after FSDP's cast.
    """

    paths: tuple[str, ...]
    class_names: tuple[str, ...]
    calls: int
    recomputes: int
    param_dtypes: tuple[torch.dtype, ...]
    sharded: tuple[str, ...]
    input_dtypes: tuple[torch.dtype, ...]
    raw_output_dtypes: tuple[torch.dtype, ...]
    output_dtypes: tuple[torch.dtype, ...]

    @property
    def path(self) -> str:
        """FQN of its first module."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """Its paths as one printable name."""
        return ", ".join(path or "(root)" for path in self.paths)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {
            "paths": list(self.paths),
            "class_names": list(self.class_names),
            "calls": self.calls,
            "recomputes": self.recomputes,
            "param_dtypes": [dtype_name(dtype) for dtype in self.param_dtypes],
            "sharded": list(self.sharded),
            "input_dtypes": [dtype_name(dtype) for dtype in self.input_dtypes],
            "raw_output_dtypes": [dtype_name(dtype) for dtype in self.raw_output_dtypes],
            "output_dtypes": [dtype_name(dtype) for dtype in self.output_dtypes],
        }


@dataclass(frozen=True)
class Verdict:
    """A finished comparison; see `Observation` for the fields."""

    units: tuple[UnitObservation, ...]
    disagreements: tuple[str, ...]
    notes: tuple[str, ...]
    collectives: dict[str, int]
    planned_collectives: dict[str, int]
    backward: bool


class Observation:
    """What the first forward and backward inside `observe` did, and whether that equals the plan.

    It can be read inside the `with` block too and is final after it.
    """

    def __init__(self, model: str, judge: Callable[[], Verdict]) -> None:
        self._model = model
        self._judge: Callable[[], Verdict] | None = judge
        self._final: Verdict | None = None

    def close(self) -> None:
        """Make the verdict final and let go of the model."""
        self._final, self._judge = self._verdict, None

    @property
    def _verdict(self) -> Verdict:
        if self._judge is not None:
            return self._judge()
        assert self._final is not None
        return self._final

    @property
    def agrees(self) -> bool:
        """Whether a forward was recorded and nothing in it differs from the plan."""
        return not self._verdict.disagreements

    @property
    def disagreements(self) -> tuple[str, ...]:
        """What differs: each names the path, what the plan says, what was seen and what to write."""
        return self._verdict.disagreements

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing and equals the plan all the same: units not run, outputs rounded."""
        return self._verdict.notes

    @property
    def units(self) -> tuple[UnitObservation, ...]:
        """The units in application order, children before parents."""
        return self._verdict.units

    @property
    def collectives(self) -> dict[str, int]:
        """Collectives of this rank from the first unit's forward to the end of backward, by kind."""
        return dict(self._verdict.collectives)

    @property
    def backward(self) -> bool:
        """Whether a backward was recorded."""
        return self._verdict.backward

    def unit(self, path: str) -> UnitObservation:
        """Return the unit that the module at `path` belongs to.

        Raises:
            KeyError: no unit has that path.
        """
        for unit in self.units:
            if path in unit.paths:
                return unit
        raise KeyError(f"no unit at {path!r}; units: {', '.join(unit.name for unit in self.units)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the observation as JSON-able data; `schema` names its form."""
        verdict = self._verdict
        return {
            "schema": SCHEMA,
            "torch": torch.__version__,
            "model": self._model,
            "agrees": not verdict.disagreements,
            "disagreements": list(verdict.disagreements),
            "notes": list(verdict.notes),
            "backward": verdict.backward,
            "collectives": dict(verdict.collectives),
            "planned_collectives": dict(verdict.planned_collectives),
            "units": [unit.to_dict() for unit in verdict.units],
        }

    def __str__(self) -> str:
        verdict = self._verdict
        count = len(verdict.disagreements)
        words = f"DISAGREES with the plan in {count} point{'' if count == 1 else 's'}"
        lines = [f"{self._model}, one step observed: {words if count else 'agrees with the plan'}"]
        lines += _wrap(verdict.disagreements, "  - ")
        counts = (
            f"{count} {kind.replace('_', '-')} (plan: {verdict.planned_collectives.get(kind, 0)})"
            for kind, count in verdict.collectives.items()
        )
        lines += ["", f"collectives: {', '.join(counts) or 'not counted'}", *_table(verdict.units)]
        if verdict.notes:
            lines += ["", "notes", *_wrap(verdict.notes, "  - ")]
        return "\n".join(line.rstrip() for line in lines)


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
        if inner.planned is not None and inner.planned.policy.cast_forward_inputs:
            yield f"{_handed_on_text(outer, inner)}. Write output_dtype={_names(outer.inputs, True)} on it"


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
        if inner.planned is not None and not inner.planned.policy.cast_forward_inputs:
            yield f"{_handed_on_text(outer, inner)}; it casts for itself, so let it cast its output back"


def summarize(seen: Sequence[Seen], units: Iterable[Unit]) -> Iterator[UnitObservation]:
    """Yield one observation for each unit, its modules together."""
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
            )


def _missing_unit(one: Seen, planned: Unit) -> str:
    dtypes = _union(one.parameters.values())
    seen = f", and inside forward its parameters were {_names(dtypes)}" if dtypes else ""
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
    policy = planned.policy
    write = f"Shard it with {_policy(policy)}"
    stored = {parameter.path: parameter.dtype for parameter in planned.parameters}
    wrong: dict[tuple[torch.dtype, str], list[str]] = {}
    for path, dtypes in one.parameters.items():
        expected = policy.param_dtype or stored.get(path)
        if expected is not None and path in stored and any(dtype != expected for dtype in dtypes):
            wrong.setdefault((expected, _names(dtypes)), []).append(path)
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
            f"{_names(one.inputs)}. {write}"
        )
    output = policy.output_dtype
    if output is not None and any(dtype != output for dtype in one.outputs):
        yield (
            f"{one.name}: the plan casts its output to {dtype_name(output)}, but it returned "
            f"{_names(one.outputs)}. {write}"
        )


def _handed_on(seen: Sequence[Seen]) -> Iterator[tuple[Seen, Seen]]:
    """Yield (outer, inner) where a unit's output left its compute dtype because of a unit inside it.

    Only where all its floating inputs had the compute dtype, none of its outputs has it, and the inner
    unit computes in, and returned, what the outer one returned, although nobody asked for that dtype.
    """
    for outer in seen:
        compute = outer.planned.policy.param_dtype if outer.planned else None
        if compute is None or outer.planned is None or outer.planned.policy.output_dtype is not None:
            continue
        if set(outer.inputs) != {compute} or not outer.raw_outputs or compute in outer.raw_outputs:
            continue
        prefix = f"{outer.path}." if outer.path else ""
        for inner in seen:
            if inner is outer or not inner.path.startswith(prefix) or inner.planned is None:
                continue
            policy = inner.planned.policy
            dtype = policy.param_dtype
            if policy.output_dtype is None and dtype in outer.raw_outputs and dtype in inner.outputs:
                yield outer, inner


def _handed_on_text(outer: Seen, inner: Seen) -> str:
    return (
        f"{outer.name}: the plan computes in {_names(outer.inputs)}, but it returned "
        f"{_names(outer.raw_outputs)} because {inner.name} inside it returned {_names(inner.outputs)}"
    )


def _policy(policy: MixedPrecisionPolicy) -> str:
    """The policy as one writes it."""
    default = MixedPrecisionPolicy()
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    changed = (f"{n}={getattr(policy, n)}" for n in names if getattr(policy, n) != getattr(default, n))
    return f"MixedPrecisionPolicy({', '.join(changed)})"


def _union(groups: Iterable[Iterable[torch.dtype]]) -> tuple[torch.dtype, ...]:
    return tuple(dict.fromkeys(dtype for group in groups for dtype in group))


def _names(dtypes: Iterable[torch.dtype], long: bool = False) -> str:
    return ", ".join(str(dtype) if long else dtype_name(dtype) for dtype in dtypes)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _wrap(texts: Iterable[str], bullet: str) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet))


_COLUMNS = (
    ("unit", 34),
    ("n", 4),
    ("class", 16),
    ("calls", 5),
    ("again", 5),
    ("params", 7),
    ("inputs", 9),
    ("returned", 11),
)


def _table(units: Iterable[UnitObservation]) -> Iterator[str]:
    """Yield the unit table, units that differ by a number in their path only as one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for unit in units:
        params = [dtype_name(dtype) for dtype in unit.param_dtypes] + ["sharded"] * bool(unit.sharded)
        raw, out = _names(unit.raw_output_dtypes), _names(unit.output_dtypes)
        cells = (
            ", ".join(dict.fromkeys(unit.class_names)),
            str(unit.calls),
            str(unit.recomputes),
            "/".join(params) or "-",
            "/".join(map(dtype_name, unit.input_dtypes)) or "-",
            (out if raw == out or not raw else f"{raw}>{out}") or "-",
        )
        rows.setdefault((_NUMBER.sub("*", unit.name), *cells), []).append(unit.name)
    yield _row([title for title, _ in _COLUMNS])
    yield _row(["-" * width for _, width in _COLUMNS])
    for (pattern, *rest), names in rows.items():
        name = names[0] if len(names) == 1 else pattern
        if len(name) > _COLUMNS[0][1]:
            yield from textwrap.wrap(name, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
            name = ""
        yield _row([name, str(len(names)), *rest])


def _row(cells: Iterable[str]) -> str:
    parts = []
    for cell, (_, width) in zip(cells, _COLUMNS, strict=True):
        parts.append((cell if len(cell) <= width else cell[: width - 1] + "…").ljust(width))
    return " ".join(parts)
