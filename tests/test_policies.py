"""What a policy name comes to, given the caller's policy and the unit around."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import bfloat16, float16, float32, float64, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp import UnitSpec, fsdp_unit, plan_annotated
from annotate_fsdp.policies import (
    PolicyProblem,
    check_policies,
    policy_dtype,
    resolve_policy,
    with_reduce_dtype,
)

BF16 = MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)
BF16_OUT = MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32, output_dtype=float32)
VERBATIM = MixedPrecisionPolicy(param_dtype=float16, output_dtype=float64, cast_forward_inputs=False)


def resolve(
    base: MixedPrecisionPolicy,
    enclosing: torch.dtype | None,
    *,
    is_root: bool = False,
    policies: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None, bool]:
    """Resolve a mark; return (param, reduce, output dtype, cast_forward_inputs)."""
    policy = resolve_policy(
        UnitSpec(**options), base=base, enclosing_dtype=enclosing, policies=policies or {}, is_root=is_root
    )
    return policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs


def test_fp32_casts_in_and_casts_back_to_the_enclosing_dtype() -> None:
    assert resolve(BF16, bfloat16, policy="fp32") == (float32, float32, bfloat16, True)


def test_fp32_that_casts_itself_is_left_untouched() -> None:
    assert resolve(BF16, bfloat16, policy="fp32", casts_itself=True) == (float32, float32, None, False)


def test_fp32_with_fp32_output_stays_fp32() -> None:
    assert resolve(BF16, bfloat16, policy="fp32", output_dtype=float32) == (float32, float32, float32, True)


def test_fp32_without_output_cast() -> None:
    assert resolve(BF16, bfloat16, policy="fp32", output_dtype=None) == (float32, float32, None, True)


def test_fp32_that_casts_itself_may_still_name_its_output() -> None:
    resolved = resolve(BF16, bfloat16, policy="fp32", casts_itself=True, output_dtype=float32)
    assert resolved == (float32, float32, float32, False)


def test_a_mixed_precision_policy_is_taken_verbatim_but_for_an_unset_reduce_dtype() -> None:
    assert resolve(BF16, bfloat16, policy=VERBATIM) == (float16, float16, float64, False)
    whole = MixedPrecisionPolicy(bfloat16, float32, float64, True)
    assert resolve(BF16, float16, policy=whole) == (bfloat16, float32, float64, True)
    assert resolve(BF16, bfloat16, policy=MixedPrecisionPolicy()) == (None, None, None, True)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", float32), ("bf16", bfloat16), ("fp16", float16), (float64, float64)]
)
def test_names_and_dtypes_say_the_same(name: Any, dtype: torch.dtype) -> None:
    assert resolve(BF16, bfloat16, policy=name) == resolve(BF16, bfloat16, policy=dtype)
    assert resolve(BF16, bfloat16, policy=name)[0] is dtype
    assert policy_dtype(name) is dtype


def test_a_low_precision_unit_reduces_as_the_caller_does() -> None:
    assert resolve(BF16, float32, policy="fp16") == (float16, float32, float32, True)
    plain = MixedPrecisionPolicy(param_dtype=float32)
    assert resolve(plain, float32, policy="bf16") == (bfloat16, float32, float32, True)
    assert resolve(MixedPrecisionPolicy(), None, policy="bf16") == (bfloat16, bfloat16, None, True)


def test_a_high_precision_unit_reduces_in_its_own_dtype() -> None:
    low = MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=bfloat16)
    assert resolve(low, bfloat16, policy="fp32") == (float32, float32, bfloat16, True)
    assert resolve(low, bfloat16, policy=float64) == (float64, float64, bfloat16, True)


def test_the_marks_reduce_dtype_wins() -> None:
    assert resolve(BF16, bfloat16, policy="fp32", reduce_dtype=bfloat16)[1] is bfloat16
    assert resolve(BF16, bfloat16, reduce_dtype=bfloat16)[1] is bfloat16


def test_inherit_takes_the_callers_policy_but_never_its_output_dtype() -> None:
    assert resolve(BF16_OUT, bfloat16) == (bfloat16, float32, None, True)
    assert resolve(BF16_OUT, bfloat16, is_root=True) == (bfloat16, float32, float32, True)


@pytest.mark.report(25)
def test_no_inner_policy_inherits_the_callers_output_dtype() -> None:
    assert resolve(BF16_OUT, bfloat16, policy="fp32") == (float32, float32, bfloat16, True)
    seen: list[torch.dtype | None] = []

    def watch(base: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        seen.append(base.output_dtype)
        return base

    resolve(BF16_OUT, bfloat16, policy=watch)
    resolve(BF16_OUT, bfloat16, policy=watch, is_root=True)
    assert seen == [None, float32]


def test_an_fp32_root_casts_back_to_what_the_caller_asks_for() -> None:
    assert resolve(BF16, bfloat16, policy="fp32", is_root=True) == (float32, float32, bfloat16, True)
    assert resolve(BF16_OUT, bfloat16, policy="fp32", is_root=True) == (float32, float32, float32, True)


def test_a_caller_without_compute_dtype_gets_no_casts() -> None:
    assert resolve(MixedPrecisionPolicy(), None) == (None, None, None, True)
    assert resolve(MixedPrecisionPolicy(), None, policy="fp32") == (float32, float32, None, True)


def test_an_inheriting_unit_inside_an_island_hands_its_output_back_in_the_islands_dtype() -> None:
    assert resolve(BF16, float32) == (bfloat16, float32, float32, True)
    assert resolve(BF16, float32, casts_itself=True) == (bfloat16, float32, None, False)


@pytest.mark.report(33)
def test_an_unset_reduce_dtype_is_written_out() -> None:
    unset = MixedPrecisionPolicy(param_dtype=bfloat16)
    assert resolve(unset, bfloat16) == (bfloat16, bfloat16, None, True)
    assert with_reduce_dtype(unset) == MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=bfloat16)
    assert with_reduce_dtype(MixedPrecisionPolicy()) == MixedPrecisionPolicy()
    assert with_reduce_dtype(BF16) is BF16


def test_a_callers_name_may_stand_for_a_policy_a_dtype_or_a_callable() -> None:
    policies = {"router": VERBATIM, "norm": float32, "wide": lambda base: BF16_OUT}
    assert resolve(BF16, bfloat16, policy="router", policies=policies) == (float16, float16, float64, False)
    assert resolve(BF16, bfloat16, policy="norm", policies=policies) == (float32, float32, bfloat16, True)
    assert resolve(BF16, bfloat16, policy="wide", policies=policies) == (bfloat16, float32, float32, True)


def test_a_callable_makes_its_policy_from_the_callers() -> None:
    def halve(base: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=float16, reduce_dtype=base.reduce_dtype)

    assert resolve(BF16, bfloat16, policy=halve) == (float16, float32, None, True)


@pytest.mark.parametrize(
    ("policy", "wrong", "write"),
    [
        (
            "fp23",
            "no policy has that name",
            "Did you mean 'fp32'? Write one of 'bf16', 'fp16', 'fp32', 'inherit', 'router', or name it in "
            "policies={'fp23': ...}",
        ),
        (
            "xyz",
            "no policy has that name",
            "Write one of 'bf16', 'fp16', 'fp32', 'inherit', 'router', or name it in policies={'xyz': ...}",
        ),
        (lambda base: float32, "the callable returned a dtype", "Return a MixedPrecisionPolicy"),
        (lambda base: None, "the callable returned a NoneType", "Return a MixedPrecisionPolicy"),
    ],
)
@pytest.mark.report(31)
def test_a_policy_that_resolves_to_nothing_says_what_exists(policy: Any, wrong: str, write: str) -> None:
    with pytest.raises(PolicyProblem) as problem:
        resolve(BF16, bfloat16, policy=policy, policies={"router": VERBATIM})
    assert (problem.value.wrong, problem.value.write) == (wrong, write)
    assert str(problem.value) == wrong


def test_the_callers_names_are_checked_before_anything_uses_them() -> None:
    problems = check_policies({"fp32": BF16, "ok": BF16, "text": "bf16", "int": torch.int8, "cls": dict})  # type: ignore[dict-item]
    write = "Write a MixedPrecisionPolicy, a floating-point torch.dtype or a callable that makes one"
    assert [(name, problem.wrong, problem.write) for name, problem in problems] == [
        ("fp32", "that name has a meaning of its own", "Choose another name"),
        ("text", "'bf16' is no policy", write),
        ("int", "torch.int8 is no policy", write),
        ("cls", "<class 'dict'> is no policy", write),
    ]


DTYPES = st.sampled_from([bfloat16, float16, float32, float64])
MAYBE = st.none() | DTYPES
BASES = st.builds(
    MixedPrecisionPolicy,
    param_dtype=MAYBE,
    reduce_dtype=MAYBE,
    output_dtype=MAYBE,
    cast_forward_inputs=st.booleans(),
)


@given(base=BASES, enclosing=MAYBE, policy=st.sampled_from(["inherit", "fp32", "bf16", "fp16"]) | DTYPES)
def test_an_output_is_cast_only_to_the_enclosing_dtype(base: Any, enclosing: Any, policy: Any) -> None:
    param, reduce, output, _ = resolve(base, enclosing, policy=policy)
    assert (reduce is None) == (param is None and base.reduce_dtype is None)
    assert output is None or output is enclosing
    if param is not None and enclosing is not None and param is not enclosing:
        assert output is enclosing


@given(base=BASES, enclosing=MAYBE, policy=st.sampled_from(["inherit", "fp32", "bf16", "fp16"]) | DTYPES)
def test_a_module_that_casts_for_itself_is_never_cast(base: Any, enclosing: Any, policy: Any) -> None:
    resolved = resolve(base, enclosing, policy=policy, casts_itself=True)
    assert resolved[2:] == (None, False)
    assert resolved[:2] == resolve(base, enclosing, policy=policy)[:2]


@given(base=BASES, enclosing=MAYBE, verbatim=BASES, is_root=st.booleans())
def test_a_verbatim_policy_depends_on_nothing_around_it(
    base: Any, enclosing: Any, verbatim: Any, is_root: bool
) -> None:
    resolved = resolve(base, enclosing, policy=verbatim, is_root=is_root)
    written = with_reduce_dtype(verbatim)
    assert resolved == (
        written.param_dtype,
        written.reduce_dtype,
        written.output_dtype,
        written.cast_forward_inputs,
    )


@pytest.mark.parametrize(("storage", "island"), [(float32, bfloat16), (bfloat16, float32)])
def test_without_a_policy_an_islands_output_is_cast_back_to_what_the_unit_around_stores(
    storage: torch.dtype, island: torch.dtype
) -> None:
    norm = fsdp_unit(nn.LayerNorm(4), policy=island)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4)).to(storage)
    policy = plan_annotated(model, lowering="unit").unit("1").policy
    assert (policy.param_dtype, policy.output_dtype) == (island, storage)


def test_without_a_policy_two_storage_dtypes_around_an_island_are_no_dtype_to_cast_to() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False)
            self.norm = fsdp_unit(nn.LayerNorm(4), policy="fp32")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.wide(x))

    assert plan_annotated(Halves(), lowering="unit").unit("norm").policy.output_dtype is None
