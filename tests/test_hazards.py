"""What torch runs, though not as meant: for each rule a bad case with its whole message, and a good one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp import audit, fsdp_unit, plan_annotated

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def unit(*modules: nn.Module) -> nn.Module:
    return fsdp_unit(nn.Sequential(*modules))


def findings(model: nn.Module, policy: MixedPrecisionPolicy | None = BF16) -> list[str]:
    return [str(finding) for finding in audit(model, mp_policy=policy).findings]


@pytest.mark.parametrize("lowering", ["unit", "auto"])
@pytest.mark.report(95)
def test_a_unit_with_most_of_the_model_is_mentioned(lowering: str) -> None:
    def large(rows: int) -> nn.Sequential:
        with torch.device("meta"):
            return nn.Sequential(unit(nn.Linear(1024, 16)), nn.Linear(1024, rows, bias=False))

    report = audit(large(50_000), lowering=lowering)
    assert [str(finding) for finding in report.findings] == [
        "AF110 info at the root module: a unit (default: the root is always a unit), but it "
        "holds 100% of the model, 195 MiB gathered at once. Mark more of the modules inside it, or "
        "the class of its repeated block."
    ]
    assert audit(large(10_000)).findings == ()


@pytest.mark.report(83)
def test_float8_weights_that_the_policy_casts_are_named() -> None:
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    linear.requires_grad_(False)
    model = nn.Sequential(unit(linear, nn.ReLU()), nn.Linear(4, 4))
    model[0].extra = nn.Linear(4, 4).requires_grad_(False)
    assert findings(model) == [
        "AF504 warning at 0.0.weight: stored in fp8 in unit 0, but forward sees it cast to bf16, without its "
        "scale. Mark its module with @fsdp_unit(policy=MixedPrecisionPolicy()), or store its bits as uint8."
    ]
    assert findings(model, None) == []
    fsdp_unit(linear, policy=MixedPrecisionPolicy())
    assert findings(model) == []
    del linear.__fsdp_unit__
    linear.weight = nn.Parameter(linear.weight.view(torch.uint8), requires_grad=False)
    assert findings(model) == []


@pytest.mark.report(19)
def test_an_output_that_the_unit_around_rounds_is_named() -> None:
    rounded = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    model = nn.Sequential(unit(nn.Linear(4, 4)), fsdp_unit(nn.Linear(4, 4), policy="fp32"))
    assert findings(model, rounded) == []  # its output is cast back anyway
    fsdp_unit(model[1], policy="fp32", output_dtype=torch.float32)
    assert findings(model, rounded) == [
        "AF505 warning at 1: output_dtype=torch.float32, but the unit around it, (root), "
        "casts what it returns to bf16. Give (root) output_dtype=torch.float32, or none, unless this "
        "output stays inside it."
    ]
    assert findings(model) == []
    fsdp_unit(model[1], policy=MixedPrecisionPolicy(output_dtype=torch.float32))
    assert [text[:5] for text in findings(model, rounded)] == ["AF505"]
    inner = nn.Sequential(unit(nn.Linear(4, 4), fsdp_unit(nn.Linear(4, 4), output_dtype=torch.float32)))
    assert findings(inner, rounded) == []  # the block around it returns what it likes


@pytest.mark.report(85)
def test_statistics_that_do_not_fit_their_module_are_named() -> None:
    model = nn.Sequential(unit(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    expected = (
        "AF506 warning at 0.1.{}: a buffer in fp32, but its module computes in bf16 (unit 0); FSDP2 casts no "
        "buffers. Mark BatchNorm1d with the policy of its buffers."
    )
    assert findings(model) == [expected.format(name) for name in ("running_mean", "running_var")]
    fsdp_unit(model[0][1], policy="fp32")
    assert findings(model) == []


def test_buffers_below_the_compute_dtype_are_named() -> None:
    model = nn.Sequential(unit(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0][0].register_buffer("bias_correction", torch.zeros(4, dtype=torch.bfloat16))
    assert findings(model) == []
    fsdp_unit(model[0][0], policy="fp32")
    assert findings(model) == [
        "AF506 warning at 0.0.bias_correction: a buffer in bf16, but its module computes in fp32 (unit 0.0); "
        "FSDP2 casts no buffers. Convert it before sharding: buffer.to(torch.float32)."
    ]
    model[0][0].bias_correction = torch.zeros(4)
    assert findings(model) == []
    model[0].register_buffer("angles", torch.zeros(4))  # a table of more precision does no harm
    model[0].register_buffer("steps", torch.zeros(4, dtype=torch.int8))
    assert findings(model) == []


@pytest.mark.report(79)
def test_frozen_beside_trainable_parameters_are_mentioned() -> None:
    model = nn.Sequential(unit(nn.Linear(16, 16), nn.Linear(16, 8, bias=False)))
    assert findings(model) == []
    model[0][0].requires_grad_(False)
    assert findings(model) == [
        "AF507 info at 0: 0.2 KiB trainable beside 0.5 KiB frozen, but the unit gathers both again in "
        "backward. Mark what is frozen as a unit of its own if memory or time is short."
    ]
    fsdp_unit(model[0][0])
    assert findings(model) == []


def test_what_runs_stops_nobody() -> None:
    model = nn.Sequential(unit(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert {finding.severity for finding in audit(model, mp_policy=BF16).findings} == {"warning"}
    assert len(plan_annotated(model, mp_policy=BF16)) == 2
