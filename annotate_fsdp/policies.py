"""Policy names to `MixedPrecisionPolicy`, given the caller's and the enclosing unit's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp.marks import Policy, UnitSpec, is_float_dtype

DTYPE_NAMES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
RESERVED_NAMES = frozenset({"inherit", *DTYPE_NAMES})


class PolicyProblem(ValueError):
    """Why a policy cannot be resolved; the plan adds the path and makes a finding of it."""

    def __init__(self, wrong: str, write: str) -> None:
        super().__init__(wrong)
        self.wrong = wrong
        self.write = write


def policy_dtype(policy: Policy) -> torch.dtype | None:
    """Return the compute dtype that `policy` names by itself, None if that depends on the caller."""
    if isinstance(policy, torch.dtype):
        return policy
    if isinstance(policy, MixedPrecisionPolicy):
        return policy.param_dtype
    return DTYPE_NAMES.get(policy) if isinstance(policy, str) else None


def with_reduce_dtype(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return `policy` with its reduce dtype written out.

    An unset `reduce_dtype` follows `param_dtype` up to torch 2.14 and the gradient's dtype from 2.15;
    written out, every version does the same. Both stay None when neither is set (storage dtype).
    """
    if policy.reduce_dtype is not None or policy.param_dtype is None:
        return policy
    return replace(policy, reduce_dtype=policy.param_dtype)


def check_policies(policies: Mapping[str, Policy]) -> list[tuple[str, PolicyProblem]]:
    """Return (name, problem) for the caller's named policies that can never be resolved."""
    problems = []
    for name, value in policies.items():
        if name in RESERVED_NAMES:
            wrong = "that name has a meaning of its own"
            problems.append((name, PolicyProblem(wrong, "Choose another name")))
        elif not _is_policy(value):
            wrong = f"{value!r} is no policy"
            write = "Write a MixedPrecisionPolicy, a floating-point torch.dtype or a callable that makes one"
            problems.append((name, PolicyProblem(wrong, write)))
    return problems


def resolve_policy(
    spec: UnitSpec,
    *,
    base: MixedPrecisionPolicy,
    enclosing_dtype: torch.dtype | None,
    policies: Mapping[str, Policy],
    is_root: bool,
) -> MixedPrecisionPolicy:
    """Resolve a mark to the policy its unit is sharded with.

    Args:
        spec: the mark.
        base: the caller's `mp_policy`.
        enclosing_dtype: compute dtype of the nearest tagged module above (at the root: the caller's);
            None if nothing is cast there.
        policies: the caller's named policies.
        is_root: only the root keeps the caller's `output_dtype`.

    Raises:
        PolicyProblem: the name is unknown or the callable returned something else.
    """
    base = with_reduce_dtype(base if is_root else replace(base, output_dtype=None))
    policy = _named(spec.policy, base, policies)
    if isinstance(policy, MixedPrecisionPolicy):
        if policy is base:
            return _with_boundary(base, spec, enclosing_dtype)
        return with_reduce_dtype(policy)
    dtype = policy
    reduce_dtype = dtype if dtype.itemsize >= torch.float32.itemsize else base.reduce_dtype or dtype
    resolved = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=(base.output_dtype if is_root else None) or enclosing_dtype,
        cast_forward_inputs=True,
    )
    return _with_boundary(resolved, spec, enclosing_dtype)


def _named(
    policy: Policy, base: MixedPrecisionPolicy, policies: Mapping[str, Policy]
) -> MixedPrecisionPolicy | torch.dtype:
    """Follow names and callables until a policy or a dtype is reached; `base` itself means inherit."""
    if isinstance(policy, str):
        if policy == "inherit":
            return base
        if policy in DTYPE_NAMES:
            return DTYPE_NAMES[policy]
        if policy not in policies or policy in RESERVED_NAMES or not _is_policy(policies[policy]):
            known = sorted(RESERVED_NAMES | set(policies))
            close = get_close_matches(policy, known, n=1)
            meant = f"Did you mean {close[0]!r}? " if close else ""
            names = ", ".join(repr(name) for name in known)
            raise PolicyProblem(
                "no policy has that name",
                f"{meant}Write one of {names}, or name it in policies={{{policy!r}: ...}}",
            )
        return _named(policies[policy], base, {})
    if isinstance(policy, torch.dtype | MixedPrecisionPolicy):
        return policy
    made = policy(base)
    if not isinstance(made, MixedPrecisionPolicy):
        raise PolicyProblem(f"the callable returned a {type(made).__name__}", "Return a MixedPrecisionPolicy")
    return made


def _with_boundary(
    policy: MixedPrecisionPolicy, spec: UnitSpec, enclosing_dtype: torch.dtype | None
) -> MixedPrecisionPolicy:
    """Apply the mark's own words about casts and reduction."""
    changes: dict[str, Any] = {}
    if spec.casts_itself:
        changes |= {"cast_forward_inputs": False, "output_dtype": None}
    elif policy.output_dtype is None and policy.param_dtype is not None:
        # a unit whose dtype is not the one around it must not hand that dtype on
        changes["output_dtype"] = enclosing_dtype if policy.param_dtype != enclosing_dtype else None
    if spec.output_dtype != "enclosing":
        changes["output_dtype"] = spec.output_dtype
    if spec.reduce_dtype is not None:
        changes["reduce_dtype"] = spec.reduce_dtype
    return replace(policy, **changes)


def _is_policy(value: object) -> bool:
    if isinstance(value, torch.dtype):
        return is_float_dtype(value)
    return isinstance(value, MixedPrecisionPolicy) or (callable(value) and not isinstance(value, type))
