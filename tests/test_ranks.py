"""Numbers on real ranks: marked models against the unsharded one, and against plain `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard

from annotate_fsdp import fsdp_forward, fsdp_ignore, fsdp_unit, plan_annotated, plan_of, shard_annotated

FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DIM, VOCAB = 8, 13


class Linear(nn.Linear):
    """Returns no view, about which FSDP2 would warn where it is a unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.0


class SelfCastingNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (self.weight * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@fsdp_unit
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = fsdp_unit(nn.LayerNorm(DIM), policy="fp32")
        self.up = Linear(DIM, DIM)
        self.down = Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))

    @fsdp_forward
    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = fsdp_unit(nn.Embedding(VOCAB, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = fsdp_unit(Linear(DIM, VOCAB, bias=False))
        self.by_method = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block.enter(x) if self.by_method else block(x)
        return self.head(x) + 0.0


def as_it_is(model: Model) -> None:
    pass


def tied_units(model: Model) -> None:
    model.head.weight = model.embed.weight


def tied_to_the_root(model: Model) -> None:
    model.head.weight = model.embed.weight
    del model.head.__fsdp_unit__


def tied_inside_two_blocks(model: Model) -> None:
    model.blocks[0].up.weight = model.blocks[2].down.weight


def tied_three_ways(model: Model) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[2].up.weight = model.blocks[0].up.weight


def tied_bias(model: Model) -> None:
    model.blocks[0].up.bias = model.blocks[1].down.bias


def shared_module(model: Model) -> None:
    model.blocks[2].up = model.blocks[0].up


def shared_unit(model: Model) -> None:
    model.blocks[2].norm = model.blocks[0].norm


def shared_block(model: Model) -> None:
    model.blocks[2] = model.blocks[0]


def checkpointed_blocks(model: Model) -> None:
    for index in range(3):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])


def checkpointed_islands(model: Model) -> None:
    for block in model.blocks:
        block.norm = checkpoint_wrapper(block.norm)


def grouped(model: Model) -> None:
    for block in model.blocks:
        fsdp_unit(block.up, group="linears")
        fsdp_unit(block.down, group="linears")


def frozen(model: Model) -> None:
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)


def by_method(model: Model) -> None:
    model.by_method = True


def odd_sizes(model: Model) -> None:
    model.blocks[0].up = Linear(DIM, 3)
    model.blocks[0].down = Linear(3, DIM)
    model.blocks[1].up = Linear(DIM, 1)
    model.blocks[1].down = Linear(1, DIM)


CASES: dict[str, tuple[Callable[[Model], None], dict[str, Any]]] = {
    "plain": (as_it_is, {}),
    "tied units": (tied_units, {}),
    "tied to the root": (tied_to_the_root, {}),
    "tied inside two blocks": (tied_inside_two_blocks, {}),
    "tied three ways": (tied_three_ways, {}),
    "tied bias": (tied_bias, {}),
    "shared module": (shared_module, {}),
    "shared unit": (shared_unit, {}),
    "shared block": (shared_block, {}),
    "checkpointed blocks": (checkpointed_blocks, {}),
    "checkpointed islands": (checkpointed_islands, {}),
    "grouped": (grouped, {}),
    "frozen": (frozen, {}),
    "by method": (by_method, {}),
    "odd sizes": (odd_sizes, {}),
    "kept gathered": (as_it_is, {"reshard_after_forward": False}),
    "except last": (as_it_is, {"reshard_after_forward": "except_last"}),
    "offloaded": (as_it_is, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


def build(change: Callable[[Model], None]) -> Model:
    torch.manual_seed(0)
    model = Model()
    change(model)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and full gradients of one step, by plain names."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): full(p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return loss.detach(), gradients


def worst(case: str, shape: tuple[int, ...]) -> tuple[float, bool]:
    """Largest relative gradient or loss difference to the unsharded model over two SGD steps."""
    change, options = CASES[case]
    reference, model = build(change), build(change)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    shard_annotated(model, mesh, mp_policy=FP32, **options)
    world, rank = dist.get_world_size(), dist.get_rank()
    largest = 0.0
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (reference, model)
    ]
    for index in range(2):
        ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(index))
        want_loss, want = step(reference, ids)
        loss, got = step(model, ids.chunk(world)[rank])
        dist.all_reduce(loss)
        assert got.keys() == want.keys()
        pairs = [(loss / world, want_loss), *((got[name], want[name]) for name in want)]
        largest = max(
            largest, *(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)
        )
        for optimizer in optimizers:
            optimizer.step()
    units = plan_of(model).units
    members = [member for unit in units for member in unit.members]
    return largest, len(members) == len(set(members)) == len(list(reference.parameters()))


def worst_of_all(cases: list[str], shape: tuple[int, ...]) -> dict[str, tuple[float, bool]]:
    return {case: worst(case, shape) for case in cases}


@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (2, 2)])
def test_losses_and_gradients_are_the_unsharded_models(ranks: Pool, shape: tuple[int, ...]) -> None:
    world = torch.Size(shape).numel()
    cases = list(CASES) if shape == (2,) else ["plain", "tied units", "tied inside two blocks", "odd sizes"]
    for results in ranks.run(worst_of_all, cases, shape, world=world):
        assert list(results) == cases
        wrong = {case: value for case, value in results.items() if not value[0] <= 1e-5 or not value[1]}
        assert wrong == {}


AXES = {
    "HSDP by name": DataParallelMeshDims(shard="b", replicate="a"),
    "two axes as one": DataParallelMeshDims(shard=("a", "b")),
    "one of two": DataParallelMeshDims(shard="b"),
}


def worst_over_axes(name: str) -> list[float]:
    """Two models after each other on one mesh, so that derived meshes are made twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    largest = []
    for _ in range(2):
        reference, model = build(as_it_is), build(as_it_is)
        plan = plan_annotated(model, mesh, mp_policy=FP32, dp_mesh_dims=AXES[name])
        shard_annotated(model, mesh, mp_policy=FP32, dp_mesh_dims=AXES[name])
        assert plan_of(model) == plan
        ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(0))
        part = mesh.get_local_rank("b") if name == "one of two" else dist.get_rank()
        parts = 2 if name == "one of two" else 4
        _, want = step(reference, ids)
        _, got = step(model, ids.chunk(parts)[part])
        assert got.keys() == want.keys()
        largest.append(max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want))
    return largest


@pytest.mark.parametrize("name", AXES)
def test_named_axes_of_a_mesh_shard_plain_parameters(ranks: Pool, name: str) -> None:
    assert all(value <= 1e-5 for values in ranks.run(worst_over_axes, name, world=4) for value in values)


def ignored_and_synced() -> float:
    def ignore(model: Model) -> None:
        fsdp_ignore(model.blocks[1].up, synced=True)

    reference, model = build(ignore), build(ignore)
    shard_annotated(model, init_device_mesh("cpu", (2,)), mp_policy=FP32)
    ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(0))
    _, want = step(reference, ids)
    _, got = step(model, ids.chunk(2)[dist.get_rank()])
    for name in ("blocks.1.up.weight", "blocks.1.up.bias"):
        dist.all_reduce(got[name])
        got[name] /= 2
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)


def test_parameters_that_somebody_else_reduces_are_left_to_them(ranks: Pool) -> None:
    assert all(value <= 1e-5 for value in ranks.run(ignored_and_synced))


def kept() -> float:
    reference, model = build(as_it_is), build(as_it_is)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.blocks[0].norm, mesh=mesh, mp_policy=FP32)
    fully_shard(model.blocks[0], mesh=mesh, mp_policy=FP32)
    shard_annotated(model, mesh, mp_policy=FP32, existing="keep")
    ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(0))
    _, want = step(reference, ids)
    _, got = step(model, ids.chunk(2)[dist.get_rank()])
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)


def test_units_sharded_before_are_kept_and_train(ranks: Pool) -> None:
    assert all(value <= 1e-5 for value in ranks.run(kept))


FORMS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], MixedPrecisionPolicy]] = {
    "norm": (
        lambda: nn.LayerNorm(DIM),
        {"policy": "fp32"},
        MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16, True),
    ),
    "linear": (
        lambda: Linear(DIM, DIM, bias=False),
        {"policy": torch.float32},
        MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16, True),
    ),
    "casts itself": (
        SelfCastingNorm,
        {"policy": "fp32", "casts_itself": True},
        MixedPrecisionPolicy(torch.float32, torch.float32, None, False),
    ),
}


def marked_and_by_hand(form: str) -> tuple[bool, bool]:
    make, mark, policy = FORMS[form]
    mesh: DeviceMesh = init_device_mesh("cpu", (2,))
    head = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32, True)
    records = []
    plans = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = Model()
        fsdp_unit(model.head, policy="fp32", output_dtype=torch.float32)
        for block in model.blocks:
            block.norm = fsdp_unit(make(), **mark)
        if by_hand:
            fully_shard(model.embed, mesh=mesh, mp_policy=BF16)
            for block in model.blocks:
                fully_shard(block.norm, mesh=mesh, mp_policy=policy)
                fully_shard(block, mesh=mesh, mp_policy=BF16)
            fully_shard(model.head, mesh=mesh, mp_policy=head)
            fully_shard(model, mesh=mesh, mp_policy=BF16)
        else:
            shard_annotated(model, mesh, mp_policy=BF16, lowering="unit")
        plans.append(plan_of(model))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        record = []
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            record.append(step(model, torch.randint(VOCAB, (2, 6), generator=generator)))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        records.append(record)
    same = all(
        torch.equal(loss, other) and all(torch.equal(mine[n], yours[n]) for n in yours)
        for (loss, mine), (other, yours) in zip(*records, strict=True)
    )
    return plans[0] == plans[1], same


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.report(11)
def test_each_form_of_fp32_equals_its_hand_written_layout_to_the_bit(ranks: Pool, form: str) -> None:
    assert ranks.run(marked_and_by_hand, form) == [(True, True)] * 2
