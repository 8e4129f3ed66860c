"""How a plan's units are carried out with the same numbers: each by itself, grouped, or folded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp.errors import Finding
from annotate_fsdp.plan import (
    Cast,
    Island,
    ParamInfo,
    Plan,
    Unit,
    dtype_name,
    human_bytes,
    offload_name,
    order_units,
)
from annotate_fsdp.planner import Site

LOWERINGS = ("auto", "unit", "group", "fold")
MERGE_BELOW = 4 * 2**20
GROUP_BYTES = 32 * 2**20
CAN_FOLD = any(item.name == "param_dtype_override_fn" for item in fields(MixedPrecisionPolicy))

Paths = tuple[str, ...]


@dataclass(frozen=True)
class Surroundings:
    """What lowering must know of the tree besides the plan.

    - sites: where each unit lies, by its paths.
    - finished: post-order position of each module path.
    - parents: paths of the modules that register each module path.
    - registered: position of each parameter in registration order.
    """

    sites: Mapping[Paths, Site]
    finished: Mapping[str, int]
    parents: Mapping[str, list[str]]
    registered: Mapping[str, int]


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


def lower_plan(
    plan: Plan,
    surroundings: Surroundings,
    lowering: str,
    *,
    merge_below: int = MERGE_BELOW,
    group_bytes: int = GROUP_BYTES,
    can_fold: bool = CAN_FOLD,
) -> Plan:
    """Return `plan` as it is carried out under `lowering`; the numbers are the same under each.

    - `"unit"`: every tagged module gets its own `fully_shard` call.
    - `"group"`: small units whose marks name a precision and that agree share one call.
    - `"auto"`: as `"group"`, so that every tagged module is an FSDP module sharded before its parent.
    - `"fold"`: such units join the unit around them where one unit can hold both, and are grouped elsewhere.

    Args:
        plan: as the marks mean it.
        surroundings: of that plan.
        lowering: one of `LOWERINGS`.
        merge_below: bytes in the compute dtype up to which a unit is small; padding does not count, so that
            the layout is the same on every number of ranks.
        group_bytes: such bytes that one group holds at most.
        can_fold: whether torch can compute with one parameter of a unit in another dtype.
    """
    assert lowering in LOWERINGS, lowering
    if lowering == "unit":
        return plan
    work = _Lowering(plan, surroundings, merge_below, group_bytes, can_fold)
    if lowering == "fold":
        work.fold()
    work.group()
    work.join()
    return work.result()


def join_conditional(
    plan: Plan, surroundings: Surroundings, *, can_fold: bool = CAN_FOLD
) -> tuple[Plan, list[Finding]]:
    """Return `plan` with each conditional unit in the nearest one around it that every rank runs.

    A rank that skips a unit with collectives of its own would hang those that do not. So would a unit inside
    it, which joins as well.

    Args:
        plan: as the marks mean it.
        surroundings: of that plan.
        can_fold: as in `lower_plan`.

    Returns:
        The plan, and a finding for each such unit that can join none.
    """
    if not any(surroundings.sites[unit.paths].is_conditional for unit in plan.units):
        return plan, []
    work = _Lowering(plan, surroundings, 0, 0, can_fold)
    findings = list(work.join_conditional())
    work.join()
    return work.result(), findings


class _Lowering:
    """One lowering: the units by their paths, replaced step by step."""

    def __init__(
        self, plan: Plan, surroundings: Surroundings, merge_below: int, group_bytes: int, can_fold: bool
    ) -> None:
        self.plan = plan
        self.surroundings = surroundings
        self.merge_below = merge_below
        self.group_bytes = group_bytes
        self.can_fold = can_fold
        self.units = {unit.paths: unit for unit in plan.units}
        self.folded_into: dict[Paths, Paths] = {}
        self.why_not_folded: dict[Paths, str] = {}
        self.hosts: dict[Paths, _Host] = {}
        self.deferred: dict[Paths, _Host] = {}

    def result(self) -> Plan:
        """Return the lowered plan, its units in application order."""
        units = order_units(self.units.values(), self.surroundings.finished, self.surroundings.parents)
        paths = {path for unit in units for path in unit.paths}
        sequence = tuple(path for path in self.plan.sequence if path in paths)
        return replace(self.plan, units=units, sequence=sequence)

    def _why_own(self, unit: Unit) -> str:
        """Why a unit keeps its own call whatever the others are; "" if that depends on them."""
        if stays := self.surroundings.sites[unit.paths].stays:
            return stays
        if unit.islands:
            return "conditional units joined it"
        if (size := unit.whole_bytes()) > self.merge_below:
            return human_bytes(size)
        if len(unit.storage_dtypes) > 1:
            return f"stored in {_and(unit.storage_dtypes)}"
        return ""

    # -- conditional units -------------------------------------------------------------------------

    def join_conditional(self) -> Iterator[Finding]:
        """Let each conditional unit join another, outermost first; yield a finding for each that cannot."""
        failed: set[Paths] = set()
        for unit in reversed(self.plan.units):
            site = self.surroundings.sites[unit.paths]
            if not site.is_conditional:
                continue
            if not failed.isdisjoint(site.around):  # the finding on the unit around it is enough
                failed.add(unit.paths)
                continue
            around = {self.folded_into.get(paths, paths) for paths in site.around}
            wrong = site.why_alone or ("several units are around it" if len(around) > 1 else "")
            if not wrong:
                (paths,) = around
                host = self.hosts.setdefault(paths, _Host(self.units[paths], is_conditional=True))
                wrong = host.why_not(unit, self.can_fold)
                if not wrong:
                    self._fold_into(unit, host)
                    continue
            failed.add(unit.paths)
            below = tuple(f"{path}." if path else "" for path in unit.paths)
            members = [path for path in self.surroundings.registered if path.startswith(below)]
            yield Finding(
                "AF214",
                "error",
                unit.path,
                f"conditional=True on it or around it; it holds {', '.join(members)}",
                f"it cannot join the unit around it: {wrong}, and a rank that skips a unit of its own "
                "hangs the others",
                "Give it the dtypes, the mesh and the offload of the unit around it, or run it on every rank",
            )

    # -- fold --------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Fold what may be folded, outermost first, so that what it is folded into is settled.

        A unit without parameters of its own gathers nothing, and FSDP2 puts no node into the autograd graph
        before its inputs. Nothing is folded into such a unit, since that would change the order in which
        gradients are added; but into the root, whose inputs nobody else uses, where no group takes it.
        """
        for unit in reversed(self.plan.units):
            if self._why_own(unit):
                continue
            around = self.surroundings.sites[unit.paths].around
            if len(around) != 1:
                self.why_not_folded[unit.paths] = "shared by several units"
                continue
            paths = self.folded_into.get(around[0], around[0])
            if not self._why_own(self.units[paths]):
                self.why_not_folded[unit.paths] = f"{self.units[paths].name} is not folded itself"
                continue
            host = self.hosts.setdefault(paths, _Host(self.units[paths]))
            if wrong := host.why_not(unit, self.can_fold):
                self.why_not_folded[unit.paths] = wrong
            elif not host.unit.members:
                self.why_not_folded[unit.paths] = f"{host.unit.name} gathers nothing of its own"
                if host.unit.path == "":
                    self.deferred[unit.paths] = host
            else:
                self._fold_into(unit, host)

    def _fold_into(self, unit: Unit, host: _Host) -> None:
        host.take(unit)
        self.folded_into[unit.paths] = host.unit.paths
        del self.units[unit.paths]

    def join(self) -> None:
        """Give every host what was folded into it."""
        for paths, host in self.hosts.items():
            if host.taken:
                self.units[paths] = self._joined(host, self.units[paths].why)

    def _joined(self, taker: _Host, why: str) -> Unit:
        host, taken = taker.unit, sorted(taker.taken, key=lambda unit: self.surroundings.finished[unit.path])
        parameters = self._in_order(p for unit in (host, *taken) for p in unit.parameters)
        members = {parameter.path: None for parameter in parameters}
        computes = {p.path: unit.compute_dtype(p) for unit in (host, *taken) for p in unit.parameters}
        own = [p for p in parameters if computes[p.path] != (host.policy.param_dtype or p.dtype)]
        excluded = dict.fromkeys(path for unit in (host, *taken) for path in unit.excluded)
        kind = "conditional, joined" if taker.is_conditional else "folded into"
        islands = [_island(unit, "fold", _why_folded(unit, host, kind)) for unit in taken]
        casts = [*host.casts, *(replace(self._cast_of(unit), is_folded=True) for unit in taken)]
        joins = taker.is_conditional and any(unit.is_trainable for unit in taken)
        return replace(
            host,
            why=why,
            reduces_unused=host.reduces_unused or joins,
            members=tuple(members),
            parameters=parameters,
            param_dtypes=tuple((p.path, computes[p.path]) for p in own),
            excluded=tuple(path for path in excluded if path not in members),
            casts=tuple(sorted(casts, key=lambda cast: self.surroundings.finished[cast.path])),
            islands=(*host.islands, *islands),
        )

    def _cast_of(self, unit: Unit) -> Cast:
        """What is cast at its boundary; one that holds nothing looks at a parameter inside it."""
        if unit.members:
            return _cast(unit)
        inside = (path for path in self.surroundings.registered if path.startswith(f"{unit.path}."))
        return _cast(replace(unit, members=(next(inside),)))

    # -- group -------------------------------------------------------------------------------------

    def group(self) -> None:
        """Group what is left of the small units: those that agree, in forward order, up to a size.

        Units of one group have the same height: the longest chain of units inside them. Then none lies
        inside another, and no two groups need each other in a circle.
        """
        heights = self._heights()
        open_groups: dict[tuple[object, ...], list[Unit]] = {}
        filled: dict[tuple[object, ...], int] = {}
        agree: dict[tuple[object, ...], int] = {}
        groups: list[tuple[tuple[object, ...], list[Unit]]] = []
        for unit in self.plan.units:
            if unit.paths not in self.units:
                continue
            if why := self._why_own(unit):
                if self.surroundings.sites[unit.paths].names_precision:
                    self._keep(unit.paths, why)
                continue
            key = (*_group_key(unit), heights[unit.paths])
            size = unit.whole_bytes()
            if key not in open_groups or filled[key] + size > self.group_bytes:
                open_groups[key] = []
                filled[key] = 0
                groups.append((key, open_groups[key]))
            open_groups[key].append(unit)
            filled[key] += size
            agree[key] = agree.get(key, 0) + 1
        for key, members in groups:
            if len(members) > 1:
                self._merge(members)
            elif self._may_still_be_folded(members[0]):
                self._fold_into(members[0], self.deferred[members[0].paths])
            else:
                self._keep(members[0].paths, self._alone(members[0], agree[key]))

    def _may_still_be_folded(self, unit: Unit) -> bool:
        """Whether the unit around it, which gathers nothing of its own, can hold it beside what it took."""
        host = self.deferred.get(unit.paths)
        return host is not None and not host.why_not(unit, self.can_fold)

    def _alone(self, unit: Unit, agree: int) -> str:
        """Why a small unit has no group, `agree` units having its key."""
        why = "no other small unit agrees with it"
        if agree > 1:
            why = f"no group has room for it (group_bytes: {human_bytes(self.group_bytes)})"
        not_folded = self.why_not_folded.get(unit.paths)
        return why + (f"; not folded: {not_folded}" if not_folded else "")

    def _keep(self, paths: Paths, why: str) -> None:
        unit = self.units[paths]
        self.units[paths] = replace(unit, why=unit.why or f"own unit: {why}")

    def _heights(self) -> dict[Paths, int]:
        heights = dict.fromkeys((unit.paths for unit in self.plan.units), 0)
        for unit in self.plan.units:  # children before parents
            for outer in self.surroundings.sites[unit.paths].around:
                heights[outer] = max(heights[outer], heights[unit.paths] + 1)
        return heights

    def _merge(self, members: list[Unit]) -> None:
        members = sorted(members, key=lambda unit: self.surroundings.finished[unit.path])
        parameters = self._in_order(p for unit in members for p in unit.parameters)
        first = members[0]
        total = human_bytes(sum(unit.gathered_bytes() for unit in members))
        islands = [_island(unit, "group", self._why_grouped(unit)) for unit in members]
        for unit in members:
            del self.units[unit.paths]
        paths = tuple(path for unit in members for path in unit.paths)
        owned = {parameter.path for parameter in parameters}
        excluded = dict.fromkeys(path for unit in members for path in unit.excluded)
        self.units[paths] = Unit(
            paths=paths,
            members=tuple(parameter.path for parameter in parameters),
            policy=replace(first.policy, cast_forward_inputs=False, output_dtype=None),
            reshard_after_forward=False,
            mesh=first.mesh,
            offload_policy=first.offload_policy,
            casts=tuple(_cast(unit) for unit in members),
            class_names=tuple(name for unit in members for name in unit.class_names),
            provenance="; ".join(dict.fromkeys(unit.provenance for unit in members)),
            lowering="group",
            why=f"{len(members)} small units that agree, {total} gathered for the whole step",
            parameters=parameters,
            excluded=tuple(path for path in excluded if path not in owned),
            islands=tuple(islands),
            gathers_again=True,
            is_freed_after_evaluation=True,
        )

    def _why_grouped(self, unit: Unit) -> str:
        not_folded = self.why_not_folded.get(unit.paths)
        size = human_bytes(unit.whole_bytes())
        return f"grouped, not folded: {not_folded}" if not_folded else f"grouped: {size}"

    def _in_order(self, parameters: Iterable[ParamInfo]) -> tuple[ParamInfo, ...]:
        return tuple(sorted(parameters, key=lambda parameter: self.surroundings.registered[parameter.path]))


def _island(unit: Unit, lowering: str, why: str) -> Island:
    return Island(
        path=unit.path,
        class_name=unit.class_names[0],
        provenance=unit.provenance,
        lowering=lowering,
        why=why,
        policy=unit.policy,
        members=unit.members,
        whole_bytes=unit.whole_bytes(),
    )


def _cast(unit: Unit) -> Cast:
    policy = unit.policy
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    return Cast(unit.path, inputs, policy.output_dtype, parameter=unit.members[0])


def _group_key(unit: Unit) -> tuple[object, ...]:
    """What the members of a group have in common."""
    return (
        unit.policy.param_dtype,
        unit.policy.reduce_dtype,
        unit.storage_dtypes,
        frozenset(parameter.trainable for parameter in unit.parameters),
        unit.mesh,
        offload_name(unit.offload_policy),
    )


class _Host:
    """A unit that others may be folded into, and those that are."""

    def __init__(self, unit: Unit, *, is_conditional: bool = False) -> None:
        self.unit = unit
        self.is_conditional = is_conditional  # what it takes is skipped on some ranks
        self.taken: list[Unit] = []
        self.stored = {p.dtype for p in unit.parameters if p.trainable}

    def take(self, unit: Unit) -> None:
        """Fold `unit` into it."""
        self.taken.append(unit)
        self.stored |= {p.dtype for p in unit.parameters if p.trainable}

    def why_not(self, unit: Unit, can_fold: bool) -> str:
        """Why one `fully_shard` call cannot hold both with the same numbers; "" if it can."""
        host = self.unit
        if host.lowering == "kept":
            return f"{host.name} is sharded already"
        if len(host.paths) > 1:
            return f"{host.name} are one unit"
        if getattr(host.policy, "param_dtype_override_fn", None) is not None:
            return f"{host.name} has a param_dtype_override_fn of its own"
        if unit.mesh != host.mesh or unit.offload_policy != host.offload_policy:
            return f"other mesh or offload than {host.name}"
        if unit.is_trainable and self.stored and self.stored != set(unit.storage_dtypes):
            return f"stored in {_and(unit.storage_dtypes)} beside {_and(self.stored)}"
        reduced = {host.policy.reduce_dtype or p.dtype for p in unit.parameters if p.trainable}
        if reduced != set(unit.reduce_dtypes):
            return f"reduced in {_and(unit.reduce_dtypes)} beside {_and(reduced)}"
        computes = {unit.compute_dtype(p) for p in unit.parameters}
        if computes == {host.policy.param_dtype or p.dtype for p in unit.parameters}:
            return ""
        if not can_fold:
            return (
                f"torch {torch.__version__.partition('+')[0]} computes in one dtype a unit, 2.15 in several"
            )
        if computes != set(unit.storage_dtypes):
            return f"stored in {_and(unit.storage_dtypes)}, computed in {_and(computes)}"
        return ""


def _why_folded(unit: Unit, host: Unit, kind: str) -> str:
    if not unit.members:
        return f"{kind} {host.name}: it holds nothing by itself"
    stored = _and(unit.storage_dtypes)
    beside = f"{'an' if stored.startswith('f') else 'a'} {stored} unit"
    return f"{kind} {host.name}: {human_bytes(unit.whole_bytes())}, {stored} stored in {beside}"


def _and(dtypes: Collection[torch.dtype]) -> str:
    return " and ".join(sorted(dtype_name(dtype) for dtype in dtypes))
