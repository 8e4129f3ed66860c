"""FSDP2's hooks, simulated: from what happens in a step to the collectives that it calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from annotate_fsdp.collectives import Collective, Collectives, Kind, Phase
from annotate_fsdp.events import Event
from annotate_fsdp.traffic import Beginning, Switches, Traffic


@dataclass(eq=False)
class _Unit:
    """The state of one unit; see `FSDPState` and `FSDPParamGroup`."""

    traffic: Traffic
    switches: Switches
    holders: Literal["ranks", "fewer", "all"] = "ranks"  # sharded, sharded after forward, gathered
    is_pending: bool = False  # gathered ahead, not taken up yet
    hook: Literal["idle", "forward", "backward"] = "idle"  # what its modules' hooks did last
    training: Literal["idle", "forward", "backward", "done"] = "idle"  # what its parameters' did
    waiting: set[str] = field(default_factory=set)  # its modules that have yet to run
    indices: list[int] = field(default_factory=list)
    gradients: dict[str, None] = field(default_factory=dict)
    holds: int = 0  # blocks of `gathered` that are open
    was_held: bool = False


class Schedule:
    """FSDP2's hooks, simulated: what they gather and reduce when a step's events reach them.

    Args:
        units: all units in the order in which FSDP2 finds them: outer ones first.
        beginning: what earlier steps left.
        switches: what is switched, by the path of the unit's first module.
    """

    def __init__(
        self,
        units: Sequence[Traffic],
        beginning: Beginning | None = None,
        switches: Mapping[str, Switches] | None = None,
    ) -> None:
        switches = switches or {}
        self.units = [_Unit(traffic, switches.get(traffic.paths[0], Switches())) for traffic in units]
        self.at = {path: unit for unit in self.units for path in unit.traffic.paths}
        self.holding = {member: unit for unit in self.units for member in unit.traffic.by_path}
        beginning = beginning or Beginning()
        for path in beginning.gathered:
            if path in self.at:
                self.at[path].holders = "all"
        for parameter in beginning.unreduced:
            self._note_gradient(parameter)
        self.root: _Unit | None = None  # of the forward that is going on
        # FSDP2's post-forward order, by which backward gathers ahead; None: a unit that is not in the plan
        self.finished: list[_Unit | None] = [self.at.get(path) for path in beginning.finished]
        for path, indices in beginning.indices:
            if path in self.at:
                self.at[path].indices = list(indices)
        self.on_output: dict[int, list[_Unit]] = {}
        self.on_member: dict[int, list[_Unit]] = {}  # of several modules, each watched by `GatherAgain`
        self.on_input: dict[int, list[_Unit]] = {}
        self.phase: Phase = "forward"
        self.is_ending = False  # whether a callback at the end of backward is queued
        self.calls: list[Collective] = []

    def play(self, events: Iterable[Event]) -> Collectives:
        """Return the collectives that `events` cause."""
        for event in events:
            self.phase = event.phase
            if event.kind == "gradient":
                self._note_gradient(event.path)
            elif event.kind == "end":
                self._end()
            elif event.path in self.at:
                self._react(event, self.at[event.path])
        return Collectives(tuple(self.calls))

    def evaluate(self, events: Iterable[Event], gathered: Iterable[str]) -> None:
        """Begin after an evaluation; of what that leaves gathered, only `gathered` is not freed."""
        self.play(events)
        self.calls.clear()
        for unit in self.units:
            unit.holders = "all" if any(path in gathered for path in unit.traffic.paths) else "ranks"

    def _react(self, event: Event, unit: _Unit) -> None:
        if event.kind == "enter":
            self._enter(event, unit)
        elif event.kind == "leave":
            self._leave(event, unit)
        elif event.kind in ("hold", "release", "free", "regather"):
            self._hold(event, unit)
        elif event.run is not None and event.kind == "output":
            for waiting in self.on_output.get(event.run, ()):
                self._before_backward(waiting)
            for waiting in self.on_member.get(event.run, ()):
                if waiting.holders != "all":
                    self._before_backward(waiting)
        elif event.run is not None:
            for waiting in self.on_input.get(event.run, ()):
                self._after_backward(waiting)

    # -- forward -----------------------------------------------------------------------------------

    def _enter(self, event: Event, unit: _Unit) -> None:
        if len(unit.traffic.paths) > 1 and not unit.waiting:
            unit.waiting = set(unit.traffic.paths)
        if unit.hook == "backward":  # run again in the middle of its own backward
            self._gather(unit)
            self._take_up(unit)
            return
        is_entered = unit.hook != "forward"
        if is_entered and self.root is None:
            self.root = unit
        unit.hook = "forward"
        is_first = unit.training != "forward"
        unit.training = "forward"
        self._gather(unit)
        self._take_up(unit)
        if is_entered:
            self._gather_ahead(unit.traffic.ahead[0])
        if is_first and event.tracked and event.run is not None and unit.traffic.members:
            self.on_input.setdefault(event.run, []).append(unit)

    def _leave(self, event: Event, unit: _Unit) -> None:
        if len(unit.traffic.paths) > 1:
            watched = unit.traffic.gathers_again and event.phase == "forward" and event.tracked
            if watched and event.run is not None:
                self.on_member.setdefault(event.run, []).append(unit)
            if event.path not in unit.waiting:
                return
            unit.waiting.remove(event.path)
            if unit.waiting:
                return
        if unit.hook == "backward":
            return
        self._complete(event, unit)
        if self.root is unit:
            for other in reversed(self.units):
                if other is not unit and other.waiting:
                    self._complete(event, other)
                    other.waiting.clear()
            self.root = None

    def _complete(self, event: Event, unit: _Unit) -> None:
        """What follows a unit's forward; those of its modules that did not run are given up."""
        if unit.traffic.members:
            if event.phase == "forward":
                self._reshard(unit)
                unit.indices.append(len(self.finished))
                self.finished.append(unit)
            unit.training = "idle"
        if event.tracked and event.run is not None:
            self.on_output.setdefault(event.run, []).append(unit)
        unit.hook = "idle"

    def _hold(self, event: Event, unit: _Unit) -> None:
        """What `gathered` does; see `Holds`."""
        if event.kind in ("hold", "regather"):
            self._gather(unit)
            self._take_up(unit)
        if event.kind == "hold":
            unit.holds += 1
            unit.was_held = True
        elif event.kind == "regather":
            self._end_later(unit)
        else:
            unit.holds = max(unit.holds - 1, 0)
            if event.kind == "free":
                unit.holders = "ranks"

    def _end_later(self, unit: _Unit) -> None:
        self.is_ending = True
        if unit.training == "done":
            unit.training = "idle"

    # -- backward ----------------------------------------------------------------------------------

    def _before_backward(self, unit: _Unit) -> None:
        unit.hook = "backward"
        self.is_ending = True
        ahead = unit.traffic.ahead[1]
        if unit.traffic.members and unit.training != "backward":
            unit.training = "backward"
            self._gather(unit)
            self._take_up(unit)
            index = unit.indices.pop() if unit.indices and not ahead else 0
            if index > 0 and (before := self.finished[index - 1]) is not None:
                self._gather(before)
        self._gather_ahead(ahead)

    def _after_backward(self, unit: _Unit) -> None:
        unit.training = "done"
        gradients: list[str] = []
        if unit.switches.reduces:
            members = unit.traffic.by_path.items()
            zeros = unit.traffic.reduces_unused
            gradients = [path for path, m in members if path in unit.gradients or (zeros and m.trainable)]
            unit.gradients.clear()
        if unit.switches.reshards:
            self._reshard(unit)
        if gradients:
            self._reduce(unit, gradients)

    def _end(self) -> None:
        if not self.is_ending:
            return
        self.is_ending = False
        for unit in self.units:
            unit.waiting.clear()
            if unit.traffic.members and unit.training != "done":
                self._after_backward(unit)
            unit.training = unit.hook = "idle"
            unit.is_pending = False
            unit.indices.clear()
        self.root = None
        self.finished.clear()

    def _note_gradient(self, parameter: str) -> None:
        if parameter in self.holding:
            unit = self.holding[parameter]
            unit.gradients[parameter] = None
            if unit.was_held:
                self._end_later(unit)

    # -- collectives -------------------------------------------------------------------------------

    def _gather(self, unit: _Unit) -> None:
        if unit.is_pending or unit.holders == "all" or not unit.traffic.members:
            return
        unit.is_pending = True
        ranks = int(unit.traffic.reshard) if unit.holders == "fewer" else unit.traffic.shard
        if ranks != 1:
            dtype, numel = unit.traffic.gathered
            self._call("all_gather", unit, dtype, numel, ranks)

    def _gather_ahead(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._gather(self.at[path])

    def _take_up(self, unit: _Unit) -> None:
        if unit.is_pending:
            unit.is_pending = False
            unit.holders = "all"

    def _reshard(self, unit: _Unit) -> None:
        reshard = unit.traffic.reshard
        if unit.holds:
            return
        if unit.training != "forward" or reshard is True:
            unit.holders = "ranks"
        elif reshard is not False:
            unit.holders = "fewer"

    def _reduce(self, unit: _Unit, gradients: list[str]) -> None:
        traffic = unit.traffic
        dtype, numel = traffic.reduced(gradients)
        if traffic.shard != 1:
            self._call("reduce_scatter", unit, dtype, numel, traffic.shard)
        if traffic.replicate is not None and unit.switches.all_reduces:
            self._call("all_reduce", unit, dtype, numel // max(traffic.shard, 1), traffic.replicate)
        if traffic.reduces_unused and (unit.switches.all_reduces or traffic.replicate is None):
            for ranks in (traffic.shard, traffic.replicate):
                if ranks is not None and ranks != 1:
                    self._call("all_reduce", unit, torch.uint8, len(gradients), ranks)

    def _call(self, kind: Kind, unit: _Unit, dtype: torch.dtype, numel: int, ranks: int) -> None:
        self.calls.append(Collective(kind, unit.traffic.paths[0], self.phase, dtype, numel, ranks))
