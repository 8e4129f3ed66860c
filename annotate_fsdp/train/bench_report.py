"""What a benchmark found: medians and paired ratios as data, and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from annotate_fsdp.plan import human_bytes
from annotate_fsdp.render import Column, render_table
from annotate_fsdp.train.bench_settings import BY_HAND, FLOOR, UNIT, BenchSettings

COLUMNS = (
    Column("layout", 7),
    Column("units", 5, right=True),
    Column("all-gathers", 11, right=True),
    Column("reduce-scatters", 15, right=True),
    Column("step ms", 8, right=True),
    Column("to unit", 7, right=True),
    Column("to floor", 8, right=True),
    Column("shard", 6, right=True),
    Column("local", 9, right=True),
    Column("peak", 9, right=True),
)


@dataclass(frozen=True)
class Spread:
    """The median of some values, and the quartiles below and above it."""

    median: float
    lower: float
    upper: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of at least one value."""
    if len(values) == 1:
        return Spread(*values, *values, *values)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper)


def paired(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Return the spread of the ratios of what was measured in the same round."""
    return spread([value / other for value, other in zip(values, base, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one layout, the largest over the ranks.

    - units, all_gathers, reduce_scatters: counts, the collectives those of one step.
    - local_bytes: of the parameters' shards on a rank.
    - peak_gathered_bytes: most bytes of parameters that were gathered at one time.
    - steps, shards: seconds of each round's step, and of each repeat's sharding.
    """

    units: int
    all_gathers: int
    reduce_scatters: int
    local_bytes: int
    peak_gathered_bytes: int
    steps: tuple[float, ...]
    shards: tuple[float, ...]


@dataclass(frozen=True)
class BenchReport:
    """All layouts of a benchmark.

    - measured: by the name of the layout.
    - same_numbers: whether losses and gradients were the same to the bit; None if there was no pair.
    - not_available: why a layout that was asked for was not measured.
    """

    settings: BenchSettings
    measured: Mapping[str, Measured]
    same_numbers: bool | None
    not_available: Mapping[str, str] = field(default_factory=dict)

    def ratio(self, layout: str, base: str, what: str) -> Spread | None:
        """Return how `steps` or `shards` compare with those of another layout, None if it was left out."""
        if base not in self.measured:
            return None
        return paired(getattr(self.measured[layout], what), getattr(self.measured[base], what))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data."""
        return {
            "settings": self.settings.to_dict(),
            "torch": torch.__version__,
            "same_numbers": self.same_numbers,
            "not_available": dict(self.not_available),
            "layouts": {name: self._layout(name) for name in self.measured},
        }

    def _layout(self, name: str) -> dict[str, Any]:
        one = self.measured[name]
        ratios = {
            "step_to_unit": self.ratio(name, UNIT, "steps"),
            "step_to_floor": self.ratio(name, FLOOR, "steps"),
            "shard_to_by_hand": self.ratio(name, BY_HAND, "shards"),
        }
        return {
            "units": one.units,
            "all_gathers": one.all_gathers,
            "reduce_scatters": one.reduce_scatters,
            "step_ms": asdict(spread([1e3 * seconds for seconds in one.steps])),
            "shard_ms": asdict(spread([1e3 * seconds for seconds in one.shards])),
            **{key: None if value is None else asdict(value) for key, value in ratios.items()},
            "local_bytes": one.local_bytes,
            "peak_gathered_bytes": one.peak_gathered_bytes,
        }

    def __str__(self) -> str:
        settings = self.settings
        wait = f", {settings.latency:g} ms before each collective" if settings.latency else ""
        lines = [
            f"{settings.model}: {settings.ranks} ranks, {settings.rounds} rounds{wait}, torch {_version()}",
            render_table(COLUMNS, (self._cells(name) for name in self.measured)),
            "step: forward and backward, median; to unit, to floor: medians of the ratios in one round",
            f"shard: time to shard a fresh model, to that of {BY_HAND}; local, peak: bytes on a rank, most "
            "gathered",
        ]
        lines += [f"{name}: not available: {why}" for name, why in self.not_available.items()]
        words = {True: "yes", False: "NO", None: "nothing to compare"}
        return "\n".join([*lines, f"same numbers: {words[self.same_numbers]}"])

    def _cells(self, name: str) -> tuple[str, ...]:
        one = self.measured[name]
        return (
            name,
            str(one.units),
            str(one.all_gathers),
            str(one.reduce_scatters),
            f"{1e3 * spread(one.steps).median:.1f}",
            _ratio(self.ratio(name, UNIT, "steps")),
            _ratio(self.ratio(name, FLOOR, "steps")),
            _ratio(self.ratio(name, BY_HAND, "shards")),
            human_bytes(one.local_bytes),
            human_bytes(one.peak_gathered_bytes),
        )


def _ratio(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f}"


def _version() -> str:
    return torch.__version__.partition("+")[0]


def needs_newer_torch() -> str:
    """Return why folding is not available."""
    return f"torch {_version()} (needs 2.15)"
