"""What happens in a step that FSDP2's hooks react to, as far as a plan can know it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from annotate_fsdp.collectives import Phase, Step
from annotate_fsdp.errors import AnnotationError, Finding
from annotate_fsdp.traffic import Member, Traffic

EventKind = Literal[
    "enter", "leave", "output", "input", "gradient", "end", "hold", "release", "free", "regather"
]


@dataclass(frozen=True)
class Event:
    """Something that happens in a step and that FSDP2's hooks react to.

    - kind: `"enter"` and `"leave"`: a module's forward begins and ends; `"output"`: a gradient reaches
      what a run returned; `"input"`: the gradients of a run's inputs are complete; `"gradient"`: that of a
      parameter is; `"end"`: backward is over; `"hold"`: `gathered` holds a unit, until it leaves it gathered
      (`"release"`) or frees it (`"free"`); `"regather"`: a weight that was saved inside is needed again.
    - path: of the module, or of the parameter.
    - run: number of the module's call in the step, None where no gradient comes back to it.
    - tracked: whether the inputs (on entering) or outputs (on leaving) require a gradient.
    - is_again: whether activation checkpointing repeats the call, inside backward.
    """

    kind: EventKind
    path: str = ""
    run: int | None = None
    tracked: bool = False
    is_again: bool = False

    @property
    def phase(self) -> Phase:
        """The part of the step that it happens in."""
        kinds = ("enter", "leave", "hold", "release", "free")
        return "forward" if self.kind in kinds and not self.is_again else "backward"


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
            inner.append(done.pop())
        done.append(_Run(path, number, inner[::-1]))
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
            places = {path: place for place, path in enumerate(unit.paths)}
            for member in unit.members:
                if member.trainable:
                    owners = _owners(places, member)
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
            for path in _around(parameter):
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


def _owners(places: dict[str, int], member: Member) -> tuple[str, ...]:
    """The modules of a unit, with their places, that hold a member by any name; all if none seems to."""
    around = {outer for name in (member.path, *member.aliases) for outer in _around(name)}
    return tuple(sorted(around & places.keys(), key=places.__getitem__)) or tuple(places)


def _around(path: str) -> Iterator[str]:
    """The paths of the modules that something at `path` lies in."""
    while path:
        path = path.rpartition(".")[0]
        yield path


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
    yield Event("enter", run.path, is_again=True)
    for inner in run.inner:
        yield from _again(inner)
    yield Event("leave", run.path, is_again=True)
