"""The collectives of a training step as data: kind, unit, phase, dtype, size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from annotate_fsdp.errors import AnnotationError, Finding

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
Phase = Literal["forward", "backward"]
KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Collective:
    """One collective call of one rank.

    - unit: FQN of the unit's first module, "" for the root.
    - dtype: of the buffer that is sent; `uint8` where a unit gathers parameters of several dtypes in one.
    - numel: elements of the whole buffer: what an all-gather makes, what a reduce-scatter takes, what an
      all-reduce works on.
    - ranks: size of the process group; 0 in a plan without a mesh.
    """

    kind: Kind
    unit: str
    phase: Phase
    dtype: torch.dtype
    numel: int
    ranks: int

    @property
    def bytes(self) -> int:
        """Size of the whole buffer."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Collectives:
    """The collectives of a step, in the order in which a rank calls them."""

    calls: tuple[Collective, ...]

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def forward(self) -> Collectives:
        """Those of the forward."""
        return self._where(call for call in self.calls if call.phase == "forward")

    @property
    def backward(self) -> Collectives:
        """Those of the backward."""
        return self._where(call for call in self.calls if call.phase == "backward")

    def of(self, unit: str) -> Collectives:
        """Those of the unit whose first module is at `unit`."""
        return self._where(call for call in self.calls if call.unit == unit)

    def by_unit(self) -> dict[str, Collectives]:
        """Return those of each unit that has any, by the path of its first module."""
        found: dict[str, list[Collective]] = {}
        for call in self.calls:
            found.setdefault(call.unit, []).append(call)
        return {unit: self._where(calls) for unit, calls in found.items()}

    def counts(self) -> dict[Kind, int]:
        """Return how many there are of each kind."""
        counts = dict.fromkeys(KINDS, 0)
        for call in self.calls:
            counts[call.kind] += 1
        return counts

    def bytes(self) -> dict[Kind, dict[torch.dtype, int]]:
        """Return the bytes of each kind by dtype; see `Collective.numel`."""
        sizes: dict[Kind, dict[torch.dtype, int]] = {kind: {} for kind in KINDS}
        for call in self.calls:
            of_kind = sizes[call.kind]
            of_kind[call.dtype] = of_kind.get(call.dtype, 0) + call.bytes
        return sizes

    def to_dict(self) -> dict[str, Any]:
        """Return counts and bytes of both phases as JSON-able data."""
        return {
            phase: {
                kind: {
                    "count": part.counts()[kind],
                    "bytes": {str(d).removeprefix("torch."): b for d, b in part.bytes()[kind].items()},
                }
                for kind in KINDS
            }
            for phase, part in (("forward", self.forward), ("backward", self.backward))
        }

    @staticmethod
    def _where(calls: Iterable[Collective]) -> Collectives:
        return Collectives(tuple(calls))


@dataclass(frozen=True)
class Step:
    """A training step that is not the plain one: one forward through everything, one backward, all reduced.

    Paths are those of modules in the plan's units; what lies inside such a module is meant too.

    - skipped: modules that do not run.
    - without_gradient: modules whose outputs get no gradient, although they could.
    - without_input_gradient: modules whose inputs require no gradient. Where nothing trainable runs before
      a module, as far as the order of registration says so, that is known without being named here.
    - recomputed: modules that activation checkpointing runs again in backward.
    - gathered: modules whose unit is gathered when the step begins, as the root is after an evaluation.
    - evaluated: whether an evaluation came right before. What it ran last is then gathered once more, ahead
      of what this step runs first, by which FSDP2 believes it was preceded.
    - synchronizes: False for a microbatch under `set_requires_gradient_sync(False)`.
    - backward: False for an evaluation under `torch.no_grad()`.
    - order: modules in the order in which their forwards end, if that is not `Plan.sequence`. A module that
      runs twice is named twice; two forwards before one backward are the sequence twice.
    """

    skipped: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    without_input_gradient: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    evaluated: bool = False
    synchronizes: bool = True
    backward: bool = True
    order: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, paths in self._named_paths():
            if isinstance(paths, str):
                write = f"Write {name}=({paths!r},)"
                raise AnnotationError(
                    [Finding("AF108", "error", "", f"{name}={paths!r}", "it takes several paths", write)]
                )
            object.__setattr__(self, name, tuple(paths))

    def paths(self) -> Mapping[str, tuple[str, ...]]:
        """Return the fields that name modules, by name."""
        return dict(self._named_paths())

    def _named_paths(self) -> Iterator[tuple[str, Any]]:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, bool) and value is not None:
                yield item.name, value
