"""The benchmark: its options, statistics and table, the layouts that it compares, and one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from annotate_fsdp import plan_annotated, plan_of
from annotate_fsdp.cli import main
from annotate_fsdp.introspect import gathered_bytes
from annotate_fsdp.lowering import CAN_FOLD
from annotate_fsdp.train import bench
from annotate_fsdp.train.bench import MP_POLICY, build, first_step, make_batch, prepare, remove_precision
from annotate_fsdp.train.bench_report import BenchReport, Measured, Spread, paired, spread
from annotate_fsdp.train.bench_settings import (
    LAYOUTS,
    BenchSettings,
    bench_models,
    check_bench,
    parse_layouts,
    read_bench,
)
from annotate_fsdp.train.settings import UsageError

MODELS = ("deepseek_v41", "islands", "step5")


def make_report(**changes: object) -> BenchReport:
    """A report of two layouts with round figures."""
    settings = BenchSettings(model="islands", rounds=3)
    counts = {"local_bytes": 1024, "peak_gathered_bytes": 2048}
    unit = Measured(
        units=30, all_gathers=59, reduce_scatters=30, steps=(0.2, 0.4, 0.8), shards=(0.3, 0.3), **counts
    )
    floor = Measured(
        units=5, all_gathers=9, reduce_scatters=5, steps=(0.1, 0.1, 0.4), shards=(0.1, 0.2), **counts
    )
    values = {"measured": {"unit": unit, "floor": floor}, "same_numbers": None, **changes}
    return BenchReport(settings, **values)  # type: ignore[arg-type]


def test_every_model_that_can_be_measured_is_tested() -> None:
    assert bench_models() == MODELS


def test_layouts_are_read_in_one_order_whatever_their_spelling() -> None:
    assert parse_layouts("by-hand, unit") == ("unit", "by hand")
    assert parse_layouts("unit,group,fold,floor,by-hand") == LAYOUTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step6"], "there is no model 'step6'; write one of deepseek_v41, islands, step5"),
        (["islands", "--ranks", "0"], "--ranks 0: write a number of at least 1"),
        (["islands", "--rounds", "-1"], "--rounds -1: write a number of at least 1"),
        (["islands", "--latency", "nan"], "--latency nan: write a number of milliseconds, at least 0"),
        (
            ["islands", "--layouts", "unit,flat"],
            "--layouts unit,flat: there is no layout 'flat'; write some of unit,group,fold,floor,by-hand",
        ),
        (["islands", "--json", "."], "--json .: that is a directory; write the name of a file"),
    ],
)
def test_wrong_options_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err == f"annotate-fsdp: error: {message}\n"


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "islands"]) == 2
    message = "annotate-fsdp: error: bench starts its own ranks; run it without torchrun\n"
    assert capsys.readouterr().err == message


def test_settings_survive_json() -> None:
    settings = BenchSettings(model="islands", latency=0.5, layouts=("unit", "by hand"))
    assert read_bench(json.loads(json.dumps(settings.to_dict()))) == settings
    check_bench(settings)
    with pytest.raises(UsageError, match=r"^--latency -1: write a number of milliseconds, at least 0$"):
        check_bench(BenchSettings(model="islands", latency=-1))


def test_spread_is_the_median_and_the_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ratios_pair_what_was_measured_in_one_round() -> None:
    assert paired([2.0, 8.0, 9.0], [1.0, 2.0, 3.0]) == Spread(3.0, 2.5, 3.5)
    report = make_report()
    assert report.ratio("unit", "floor", "steps") == Spread(2.0, 2.0, 3.0)
    assert report.ratio("unit", "by hand", "shards") is None


def test_report_is_a_table_of_at_most_100_columns() -> None:
    lines = str(make_report(not_available={"fold": "torch 2.14.0 (needs 2.15)"})).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[3:5] == [
        "unit       30          59              30    400.0    1.00     2.00      -     1 KiB     2 KiB",
        "floor       5           9               5    100.0    0.50     1.00      -     1 KiB     2 KiB",
    ]
    assert lines[-2:] == [
        "fold: not available: torch 2.14.0 (needs 2.15)",
        "same numbers: nothing to compare",
    ]
    assert str(make_report(same_numbers=True)).endswith("same numbers: yes")
    assert str(make_report(same_numbers=False)).endswith("same numbers: NO")


def test_report_as_data_has_the_quartiles() -> None:
    layouts = json.loads(json.dumps(make_report().to_dict()))["layouts"]
    assert layouts["floor"]["step_to_unit"] == {"median": 0.5, "lower": 0.375, "upper": 0.5}
    assert layouts["unit"]["shard_to_by_hand"] is None


@pytest.mark.parametrize("name", MODELS)
def test_floor_computes_nothing_in_fp32(name: str) -> None:
    model = build(name)
    remove_precision(model)
    plan = plan_annotated(model, world_size=2, mp_policy=MP_POLICY, lowering="unit")
    assert {dtype for unit in plan.units for dtype in unit.compute_dtypes} == {torch.bfloat16}
    marked = plan_annotated(build(name), world_size=2, mp_policy=MP_POLICY, lowering="unit")
    assert {unit.paths for unit in plan.units} < {unit.paths for unit in marked.units}
    assert set(plan.sequence) < set(marked.sequence)


@pytest.mark.parametrize("name", MODELS)
def test_layout_by_hand_is_that_of_the_plan(name: str, fake_world: Callable[..., None]) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    plan = plan_annotated(build(name), mesh, mp_policy=MP_POLICY, lowering="unit")
    sharding = prepare("by hand", build(name), mesh)
    sharding.shard()
    assert plan_of(sharding.model) == plan


def test_gathered_bytes_are_those_of_the_units_that_hold_their_whole_parameters(
    fake_world: Callable[..., None],
) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    sharding = prepare("group", build("islands"), mesh)
    assert gathered_bytes(sharding.model) == 0
    sharding.shard()
    assert gathered_bytes(sharding.model) == 0
    first_step(sharding.model, make_batch("islands", 0, 2))
    sharding.model.blocks[0].norm1.unshard()  # type: ignore[union-attr, index, operator]
    assert gathered_bytes(sharding.model) == 25 * 32 * 4
    sharding.model.blocks[0].unshard()  # type: ignore[union-attr, index, operator]
    assert gathered_bytes(sharding.model) == 25 * 32 * 4 + 2 * (32 + 1) * 32 * 2


def test_other_numbers_are_exit_code_1(
    fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_world(2)
    monkeypatch.setattr(bench, "measure", lambda *_: make_report(same_numbers=False))
    file = tmp_path / "bench.json"
    settings = BenchSettings(model="islands", json=str(file))
    assert bench.bench_rank(settings.to_dict()) == 1
    assert json.loads(file.read_text())["same_numbers"] is False


def test_digest_of_a_step_sees_one_bit_of_the_weights(fake_world: Callable[..., None]) -> None:
    fake_world(1)
    batch = make_batch("islands", 0, 1)
    model, other = build("islands"), build("islands")
    assert first_step(model, batch) == first_step(other, batch)
    weight = other.get_parameter("norm.weight")
    with torch.no_grad():
        weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))
    assert first_step(model, batch) != first_step(other, batch)


@pytest.mark.slow
def test_islands_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "islands", "--ranks", "2", "--rounds", "3", "--json", str(file)]) == 0
    assert "same numbers: yes" in capfd.readouterr().out
    figures = json.loads(file.read_text())
    calls = {
        name: (one["units"], one["all_gathers"], one["reduce_scatters"])
        for name, one in figures["layouts"].items()
    }
    expected = {
        "unit": (30, 59, 30),
        "group": (6, 10, 6),
        "fold": (5, 9, 5),
        "floor": (5, 9, 5),
        "by hand": (30, 59, 30),
    }
    if not CAN_FOLD:
        del expected["fold"]
    assert calls == expected
    assert ("fold" in figures["not_available"]) is not CAN_FOLD
    assert figures["same_numbers"] is True
    layouts = figures["layouts"]
    assert len({one["local_bytes"] for one in layouts.values()}) == 1
    assert layouts["unit"]["peak_gathered_bytes"] == layouts["by hand"]["peak_gathered_bytes"] > 0
    assert layouts["unit"]["step_to_unit"] == {"median": 1.0, "lower": 1.0, "upper": 1.0}
    assert layouts["by hand"]["shard_to_by_hand"]["median"] == 1.0


@pytest.mark.slow
def test_latency_weighs_on_every_collective(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--rounds", "1", "--latency", "20", "--layouts", "group,floor", "--json", str(file)]
    assert main(["bench", "islands", *options]) == 0
    layouts = json.loads(file.read_text())["layouts"]
    for one in layouts.values():
        assert one["step_ms"]["median"] > 20 * (one["all_gathers"] + one["reduce_scatters"])
