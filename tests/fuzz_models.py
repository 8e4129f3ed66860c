"""Random marked models as picklable data: trees of parts, edits that are right or wrong, and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from test_lowering_property import BF16, WIDTH, Case, Model, Part, Spec
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, distribute_tensor

from annotate_fsdp import fsdp_forward, fsdp_ignore, fsdp_off, fsdp_unit

FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
LEAF = Spec(mark=0, has_weight=True, is_frozen=False, is_half=False, inside=())


class Edit(NamedTuple):
    """One change of a built model: its kind, the part it is done to, and which variant of it."""

    kind: str
    place: int
    variant: int


class Fuzzed(NamedTuple):
    """One drawn case: a tree, edits in their order, and options by (name, index of the value)."""

    case: Case
    edits: tuple[Edit, ...]
    options: tuple[tuple[str, int], ...]


class EntryPart(Part):
    """A part with a further entry point, which nobody calls."""

    @fsdp_forward
    def enter(self, x: Tensor) -> Tensor:
        return self(x)


class Holder(nn.Module):
    """Holds a weight for the part around it; it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.9, 1.1, WIDTH))


class Holding(Part):
    """A part that reads the weight of its holder."""

    def __init__(self) -> None:
        super().__init__(LEAF)
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.holder.scale.to(x.dtype))


def in_fp32(base: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    return FP32


def in_words(base: MixedPrecisionPolicy) -> str:
    return "fp32"


OPTIONS: dict[str, tuple[Any, ...]] = {
    "mp_policy": (
        BF16,
        FP32,
        None,
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    ),
    "lowering": ("unit", "group", "auto", "fold"),
    "reshard_after_forward": (True, False, "except_last", 1, 2),
    "prefetch": ((0, 0), (1, 1), (2, 3)),
    "merge_below": (0, 40, 1 << 30),
    "group_bytes": (0, 64, 1 << 30),
    "offload_policy": (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)),
    "policies": ({"house": FP32}, {"house": torch.bfloat16}, {"house": in_fp32}),
    "existing": ("error", "keep"),
}
#: Values that mean nothing, each an AF108, AF206 or AF503; `mesh` and `model` are no options but arguments.
WRONG_OPTIONS: dict[str, tuple[Any, ...]] = {
    "mp_policy": (torch.bfloat16, MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)),
    "lowering": ("folded", None),
    "reshard_after_forward": (3, -1, "last", 1.5),
    "prefetch": (1, (1, -1), (1,)),
    "merge_below": (-1, "4 MiB", True),
    "group_bytes": (None, 0.5),
    "offload_policy": ("cpu",),
    "policies": ({"fp32": FP32}, {"house": 32}, [FP32]),
    "existing": ("replace",),
    "check_ranks": (1,),
    "ignored_params": (("weight",), 5),
    "no_such_option": (1,),
}
#: Arguments that only a mesh can be wrong with.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None, DataParallelMeshDims | None]] = {
    "1-D": ((2,), None, None),
    "named": ((2,), ("shard",), None),
    "HSDP": ((2, 1), ("replicate", "shard"), None),
    "by dims": ((2, 1), ("dp", "tp"), DataParallelMeshDims(shard="dp")),
    "3-D": ((1, 2, 1), ("a", "b", "c"), None),
    "unnamed": ((1, 2), None, None),
    "unknown axis": ((2, 1), ("dp", "tp"), DataParallelMeshDims(shard="data")),
    "axis twice": ((2, 1), ("dp", "tp"), DataParallelMeshDims(shard="dp", replicate="dp")),
}
WRONG_MESHES = ("3-D", "unnamed", "unknown axis", "axis twice")


# -- edits that leave a right model right, mostly --------------------------------------------------


def checkpointed(model: Model, part: Part, variant: int) -> None:
    _put_in_place(model, part, checkpoint_wrapper(part, checkpoint_impl=CheckpointImpl.NO_REENTRANT))


def compiled(model: Model, part: Part, variant: int) -> None:
    _put_in_place(model, part, torch.compile(part, backend="eager"))


def buffered(model: Model, part: Part, variant: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.int64)[variant % 3]
    part.register_buffer("seen", torch.ones(3, dtype=dtype), persistent=variant % 2 == 0)


def unmarked(model: Model, part: Part, variant: int) -> None:
    fsdp_off(part)


def marked(model: Model, part: Part, variant: int) -> None:
    policies = ("house", in_fp32, BF16, FP32, torch.float32, "fp16")
    fsdp_unit(part, policy=policies[variant % len(policies)])


def resharded(model: Model, part: Part, variant: int) -> None:
    fsdp_unit(part, reshard_after_forward=(True, False, "except_last", 1, 2)[variant % 5])


def offloaded(model: Model, part: Part, variant: int) -> None:
    fsdp_unit(part, offload_policy=CPUOffloadPolicy(pin_memory=False))


def grouped(model: Model, part: Part, variant: int) -> None:
    for each in (part, _fresh(model), _fresh(model)):
        fsdp_unit(each, policy="fp32", group="ab"[variant % 2])


def frozen(model: Model, part: Part, variant: int) -> None:
    part.requires_grad_(False)
    if variant % 2:
        fsdp_ignore(part)


def synced(model: Model, part: Part, variant: int) -> None:
    fsdp_ignore(part, synced=True)


def dtyped(model: Model, part: Part, variant: int) -> None:
    vars(part).pop("__fsdp_unit__", None)
    part.__fsdp_dtype__ = (torch.float32, torch.bfloat16)[variant % 2]


def own_dtypes(model: Model, part: Part, variant: int) -> None:
    fsdp_unit(part, param_dtypes={"weight": (torch.float32, torch.bfloat16)[variant % 2]})


def emptied(model: Model, part: Part, variant: int) -> None:
    if len(part.inside):
        part._parameters.pop("weight", None)
    fsdp_unit(part)


def entered(model: Model, part: Part, variant: int) -> None:
    if type(part) is Part:
        part.__class__ = EntryPart
    fsdp_unit(part)


def held(model: Model, part: Part, variant: int) -> None:
    part.inside.append(fsdp_unit(Holding()))


# -- edits that are wrong, mostly ------------------------------------------------------------------


def unknown_attribute(model: Model, part: Part, variant: int) -> None:
    setattr(part, ("__fsdp_unti__", "__fsdp_policy__")[variant % 2], True)


def marked_parameter(model: Model, part: Part, variant: int) -> None:
    next(model.body.parameters(), model.entry.weight).__fsdp_dtype__ = torch.float32


def no_dtype(model: Model, part: Part, variant: int) -> None:
    part.__fsdp_dtype__ = ("fp32", torch.int32, None)[variant % 3]


def no_spec(model: Model, part: Part, variant: int) -> None:
    part.__fsdp_unit__ = ({"policy": "fp32"}, True, None)[variant % 3]


def disagreeing(model: Model, part: Part, variant: int) -> None:
    fsdp_unit(part, policy="bf16")
    part.__fsdp_dtype__ = torch.float32


def impossible(model: Model, part: Part, variant: int) -> None:
    options: list[dict[str, Any]] = [
        {"policy": torch.int64},
        {"policy": 3},
        {"reduce_dtype": "fp32"},
        {"output_dtype": torch.int8},
        {"casts_itself": 1},
        {"reshard_after_forward": 0},
        {"group": ""},
        {"offload_policy": True},
        {"param_dtypes": ["weight"]},
        {"policy": BF16, "casts_itself": True},
        {"no_such": 1},
    ]
    fsdp_unit(part, **options[variant % len(options)])


def no_target(model: Model, part: Part, variant: int) -> None:
    (fsdp_forward, fsdp_off, fsdp_unit)[variant % 3]((part, 5, "part")[variant % 3])


def unknown_policy(model: Model, part: Part, variant: int) -> None:
    fsdp_unit(part, policy=("fp23", "home", in_words)[variant % 3])


def container(model: Model, part: Part, variant: int) -> None:
    fsdp_unit(part.inside, **({}, {"policy": "fp32"})[variant % 2])


def holder(model: Model, part: Part, variant: int) -> None:
    part.inside.append(Holding())
    fsdp_unit(part.inside[-1].holder)


def scalar(model: Model, part: Part, variant: int) -> None:
    part.weight = nn.Parameter(torch.tensor(1.5), requires_grad=variant % 3 > 0)


def not_contiguous(model: Model, part: Part, variant: int) -> None:
    part.weight = nn.Parameter(torch.linspace(0.5, 1.5, 2 * WIDTH)[::2], requires_grad=variant % 3 > 0)


def ignored_trainable(model: Model, part: Part, variant: int) -> None:
    fsdp_ignore(part)


def entered_outside(model: Model, part: Part, variant: int) -> None:
    part.__class__ = EntryPart
    fsdp_off(part)


def no_such_parameter(model: Model, part: Part, variant: int) -> None:
    fsdp_unit(part, param_dtypes={("wieght", "bias")[variant % 2]: torch.float32})


def some_own_dtypes(model: Model, part: Part, variant: int) -> None:
    part.bias = nn.Parameter(torch.zeros(WIDTH))
    fsdp_unit(part, param_dtypes={"bias": torch.bfloat16})


def no_compute_dtype(model: Model, part: Part, variant: int) -> None:
    fsdp_unit(part, policy=(torch.float8_e4m3fn, torch.float8_e5m2)[variant % 2])


def no_divisor(model: Model, part: Part, variant: int) -> None:
    fsdp_unit(part, reshard_after_forward=3 + variant)


def tied_apart(model: Model, part: Part, variant: int) -> None:
    first, second = _fresh(model), _fresh(model)
    second.weight = first.weight
    fsdp_unit(first, policy="fp32")
    fsdp_unit(second, policy=("bf16", "fp32", "inherit")[variant % 3])


def shared_apart(model: Model, part: Part, variant: int) -> None:
    first, second = fsdp_unit(_fresh(model), policy="fp32"), fsdp_unit(_fresh(model), policy="bf16")
    shared = fsdp_unit(Part(LEAF), policy=("fp32", "bf16")[variant % 2])
    first.inside.append(shared)
    second.inside.append(shared)


def circle(model: Model, part: Part, variant: int) -> None:
    first, second = fsdp_unit(_fresh(model)), fsdp_unit(_fresh(model))
    for outer, other in ((first, second), (second, first)):
        outer.inside.append(fsdp_unit(Part(LEAF)))
        outer.inside[0].weight = other.weight


def half(model: Model, part: Part, variant: int) -> None:
    part.to(torch.bfloat16)


def without_marks(model: Model, part: Part, variant: int) -> None:
    for module in model.modules():
        vars(module).pop("__fsdp_unit__", None)
        vars(module).pop("__fsdp_dtype__", None)


def sharded(model: Model, part: Part, variant: int) -> None:
    """Sharded by hand before the call, some with a mark inside; `build` does it, for it needs a mesh."""
    early = _fresh(model)
    early.is_early = True
    if variant % 2:
        early.inside.append(fsdp_unit(Part(LEAF)))


def distributed(model: Model, part: Part, variant: int) -> None:
    """A DTensor on the very mesh; `build` does it."""
    _fresh(model).is_distributed = True


WRAPPING: dict[str, Callable[[Model, Part, int], None]] = {
    each.__name__: each for each in (checkpointed, compiled)
}
RIGHT: dict[str, Callable[[Model, Part, int], None]] = {
    each.__name__: each
    for each in (
        *WRAPPING.values(), buffered, unmarked, marked, resharded, offloaded, grouped, frozen, synced, dtyped,
        own_dtypes, emptied, entered, held,
    )
}  # fmt: skip
WRONG: dict[str, Callable[[Model, Part, int], None]] = {
    each.__name__: each
    for each in (
        unknown_attribute, marked_parameter, no_dtype, no_spec, disagreeing, impossible, no_target,
        unknown_policy, container, holder, scalar, not_contiguous, ignored_trainable, entered_outside,
        no_such_parameter, some_own_dtypes, no_compute_dtype, no_divisor, tied_apart, shared_apart, circle,
        half, without_marks, sharded, distributed,
    )
}  # fmt: skip


def build(fuzzed: Fuzzed, mesh: DeviceMesh, *, is_plain: bool = False) -> Model:
    """The model of a case, its weights drawn anew from the same seed.

    Args:
        mesh: for what is sharded or distributed before the call.
        is_plain: no wrappers and nothing on a mesh: what the numbers are held against.

    Raises:
        AnnotationError: a mark is impossible by itself.
    """
    torch.manual_seed(0)
    model = Model(*fuzzed.case)
    for kind, place, variant in fuzzed.edits:
        if is_plain and kind in WRAPPING:
            continue
        parts = [module for module in model.modules() if isinstance(module, Part)]
        {**RIGHT, **WRONG}[kind](model, parts[place % len(parts)], variant)
    is_synced = any(edit.kind == "synced" for edit in fuzzed.edits)  # a DTensor beside plain tensors runs not
    for module in list(model.modules()):
        if is_plain and hasattr(module, "is_early"):
            fsdp_unit(module, policy=BF16)
        elif hasattr(module, "is_early"):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=BF16)
        elif hasattr(module, "is_distributed") and not is_plain and not is_synced:
            data = distribute_tensor(module.weight.detach(), mesh, [Replicate()] * mesh.ndim)
            module.weight = nn.Parameter(data)
    return model


def call_of(fuzzed: Fuzzed) -> tuple[DeviceMesh, dict[str, Any]]:
    """The mesh and the options of a case; a negative index names a wrong value, `mesh` a key of `MESHES`."""
    options: dict[str, Any] = {}
    shape, names, dims = MESHES["1-D"]
    for name, index in fuzzed.options:
        if name == "mesh":
            shape, names, dims = MESHES[list(MESHES)[index]]
        elif index < 0:
            values = WRONG_OPTIONS[name]
            options[name] = values[-index % len(values)]
        else:
            options[name] = OPTIONS[name][index % len(OPTIONS[name])]
    if dims is not None:
        options["dp_mesh_dims"] = dims
    assert dist.get_world_size() == 2
    return init_device_mesh("cpu", shape, mesh_dim_names=names), options


def _fresh(model: Model) -> Part:
    """A new part at the end of the body."""
    body = next(module for module in model.modules() if isinstance(module, Part))
    body.inside.append(Part(LEAF))
    return body.inside[-1]  # type: ignore[return-value]  # a list of parts


def _put_in_place(model: Model, part: Part, wrapper: nn.Module) -> None:
    for module in list(model.modules()):
        if module is wrapper or getattr(module, "_orig_mod", None) is part:
            continue
        for name, child in module._modules.items():
            if child is part and name != "_checkpoint_wrapped_module":
                module._modules[name] = wrapper
