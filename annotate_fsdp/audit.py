"""Say what sharding will do and what is wrong; afterwards, whether it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from annotate_fsdp.collect import Tree, collect_tree
from annotate_fsdp.errors import Finding
from annotate_fsdp.introspect import applied_plan, plan_of
from annotate_fsdp.plan import Plan, dtype_name
from annotate_fsdp.render import printable, render_findings, render_lowering, render_totals, render_units
from annotate_fsdp.shard import Prepared, ShardOptions, WorldSize, check_call, prepare

SCHEMA = "annotate_fsdp.audit/1"


@dataclass(frozen=True)
class AuditReport:
    """What `audit` found: data first, text second.

    - model: class name of the model.
    - plan: what was planned, by `shard_annotated` if it has run, else by the marks.
    - actual: what FSDP2's own state says, None before sharding.
    - findings: worst first.
    """

    model: str
    plan: Plan
    actual: Plan | None
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that stop sharding, or say that it went otherwise than planned."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are probably not meant."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data, enough to gate a job.

        - schema: name of this form; it changes when a key changes its meaning or goes.
        - torch: version; model: class of the root; state: `"predicted"` or `"sharded"`.
        - plan: what is meant to be (`Plan.to_dict`), bytes in `*_bytes`, dtypes such as `"bf16"`.
        - actual: what FSDP2 holds, in the same form; null before sharding.
        - findings: code, severity, path, declared, wrong, write (`Finding`), errors first.
        """
        return {
            "schema": SCHEMA,
            "torch": torch.__version__,
            "model": self.model,
            "state": "predicted" if self.actual is None else "sharded",
            "plan": self.plan.to_dict(),
            "actual": self.actual.to_dict() if self.actual is not None else None,
            "findings": [vars(finding) for finding in self.findings],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        if self.actual is None:
            state = "predicted"
        elif any(finding.code == "AF901" for finding in self.findings):
            state = "sharded, otherwise than planned"
        else:
            state = "sharded as planned"
        world = f" on {self.plan.mesh}" if self.plan.mesh else ""
        parts = [
            printable(f"FSDP audit of {self.model}{world}: {state}"),
            render_totals(self.plan),
            "",
            render_units(self.plan),
            "",
            *([lowering, ""] if (lowering := render_lowering(self.plan)) else []),
            render_findings(self.findings),
        ]
        return "\n".join(parts)


def audit(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    world_size: WorldSize | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Unpack[ShardOptions],
) -> AuditReport:
    """Report what `shard_annotated` will do to `model`, or did; change nothing.

    Before sharding the report is a prediction and needs neither process group nor data: `meta` will do.
    After sharding it reads FSDP2's own state and holds it against the plan that was applied, or, for a
    model that was sharded by hand, against the plan of its marks with these options, each mark a unit of
    its own unless `lowering` says otherwise.

    Args:
        model: carries marks; on a device or on `meta`, sharded or not.
        mesh, world_size: as for `plan_annotated`.
        optimizer: is checked for holding the model's present parameters.
        **options: see `ShardOptions`.

    Raises:
        AnnotationError: an option has no meaning; everything else is a finding in the report.
    """
    check_call(model, mesh)
    tree = collect_tree(model)
    is_sharded = tree.root.is_sharded or (options.get("existing", "error") != "keep" and tree.has_sharded)
    actual = plan_of(model) if is_sharded else None
    applied = applied_plan(model) if is_sharded else None
    if is_sharded and applied is None:
        options.setdefault("lowering", "unit")
    prepared = prepare(model, mesh, world_size, options, read_only=is_sharded, with_hazards=True)
    plan = applied or prepared.plan
    findings = list(_still_true(prepared, applied))
    if actual is not None:
        findings += check_as_planned(plan, actual)
    if optimizer is not None:
        findings += check_optimizer(tree, optimizer)
    order = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda finding: order[finding.severity])
    return AuditReport(tree.root.class_name, plan, actual, tuple(findings))


def _still_true(prepared: Prepared, applied: Plan | None) -> Iterator[Finding]:
    """The findings of the marks; once a plan was applied, errors of today's options are beside the point."""
    for finding in prepared.findings:
        if applied is None or finding.severity != "error":
            yield finding


def check_as_planned(plan: Plan, actual: Plan) -> Iterator[Finding]:
    """AF901, AF902: FSDP2's state must be the plan's, and parameters keep their storage dtype."""
    for difference in plan.differences(actual):
        path, _, what = difference.partition(": ")
        yield Finding(
            "AF901",
            "error",
            "" if path == "(root)" else path,
            "the plan (here) against FSDP2's state (there)",
            what or path,
            "Shard with shard_annotated only, after every change to the model",
        )
    planned = {parameter.path: parameter for unit in plan.units for parameter in unit.parameters}
    for unit in actual.units:
        for parameter in unit.parameters:
            before = planned.get(parameter.path)
            if before is not None and before.dtype != parameter.dtype:
                yield Finding(
                    "AF902",
                    "warning",
                    parameter.path,
                    f"stored in {dtype_name(before.dtype)} when it was sharded",
                    f"it is stored in {dtype_name(parameter.dtype)} now",
                    "Convert the model before sharding it",
                )


def check_optimizer(tree: Tree, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    """AF502: sharding replaces parameters, so an optimizer built before trains tensors nobody uses."""
    mine = {id(held.parameter) for held in tree.held}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stale = [parameter for parameter in held if id(parameter) not in mine]
    if stale:
        yield Finding(
            "AF502",
            "error",
            "",
            f"{type(optimizer).__name__} with {len(held)} parameters",
            f"{len(stale)} of them are not the model's, so its weights would never change",
            "Build the optimizer after shard_annotated",
        )
