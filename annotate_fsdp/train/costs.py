"""What each lowering of a model costs on a link: the part of `annotate-fsdp audit` that `--link` asks for."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp import AnnotationError, Plan, plan_annotated
from annotate_fsdp.cost import PlanCost, plan_cost
from annotate_fsdp.links import LINKS, Link
from annotate_fsdp.plan import human_bytes
from annotate_fsdp.render import Column, fold_rows, printable, render_table
from annotate_fsdp.train.settings import LOWERING_CHOICES, UsageError

COLUMNS = (
    Column("lowering", 8),
    Column("units", 6, right=True),
    Column("coll", 6, right=True),
    Column("ms/step", 10, right=True),
    Column("forward", 10, right=True),
    Column("latency", 10, right=True),
    Column("bound", 6, right=True),
    Column("padding", 10, right=True),
    Column("gathered", 10, right=True),
)
WIDTH = 100


@dataclass(frozen=True)
class LoweringCost:
    """A lowering of a model and what it costs; `same_as` is the lowering with the same plan, if any."""

    lowering: str
    plan: Plan
    cost: PlanCost
    same_as: str | None


def find_link(name: str) -> Link:
    """Return the link of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in LINKS:
        raise UsageError(f"--link {name}: there is no such link; write {' or '.join(LINKS)}")
    return LINKS[name]


def cost_lowerings(
    model: nn.Module, link: Link, world_size: int | tuple[int, int], mp_policy: MixedPrecisionPolicy
) -> list[LoweringCost]:
    """Return the cost of every lowering that can be planned with the installed torch; "unit" comes first."""
    found: list[LoweringCost] = []
    for lowering in sorted(LOWERING_CHOICES, key="unit".__ne__):
        try:
            plan = plan_annotated(model, world_size=world_size, mp_policy=mp_policy, lowering=lowering)
        except AnnotationError:
            continue  # no such lowering here; what is wrong with the model is in the audit
        same = next((one for one in found if one.plan == plan), None)
        if same is not None:
            found.append(LoweringCost(lowering, plan, same.cost, same.same_as or same.lowering))
        else:
            found.append(LoweringCost(lowering, plan, plan_cost(plan, link), None))
    return found


def costs_to_dict(link: Link, costs: list[LoweringCost]) -> dict[str, Any]:
    """Return the costs as JSON-able data; times are in seconds."""
    lowerings = {one.lowering: {"same_as": one.same_as, **one.cost.to_dict()} for one in costs}
    return {"link": link.name, "lowerings": lowerings}


def render_costs(link: Link, costs: list[LoweringCost]) -> str:
    """Return a table of the lowerings, and each plan's latency-bound units, at most 100 columns wide."""
    lines = [
        f"communication of one step on {link.name} if nothing overlaps (an upper bound), in ms; per rank,",
        "padding in storage and most bytes gathered at once",
        render_table(COLUMNS, [_cells(one) for one in costs]),
    ]
    for one in costs:
        if one.same_as is not None:
            lines.append(f"{one.lowering}: the same plan as {one.same_as}")
    for one in costs:
        bound = [(unit.unit or "(root)", ()) for unit in one.cost.time.latency_bound]
        if one.same_as is None and bound:
            units = ", ".join(f"{name} ({n})" if n != "1" else name for name, n in fold_rows(bound))
            text = printable(f"latency-bound units under {one.lowering}: {units}")
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)


def _cells(one: LoweringCost) -> tuple[str, ...]:
    cost, time = one.cost, one.cost.time
    return (
        one.lowering,
        f"{cost.units:,}",
        f"{time.calls:,}",
        _milliseconds(time.seconds.total),
        _milliseconds(dict(time.phases)["forward"].total),
        _milliseconds(time.seconds.latency),
        f"{len(time.latency_bound):,}",
        human_bytes(cost.padding_bytes),
        human_bytes(cost.peak_gathered_bytes),
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
