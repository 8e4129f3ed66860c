"""Parameters that compute in a dtype of their own: within their unit, or by turning the unit inside out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp.collect import Node, Tree
from annotate_fsdp.errors import Finding
from annotate_fsdp.plan import Cast, ParamInfo, Plan, Unit, dtype_name, order_units
from annotate_fsdp.planner import Site
from annotate_fsdp.policies import with_reduce_dtype

Sites = dict[tuple[str, ...], Site]


class Inverter:
    """Makes each unit with `param_dtypes` one that torch can carry out.

    torch >= 2.15 keeps single parameters of a unit in the dtype they are stored in, which costs nothing.
    Where that cannot be, the unit is turned inside out: its module becomes a unit of the listed parameters in
    their dtype, which casts nothing, and what lies inside it one unit in the unit's own dtype.
    """

    def __init__(self, tree: Tree, sites: Sites, can_override: bool) -> None:
        self.tree = tree
        self.sites = sites
        self.can_override = can_override
        self.findings: list[Finding] = []
        self.nodes = {node.path: node for node in tree.nodes}
        self.owners = {held.path: tree.nodes[held.owners[0]] for held in tree.held}

    def plan(self, plan: Plan) -> Plan:
        """Return the plan with every unit carried out; `sites` and `findings` are completed."""
        if not any(unit.param_dtypes for unit in plan.units):
            return plan
        units = [made for unit in plan.units for made in self._carried_out(unit)]
        finished = {node.path: node.finished for node in self.tree.nodes}
        parents = {node.path: [self.tree.nodes[p].path for p in node.parents] for node in self.tree.nodes}
        sequence = sorted((path for unit in units for path in unit.paths), key=finished.__getitem__)
        return replace(plan, units=order_units(units, finished, parents), sequence=tuple(sequence))

    def _carried_out(self, unit: Unit) -> tuple[Unit, ...]:
        if not unit.param_dtypes or not self._why_not_override(unit):
            return (unit,)
        if wrong := self._why_not_invert(unit):
            self._refuse(unit, wrong)
            return (unit,)
        return self._inverted(unit)

    def _why_not_override(self, unit: Unit) -> str:
        if not self.can_override:
            return f"torch {torch.__version__.partition('+')[0]} computes a unit in one dtype"
        stored = {p.path: p.dtype for p in unit.parameters}
        if any(stored[path] != dtype for path, dtype in unit.param_dtypes):
            return "torch keeps single parameters only in the dtype they are stored in"
        if len({p.dtype for p in unit.parameters if p.trainable}) > 1:
            return "the unit stores trainable parameters of several dtypes"
        return ""

    def _why_not_invert(self, unit: Unit) -> str:
        """Why the unit cannot be turned inside out; "" if it can."""
        listed = dict(unit.param_dtypes)
        if len(unit.paths) > 1:
            return "it is one unit of several modules"
        if len(set(listed.values())) > 1:
            return (
                f"it lists {' and '.join(sorted(map(dtype_name, set(listed.values()))))}, and a unit has one"
            )
        if rest := [p.path for p in unit.parameters if self._is_direct(unit, p) and p.path not in listed]:
            return f"it holds {', '.join(rest)} beside them, which would compute in that dtype too"
        if lost := [p.path for p in self._inside(unit) if self._caller(unit, p) is None]:
            return f"{', '.join(lost)} lie in no module inside it whose forward runs"
        if unit.forward_methods:
            return "it has @fsdp_forward methods"
        return ""

    def _refuse(self, unit: Unit, wrong: str) -> None:
        listed = ", ".join(f"{path.rpartition('.')[2]}: {dtype_name(d)}" for path, d in unit.param_dtypes)
        why = self._why_not_override(unit)
        rest = [
            p.path.rpartition(".")[2]
            for p in unit.parameters
            if self._is_direct(unit, p) and p.path not in dict(unit.param_dtypes)
        ]
        write = (
            f"List {', '.join(rest)} as well" if rest else "Put these parameters into a module of their own"
        )
        self.findings.append(
            Finding(
                "AF213",
                "error",
                unit.path,
                f"param_dtypes={{{listed}}} ({why})",
                wrong,
                f"{write}, or use torch >= 2.15 with all of the unit stored in one dtype",
            )
        )

    def _is_direct(self, unit: Unit, parameter: ParamInfo) -> bool:
        return self.owners[parameter.path] is self.nodes[unit.path]

    def _inside(self, unit: Unit) -> list[ParamInfo]:
        return [p for p in unit.parameters if not self._is_direct(unit, p)]

    def _caller(self, unit: Unit, parameter: ParamInfo) -> Node | None:
        """The outermost module inside the unit's that holds the parameter and whose forward runs."""
        found, node, around = None, self.owners[parameter.path], self.nodes[unit.path]
        while node is not around:
            if node.has_forward:
                found = node
            node = self.tree.nodes[node.parents[0]]
        return found

    def _inverted(self, unit: Unit) -> tuple[Unit, ...]:
        listed = dict(unit.param_dtypes)
        (dtype,) = set(listed.values())
        inside = self._inside(unit)
        policy = replace(unit.policy, cast_forward_inputs=False, output_dtype=None)
        outer = replace(
            unit,
            members=tuple(p.path for p in unit.parameters if p.path in listed),
            parameters=tuple(p for p in unit.parameters if p.path in listed),
            policy=with_reduce_dtype(replace(policy, param_dtype=dtype)),
            param_dtypes=(),
            casts=_casts(unit),
            why=f"turned inside out: {', '.join(listed)} in {dtype_name(dtype)}",
        )
        if not inside:
            return (outer,)
        callers = {node.index: node for p in inside if (node := self._caller(unit, p)) is not None}
        nodes = [callers[index] for index in sorted(callers)]
        inner = _inner(unit, policy, nodes, inside)
        self.sites[inner.paths] = Site(
            (unit.paths,),
            "what lies inside a unit turned inside out",
            False,
            self.sites[unit.paths].is_conditional,
            f"{inner.name} are one unit" if len(nodes) > 1 else "",
        )
        return (inner, outer)


def _inner(unit: Unit, policy: MixedPrecisionPolicy, nodes: list[Node], inside: list[ParamInfo]) -> Unit:
    return Unit(
        paths=tuple(node.path for node in nodes),
        members=tuple(p.path for p in inside),
        policy=policy,
        reshard_after_forward=False if len(nodes) > 1 else unit.reshard_after_forward,
        mesh=unit.mesh,
        offload_policy=unit.offload_policy,
        class_names=tuple(node.class_name for node in nodes),
        provenance=f"{unit.provenance}, param_dtypes",
        lowering="group" if len(nodes) > 1 else "unit",
        why=f"what lies inside {unit.name}, in {_compute(unit, inside)}",
        parameters=tuple(inside),
        excluded=unit.excluded,
        forward_methods=tuple((node.path, name) for node in nodes for name in node.entry_points),
        gathers_again=len(nodes) > 1,
        is_freed_after_evaluation=len(nodes) > 1,
    )


def _compute(unit: Unit, parameters: Iterable[ParamInfo]) -> str:
    return " and ".join(sorted({dtype_name(unit.compute_dtype(p)) for p in parameters}))


def _casts(unit: Unit) -> tuple[Cast, ...]:
    """What FSDP2 would cast at the unit's boundary, for our own hooks."""
    inputs = unit.policy.param_dtype if unit.policy.cast_forward_inputs else None
    if inputs is None and unit.policy.output_dtype is None:
        return ()
    return (Cast(unit.path, inputs, unit.policy.output_dtype, parameter=unit.param_dtypes[0][0]),)
