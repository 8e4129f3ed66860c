"""What people reported about wrapping and precision: each report has a test that carries its number.

A test elsewhere carries it as `@pytest.mark.report(number)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pool import Pool, fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from annotate_fsdp import AnnotationError, audit, fsdp_unit, plan_annotated, shard_annotated

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

#: Kinds of reports; the numbers of the strongest ones, then those of others.
REPORTS: dict[str, tuple[set[int], set[int]]] = {
    "mixed dtypes inside one unit": ({1, 2, 4, 10}, {3, 5, 6, 8, 9}),
    "fp32 islands": ({11, 12}, {14, 18, 19, 21, 22, 23}),
    "casts at a unit's boundary": ({25, 26, 28, 33}, {30, 31, 34}),
    "activation checkpointing": ({35}, {36, 37}),
    "tied and shared": ({39, 40}, {42, 44}),
    "used other than by forward": ({48, 49, 50}, {52, 54, 55}),
    "ranks that run different modules": ({57, 58}, {59, 60}),
    "names, classes and wrappers": ({61, 62, 63}, {64, 66, 67, 68}),
    "order, duplicates and coverage": ({69, 70}, {72, 73, 74}),
    "frozen": ({75, 76}, {77, 79}),
    "awkward parameters": ({80, 81}, {83, 84}),
    "buffers, loading, clipping, compiling": ({86, 90}, {85, 88, 92}),
    "the cost of small units": ({93}, {94, 95}),
}


def carried() -> Iterator[int]:
    """The numbers that tests carry."""
    for file in Path(__file__).parent.glob("test_*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.report":
                yield from (ast.literal_eval(argument) for argument in call.args)


@pytest.mark.parametrize("kind", REPORTS)
def test_each_strong_report_and_one_more_of_its_kind_has_a_test(kind: str) -> None:
    strong, others = REPORTS[kind]
    numbers = set(carried())
    assert strong - numbers == set()
    assert others & numbers
    assert numbers <= {number for pair in REPORTS.values() for each in pair for number in each}


class Block(nn.Module):
    """Takes activations and a table of angles, and says in which dtypes they arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, angles.dtype, self.linear.weight.dtype)
        return self.linear(x.to(self.linear.weight.dtype)) * angles.cos().to(x.dtype)


def angles_seen() -> list[tuple[torch.dtype, ...]]:
    mesh = init_device_mesh("cpu", (2,))
    seen = []
    untouched = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for policy in ("inherit", untouched):
        block = fsdp_unit(Block(), policy=policy)

        class Around(nn.Module):
            def __init__(self, inner: Block) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x, torch.linspace(0, 1e5, 8))

        model = shard_annotated(Around(block), mesh, mp_policy=BF16)
        model(torch.ones(2, 8)).sum().backward()
        seen.append(block.seen)
    return seen


@pytest.mark.report(28)
def test_a_table_of_angles_stays_fp32_if_the_mark_says_so(ranks: Pool) -> None:
    bf16 = torch.bfloat16
    assert ranks.run(angles_seen) == [[(bf16, bf16, bf16), (bf16, torch.float32, bf16)]] * 2


@pytest.mark.report(62)
def test_a_marked_class_that_the_model_does_not_use_is_nothing_to_resolve() -> None:
    @fsdp_unit
    class Unused(nn.Module):
        pass

    assert audit(nn.Sequential(fsdp_unit(nn.Linear(4, 4)))).findings == ()
    assert "__fsdp_unit__" in vars(Unused)


@pytest.mark.report(67, 68)
def test_two_architectures_need_no_argument_of_their_own() -> None:
    one = nn.Sequential(fsdp_unit(nn.Linear(4, 4)), nn.Linear(4, 4))
    other = nn.ModuleDict({"speaker_encoder": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    other.speaker_encoder.__fsdp_dtype__ = torch.float32
    plans = [plan_annotated(nn.Sequential(model), mp_policy=BF16, lowering="unit") for model in (one, other)]
    assert [[unit.path for unit in plan] for plan in plans] == [["0.0", ""], ["0.speaker_encoder", ""]]
    assert plans[1].unit("0.speaker_encoder").policy.param_dtype == torch.float32


def small_rows(rows: int) -> list[torch.Tensor]:
    """Gradients of a unit whose parameters have fewer rows than there are ranks, or an odd number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, rows), nn.LayerNorm(rows), nn.Linear(rows, 3))
    reference = nn.Sequential(nn.Linear(4, rows), nn.LayerNorm(rows), nn.Linear(rows, 3))
    reference.load_state_dict(model.state_dict())
    x = torch.randn(4, 4)
    for layer in model:
        fsdp_unit(layer)
    shard_annotated(model, init_device_mesh("cpu", (2,)))
    found = []
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(2):
            each(x).square().sum().backward()
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(each)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return [torch.stack([p.full_tensor().detach().sum(), q.detach().sum()]) for p, q in pairs]


@pytest.mark.report(81)
@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_ranks_or_an_odd_number_train_alike(ranks: Pool, rows: int) -> None:
    for sums in ranks.run(small_rows, rows)[0]:
        torch.testing.assert_close(sums[0], sums[1])


@pytest.mark.report(90)
def test_what_was_sharded_on_another_mesh_of_the_same_ranks_is_named() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), fsdp_unit(nn.Linear(4, 4)))

    with fake_group(4):
        before = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for mesh, text in ((other, "fsdp=4"), (grid, "replicate=2 x shard=2")):
            made = model()
            fully_shard(made[0], mesh=before)
            with pytest.raises(AnnotationError) as error:
                shard_annotated(made, mesh, existing="keep")
            assert [str(finding) for finding in error.value.findings] == [
                "AF406 error at 0: sharded before over a mesh of dp=4, but the mesh passed in, a mesh of "
                f"{text}, has the same ranks and is another: clipping fails. Pass the mesh that it was "
                "sharded with."
            ]
            shard_annotated(made, before, existing="keep")
        part = model()  # such as experts, which are fewer ranks' business
        fully_shard(part[0], mesh=grid["shard"])
        shard_annotated(part, other, existing="keep")


def clipped_on_equal_meshes() -> float:
    """Train a step on two meshes that are equal but were built separately."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), fsdp_unit(nn.Linear(4, 4)))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    shard_annotated(model, mesh, existing="keep")
    model(torch.ones(2, 4)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    return norm.full_tensor().item()


@pytest.mark.report(90)
def test_equal_meshes_built_separately_are_one_mesh(ranks: Pool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert ranks.run(clipped_on_equal_meshes) == pytest.approx([expected] * 2)
