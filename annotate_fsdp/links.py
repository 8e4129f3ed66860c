"""How fast collectives are on a link: known ones, and those fitted to measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from annotate_fsdp.collectives import Kind
from annotate_fsdp.errors import AnnotationError, Finding


def moved_fraction(kind: Kind, ranks: int) -> float:
    """Return the part of a collective's whole buffer that each rank receives, and sends.

    (R - 1) / R for an all-gather and a reduce-scatter, twice that for an all-reduce, which is one after
    the other: the bus bandwidth's factor in nccl-tests' PERFORMANCE.md.
    """
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class Point:
    """What was fitted for a number of ranks.

    - latency: seconds that a collective takes however little it moves.
    - bandwidth: bytes per second that each rank moves, see `moved_fraction`; infinite if size does not show.
    """

    ranks: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Line:
    """One way to carry out one kind of collective, by number of ranks.

    Between two points the latency and the time per byte go straight from one to the other. Beyond the last
    point (and below the first) the latency follows the line through the two nearest, since a ring takes one
    step more for every rank, and the bandwidth is that of the nearest. A single point holds everywhere.

    - points: with rising numbers of ranks.
    - protocol: its name, for display.
    - first, last: the fewest and the most ranks it is used for.
    """

    kind: Kind
    points: tuple[Point, ...]
    protocol: str = ""
    first: int = 2
    last: int | None = None

    def at(self, ranks: int) -> Point:
        """Return the point for a number of ranks."""
        if len(self.points) == 1:
            return replace(self.points[0], ranks=ranks)
        after = next((i for i, point in enumerate(self.points) if point.ranks >= ranks), len(self.points) - 1)
        a, b = self.points[max(after, 1) - 1], self.points[max(after, 1)]
        way = (ranks - a.ranks) / (b.ranks - a.ranks)
        latency = max(a.latency + way * (b.latency - a.latency), 0.0)
        share = min(max(way, 0.0), 1.0)
        pace = (1 - share) / a.bandwidth + share / b.bandwidth  # seconds per byte
        return Point(ranks, latency, 1 / pace if pace else float("inf"))


@dataclass(frozen=True)
class Seconds:
    """A time in two parts: what size does not change, and what it does."""

    latency: float = 0.0
    transfer: float = 0.0

    @property
    def total(self) -> float:
        """Both parts."""
        return self.latency + self.transfer

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.latency + other.latency, self.transfer + other.transfer)


@dataclass(frozen=True)
class Link:
    """How fast collectives are: time = latency + moved bytes / bandwidth.

    Several lines for one kind and number of ranks are protocols, of which the faster is taken. A group of
    ranks is thought to fill node after node.
    """

    name: str
    lines: tuple[Line, ...]

    def seconds(self, kind: Kind, size: int, ranks: int) -> Seconds:
        """Return the time of one collective; nothing for a single rank.

        Args:
            kind: of the collective.
            size: bytes of the whole buffer, see `Collective.bytes`.
            ranks: of the process group.

        Raises:
            AnnotationError: the number of ranks is not known (0), or the link has nothing for that kind.
        """
        if ranks == 1:
            return Seconds()
        lines = [
            line
            for line in self.lines
            if line.kind == kind and line.first <= ranks and (line.last is None or ranks <= line.last)
        ]
        if ranks < 1 or not lines:
            wrong = f"link {self.name} says nothing about it" if ranks > 0 else "its ranks are not known"
            write = (
                "Fit the link with samples of it" if ranks > 0 else "Plan with a mesh or with world_size=64"
            )
            raise AnnotationError([Finding("AF108", "error", "", f"{kind} of {ranks} ranks", wrong, write)])
        moved = size * moved_fraction(kind, ranks)
        points = [line.at(ranks) for line in lines]
        times = [Seconds(point.latency, moved / point.bandwidth) for point in points]
        return min(times, key=lambda time: time.total)


# -- links that are known --------------------------------------------------------------------------


def _line(kind: Kind, points: Iterable[tuple[int, float, float]], **options: Any) -> Line:
    """A line from (ranks, microseconds, GB/s of the whole buffer), as nccl-tests' "algbw" counts it."""
    return Line(
        kind,
        tuple(
            Point(ranks, us * 1e-6, gigabytes * 1e9 * moved_fraction(kind, ranks))
            for ranks, us, gigabytes in points
        ),
        **options,
    )


_ONE_NODE = ((2, 8.0, 537.0), (4, 17.0, 434.0), (8, 30.0, 394.0))
_LL = ((16, 23.3, 41.6), (32, 42.7, 21.1), (64, 81.5, 20.7))
_SIMPLE = ((16, 70.0, 409.6), (32, 145.6, 396.4), (64, 296.8, 390.1))
_REPLICAS_LL = ((2, 16.6, 24.0), (4, 36.6, 13.6), (8, 76.6, 11.7))
_REPLICAS_SIMPLE = ((2, 36.4, 48.0), (4, 92.4, 32.0), (8, 204.4, 27.4))

H100X8 = Link(
    "h100x8",
    (
        _line("all_gather", _ONE_NODE, protocol="NVLink", last=8),
        _line("reduce_scatter", _ONE_NODE, protocol="NVLink", last=8),
        _line("all_gather", _LL, protocol="LL", first=9),
        _line("reduce_scatter", _LL, protocol="LL", first=9),
        _line("all_gather", _SIMPLE, protocol="Simple", first=9),
        _line("reduce_scatter", _SIMPLE, protocol="Simple", first=9),
        _line("all_reduce", _REPLICAS_LL, protocol="LL"),
        _line("all_reduce", _REPLICAS_SIMPLE, protocol="Simple"),
    ),
)
"""Nodes of 8 H100 on NVSwitch, joined by one 400 Gb/s card for each GPU.

All figures are those of autoparallel's `cost_models/nccl_cost_model.py` (meta-pytorch/autoparallel, commit
0288b2c), in microseconds and GB/s of the whole buffer:

- up to 8 ranks, one node: fitted from nccl-tests at 2, 4 and 8 GPUs (8, 17, 30 us; 537, 434, 394 GB/s).
- more ranks, whole nodes: what NCCL 2.27.5 itself expects of its rings (tuning logs) at 2, 4 and 8 nodes; at
  8 nodes LL 81.5 us and 20.7 GB/s, Simple 296.8 us and 390.1 GB/s.
- beyond 64 ranks an extrapolation: each node more adds 9.7 us (LL) or 37.8 us (Simple), and the bandwidth
  stays. That meets the source's own figures at 32 nodes (314.3 us and 1204 us). 1024 ranks: 1.25 ms, 4.83 ms.
- all-reduce: FSDP2 calls it between replicas only, which lie a node or more apart, so it is the ring of one
  GPU in each of 2, 4 or 8 nodes, extrapolated likewise. With many replicas NCCL takes trees, which wait less.

Measured bandwidth of large messages over nodes is 0.87 of that, says the same source; it is left out here.
"""

LOOPBACK = Link(
    "loopback",
    (
        Line("all_gather", (Point(2, 0.4e-3, 0.7e9),)),
        Line("reduce_scatter", (Point(2, 0.55e-3, 0.4e9),)),
        Line("all_reduce", (Point(2, 0.65e-3, 0.8e9),)),
    ),
)
"""Gloo over a machine's own loopback: a placeholder until `fit_link` has samples of the machine at hand.

What `fit_link` made, rounded, of 60 samples each of 1 KiB to 4 MiB between 2 ranks that shared 2 busy cores
(torch 2.13.0). More ranks get the same, which holds only while each has a core: 4 on 2 cores took 4 to 5 ms.
"""

LINKS: dict[str, Link] = {link.name: link for link in (H100X8, LOOPBACK)}
"""The links that are known, by name."""


# -- a link from measurements ----------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One measured collective; `bytes` is its whole buffer, as in `Collective`."""

    kind: Kind
    bytes: int
    ranks: int
    seconds: float


def fit_link(samples: Iterable[Sample], name: str) -> Link:
    """Return the link that explains `samples` best.

    For each kind and number of ranks: the median of each size, so that a few outliers do not matter; then
    the line through the medians with the least squared relative error, so that small sizes count as much as
    large ones. A latency is never negative, nor a bandwidth: where the best line has one, it is the best of
    those that start at 0, or of those that are flat.

    Args:
        samples: at least two sizes for each kind and number of ranks.
        name: of the link.

    Raises:
        AnnotationError: there are too few sizes, or a sample is no measurement.
    """
    sizes: dict[tuple[Kind, int], dict[int, list[float]]] = {}
    for sample in samples:
        if sample.seconds <= 0 or sample.ranks < 2 or sample.bytes < 0:
            raise _unfit(name, repr(sample), "it takes 2 ranks, some bytes and some time", "Leave it out")
        sizes.setdefault((sample.kind, sample.ranks), {}).setdefault(sample.bytes, []).append(sample.seconds)
    points: dict[Kind, list[Point]] = {}
    for (kind, ranks), times in sorted(sizes.items()):
        if len(times) < 2:
            declared = f"{kind} of {ranks} ranks in one size"
            raise _unfit(name, declared, "latency cannot be told from bandwidth", "Measure several sizes")
        fraction = moved_fraction(kind, ranks)
        medians = [(size * fraction, median(seconds)) for size, seconds in times.items()]
        points.setdefault(kind, []).append(Point(ranks, *_straight_line(medians)))
    if not points:
        raise _unfit(name, "no sample", "there is nothing to fit", "Measure several sizes")
    return Link(name, tuple(Line(kind, tuple(found)) for kind, found in points.items()))


def _unfit(name: str, declared: str, wrong: str, write: str) -> AnnotationError:
    return AnnotationError([Finding("AF108", "error", "", f"link {name}: {declared}", wrong, write)])


def _straight_line(medians: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and bandwidth with the least sum of ((latency + x / bandwidth) / y - 1) squared."""
    weights = [y**-2 for _, y in medians]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, medians, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, medians, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, medians, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, medians, strict=True)) / spread
    if slope <= 0:
        return mean_y, float("inf")
    if (latency := mean_y - slope * mean_x) >= 0:
        return latency, 1 / slope
    through = sum(w * x * y for w, (x, y) in zip(weights, medians, strict=True))
    return 0.0, sum(w * x * x for w, (x, _) in zip(weights, medians, strict=True)) / through
