"""Record what a real step does: dtypes inside every unit's forward, calls, collectives."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from annotate_fsdp.collect import Node, Tree, collect_tree, wrapper_chain
from annotate_fsdp.collectives import Collective, Collectives, Phase
from annotate_fsdp.events import Event
from annotate_fsdp.introspect import (
    HoldKind,
    applied_plan,
    forwards_before,
    fsdp_state,
    is_entered,
    is_gathered,
    named_shards,
    on_hold,
    plan_of,
    ranks_of,
    reduced_of,
    shards_of,
    surround,
    switches_of,
    unreduced_of,
    watch_communication,
    watch_entries,
)
from annotate_fsdp.lockstep import Announcement, Lockstep
from annotate_fsdp.observation import Observation, Verdict
from annotate_fsdp.plan import Island, Plan, Unit, dtype_name
from annotate_fsdp.probes import (
    Call,
    CountCollectives,
    float_dtypes,
    in_backward,
    tensors_in,
    watch_to_local,
)
from annotate_fsdp.schedule import Schedule
from annotate_fsdp.traffic import Beginning, Switches
from annotate_fsdp.verdict import (
    Seen,
    compare_collectives,
    compare_with_plan,
    notes_on,
    reads_of_shards,
    summarize,
)


@contextlib.contextmanager
def observe(model: nn.Module, plan: Plan | None = None, *, cross_rank: bool = False) -> Iterator[Observation]:
    """Record the first forward and backward of `model` that run inside, and hold them against a plan.

    Recording ends when the backward through the model's output is complete, or when a second forward of
    the model begins. A forward alone (evaluation) will do. Compiled modules run uncompiled inside, so
    that what happens between their operations can be seen. Nothing is left on the model afterwards.

    A weight that is read while it is sharded is a disagreement too, and a note on the exception if the
    read fails.

    Args:
        model: sharded by `shard_annotated` or by hand.
        plan: what to compare with; by default the plan that `shard_annotated` applied, else the one read
            back from FSDP2, which only what forward sees can contradict.
        cross_rank: all ranks of the mesh are inside such a block, and before each collective of FSDP2 they
            tell each other through the process group's store which it is, until the block ends. Slow.

    Raises:
        AnnotationError: nothing in `model` is sharded.
        StepMismatchError: with `cross_rank`, the ranks are about to do different things; on every rank.
            A rank that says nothing is waited for as long as the store's timeout. FSDP2 does not finish
            the step, so the model must be built again.
    """
    recorder = _Recorder(model, plan)
    with contextlib.ExitStack() as stack:
        observation = Observation(recorder.tree.root.class_name, recorder.judge)
        stack.callback(observation.close)
        recorder.install(stack)
        if cross_rank:
            stack.enter_context(recorder.keep_step())
        try:
            yield observation
        except Exception as error:
            for text in reads_of_shards(recorder.reads, recorder.bypassed):
                error.add_note(text)
            raise


@dataclass(eq=False)
class _Holder:
    """Where a parameter is found inside forward: FSDP2 puts the gathered one in the shard's place."""

    path: str
    module: nn.Module
    name: str


class _Recorder:
    """The hooks of one `observe` block, and what they have seen so far."""

    def __init__(self, model: nn.Module, plan: Plan | None) -> None:
        self.tree = collect_tree(model)
        self.actual = plan_of(model)
        self.plan = plan if plan is not None else _applied_plan(self.tree.root) or self.actual
        self.is_started = self.is_finished = self.has_backward = False
        self.root_calls = 0
        self.calls: list[Collective] = []  # FSDP2's
        self.other_calls: list[Call] = []  # the model's own
        self.communicating: list[str] = []  # the units whose turn it is, innermost last
        self.events: list[Event] = []
        self.running: list[tuple[str, int]] = []  # path and number of the runs that are going on
        self.runs = 0
        self.beginning = Beginning()
        self.switches: dict[str, Switches] = {}
        self.reads: dict[str, dict[str, None]] = {}  # parameters read while sharded -> by what
        self.bypassed: dict[str, None] = {}  # modules whose forward was called past the hooks
        self.depth = 0  # of the forwards that are going on
        self.has_queued_end = False
        self.tensor_hooks: list[Any] = []
        self.lockstep: Lockstep | None = None
        self.hooked: dict[int, torch.Tensor] = {}  # parameters by id, kept so that no id comes back
        self.nodes = {node.path: node for node in self.tree.nodes}
        self.holders = _find_holders(self.tree)
        self.seen = list(self._modules_to_watch())
        self._unit_modules = dict(self._sharded_modules())
        self.reducing: tuple[str, ...] = ()
        self.shards = [module for node in self.tree.nodes if (module := _sharded_module(node)) is not None]

    def _modules_to_watch(self) -> Iterator[Seen]:
        """Yield every module that is a unit, in the plan or in FSDP2's state, in application order."""
        planned = {path: unit for unit in self.plan.units for path in unit.paths}
        actual = {path: unit for unit in self.actual.units for path in unit.paths}
        islands = {island.path: (island, unit) for unit in self.plan.units for island in unit.islands}
        owners = {member: unit for unit in self.actual.units for member in unit.members}
        for path in {**planned, **actual, **islands}:
            class_name = self.nodes[path].class_name if path in self.nodes else "a module that is not there"
            island, unit = islands.get(path, (None, planned.get(path)))
            held = actual.get(path)
            if held is None and island is not None and island.lowering == "fold":
                held = owners.get(island.members[0])
            yield Seen(path, class_name, unit, held, island)

    # -- hooks -------------------------------------------------------------------------------------

    def install(self, stack: contextlib.ExitStack) -> None:
        """Put the hooks in place; `stack` takes them away again."""
        stack.callback(self._remove_tensor_hooks)
        for seen in self.seen:
            if seen.path in self.nodes:
                members = _members_inside(seen)
                held = [holder for path in dict.fromkeys(members) for holder in self.holders.get(path, ())]
                self._watch(self.nodes[seen.path], seen, held, stack)
        for path, module in self._sharded_modules():
            stack.callback(watch_communication(module, functools.partial(self._communicate, path)))
        self._watch_root(_hooked_module(self.tree.root), stack)
        stack.enter_context(CountCollectives(self._count, self._note_read))
        stack.enter_context(watch_to_local(self._note_read))
        stack.callback(on_hold(self._note_hold))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))

    def _watch(self, node: Node, seen: Seen, held: list[_Holder], stack: contextlib.ExitStack) -> None:
        module = _hooked_module(node)

        def entering(mod: nn.Module, *_: object) -> None:
            if not self.is_started and not self.is_finished:
                self._begin()

        def before(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_recording():
                self._note_enter(seen.path, (args, kwargs))
                self._note_call(seen, held, args, kwargs)

        def returned(mod: nn.Module, args: object, output: object) -> None:
            if self._is_recording():
                self._note_leave(seen.path, output)
                seen.raw_outputs.update(dict.fromkeys(float_dtypes(output)))

        def after(mod: nn.Module, args: object, output: object) -> None:
            if self._is_recording():
                seen.outputs.update(dict.fromkeys(float_dtypes(output)))

        def after_method(mod: nn.Module, raw: object, output: object) -> None:
            returned(mod, None, raw)
            after(mod, None, output)
            if node.index == 0:
                self._await_backward(output)

        def recomputing(mod: nn.Module, args: object) -> None:
            if self._is_recording() and in_backward():
                seen.recomputes += 1

        # FSDP2's pre-hook comes first and its hook last among those that were there at sharding: what is
        # registered now runs after the cast of inputs, and before or after the cast of outputs.
        handles = [
            module.register_forward_pre_hook(entering, prepend=True),
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(returned, prepend=True),
            module.register_forward_hook(after),
        ]
        stack.callback(surround(module, "forward", functools.partial(self._in_forward, seen.path, module)))
        if node.inner is not module:  # recomputation calls what a checkpoint wrapper wraps, not itself
            handles.append(node.inner.register_forward_pre_hook(recomputing))
        for handle in handles:
            stack.callback(handle.remove)
        # Modules that share a unit share its state; each entry says which module it is about.
        if fsdp_state(module) is not None:
            only = _only_for(module)
            stack.callback(watch_entries(module, only(entering), only(before), only(after_method)))

    def _watch_root(self, root: nn.Module, stack: contextlib.ExitStack) -> None:
        def entering(mod: nn.Module, args: object) -> None:
            if not self._is_recording(started=False) or in_backward():
                return
            if self.root_calls:
                self.finish()
            self.root_calls += 1

        def after(mod: nn.Module, args: object, output: object) -> None:
            if self._is_recording():
                self._await_backward(output)
            if self.lockstep is not None:
                self.lockstep.announce(Announcement("the end of the model's forward"))

        stack.callback(root.register_forward_pre_hook(entering, prepend=True).remove)
        stack.callback(root.register_forward_hook(after).remove)

    @contextlib.contextmanager
    def keep_step(self) -> Iterator[None]:
        """Compare the sequence of FSDP2's collectives with that of the other ranks."""
        found = (ranks_of(module) for module in reversed(self._unit_modules.values()))
        ranks = next(filter(None, found), [])
        if len(ranks) < 2:
            yield
            return
        self.lockstep = Lockstep(ranks)
        with self.lockstep.block():
            yield

    # -- what they note ----------------------------------------------------------------------------

    def _is_recording(self, started: bool = True) -> bool:
        return not self.is_finished and (self.is_started or not started)

    def _note_call(self, seen: Seen, held: list[_Holder], args: object, kwargs: object) -> None:
        if in_backward():
            seen.recomputes += 1
        else:
            seen.calls += 1
        seen.inputs.update(dict.fromkeys(float_dtypes((args, kwargs))))
        owner = _sharded_module(self.nodes[seen.path])
        shards = shards_of(owner) if owner is not None else frozenset().union(*map(shards_of, self.shards))
        for holder in held:
            parameter = holder.module._parameters.get(holder.name)
            if parameter is None or not parameter.is_floating_point():
                continue
            if id(parameter) in shards:
                seen.sharded[holder.path] = None
            else:
                seen.parameters.setdefault(holder.path, {})[parameter.dtype] = None
                self._await_gradient(holder.path, parameter)

    def _await_gradient(self, path: str, parameter: torch.Tensor) -> None:
        if parameter.requires_grad and id(parameter) not in self.hooked:
            self.hooked[id(parameter)] = parameter
            self._on_gradient((parameter,), Event("gradient", path))

    def _note_hold(self, kind: HoldKind, modules: Sequence[nn.Module]) -> None:
        """Note what `gathered` does with the unit of `modules`."""
        ids = {id(module) for module in modules}
        unit = next(
            (u for u, (_, m) in zip(self.actual.units, self._sharded_modules(), strict=True) if id(m) in ids),
            None,
        )
        if unit is None or self.is_finished:
            return
        if not self.is_started:
            self._begin()
        if kind != "held":
            self.events.append(Event(kind, unit.path, is_again=in_backward()))
            return
        for path in unit.members:
            for holder in self.holders.get(path, ()):
                parameter = holder.module._parameters[holder.name]
                if parameter is not None:
                    self._await_gradient(path, parameter)

    def _begin(self) -> None:
        """Note in what state the step begins."""
        self.is_started = True
        names = self._names()
        modules = list(self._sharded_modules())
        found = (names.get((id(owner), name)) for _, m in modules for owner, name in unreduced_of(m))
        self.beginning = Beginning(
            tuple(path for path, module in modules if is_gathered(module)),
            tuple(path for path in found if path is not None),
            *forwards_before(modules),
        )
        self.switches = {path: switches_of(module) for path, module in modules}

    def _note_enter(self, path: str, inputs: object) -> None:
        run, self.runs = self.runs, self.runs + 1
        self.running.append((path, run))
        tracked = list(_tracked(inputs))
        self.events.append(Event("enter", path, run, bool(tracked), in_backward()))
        self._on_gradient(tracked, Event("input", path, run))

    def _note_leave(self, path: str, output: object) -> None:
        while self.running:  # those that an exception ended, as recomputation ends, are passed over
            name, run = self.running.pop()
            if name == path:
                tracked = list(_tracked(output))
                self.events.append(Event("leave", path, run, bool(tracked), in_backward()))
                self._on_gradient(tracked, Event("output", path, run))
                return

    def _on_gradient(self, tensors: Iterable[torch.Tensor], event: Event) -> None:
        """Note `event` when a gradient reaches one of `tensors`."""

        def reached(gradient: object) -> None:
            if self._is_recording():
                if not self.has_queued_end:
                    self._enter_backward()
                self.events.append(event)

        for tensor in tensors:
            self.tensor_hooks.append(tensor.register_hook(reached))

    def _enter_backward(self) -> None:
        self.has_queued_end = True
        self.switches = {path: switches_of(module) for path, module in self._sharded_modules()}
        if not self.root_calls:
            self.has_backward = True
        # FSDP2 reduces its last gradients in a callback of its own, which may be queued after this one: a
        # callback that is queued by a callback comes after it.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._leave_backward))

    def _leave_backward(self) -> None:
        self.has_queued_end = False
        if self._is_recording():
            self.events.append(Event("end"))
        if self.has_backward:
            self.finish()

    def _await_backward(self, output: object) -> None:
        """Finish when the backward that reaches the model's output is complete."""

        def reached(gradient: object) -> None:
            if self._is_recording():
                self.has_backward = True
                if not self.has_queued_end:
                    self._enter_backward()

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                self.tensor_hooks.append(tensor.register_hook(reached))

    @contextlib.contextmanager
    def _in_forward(self, path: str, module: nn.Module) -> Iterator[None]:
        """Note a forward that is called past the hooks that gather its parameters."""
        if not self.is_finished and fsdp_state(module) is not None and not is_entered(module):
            if not self.is_started:
                self._begin()
            self.bypassed[path] = None
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def _note_read(self, tensor: torch.Tensor, by: str) -> None:
        """Note that a sharded parameter is read; outside of forwards only for a gradient."""
        if not self._is_recording() or self.communicating or in_backward():
            return
        if self.depth or torch.is_grad_enabled():
            path = self.shard_paths.get(id(tensor))
            if path is not None:
                self.reads.setdefault(path, {})[by] = None

    @functools.cached_property
    def shard_paths(self) -> dict[int, str]:
        """FQNs of the sharded parameters by id."""
        names = self._names()
        found = (one for _, module in self._sharded_modules() for one in named_shards(module))
        return {id(shard): names.get((id(owner), name), name) for owner, name, shard in found}

    def _names(self) -> dict[tuple[int, str], str]:
        return {(id(h.module), h.name): path for path, holders in self.holders.items() for h in holders}

    @contextlib.contextmanager
    def _communicate(self, unit: str) -> Iterator[None]:
        """What is called inside belongs to `unit`."""
        self.communicating.append(unit)
        if self.lockstep is not None:
            self.reducing = tuple(self._reduced(unit))
        try:
            yield
        finally:
            self.communicating.pop()

    def _reduced(self, unit: str) -> Iterator[str]:
        """Yield the FQNs of the parameters whose gradients the unit's next reduction holds."""
        names = self._names()
        for owner, name in reduced_of(self._unit_modules[unit]):
            yield names.get((id(owner), name), name)

    def _announce(self, call: Call) -> None:
        """Wait until the other ranks are about to make the same call of FSDP2."""
        assert self.lockstep is not None
        path = self.communicating[-1]
        back = in_backward()
        name = self.actual.unit(path).name
        words = f"the {call.kind.replace('_', '-')} of unit {name!r} in {'backward' if back else 'forward'}"
        position = self.nodes[path].index
        self.lockstep.announce(
            Announcement(
                f"{words} ({dtype_name(call.dtype)}, {call.numel} elements)",
                path,
                -position if back else position,
                () if call.kind == "all_gather" else self.reducing,
            )
        )

    def _count(self, call: Call) -> None:
        if self.lockstep is not None and self.communicating:
            self._announce(call)
        if not self._is_recording():
            return
        if not self.communicating:
            self.other_calls.append(call)
            return
        phase: Phase = "backward" if in_backward() else "forward"
        unit = self.communicating[-1]
        self.calls.append(Collective(call.kind, unit, phase, call.dtype, call.numel, call.ranks))

    def _sharded_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the first module of each of FSDP2's units, with its path."""
        for unit in self.actual.units:
            module = _sharded_module(self.nodes[unit.path])
            assert module is not None
            yield unit.path, module

    def finish(self) -> None:
        """Record no more."""
        self.is_finished = True

    def _remove_tensor_hooks(self) -> None:
        for hook in self.tensor_hooks:
            hook.remove()
        self.tensor_hooks.clear()

    def judge(self) -> Verdict:
        """Compare what was seen so far with the plan."""
        units = list(_watched_units(self.plan, self.actual))
        schedule = Schedule(self.plan.traffic(self.actual.mesh), self.beginning, self.switches)
        planned, real = schedule.play(self.events), Collectives(tuple(self.calls))
        notes = list(notes_on(self.seen, self.has_backward))
        if any(map(_is_compiled, self.tree.nodes)):
            notes.append("compiled modules ran uncompiled while they were observed")
        if self.other_calls:
            notes.append(f"called by the model itself, not by FSDP2: {_count_kinds(self.other_calls)}")
        return Verdict(
            units=tuple(summarize(self.seen, units, real)),
            disagreements=(
                *reads_of_shards(self.reads, self.bypassed),
                *compare_with_plan(self.plan, self.actual, self.seen),
                *compare_collectives(self.plan, self.actual, planned, real),
            ),
            notes=tuple(notes),
            collectives=real,
            planned_collectives=planned,
            backward=self.has_backward,
        )


def _tracked(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that will get a gradient."""
    if torch.is_grad_enabled():
        yield from (tensor for tensor in tensors_in(value) if tensor.requires_grad)


def _count_kinds(calls: Iterable[Call]) -> str:
    counts = Counter(call.kind for call in calls)
    return ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in counts.items())


def _applied_plan(root: Node) -> Plan | None:
    plans = (applied_plan(module) for module in wrapper_chain(root.module))
    return next((plan for plan in plans if plan is not None), None)


def _sharded_module(node: Node) -> nn.Module | None:
    """The module of a wrapper chain that FSDP2 was applied to."""
    return next((m for m in wrapper_chain(node.module) if fsdp_state(m) is not None), None)


def _hooked_module(node: Node) -> nn.Module:
    sharded = _sharded_module(node)
    return sharded if sharded is not None else node.module


def _find_holders(tree: Tree) -> dict[str, list[_Holder]]:
    """Return where each parameter of the model is held, by its first FQN."""
    return {
        held.path: [
            _Holder(held.path, owner, name)
            for index in held.owners
            for owner in [tree.nodes[index].inner]
            for name, parameter in owner._parameters.items()
            if parameter is held.parameter
        ]
        for held in tree.held
    }


def _watched_units(plan: Plan, actual: Plan) -> Iterator[Unit]:
    """Yield the plan's units, then those that only FSDP2 has."""
    planned = {path for unit in plan.units for path in unit.paths}
    yield from plan.units
    yield from (unit for unit in actual.units if not planned.issuperset(unit.paths))


def _members_inside(seen: Seen) -> list[str]:
    """FQNs of the parameters that its forward needs gathered."""
    if seen.island is not None:
        return list(seen.island.members)
    folded = {path for island in _folded(seen.planned) for path in island.members}
    units = [unit for unit in (seen.planned, seen.actual) if unit]
    return [path for unit in units for path in unit.members if path not in folded]


def _folded(unit: Unit | None) -> Iterator[Island]:
    return (island for island in (unit.islands if unit else ()) if island.lowering == "fold")


def _only_for(module: nn.Module) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that drops the calls for other modules than `module`."""

    def wrap(watch: Callable[..., None]) -> Callable[..., None]:
        def watch_one(mod: nn.Module, *args: Any) -> None:
            if mod is module:
                watch(mod, *args)

        return watch_one

    return wrap


def _is_compiled(node: Node) -> bool:
    return any(
        module._compiled_call_impl is not None or "_orig_mod" in module._modules
        for module in wrapper_chain(node.module)
    )
