"""What a unit sends, how it is switched and where it begins: what decides its collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce

import torch


@dataclass(frozen=True)
class Member:
    """A parameter as it is sent.

    - path, aliases: its FQNs.
    - dtype: that it has inside forward, and its gradient in backward.
    - numel: elements of the whole, padded so that all shards are equal.
    """

    path: str
    aliases: tuple[str, ...]
    trainable: bool
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Traffic:
    """What one unit sends.

    - paths: its modules; members: its parameters.
    - reshard: whether forward frees what it gathered, or how many ranks then hold it.
    - shard, replicate: ranks that shard and that replicate; 0 if that is not known, and `replicate` is
      None where nothing is replicated.
    - reduce_dtype: that gradients are sent in; None for their own.
    - gathers_again: whether the backward of each module gathers what was freed, not only that of the last.
    - reduces_unused: whether it reduces all of its gradients, zeros for what was not used, and then one mark
      for each that says whether any rank used it.
    - ahead: the units, by their first module, that it gathers ahead in forward and in backward.
    """

    paths: tuple[str, ...]
    members: tuple[Member, ...]
    reshard: bool | int
    shard: int
    replicate: int | None
    reduce_dtype: torch.dtype | None
    gathers_again: bool = False
    reduces_unused: bool = False
    ahead: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @cached_property
    def gathered(self) -> tuple[torch.dtype, int]:
        """Dtype and elements of the all-gather's output: bytes if the members' dtypes differ."""
        dtypes = {member.dtype for member in self.members}
        if len(dtypes) == 1:
            return dtypes.pop(), sum(member.numel for member in self.members)
        return torch.uint8, sum(member.numel * member.dtype.itemsize for member in self.members)

    def reduced(self, paths: Iterable[str]) -> tuple[torch.dtype, int]:
        """Dtype and elements of the reduce-scatter's input for the gradients of some members."""
        members = [self.by_path[path] for path in paths]
        dtype = self.reduce_dtype or reduce(torch.promote_types, (member.dtype for member in members))
        return dtype, sum(member.numel for member in members)

    @cached_property
    def by_path(self) -> dict[str, Member]:
        """The members by their first FQN."""
        return {member.path: member for member in self.members}


@dataclass(frozen=True)
class Switches:
    """What a user can switch on a unit; see the setters of `FSDPModule`.

    - reduces: whether gradients are reduced (`set_requires_gradient_sync`).
    - all_reduces: whether replicas are too (`set_requires_all_reduce`).
    - reshards: whether backward frees the parameters (`set_reshard_after_backward`).
    """

    reduces: bool = True
    all_reduces: bool = True
    reshards: bool = True


@dataclass(frozen=True)
class Beginning:
    """The state in which FSDP2 is when a step begins.

    - gathered: module paths of the units that are gathered.
    - unreduced: FQNs of parameters whose gradients an earlier microbatch left.
    - finished: module paths of the units whose forwards have ended since the last backward, in order, as an
      evaluation leaves them.
    - indices: (module path, positions in `finished` that its next backwards go by), for units with any.
    """

    gathered: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
