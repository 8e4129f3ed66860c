"""What people do with a model besides plain steps: the numbers are those of the unsharded one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import Pool
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from annotate_fsdp import AnnotationError, fsdp_unit, plan_of, shard_annotated

FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DIM, VOCAB, STEPS = 8, 13, 2

Change = Callable[[Any], Any]


class Part(nn.Module):
    """A norm in fp32 and two projections, one of which may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = fsdp_unit(nn.LayerNorm(DIM), policy="fp32")
        self.up = nn.Linear(DIM, DIM)
        self.late = nn.Linear(DIM, DIM)
        self.uses_late = True

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(self.norm(x)))
        return y + self.late(y) if self.uses_late else y


@fsdp_unit
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.part(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = fsdp_unit(nn.Embedding(VOCAB, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = fsdp_unit(nn.LayerNorm(DIM), policy="fp32")
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + 0.0


def as_it_is(model: Any) -> Any:
    return model


def checkpoint_blocks(model: Any, **options: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, **options)
    return model


def checkpoint_parts(model: Any) -> Any:
    for block in model.blocks:
        block.part = checkpoint_wrapper(block.part)
    return model


def checkpoint_norms(model: Any) -> Any:
    for block in model.blocks:
        block.part.norm = checkpoint_wrapper(block.part.norm)
    return model


def compile_in_place(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def compile_wrapped(model: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return model


def microbatches(step: int) -> list[Tensor]:
    """Global batches of a step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(VOCAB, (4, 6), generator=generator) for _ in range(2)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def whole_step(model: Any, batches: list[Tensor]) -> Tensor:
    """One batch, one backward."""
    loss = loss_of(model, batches[0])
    loss.backward()
    return loss.detach()


def synchronize(model: Any, wanted: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def set_late(model: Any, wanted: bool) -> None:
    for module in model.modules():
        if isinstance(module, Part):
            module.uses_late = wanted


def accumulate(model: Any, batches: list[Tensor], *, sync: bool, late: bool = False) -> Tensor:
    """Two backwards; with `late`, a layer joins in the second."""
    total = torch.zeros(())
    for index, ids in enumerate(batches):
        synchronize(model, sync or index == len(batches) - 1)
        set_late(model, not late or index > 0)
        total += whole_step(model, [ids])
    return total


def two_forwards(model: Any, batches: list[Tensor]) -> Tensor:
    first, second = (loss_of(model, ids) for ids in batches)
    (first + second).backward()
    return (first + second).detach()


def under_autocast(model: Any, batches: list[Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batches[0])
    loss.backward()
    return loss.detach()


def evaluate_first(model: Any, batches: list[Tensor]) -> Tensor:
    model.eval()
    with torch.no_grad():
        loss_of(model, batches[1])
    model.train()
    return whole_step(model, batches)


adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


@dataclass(frozen=True)
class Way:
    """How a model is changed before and after sharding, and trained."""

    before: Change = as_it_is
    after: Change = as_it_is
    step: Callable[[Any, list[Tensor]], Tensor] = whole_step
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)
    within: float = 1e-5
    on_reference: Change = as_it_is


def freeze(model: Any) -> Any:
    model.blocks.requires_grad_(False)
    return model


def evaluate_and_unfreeze(model: Any) -> Any:
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    model.requires_grad_(True)
    return model


def train_and_unfreeze(model: Any) -> Any:
    loss_of(model, torch.zeros(2, 4, dtype=torch.long)).backward()
    model.zero_grad()
    model.requires_grad_(True)
    return model


REENTRANT = partial(checkpoint_blocks, checkpoint_impl=CheckpointImpl.REENTRANT)
WAYS = {
    "plain": Way(),
    "blocks recomputed, wrapped before": Way(before=checkpoint_blocks),
    "blocks recomputed, wrapped after": Way(after=checkpoint_blocks),
    "parts recomputed, wrapped before": Way(before=checkpoint_parts),
    "parts recomputed, wrapped after": Way(after=checkpoint_parts),
    "norms recomputed, wrapped before": Way(before=checkpoint_norms),
    "norms recomputed, wrapped after": Way(after=checkpoint_norms),
    "blocks recomputed with reentry, wrapped before": Way(before=REENTRANT),
    "blocks recomputed with reentry, wrapped after": Way(after=REENTRANT),
    "both recomputed": Way(before=checkpoint_parts, after=checkpoint_blocks),
    "accumulated": Way(step=partial(accumulate, sync=True)),
    "accumulated without sync": Way(step=partial(accumulate, sync=False)),
    "joining late": Way(step=partial(accumulate, sync=True, late=True)),
    "joining late without sync": Way(step=partial(accumulate, sync=False, late=True)),
    "two forwards": Way(step=two_forwards),
    "two forwards recomputed": Way(step=two_forwards, after=checkpoint_blocks),
    "autocast": Way(step=under_autocast, within=3e-2),
    "evaluated": Way(step=evaluate_first),
    "offloaded": Way(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "foreach": Way(optimizer=partial(adamw, foreach=True)),
    "fused": Way(optimizer=partial(adamw, fused=True)),
    "momentum": Way(optimizer=sgd),
    "unfrozen after evaluation": Way(before=freeze, after=evaluate_and_unfreeze),
    "unfrozen after training": Way(before=freeze, after=train_and_unfreeze),
    "all unfrozen after evaluation": Way(
        before=lambda model: model.requires_grad_(False), after=evaluate_and_unfreeze
    ),
    "low precision, unfrozen after evaluation": Way(
        before=freeze, after=evaluate_and_unfreeze, options={"mp_policy": BF16}, within=5e-2, optimizer=sgd
    ),
    "low precision, joining late without sync": Way(
        step=partial(accumulate, sync=False, late=True),
        options={"mp_policy": BF16},
        within=5e-2,
        optimizer=sgd,
    ),
    "low precision, accumulated without sync": Way(
        step=partial(accumulate, sync=False), options={"mp_policy": BF16}, within=5e-2, optimizer=sgd
    ),
}
COMPILED = {
    "compiled in place, then sharded": Way(before=compile_in_place),
    "wrapped by the compiler, then sharded": Way(before=compile_wrapped),
    "sharded, then compiled": Way(after=compile_in_place),
}


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def trained(way: Way, model: Any, rank: int, ranks: int) -> Iterator[dict[str, Tensor]]:
    """Train on this rank's rows; loss, norm and full gradients of each step, then the weights."""
    optimizer = way.optimizer(model.parameters())
    for step in range(STEPS):
        model.zero_grad()
        loss = way.step(model, [ids.chunk(ranks)[rank] for ids in microbatches(step)])
        if ranks > 1:
            dist.all_reduce(loss)
            loss /= ranks
        named = {plain(name): p for name, p in model.named_parameters()}
        found = {n: full(p.grad).clone() for n, p in named.items() if p.grad is not None}
        norm = full(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        yield {"loss": loss, "norm": norm, **found}
    yield {plain(name): full(p).detach() for name, p in model.named_parameters()}


def difference(way: Way, mesh: DeviceMesh) -> str:
    """What differs most from the unsharded model by more than it may, or the error; "" if nothing does."""
    reference = way.on_reference(build())
    model = way.before(build())
    try:
        shard_annotated(model, mesh, **{"mp_policy": FP32, **way.options})
        model = way.after(model)
        pairs = zip(
            trained(way, reference, 0, 1),
            trained(way, model, dist.get_rank(), dist.get_world_size()),
            strict=True,
        )
        worst, where = 0.0, ""
        for step, (want, got) in enumerate(pairs):
            if want.keys() != got.keys():
                return f"step {step}: {sorted(want.keys() ^ got.keys())} on one side only"
            for name, value in want.items():
                far = float((got[name] - value).abs().max() / value.abs().max().clamp_min(1e-3))
                if not far <= worst:
                    worst, where = far, f"step {step}: {name} by {far}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if worst <= way.within else where


def differences(names: list[str], shape: tuple[int, ...]) -> dict[str, str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    ways = {**WAYS, **COMPILED}
    return {name: wrong for name in names if (wrong := difference(ways[name], mesh))}


QUICK = (
    "blocks recomputed, wrapped after",
    "parts recomputed, wrapped before",
    "accumulated",
    "two forwards",
    "autocast",
    "offloaded",
    "fused",
    "low precision, unfrozen after evaluation",
    "low precision, joining late without sync",
)


@pytest.mark.parametrize("shape", [(2,), (1,)], ids=str)
@pytest.mark.report(10, 35, 37, 75)
def test_ways_of_training_have_the_numbers_of_the_unsharded_model(
    ranks: Pool, shape: tuple[int, ...]
) -> None:
    for wrong in ranks.run(differences, list(QUICK), shape, world=torch.Size(shape).numel()):
        assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_each_way_of_training_has_the_numbers_of_the_unsharded_model(
    ranks: Pool, shape: tuple[int, ...]
) -> None:
    names = [name for name in WAYS if name not in QUICK] if shape == (2,) else list(QUICK[2:])
    for wrong in ranks.run(differences, names, shape, world=torch.Size(shape).numel(), timeout=120):
        assert wrong == {}


@pytest.mark.slow
@pytest.mark.report(92)
def test_compiled_blocks_have_the_numbers_of_the_unsharded_model(ranks: Pool) -> None:
    for wrong in ranks.run(compiled_differences, timeout=200):
        assert wrong == {}


def compiled_differences() -> dict[str, str]:
    with warnings.catch_warnings():  # what torch's compiler warns of is no fault of the model's
        warnings.simplefilter("ignore")
        return differences(list(COMPILED), (2,))


# -- adapters --------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen projection and two small ones beside it, as PEFT's LoRA layers have them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(DIM, 2, bias=False)
        self.lora_b = nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        lora = self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype)))
        return self.base_layer(x) + lora.to(x.dtype)


class Saved(nn.Module):
    """A frozen module and the copy of it that is trained, as PEFT's modules_to_save have them."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original).float()})
        self.modules_to_save.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class Peft(nn.Module):
    """A model inside of another, which it shows as its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


def adapt(stored: torch.dtype) -> Peft:
    """A frozen base stored in `stored`, with adapters, norms and a head that train in fp32."""
    model = build().to(torch.bfloat16).to(stored).requires_grad_(False)
    torch.manual_seed(1)
    for block in model.blocks:
        block.part.up = Adapted(block.part.up)
        block.down = Adapted(block.down)
        block.part.norm.float().requires_grad_(True)
    model.norm.float()
    model.head = Saved(model.head)
    return Peft(model)


def adapted(compute: MixedPrecisionPolicy, within: float) -> tuple[str, list[str]]:
    """What differs from the unsharded model, and the trainable parameters that were never changed."""
    reference, model = adapt(torch.float32), adapt(torch.bfloat16)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    shard_annotated(model, init_device_mesh("cpu", (2,)), mp_policy=compute)
    way = Way(optimizer=lambda params: sgd([p for p in params if p.requires_grad]))
    pairs = zip(trained(way, reference, 0, 1), trained(way, model, dist.get_rank(), 2), strict=True)
    wrong = [
        f"{step} {name}"
        for step, (want, got) in enumerate(pairs)
        for name, value in want.items()
        if not (got[name].float() - value).abs().max() <= within * value.abs().max().clamp_min(1e-2)
    ]
    after = dict(model.named_parameters())
    same = [n for n, value in before.items() if torch.equal(full(after[n]), value) and "late" not in n]
    assert all(after[n].dtype == torch.float32 for n in before)
    return ", ".join(wrong), same


@pytest.mark.parametrize(("compute", "within"), [(FP32, 1e-5), (BF16, 1e-1)], ids=["fp32", "bf16"])
@pytest.mark.report(76)
def test_adapters_in_fp32_train_beside_a_frozen_base_in_bf16(
    ranks: Pool, compute: MixedPrecisionPolicy, within: float
) -> None:
    assert ranks.run(adapted, compute, within) == [("", [])] * 2


def unfreeze_another_dtype() -> str:
    model = adapt(torch.bfloat16)
    shard_annotated(model, init_device_mesh("cpu", (2,)), mp_policy=BF16)
    ids = torch.zeros(2, 4, dtype=torch.long)
    loss_of(model, ids).backward()
    model.zero_grad()
    model.requires_grad_(True)
    try:
        loss_of(model, ids).backward()
    except AnnotationError as error:
        return str(error)
    return ""


def test_unfreezing_what_a_unit_stores_in_another_dtype_is_named_on_every_rank(ranks: Pool) -> None:
    for message in ranks.run(unfreeze_another_dtype):
        assert message.startswith("1 finding; the gradients were not reduced\n  AF203 error at ")
        assert "since it was unfrozen, but the unit stores trainable parameters of 2 dtypes: " in message


# -- copies, checkpoints, export -------------------------------------------------------------------


def averaged() -> float:
    """The largest difference of a moving average, which is a copy sharded alike, to the unsharded one."""
    mesh = init_device_mesh("cpu", (2,))
    reference, model = build(), build()
    averages = [copy.deepcopy(reference), copy.deepcopy(model)]
    for each in (model, averages[1]):
        shard_annotated(each, mesh, mp_policy=FP32)
    assert plan_of(averages[1]) == plan_of(model)
    way = Way()
    for _ in zip(trained(way, reference, 0, 1), trained(way, model, dist.get_rank(), 2), strict=True):
        for average, source in zip(averages, (reference, model), strict=True):
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), source.parameters(), strict=True):
                    mine.lerp_(theirs, 0.5)
    ids = microbatches(9)[0]
    with torch.no_grad():
        losses = [loss_of(average, ids) for average in averages]
    return abs(float(losses[0] - losses[1]))


def test_a_moving_average_is_a_copy_made_before_sharding(ranks: Pool) -> None:
    assert all(far <= 1e-5 for far in ranks.run(averaged))


def saved_and_trained_on(path: Path) -> list[Tensor]:
    """Train, save with DCP, train on; the losses of the second part."""
    return list(dcp_losses(path, load=False))


def loaded_and_trained_on(path: Path) -> list[Tensor]:
    """Read what other ranks wrote, and train on."""
    return list(dcp_losses(path, load=True))


def dcp_losses(path: Path, load: bool) -> Iterator[Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    model = build()
    if load:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
    shard_annotated(model, init_device_mesh("cpu", (world,)), mp_policy=FP32)
    optimizer = adamw(model.parameters())

    def train(first: int) -> Iterator[Tensor]:
        for step in range(first, first + 2):
            loss = whole_step(model, [ids.chunk(world)[rank] for ids in microbatches(step)])
            dist.all_reduce(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield loss / world

    if not load:
        list(train(0))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if load:
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    else:
        dcp.save(state, checkpoint_id=path)
    yield from train(2)


def test_a_dcp_checkpoint_of_two_ranks_goes_on_with_one_two_and_four(ranks: Pool, tmp_path: Path) -> None:
    want = torch.stack(ranks.run(saved_and_trained_on, tmp_path)[0])
    for world in (1, 2, 4):
        for got in ranks.run(loaded_and_trained_on, tmp_path, world=world):
            torch.testing.assert_close(torch.stack(got), want, rtol=1e-5, atol=1e-5)


def exported(path: Path) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Gather a model, write it with safetensors, read it into another; storage and planned dtypes of each."""
    from safetensors.torch import load_file, save_file

    mesh = init_device_mesh("cpu", (2,))
    model = build().to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    other = copy.deepcopy(model)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    shard_annotated(model, mesh, mp_policy=BF16)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        save_file({name: value.contiguous() for name, value in gathered.items()}, path)
    dist.barrier()
    read = load_file(path)
    assert all(torch.equal(read[name], value) for name, value in whole.items())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    shard_annotated(other, mesh, mp_policy=BF16)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, read if dist.get_rank() == 0 else {}, options=options)
    assert all(torch.equal(full(p), whole[name]) for name, p in other.named_parameters())
    planned = {p.path: p.dtype for unit in plan_of(model) for p in unit.parameters}
    return {name: (value.dtype, planned[name]) for name, value in read.items()}


def test_an_export_has_the_storage_dtypes_of_the_plan_and_loads_by_broadcast(
    ranks: Pool, tmp_path: Path
) -> None:
    for dtypes in ranks.run(exported, tmp_path / "model.safetensors"):
        assert all(written == planned for written, planned in dtypes.values())
        assert {written for written, _ in dtypes.values()} == {torch.bfloat16, torch.float32}
