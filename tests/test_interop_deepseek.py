"""DeepSeek-V4.1 module by module: vision norms before their block or tower, everything else as one unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_apply import is_untouched, mesh_1d
from test_interop_nemo import context, dispatch, named
from torch import bfloat16, float32, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from annotate_fsdp import AnnotationError, Plan, plan_annotated, plan_of
from annotate_fsdp.models.deepseek_v41 import (
    PARALLELIZER,
    DeepseekV41Config,
    DeepseekV41ForCausalLM,
    DeepseekV41ModelParallelizer,
    DeepseekV41VisionTransformer,
    fully_shard_deepseek_v41,
)
from annotate_fsdp.models.deepseek_v41.norm import DeepseekV41VisionRMSNorm

BF16 = MixedPrecisionPolicy(bfloat16, float32, output_dtype=None, cast_forward_inputs=False)
FP32 = MixedPrecisionPolicy(float32, float32, output_dtype=float32, cast_forward_inputs=False)
NORM = MixedPrecisionPolicy(float32, float32, output_dtype=None, cast_forward_inputs=False)


def deepseek(storage: torch.dtype = float32) -> Any:
    config = DeepseekV41Config.tiny()
    with torch.device("meta"):
        return DeepseekV41ForCausalLM(config, list(range(258))).to_storage(storage)


def tower(storage: torch.dtype = float32, wrap: str = "") -> Any:
    """The vision tower, its blocks or its norms wrapped if asked."""
    with torch.device("meta"):
        made: Any = DeepseekV41VisionTransformer(DeepseekV41Config.tiny().vision_config).to(storage)
    for module in made.modules():
        if isinstance(module, DeepseekV41VisionRMSNorm):
            module.to(float32)
    for index, block in enumerate(made.blocks):
        if wrap == "norms":
            block.norm1, block.norm2 = checkpoint_wrapper(block.norm1), checkpoint_wrapper(block.norm2)
        if wrap == "blocks":
            made.blocks[index] = checkpoint_wrapper(block)
    if wrap == "norms":
        made.norm = checkpoint_wrapper(made.norm)
    return made


def shard_by_hand(made: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> Plan:
    """The framework's calls with the norms written out: block 0, the last block, the tower."""

    def shard(module: nn.Module, mp_policy: MixedPrecisionPolicy, reshard: bool | None) -> None:
        fully_shard(module, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard)

    for block, reshard in zip(made.blocks, (True, False), strict=True):
        shard(block.norm1, NORM, reshard)
        shard(block.norm2, NORM, reshard)
        shard(block, policy, reshard)
    shard(made.norm, NORM, None)
    shard(made, policy, None)
    return plan_of(made)


def shard_blocks_and_tower(made: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> Plan:
    for block, reshard in zip(made.blocks, (True, False), strict=True):
        same = fully_shard_deepseek_v41(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        assert same is block
    assert fully_shard_deepseek_v41(made, mesh=mesh, mp_policy=policy) is made
    return plan_of(made)


@pytest.mark.parametrize("wrap", ["", "blocks", "norms"])
@pytest.mark.parametrize("storage", [float32, bfloat16])
def test_blocks_and_tower_are_sharded_as_by_hand(
    fake_world: Callable[..., None], storage: torch.dtype, wrap: str
) -> None:
    fake_world(4)
    ours = shard_blocks_and_tower(tower(storage, wrap), mesh_1d(), BF16)
    theirs = shard_by_hand(tower(storage, wrap), mesh_1d(), BF16)
    assert list(ours.differences(theirs)) == []
    assert [(unit.path, unit.policy, unit.reshard_after_forward) for unit in ours] == [
        ("blocks.0.norm1", NORM, True),
        ("blocks.0.norm2", NORM, True),
        ("blocks.0", BF16, True),
        ("blocks.1.norm1", NORM, False),
        ("blocks.1.norm2", NORM, False),
        ("blocks.1", BF16, False),
        ("norm", NORM, True),
        ("", BF16, False),
    ]


def test_a_wrapper_is_the_unit_and_what_it_wraps_is_not(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    blocks, norms = tower(wrap="blocks"), tower(wrap="norms")
    for made in (blocks, norms):
        shard_blocks_and_tower(made, mesh_1d(), BF16)
    for wrapper in (*blocks.blocks, norms.norm, norms.blocks[0].norm1):
        assert isinstance(wrapper, FSDPModule)
        assert not isinstance(wrapper._checkpoint_wrapped_module, FSDPModule)


def test_a_tower_in_one_call_has_the_norms_of_all_its_blocks(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    made = tower(bfloat16)
    fully_shard_deepseek_v41(made, mesh=mesh_1d(), mp_policy=BF16, reshard_after_forward=False)
    norms = ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm"]
    assert [unit.path for unit in plan_of(made)] == [*norms, ""]
    assert {unit.reshard_after_forward for unit in plan_of(made)} == {False}


def test_a_policy_of_fp32_throughout_is_no_special_case(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    ours = shard_blocks_and_tower(tower(), mesh_1d(), FP32)
    assert list(ours.differences(shard_by_hand(tower(), mesh_1d(), FP32))) == []
    assert {unit.policy for unit in ours if "norm" in unit.path} == {NORM}


def test_modules_outside_of_the_tower_become_one_unit_each(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    ours, theirs = deepseek(), deepseek()
    for made, shard in ((ours, fully_shard_deepseek_v41), (theirs, fully_shard)):
        modules = (*made.model.layers.values(), made.model.aligner, made.lm_head, made.model)
        for module in modules:
            before = sum(isinstance(each, FSDPModule) for each in made.modules())
            shard(module, mesh=mesh_1d(), mp_policy=BF16)
            assert sum(isinstance(each, FSDPModule) for each in made.modules()) == before + 1
    assert list(plan_of(ours).differences(plan_of(theirs))) == []
    assert plan_of(ours).owner("model.vision.norm.weight").path == "model"


def test_what_is_sharded_already_comes_back_as_it_is(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    made = tower()
    fully_shard(made.blocks[0], mesh=mesh_1d(), mp_policy=BF16)
    before = plan_of(made)
    assert fully_shard_deepseek_v41(made.blocks[0], mesh=mesh_1d(), mp_policy=BF16) is made.blocks[0]
    assert plan_of(made) == before
    fully_shard_deepseek_v41(made, mesh=mesh_1d(), mp_policy=BF16)
    assert [unit.path for unit in plan_of(made)] == [
        "blocks.0",
        "blocks.1.norm1",
        "blocks.1.norm2",
        "norm",
        "",
    ]


def test_each_unit_leaves_the_ignored_parameters_below_it_as_they_are(
    fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from annotate_fsdp import apply

    fake_world(4)
    mesh = named("dp_shard", "tp")()
    made = tower()
    block, other = made.blocks
    placed = distribute_tensor(torch.ones(32, 32), mesh["tp"], [Replicate()])
    block.attn.wo.weight = nn.Parameter(placed)
    plain = block.norm2.weight
    ignored: list[set[nn.Parameter] | None] = []

    def record(module: nn.Module, **kwargs: Any) -> object:
        ignored.append(kwargs["ignored_params"])
        return fully_shard(module, **kwargs)

    monkeypatch.setattr(apply, "fully_shard", record)
    fully_shard_deepseek_v41(
        block,
        mesh=mesh["dp_shard"],
        mp_policy=BF16,
        ignored_params={block.attn.wo.weight, plain, other.norm1.weight},
    )
    assert ignored == [None, {plain}, {block.attn.wo.weight}]
    assert block.attn.wo.weight.placements == (Replicate(),)
    assert block.attn.wo.weight.device_mesh is placed.device_mesh
    assert block.norm2.weight is plain
    assert type(plain) is nn.Parameter
    assert [unit.path for unit in plan_of(block)] == ["norm1", "norm2", ""]


def test_a_failed_call_leaves_the_tower_untouched(fake_world: Callable[..., None]) -> None:
    fake_world(4)
    made = tower()
    options: Any = {"mesh": mesh_1d(), "mp_policy": "bf16"}
    with pytest.raises(AnnotationError) as error:
        fully_shard_deepseek_v41(made, **options)
    assert str(error.value) == (
        "1 finding; nothing was sharded\n"
        "  AF108 error at the root module: mp_policy='bf16', but it is no MixedPrecisionPolicy. Write "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
    )
    assert is_untouched(made)


def test_the_parallelizer_does_the_same_and_shards_the_whole_model_by_its_marks(
    fake_world: Callable[..., None],
) -> None:
    fake_world(4)
    assert DeepseekV41ForCausalLM.parallelizer is PARALLELIZER
    assert isinstance(PARALLELIZER, DeepseekV41ModelParallelizer)
    assert PARALLELIZER._customizes_moe_fsdp is True
    made = tower()
    assert list(PARALLELIZER.islands(made.blocks[0])) == [made.blocks[0].norm1, made.blocks[0].norm2]
    assert PARALLELIZER._fully_shard_module(made, mesh=mesh_1d(), mp_policy=BF16) is made
    again = tower()
    fully_shard_deepseek_v41(again, mesh=mesh_1d(), mp_policy=BF16)
    assert plan_of(made) == plan_of(again)
    model = deepseek(bfloat16)
    assert list(PARALLELIZER.islands(model)) == []
    assert dispatch(model, context(mesh_1d(), activation_checkpointing=True)) is model
    assert plan_of(model) == plan_annotated(deepseek(bfloat16), world_size=4, mp_policy=BF16)
    assert isinstance(model.model.vision, DeepseekV41VisionTransformer)
