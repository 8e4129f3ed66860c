"""What a plan costs on a link: the time of its communication and the memory of what it gathers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from annotate_fsdp.collectives import Collective, Collectives, Kind, Phase, Step
from annotate_fsdp.events import Event
from annotate_fsdp.links import Link, Seconds
from annotate_fsdp.plan import Plan

PHASES: tuple[Phase, ...] = ("forward", "backward")

# -- time ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitTime:
    """The collectives of one unit in a step; `unit` is the path of its first module."""

    unit: str
    calls: int
    seconds: Seconds

    @property
    def is_latency_bound(self) -> bool:
        """Whether waiting takes longer than moving bytes, so that more bytes would cost little."""
        return self.seconds.latency > self.seconds.transfer


@dataclass(frozen=True)
class StepTime:
    """The communication of a step, one collective after the other: an upper bound.

    FSDP2 overlaps most of it with computation; how much of it shows in a step depends on both.

    - link: name of the link.
    - phases: (phase, seconds) of forward and backward.
    - units: those that communicate, in the order of their first collective.
    """

    link: str
    phases: tuple[tuple[Phase, Seconds], ...]
    units: tuple[UnitTime, ...]

    @property
    def seconds(self) -> Seconds:
        """The whole step."""
        return sum((seconds for _, seconds in self.phases), Seconds())

    @property
    def calls(self) -> int:
        """Number of collectives."""
        return sum(unit.calls for unit in self.units)

    @property
    def latency_bound(self) -> tuple[UnitTime, ...]:
        """The units whose collectives wait longer than they move bytes."""
        return tuple(unit for unit in self.units if unit.is_latency_bound)


def step_time(collectives: Collectives, link: Link) -> StepTime:
    """Return what the collectives of a step take on `link` if nothing overlaps.

    Raises:
        AnnotationError: the plan had no mesh, or the link says nothing about a kind of collective.
    """
    phases = dict.fromkeys(PHASES, Seconds())
    units: dict[str, UnitTime] = {}
    known: dict[tuple[Kind, int, int], Seconds] = {}
    for call in collectives:
        seconds = _call_time(call, link, known)
        phases[call.phase] += seconds
        before = units.get(call.unit, UnitTime(call.unit, 0, Seconds()))
        units[call.unit] = UnitTime(call.unit, before.calls + 1, before.seconds + seconds)
    return StepTime(link.name, tuple(phases.items()), tuple(units.values()))


def _call_time(call: Collective, link: Link, known: dict[tuple[Kind, int, int], Seconds]) -> Seconds:
    key = (call.kind, call.bytes, call.ranks)
    if key not in known:
        known[key] = link.seconds(*key)
    return known[key]


# -- memory ----------------------------------------------------------------------------------------


def gathered_bytes(plan: Plan, step: Step | None = None) -> list[tuple[Event, int]]:
    """Return each event of a step that may gather something, and the bytes gathered on a rank after it.

    Counted are, padding included and in the dtype they compute in: the parameters of the units that are
    gathered (the root and what is not resharded stay so from their first use to their backward's end, what
    is nested lies on top of what encloses it); the buffers of units that are gathered ahead; and the part
    that a unit keeps which reshards to fewer ranks. Not counted are sharded parameters, gradients, and the
    buffer that a gather is copied out of: that is one unit more for a moment.

    Args:
        plan: what is sharded how; the modules run in the order of its `sequence`.
        step: how the step differs from the plain one, such as `recomputed` by activation checkpointing.
    """
    sizes = {unit.path: unit.gathered_bytes() for unit in plan.units}
    schedule, events = plan.schedule(step)
    units = [(unit, sizes[unit.traffic.paths[0]], int(unit.traffic.reshard)) for unit in schedule.units]
    found: list[tuple[Event, int]] = []

    def watched() -> Iterator[Event]:
        for event in events:
            yield event  # the schedule takes the next one when it is done with this one
            if event.kind in ("enter", "output"):
                held = sum(size for unit, size, _ in units if unit.holders == "all" or unit.is_pending)
                kept = sum(size // ranks for unit, size, ranks in units if unit.holders == "fewer")
                found.append((event, held + kept))

    schedule.play(watched())
    return found


def peak_gathered_bytes(plan: Plan, step: Step | None = None) -> int:
    """Return the most bytes that are gathered on a rank at a moment of a step; see `gathered_bytes`."""
    return max((size for _, size in gathered_bytes(plan, step)), default=0)


def padding_bytes(plan: Plan) -> int:
    """Return the stored bytes of a rank that are padding, on average over the ranks, rounded down."""
    count = 0
    for unit in plan.units:
        shard = unit.mesh.shard if unit.mesh else 1
        whole = sum(p.local_numel * p.dtype.itemsize for p in unit.parameters)
        count += (unit.sharded_bytes() * shard - whole) // shard
    return count


# -- a plan on a link ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanCost:
    """What a plan costs on a link, in time and in memory.

    - units: number of units.
    - time: see `step_time`.
    - peak_gathered_bytes, padding_bytes: on each rank; see the functions of these names.
    """

    units: int
    time: StepTime
    peak_gathered_bytes: int
    padding_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {
            "units": self.units,
            "collectives": self.time.calls,
            "seconds": _parts(self.time.seconds),
            "phases": {phase: _parts(seconds) for phase, seconds in self.time.phases},
            "by_unit": {
                unit.unit: {"collectives": unit.calls, **_parts(unit.seconds)} for unit in self.time.units
            },
            "latency_bound_units": [unit.unit for unit in self.time.latency_bound],
            "peak_gathered_bytes": self.peak_gathered_bytes,
            "padding_bytes": self.padding_bytes,
        }


def _parts(seconds: Seconds) -> dict[str, float]:
    return {"total": seconds.total, "latency": seconds.latency, "transfer": seconds.transfer}


def plan_cost(plan: Plan, link: Link) -> PlanCost:
    """Return what `plan`'s plain step costs on `link`.

    Raises:
        AnnotationError: as `step_time`.
    """
    time = step_time(plan.collectives(), link)
    return PlanCost(len(plan.units), time, peak_gathered_bytes(plan), padding_bytes(plan))
