"""Say in the model's own source how FSDP2 should cut it up and which parts stay in fp32."""

from annotate_fsdp.audit import AuditReport, audit
from annotate_fsdp.collectives import Collective, Collectives, Step
from annotate_fsdp.cost import peak_gathered_bytes, plan_cost, step_time
from annotate_fsdp.errors import AnnotationError, Finding, PlanMismatchError, StepMismatchError
from annotate_fsdp.gathered import gathered
from annotate_fsdp.introspect import plan_of
from annotate_fsdp.links import LINKS, Link, Sample, fit_link
from annotate_fsdp.marks import UnitSpec, fsdp_forward, fsdp_ignore, fsdp_off, fsdp_unit
from annotate_fsdp.materialize import materialize
from annotate_fsdp.observation import Observation
from annotate_fsdp.observe import observe
from annotate_fsdp.plan import MeshSpec, Plan, Unit
from annotate_fsdp.shard import plan_annotated, shard_annotated

__all__ = [
    "LINKS",
    "AnnotationError",
    "AuditReport",
    "Collective",
    "Collectives",
    "Finding",
    "Link",
    "MeshSpec",
    "Observation",
    "Plan",
    "PlanMismatchError",
    "Sample",
    "Step",
    "StepMismatchError",
    "Unit",
    "UnitSpec",
    "audit",
    "fit_link",
    "fsdp_forward",
    "fsdp_ignore",
    "fsdp_off",
    "fsdp_unit",
    "gathered",
    "materialize",
    "observe",
    "peak_gathered_bytes",
    "plan_annotated",
    "plan_cost",
    "plan_of",
    "shard_annotated",
    "step_time",
]
