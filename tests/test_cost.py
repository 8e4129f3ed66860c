"""Time and memory of a step: formulas against literals, and predictions against real ranks."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from torch import bfloat16, float32, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from annotate_fsdp import (
    AnnotationError,
    Collective,
    Collectives,
    Plan,
    Step,
    fsdp_unit,
    plan_annotated,
    plan_of,
    shard_annotated,
)
from annotate_fsdp.cost import gathered_bytes, padding_bytes, peak_gathered_bytes, plan_cost, step_time
from annotate_fsdp.links import LINKS, Line, Link, Point, Sample, Seconds, fit_link, moved_fraction

H100X8 = LINKS["h100x8"]
BF16 = MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def line(kind: Any, latency: float, bandwidth: float, **options: Any) -> Line:
    return Line(kind, (Point(2, latency, bandwidth),), **options)


#: 1 ms and 1 MB/s for all-gathers; reduce-scatters take twice that, all-reduces four times.
PLAIN = Link("plain", tuple(line(kind, 1e-3 * n, 1e6 / n) for kind, n in zip(KINDS, (1, 2, 4), strict=True)))


def call(kind: Any, numel: int, ranks: int = 2, unit: str = "", phase: Any = "forward") -> Collective:
    return Collective(kind, unit, phase, float32, numel, ranks)


# -- formulas --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks", "fraction"),
    [("all_gather", 2, 0.5), ("reduce_scatter", 4, 0.75), ("all_reduce", 4, 1.5), ("all_gather", 1, 0.0)],
)
def test_a_rank_moves_what_it_does_not_hold(kind: Any, ranks: int, fraction: float) -> None:
    assert moved_fraction(kind, ranks) == fraction


@pytest.mark.parametrize(
    ("kind", "size", "ranks", "latency", "transfer"),
    [
        ("all_gather", 4_000, 4, 1e-3, 3e-3),  # 3000 bytes at 1 MB/s
        ("reduce_scatter", 4_000, 4, 2e-3, 6e-3),
        ("all_reduce", 4_000, 4, 4e-3, 24e-3),  # 6000 bytes at 250 kB/s
        ("all_gather", 0, 4, 1e-3, 0.0),
        ("all_gather", 4_000, 1, 0.0, 0.0),
    ],
)
def test_one_collective_is_latency_and_moved_bytes(
    kind: Any, size: int, ranks: int, latency: float, transfer: float
) -> None:
    seconds = PLAIN.seconds(kind, size, ranks)
    assert (seconds.latency, seconds.transfer) == pytest.approx((latency, transfer))
    assert seconds.total == pytest.approx(latency + transfer)


@pytest.mark.parametrize(
    ("kind", "size", "ranks", "latency", "transfer"),
    [
        # One node: 30 us, and 394 MB of the whole buffer in 1 ms.
        ("all_gather", 394_000_000, 8, 30e-6, 1e-3),
        ("reduce_scatter", 537_000_000, 2, 8e-6, 1e-3),
        ("all_gather", 434_000_000, 4, 17e-6, 1e-3),
        # 8 nodes: LL for small buffers, Simple for large ones.
        ("all_gather", 2_070_000, 64, 81.5e-6, 1e-4),
        ("all_gather", 390_100_000, 64, 296.8e-6, 1e-3),
        # 1024 ranks: 81.5 + 120 x 9.7 us, and 296.8 + 120 x 37.8 us; the same bytes moved per second.
        ("reduce_scatter", 1024, 1024, 1245.5e-6, 1023 / (20.7e9 * 63 / 64)),
        ("reduce_scatter", 10**9, 1024, 4832.8e-6, 1e9 * 1023 / 1024 / (390.1e9 * 63 / 64)),
        # 8 replicas of a shard, one GPU a node each.
        ("all_reduce", 27_400_000, 8, 204.4e-6, 1e-3),
        ("all_reduce", 1024, 8, 76.6e-6, 1024 / 11.7e9),
    ],
)
def test_h100_figures(kind: Any, size: int, ranks: int, latency: float, transfer: float) -> None:
    seconds = H100X8.seconds(kind, size, ranks)
    assert (seconds.latency, seconds.transfer) == pytest.approx((latency, transfer))


@pytest.mark.parametrize(
    ("protocol", "latency", "gigabytes"), [("LL", 314.3e-6, 20.5), ("Simple", 1204.0e-6, 385.5)]
)
def test_extrapolated_nodes_meet_the_sources_own_figures_at_32(
    protocol: str, latency: float, gigabytes: float
) -> None:
    (found,) = (one for one in H100X8.lines if one.protocol == protocol and one.kind == "all_gather")
    point = found.at(256)
    assert point.latency == pytest.approx(latency, rel=1e-3)
    assert point.bandwidth == pytest.approx(gigabytes * 1e9 * 255 / 256, rel=5e-3)


def test_between_fitted_ranks_latency_and_time_per_byte_are_straight() -> None:
    two = Line("all_gather", (Point(2, 10e-6, 4e9), Point(6, 30e-6, 2e9)))
    assert (two.at(4).latency, two.at(4).bandwidth) == pytest.approx((20e-6, 1 / (0.125e-9 + 0.25e-9)))
    assert (two.at(8).latency, two.at(8).bandwidth) == pytest.approx((40e-6, 2e9))
    falling = Line("all_gather", (Point(2, 30e-6, 4e9), Point(6, 10e-6, math.inf)))
    assert falling.at(64) == Point(64, 0.0, math.inf)


def test_the_faster_protocol_is_taken() -> None:
    link = Link("two", (line("all_gather", 1e-6, 1e6), line("all_gather", 1e-3, 1e9)))
    assert link.seconds("all_gather", 2, 2).latency == 1e-6
    assert link.seconds("all_gather", 2_000_000, 2) == Seconds(1e-3, 1e-3)


def test_a_step_is_summed_by_phase_and_by_unit() -> None:
    time = step_time(
        Collectives(
            (
                call("all_gather", 100, unit="a"),  # 1 ms and 0.2 ms
                call("all_gather", 1000, unit="b"),  # 1 ms and 2 ms
                call("reduce_scatter", 100, unit="a", phase="backward"),  # 2 ms and 0.4 ms
            )
        ),
        PLAIN,
    )
    assert dict(time.phases)["forward"].total == pytest.approx(4.2e-3)
    assert dict(time.phases)["backward"].total == pytest.approx(2.4e-3)
    assert time.seconds.total == pytest.approx(6.6e-3)
    assert (time.seconds.latency, time.seconds.transfer) == pytest.approx((4e-3, 2.6e-3))
    assert time.calls == 3
    assert [(unit.unit, unit.calls, unit.seconds.total) for unit in time.units] == [
        ("a", 2, pytest.approx(3.6e-3)),
        ("b", 1, pytest.approx(3e-3)),
    ]
    assert [unit.unit for unit in time.latency_bound] == ["a"]


def test_no_collective_takes_no_time() -> None:
    time = step_time(Collectives(()), PLAIN)
    assert (time.seconds, time.units, time.calls) == (Seconds(), (), 0)


def test_a_plan_without_a_mesh_has_no_time() -> None:
    with pytest.raises(AnnotationError) as caught:
        plan_cost(plan_annotated(Model()), PLAIN)
    assert str(caught.value) == (
        "1 finding; nothing was sharded\n"
        "  AF108 error at the root module: all_gather of 0 ranks, but its ranks are not known. "
        "Plan with a mesh or with world_size=64."
    )


def test_a_kind_that_the_link_does_not_know_is_an_error() -> None:
    with pytest.raises(AnnotationError) as caught:
        Link("half", PLAIN.lines[:1]).seconds("all_reduce", 8, 2)
    assert str(caught.value) == (
        "1 finding; nothing was sharded\n"
        "  AF108 error at the root module: all_reduce of 2 ranks, but link half says nothing about it. "
        "Fit the link with samples of it."
    )


def test_links_are_found_by_name_and_know_every_kind_at_every_size_of_world() -> None:
    assert set(LINKS) == {"h100x8", "loopback"}
    for name, link in LINKS.items():
        assert link.name == name
        for kind in KINDS:
            for ranks in range(2, 1025):
                assert link.seconds(kind, 4096, ranks).total > 0  # type: ignore[arg-type]  # a kind


# -- properties ------------------------------------------------------------------------------------

kinds: Any = st.sampled_from(KINDS)
sizes = st.integers(0, 10**10)
worlds = st.integers(2, 2048)
links: Any = st.sampled_from([H100X8, PLAIN])


@settings(deadline=None)
@given(links, kinds, worlds, sizes, sizes)
def test_more_bytes_never_take_less_time(link: Link, kind: Any, ranks: int, a: int, b: int) -> None:
    small, large = sorted((a, b))
    assert link.seconds(kind, small, ranks).total <= link.seconds(kind, large, ranks).total


@settings(deadline=None)
@given(links, kinds, worlds, st.lists(sizes, min_size=1, max_size=5))
def test_a_merged_collective_takes_no_longer_than_its_parts(
    link: Link, kind: Any, ranks: int, parts: list[int]
) -> None:
    merged = link.seconds(kind, sum(parts), ranks).total
    assert merged <= sum(link.seconds(kind, part, ranks).total for part in parts) * (1 + 1e-12)


calls = st.builds(call, kinds, st.integers(0, 10**9), worlds, st.sampled_from("abc"))


@settings(deadline=None)
@given(links, st.lists(calls, max_size=5), calls)
def test_one_collective_more_never_takes_less_time(
    link: Link, some: list[Collective], more: Collective
) -> None:
    before, after = step_time(Collectives(tuple(some)), link), step_time(Collectives((*some, more)), link)
    assert after.seconds.total >= before.seconds.total
    assert after.calls == before.calls + 1
    assert sum(unit.seconds.total for unit in after.units) == pytest.approx(after.seconds.total)


@settings(max_examples=50, deadline=None)
@given(
    st.floats(1e-6, 1e-3),
    st.floats(1e8, 1e12),
    st.sampled_from([2, 8, 64]),
    kinds,
    st.integers(0, 2**32),
)
def test_a_fit_recovers_planted_constants_through_noise_and_outliers(
    latency: float, bandwidth: float, ranks: int, kind: Any, seed: int
) -> None:
    noise = random.Random(seed)
    corner = latency * bandwidth / moved_fraction(kind, ranks)  # latency and transfer weigh the same
    planted = Link("planted", (Line(kind, (Point(ranks, latency, bandwidth),)),))
    samples = [
        Sample(
            kind,
            size,
            ranks,
            planted.seconds(kind, size, ranks).total
            * noise.uniform(0.98, 1.02)
            * (50 if repeat % 5 == 0 else 1),  # every fifth is late
        )
        for size in [int(corner * 4.0**k) for k in range(-4, 5)]
        for repeat in range(15)
    ]
    ((found,),) = (one.points for one in fit_link(samples, "fitted").lines)
    assert found.ranks == ranks
    assert found.latency == pytest.approx(latency, rel=0.05)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.05)


def test_a_fit_has_neither_negative_latency_nor_negative_bandwidth() -> None:
    steep = [Sample("all_gather", size, 2, seconds) for size, seconds in [(100, 1e-6), (200, 4e-6)]]
    ((point,),) = (one.points for one in fit_link(steep, "steep").lines)
    assert point.latency == 0.0
    assert 0 < point.bandwidth < math.inf
    falling = [Sample("all_gather", size, 2, seconds) for size, seconds in [(100, 2e-6), (200, 1e-6)]]
    ((point,),) = (one.points for one in fit_link(falling, "falling").lines)
    assert 1e-6 < point.latency < 2e-6
    assert point.bandwidth == math.inf


def test_each_kind_and_number_of_ranks_is_fitted_by_itself() -> None:
    samples = [
        Sample(kind, size, ranks, PLAIN.seconds(kind, size, ranks).total)
        for kind in ("all_gather", "all_reduce")
        for ranks in (4, 2)
        for size in (100, 1000, 10_000)
    ]
    fitted = fit_link(samples, "fitted")
    assert [(one.kind, [point.ranks for point in one.points]) for one in fitted.lines] == [
        ("all_gather", [2, 4]),
        ("all_reduce", [2, 4]),
    ]
    assert fitted.seconds("all_reduce", 4000, 3).total == pytest.approx(
        PLAIN.seconds("all_reduce", 4000, 3).total
    )


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "link x: no sample, but there is nothing to fit. Measure several sizes."),
        (
            [Sample("all_gather", 8, 2, 1e-3)],
            "link x: all_gather of 2 ranks in one size, but latency cannot be told from bandwidth. "
            "Measure several sizes.",
        ),
        (
            [Sample("all_gather", 8, 2, 0.0)],
            "link x: Sample(kind='all_gather', bytes=8, ranks=2, seconds=0.0), but it takes 2 ranks, some "
            "bytes and some time. Leave it out.",
        ),
    ],
)
def test_samples_that_cannot_be_fitted_are_an_error(samples: list[Sample], message: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        fit_link(samples, "x")
    assert str(caught.value).endswith(f"AF108 error at the root module: {message}")


# -- a plan's cost ---------------------------------------------------------------------------------


class Linear(nn.Linear):
    """Returns no view, about which FSDP2 would warn where it is a unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.0


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = fsdp_unit(nn.LayerNorm(dim), policy="fp32")
        self.up = Linear(dim, hidden)
        self.down = Linear(hidden, dim)
        fsdp_unit(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Units of different sizes: 3 blocks of a norm and two linears between an embedding and a head."""

    def __init__(self, dim: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.embed = fsdp_unit(nn.Embedding(13, dim))
        self.blocks = nn.ModuleList(Block(dim, 5 + 7 * index) for index in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = fsdp_unit(Linear(dim, 11, bias=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + 0.0


def test_peak_of_a_small_plan_by_hand() -> None:
    plan = plan_annotated(Model(blocks=1), world_size=2, mp_policy=BF16)
    sizes = {unit.path: unit.gathered_bytes() for unit in plan.units}
    assert sizes == {
        "embed": 14 * 6 * 2,
        "blocks.0.norm": 2 * 6 * 4,
        "blocks.0": (6 * 6 + 6 + 6 * 5 + 6) * 2,
        "head": 12 * 6 * 2,
        "": 2 * 6 * 2,
    }
    # In backward: the root, the block, the norm inside it, and the embedding ahead of its turn, which at
    # the end of a forward is done before the block and so comes after the norm.
    assert peak_gathered_bytes(plan) == 24 + 156 + 48 + 168
    assert peak_gathered_bytes(plan, Step(backward=False)) == 24 + 156 + 48
    assert max(gathered_bytes(plan), key=lambda pair: pair[1])[0].path == "blocks.0.norm"


def test_padding_is_what_is_stored_for_nothing() -> None:
    plan = plan_annotated(nn.Sequential(fsdp_unit(nn.Linear(3, 5))), world_size=4)
    # 5 rows of 3 and 5 elements on 4 ranks: 2 rows and 2 elements each, where 20 / 4 would do.
    assert padding_bytes(plan) == (2 * 3 + 2) * 4 - 20 * 4 // 4
    assert padding_bytes(plan_annotated(nn.Sequential(fsdp_unit(nn.Linear(3, 5))))) == 0


def test_the_cost_of_a_plan_is_data() -> None:
    plan = plan_annotated(Model(blocks=1), world_size=2, mp_policy=BF16)
    cost = plan_cost(plan, PLAIN)
    data = cost.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert (data["units"], data["collectives"]) == (5, len(plan.collectives()))
    assert data["peak_gathered_bytes"] == peak_gathered_bytes(plan)
    assert data["padding_bytes"] == padding_bytes(plan)
    assert data["seconds"]["total"] == pytest.approx(
        data["phases"]["forward"]["total"] + data["phases"]["backward"]["total"]
    )
    assert data["latency_bound_units"] == list(data["by_unit"])
    assert cost == plan_cost(plan, PLAIN)


# -- gathered bytes on real ranks ------------------------------------------------------------------


def as_it_is(model: Model) -> None:
    pass


def kept_gathered(model: Model) -> None:
    for block in model.blocks:
        fsdp_unit(block, reshard_after_forward=False)


def grouped(model: Model) -> None:
    for block in model.blocks:
        fsdp_unit(block.up, group="linears")
        fsdp_unit(block.down, group="linears")


def grouped_and_kept(model: Model) -> None:
    for block in model.blocks:
        fsdp_unit(block.up, group="linears", reshard_after_forward=False)
        fsdp_unit(block.down, group="linears", reshard_after_forward=False)


def frozen(model: Model) -> None:
    model.blocks[1].requires_grad_(False)


def frozen_beginning(model: Model) -> None:
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)


def resharding_root(model: Model) -> None:
    fsdp_unit(model, reshard_after_forward=True)


def checkpointed(model: Model) -> None:
    for index in range(3):
        model.blocks[index] = checkpoint_wrapper(model.blocks[index])


RECOMPUTED = Step(recomputed=("blocks.0", "blocks.1", "blocks.2"))
LAYOUTS: dict[str, tuple[Callable[[Model], None], dict[str, Any], Step]] = {
    "nested": (as_it_is, {}, Step()),
    "blocks kept": (kept_gathered, {}, Step()),
    "all kept": (as_it_is, {"reshard_after_forward": False}, Step()),
    "all but the last": (as_it_is, {"reshard_after_forward": "except_last"}, Step()),
    "grouped": (grouped, {}, Step()),
    "grouped and kept": (grouped_and_kept, {}, Step()),
    "frozen": (frozen, {}, Step()),
    "frozen beginning": (frozen_beginning, {}, Step()),
    "resharding root": (resharding_root, {}, Step()),
    "checkpointed": (checkpointed, {}, RECOMPUTED),
    "islands grouped": (as_it_is, {"lowering": "group"}, Step()),
    "islands folded": (as_it_is, {"lowering": "fold"}, Step()),
    "islands grouped, checkpointed": (checkpointed, {"lowering": "group"}, RECOMPUTED),
}


def groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for state in dict.fromkeys(states) for group in state._fsdp_param_groups]


def allocated(groups: list[FSDPParamGroup]) -> int:
    """Bytes of gathered parameters, of those gathered ahead, and of those kept by fewer ranks."""
    tensors = [
        tensor for group in groups for param in group.fsdp_params for tensor in param.all_gather_outputs
    ]
    tensors += [
        data
        for group in groups
        for param in group.fsdp_params
        if (data := getattr(param, "_sharded_post_forward_param_data", None)) is not None
    ]
    for group in groups:
        if (result := group._all_gather_result) is not None:
            tensors.append(result.all_gather_output)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    storages.pop(0, None)
    return sum(storage.nbytes() for storage in storages.values())


@contextmanager
def watched(groups: list[FSDPParamGroup], record: list[int]) -> Iterator[None]:
    """Note the bytes after everything that allocates or frees them."""
    names = ("unshard", "wait_for_unshard", "reshard")
    originals = {name: getattr(FSDPParamGroup, name) for name in names}

    def watching(original: Any) -> Any:
        def method(self: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            record.append(allocated(groups))
            return result

        return method

    try:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, watching(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)


def measure(model: nn.Module, plan: Plan, step: Step) -> tuple[int, int, list[int], list[int]]:
    """Predicted and measured peak of the second step; planned and real local bytes of every unit."""
    groups = groups_of(model)
    record: list[int] = []
    for _ in range(2):
        record.clear()
        with watched(groups, record):
            loss = model(torch.randint(11, (2, 4))).float().logsumexp(-1).mean()
            loss.backward()
        model.zero_grad()
    for group in groups:
        assert not any(param._sharded_local_tensor.is_meta for param in group.fsdp_params)
    local = [
        sum(param._sharded_param_data.untyped_storage().nbytes() for param in group.fsdp_params)
        for group in groups
    ]
    planned = [unit.sharded_bytes() for unit in plan.units if unit.members]
    return peak_gathered_bytes(plan, step), max(record), sorted(planned), sorted(local)


def measure_layouts(
    names: list[str], shape: tuple[int, ...], reshard: Any = None
) -> dict[str, tuple[int, int, list[int], list[int]]]:
    found = {}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for name in names:
        change, options, step = LAYOUTS[name]
        if reshard is not None:
            options = {**options, "reshard_after_forward": reshard}
        torch.manual_seed(0)
        model = Model()
        change(model)
        options = {"mp_policy": BF16, "lowering": "unit", **options}
        plan = plan_annotated(model, mesh, **options)
        shard_annotated(model, mesh, **options)
        found[name] = measure(model, plan, step)
    return found


def hold(found: dict[str, tuple[int, int, list[int], list[int]]]) -> None:
    for name, (predicted, measured, planned, local) in found.items():
        assert planned == local, name
        assert predicted == measured, f"{name}: predicted {predicted}, measured {measured} bytes"


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_peak_gathered_bytes_and_local_bytes_are_those_of_real_ranks(
    ranks: Pool, shape: tuple[int, ...]
) -> None:
    names = list(LAYOUTS) if shape == (2,) else ["nested", "grouped", "frozen", "islands folded"]
    for found in ranks.run(measure_layouts, names, shape, world=math.prod(shape)):
        assert list(found) == names
        hold(found)


def test_parameters_resharded_to_fewer_ranks_are_counted(ranks: Pool) -> None:
    for found in ranks.run(measure_layouts, ["nested"], (4,), 2, world=4):
        hold(found)


def by_hand() -> tuple[int, int, list[int], list[int]]:
    """Two modules in one call, the caller's own; the plan is read back."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Embedding(11, 6), *(Linear(6, 6) for _ in range(4)))
    fully_shard(model[1], mesh=mesh, reshard_after_forward=False)
    fully_shard([model[2], model[4]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return measure(model, plan_of(model), Step())


def test_a_model_sharded_by_hand_is_counted_alike(ranks: Pool) -> None:
    for found in ranks.run(by_hand):
        hold({"by hand": found})


# -- time on real ranks ----------------------------------------------------------------------------

#: Dimension, blocks: many small collectives, some middling ones, a few large ones.
CONFIGURATIONS = {"small": (16, 2), "middling": (160, 3), "large": (320, 2)}
CALIBRATED = [2**power for power in range(10, 23, 2)]
ROUNDS = 50


class Wide(nn.Module):
    """`blocks` units of 8 `dim` squared elements, each with a norm of its own."""

    def __init__(self, dim: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, 4 * dim) for _ in range(blocks))


def configured(name: str) -> Collectives:
    with torch.device("meta"):
        model = Wide(*CONFIGURATIONS[name])
    return plan_annotated(model, world_size=2, mp_policy=BF16, lowering="unit").collectives()


def runner(call: Collective) -> Callable[[], object]:
    """What runs one collective on this rank, its buffers made before."""
    whole = torch.zeros(call.numel, dtype=call.dtype)
    part = torch.zeros(call.numel // call.ranks, dtype=call.dtype)
    if call.kind == "all_gather":
        return lambda: dist.all_gather_single(whole, part)
    return lambda: dist.reduce_scatter_single(part, whole)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def calibrate_and_measure() -> tuple[list[Sample], dict[str, list[list[float]]]]:
    """Samples to fit, and in each round the time of every configuration's calls.

    All calls of a round, those to calibrate with and those to predict, come in a random order, the same on
    both ranks, so that all meet the same noise: a call is slower after one that used up the processor.
    """
    plans = {name: list(configured(name)) for name in CONFIGURATIONS}
    single = [Collective(k, "", "forward", float32, n // 4, 2) for k in KINDS[:2] for n in CALIBRATED]  # type: ignore[arg-type]  # kinds
    single *= 2
    runs = [(name, at, runner(call)) for name, calls in plans.items() for at, call in enumerate(calls)]
    runs += [("", at, runner(call)) for at, call in enumerate(single)]
    samples: list[Sample] = []
    times: dict[str, list[list[float]]] = {name: [] for name in plans}
    for _, _, run in runs:
        run()  # to warm up
    for index in range(ROUNDS):
        for name in plans:
            times[name].append([0.0] * len(plans[name]))
        for name, at, run in random.Random(index).sample(runs, len(runs)):
            if name:
                times[name][-1][at] = timed(run)
            else:
                samples.append(Sample(single[at].kind, single[at].bytes, 2, timed(run)))
    return samples, times


def usual(rounds: list[list[float]]) -> float:
    """Time of a configuration in which no call is held up: the sum of every call's median."""
    return sum(median(of_call) for of_call in zip(*rounds, strict=True))


@pytest.mark.slow
def test_a_fitted_link_predicts_plans_that_it_has_not_seen(ranks: Pool) -> None:
    samples, times = ranks.run(calibrate_and_measure, timeout=300)[0]
    link = fit_link(samples, "here")
    predicted = {name: step_time(configured(name), link).seconds.total for name in times}
    measured = {name: usual(rounds) for name, rounds in times.items()}
    ratios = {name: predicted[name] / measured[name] for name in times}
    assert all(0.7 <= ratio <= 1.3 for ratio in ratios.values()), ratios
    assert sorted(times, key=predicted.__getitem__) == sorted(times, key=measured.__getitem__)
