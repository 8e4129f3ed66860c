"""The collectives of a training step as data: kind, unit, phase, dtype, size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

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
    - ranks: size of the process group.
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
