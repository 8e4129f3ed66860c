"""NeMo AutoModel's interface, whole models and module by module, against the calls written by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool
from test_apply import is_untouched, mesh_1d, mesh_2d
from test_plan import Block, Holder, linear, tied
from test_step5_sharded import same_bits
from torch import bfloat16, float32, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from annotate_fsdp import (
    AnnotationError,
    MeshSpec,
    fsdp_forward,
    fsdp_ignore,
    fsdp_unit,
    plan_annotated,
    plan_of,
)
from annotate_fsdp.interop.nemo import AnnotatedModelParallelizer, data_parallel_mesh
from annotate_fsdp.introspect import applied_plan, fsdp_state
from annotate_fsdp.models.step5 import (
    FP32_MODULES,
    PARALLELIZER,
    Step5Config,
    Step5ForCausalLM,
    Step5ModelParallelizer,
)
from annotate_fsdp.models.step5.parallelization import _FP32_NORM_POLICY
from annotate_fsdp.shard import shard_part

#: What the framework passes where nothing else is configured.
BF16 = MixedPrecisionPolicy(bfloat16, float32, output_dtype=None, cast_forward_inputs=False)


def step5(storage: torch.dtype = float32) -> Step5ForCausalLM:
    with torch.device("meta"):
        return Step5ForCausalLM(Step5Config.tiny()).to_storage(storage)


def context(mesh: DeviceMesh | None, **attributes: Any) -> SimpleNamespace:
    """What the framework hands to `parallelize`; the strategy's attributes are those of its config."""
    strategy = attributes.pop("strategy", {"mp_policy": BF16, "offload_policy": None, "tp_plan": None})
    return SimpleNamespace(device_mesh=mesh, strategy_config=SimpleNamespace(**strategy), **attributes)


def dispatch(model: Any, mesh_context: object) -> Any:
    """What the framework does with a model."""
    return type(model).parallelizer.parallelize(model, mesh_context)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The calls of `fully_shard` that the library makes: module and keywords."""
    from annotate_fsdp import apply

    made: list[tuple[nn.Module, dict[str, Any]]] = []

    def record(module: nn.Module, **kwargs: Any) -> object:
        made.append((module, kwargs))
        return fully_shard(module, **kwargs)

    monkeypatch.setattr(apply, "fully_shard", record)
    return made


# -- a whole model ---------------------------------------------------------------------------------


class Toy(nn.Module):
    """Two marked blocks with an fp32 norm each, and a marked head."""

    parallelizer = AnnotatedModelParallelizer()

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block(norm=fsdp_unit(linear(), policy="fp32"), mlp=linear()) for _ in range(2)]
        self.layers = nn.ModuleList(blocks)
        self.head = fsdp_unit(linear())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


def mesh_nd() -> DeviceMesh:
    """What the framework builds: data-parallel and other axes, dp_shard and cp flattened into one."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 2, 2, 1), mesh_dim_names=names)
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    return mesh


def named(*axes: str) -> Callable[[], DeviceMesh]:
    return lambda: init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)


@pytest.mark.parametrize(
    ("make_mesh", "world", "expected"),
    [
        (mesh_1d, 4, MeshSpec(1, 4)),
        (mesh_2d, 4, MeshSpec(2, 2)),
        (named("dp_replicate", "dp_shard"), 4, MeshSpec(2, 2)),
        (mesh_nd, 8, MeshSpec(2, 4)),
    ],
)
@pytest.mark.parametrize("make", [Toy, step5])
def test_a_model_is_sharded_by_its_marks_over_the_data_parallel_axes(
    fake_world: Callable[..., None],
    make: Callable[[], nn.Module],
    make_mesh: Callable[[], DeviceMesh],
    world: int,
    expected: MeshSpec,
) -> None:
    fake_world(world)
    model = make()
    assert dispatch(model, context(make_mesh())) is model
    planned = plan_annotated(make(), world_size=(expected.replicate, expected.shard), mp_policy=BF16)
    assert list(plan_of(model).differences(planned)) == []
    assert applied_plan(model) == planned
    assert plan_of(model).mesh == expected


@pytest.mark.parametrize(
    ("make_mesh", "world", "axes", "size"),
    [
        (named("tp"), 2, ("tp",), 2),
        (named("dp", "tp"), 4, ("dp",), 2),
        (named("dp_shard", "tp"), 4, ("dp_shard",), 2),
        (named("dp_replicate", "dp", "tp"), 8, ("dp_replicate", "dp"), 4),
        (named("replicate", "shard", "tp"), 8, ("replicate", "shard"), 4),
        (mesh_nd, 8, ("dp_replicate", "dp_shard_cp"), 8),
    ],
)
def test_the_data_parallel_axes_of_a_mesh(
    fake_world: Callable[..., None],
    make_mesh: Callable[[], DeviceMesh],
    world: int,
    axes: tuple[str, ...],
    size: int,
) -> None:
    fake_world(world)
    found = data_parallel_mesh(make_mesh())
    assert (found.mesh_dim_names, found.size()) == (axes, size)


def test_a_mesh_that_is_data_parallel_as_a_whole_is_taken_as_it_is(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    unnamed = init_device_mesh("cpu", (2, 2))
    for mesh in (mesh_1d(), mesh_2d(), named("dp_replicate", "dp_shard")(), unnamed):
        assert data_parallel_mesh(mesh) is mesh


def test_what_the_strategy_does_not_say_the_context_does(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    offload = CPUOffloadPolicy(pin_memory=False)
    said = {"mp_policy": BF16, "offload_policy": offload, "reshard_after_forward": False}
    planned = plan_annotated(Toy(), world_size=4, mp_policy=BF16, **{k: said[k] for k in list(said)[1:]})
    for strategy, rest in (
        ({}, said),
        (said, {"mp_policy": MixedPrecisionPolicy(), "reshard_after_forward": True}),
    ):
        model = dispatch(Toy(), context(mesh_1d(), strategy=strategy, **rest))
        assert list(plan_of(model).differences(planned)) == []
    bare = SimpleNamespace(device_mesh=mesh_1d())
    assert plan_of(dispatch(Toy(), bare)) == plan_annotated(Toy(), world_size=4)


def refused(model: nn.Module, mesh_context: object) -> str:
    """The first finding of a call that must fail and leave the model as it was."""
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(AnnotationError) as error:
        dispatch(model, mesh_context)
    assert is_untouched(model)
    assert not any(isinstance(module, CheckpointWrapper) for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    return str(error.value.findings[0])


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        (
            {"ep_size": 2},
            "AF108 error at the root module: ep_size=2, but experts on a mesh of their own are not sharded "
            "here. Leave such a model to a path that calls _fully_shard_module.",
        ),
        (
            {"tp_size": 2, "strategy": {"tp_plan": {"layers": "colwise"}}},
            "AF108 error at the root module: a tp_plan with tp_size=2, but tensor parallelism is not applied "
            "here. Apply it before, and pass tp_plan=None.",
        ),
        (
            {"activation_checkpointing": "selective"},
            "AF108 error at the root module: activation_checkpointing='selective', but it is not a bool. "
            "Write True or False, or wrap the modules before.",
        ),
        (
            {"reapply_trainability": 3},
            "AF108 error at the root module: reapply_trainability=3, but it cannot be called. Pass a "
            "function of the model.",
        ),
        (
            {"activation_checkpointing": True, "strategy": {"reshard_after_forward": 3}},
            "AF206 error at layers.0: reshard_after_forward=3, but it does not divide the 4 ranks that "
            "shard. Write True, False or a divisor between (here: 2).",
        ),
    ],
)
def test_what_is_not_done_is_refused_before_anything_is_touched(
    fake_world: Callable[..., None], attributes: dict[str, Any], sentence: str
) -> None:
    fake_world(4)
    model = Toy()
    assert refused(model, context(mesh_1d(), **attributes)) == sentence
    assert dispatch(model, context(mesh_1d())) is model
    assert plan_of(model) == plan_annotated(Toy(), world_size=4, mp_policy=BF16)


def test_sizes_that_are_not_said_are_those_of_the_meshes(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
    assert "ep_size=2," in refused(Toy(), context(mesh_1d(), moe_mesh=experts))
    tensor, plan = named("dp", "tp")(), {"tp_plan": {}}
    assert "tp_size=2," in refused(Toy(), context(tensor, strategy=plan))
    assert isinstance(dispatch(Toy(), context(tensor)), FSDPModule)  # no plan: it was applied before
    no_experts = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ep_shard", "ep"))
    assert isinstance(dispatch(Toy(), context(mesh_1d(), moe_mesh=no_experts, ep_size=1)), FSDPModule)


def test_a_mesh_without_data_parallel_axes_is_refused(fake_world: Callable[..., None]) -> None:
    fake_world(8)
    start = "AF403 error at the root module: a mesh of "
    end = "none of them is one to shard over. Name one of them dp_shard_cp, dp_shard, dp, shard."
    unnamed = init_device_mesh("cpu", (2, 2, 2))
    for mesh, axes in ((named("a", "b", "c")(), "('a', 'b', 'c')"), (unnamed, "(unnamed)")):
        assert refused(Toy(), context(mesh)) == f"{start}3 axes {axes}, but {end}"
    assert refused(Toy(), context(named("dp_shard", "dp_replicate", "tp")())) == (
        f"{start}3 axes ('dp_shard', 'dp_replicate', 'tp'), but ('dp_replicate', 'dp_shard') is not in the "
        "order of its axes. Name the axis that replicates first."
    )
    assert refused(Toy(), context(named("dp_shard", "cp", "tp")())) == (
        f"{start}3 axes ('dp_shard', 'cp', 'tp'), but the ranks of 'cp' would not reduce their gradients "
        'with those of \'dp_shard\'. Flatten the two: mesh["dp_shard", "cp"]._flatten("dp_shard_cp").'
    )


def test_no_mesh_and_a_mesh_of_other_ranks_are_refused(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    nothing = "AF108 error at the root module: a NoneType as mesh, but it is no DeviceMesh."
    assert refused(Toy(), context(None)).startswith(nothing)
    assert refused(Toy(), object()).startswith(nothing)
    others = DeviceMesh("cpu", [[1, 2]], mesh_dim_names=("dp", "tp"))
    assert refused(Toy(), context(others)).startswith(
        "AF404 error at the root module: a mesh of ranks [1, 2], but this rank is not one of them."
    )


def test_the_lowering_is_chosen_when_the_parallelizer_is_made() -> None:
    assert AnnotatedModelParallelizer(lowering="unit").lowering == "unit"
    with pytest.raises(AnnotationError) as error:
        AnnotatedModelParallelizer(lowering="units")
    assert str(error.value) == (
        "1 finding; nothing was sharded\n"
        "  AF108 error at the root module: lowering='units', but there is no such lowering. Write 'unit'."
    )


def test_activation_checkpointing_wraps_the_layers_and_shards_the_wrappers(
    fake_world: Callable[..., None],
) -> None:
    fake_world(4)
    model = Toy()
    model.layers[1] = wrapped = checkpoint_wrapper(model.layers[1])
    dispatch(model, context(mesh_1d(), activation_checkpointing=True))
    first, second = model.layers
    assert isinstance(first, CheckpointWrapper)
    assert isinstance(first, FSDPModule)
    assert second is wrapped
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    assert wrappers == [first, second]  # nor the islands, nor the head, which stands in no container
    assert plan_of(model) == plan_annotated(Toy(), world_size=4, mp_policy=BF16)


def test_activation_checkpointing_wraps_a_shared_layer_once_and_no_island(
    fake_world: Callable[..., None],
) -> None:
    fake_world(4)

    class Shared(Holder):
        parallelizer = AnnotatedModelParallelizer()

    layer = Block(x=linear())
    island = fsdp_unit(linear(), policy="fp32")
    model: Any = Shared(a=nn.ModuleDict({"x": layer, "y": island}), b=nn.ModuleList([layer, linear()]))
    dispatch(model, context(mesh_1d(), activation_checkpointing=True))
    assert isinstance(model.a["x"], CheckpointWrapper)
    assert model.b[0] is model.a["x"]
    assert model.a["y"] is island
    assert [unit.path for unit in plan_of(model)] == ["a.x", "a.y", ""]


def test_trainability_is_applied_before_planning_and_taken_back_after_a_failure(
    fake_world: Callable[..., None],
) -> None:
    fake_world(4)

    def freeze_head(model: nn.Module) -> None:
        model.get_submodule("head").requires_grad_(False)

    model = Toy()
    bad = {"reshard_after_forward": 3}
    assert "reshard_after_forward=3" in refused(
        model, context(mesh_1d(), reapply_trainability=freeze_head, strategy=bad)
    )
    dispatch(model, context(mesh_1d(), reapply_trainability=freeze_head))
    assert [unit.path for unit in plan_of(model) if not unit.is_trainable] == ["head", ""]
    planned = applied_plan(model)
    assert planned is not None
    assert not planned.unit("head").is_trainable


# -- one piece, by any marks -----------------------------------------------------------------------


def test_only_marks_with_a_policy_of_their_own_count_below_the_piece(
    fake_world: Callable[..., None], calls: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    fake_world(4)
    mesh, parallelizer = mesh_1d(), AnnotatedModelParallelizer()
    piece: Any = Holder(
        norm=fsdp_unit(linear(), policy="fp32"),
        block=Block(inner=fsdp_unit(linear(), policy=bfloat16, casts_itself=True)),
        left=fsdp_ignore(linear()),
    )
    fsdp_unit(piece, policy="fp32", reshard_after_forward=False)
    assert list(parallelizer.islands(piece)) == [piece, piece.norm, piece.block.inner]
    policy = MixedPrecisionPolicy(bfloat16, None, float32, cast_forward_inputs=False)
    assert parallelizer._fully_shard_module(piece, mesh=mesh, mp_policy=policy) is piece
    assert [module for module, _ in calls] == [piece.norm, piece.block.inner, piece]
    # an unset reduce dtype is written out; only the piece has the caller's output dtype
    assert [kwargs["mp_policy"] for _, kwargs in calls] == [
        MixedPrecisionPolicy(float32, float32, bfloat16),
        MixedPrecisionPolicy(bfloat16, bfloat16, None, cast_forward_inputs=False),
        MixedPrecisionPolicy(bfloat16, bfloat16, float32, cast_forward_inputs=False),
    ]
    assert {kwargs["reshard_after_forward"] for _, kwargs in calls} == {None}
    assert all(isinstance(parameter, DTensor) for parameter in piece.parameters())
    assert applied_plan(piece) is None


def test_an_island_may_say_its_own_reshard_flag_and_the_islands_in_it_take_it(
    fake_world: Callable[..., None], calls: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    fake_world(4)
    inner = fsdp_unit(linear(), policy="fp32")
    outer = fsdp_unit(Holder(inner=inner, own=linear()), policy="bf16", reshard_after_forward=False)
    plain = fsdp_unit(linear(), policy="fp32")
    piece = Holder(outer=outer, plain=plain, own=linear())
    shard_part(piece, mesh_1d(), [inner, outer, plain], reshard_after_forward=2)
    assert [kwargs["reshard_after_forward"] for _, kwargs in calls] == [False, False, 2, 2]


def test_modules_that_are_not_below_or_not_marked_are_no_islands(
    fake_world: Callable[..., None], calls: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    fake_world(4)
    piece: Any = Holder(a=linear(), b=fsdp_ignore(linear()), c=fsdp_unit(linear(), policy="fp32"))
    elsewhere = fsdp_unit(linear(), policy="fp32")
    shard_part(piece, mesh_1d(), iter([piece.a, piece.b, elsewhere]))
    assert [module for module, _ in calls] == [piece]
    assert {type(parameter) for parameter in piece.parameters()} == {DTensor}


@fsdp_unit
class Coder(Holder):
    @fsdp_forward
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def test_entry_points_are_those_of_the_piece_and_its_islands(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    piece: Any = Coder(a=fsdp_unit(Coder(x=linear()), policy="fp32"), b=Coder(x=linear()))
    shard_part(piece, mesh_1d(), [piece.a])
    assert ["encode" in vars(module) for module in (piece, piece.a, piece.b)] == [True, True, False]


def test_a_unit_that_reaches_out_of_the_piece_is_kept(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    mesh = mesh_1d()
    model: Any = Holder(text=Holder(x=linear(), norm=linear()), head=linear())
    fully_shard([model.text.norm, model.head], mesh=mesh)
    state = fsdp_state(model.head)
    shard_part(model.text, mesh, mp_policy=BF16)
    assert fsdp_state(model.text.norm) is state
    shard_part(model, mesh, mp_policy=BF16)
    assert [unit.paths for unit in plan_of(model)] == [("text.norm", "head"), ("text",), ("",)]


def test_ignored_parameters_stay_as_they_are_and_each_unit_gets_those_below_it(
    fake_world: Callable[..., None], calls: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    fake_world(4)
    mesh, tensor_mesh = named("dp_shard", "tp")(), named("dp_shard", "tp")()["tp"]
    piece: Any = Holder(
        island=fsdp_unit(Holder(kept=linear(), own=linear()), policy="fp32"), own=linear(), kept=linear()
    )
    placed = distribute_tensor(piece.island.kept.weight.data, tensor_mesh, [Replicate()])
    piece.island.kept.weight = nn.Parameter(placed)
    ignored = {piece.island.kept.weight, piece.kept.weight, nn.Parameter(torch.ones(3))}
    shard_part(piece, mesh["dp_shard"], [piece.island], ignored_params=ignored)
    assert [kwargs["ignored_params"] for _, kwargs in calls] == [
        {piece.island.kept.weight},
        {piece.kept.weight},
    ]
    assert piece.island.kept.weight.placements == (Replicate(),)
    assert piece.island.kept.weight.device_mesh is tensor_mesh
    assert type(piece.kept.weight) is nn.Parameter  # trainable, as the framework wants it
    assert [unit.members for unit in plan_of(piece)] == [("island.own.weight",), ("own.weight",)]


def test_a_tied_island_is_refused_and_nothing_is_sharded(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    piece = tied(Holder(a=fsdp_unit(linear(), policy="fp32"), b=linear()), "a", "b")
    with pytest.raises(AnnotationError) as error:
        shard_part(piece, mesh_1d(), [piece.get_submodule("a")], mp_policy=BF16)
    assert [finding.code for finding in error.value.findings] == ["AF204"]
    assert is_untouched(piece)


# -- Step5 -----------------------------------------------------------------------------------------


def test_step5_names_its_parallelizer() -> None:
    assert Step5ForCausalLM.parallelizer is PARALLELIZER
    assert isinstance(PARALLELIZER, Step5ModelParallelizer)
    assert PARALLELIZER._customizes_moe_fsdp is True
    model = step5()
    assert list(PARALLELIZER.islands(model)) == [model.model.norm]
    assert list(PARALLELIZER.islands(model.model)) == [model.model.norm]
    assert list(PARALLELIZER.islands(model.model.layers[0])) == []


def test_the_mark_of_the_final_norm_comes_to_the_published_policy() -> None:
    plan = plan_annotated(step5(), mp_policy=BF16)
    assert plan.unit("model.norm").policy == _FP32_NORM_POLICY
    assert MixedPrecisionPolicy(float32, float32, None, cast_forward_inputs=False) == _FP32_NORM_POLICY


def layers_by_hand(model: Step5ForCausalLM, mesh: DeviceMesh, reshard: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BF16, reshard_after_forward=reshard)


@pytest.mark.parametrize("reshard", [None, True, False, 2])
@pytest.mark.parametrize("layers_before", [False, True])
def test_the_final_norm_is_a_unit_before_the_root_as_by_hand(
    fake_world: Callable[..., None],
    calls: list[tuple[nn.Module, dict[str, Any]]],
    layers_before: bool,
    reshard: Any,
) -> None:
    fake_world(4)
    mesh, ours, theirs = mesh_1d(), step5(), step5()
    if layers_before:
        layers_by_hand(ours, mesh, reshard)
        layers_by_hand(theirs, mesh, reshard)
    options: Any = {"mesh": mesh, "mp_policy": BF16, "reshard_after_forward": reshard}
    assert PARALLELIZER._fully_shard_module(ours, **options) is ours
    fully_shard(theirs.model.norm, **{**options, "mp_policy": _FP32_NORM_POLICY})
    fully_shard(theirs, **options)
    assert list(plan_of(ours).differences(plan_of(theirs))) == []
    assert [module for module, _ in calls] == [ours.model.norm, ours]
    assert [kwargs["reshard_after_forward"] for _, kwargs in calls] == [reshard, reshard]
    assert [unit.path for unit in plan_of(ours)][-2:] == ["model.norm", ""]
    assert plan_of(ours).unit("model.norm").policy == _FP32_NORM_POLICY
    assert len(plan_of(ours)) == (6 if layers_before else 2)


def test_an_outer_root_does_not_shard_the_norm_again(
    fake_world: Callable[..., None], calls: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    fake_world(4)
    mesh, ours, theirs = mesh_1d(), step5(), step5()
    for module in (ours.model, ours, ours.model, ours.model.norm):
        assert PARALLELIZER._fully_shard_module(module, mesh=mesh, mp_policy=BF16) is module
    fully_shard(theirs.model.norm, mesh=mesh, mp_policy=_FP32_NORM_POLICY)
    for root in (theirs.model, theirs):
        fully_shard(root, mesh=mesh, mp_policy=BF16)
    assert list(plan_of(ours).differences(plan_of(theirs))) == []
    assert [module for module, _ in calls] == [ours.model.norm, ours.model, ours]
    assert {kwargs["reshard_after_forward"] for _, kwargs in calls} == {None}


def test_a_norm_that_is_sharded_already_stays_as_it_is(
    fake_world: Callable[..., None], calls: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    fake_world(4)
    model = step5()
    fully_shard(model.model.norm, mesh=mesh_1d(), mp_policy=BF16)
    state = fsdp_state(model.model.norm)
    PARALLELIZER._fully_shard_module(model, mesh=mesh_1d(), mp_policy=BF16)
    assert [module for module, _ in calls] == [model]
    assert fsdp_state(model.model.norm) is state
    assert plan_of(model).unit("model.norm").policy == BF16


def test_a_norm_inside_a_module_that_is_sharded_already_is_no_unit_of_its_own(
    fake_world: Callable[..., None], calls: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    fake_world(4)
    model = step5()
    fully_shard(model.model, mesh=mesh_1d(), mp_policy=BF16)
    before = plan_of(model)
    assert PARALLELIZER._fully_shard_module(model.model, mesh=mesh_1d(), mp_policy=BF16) is model.model
    assert plan_of(model) == before
    PARALLELIZER._fully_shard_module(model, mesh=mesh_1d(), mp_policy=BF16)
    assert [module for module, _ in calls] == [model]
    assert [unit.path for unit in plan_of(model)] == ["model", ""]


@pytest.mark.parametrize("wrapped", ["model", "model.norm"])
def test_a_wrapper_is_the_unit(
    fake_world: Callable[..., None], calls: list[tuple[nn.Module, dict[str, Any]]], wrapped: str
) -> None:
    fake_world(4)
    model = step5()
    wrapper = checkpoint_wrapper(model.get_submodule(wrapped))
    model.set_submodule(wrapped, wrapper)
    PARALLELIZER._fully_shard_module(model.model, mesh=mesh_1d(), mp_policy=BF16)
    PARALLELIZER._fully_shard_module(model, mesh=mesh_1d(), mp_policy=BF16)
    assert [unit.path for unit in plan_of(model)] == ["model.norm", "model", ""]
    assert wrapper in [module for module, _ in calls]
    assert not isinstance(wrapper._checkpoint_wrapped_module, FSDPModule)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"reshard_after": True},
            "AF108 error at the root module: reshard_after=True, but there is no such option. Did you mean "
            "reshard_after_forward? Write one of mp_policy, offload_policy, reshard_after_forward, "
            "ignored_params.",
        ),
        (
            {"lowering": "unit"},
            "AF108 error at the root module: lowering='unit', but there is no such option. Write one of "
            "mp_policy, offload_policy, reshard_after_forward, ignored_params.",
        ),
        (
            {"reshard_after_forward": "except_last"},
            "AF108 error at the root module: reshard_after_forward='except_last', but it is no value that "
            "FSDP2 knows. Write True, False, a world size to reshard to, or None.",
        ),
        (
            {"mesh": None},
            "AF108 error at the root module: a NoneType as mesh, but it is no DeviceMesh. Write "
            'mesh=init_device_mesh("cuda", (world_size,)).',
        ),
    ],
)
def test_a_failed_call_leaves_the_module_untouched_and_a_corrected_one_works(
    fake_world: Callable[..., None], wrong: dict[str, Any], sentence: str
) -> None:
    fake_world(4)
    model = step5()
    options: dict[str, Any] = {"mesh": mesh_1d(), "mp_policy": BF16}
    with pytest.raises(AnnotationError) as error:
        PARALLELIZER._fully_shard_module(model, **{**options, **wrong})
    assert str(error.value) == f"1 finding; nothing was sharded\n  {sentence}"
    assert is_untouched(model)
    PARALLELIZER._fully_shard_module(model, **options)
    assert [unit.path for unit in plan_of(model)] == ["model.norm", ""]


def test_two_storage_dtypes_in_one_piece_are_refused(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    model = step5(bfloat16)
    with pytest.raises(AnnotationError) as error:
        PARALLELIZER._fully_shard_module(model.model, mesh=mesh_1d(), mp_policy=BF16)
    assert [finding.code for finding in error.value.findings] == ["AF203"]
    assert is_untouched(model)


# -- real ranks ------------------------------------------------------------------------------------


def piecewise(shard: Callable[..., object], shard_norm: Callable[..., object] | None) -> Step5ForCausalLM:
    """Step5 as the framework's MoE path shards it, which groups the layers' fp32 islands itself."""
    torch.manual_seed(0)
    model = Step5ForCausalLM(Step5Config.tiny()).to_storage(bfloat16)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        for island in [module for module in layer.modules() if isinstance(module, FP32_MODULES)]:
            shard(island, mesh=mesh, mp_policy=_FP32_NORM_POLICY, reshard_after_forward=False)
        shard(layer, mesh=mesh, mp_policy=BF16, reshard_after_forward=False)
    for part in (model.model.embed_tokens, model.lm_head):
        shard(part, mesh=mesh, mp_policy=BF16, reshard_after_forward=False)
    if shard_norm is not None:
        shard_norm(model.model.norm, mesh=mesh, mp_policy=_FP32_NORM_POLICY, reshard_after_forward=False)
    for root in (model.model, model):
        shard(root, mesh=mesh, mp_policy=BF16, reshard_after_forward=False)
    return model


def one_step(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and this rank's shard of every gradient, on this rank's own batch."""
    ids = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    loss = model(ids).float().logsumexp(-1).mean()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: grad.to_local() for name, grad in grads.items() if isinstance(grad, DTensor)}


def piecewise_and_by_hand() -> tuple[list[str], int, int, bool]:
    ours, theirs = piecewise(PARALLELIZER._fully_shard_module, None), piecewise(fully_shard, fully_shard)
    differences = list(plan_of(ours).differences(plan_of(theirs)))
    step, other = one_step(ours), one_step(theirs)
    return differences, len(plan_of(ours)), len(step[1]), same_bits([step], [other])


def test_module_by_module_step5_trains_as_by_hand_to_the_bit(ranks: Pool) -> None:
    assert ranks.run(piecewise_and_by_hand) == [([], 31, 49, True)] * 2


def one_rank_asks_for_more() -> tuple[str, str, bool]:
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    model = Toy()
    with pytest.raises(AnnotationError) as piece:
        model.parallelizer._fully_shard_module(model, mesh=mesh, **({"prefetch": 1} if rank else {}))
    with pytest.raises(AnnotationError) as whole:
        dispatch(model, context(mesh, ep_size=1 + rank, activation_checkpointing=True))
    return piece.value.findings[0].declared, whole.value.findings[0].declared, is_untouched(model)


def test_what_one_rank_asks_in_vain_is_the_error_of_every_rank(ranks: Pool) -> None:
    asked = ("prefetch=1 (on rank 1)", "ep_size=2 (on rank 1)", True)
    assert ranks.run(one_rank_asks_for_more) == [asked] * 2
