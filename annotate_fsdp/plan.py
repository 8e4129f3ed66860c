"""Declarations to a `Plan`: which modules become FSDP units, in application order. Pure data."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from annotate_fsdp.collectives import Collectives, Step
from annotate_fsdp.events import Event, events_of, outermost_first
from annotate_fsdp.schedule import Schedule
from annotate_fsdp.traffic import Beginning, Member, Switches, Traffic


@dataclass(frozen=True)
class MeshSpec:
    """How many ranks replicate and how many shard: (1, N) is plain FSDP, (R, S) is HSDP.

    - replicate, shard: sizes of the two axes.
    - dim_names: names of the mesh axes, for display; not compared.
    """

    replicate: int
    shard: int
    dim_names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"{self.shard} ranks" if self.replicate == 1 else f"{self.replicate}x{self.shard} ranks"


class ParamInfo(NamedTuple):
    """One parameter of a unit.

    - path: FQN; aliases: its other FQNs, if it is tied.
    - shape: global shape; local_shape: what is left of it on a rank before FSDP shards it (smaller
      only for tensor parallelism).
    - dtype: storage dtype.
    """

    path: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        """Number of elements on a rank before FSDP shards it."""
        return math.prod(self.local_shape)

    def sharded_numel(self, shard: int) -> int:
        """Elements that each rank stores: dim 0 is cut into `shard` equal parts, the last ones padded."""
        first, *rest = self.local_shape or (1,)
        return -(-first // shard) * math.prod(rest)


@dataclass(frozen=True)
class Cast:
    """What our hooks do at the boundary of one module.

    - path: FQN of the module.
    - inputs, outputs: dtype that floating tensors are cast to, None to leave them.
    - is_folded: the module is no FSDP module; called outside of its unit's forward it is an error.
    - parameter: FQN of one of its parameters, by which one sees whether they are gathered.
    """

    path: str
    inputs: torch.dtype | None
    outputs: torch.dtype | None
    is_folded: bool = False
    parameter: str = field(default="", compare=False)

    def __str__(self) -> str:
        words = [f"in {dtype_name(self.inputs)}"] if self.inputs else []
        words += [f"out {dtype_name(self.outputs)}"] if self.outputs else []
        words += ["folded"] if self.is_folded else []
        return f"{self.path} ({', '.join(words) or 'none'})"


@dataclass(frozen=True)
class Island:
    """A tagged module that a mark made a unit of and that was grouped or folded.

    - lowering: `"group"` or `"fold"`.
    - why: the reason.
    - policy: what its own unit would be sharded with.
    - members: FQNs of its parameters.
    - whole_bytes: bytes of its parameters in the compute dtype, without padding.
    """

    path: str
    class_name: str
    provenance: str
    lowering: str
    why: str
    policy: MixedPrecisionPolicy
    members: tuple[str, ...]
    whole_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {
            "path": self.path,
            "class_name": self.class_name,
            "provenance": self.provenance,
            "lowering": self.lowering,
            "why": self.why,
            "policy": policy_to_dict(self.policy),
            "members": list(self.members),
            "whole_bytes": self.whole_bytes,
        }


@dataclass(frozen=True)
class Unit:
    """One `fully_shard` call.

    Compared: `paths`, `members`, `policy`, `reshard_after_forward`, `mesh`, `offload_policy`,
    `param_dtypes`, `casts`, `reduces_unused`. Not compared: where it comes from and how it looks.

    - paths: FQNs of the modules in the call; `("",)` is the root.
    - members: FQNs of the parameters it gathers and frees.
    - policy: what it is sharded with, reduce dtype written out.
    - reshard_after_forward: bool, or the world size to reshard to; None leaves it to FSDP2, which takes
      False for what turns out to be the root and else True.
    - class_names: the modules' classes as the author wrote them.
    - provenance: the mark, rule or default that made it.
    - lowering: `"unit"` (its own call), `"group"` (one call for several islands) or `"kept"` (it was
      sharded before).
    - why: the reason for the lowering, if there is one to give.
    - parameters: the members in detail, in the order of `members`.
    - excluded: FQNs of parameters below it that another unit owns, or nobody.
    - forward_methods: (path, method) pairs to register as entry points.
    - param_dtypes: (FQN, dtype) of the members that compute in another dtype than the policy's.
    - casts: the modules whose inputs and outputs our own hooks cast, since they are no units of FSDP2 or
      share one; see `Cast`.
    - reduces_unused: whether it reduces a zero for each parameter that a rank did not use, since others may
      have used it (`set_reduce_scatter_unused_params`); then the ranks tell each other which of them
      nobody used, and those get no gradient.
    - gathers_again: whether the backward of each of several modules gathers what was freed meanwhile, as
      our hooks see to.
    - is_freed_after_evaluation: whether our hook on the root frees it after a forward without gradients. A
      unit that nobody asked to keep would otherwise run the next forward with the weights of before an
      optimizer step between the two.
    - islands: what the marks meant that was grouped or folded into this unit; see `Island`.
    """

    paths: tuple[str, ...]
    members: tuple[str, ...]
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int | None
    mesh: MeshSpec | None
    offload_policy: OffloadPolicy
    param_dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    casts: tuple[Cast, ...] = ()
    reduces_unused: bool = False
    class_names: tuple[str, ...] = field(default=(), compare=False)
    provenance: str = field(default="", compare=False)
    lowering: str = field(default="unit", compare=False)
    why: str = field(default="", compare=False)
    parameters: tuple[ParamInfo, ...] = field(default=(), compare=False)
    excluded: tuple[str, ...] = field(default=(), compare=False)
    forward_methods: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    islands: tuple[Island, ...] = field(default=(), compare=False)
    gathers_again: bool = field(default=False, compare=False)
    is_freed_after_evaluation: bool = field(default=False, compare=False)

    @property
    def path(self) -> str:
        """FQN of its first module."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """Its paths as one printable name."""
        return ", ".join(path or "(root)" for path in self.paths)

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value}" for name, value in policy_to_dict(self.policy).items())
        return (
            f"{self.name} [{', '.join(self.class_names)}]: {len(self.members)} parameters, {words}, "
            f"reshard_after_forward={self.reshard_after_forward} "
            f"({'; '.join(filter(None, (self.lowering, self.provenance, self.why)))})"
        )

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def is_trainable(self) -> bool:
        """Whether any of its parameters takes a gradient."""
        return any(parameter.trainable for parameter in self.parameters)

    @property
    def storage_dtypes(self) -> tuple[torch.dtype, ...]:
        """Storage dtypes of its parameters, most bytes first."""
        return tuple(self.bytes_by_dtype())

    @property
    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes its parameters have inside forward."""
        if not self.parameters:
            return ()
        count: Counter[torch.dtype] = Counter()
        for parameter in self.parameters:
            count[self.compute_dtype(parameter)] += parameter.numel * parameter.dtype.itemsize
        return tuple(dtype for dtype, _ in count.most_common())

    def compute_dtype(self, parameter: ParamInfo) -> torch.dtype:
        """Return the dtype that one of its parameters has inside forward."""
        return self._own_dtypes.get(parameter.path, self.policy.param_dtype) or parameter.dtype

    @cached_property
    def _own_dtypes(self) -> dict[str, torch.dtype]:
        return dict(self.param_dtypes)

    @property
    def reduce_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes its gradients are reduced in; () if there are none."""
        if not self.is_trainable:
            return ()
        if self.policy.reduce_dtype is not None:
            return (self.policy.reduce_dtype,)
        return tuple({parameter.dtype: None for parameter in self.parameters if parameter.trainable})

    def bytes_by_dtype(self) -> dict[torch.dtype, int]:
        """Stored bytes of the whole, unsharded unit by dtype, most bytes first."""
        count: Counter[torch.dtype] = Counter()
        for parameter in self.parameters:
            count[parameter.dtype] += parameter.numel * parameter.dtype.itemsize
        return dict(count.most_common())

    def sharded_bytes(self) -> int:
        """Stored bytes on each rank, padding included; all of them without a mesh."""
        shard = self.mesh.shard if self.mesh else 1
        return sum(p.sharded_numel(shard) * p.dtype.itemsize for p in self.parameters)

    def gathered_bytes(self) -> int:
        """Bytes of one gathered copy in the compute dtype, padding included."""
        shard = self.mesh.shard if self.mesh else 1
        return sum(p.sharded_numel(shard) * shard * self.compute_dtype(p).itemsize for p in self.parameters)

    def whole_bytes(self) -> int:
        """Bytes of its parameters in the compute dtype, without the padding that depends on the mesh."""
        return sum(p.local_numel * self.compute_dtype(p).itemsize for p in self.parameters)

    def collectives(self) -> Collectives:
        """Return those of one training step if it were alone and a gradient went through it.

        One all-gather for forward, one more for backward if it reshards, one reduce-scatter if it
        trains, one all-reduce with it on a replicated mesh. In a model its neighbours matter too, see
        `Plan.collectives`.
        """
        events = [Event("enter", path, run, True) for run, path in enumerate(self.paths)]
        events += [Event("leave", path, run, True) for run, path in enumerate(self.paths)]
        events.append(Event("output", self.paths[-1], len(self.paths) - 1))
        events += [Event("gradient", member.path) for member in self.parameters if member.trainable]
        return Schedule([self.traffic()]).play([*events, Event("end")])

    def traffic(self, mesh: MeshSpec | None = None) -> Traffic:
        """Return what it sends, on `mesh` if it was planned without one."""
        mesh = self.mesh or mesh
        shard = mesh.shard if mesh else 1
        reshard = self.reshard_after_forward
        return Traffic(
            paths=self.paths,
            members=tuple(
                Member(
                    path=parameter.path,
                    aliases=parameter.aliases,
                    trainable=parameter.trainable,
                    dtype=self.compute_dtype(parameter)
                    if parameter.dtype.is_floating_point
                    else parameter.dtype,
                    numel=parameter.sharded_numel(shard) * shard,
                )
                for parameter in self.parameters
            ),
            reshard="" not in self.paths if reshard is None else reshard,
            shard=mesh.shard if mesh else 0,
            # a mesh of two axes replicates, if only once
            replicate=mesh.replicate if mesh and (mesh.replicate > 1 or len(mesh.dim_names) > 1) else None,
            reduce_dtype=self.policy.reduce_dtype,
            gathers_again=self.gathers_again,
            reduces_unused=self.reduces_unused,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {
            "paths": list(self.paths),
            "class_names": list(self.class_names),
            "members": list(self.members),
            "policy": policy_to_dict(self.policy),
            "reshard_after_forward": self.reshard_after_forward,
            "mesh": [self.mesh.replicate, self.mesh.shard] if self.mesh else None,
            "offload": offload_name(self.offload_policy),
            "lowering": self.lowering,
            "why": self.why,
            "provenance": self.provenance,
            "storage_bytes": {dtype_name(d): b for d, b in self.bytes_by_dtype().items()},
            "compute_dtypes": [dtype_name(d) for d in self.compute_dtypes],
            "reduce_dtypes": [dtype_name(d) for d in self.reduce_dtypes],
            "numel": self.numel,
            "trainable": self.is_trainable,
            "sharded_bytes": self.sharded_bytes(),
            "gathered_bytes": self.gathered_bytes(),
            "collectives": dict(self.collectives().counts()),
            "excluded": list(self.excluded),
            "forward_methods": [list(pair) for pair in self.forward_methods],
            "param_dtypes": {path: dtype_name(dtype) for path, dtype in self.param_dtypes},
            "reduces_unused": self.reduces_unused,
            "islands": [island.to_dict() for island in self.islands],
        }


@dataclass(frozen=True, eq=False)
class Plan:
    """What `shard_annotated` will do, or did: units in application order, children before parents.

    `==` compares the layout: for each unit its paths, members, policy, reshard flag, mesh and offload
    policy, but neither provenance nor reasons. A mesh is compared only where both plans know theirs, so
    that a plan made without a mesh can be held against one read back from a sharded model.

    - units: in application order.
    - mesh: None if it was planned without one.
    - ignored: FQNs of the parameters that FSDP leaves alone.
    - sequence: paths of all modules in the units, children before parents in registration order: the order
      in which their forwards end, as far as that can be known without running them.
    - prefetch: how many units ahead each one gathers in forward and in backward; 0 leaves it to FSDP2.
    - registered: FQNs of all parameters in registration order.
    """

    units: tuple[Unit, ...]
    mesh: MeshSpec | None = None
    ignored: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    prefetch: tuple[int, int] = (0, 0)
    registered: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return not any(True for _ in self.differences(other))

    def __hash__(self) -> int:
        return hash(tuple(unit.paths for unit in self.units))

    def __len__(self) -> int:
        return len(self.units)

    def __str__(self) -> str:
        return "\n".join(str(unit) for unit in self.units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def unit(self, path: str) -> Unit:
        """Return the unit that the module at `path` is sharded with.

        Raises:
            KeyError: no unit has that path.
        """
        for unit in self.units:
            if path in unit.paths:
                return unit
        raise KeyError(f"no unit at {path!r}; units: {', '.join(unit.name for unit in self.units)}")

    def owner(self, parameter: str) -> Unit:
        """Return the unit that gathers the parameter with this FQN.

        Raises:
            KeyError: no unit owns it.
        """
        for unit in self.units:
            if parameter in unit.members:
                return unit
        raise KeyError(f"no unit owns {parameter!r}")

    @property
    def numel(self) -> int:
        """Number of parameters in all units."""
        return sum(unit.numel for unit in self.units)

    def collectives(self, step: Step | None = None) -> Collectives:
        """Return the collectives that FSDP2 calls in a step, in order.

        Args:
            step: how it differs from the plain one, in which all modules run once in the order of
                `sequence` and everything trainable gets a gradient.

        Raises:
            AnnotationError: `step` names a path that is no unit's module.
        """
        schedule, events = self.schedule(step)
        return schedule.play(events)

    def schedule(self, step: Step | None = None) -> tuple[Schedule, Iterable[Event]]:
        """Return FSDP2's hooks at the beginning of a step, and what will happen in it; as `collectives`.

        Raises:
            AnnotationError: `step` names a path that is no unit's module.
        """
        step = step or Step()
        traffic = self.traffic()
        events = events_of(traffic, self._sequence, self.registered, step)
        switches = {} if step.synchronizes else {unit.path: Switches(reduces=False) for unit in self.units}
        schedule = Schedule(traffic, Beginning(step.gathered), switches)
        if step.evaluated:
            evaluation = replace(step, backward=False)
            schedule.evaluate(events_of(traffic, self._sequence, self.registered, evaluation), step.gathered)
        return schedule, events

    @cached_property
    def ahead(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """What each unit gathers ahead in forward and in backward, by `Unit.path`, nearest first.

        Units run in registration order: a unit is entered before those inside it and left after them, and
        one of several modules is entered with its first and left with its last.
        """
        entered = outermost_first(self._sequence)
        left = {path: position for position, path in enumerate(self._sequence)}
        forward = sorted(self.units, key=lambda unit: min(entered[path] for path in unit.paths))
        backward = sorted(self.units, key=lambda unit: -max(left[path] for path in unit.paths))
        found = []
        for order, depth in zip((forward, backward), self.prefetch, strict=True):
            gathering = [unit.path for unit in order if unit.members]
            after = 0  # position in `gathering` of what comes after the unit at hand
            of_unit = {}
            for unit in order:
                after += bool(unit.members)
                of_unit[unit.path] = tuple(gathering[after : after + depth])
            found.append(of_unit)
        return {unit.path: (found[0][unit.path], found[1][unit.path]) for unit in self.units}

    def traffic(self, mesh: MeshSpec | None = None) -> list[Traffic]:
        """Return what its units send, on `mesh` if they were planned without one; outer units first."""
        found = outermost_first(self._sequence)
        units = sorted(self.units, key=lambda unit: min(found[path] for path in unit.paths))
        traffic = [unit.traffic(mesh) for unit in units]
        if not any(self.prefetch):
            return traffic
        return [replace(each, ahead=self.ahead[each.paths[0]]) for each in traffic]

    @cached_property
    def _sequence(self) -> tuple[str, ...]:
        """The sequence of the units' modules; what it does not know comes right before what holds it."""
        missing = dict.fromkeys(path for unit in self.units for path in unit.paths)
        sequence = [path for path in self.sequence if path in missing]
        for path in sequence:
            del missing[path]
        for path in missing:
            holders = (at for at, one in enumerate(sequence) if not one or path.startswith(f"{one}."))
            sequence.insert(next(holders, len(sequence)), path)
        return tuple(sequence)

    def differences(self, other: Plan) -> Iterator[str]:
        """Yield one line for each difference in layout between this plan and `other`."""
        mine = {unit.paths: unit for unit in self.units}
        theirs = {unit.paths: unit for unit in other.units}
        for paths, unit in mine.items():
            if paths not in theirs:
                yield f"{unit.name}: a unit here, none there"
                continue
            for what, here, there in _unit_differences(unit, theirs[paths]):
                yield f"{unit.name}: {what} is {here} here, {there} there"
        for paths, unit in theirs.items():
            if paths not in mine:
                yield f"{unit.name}: no unit here, one there"
        if list(mine) != list(theirs) and mine.keys() == theirs.keys():
            yield "the units are applied in another order"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-able data."""
        collectives = self.collectives()
        of_unit = collectives.by_unit()
        none = Collectives(())
        return {
            "mesh": [self.mesh.replicate, self.mesh.shard] if self.mesh else None,
            "numel": self.numel,
            "collectives": dict(collectives.counts()),
            "collectives_by_phase": collectives.to_dict(),
            "ignored": list(self.ignored),
            "units": [
                unit.to_dict() | {"collectives": dict(of_unit.get(unit.path, none).counts())}
                for unit in self.units
            ],
        }

    def facts(self) -> list[dict[str, str]]:
        """Return what every rank must hold in common, as text by name: of the plan, then of each unit."""
        policies = {id(unit.policy): unit.policy for unit in self.units}  # units share a few of them
        texts = {key: json.dumps(policy_to_dict(policy)) for key, policy in policies.items()}
        units = (unit_facts(unit, texts[id(unit.policy)]) for unit in self.units)
        return [{"modules": "", "prefetch": str(self.prefetch)}, *units]

    def fingerprint(self) -> str:
        """Return a SHA-256 of `facts`: the layout, and each parameter's place, shape, dtype and grad flag."""
        words = (word for facts in self.facts() for pair in facts.items() for word in pair)
        return hashlib.sha256("\0".join(words).encode()).hexdigest()


def unit_facts(unit: Unit, policy: str) -> dict[str, str]:
    """Return what every rank must hold in common about a unit, as text by name, parameters in their order.

    Args:
        unit: one of a plan.
        policy: its policy as text.
    """
    facts = {
        "modules": unit.name,
        "policy": policy,
        "reshard_after_forward": str(unit.reshard_after_forward),
        "mesh": str(unit.mesh),
        "offload": offload_name(unit.offload_policy),
        "excluded": ", ".join(unit.excluded),
        "param_dtypes": _dtypes_text(unit.param_dtypes),
        "casts": ", ".join(map(str, unit.casts)),
        "reduces_unused": str(unit.reduces_unused),
    }
    for parameter in unit.parameters:
        flag = "trainable" if parameter.trainable else "frozen"
        shape = "x".join(map(str, parameter.shape))
        facts[f"parameter {parameter.path}"] = f"{dtype_name(parameter.dtype)} [{shape}] {flag}"
    return facts


def _unit_differences(mine: Unit, theirs: Unit) -> Iterator[tuple[str, object, object]]:
    """Yield (what, here, there) for two units of the same modules."""
    if sorted(mine.members) != sorted(theirs.members):
        here = sorted(set(mine.members) - set(theirs.members))
        there = sorted(set(theirs.members) - set(mine.members))
        yield "parameters", _some(here), _some(there)
    ours, others = policy_to_dict(mine.policy), policy_to_dict(theirs.policy)
    for name, value in ours.items():
        if value != others[name]:
            yield name, value, others[name]
    if mine.param_dtypes != theirs.param_dtypes:
        yield "param_dtypes", _dtypes_text(mine.param_dtypes), _dtypes_text(theirs.param_dtypes)
    if mine.casts != theirs.casts:
        here = sorted(map(str, set(mine.casts) - set(theirs.casts)))
        there = sorted(map(str, set(theirs.casts) - set(mine.casts)))
        yield "casts", _some(here), _some(there)
    if mine.reduces_unused != theirs.reduces_unused:
        yield "reduces_unused", mine.reduces_unused, theirs.reduces_unused
    if mine.reshard_after_forward != theirs.reshard_after_forward or (
        isinstance(mine.reshard_after_forward, bool) != isinstance(theirs.reshard_after_forward, bool)
    ):
        yield "reshard_after_forward", mine.reshard_after_forward, theirs.reshard_after_forward
    if mine.mesh and theirs.mesh and mine.mesh != theirs.mesh:
        yield "mesh", mine.mesh, theirs.mesh
    if mine.offload_policy != theirs.offload_policy:
        yield "offload_policy", mine.offload_policy, theirs.offload_policy


def _dtypes_text(dtypes: tuple[tuple[str, torch.dtype], ...]) -> str:
    return ", ".join(f"{path}: {dtype_name(dtype)}" for path, dtype in dtypes) or "none"


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return (", ".join(paths[:3]) + more) or "none besides"


def order_units(
    units: Iterable[Unit], finished: Mapping[str, int], parents: Mapping[str, list[str]]
) -> tuple[Unit, ...]:
    """Return `units` in application order: what lies inside a unit before it, else in post-order.

    Args:
        units: in any order.
        finished: post-order position of each module path.
        parents: paths of the modules that register each module path.
    """
    units = sorted(units, key=lambda unit: min(finished[path] for path in unit.paths))
    unit_of = {path: position for position, unit in enumerate(units) for path in unit.paths}
    nearest: dict[str, frozenset[int]] = {}
    alone = [frozenset({position}) for position in range(len(units))]
    for path in sorted(finished, key=finished.__getitem__, reverse=True):  # parents first
        around: frozenset[int] = frozenset()
        for parent in parents[path]:
            own = unit_of.get(parent)
            here = nearest[parent] if own is None else alone[own]
            around = around | here if around else here
        nearest[path] = around
    waiting: list[set[int]] = [set() for _ in units]  # the units that must come before each
    for position, unit in enumerate(units):
        for path in unit.paths:
            for outer in nearest[path]:
                if outer != position:
                    waiting[outer].add(position)
    ordered: list[Unit] = []
    done: set[int] = set()

    def place(position: int) -> None:
        """Append a unit after all that must come before it."""
        stack = [position]
        while stack:
            top = stack[-1]
            if top in done:
                stack.pop()
                continue
            missing = sorted(waiting[top] - done - set(stack), reverse=True)
            if missing:
                stack += missing
                continue
            done.add(stack.pop())
            ordered.append(units[top])

    for position in range(len(units)):
        place(position)
    return tuple(ordered)


_DTYPE_SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
}


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the short name of a dtype: fp32, bf16, int8, ...; "-" for None."""
    if dtype is None:
        return "-"
    return _DTYPE_SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def policy_to_dict(policy: MixedPrecisionPolicy) -> dict[str, str | bool | None]:
    """Return a policy's compared fields as JSON-able data."""
    return {
        "param_dtype": dtype_name(policy.param_dtype) if policy.param_dtype else None,
        "reduce_dtype": dtype_name(policy.reduce_dtype) if policy.reduce_dtype else None,
        "output_dtype": dtype_name(policy.output_dtype) if policy.output_dtype else None,
        "cast_forward_inputs": policy.cast_forward_inputs,
    }


def offload_name(policy: OffloadPolicy) -> str:
    """Return "none", "cpu" or "cpu-pinned"."""
    if isinstance(policy, CPUOffloadPolicy):
        return "cpu-pinned" if policy.pin_memory else "cpu"
    return "none"


def human_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit: 16 KiB, 2.6 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{f'{count:.1f}'.removesuffix('.0')} {unit}"
