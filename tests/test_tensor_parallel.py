"""Parameters that are DTensors already: tensor parallelism beside FSDP, on four real ranks."""

from __future__ import annotations

import pytest
import torch
from pool import Pool, fake_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from annotate_fsdp import AnnotationError, fsdp_unit, plan_annotated, plan_of, shard_annotated
from annotate_fsdp.models.step5 import Step5Config, Step5ForCausalLM

FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


class FullMeshLinear(nn.Module):
    """A projection on the full mesh: columns or rows over the last axis, plain tensors in and out."""

    def __init__(self, plain: nn.Linear, mesh: DeviceMesh, dim: int) -> None:
        super().__init__()
        assert plain.bias is None
        self.mesh = mesh
        self.dim = dim
        placements: list[Placement] = [Replicate(), Shard(dim)]
        self.weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh, placements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = DTensor.from_local(x, self.mesh, [Shard(0), Replicate()], run_check=False)
        if self.dim == 1:
            inputs = inputs.redistribute(placements=[Shard(0), Shard(x.dim() - 1)])
        y = nn.functional.linear(inputs, self.weight)
        return y.redistribute(placements=[Shard(0), Replicate()]).to_local(
            grad_placements=[Shard(0), Replicate()]
        )


@fsdp_unit
class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = fsdp_unit(nn.LayerNorm(dim), policy="fp32")
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.down(torch.relu(self.up(self.norm(x)))))


def toy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def step5() -> Step5ForCausalLM:
    torch.manual_seed(0)
    return Step5ForCausalLM(Step5Config.tiny())


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            grads[name] = whole.detach().clone()
    return grads


def worst_difference(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == reference.keys()
    return max(
        float((ours[name] - want).abs().max() / want.abs().max().clamp_min(1e-30))
        for name, want in reference.items()
    )


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def toy_gradients(form: str) -> tuple[float, tuple[str, ...]]:
    """Largest relative gradient difference to the unsharded model, and the plan's unit names."""
    mesh, reference, model = mesh_2x2(), toy(), toy()
    dims: DataParallelMeshDims | None = DataParallelMeshDims(shard="dp")
    over = mesh
    for block in model:
        if form == "full mesh":
            block.up = FullMeshLinear(block.up, mesh, 0)
            block.down = FullMeshLinear(block.down, mesh, 1)
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
    if form == "tp axis, data-parallel mesh":
        over, dims = mesh["dp"], None
    plan = plan_annotated(model, over, mp_policy=FP32, dp_mesh_dims=dims, lowering="unit")
    assert shard_annotated(model, over, mp_policy=FP32, dp_mesh_dims=dims, lowering="unit") is model
    assert plan_of(model) == plan
    batch = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
    reference(batch).square().mean().backward()
    rank = mesh.get_local_rank("dp")
    model(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
    return worst_difference(full_gradients(model), full_gradients(reference)), tuple(u.name for u in plan)


def step5_gradients(form: str) -> float:
    """The same for Step5 tiny with the query-key-value and output projections of one layer."""
    mesh, reference, model = mesh_2x2(), step5(), step5()
    attention = model.model.layers[0].self_attn
    if form == "full mesh":
        attention.qkv_proj = FullMeshLinear(attention.qkv_proj, mesh, 0)
        attention.o_proj = FullMeshLinear(attention.o_proj, mesh, 1)
    else:
        layouts = {
            "qkv_proj": ColwiseParallel(output_layouts=Replicate()),
            "o_proj": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(attention, mesh["tp"], layouts)
    dims = DataParallelMeshDims(shard="dp")
    shard_annotated(model, mesh, mp_policy=FP32, dp_mesh_dims=dims, lowering="unit")
    ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(1))
    reference(ids).logsumexp(-1).mean().backward()
    rank = mesh.get_local_rank("dp")
    model(ids[2 * rank : 2 * rank + 2]).logsumexp(-1).mean().backward()
    return worst_difference(full_gradients(model), full_gradients(reference))


@pytest.mark.parametrize("form", ["full mesh", "tp axis", "tp axis, data-parallel mesh"])
def test_projections_as_dtensors_beside_plain_parameters_have_the_unsharded_gradients(
    ranks: Pool, form: str
) -> None:
    for worst, units in ranks.run(toy_gradients, form, world=4):
        assert worst <= 1e-5
        assert units == ("0.norm", "0", "1.norm", "1", "(root)")


@pytest.mark.parametrize("form", ["full mesh", "tp axis"])
def test_step5_with_two_projections_as_dtensors_has_the_unsharded_gradients(ranks: Pool, form: str) -> None:
    for worst in ranks.run(step5_gradients, form, world=4):
        assert worst <= 1e-5


def messages(model: nn.Module, mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> list[str]:
    with pytest.raises(AnnotationError) as error:
        plan_annotated(model, mesh, dp_mesh_dims=dims, lowering="unit")
    return [str(finding) for finding in error.value.findings]


def test_dtensors_that_fsdp_cannot_shard_are_named_before_anything_is_sharded() -> None:
    with fake_group(4):
        mesh, twin = mesh_2x2(), mesh_2x2()
        dims = DataParallelMeshDims(shard="dp")
        model = toy()
        model[0].up.weight = nn.Parameter(
            distribute_tensor(model[0].up.weight.detach(), mesh, [Shard(0), Replicate()])
        )
        assert messages(model, mesh, dims) == [
            "AF405 error at 0.up.weight: a DTensor with placements (Shard(dim=0), Replicate()), "
            "but it is not Replicate() on the data-parallel axes ['dp']. "
            "Keep the data-parallel axes for FSDP, or put it into ignored_params."
        ]
        assert messages(model, mesh["dp"], None) == [
            "AF405 error at 0.up.weight: a DTensor with placements (Shard(dim=0), Replicate()), but its mesh "
            "('dp', 'tp') has axes that FSDP shards over. "
            "Keep the data-parallel axes for FSDP, or put it into ignored_params."
        ]
        assert "AF405 error at 0.up.weight" in messages(model, twin, dims)[0]
        assert "was built separately" in messages(model, twin, dims)[0]


def test_resharding_dtensors_to_fewer_ranks_is_refused_by_name() -> None:
    with fake_group(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = toy()
        weight = distribute_tensor(model[0].up.weight.detach(), mesh, [Replicate(), Shard(0)])
        model[0].up.weight = nn.Parameter(weight)
        fsdp_unit(model[0], reshard_after_forward=4)  # all ranks: the same as True
        dims = DataParallelMeshDims(shard="dp")
        assert (
            plan_annotated(model, mesh, dp_mesh_dims=dims, lowering="unit").unit("0").reshard_after_forward
            is True
        )
        fsdp_unit(model[0], reshard_after_forward=2)
        assert messages(model, mesh, dims) == [
            "AF206 error at 0: reshard_after_forward=2 with dp_mesh_dims, but FSDP2 reshards DTensors "
            "such as 0.up.weight to all ranks or none. Write True or False."
        ]
