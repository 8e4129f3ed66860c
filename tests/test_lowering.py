"""What is grouped, what is folded, what stays, and why; each rule with what goes wrong without it."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowering_models import WIDTH, Case, CastingNorm, islands
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from annotate_fsdp import (
    AnnotationError,
    Plan,
    audit,
    fsdp_forward,
    fsdp_unit,
    plan_annotated,
    plan_of,
    shard_annotated,
)
from annotate_fsdp.boundary import boundary_of, cast_floats
from annotate_fsdp.lowering import CAN_FOLD
from annotate_fsdp.train.registry import find_model

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = torch.float32

needs_fold = pytest.mark.skipif(not CAN_FOLD, reason="torch < 2.15 computes a unit in one dtype")


class Block(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def norm(size: int = 8, **options: Any) -> nn.Module:
    return fsdp_unit(nn.LayerNorm(size), **{"policy": "fp32", **options})


def block(**options: Any) -> nn.Module:
    return fsdp_unit(Block(n=norm(**options), w=nn.Linear(8, 8), m=norm(**options)))


def plan(model: nn.Module, **options: Any) -> Plan:
    return plan_annotated(model, **{"mp_policy": BF16, "lowering": "group", **options})


def names(model: nn.Module, **options: Any) -> list[str]:
    return [unit.name for unit in plan(model, **options)]


# -- group -----------------------------------------------------------------------------------------


def two_blocks(**options: Any) -> nn.Module:
    return Block(a=block(**options), b=block(**options))


@pytest.mark.parametrize("lowering", ["group", "auto"])
def test_small_units_that_agree_are_one_unit_across_the_model(lowering: str) -> None:
    first, *rest = plan(two_blocks(), lowering=lowering, world_size=4)
    assert first.paths == ("a.n", "a.m", "b.n", "b.m")
    assert first.members == tuple(f"{path}.{name}" for path in first.paths for name in ("weight", "bias"))
    assert first.lowering == "group"
    assert first.why == "4 small units that agree, 256 B gathered for the whole step"
    assert first.provenance == "instance"
    assert [unit.name for unit in rest] == ["a", "b", "(root)"]


def test_a_group_stays_gathered_and_casts_nothing_itself() -> None:
    first = plan(two_blocks(), reshard_after_forward=True).units[0]
    assert first.reshard_after_forward is False
    assert first.policy == MixedPrecisionPolicy(FP32, FP32, None, cast_forward_inputs=False)


@pytest.mark.parametrize(
    ("options", "cast"),
    [
        ({}, "in fp32, out bf16"),
        ({"output_dtype": FP32}, "in fp32, out fp32"),
        ({"casts_itself": True}, "none"),
        ({"policy": MixedPrecisionPolicy(FP32, FP32)}, "in fp32"),
    ],
)
def test_our_hooks_cast_what_each_mark_says(options: dict[str, Any], cast: str) -> None:
    first = plan(two_blocks(**options)).units[0]
    assert [str(each) for each in first.casts] == [f"{path} ({cast})" for path in first.paths]


def test_units_of_one_group_may_cast_differently() -> None:
    model = Block(a=block(), b=block(casts_itself=True), c=block(output_dtype=FP32))
    assert len(plan(model).units[0].paths) == 6


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"policy": "fp16"}),
        ({}, {"reduce_dtype": torch.bfloat16}),
        ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ],
)
def test_units_that_differ_in_what_a_unit_has_once_are_grouped_apart(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    model = Block(a=block(**first), b=block(**second))
    assert names(model) == ["a.n, a.m", "a", "b.n, b.m", "b", "(root)"]


@pytest.mark.report(2)
def test_units_of_other_storage_or_frozen_ones_are_grouped_apart() -> None:
    model = Block(a=block(), b=block(), c=block())
    model.b.n.bfloat16()
    model.b.m.bfloat16()
    model.c.n.requires_grad_(False)
    model.c.m.requires_grad_(False)
    assert names(model) == ["a.n, a.m", "a", "b.n, b.m", "b", "c.n, c.m", "c", "(root)"]


def test_nothing_is_grouped_with_what_lies_inside_it() -> None:
    outer = fsdp_unit(Block(n=norm(), w=nn.Linear(8, 8)), policy="fp32")
    model = Block(a=outer, b=fsdp_unit(Block(n=norm(), w=nn.Linear(8, 8)), policy="fp32"))
    assert names(model) == ["a.n, b.n", "a, b", "(root)"]
    fully_shard_drops_the_inner_one(copy.deepcopy(model))


def fully_shard_drops_the_inner_one(model: nn.Module) -> None:
    """Without the rule: torch takes an inner module out of the list, so that it is no unit at all."""
    from pool import fake_group

    with fake_group(2):
        fully_shard([model.a, model.a.n], mesh=init_device_mesh("cpu", (2,)))
        assert isinstance(model.a, FSDPModule)
        assert not isinstance(model.a.n, FSDPModule)


def test_groups_do_not_need_each_other_in_a_circle() -> None:
    """Of two kinds of islands, one of each kind lies inside one of the other."""

    def kind(dtype: str, inside: nn.Module | None = None) -> nn.Module:
        parts = {"w": nn.Linear(4, 4), **({"inside": inside} if inside is not None else {})}
        return fsdp_unit(Block(**parts), policy=dtype)

    model = Block(a=kind("fp32", kind("fp16")), b=kind("fp16", kind("fp32")))
    assert names(model) == ["a.inside", "a", "b.inside", "b", "(root)"]
    more = Block(a=model.a, b=model.b, c=copy.deepcopy(model.a), d=copy.deepcopy(model.b))
    assert names(more) == ["a.inside, c.inside", "a, c", "b.inside, d.inside", "b, d", "(root)"]


def test_a_group_is_applied_before_the_first_parent_of_any_member() -> None:
    model = Block(a=fsdp_unit(nn.Linear(8, 8)), b=block(), c=norm())
    assert names(model) == ["a", "b.n, b.m, c", "b", "(root)"]


@pytest.mark.parametrize(
    ("model", "storage", "expected"),
    [
        ("step5", "fp32", {"unit": 533, "group": 96, "auto": 96, "fold": 95 if CAN_FOLD else 96}),
        ("step5", "bf16", {"unit": 533, "group": 96, "auto": 96, "fold": 96}),
        ("deepseek_v41", "fp32", {"unit": 271, "group": 91, "auto": 91, "fold": 86 if CAN_FOLD else 91}),
        ("deepseek_v41", "bf16", {"unit": 271, "group": 91, "auto": 91, "fold": 91}),
    ],
)
@pytest.mark.report(93)
def test_the_released_models_have_as_many_units(model: str, storage: str, expected: dict[str, int]) -> None:
    with torch.device("meta"):
        released = find_model(model).build("released", storage)
    if storage == "fp32":
        released.float()
    plans = {lowering: plan(released, lowering=lowering, world_size=1024) for lowering in expected}
    assert {lowering: len(each) for lowering, each in plans.items()} == expected
    if (model, storage) == ("step5", "bf16"):
        assert plans["fold"] == plans["auto"]
        whys = {island.why for island in plans["fold"].units[0].islands} if CAN_FOLD else set()
        assert whys <= {
            "grouped, not folded: stored in fp32 beside bf16",
            "grouped, not folded: (root) gathers nothing of its own",
        }


# -- what stays ------------------------------------------------------------------------------------


def why(model: nn.Module, path: str, **options: Any) -> str:
    return plan(model, **options).unit(path).why


def test_a_mark_that_names_no_precision_is_a_unit_by_itself() -> None:
    model = Block(a=fsdp_unit(nn.Linear(8, 8)), b=fsdp_unit(nn.Linear(8, 8)))
    assert names(model) == ["a", "b", "(root)"]


def test_large_units_stay_and_say_their_size() -> None:
    model = Block(a=norm(2**20), b=norm(2**20), c=norm(), d=norm())
    assert why(model, "a") == "own unit: 8 MiB"
    assert names(model) == ["a", "b", "c, d", "(root)"]
    assert names(model, merge_below=2**23) == ["a, b, c, d", "(root)"]
    assert names(model, merge_below=0) == ["a", "b", "c", "d", "(root)"]


def test_a_group_holds_no_more_than_its_bytes_and_the_next_follows_in_forward_order() -> None:
    model = Block(**{name: norm() for name in "abcde"})
    assert names(model, group_bytes=128) == ["a, b", "c, d", "e", "(root)"]
    assert why(model, "e", group_bytes=128) == "own unit: no group has room for it (group_bytes: 128 B)"
    assert why(Block(a=norm()), "a") == "own unit: no other small unit agrees with it"
    assert names(model, group_bytes=0) == ["a", "b", "c", "d", "e", "(root)"]


def test_the_layout_does_not_depend_on_the_number_of_ranks() -> None:
    model = Block(**{name: norm(2**17) for name in "abcdefgh"})
    layouts = [names(model, world_size=world) for world in (1, 2, 1000, 2**20)]
    assert layouts == [["a, b, c, d, e, f, g, h", "(root)"]] * 4


def test_what_a_mark_or_the_model_says_besides_precision_is_kept() -> None:
    class Coder(nn.LayerNorm):
        @fsdp_forward
        def encode(self, x: Tensor) -> Tensor:
            return self(x)

    tied = norm()
    model = Block(
        a=norm(),
        resharding=norm(reshard_after_forward=True),
        gathered=norm(reshard_after_forward=False),
        entry=fsdp_unit(Coder(8), policy="fp32"),
        tied=tied,
        other=norm(),
    )
    model.other.weight = tied.weight
    assert [(unit.name, unit.why) for unit in plan(model)] == [
        ("a, gathered", "2 small units that agree, 128 B gathered for the whole step"),
        ("resharding", "own unit: its mark says reshard_after_forward=True"),
        ("entry", "own unit: it has @fsdp_forward methods"),
        ("tied, other", "tied modules: gathered from the first use of the weight to the last"),
        ("(root)", ""),
    ]


def test_units_stored_in_several_dtypes_stay() -> None:
    model = Block(a=norm(), b=norm())
    model.a.bias = nn.Parameter(model.a.bias.detach().bfloat16(), requires_grad=False)
    assert why(model, "a") == "own unit: stored in bf16 and fp32"


def test_unit_lowering_is_what_the_marks_mean() -> None:
    assert names(two_blocks(), lowering="unit") == ["a.n", "a.m", "a", "b.n", "b.m", "b", "(root)"]


# -- fold ------------------------------------------------------------------------------------------


@needs_fold
def test_small_units_are_folded_into_the_unit_around_them() -> None:
    a, b, root = plan(Block(a=block(), b=block(), w=nn.Linear(8, 8)), lowering="fold")
    assert (a.paths, b.paths, root.paths) == (("a",), ("b",), ("",))
    assert a.members == ("a.n.weight", "a.n.bias", "a.w.weight", "a.w.bias", "a.m.weight", "a.m.bias")
    assert a.param_dtypes == tuple(
        (f"a.{path}", FP32) for path in ("n.weight", "n.bias", "m.weight", "m.bias")
    )
    assert [str(cast) for cast in a.casts] == [
        "a.n (in fp32, out bf16, folded)",
        "a.m (in fp32, out bf16, folded)",
    ]
    assert [island.why for island in a.islands] == ["folded into a: 64 B, fp32 stored in an fp32 unit"] * 2


@needs_fold
def test_an_island_in_a_folded_one_is_folded_into_the_same_unit() -> None:
    inner = fsdp_unit(Block(n=norm(), w=nn.Linear(8, 8)), policy="fp32")
    model = Block(a=fsdp_unit(Block(inner=inner, w=nn.Linear(8, 8))), w=nn.Linear(8, 8))
    assert names(model, lowering="fold") == ["a", "(root)"]
    assert [cast.path for cast in plan(model, lowering="fold").units[0].casts] == ["a.inner.n", "a.inner"]


@needs_fold
def test_what_cannot_be_folded_is_grouped_and_says_why() -> None:
    model = two_blocks()
    for each in (model.a, model.b):
        each.w.bfloat16()
    first = plan(model, lowering="fold").units[0]
    assert first.paths == ("a.n", "a.m", "b.n", "b.m")
    assert [island.why for island in first.islands] == ["grouped, not folded: stored in fp32 beside bf16"] * 4
    assert plan(model, lowering="fold") == plan(model, lowering="auto")


@needs_fold
@pytest.mark.parametrize(
    ("options", "call", "reason"),
    [
        ({"reduce_dtype": torch.bfloat16}, {}, "reduced in bf16 beside fp32"),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}, "other mesh or offload than a"),
        ({"policy": "fp16"}, {}, "stored in fp32, computed in fp16"),
    ],
)
def test_each_difference_that_one_unit_cannot_hold_is_named(
    options: dict[str, Any], call: dict[str, Any], reason: str
) -> None:
    first = plan(two_blocks(**options), lowering="fold", **call).units[0]
    assert first.islands[0].why == f"grouped, not folded: {reason}"


def test_a_unit_of_the_same_compute_dtype_is_folded_on_every_torch() -> None:
    model = Block(a=block(), b=block(), w=nn.Linear(8, 8))
    assert names(model, mp_policy=MixedPrecisionPolicy(FP32, FP32), lowering="fold") == ["a", "b", "(root)"]


@pytest.mark.skipif(CAN_FOLD, reason="torch >= 2.15 computes a unit in several dtypes")
def test_older_torch_groups_and_says_so() -> None:
    model = two_blocks()
    assert plan(model, lowering="fold") == plan(model, lowering="auto")
    whys = {island.why for island in plan(model, lowering="fold").units[0].islands}
    version = torch.__version__.partition("+")[0]
    assert whys == {f"grouped, not folded: torch {version} computes in one dtype a unit, 2.15 in several"}


def test_into_a_unit_that_gathers_nothing_only_what_has_no_group_is_folded() -> None:
    same = {"mp_policy": MixedPrecisionPolicy(FP32, FP32), "lowering": "fold"}
    empty_root = Block(a=block(), n=norm())
    assert names(empty_root, **same) == ["a", "(root)"]
    two = Block(a=block(), n=norm(), m=norm())
    assert names(two, **same) == ["a", "n, m", "(root)"]


# -- applied ---------------------------------------------------------------------------------------


def applied(lowering: str) -> tuple[bool, list[str], list[str]]:
    """Whether the state read back is the plan, the audit's findings, and the modules that are no units."""
    model = islands(Case())
    mesh = init_device_mesh("cpu", (2,))
    planned = plan_annotated(islands(Case()), mesh, mp_policy=BF16, lowering=lowering)
    shard_annotated(model, mesh, mp_policy=BF16, lowering=lowering)
    marked = [module for module in model.modules() if isinstance(module, CastingNorm)]
    loose = [type(module).__name__ for module in marked if not isinstance(module, FSDPModule)]
    return plan_of(model) == planned, [str(finding) for finding in audit(model).findings], loose


@pytest.mark.parametrize("lowering", ["unit", "group", "auto", "fold"])
def test_the_state_read_back_is_the_plan(fake_world: Any, lowering: str) -> None:
    fake_world(2)
    same, findings, loose = applied(lowering)
    assert (same, findings) == (True, [])
    assert bool(loose) == (lowering == "fold" and CAN_FOLD)


def call_outside(lowering: str) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = islands(Case())
    shard_annotated(model, init_device_mesh("cpu", (2,)), mp_policy=BF16, lowering=lowering)
    message = ""
    try:
        model.layers[1].attention.first(torch.ones(2, 16))
    except AnnotationError as error:
        message = str(error)
    model(torch.zeros(1, 4, dtype=torch.long)).backward()  # and a right call works after it
    return message, boundary_of(model.layers[1].attention.first) is not None


@needs_fold
def test_a_folded_module_called_outside_of_its_unit_is_a_named_error(ranks: Pool) -> None:
    for message, _ in ranks.run(call_outside, "fold"):
        assert message == (
            "1 finding; the call was refused\n"
            "  AF304 error at layers.1.attention.first: a module folded into unit layers.1, but it was "
            "called outside of that unit's forward, so its parameters are not gathered. Call it inside that "
            'forward, or shard with lowering="group" or "unit", without conditional=True.'
        )


class PlainNorm(nn.Module):
    """Embedding, an fp32 module in a bf16 block, a loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        island = nn.Linear(8, 8) if kind == "linear" else nn.LayerNorm(8)
        self.block = fsdp_unit(
            Block(w=nn.Linear(8, 8), island=fsdp_unit(island, policy="fp32"), v=nn.Linear(8, 8))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens)).float().square().mean()


def step_of(kind: str, how: str) -> tuple[str, list[Tensor], bool]:
    """An error or the gradients of one step, and whether the island is no unit of its own."""
    torch.manual_seed(0)
    model = PlainNorm(kind)
    mesh = init_device_mesh("cpu", (2,))
    if how == "torch alone":
        own = {id(p) for p in model.block.island.parameters()}
        policy = MixedPrecisionPolicy(
            torch.bfloat16,
            FP32,
            param_dtype_override_fn=lambda p: FP32 if id(p) in own else None,  # type: ignore[call-arg, unused-ignore]  # torch >= 2.15
        )
        fully_shard(model.block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=BF16)
    else:
        shard_annotated(model, mesh, mp_policy=BF16, lowering=how)
    try:
        model(torch.arange(4).view(1, 4)).backward()
    except RuntimeError as error:
        return type(error).__name__, [], True
    grads = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    return "", grads, not isinstance(model.block.island, FSDPModule)


@needs_fold
@pytest.mark.parametrize(("kind", "alone"), [("linear", "RuntimeError"), ("norm", "")])
def test_a_module_that_does_not_cast_for_itself_folds_with_the_bits_of_its_own_unit(
    ranks: Pool, kind: str, alone: str
) -> None:
    """Without our casts a linear layer fails; torch's CPU layer norm takes mixed dtypes."""
    for error, _, _ in ranks.run(step_of, kind, "torch alone"):
        assert error == alone
    for (_, unit, _), (error, fold, is_folded) in zip(
        ranks.run(step_of, kind, "unit"), ranks.run(step_of, kind, "fold"), strict=True
    ):
        assert (error, is_folded) == ("", True)
        assert all(torch.equal(mine, other) for mine, other in zip(unit, fold, strict=True))


# -- options and casts -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["merge_below", "group_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "4 MiB"])
def test_a_size_that_is_no_number_of_bytes_is_refused(name: str, value: Any) -> None:
    with pytest.raises(AnnotationError, match=re.escape(f"{name}={value!r}, but it is no number of bytes")):
        plan_annotated(two_blocks(), **{name: value})


@pytest.mark.parametrize("value", [1, (1,), (1, 2, 3), (-1, 0), (True, 1), [1, 2], ("1", 2)])
def test_prefetch_that_is_no_pair_of_depths_is_refused(value: Any) -> None:
    with pytest.raises(AnnotationError, match="but it is no pair of depths"):
        plan_annotated(two_blocks(), prefetch=value)


def test_casts_reach_into_the_containers_that_torch_looks_into() -> None:
    from torch.distributed.utils import _apply_to_tensors

    half, whole = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.long)
    values = [
        half,
        whole,
        [half, (whole, {"a": half, "b": None})],
        {"x": [half], 3: "text"},
        nn.utils.rnn.PackedSequence(half, whole),
        torch.return_types.max,
    ]
    for value in values:
        expected = _apply_to_tensors(lambda t: t.float() if t.is_floating_point() else t, value)
        found = cast_floats(value, FP32)
        assert str(found) == str(expected)
        assert type(found) is type(expected)


class Writing(nn.Module):
    """Writes into a list that its caller holds, as layers do into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, cache: list[Tensor], **named: Any) -> Tensor:
        cache.append(x.detach())
        named["more"]["seen"] = len(cache)
        return (x.float() * self.weight).to(x.dtype)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        for name in ("a", "b"):
            self.add_module(name, fsdp_unit(Writing(), policy="fp32", casts_itself=True))

    def forward(self, x: Tensor) -> Tensor:
        self.cache: list[Tensor] = []
        self.more: dict[str, int] = {}
        x = self.linear(x)
        for part in (self.a, self.b):
            x = part(x, self.cache, more=self.more)
        return x.float().square().mean()


@pytest.mark.parametrize("lowering", ["unit", "group", "fold"])
def test_what_a_module_writes_into_is_the_callers_own(fake_world: Any, lowering: str) -> None:
    fake_world(2)
    model = Caching()
    shard_annotated(model, init_device_mesh("cpu", (2,)), mp_policy=BF16, lowering=lowering)
    model(torch.ones(2, 8))
    assert (len(model.cache), model.more) == (2, {"seen": 2})


def test_the_audit_says_why_and_folds_paths_that_differ_by_numbers() -> None:
    model = nn.Sequential(*[block() for _ in range(3)], norm(2**20), nn.Linear(8, 8))
    text = str(audit(model, world_size=2, mp_policy=BF16, lowering="group"))
    table, _, reasons = text.partition("\nlowering\n")
    assert "\n{0-2}.n, {0-2}.m " in table
    assert reasons.splitlines()[:3] == [
        "  3 grouped: 64 B: {0-2}.n",
        "  3 grouped: 64 B: {0-2}.m",
        "  1 own unit: 8 MiB: 3",
    ]
    assert "\nlowering\n" not in str(audit(model, world_size=2, mp_policy=BF16, lowering="unit"))


# -- prefetch --------------------------------------------------------------------------------------


@pytest.mark.report(94)
def test_prefetch_follows_the_units_in_the_order_in_which_they_run(fake_world: Any) -> None:
    def ahead(model: nn.Module, path: str) -> tuple[list[str], list[str]]:
        state = model.get_submodule(path)._get_fsdp_state()
        names = {id(module): name for name, module in model.named_modules()}
        return tuple(  # type: ignore[return-value]  # two lists
            [names[id(other._modules[0])] for other in states]
            for states in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
        )

    fake_world(2)
    model = Block(a=block(), b=block(), w=nn.Linear(8, 8))
    shard_annotated(model, init_device_mesh("cpu", (2,)), mp_policy=BF16, prefetch=(1, 2))
    assert plan_of(model).units[0].paths == ("a.n", "a.m", "b.n", "b.m")
    assert ahead(model, "") == (["a"], ["b", "a.n"])
    assert ahead(model, "a") == (["a.n"], [])
    assert ahead(model, "a.n") == (["b"], ["a"])
    assert ahead(model, "b") == ([], ["a.n", "a"])


# -- why the rules are there -----------------------------------------------------------------------


class Skipping(nn.Module):
    """Two islands, of which the second does not run; the loss is its output, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = norm(), norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).float().square().mean()


def test_without_our_hooks_the_cast_of_a_group_would_reach_the_output_of_the_root(fake_world: Any) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    by_torch, ours = Skipping(), Skipping()
    fully_shard(
        [by_torch.a, by_torch.b],
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(FP32, FP32, torch.bfloat16),
        reshard_after_forward=False,
    )
    fully_shard(by_torch, mesh=mesh)
    shard_annotated(ours, mesh, mp_policy=BF16, lowering="group")
    assert by_torch(torch.ones(2, 8)).dtype == torch.bfloat16
    assert ours(torch.ones(2, 8)).dtype == FP32


RESHARDED = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.linear, self.b = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        h = self.a(self.linear(x))
        with torch.no_grad():
            self.seen = self.b(h)
        return h.square().mean()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, mesh = Model(), init_device_mesh("cpu", (1,))
fully_shard([model.a, model.b], mesh=mesh, reshard_after_forward=sys.argv[1] == "True")
fully_shard(model, mesh=mesh)
model(torch.randn(4, 8)).backward()
"""


@pytest.mark.parametrize(("reshard", "crashes"), [(True, True), (False, False)])
def test_a_resharding_group_crashes_when_its_last_member_runs_without_gradients(
    reshard: bool, crashes: bool
) -> None:
    run = subprocess.run([sys.executable, "-c", RESHARDED, str(reshard)], capture_output=True, check=False)
    assert (run.returncode != 0) == crashes


def test_torch_refuses_a_unit_that_stores_two_dtypes(fake_world: Any) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    model = Block(a=nn.LayerNorm(8), b=nn.LayerNorm(8).bfloat16())
    fully_shard([model.a, model.b], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        model(torch.ones(2, 8))


def test_torch_refuses_a_tied_weight_in_two_units(fake_world: Any) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    model = Block(a=nn.LayerNorm(8), b=nn.LayerNorm(8), c=nn.LayerNorm(8))
    model.c.weight = model.a.weight
    fully_shard([model.a, model.b], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises((ValueError, AssertionError)):
        model(torch.ones(2, 8))


@pytest.mark.parametrize("lowering", ["unit", "group", pytest.param("fold", marks=needs_fold)])
def test_what_was_grouped_or_folded_before_is_kept_as_it_is(
    fake_world: Callable[..., None], lowering: str
) -> None:
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,))
    part = islands(Case())
    whole = nn.Sequential(part, nn.Linear(WIDTH, WIDTH))
    options: dict[str, Any] = {"mp_policy": BF16, "lowering": lowering}
    shard_annotated(part, mesh, **options)
    units = plan_of(part).units
    shard_annotated(whole, mesh, existing="keep", **options)
    assert [unit.members for unit in plan_of(whole).units[:-1]] == [
        tuple(f"0.{path}" for path in unit.members) for unit in units
    ]
