"""Every rank of the mesh tells the others its status and plan before anything is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from annotate_fsdp.errors import AnnotationError, Finding, PlanMismatchError
from annotate_fsdp.plan import Plan


@dataclass(frozen=True)
class RankStatus:
    """What one rank reports: its errors, or the fingerprint of the plan it is about to apply."""

    rank: int
    findings: tuple[Finding, ...]
    fingerprint: str


def check_agreement(mesh: DeviceMesh, plan: Plan | None, findings: Sequence[Finding]) -> None:
    """Exchange status and fingerprint over the ranks of `mesh`; return if all may go on.

    Two small `all_gather_object` calls at most, none of them if the group is torch's fake one. Every
    rank must call it, also one that has findings, so that none waits for a rank that has raised.

    Args:
        mesh: the mesh the model is sharded over; other ranks of the world are not asked.
        plan: this rank's plan, None if it has none.
        findings: this rank's findings of severity `"error"`.

    Raises:
        AnnotationError: any rank has findings; the same ones are listed on every rank.
        PlanMismatchError: the plans differ; the first difference is shown on every rank.
    """
    mine = RankStatus(dist.get_rank(), tuple(findings), plan.fingerprint() if plan else "")
    statuses = sorted(gather_objects(mesh, mine), key=lambda status: status.rank)
    if everyones := _merged_findings(statuses):
        raise AnnotationError(everyones)
    different = [status.rank for status in statuses if status.fingerprint != statuses[0].fingerprint]
    if different:
        facts = plan.facts() if plan else []
        ranks = (statuses[0].rank, different[0])
        plans = dict(gather_objects(mesh, (mine.rank, facts if mine.rank in ranks else [])))
        raise PlanMismatchError([_first_difference(ranks, plans[ranks[0]], plans[ranks[1]])])


def gather_findings(mesh: DeviceMesh, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of all ranks of `mesh`, the same list on every rank; every rank must call it."""
    statuses = gather_objects(mesh, RankStatus(dist.get_rank(), tuple(findings), ""))
    return _merged_findings(sorted(statuses, key=lambda status: status.rank))


def gather_objects(mesh: DeviceMesh, value: Any) -> list[Any]:
    """Return the `value` of every rank of `mesh`; only this rank's on torch's fake process group."""
    values = [value]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if dist.get_backend(group) == "fake":
            continue
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, values, group=group)
        values = [each for part in parts for each in part]
    return values


def _merged_findings(statuses: Sequence[RankStatus]) -> list[Finding]:
    """All ranks' findings, each once; one that not every rank has says where it was found."""
    ranks_with: dict[Finding, list[int]] = {}
    for status in statuses:
        for finding in dict.fromkeys(status.findings):
            ranks_with.setdefault(finding, []).append(status.rank)
    merged = []
    for finding, ranks in ranks_with.items():
        if len(ranks) < len(statuses):
            where = f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            finding = replace(finding, declared=f"{finding.declared} ({where})")
        merged.append(finding)
    return merged


def _first_difference(
    ranks: tuple[int, int], first: list[dict[str, str]], second: list[dict[str, str]]
) -> Finding:
    """Describe the first unit, and in it the first fact, in which two ranks' plans differ."""
    nothing: dict[str, str] = {}
    for ours, theirs in zip_longest(first, second, fillvalue=nothing):
        if list(ours.items()) == list(theirs.items()):
            continue
        here, there = ours.get("modules"), theirs.get("modules")
        if ours == theirs:  # FSDP2 lays the parameters of a unit out in the order of their registration
            names = ([key.removeprefix("parameter ") for key in facts] for facts in (ours, theirs))
            name, other = next(pair for pair in zip(*names, strict=True) if pair[0] != pair[1])
            order = (f"{name} before {other}", f"{other} before {name}")
            return _mismatch(ranks, here or "", "the order of parameters", *order)
        if here == there:
            name = next(n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n))
            return _mismatch(ranks, here or "", name, ours.get(name, "absent"), theirs.get(name, "absent"))
        return _mismatch(ranks, here or there or "", "unit", here or "no unit", there or "no unit")
    raise AssertionError("two fingerprints differ, but no unit does")


def _mismatch(ranks: tuple[int, int], path: str, what: str, here: str, there: str) -> Finding:
    return Finding(
        "AF701",
        "error",
        path,
        f"{what} is {here!r} on rank {ranks[0]}",
        f"{there!r} on rank {ranks[1]}: ranks with different plans wait for each other or mix up numbers",
        "Build, freeze and mark the model in the same way on every rank",
    )
