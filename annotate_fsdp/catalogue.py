"""The catalogue of findings: every code, how severe it is and what it finds."""

from __future__ import annotations

from typing import NamedTuple

from annotate_fsdp.errors import Severity


class Rule(NamedTuple):
    """One kind of finding. `code` and `severity` never change; `finds` is one line for people."""

    code: str
    severity: Severity
    finds: str


CATALOGUE: tuple[Rule, ...] = (
    Rule("AF101", "error", "an option of `fsdp_unit` that does not exist, or that is impossible"),
    Rule("AF102", "error", "a decorator on what is no module, class or method"),
    Rule("AF103", "error", "`__fsdp_dtype__` that is not a floating-point `torch.dtype`"),
    Rule("AF104", "error", "`__fsdp_unit__` that was not made by `fsdp_unit`"),
    Rule("AF105", "error", "two marks on one module that disagree"),
    Rule("AF106", "error", "an attribute `__fsdp_...__` that has no meaning (misspelt)"),
    Rule("AF107", "error", "a mark on a Parameter, which would be lost"),
    Rule("AF108", "error", "an argument of a call that is wrong, or a policy that cannot be resolved"),
    Rule("AF109", "error", "a model without a single mark, which would be one unit"),
    Rule("AF110", "info", "one unit of several that holds most of the model (such as the root's leftovers)"),
    Rule("AF201", "error", "a unit on a container or holder that has no forward"),
    Rule("AF202", "error", "a scalar parameter, which cannot be sharded"),
    Rule("AF203", "error", "trainable parameters of two storage dtypes in one unit"),
    Rule("AF204", "error", "marks that contradict each other on tied weights or in one group"),
    Rule("AF205", "error", "a shared module whose output goes to two compute dtypes"),
    Rule("AF206", "error", "`reshard_after_forward` that does not fit the mesh"),
    Rule("AF207", "info", "a unit without parameters of its own"),
    Rule("AF208", "error", "an ignored parameter that is trainable and that nobody reduces"),
    Rule("AF209", "error", "an entry point of a module that is no unit"),
    Rule("AF210", "error", "units that share weights and lie inside each other in a circle"),
    Rule("AF211", "error", "a parameter that is not contiguous"),
    Rule("AF212", "error", "a name in `param_dtypes` that matches nothing, or that cannot be set apart"),
    Rule("AF213", "error", "`param_dtypes` that this torch version cannot carry out"),
    Rule("AF214", "error", "a conditional unit that can join no unit around it"),
    Rule("AF301", "error", "a module that is sharded already"),
    Rule("AF302", "error", "a mark inside of what is sharded already"),
    Rule("AF303", "error", "`plan_of` a model that is not sharded"),
    Rule("AF304", "error", "a folded module called outside of its unit's forward"),
    Rule("AF305", "error", "a path for `gathered` that the model does not have"),
    Rule("AF306", "error", "a path for `gathered` with no parameters inside"),
    Rule("AF401", "error", "a mesh of more than two axes without `dp_mesh_dims`"),
    Rule("AF402", "error", "a 2-D mesh without names"),
    Rule("AF403", "error", "`dp_mesh_dims` that do not fit the mesh"),
    Rule("AF404", "error", "a rank that is not of the mesh"),
    Rule("AF405", "error", "a DTensor parameter on an axis or a mesh that FSDP cannot join"),
    Rule("AF406", "error", "what is sharded already on another mesh of the same ranks"),
    Rule("AF501", "warning", "trainable weights stored below their compute dtype, which lose small updates"),
    Rule("AF502", "error", "an optimizer that does not hold the model's parameters"),
    Rule("AF503", "error", "a dtype that torch does not compute in"),
    Rule("AF504", "warning", "float8 weights that the policy casts"),
    Rule("AF505", "warning", "an output dtype that the unit around rounds again"),
    Rule("AF506", "warning", "buffers that do not have the dtype their module computes in"),
    Rule("AF507", "info", "trainable beside frozen parameters in one unit"),
    Rule("AF601", "info", "a non-persistent buffer on meta that nothing computes again"),
    Rule("AF602", "error", "a parameter or persistent buffer on meta that was given no values"),
    Rule("AF603", "error", "a non-persistent buffer on meta that was given no values"),
    Rule("AF604", "error", "a tensor that the state dict lacks"),
    Rule("AF605", "error", "a key of the state dict that the model lacks"),
    Rule("AF606", "error", "a shape in the state dict that is not the model's"),
    Rule("AF607", "error", "a value in the state dict that is on meta or of another kind of number"),
    Rule("AF608", "error", "tied tensors with different values in the state dict"),
    Rule("AF609", "error", "a model on meta that has run already"),
    Rule("AF610", "error", "a device that is impossible or not the mesh's"),
    Rule("AF611", "error", "a tensor on meta that is neither parameter nor buffer"),
    Rule("AF612", "error", "a rank that failed while the model was made real"),
    Rule("AF701", "error", "ranks that hold different plans"),
    Rule("AF702", "error", "a rank whose planning failed"),
    Rule("AF703", "error", "ranks that run different steps (`observe(model, cross_rank=True)`)"),
    Rule("AF704", "error", "a rank that is not heard from (`observe(model, cross_rank=True)`)"),
    Rule("AF801", "error", "`fully_shard` failed although every check had passed"),
    Rule("AF901", "error", "a sharded model that is not as planned"),
    Rule("AF902", "warning", "parameters whose storage dtype changed after sharding"),
)


def catalogue_table() -> str:
    """Return the catalogue as a Markdown table, as the README has it."""
    rows = [f"| {rule.code} | {rule.severity} | {rule.finds} |" for rule in CATALOGUE]
    return "\n".join(["| code | severity | finds |", "|---|---|---|", *rows])
