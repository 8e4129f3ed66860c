"""How a unit is carried out. The one place that turns what marks say into what `fully_shard` is told."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from annotate_fsdp.errors import Finding
from annotate_fsdp.plan import Plan

LOWERINGS = ("auto", "unit")


def check_lowering(lowering: object) -> Iterator[Finding]:
    """Yield a finding if there is no lowering of that name."""
    if lowering not in LOWERINGS:
        close = get_close_matches(str(lowering), LOWERINGS, n=1)
        yield Finding(
            "AF108",
            "error",
            "",
            f"lowering={lowering!r}",
            "there is no such lowering",
            f"Write {' or '.join(repr(name) for name in close or LOWERINGS)}",
        )


def lower_plan(plan: Plan, lowering: str) -> Plan:
    """Return `plan` as it is carried out under `lowering`.

    - `"unit"`: every tagged module gets its own `fully_shard` call.
    - `"auto"`: the cheapest way with the same numbers, which today is `"unit"`.
    """
    assert lowering in LOWERINGS, lowering
    return plan
