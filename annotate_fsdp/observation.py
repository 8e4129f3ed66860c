"""What a step did and whether that equals the plan, as data and text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from annotate_fsdp.collectives import Collectives, Kind
from annotate_fsdp.plan import dtype_name
from annotate_fsdp.render import Column, fold_rows, render_table

SCHEMA = "annotate_fsdp.observation/1"
WIDTH = 99


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
    - collectives: those that FSDP2 called for it, by kind.
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
    collectives: dict[Kind, int]

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
            "collectives": dict(self.collectives),
        }


@dataclass(frozen=True)
class Verdict:
    """A finished comparison; see `Observation` for the fields."""

    units: tuple[UnitObservation, ...]
    disagreements: tuple[str, ...]
    notes: tuple[str, ...]
    collectives: Collectives
    planned_collectives: Collectives
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
    def collectives(self) -> Collectives:
        """What FSDP2 called on this rank from the first unit's forward to the end of backward."""
        return self._verdict.collectives

    @property
    def planned_collectives(self) -> Collectives:
        """What the plan says of the step that ran: with its modules, its recomputations, its gradients."""
        return self._verdict.planned_collectives

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
            "collectives": dict(verdict.collectives.counts()),
            "planned_collectives": dict(verdict.planned_collectives.counts()),
            "collectives_by_phase": verdict.collectives.to_dict(),
            "units": [unit.to_dict() for unit in verdict.units],
        }

    def __str__(self) -> str:
        verdict = self._verdict
        count = len(verdict.disagreements)
        words = f"DISAGREES with the plan in {count} point{'' if count == 1 else 's'}"
        lines = [f"{self._model}, one step observed: {words if count else 'agrees with the plan'}"]
        lines += _wrap(verdict.disagreements, "  - ")
        planned = verdict.planned_collectives.counts()
        counts = (
            f"{count} {kind.replace('_', '-')} (plan: {planned[kind]})"
            for kind, count in verdict.collectives.counts().items()
        )
        lines += ["", f"collectives: {', '.join(counts)}", _table(verdict.units)]
        if verdict.notes:
            lines += ["", "notes", *_wrap(verdict.notes, "  - ")]
        return "\n".join(line.rstrip() for line in lines)


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """Return short names, comma-separated."""
    return ", ".join(dtype_name(dtype) for dtype in dtypes)


def _wrap(texts: Iterable[str], bullet: str) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet))


_COLUMNS = (
    Column("unit", 35),
    Column("n", 3),
    Column("class", 14),
    Column("calls", 5),
    Column("again", 5),
    Column("params", 6),
    Column("inputs", 9),
    Column("returned", 9),
    Column("coll", 4),
)


def _table(units: Iterable[UnitObservation]) -> str:
    """Return the unit table, units that differ by a number in their path only as one row."""
    return render_table(_COLUMNS, fold_rows((unit.name, _cells(unit)) for unit in units))


def _cells(unit: UnitObservation) -> tuple[str, ...]:
    params = [dtype_name(dtype) for dtype in unit.param_dtypes] + ["shard"] * bool(unit.sharded)
    raw, out = dtype_names(unit.raw_output_dtypes), dtype_names(unit.output_dtypes)
    return (
        ", ".join(dict.fromkeys(unit.class_names)),
        str(unit.calls),
        str(unit.recomputes),
        "/".join(params) or "-",
        "/".join(map(dtype_name, unit.input_dtypes)) or "-",
        (out if raw == out or not raw else f"{raw}>{out}") or "-",
        str(sum(unit.collectives.values())),
    )
