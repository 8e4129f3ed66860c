"""Ranks agree before anything is sharded: real ranks, some of which differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, fake_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from annotate_fsdp import AnnotationError, PlanMismatchError, fsdp_unit, shard_annotated


@fsdp_unit
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def blocks(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count)))


def other_mark(model: nn.Sequential) -> None:
    fsdp_unit(model[1], reshard_after_forward=False)


def other_policy(model: nn.Sequential) -> None:
    fsdp_unit(model[0], policy="bf16")


def frozen(model: nn.Sequential) -> None:
    model[1].linear.bias.requires_grad_(False)


def other_storage(model: nn.Sequential) -> None:
    model[0].bfloat16()


def other_shape(model: nn.Sequential) -> None:
    model[1].linear.bias = nn.Parameter(torch.zeros(3))


def other_order(model: nn.Sequential) -> None:
    linear = model[1].linear
    weight = linear.weight
    del linear.weight
    linear.weight = weight  # registered last now


def extra_unit(model: nn.Sequential) -> None:
    model.append(Block())


def shard_with_difference(change: Callable[[nn.Sequential], None]) -> None:
    model = blocks()
    if dist.get_rank() == 1:
        change(model)
    try:
        shard_annotated(model, init_device_mesh("cpu", (2,)))
    finally:
        assert not any(isinstance(p, DTensor) for p in model.parameters())


END = (
    "ranks with different plans wait for each other or mix up numbers. "
    "Build, freeze and mark the model in the same way on every rank."
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            other_mark,
            "AF701 error at 1: reshard_after_forward is 'True' on rank 0, but 'False' on rank 1: ",
        ),
        (
            frozen,
            "AF701 error at 1: parameter 1.linear.bias is 'fp32 [4] trainable' on rank 0, "
            "but 'fp32 [4] frozen' on rank 1: ",
        ),
        (
            other_storage,
            "AF701 error at 0: parameter 0.linear.weight is 'fp32 [4x4] trainable' on rank 0, "
            "but 'bf16 [4x4] trainable' on rank 1: ",
        ),
        (
            other_shape,
            "AF701 error at 1: parameter 1.linear.bias is 'fp32 [4] trainable' on rank 0, "
            "but 'fp32 [3] trainable' on rank 1: ",
        ),
        (
            other_order,
            "AF701 error at 1: the order of parameters is '1.linear.weight before 1.linear.bias' on rank 0, "
            "but '1.linear.bias before 1.linear.weight' on rank 1: ",
        ),
        (extra_unit, "AF701 error at (root): unit is '(root)' on rank 0, but '2' on rank 1: "),
    ],
)
def test_ranks_with_different_plans_all_see_the_first_difference(
    ranks: Pool, change: Callable[[nn.Sequential], None], expected: str
) -> None:
    for error in ranks.outcomes(shard_with_difference, change):
        assert isinstance(error, PlanMismatchError)
        assert [str(finding) for finding in error.findings] == [expected + END]


def test_ranks_with_different_policies_all_see_both(ranks: Pool) -> None:
    for error in ranks.outcomes(shard_with_difference, other_policy):
        assert isinstance(error, PlanMismatchError)
        (finding,) = error.findings
        assert finding.path == "0"
        assert '"param_dtype": null' in finding.declared
        assert '"param_dtype": "bf16"' in finding.wrong


def raising(base: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    if dist.get_rank() == 1:
        raise KeyError("planted")
    return base


def wrong_on_one_rank(kind: str) -> None:
    model: Any = blocks()
    mesh = init_device_mesh("cpu", (2,))
    options: dict[str, Any] = {}
    if kind == "raises":
        fsdp_unit(model[0], policy=raising)
    elif dist.get_rank() == 1:
        if kind == "mark":
            model[1].linear.__fsdp_dtype__ = "float32"
        elif kind == "option":
            options["mp_policy"] = torch.bfloat16
        else:
            model = [model]
    shard_annotated(model, mesh, **options)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "mark",
            "AF103 error at 1.linear: __fsdp_dtype__='float32' on the instance (on rank 1), but its value is "
            "not a floating-point torch.dtype. Write __fsdp_dtype__ = torch.float32.",
        ),
        (
            "option",
            "AF108 error at the root module: mp_policy=torch.bfloat16 (on rank 1), but it is no "
            "MixedPrecisionPolicy. Write MixedPrecisionPolicy(param_dtype=torch.bfloat16).",
        ),
        (
            "no model",
            "AF108 error at the root module: a list as model (on rank 1), but it is no torch.nn.Module. "
            "Pass the model.",
        ),
        (
            "raises",
            "AF702 error at the root module: planning failed with KeyError: 'planted' (on rank 1), but this "
            "rank cannot shard the model. See the traceback of that rank.",
        ),
    ],
)
def test_what_one_rank_finds_every_rank_raises_at_once(ranks: Pool, kind: str, expected: str) -> None:
    start = time.monotonic()
    for error in ranks.outcomes(wrong_on_one_rank, kind):
        assert isinstance(error, AnnotationError)
        assert [str(finding) for finding in error.findings] == [expected]
    assert time.monotonic() - start < 15  # a rank that waited would wait for the group's 20 s


def each_wrong_in_its_own_way() -> None:
    model = blocks()
    model[dist.get_rank()].linear.__fsdp_dtype__ = "float32"
    other_order(model)  # the plans would differ too, if there were any
    shard_annotated(model, init_device_mesh("cpu", (2,)))


def test_ranks_with_different_findings_all_list_both(ranks: Pool) -> None:
    for error in ranks.outcomes(each_wrong_in_its_own_way):
        assert isinstance(error, AnnotationError)
        assert [(each.code, each.path) for each in error.findings] == [
            ("AF103", "0.linear"),
            ("AF103", "1.linear"),
        ]
        assert ["(on rank 0)" in each.declared for each in error.findings] == [True, False]


def corrected() -> float:
    model = blocks()
    if dist.get_rank() == 1:
        model[0].linear.__fsdp_dtype__ = "float32"
    mesh = init_device_mesh("cpu", (2,))
    try:
        shard_annotated(model, mesh)
    except AnnotationError:
        vars(model[0].linear).pop("__fsdp_dtype__", None)
    shard_annotated(model, mesh)
    model(torch.ones(2, 4)).sum().backward()
    return float(model[1].linear.weight.grad.full_tensor().norm())


def test_a_corrected_second_call_shards_and_trains(ranks: Pool) -> None:
    first, second = ranks.run(corrected)
    assert first == second > 0


def two_stages() -> tuple[int, float]:
    """Two halves of the world shard different models, as pipeline stages do."""
    rank = dist.get_rank()
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    mesh: DeviceMesh = meshes["shard"]
    model = blocks(2 if rank < 2 else 3)
    shard_annotated(model, mesh)
    model(torch.ones(2, 4)).sum().backward()
    return len(model), float(model[0].linear.weight.grad.full_tensor().norm())


def test_only_the_ranks_of_the_mesh_have_to_agree(ranks: Pool) -> None:
    results = ranks.run(two_stages, world=4)
    assert [count for count, _ in results] == [2, 2, 3, 3]
    assert results[0] == results[1]
    assert results[2] == results[3]


def outside() -> str:
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        shard_annotated(blocks(), mesh)
        return ""
    with pytest.raises(AnnotationError) as error:
        shard_annotated(blocks(), mesh)
    return str(error.value.findings[0])


def test_a_rank_outside_the_mesh_is_told_so(ranks: Pool) -> None:
    message = (
        "AF404 error at the root module: a mesh of ranks [0, 1], but this rank is not one of them. "
        "Call it on the ranks of the mesh only."
    )
    assert ranks.run(outside, world=4) == ["", "", message, message]


def test_without_a_mesh_nothing_is_sharded() -> None:
    with pytest.raises(AnnotationError) as error:
        shard_annotated(blocks(), None)  # type: ignore[arg-type]  # the mistake under test
    assert [str(finding) for finding in error.value.findings] == [
        "AF108 error at the root module: a NoneType as mesh, but it is no DeviceMesh. "
        'Write mesh=init_device_mesh("cuda", (world_size,)).'
    ]


def test_a_fake_process_group_is_not_asked() -> None:
    with fake_group(8):
        assert isinstance(
            shard_annotated(blocks(), init_device_mesh("cpu", (8,)))[0].linear.weight.data, DTensor
        )


def gather_differently_ahead() -> str:
    try:
        shard_annotated(blocks(), init_device_mesh("cpu", (2,)), prefetch=(0, dist.get_rank()))
    except PlanMismatchError as error:
        return str(error.findings[0])
    return ""


def test_ranks_that_would_gather_ahead_differently_are_told_so(ranks: Pool) -> None:
    for message in ranks.run(gather_differently_ahead):
        assert "prefetch is '(0, 0)' on rank 0, but '(0, 1)' on rank 1" in message
