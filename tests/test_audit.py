"""The audit: predicted, read back, held against the plan; and its text."""

from __future__ import annotations

import gc
import json
import re
import time
from typing import Any

import pytest
import torch
from pool import Pool, fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from annotate_fsdp import AuditReport, audit, fsdp_unit, plan_annotated, shard_annotated
from annotate_fsdp.models.step5 import Step5Config, Step5ForCausalLM
from annotate_fsdp.plan import human_bytes
from annotate_fsdp.render import human_count, printable, render_units

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@fsdp_unit(policy="fp32")
class Norm(nn.LayerNorm):
    pass


@fsdp_unit
class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = Norm(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers: int = 3, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


PREDICTED = """\
FSDP audit of Model on 4 ranks: predicted
344 parameters in 7 units; stored: fp32 1.3 KiB; on each of 4 ranks 360 B after sharding (4% of it
padding)
collectives of one step: 13 all-gathers, 7 reduce-scatters
largest gathered unit: (root) with 192 B

unit                          n class         from    store comp red  out  resh params  B/rank coll
-------------------------- ---- ------------- ------- ----- ---- ---- ---- ---- ------ ------- ----
layers.{0-2}.norm             3 Norm          class   fp32  fp32 fp32 bf16 yes      16     16B    3
layers.{0-2}                  3 Block         class   fp32  bf16 fp32 -    yes      72     72B    3
(root)                        1 Model         default fp32  bf16 fp32 -    no       80     96B    2

findings: none"""


def test_the_prediction_reads_as_text_without_a_process_group() -> None:
    with torch.device("meta"):
        model = Model()
    assert str(audit(model, world_size=4, mp_policy=BF16, lowering="unit")) == PREDICTED


def test_bytes_per_rank_count_the_padding_of_dimension_zero() -> None:
    unit = plan_annotated(Model(), world_size=4, lowering="unit").unit("")
    assert unit.sharded_bytes() == 3 * 8 * 4  # 10 rows on 4 ranks: 3 rows of 8 fp32 values each
    assert unit.gathered_bytes() == 4 * 3 * 8 * 4
    assert plan_annotated(Model(), lowering="unit").unit("").sharded_bytes() == 10 * 8 * 4


def test_every_line_fits_100_columns_whatever_the_names() -> None:
    class AModuleWithAVeryLongClassNameIndeed(nn.Linear):
        pass

    model = nn.Sequential()
    inner: nn.Module = model
    for depth in range(12):
        child = nn.Sequential()
        inner.add_module(f"a_rather_long_attribute_name_{depth}", child)
        inner = child
    inner.add_module("leaf", fsdp_unit(AModuleWithAVeryLongClassNameIndeed(4, 4)))
    report = audit(
        model.bfloat16(),
        world_size=64,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32),
        lowering="unit",
    )
    lines = str(report).splitlines()
    assert report.warnings
    assert max(map(len, lines)) <= 100
    assert any("leaf" in line for line in lines)


def test_names_cannot_steer_the_terminal() -> None:
    model = nn.Sequential()
    model.add_module("evil\x1b[31m", fsdp_unit(nn.Linear(2, 2)))
    text = str(audit(model, lowering="unit"))
    assert "\x1b" not in text
    assert r"evil\x1b[31m" in text


def test_after_sharding_the_report_says_that_it_went_as_planned() -> None:
    with fake_group(2):
        model = shard_annotated(Model(), init_device_mesh("cpu", (2,)), mp_policy=BF16, lowering="unit")
        report = audit(model, lowering="unit")
        assert report.findings == ()
        assert report.actual == report.plan
        assert "sharded as planned" in str(report).splitlines()[0]


def shard_by_hand(model: Model, *, norm_dtype: torch.dtype, skip: int = -1) -> Model:
    mesh = init_device_mesh("cpu", (2,))
    for index, layer in enumerate(model.layers):
        if index != skip:
            policy = MixedPrecisionPolicy(norm_dtype, norm_dtype, output_dtype=torch.bfloat16)
            fully_shard(layer.norm, mesh=mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    return model


def test_a_model_sharded_by_hand_is_held_against_its_marks() -> None:
    with fake_group(2):
        assert audit(shard_by_hand(Model(), norm_dtype=torch.float32), mp_policy=BF16).findings == ()
        missing = audit(
            shard_by_hand(Model(), norm_dtype=torch.float32, skip=1), mp_policy=BF16, lowering="unit"
        )
        assert [str(finding) for finding in missing.errors] == [
            "AF901 error at layers.1.norm: the plan (here) against FSDP2's state (there), but a unit here, "
            "none there. Shard with shard_annotated only, after every change to the model.",
            "AF901 error at layers.1: the plan (here) against FSDP2's state (there), but parameters is none "
            "besides here, layers.1.norm.bias, layers.1.norm.weight there. "
            "Shard with shard_annotated only, after every change to the model.",
        ]
        wrong = audit(shard_by_hand(Model(), norm_dtype=torch.bfloat16), mp_policy=BF16, lowering="unit")
        assert {finding.path for finding in wrong.errors} == {f"layers.{i}.norm" for i in range(3)}
        assert "otherwise than planned" in str(wrong).splitlines()[0]


def test_a_storage_dtype_that_changed_after_sharding_is_a_warning() -> None:
    with fake_group(2):
        model = shard_annotated(
            Model(layers=1), init_device_mesh("cpu", (2,)), mp_policy=BF16, lowering="unit"
        )
        model.to(torch.bfloat16)
        codes = {(finding.code, finding.path) for finding in audit(model, lowering="unit").warnings}
        assert ("AF902", "layers.0.norm.weight") in codes


def test_an_optimizer_built_before_sharding_is_an_error() -> None:
    with fake_group(2):
        model = Model()
        stale = torch.optim.SGD(model.parameters(), lr=0.1)
        assert audit(model, optimizer=stale, lowering="unit").findings == ()
        shard_annotated(model, init_device_mesh("cpu", (2,)), mp_policy=BF16, lowering="unit")
        assert [str(finding) for finding in audit(model, optimizer=stale, lowering="unit").errors] == [
            "AF502 error at the root module: SGD with 13 parameters, but 13 of them are not the model's, so "
            "its weights would never change. Build the optimizer after shard_annotated."
        ]
        assert (
            audit(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lowering="unit").findings
            == ()
        )


def test_findings_are_reported_and_not_raised() -> None:
    model = Model()
    model.layers[0].scale = nn.Parameter(torch.tensor(1.0))
    model.__fsdp_dytpe__ = torch.float32
    report = audit(model, lowering="unit")
    assert [(finding.code, finding.path) for finding in report.errors] == [
        ("AF106", ""),
        ("AF202", "layers.0.scale"),
    ]
    assert not report.ok
    assert "findings: 2 error" in str(report)


def test_findings_alike_but_for_a_number_are_shown_once() -> None:
    report = audit(
        Model(layers=12).bfloat16(),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        lowering="unit",
    )
    assert len(report.warnings) == 12
    assert str(report).count("AF501") == 1
    assert "(and 11 more like it)" in " ".join(str(report).split())


def test_an_option_without_meaning_is_a_finding_too() -> None:
    report = audit(Model(), existing="keeep", lowering="unit")  # type: ignore[arg-type]  # the mistake under test
    assert [(finding.code, finding.declared) for finding in report.errors] == [("AF108", "existing='keeep'")]


def test_an_option_that_does_not_exist_is_a_finding_too() -> None:
    report = audit(Model(), reshard_after=True, lowering="unit")  # type: ignore[call-arg]  # the mistake under test
    assert [str(finding) for finding in report.errors] == [
        "AF108 error at the root module: reshard_after=True, but there is no such option. Did you mean "
        "reshard_after_forward? Write one of mp_policy, offload_policy, reshard_after_forward, "
        "ignored_params, dp_mesh_dims, policies, lowering, merge_below, group_bytes, prefetch, existing, "
        "check_ranks."
    ]


def test_json_holds_what_the_text_says() -> None:
    data: dict[str, Any] = json.loads(audit(Model(), world_size=4, mp_policy=BF16, lowering="unit").to_json())
    assert data["schema"] == "annotate_fsdp.audit/1"
    assert data["state"] == "predicted"
    assert data["plan"]["mesh"] == [1, 4]
    assert data["plan"]["collectives"] == {"all_gather": 13, "reduce_scatter": 7, "all_reduce": 0}
    norm = data["plan"]["units"][0]
    assert norm["paths"] == ["layers.0.norm"]
    assert norm["class_names"] == ["Norm"]
    assert norm["policy"] == {
        "param_dtype": "fp32",
        "reduce_dtype": "fp32",
        "output_dtype": "bf16",
        "cast_forward_inputs": True,
    }
    assert norm["sharded_bytes"] == 16


def test_the_released_step5_is_audited_whole() -> None:
    with torch.device("meta"):
        model = Step5ForCausalLM(Step5Config.released()).to_storage(torch.bfloat16)
    report = audit(model, world_size=1024, mp_policy=BF16, lowering="unit")
    assert report.findings == ()
    assert report.plan.numel == 598_476_021_504
    assert len(report.plan.units) == 533 == 69 * 5 + 23 * 8 + 4
    assert max(map(len, str(report).splitlines())) <= 100
    assert len(str(report).splitlines()) < 60


def read_back() -> tuple[str, bool]:
    model = shard_annotated(Model(), init_device_mesh("cpu", (2,)), mp_policy=BF16, lowering="unit")
    model(torch.zeros(2, 3, dtype=torch.long)).float().sum().backward()
    report = audit(model, lowering="unit")
    return str(report).splitlines()[0], report.ok


def test_after_a_real_step_the_state_is_still_as_planned(ranks: Pool) -> None:
    assert ranks.run(read_back) == [("FSDP audit of Model on 2 ranks: sharded as planned", True)] * 2


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (16 * 1024, "16 KiB"), (3 * 1024**4, "3 TiB")],
)
def test_bytes_are_written_with_binary_units(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (598_476_021_504, "598G"), (1e13, "10T")]
)
def test_counts_are_written_with_decimal_suffixes(count: float, text: str) -> None:
    assert human_count(count) == text


def test_control_characters_are_written_out() -> None:
    assert printable("a\nb\tc") == r"a\nb\tc"


def test_layers_with_a_step_and_with_gaps_are_folded() -> None:
    model = nn.Sequential(*(Norm(4 if i % 4 == 3 else 8) for i in range(12)))
    assert [
        line.split()[0] for line in render_units(plan_annotated(model, lowering="unit")).splitlines()[2:]
    ] == [
        "{0-2,4-6,8-10}",
        "{3-11:4}",
        "(root)",
    ]


def test_the_keys_of_the_json_are_the_documented_ones() -> None:
    model = Model()
    model.layers[0].norm.bfloat16()
    data = json.loads(audit(model, world_size=4, mp_policy=BF16).to_json())
    documented = re.findall(r"^ *- ([\w, ]+): |; (\w+): ", AuditReport.to_dict.__doc__ or "", re.MULTILINE)
    assert list(data) == [first or second for first, second in documented]
    assert set(data["findings"][0]) == {"code", "severity", "path", "declared", "wrong", "write"}


@pytest.mark.slow
def test_the_audit_of_many_units_takes_little_longer_for_each() -> None:
    def seconds(layers: int) -> float:
        with torch.device("meta"):
            model = Model(layers)
        start = time.process_time()
        report = audit(model, world_size=64, mp_policy=BF16)
        assert len(report.to_json()) > len(str(report)) > 100
        return time.process_time() - start

    gc.collect()
    gc.disable()  # as timeit does: a collection's cost is that of all the tests before
    try:
        few, many = (min(seconds(layers) for _ in range(3)) for layers in (250, 2000))
    finally:
        gc.enable()
    assert many < 2 * 8 * few, (few, many)
    assert many < 10, many
