"""Measure what a layout costs: the same model, weights and data under each, in alternating rounds."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from annotate_fsdp import UnitSpec, fsdp_off, plan_annotated, plan_of, shard_annotated
from annotate_fsdp.collect import collect_tree
from annotate_fsdp.collectives import Kind
from annotate_fsdp.introspect import gathered_bytes
from annotate_fsdp.lowering import CAN_FOLD
from annotate_fsdp.probes import Call, CountCollectives, before_collectives
from annotate_fsdp.train.batches import Batch, rank_rows, run_batch
from annotate_fsdp.train.bench_report import BenchReport, Measured, needs_newer_torch
from annotate_fsdp.train.bench_settings import (
    BY_HAND,
    FLOOR,
    FOLD,
    ISLANDS,
    SAME_NUMBERS,
    UNIT,
    BenchSettings,
    read_bench,
)
from annotate_fsdp.train.by_hand import calls_by_hand, shard_by_hand
from annotate_fsdp.train.files import write_atomically
from annotate_fsdp.train.islands import Islands, RandomTokens
from annotate_fsdp.train.loop import full_tensor
from annotate_fsdp.train.registry import find_model, find_source

JOB = "annotate_fsdp.train.bench:bench_rank"
SEED = 0
ROWS_PER_RANK = 4
LENGTH = 16
SHARD_REPEATS = 5
MP_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def bench_rank(argument: dict[str, Any]) -> int:
    """Run one rank of a benchmark; return the exit code: 1 if layouts do not compute the same numbers."""
    settings = read_bench(argument)
    mesh = init_device_mesh("cpu", (settings.ranks,), mesh_dim_names=("fsdp",))
    report = measure(settings, mesh)
    if dist.get_rank() == 0:
        print(report, flush=True)
        if settings.json is not None:
            write_atomically(settings.json, json.dumps(report.to_dict(), indent=1))
    return 1 if report.same_numbers is False else 0


def measure(settings: BenchSettings, mesh: DeviceMesh) -> BenchReport:
    """Measure every layout that is available; all ranks return the same report."""
    missing = {FOLD: needs_newer_torch()} if FOLD in settings.layouts and not CAN_FOLD else {}
    names = [name for name in settings.layouts if name not in missing]
    batch = make_batch(settings.model, mesh.get_local_rank(), mesh.size())
    models = {name: prepare(name, build(settings.model), mesh) for name in names}
    for sharding in models.values():
        sharding.shard()
    numbers = {name: first_step(one.model, batch) for name, one in models.items() if name in SAME_NUMBERS}
    same = _on_all_ranks(len(set(numbers.values())) == 1) if len(numbers) > 1 else None
    counted = {name: count_step(one.model, batch) for name, one in models.items()}
    calls = [sum(counts.values()) for counts, _ in counted.values()]
    steps = _largest(time_steps([one.model for one in models.values()], batch, settings, calls))
    shards = _largest(time_sharding(settings.model, names, mesh))
    sizes = _largest([[local_bytes(models[name].model), counted[name][1]] for name in names])
    measured = {
        name: Measured(
            units=len(plan_of(models[name].model)),
            all_gathers=counted[name][0]["all_gather"],
            reduce_scatters=counted[name][0]["reduce_scatter"],
            local_bytes=int(sizes[position][0]),
            peak_gathered_bytes=int(sizes[position][1]),
            steps=tuple(steps[position]),
            shards=tuple(shards[position]),
        )
        for position, name in enumerate(names)
    }
    return BenchReport(settings, measured, same, missing)


@dataclass(frozen=True)
class Sharding:
    """A model, and the call that shards it."""

    model: nn.Module
    shard: Callable[[], object]


def build(name: str) -> nn.Module:
    """Build a model at its tiny configuration, its weights the same on every call and rank."""
    torch.manual_seed(SEED)
    return Islands() if name == ISLANDS else find_model(name).build("tiny", "fp32")


def make_batch(name: str, rank: int, ranks: int) -> Batch:
    """Return this rank's rows of the one global batch that every step computes."""
    rows = rank_rows(ROWS_PER_RANK * ranks, rank, ranks)
    if name == ISLANDS:
        return RandomTokens(LENGTH).train(SEED, 0, rows)
    return find_source(find_model(name), "tiny", False, LENGTH).train(SEED, 0, rows)


def prepare(layout: str, model: nn.Module, mesh: DeviceMesh) -> Sharding:
    """Return the model with what the layout asks for done to it, but for the sharding."""
    if layout == BY_HAND:
        plan = plan_annotated(model, mesh, mp_policy=MP_POLICY, lowering=UNIT)
        calls = calls_by_hand(model, plan)

        def by_hand() -> None:
            shard_by_hand(calls, mesh)

        return Sharding(model, by_hand)
    if layout == FLOOR:
        remove_precision(model)
    lowering = UNIT if layout == FLOOR else layout
    return Sharding(model, lambda: shard_annotated(model, mesh, mp_policy=MP_POLICY, lowering=lowering))


def remove_precision(model: nn.Module) -> None:
    """Cancel every mark that says anything about dtypes, so that the unit around takes the parameters."""
    for node in collect_tree(model).nodes:
        if isinstance(node.mark, UnitSpec) and node.mark.names_precision:
            fsdp_off(node.module)


def run_step(model: nn.Module, batch: Batch) -> Tensor:
    """Run forward and backward; return the loss."""
    losses, _ = run_batch(model, batch)
    loss = losses.mean()
    torch.autograd.backward(loss)
    return loss.detach()


def first_step(model: nn.Module, batch: Batch) -> str:
    """Run a step; return a digest of every bit of its loss and of its full gradients."""
    digest = hashlib.blake2b(_bytes(run_step(model, batch)))
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        if parameter.grad is not None:
            digest.update(_bytes(full_tensor(parameter.grad)))
    model.zero_grad()
    return digest.hexdigest()


def count_step(model: nn.Module, batch: Batch) -> tuple[Counter[str], int]:
    """Run a step; return its collectives by kind, and the most bytes that were gathered at one time.

    What is gathered is looked at before every collective and around the forward of every unit.
    """
    counts: Counter[str] = Counter()
    peak = 0

    def look(*_: object) -> None:
        nonlocal peak
        peak = max(peak, gathered_bytes(model))

    def count(call: Call) -> None:
        counts[call.kind] += 1
        look()

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                assert isinstance(module, nn.Module)
                stack.callback(module.register_forward_pre_hook(look).remove)
                # before FSDP2's own hook, which frees
                stack.callback(module.register_forward_hook(look, prepend=True).remove)
        with CountCollectives(count):
            run_step(model, batch)
    model.zero_grad()
    return counts, peak


def time_steps(
    models: list[nn.Module], batch: Batch, settings: BenchSettings, calls: list[int]
) -> list[list[float]]:
    """Return the seconds of each model's step in each round; every round begins with another model.

    Args:
        models: sharded.
        batch: this rank's.
        settings: how many rounds, and how long each collective waits.
        calls: how many collectives each model's step makes.

    Raises:
        AssertionError: another number of collectives waited.
    """
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(settings.rounds):
        for position in _rotated(len(models), turn):
            with _timed(seconds[position]), _delay(settings.latency) as waited:
                run_step(models[position], batch)
            assert not settings.latency or len(waited) == calls[position], "not every collective waited"
            models[position].zero_grad()
    return seconds


def time_sharding(name: str, layouts: list[str], mesh: DeviceMesh) -> list[list[float]]:
    """Return the seconds that each layout takes to shard a fresh model, some times over.

    Raises:
        AssertionError: the layout by hand is not that of `lowering="unit"`.
    """
    seconds: list[list[float]] = [[] for _ in layouts]
    for turn in range(SHARD_REPEATS):
        for position in _rotated(len(layouts), turn):
            sharding = prepare(layouts[position], build(name), mesh)
            gc.collect()
            with _timed(seconds[position]):
                sharding.shard()
            if layouts[position] == BY_HAND and turn == 0:
                plan = plan_annotated(build(name), mesh, mp_policy=MP_POLICY, lowering=UNIT)
                assert plan_of(sharding.model) == plan, "the layout by hand is another one"
    return seconds


def local_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters that this rank stores."""
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(shard.numel() * shard.element_size() for shard in shards)


def _rotated(size: int, turn: int) -> list[int]:
    return [(position + turn) % size for position in range(size)]


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    """Append how long the block takes, from when all ranks are there."""
    dist.barrier()
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)


@contextmanager
def _delay(milliseconds: float) -> Iterator[list[Kind]]:
    """Wait before each collective; gives the list of those that waited."""
    waited: list[Kind] = []

    def wait(kind: Kind) -> None:
        time.sleep(milliseconds / 1e3)
        waited.append(kind)

    with before_collectives(wait) if milliseconds else nullcontext():
        yield waited


def _largest(values: list[list[float]]) -> list[list[float]]:
    """Return the largest over the ranks of each value."""
    table = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    result: list[list[float]] = table.tolist()
    return result


def _on_all_ranks(holds: bool) -> bool:
    word = torch.tensor(int(holds))
    dist.all_reduce(word, dist.ReduceOp.MIN)
    return bool(word.item())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
