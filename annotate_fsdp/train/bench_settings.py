"""The options of a benchmark, and what is wrong with them, before any rank is started."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from annotate_fsdp.train.registry import model_names
from annotate_fsdp.train.settings import DEFAULT_RANKS, UsageError, check_writable_file

ISLANDS = "islands"
UNIT, GROUP, FOLD, FLOOR, BY_HAND = LAYOUTS = ("unit", "group", "fold", "floor", "by hand")
SAME_NUMBERS = (UNIT, GROUP, FOLD, BY_HAND)  # the floor computes in other dtypes


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """One benchmark.

    - model: a reference model, at its tiny configuration, or `islands`.
    - ranks: number of ranks.
    - rounds: how many steps are timed of each layout.
    - latency: milliseconds to wait before each collective.
    - layouts: which of `LAYOUTS` to measure.
    - json: file to write the figures to.
    """

    model: str
    ranks: int = DEFAULT_RANKS
    rounds: int = 30
    latency: float = 0.0
    layouts: tuple[str, ...] = LAYOUTS
    json: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON-able data; `read_bench` makes them again."""
        return {**asdict(self), "layouts": list(self.layouts)}


def read_bench(data: dict[str, Any]) -> BenchSettings:
    """Return the options that `to_dict` wrote."""
    return BenchSettings(**{**data, "layouts": tuple(data["layouts"])})


def bench_models() -> tuple[str, ...]:
    """Return the names of the models that can be measured, sorted."""
    return tuple(sorted((ISLANDS, *model_names())))


def parse_layouts(text: str) -> tuple[str, ...]:
    """Return `"unit,by-hand"` as names of layouts, in the order of `LAYOUTS`.

    Raises:
        UsageError: there is no such layout.
    """
    names = {part.strip().replace("-", " ") for part in text.split(",")}
    if unknown := sorted(names - set(LAYOUTS)):
        known = ",".join(layout_options(LAYOUTS))
        raise UsageError(f"--layouts {text}: there is no layout {unknown[0]!r}; write some of {known}")
    return tuple(name for name in LAYOUTS if name in names)


def layout_options(layouts: Iterable[str]) -> tuple[str, ...]:
    """Return how layouts are written on the command line."""
    return tuple(name.replace(" ", "-") for name in layouts)


def check_bench(settings: BenchSettings) -> None:
    """Reject options that cannot work.

    Raises:
        UsageError: with one line that names the option and what to write.
    """
    if settings.model not in bench_models():
        known = ", ".join(bench_models())
        raise UsageError(f"there is no model {settings.model!r}; write one of {known}")
    for name in ("ranks", "rounds"):
        if getattr(settings, name) < 1:
            raise UsageError(f"--{name} {getattr(settings, name)}: write a number of at least 1")
    if not (math.isfinite(settings.latency) and settings.latency >= 0):
        raise UsageError(f"--latency {settings.latency}: write a number of milliseconds, at least 0")
    if settings.json is not None:
        check_writable_file(settings.json, "--json")
