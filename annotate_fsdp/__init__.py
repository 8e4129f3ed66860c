"""Say in the model's own source how FSDP2 should cut it up and which parts stay in fp32."""

from annotate_fsdp.errors import AnnotationError, Finding, PlanMismatchError
from annotate_fsdp.marks import UnitSpec, fsdp_forward, fsdp_ignore, fsdp_off, fsdp_unit

__all__ = [
    "AnnotationError",
    "Finding",
    "PlanMismatchError",
    "UnitSpec",
    "fsdp_forward",
    "fsdp_ignore",
    "fsdp_off",
    "fsdp_unit",
]
