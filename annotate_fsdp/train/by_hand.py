"""What a user writes without marks: a plain loop of `fully_shard` calls, to be measured beside ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from annotate_fsdp import Plan


@dataclass(frozen=True)
class HandCall:
    """One `fully_shard` call on one module."""

    module: nn.Module
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int | None


def calls_by_hand(model: nn.Module, plan: Plan) -> tuple[HandCall, ...]:
    """Return the calls of a plan with `lowering="unit"`, children before parents.

    Such a plan of the measured models needs nothing but a policy and a flag for each module.
    """
    for unit in plan.units:
        beyond = (unit.casts, unit.param_dtypes, unit.excluded, unit.forward_methods, unit.paths[1:])
        assert not any(beyond), f"{unit.name} cannot be sharded by one plain call"
    return tuple(
        HandCall(model.get_submodule(unit.path), unit.policy, unit.reshard_after_forward)
        for unit in plan.units
    )


def shard_by_hand(calls: Iterable[HandCall], mesh: DeviceMesh) -> None:
    """Make the calls one after the other."""
    for call in calls:
        fully_shard(
            call.module,
            mesh=mesh,
            mp_policy=call.mp_policy,
            reshard_after_forward=call.reshard_after_forward,
        )
