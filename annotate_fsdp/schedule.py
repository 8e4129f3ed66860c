"""What a step does, event by event, and what FSDP2's hooks make of it: its collectives, on plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, reduce
from typing import Literal

import torch

from annotate_fsdp.collectives import Collective, Collectives, Kind, Phase, Step
from annotate_fsdp.errors import AnnotationError, Finding

EventKind = Literal["enter", "leave", "output", "input", "gradient", "end"]


@dataclass(frozen=True)
class Member:
    """A parameter as it is sent.

    - path, aliases: its FQNs.
    - dtype: that it has inside forward, and its gradient in backward.
    - numel: elements of the whole, padded so that all shards are equal.
    """

    path: str
    aliases: tuple[str, ...]
    trainable: bool
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Traffic:
    """What one unit sends.

    - paths: its modules; members: its parameters.
    - reshard: whether forward frees what it gathered, or how many ranks then hold it.
    - shard, replicate: ranks that shard and that replicate; 0 if that is not known, and `replicate` is
      None where nothing is replicated.
    - reduce_dtype: that gradients are sent in; None for their own.
    """

    paths: tuple[str, ...]
    members: tuple[Member, ...]
    reshard: bool | int
    shard: int
    replicate: int | None
    reduce_dtype: torch.dtype | None

    @cached_property
    def gathered(self) -> tuple[torch.dtype, int]:
        """Dtype and elements of the all-gather's output: bytes if the members' dtypes differ."""
        dtypes = {member.dtype for member in self.members}
        if len(dtypes) == 1:
            return dtypes.pop(), sum(member.numel for member in self.members)
        return torch.uint8, sum(member.numel * member.dtype.itemsize for member in self.members)

    def reduced(self, paths: Iterable[str]) -> tuple[torch.dtype, int]:
        """Dtype and elements of the reduce-scatter's input for the gradients of some members."""
        members = [self.by_path[path] for path in paths]
        dtype = self.reduce_dtype or reduce(torch.promote_types, (member.dtype for member in members))
        return dtype, sum(member.numel for member in members)

    @cached_property
    def by_path(self) -> dict[str, Member]:
        """The members by their first FQN."""
        return {member.path: member for member in self.members}


@dataclass(frozen=True)
class Switches:
    """What a user can switch on a unit; see the setters of `FSDPModule`.

    - reduces: whether gradients are reduced (`set_requires_gradient_sync`).
    - all_reduces: whether replicas are too (`set_requires_all_reduce`).
    - reshards: whether backward frees the parameters (`set_reshard_after_backward`).
    """

    reduces: bool = True
    all_reduces: bool = True
    reshards: bool = True


@dataclass(frozen=True)
class Beginning:
    """The state in which FSDP2 is when a step begins.

    - gathered: module paths of the units that are gathered.
    - unreduced: FQNs of parameters whose gradients an earlier microbatch left.
    - finished: module paths of the units whose forwards have ended since the last backward, in order, as an
      evaluation leaves them.
    - indices: (module path, positions in `finished` that its next backwards go by), for units with any.
    """

    gathered: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    indices: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Event:
    """Something that happens in a step and that FSDP2's hooks react to.

    - kind: `"enter"` and `"leave"`: a module's forward begins and ends; `"output"`: a gradient reaches
      what a run returned; `"input"`: the gradients of a run's inputs are complete; `"gradient"`: that of a
      parameter is; `"end"`: backward is over.
    - path: of the module, or of the parameter.
    - run: number of the module's call in the step, None where activation checkpointing repeats one.
    - tracked: whether the inputs (on entering) or outputs (on leaving) require a gradient.
    """

    kind: EventKind
    path: str = ""
    run: int | None = None
    tracked: bool = False

    @property
    def phase(self) -> Phase:
        """The part of the step that it happens in."""
        return "forward" if self.kind in ("enter", "leave") and self.run is not None else "backward"


# -- from a step to its events ---------------------------------------------------------------------


@dataclass(eq=False)
class _Run:
    """One call of a module, with the calls inside it."""

    path: str
    number: int
    inner: list[_Run]
    has_input: bool = False  # whether its inputs require a gradient
    has_output: bool = False
    is_reached: bool = False
    parameters: list[str] = field(default_factory=list)  # whose gradients are complete when it is done


def events_of(
    units: Sequence[Traffic], sequence: Sequence[str], registered: Sequence[str], step: Step
) -> list[Event]:
    """Return what happens in `step`, as far as a plan can know it.

    Backward runs in the reverse order of forward, as autograd does.

    Args:
        units: all units.
        sequence: paths of their modules, in the order in which their forwards end.
        registered: FQNs of all parameters in registration order: what comes first is used first.
        step: how the step differs from the plain one.

    Raises:
        AnnotationError: `step` names a path that is no unit's module.
    """
    _check_paths(step, {path for unit in units for path in unit.paths})
    order = sequence if step.order is None else step.order
    runs = _nest(path for path in order if not _is_among(path, step.skipped))
    tracker = _Tracker(units, outermost_first(sequence), registered, step)
    for run in runs:
        tracker.follow(run)
    events = [event for run in runs for event in _forward(run)]
    if not step.backward:
        return events
    for run in runs:
        tracker.claim_parameters(run)
    for run in reversed(runs):
        events += _backward(run, step.recomputed, False)
    return [*events, Event("end")]


def _check_paths(step: Step, known: set[str]) -> None:
    findings = []
    for name, paths in step.paths().items():
        for path in dict.fromkeys(paths):
            if path not in known:
                close = get_close_matches(path, sorted(known - {""}), n=1)
                meant = f"Did you mean {close[0]!r}? " if close else ""
                findings.append(
                    Finding(
                        "AF108",
                        "error",
                        path,
                        f"Step({name}=...) names {path!r}",
                        "no unit of the plan has a module there",
                        f"{meant}Write paths of modules in the plan's units",
                    )
                )
    if findings:
        raise AnnotationError(findings)


def _is_among(path: str, outer: Iterable[str]) -> bool:
    """Whether `path` is one of `outer` or lies inside one."""
    return any(path == one or _is_inside(path, one) for one in outer)


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _nest(order: Iterable[str]) -> list[_Run]:
    """Return the outermost runs of modules whose forwards end in `order`."""
    done: list[_Run] = []
    for number, path in enumerate(order):
        inner: list[_Run] = []
        while done and _is_inside(done[-1].path, path):
            inner.insert(0, done.pop())
        done.append(_Run(path, number, inner))
    return done


def outermost_first(sequence: Sequence[str]) -> dict[str, int]:
    """Return the position of each module when parents come before their children.

    Args:
        sequence: paths of the modules, children before their parents.
    """
    found: dict[str, int] = {}
    waiting = _nest(sequence)[::-1]
    while waiting:
        run = waiting.pop()
        found[run.path] = len(found)
        waiting += reversed(run.inner)
    return found


class _Tracker:
    """Follows which runs carry a gradient: whose inputs and outputs require one, and get one."""

    def __init__(
        self, units: Sequence[Traffic], modules: Iterable[str], registered: Sequence[str], step: Step
    ) -> None:
        self.step = step
        self.position = {path: position for position, path in enumerate(registered)}
        self.own: dict[str, list[Member]] = {path: [] for unit in units for path in unit.paths}
        self.owners: dict[str, tuple[str, ...]] = {}
        for unit in units:
            for member in unit.members:
                if member.trainable:
                    owners = _owners(unit, member)
                    self.owners[member.path] = owners
                    for owner in owners:
                        self.own[owner].append(member)
        self.claimed: set[str] = set()
        self.starts = self._starts(modules, registered)
        self.first = {
            path: min((self.position.get(member.path, -1) for member in members), default=len(registered))
            for path, members in self.own.items()
        }
        self.is_flowing = False

    def _starts(self, modules: Iterable[str], registered: Sequence[str]) -> dict[str, int]:
        """Return the position of the first parameter in each module, or else after it."""
        starts: dict[str, int] = {}
        for position, parameter in enumerate(registered):
            path = parameter
            while path:
                path = path.rpartition(".")[0]
                if path in self.own:
                    starts.setdefault(path, position)
        start = len(registered)
        for path in reversed(list(modules)):
            start = starts.setdefault(path, start)
        return starts

    def follow(self, run: _Run, around: tuple[str, ...] = ()) -> None:
        """Set the flags of `run` and of the runs inside it."""
        if not around:
            self.is_flowing = False
        start = self.starts[run.path]
        flows = self.is_flowing or any(self.first[outer] < start for outer in around)
        run.has_input = flows and self.step.backward
        if _is_among(run.path, self.step.without_input_gradient):
            run.has_input = False
        for inner in run.inner:
            self.follow(inner, (*around, run.path))
        run.has_output = self.step.backward and (
            run.has_input or bool(self.own[run.path]) or any(inner.is_reached for inner in run.inner)
        )
        run.is_reached = run.has_output and not _is_among(run.path, self.step.without_gradient)
        self.is_flowing = flows or run.is_reached

    def claim_parameters(self, run: _Run) -> None:
        """Find for each parameter the first run that uses it: its gradient is complete only after that."""
        if run.is_reached:
            for member in self.own[run.path]:
                if member.path not in self.claimed:
                    self.claimed.add(member.path)
                    run.parameters.append(member.path)
        for inner in run.inner:
            self.claim_parameters(inner)


def _owners(unit: Traffic, member: Member) -> tuple[str, ...]:
    """The unit's modules that hold a member, by any of its names; all of them if none seems to."""
    names = (member.path, *member.aliases)
    owners = tuple(path for path in unit.paths if any(_is_inside(name, path) for name in names))
    return owners or unit.paths


def _forward(run: _Run) -> Iterator[Event]:
    yield Event("enter", run.path, run.number, run.has_input)
    for inner in run.inner:
        yield from _forward(inner)
    yield Event("leave", run.path, run.number, run.has_output)


def _backward(run: _Run, recomputed: tuple[str, ...], is_again: bool) -> Iterator[Event]:
    """Yield what happens in the backward of a run.

    What activation checkpointing repeats is repeated whole, when backward reaches it.
    """
    if run.is_reached:
        yield Event("output", run.path, run.number)
    if run.is_reached and not is_again and _is_among(run.path, recomputed):
        is_again = True
        yield from _again(run)
    for inner in reversed(run.inner):
        yield from _backward(inner, recomputed, is_again)
    for parameter in run.parameters:
        yield Event("gradient", parameter)
    if run.is_reached and run.has_input:
        yield Event("input", run.path, run.number)


def _again(run: _Run) -> Iterator[Event]:
    yield Event("enter", run.path)
    for inner in run.inner:
        yield from _again(inner)
    yield Event("leave", run.path)


# -- from events to collectives --------------------------------------------------------------------


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
        elif event.run is not None and event.kind == "output":
            for waiting in self.on_output.get(event.run, ()):
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
        if unit.hook != "forward" and self.root is None:
            self.root = unit
        unit.hook = "forward"
        is_first = unit.training != "forward"
        unit.training = "forward"
        self._gather(unit)
        self._take_up(unit)
        if is_first and event.tracked and event.run is not None and unit.traffic.members:
            self.on_input.setdefault(event.run, []).append(unit)

    def _leave(self, event: Event, unit: _Unit) -> None:
        if len(unit.traffic.paths) > 1:
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

    # -- backward ----------------------------------------------------------------------------------

    def _before_backward(self, unit: _Unit) -> None:
        unit.hook = "backward"
        self.is_ending = True
        if not unit.traffic.members or unit.training == "backward":
            return
        unit.training = "backward"
        self._gather(unit)
        self._take_up(unit)
        index = unit.indices.pop() if unit.indices else 0
        if index > 0 and (before := self.finished[index - 1]) is not None:
            self._gather(before)

    def _after_backward(self, unit: _Unit) -> None:
        unit.training = "done"
        gradients: list[str] = []
        if unit.switches.reduces:
            gradients = [path for path in unit.traffic.by_path if path in unit.gradients]
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
            self.holding[parameter].gradients[parameter] = None

    # -- collectives -------------------------------------------------------------------------------

    def _gather(self, unit: _Unit) -> None:
        if unit.is_pending or unit.holders == "all" or not unit.traffic.members:
            return
        unit.is_pending = True
        ranks = int(unit.traffic.reshard) if unit.holders == "fewer" else unit.traffic.shard
        if ranks != 1:
            dtype, numel = unit.traffic.gathered
            self._call("all_gather", unit, dtype, numel, ranks)

    def _take_up(self, unit: _Unit) -> None:
        if unit.is_pending:
            unit.is_pending = False
            unit.holders = "all"

    def _reshard(self, unit: _Unit) -> None:
        reshard = unit.traffic.reshard
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

    def _call(self, kind: Kind, unit: _Unit, dtype: torch.dtype, numel: int, ranks: int) -> None:
        self.calls.append(Collective(kind, unit.traffic.paths[0], self.phase, dtype, numel, ranks))
