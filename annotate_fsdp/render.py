"""Plans and findings as plain text that fits a terminal."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from annotate_fsdp.errors import Finding, fold_findings
from annotate_fsdp.plan import Plan, Unit, dtype_name, human_bytes

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a path component that is a number
_NUMBERED_PATH = re.compile(r"(?<=\.)\d+(?=[.:])")  # the same within a sentence


@dataclass(frozen=True)
class Column:
    """One column of a table: its title, its width, and whether it is right-aligned."""

    title: str
    width: int
    right: bool = False


UNIT_COLUMNS = (
    Column("unit", 26),
    Column("n", 4, right=True),
    Column("class", 13),
    Column("from", 7),
    Column("store", 5),
    Column("comp", 4),
    Column("red", 4),
    Column("out", 4),
    Column("resh", 4),
    Column("params", 6, right=True),
    Column("B/rank", 7, right=True),
    Column("coll", 4, right=True),
)


def render_units(plan: Plan) -> str:
    """Return the plan's unit table, repeated layers folded, at most 100 columns wide."""
    calls = plan.collectives().by_unit()
    return render_table(
        UNIT_COLUMNS,
        fold_rows((unit_label(unit), _cells(unit, len(calls.get(unit.path, ())))) for unit in plan.units),
    )


def unit_label(unit: Unit) -> str:
    """Return the paths of a unit's modules, those that differ by numbers only as one."""
    alike: dict[str, list[str]] = {}
    for path in unit.paths:
        alike.setdefault(_NUMBER.sub("*", path), []).append(path or "(root)")
    return ", ".join(_fold_paths(paths) for paths in alike.values())


def render_lowering(plan: Plan) -> str:
    """Return why each island is grouped, folded or a unit of its own; "" if there is nothing to say."""
    reasons = [(island.path, island.why) for unit in plan.units for island in unit.islands]
    reasons += [(unit.name, unit.why) for unit in plan.units if unit.why.startswith("own unit:")]
    rows = fold_rows((path, (_NUMBERED_PATH.sub("*", why),)) for path, why in reasons)
    lines = [f"{count} {why}: {paths}" for paths, count, why in rows]
    wrapped = [
        line
        for text in lines
        for line in textwrap.wrap(
            printable(text), 100, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
        )
    ]
    return "\n".join(["lowering", *wrapped]) if wrapped else ""


def fold_rows(rows: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Return one row (paths, how many, cells...) for all paths that differ by numbers only and look alike."""
    folded: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path, cells in rows:
        folded.setdefault((_NUMBER.sub("*", path), cells), []).append(path)
    return [(_fold_paths(paths), str(len(paths)), *cells) for (_, cells), paths in folded.items()]


def render_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Return an aligned table. A first cell that is too long gets a line of its own, others are cut."""
    lines = [_row(columns, [column.title for column in columns])]
    lines.append(_row(columns, ["-" * column.width for column in columns]))
    width = len(lines[-1])
    for row in rows:
        first, *rest = (printable(cell) for cell in row)
        if len(first) > columns[0].width:
            lines += textwrap.wrap(first, width, subsequent_indent="    ", break_on_hyphens=False)
            first = ""
        lines.append(_row(columns, [first, *rest]))
    return "\n".join(lines)


def render_totals(plan: Plan) -> str:
    """Return three lines: parameters and bytes, collectives of a step, the largest gathered unit."""
    stored: dict[torch.dtype, int] = {}
    for unit in plan.units:
        for dtype, count in unit.bytes_by_dtype().items():
            stored[dtype] = stored.get(dtype, 0) + count
    by_dtype = ", ".join(f"{dtype_name(d)} {human_bytes(b)}" for d, b in stored.items())
    per_rank = sum(unit.sharded_bytes() for unit in plan.units)
    where = ""
    if plan.mesh:
        ideal = sum(p.local_numel * p.dtype.itemsize for u in plan.units for p in u.parameters)
        waste = 1 - ideal / (per_rank * plan.mesh.shard) if per_rank else 0
        padding = f" ({waste:.0%} of it padding)" if waste >= 0.005 else ""
        where = f"; on each of {plan.mesh} {human_bytes(per_rank)} after sharding{padding}"
    counts = plan.collectives().counts()
    words = ", ".join(f"{count:,} {kind.replace('_', '-')}s" for kind, count in counts.items() if count)
    lines = [
        f"{plan.numel:,} parameters in {len(plan.units)} units; stored: {by_dtype or 'nothing'}{where}",
        f"collectives of one step: {words or 'none'}",
    ]
    largest = max(plan.units, key=Unit.gathered_bytes, default=None)
    if largest is not None and largest.members:
        lines.append(
            f"largest gathered unit: {unit_label(largest)} with {human_bytes(largest.gathered_bytes())}"
        )
    return "\n".join(line for text in lines for line in textwrap.wrap(printable(text), 100))


def render_findings(findings: Sequence[Finding]) -> str:
    """Return the findings, worst first, those that differ only by a number folded into one."""
    if not findings:
        return "findings: none"
    order = ("error", "warning", "info")
    counts = [f"{n} {s}" for s in order if (n := sum(f.severity == s for f in findings))]
    lines = [f"findings: {', '.join(counts)}"]
    for text in fold_findings(sorted(findings, key=lambda f: order.index(f.severity))):
        lines += textwrap.wrap(printable(text), 100, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines)


def human_count(count: float) -> str:
    """Return a count with a decimal suffix: 1.2M."""
    for suffix in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.0f}" if not suffix else f"{count:.3g}{suffix}"
        count /= 1000
    return f"{count:.3g}T"


def printable(text: str) -> str:
    """Return `text` with control characters written out, so that a name cannot steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _row(columns: Sequence[Column], cells: Sequence[str]) -> str:
    parts = []
    for column, cell in zip(columns, cells, strict=True):
        if len(cell) > column.width:
            cell = cell[: column.width - 1] + "…"
        parts.append(cell.rjust(column.width) if column.right else cell.ljust(column.width))
    return " ".join(parts).rstrip()


def _cells(unit: Unit, collectives: int) -> tuple[str, ...]:
    flag = unit.reshard_after_forward
    reshard = ("yes" if flag else "no") if isinstance(flag, bool) else str(flag)
    shares = unit.sharded_bytes()
    return (
        ", ".join(dict.fromkeys(unit.class_names)),
        _short_provenance(unit),
        _names(unit.storage_dtypes),
        _names(unit.compute_dtypes or ((unit.policy.param_dtype,) if unit.policy.param_dtype else ())),
        _names(unit.reduce_dtypes),
        dtype_name(unit.policy.output_dtype),
        reshard if unit.members else "-",
        human_count(unit.numel),
        human_bytes(shares).replace(" ", "").replace("iB", ""),
        str(collectives),
    )


def _names(dtypes: Iterable[torch.dtype]) -> str:
    names = [dtype_name(dtype) for dtype in dtypes]
    return names[0] + ("+" if len(names) > 1 else "") if names else "-"


def _short_provenance(unit: Unit) -> str:
    """ "class" for a mark on the module's own class, "inst." for one on the instance, ..."""
    origin = unit.provenance
    if "tied" in origin:
        return "tied"
    if origin.startswith("class "):
        return "class" if origin.removeprefix("class ").split(".")[-1] in unit.class_names else "base"
    short = {"instance": "inst.", "read back": "read", "sharded before": "kept"}
    return short.get(origin, origin.split(":")[0].split(",")[0])


def _fold_paths(paths: Sequence[str]) -> str:
    """Write paths that differ by numbers only as one: layers.{0-91}.norm."""
    if len(paths) == 1:
        return paths[0]
    values = [tuple(int(n) for n in _NUMBER.findall(path)) for path in paths]
    columns = [sorted(set(column)) for column in zip(*values, strict=True)]
    if math.prod(len(column) for column in columns) != len(paths):
        return f"{paths[0]} and {len(paths) - 1} like it"
    parts = _NUMBER.split(paths[0])
    text = parts[0]
    for column, part in zip(columns, parts[1:], strict=True):
        text += (str(column[0]) if len(column) == 1 else "{" + _ranges(column) + "}") + part
    return text


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges, with a step where there is one: 0-2, 3-91:4."""
    if len(numbers) > 2:
        steps = {b - a for a, b in pairwise(numbers)}
        if len(steps) == 1 and (step := steps.pop()) > 1:
            return f"{numbers[0]}-{numbers[-1]}:{step}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(texts if len(texts) < 6 else [*texts[:2], "...", texts[-1]])
