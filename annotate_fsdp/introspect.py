"""Read FSDP2's own state back, and mend it in hooks. The only file that knows its private names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ClassVar, Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    TrainingState,
    _dynamo_disable,
    is_bw,
)
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor, Shard

from annotate_fsdp.boundary import boundary_of, grad_tensors
from annotate_fsdp.collect import Held, Node, Tree, collect_tree, is_on_mesh
from annotate_fsdp.errors import AnnotationError, Finding, NotReducedError
from annotate_fsdp.marks import PLAN_ATTRIBUTE
from annotate_fsdp.plan import Cast, MeshSpec, ParamInfo, Plan, Unit, dtype_name, order_units
from annotate_fsdp.policies import with_reduce_dtype
from annotate_fsdp.traffic import Switches


def plan_of(model: nn.Module) -> Plan:
    """Read the plan back from a model that FSDP2 has sharded, by `shard_annotated` or by hand.

    Reduce dtypes are written out, and a unit whose reshard flag was left to FSDP2 shows what that means
    (True; False for the root), so that the result can be compared with `plan_annotated`.

    Raises:
        AnnotationError: nothing in `model` is sharded.
    """
    tree = collect_tree(model)
    units = read_units(tree)
    if not units:
        finding = Finding(
            "AF303", "error", "", "plan_of", "no module of the model is sharded", "Shard the model first"
        )
        raise AnnotationError([finding])
    owned = {member for unit in units for member in unit.members}
    rest = tuple(held.path for held in tree.held if held.path not in owned)
    mesh = next((unit.mesh for unit in reversed(units) if unit.mesh), None)
    paths = {path for unit in units for path in unit.paths}
    finished = sorted(tree.nodes, key=lambda node: node.finished)
    sequence = tuple(node.path for node in finished if node.path in paths)
    return Plan(units, mesh, rest, sequence, registered=tuple(held.path for held in tree.held))


def read_units(tree: Tree) -> tuple[Unit, ...]:
    """Return the units of the sharded modules in a collected tree, in application order."""
    nodes_of: dict[int, list[Node]] = {}
    states: dict[int, Any] = {}
    for node in tree.nodes:
        state = fsdp_state(node.module) or fsdp_state(node.inner)
        if state is not None:
            states[id(state)] = state
            nodes_of.setdefault(id(state), []).append(node)
    held_by_id = {id(held.parameter): held for held in tree.held}
    units = [_read_unit(states[key], nodes, held_by_id) for key, nodes in nodes_of.items()]
    units = _with_casts(units, tree, held_by_id)
    finished = {node.path: node.finished for node in tree.nodes}
    parents = {node.path: [tree.nodes[p].path for p in node.parents] for node in tree.nodes}
    return order_units(units, finished, parents)


def fsdp_state(module: nn.Module) -> Any:
    """Return the FSDP2 state of `module` itself, None if it has none."""
    return _get_module_fsdp_state(module) if isinstance(module, FSDPModule) else None


def applied_plan(model: nn.Module) -> Plan | None:
    """Return the plan that `shard_annotated` applied to `model`, None if it was sharded otherwise."""
    plan = vars(model).get(PLAN_ATTRIBUTE)
    return plan if isinstance(plan, Plan) else None


class GatherAgain:
    """Hooks on each module of a unit of several: its backward gathers the unit, if it was freed meanwhile.

    FSDP2 does so for the module that runs last only. If its output gets no gradient, a second backward reads
    memory that the first one has freed, and reentrant checkpointing reduces the whole unit after each
    recomputed part of it: sums of other summands, which are rounded otherwise.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def install(self) -> None:
        """Put the hooks on the module, before FSDP2's own where it enters."""
        self.module.register_forward_pre_hook(self.before, prepend=True)
        self.module.register_forward_hook(self)

    @_dynamo_disable  # type: ignore[untyped-decorator, unused-ignore]  # torch leaves it unannotated
    def before(self, module: nn.Module, args: object) -> None:
        """In a recomputation, leave the reduction to the end of the backward."""
        if is_bw():
            for group in fsdp_state(self.module)._fsdp_param_groups:
                if group._training_state is not TrainingState.PRE_BACKWARD:
                    group._training_state = TrainingState.FORWARD  # as if another module had entered first

    @_dynamo_disable  # type: ignore[untyped-decorator, unused-ignore]  # torch leaves it unannotated
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """Watch the gradients of `output`."""
        if torch.is_grad_enabled() and not is_bw():
            for tensor in grad_tensors(output):
                tensor.register_hook(self._gather)

    def _gather(self, gradient: torch.Tensor) -> torch.Tensor:
        if not is_gathered(self.module):
            fsdp_state(self.module)._pre_backward(gradient)
        return gradient


class ForgetUnused:
    """Reduces all gradients of a unit, zeros for what this rank did not use; what no rank used gets none.

    A zero gradient is not the same as none: with it an optimizer decays the weight and moves by its momentum.
    """

    def __init__(self, module: Any) -> None:  # both an FSDPModule and an nn.Module
        self.module = module
        self.used: dict[int, bool] = {}  # by id of a parameter, until replicas are reduced too

    def install(self) -> None:
        """Watch the reductions of the unit of a sharded module."""
        self.module.set_reduce_scatter_unused_params(True, recurse=False)
        for group in fsdp_state(self.module)._fsdp_param_groups:
            vars(group)["post_backward"] = self._watched(group, group.post_backward)

    def _watched(self, group: Any, reduce: Callable[..., None]) -> Callable[..., None]:
        @wraps(reduce)
        @_dynamo_disable  # type: ignore[untyped-decorator, unused-ignore]  # torch leaves it unannotated
        def watched(*args: Any) -> None:
            trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            is_gathered_once = all(hasattr(p, "_unsharded_param") for p in trained)
            if not (group.reduce_grads and trained and is_gathered_once):
                reduce(*args)
                return
            for param in trained:
                gradients = (param.unsharded_accumulated_grad, param._unsharded_param.grad)
                is_used = any(gradient is not None for gradient in gradients)
                self.used[id(param)] = self.used.get(id(param), False) or is_used
            had = [param.sharded_param.grad is not None for param in trained]
            reduce(*args)
            meshes = [group.mesh_info.shard_process_group]
            if isinstance(group.mesh_info, HSDPMeshInfo):
                if not group.all_reduce_grads:
                    return
                meshes.append(group.mesh_info.replicate_process_group)
            marks = torch.tensor(
                [self.used[id(param)] for param in trained], dtype=torch.uint8, device=group.device
            )
            for each in meshes:
                if dist.get_world_size(each) > 1:
                    dist.all_reduce(marks, dist.ReduceOp.MAX, each)
            for param, is_used, had_one in zip(trained, marks.tolist(), had, strict=True):
                if not is_used and not had_one:
                    param.sharded_param.grad = None
            self.used.clear()

        return watched


class FreeAfterEvaluation:
    """Frees units once a forward without gradients has ended, of the whole model or of a part, or has raised.

    What stays gathered hides its gradients from the optimizer and from clipping, and would be used again by
    the next forward, although the optimizer may have changed the shards since.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = tuple(modules)
        self.depth = 0  # of calls of the root, which may call itself

    def watch(self, root: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Free them after a forward of `root`, and of each sharded module in `parts` that is called alone."""
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._leave, always_call=True)
        for part in parts:
            part.register_forward_hook(self._after_part)

    def watch_method(self, module: nn.Module, name: str) -> None:
        """Free them after a forward method of `module` besides forward."""
        method = getattr(module, name)

        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                self._after_part(module)

        setattr(module, name, watched)

    @_dynamo_disable  # type: ignore[untyped-decorator, unused-ignore]  # torch leaves it unannotated
    def _enter(self, *_: object) -> None:
        self.depth += 1

    @_dynamo_disable  # type: ignore[untyped-decorator, unused-ignore]  # torch leaves it unannotated
    def _leave(self, *_: object) -> None:
        self.depth = max(self.depth - 1, 0)  # a hook that ran before ours may have raised
        self._free()

    def _free(self) -> None:
        """Free them, if no backward can follow; what is recomputed in a backward belongs to it."""
        if not torch.is_grad_enabled() and not self.depth and not is_bw():
            for each in self.modules:
                _free(each)

    @_dynamo_disable  # type: ignore[untyped-decorator, unused-ignore]  # torch leaves it unannotated
    def _after_part(self, module: nn.Module, *_: object) -> None:
        """Free them, if no other forward is around that of `module`."""
        if fsdp_state(module)._state_ctx.iter_forward_root in (None, fsdp_state(module)):
            self._free()


class FreeOutdated:
    """A forward pre-hook, one for all modules of a unit, that frees it if its shards have changed since.

    A forward that no backward follows leaves such a unit gathered: one with gradients, one that raised, one
    of a part of the model or through another method than forward. Once the optimizer has stepped, the next
    forward would use the weights of before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.seen: list[tuple[int, int]] = []

    @_dynamo_disable  # type: ignore[untyped-decorator, unused-ignore]  # torch leaves it unannotated
    def __call__(self, module: nn.Module, args: object) -> None:
        """Free it if it was gathered from other values than its shards have now."""
        if is_bw():
            return
        groups = fsdp_state(self.module)._fsdp_param_groups
        shards = [param.sharded_param for group in groups for param in group.fsdp_params]
        seen = [(id(shard), 0 if shard.is_inference() else shard._version) for shard in shards]
        if seen != self.seen and is_gathered(self.module):
            _free(self.module)
        self.seen = seen


class Settled:
    """Stands before a unit's reduction, and settles what FSDP2 settles at the first forward only, or never.

    - The trainable parameters decide the dtype that gradients are reduced from and stored in. Where others
      are trainable than at the first forward, FSDP2 fails to assign their gradients.
    - After a backward without reduction gradients wait in the dtype of the reduction. Where a parameter gets
      its first one later, FSDP2 refuses to reduce both.
    """

    def __init__(self, group: Any, unit: str) -> None:
        self.group = group
        self.unit = unit
        self.post_backward = group.post_backward
        self.seen: list[bool] = []

    @classmethod
    def install(cls, module: Any, unit: str) -> None:  # both an FSDPModule and an nn.Module
        """Put one before each reduction of a sharded module, which the plan names `unit`."""
        for group in fsdp_state(module)._fsdp_param_groups:
            group.post_backward = cls(group, unit)

    @_dynamo_disable  # type: ignore[untyped-decorator, unused-ignore]  # torch leaves it unannotated
    def __call__(self, *args: Any) -> Any:
        """Settle, and reduce."""
        params = self.group.fsdp_params
        trainable = [param.sharded_param.requires_grad for param in params]
        if trainable != self.seen:
            self._follow()
            self.seen = trainable
        if self.group.reduce_grads:
            self._join()
        return self.post_backward(*args)

    def _join(self) -> None:
        """Bring all gradients into the dtype of those that wait; newer torch does so itself."""
        held = [param for param in self.group.fsdp_params if hasattr(param, "_unsharded_param")]
        waiting = [getattr(param, "unsharded_accumulated_grad", None) is not None for param in held]
        if any(waiting) and hasattr(held[0], "to_accumulated_grad_if_needed"):
            for param, waits in zip(held, waiting, strict=True):
                if not waits:
                    param.to_accumulated_grad_if_needed()

    def _follow(self) -> None:
        """Take the dtypes of the parameters that are trainable now."""
        names: dict[torch.dtype, str] = {}
        for param in self.group.fsdp_params:
            if param.sharded_param.requires_grad:
                names.setdefault(param.sharded_param.dtype, str(param._param_fqn))
        if len(names) > 1:
            listed = "; ".join(f"{dtype_name(dtype)} such as {name}" for dtype, name in names.items())
            raise NotReducedError(
                [
                    Finding(
                        "AF203",
                        "error",
                        list(names.values())[-1],
                        f"trainable in unit {self.unit} since it was unfrozen",
                        f"the unit stores trainable parameters of {len(names)} dtypes: {listed}",
                        "Store all in one dtype before sharding, or mark one as a unit of its own",
                    )
                ]
            )
        self.group._init_mp_dtypes()


def _free(module: nn.Module) -> None:
    """Free the unit of a sharded module, also one that a forward that raised has left in use."""
    assert isinstance(module, FSDPModule)
    for group in fsdp_state(module)._fsdp_param_groups:
        if group._training_state is TrainingState.FORWARD:  # it would stay gathered until the forward ends
            group._training_state = TrainingState.IDLE
    module.reshard()


#: What `Holds` tells of a unit: it will gather it; has; leaves it gathered, or frees it; gathers it again.
HoldKind = Literal["hold", "held", "release", "free", "regather"]
_HoldListener = Callable[[HoldKind, Sequence[nn.Module]], None]
_hold_listeners: list[_HoldListener] = []


def on_hold(listener: _HoldListener) -> Callable[[], None]:
    """Have `listener` told what `gathered` does with units, each by its modules; return what undoes it."""
    _hold_listeners.append(listener)
    return partial(_hold_listeners.remove, listener)


def _tell(kind: HoldKind, state: Any) -> None:
    for listener in _hold_listeners:
        listener(kind, state._modules)


class Holds:
    """Units that are kept gathered in a `with` block, and after it for a backward through what it computed.

    FSDP2 does not know of such a use. A hook on each parameter has its gradient reduced at the end of the
    backward, also if FSDP2 has reduced the unit's others already or queued no end at all; and a weight
    that was saved for the backward is gathered again if it was freed meanwhile.
    """

    open: ClassVar[list[Holds]] = []  # innermost last

    def __init__(self, states: Iterable[Any]) -> None:
        self.units = [(state, group) for state in states for group in state._fsdp_param_groups]
        self.opened: set[int] = set()  # ids of the groups that were gathered here
        self.freed: set[int] = set()  # ids of those that somebody else wanted to free meanwhile
        self.needed: set[int] = set()  # ids of those that a backward still needs
        self.owners: dict[int, tuple[Any, Any]] = {}  # of the full parameters' storages

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Gather them; at the end free those that were not gathered before, unless a backward needs them."""
        with ExitStack() as stack:
            for state, group in self.units:
                self._gather(state, group)
                stack.callback(_replace(group, "reshard", partial(self._note_reshard, group)))
            Holds.open.append(self)
            try:
                with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
                    yield
            except BaseException:
                self.needed.clear()
                raise
            finally:
                Holds.open.remove(self)
                stack.close()
                for state, group in self.units:
                    is_freed = id(group) in (self.opened | self.freed) - self.needed
                    if is_freed:
                        _reshard(group)
                    _tell("free" if is_freed else "release", state)

    def _gather(self, state: Any, group: Any) -> None:
        _tell("hold", state)
        _free_outdated(state._modules)
        if not group.is_unsharded:
            self.opened.add(id(group))
            group.lazy_init()
            group.unshard()
            group.wait_for_unshard()
        for fsdp_param in group.fsdp_params:
            whole = fsdp_param._unsharded_param
            self.owners[_storage(whole)] = (state, group)
            if whole.requires_grad and not any(
                isinstance(hook, _ReduceLater) for hook in (whole._post_accumulate_grad_hooks or {}).values()
            ):
                whole.register_post_accumulate_grad_hook(_ReduceLater(state, group))
        _tell("held", state)

    def _note_reshard(self, group: Any) -> None:
        """Leave it gathered until the end, then free it."""
        self.freed.add(id(group))
        if group._training_state is TrainingState.POST_BACKWARD:
            self.needed.discard(id(group))


class _ReduceLater:
    """A hook on a full parameter: its gradient is reduced at the end of this backward, if not before."""

    def __init__(self, state: Any, group: Any) -> None:
        self.state, self.group = state, group

    def __call__(self, parameter: torch.Tensor) -> None:
        _end_backward(self.state, self.group)


def _end_backward(state: Any, group: Any) -> None:
    """Have FSDP2 reduce and free a unit at the end of this backward, once more if it has already."""
    if group._training_state is TrainingState.POST_BACKWARD:
        group._training_state = TrainingState.IDLE
    state._register_root_post_backward_final_callback()


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, Any] | None]:
    """Note whose weight is saved for a backward. Detached, since an output would keep itself alive."""
    storage = _storage(tensor)
    owner = next((hold.owners[storage] for hold in Holds.open if storage in hold.owners), None)
    for hold in Holds.open:  # what was saved is not all that a function may have kept
        hold.needed.update(id(group) for _, group in hold.units)
    return tensor.detach(), owner


def _unpack(packed: tuple[torch.Tensor, tuple[Any, Any] | None]) -> torch.Tensor:
    tensor, owner = packed
    if owner is not None:
        state, group = owner
        if not group.is_unsharded:
            _tell("regather", state)
            group.unshard()
            group.wait_for_unshard()
        if is_bw():
            _end_backward(state, group)
    return tensor


def _storage(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


def _reshard(group: Any) -> None:
    """Free a unit, whatever its rule for the end of a forward is."""
    with group.use_training_state(TrainingState.IDLE):
        group.reshard()


def _free_outdated(modules: Iterable[nn.Module]) -> None:
    """Free a unit if its shards have changed since it was gathered, now and before each of its forwards."""
    modules = tuple(modules)
    hooks = modules[0]._forward_pre_hooks.values()
    outdated = next((hook for hook in hooks if isinstance(hook, FreeOutdated)), None)
    if outdated is None:
        outdated = FreeOutdated(modules[0])
        for module in modules:
            module.register_forward_pre_hook(outdated, prepend=True)
    outdated(modules[0], ())


def _replace(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Put `method` in the place of an object's own; return what takes it away."""
    shadowed = vars(owner).get(name)
    vars(owner)[name] = method

    def undo() -> None:
        del vars(owner)[name]
        if shadowed is not None:
            vars(owner)[name] = shadowed

    return undo


def hold_gathered(model: nn.Module, places: set[tuple[int, str]]) -> AbstractContextManager[None]:
    """Keep the units gathered that own the parameters at `places`, pairs of a module's id and a name.

    Nothing is done for parameters that no unit owns. FSDP2 takes `model` for the root if nothing ran yet.
    """
    states = [state for state in _initialized_states(model) if not places.isdisjoint(_places(state))]
    return Holds(states).hold() if states else nullcontext()


def _initialized_states(model: nn.Module) -> list[Any]:
    """Return the FSDP states in `model`, initialized as its first forward would."""
    states = {id(state): state for module in model.modules() if (state := fsdp_state(module)) is not None}
    for state in states.values():
        if state._is_root is None and len(state._modules) == 1:
            state._lazy_init()
    return list(states.values())


def _places(state: Any) -> Iterator[tuple[int, str]]:
    """Yield where the parameters of a unit are found, shared ones at each place."""
    for group in state._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            yield id(info.module), info.param_name
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                yield id(module), name


def gathers_again(module: nn.Module) -> bool:
    """Whether a `GatherAgain` is on `module`."""
    return any(isinstance(hook, GatherAgain) for hook in module._forward_hooks.values())


def has_lazy_init(model: nn.Module) -> bool:
    """Whether a forward has run through any sharded module, after which FSDP2's layout is final."""
    return any(
        state._is_root is not None for module in model.modules() if (state := fsdp_state(module)) is not None
    )


def place_full_mesh(
    mesh: DeviceMesh, dims: DataParallelMeshDims
) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
    """Return a `shard_placement_fn` for one unit that holds plain tensors beside DTensors on `mesh`.

    FSDP2 asks twice for each parameter: first to which process group it belongs, and all of a unit's
    belong to one; then how it is placed, and a full-mesh DTensor is placed on its own mesh. Were it
    asked in another way, `fully_shard` would refuse the DTensor, since the two meshes overlap.
    """
    info = _get_mesh_info(mesh, dims)
    assert isinstance(info, FSDPMeshInfo), "a mesh that shards nothing has no placement"
    asked: set[int] = set()

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        if not is_on_mesh(parameter, mesh):
            return None
        if id(parameter) not in asked:
            asked.add(id(parameter))
            return None
        return ShardPlacementResult(Shard(0), info)

    return place


def data_parallel_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    """Return the 1-D or 2-D mesh of the data-parallel axes `dims` of `mesh`."""
    return _get_mesh_info(mesh, dims).mesh


def watch_entries(
    module: nn.Module,
    entering: Callable[[nn.Module], None],
    before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    after: Callable[[nn.Module, Any, Any], None],
) -> Callable[[], None]:
    """Watch the forward methods registered on a sharded module; a plain forward runs through its hooks.

    - entering: called before FSDP2 gathers anything.
    - before: gets the inputs as FSDP2 casts them, with the parameters gathered.
    - after: gets the raw and the cast output.

    Returns:
        A function that undoes it.
    """
    # Registered methods look these two up on the state at each call. Module hooks hold the bound methods
    # that were there when the module was sharded, so that a plain forward is not seen twice.
    state = fsdp_state(module)
    names = ("_pre_forward", "_post_forward")
    shadowed = {name: vars(state)[name] for name in names if name in vars(state)}
    pre, post = state._pre_forward, state._post_forward

    def pre_forward(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entering(mod)
        args, kwargs = pre(mod, args, kwargs)
        before(mod, args, kwargs)
        return args, kwargs

    def post_forward(mod: nn.Module, args: Any, output: Any) -> Any:
        cast = post(mod, args, output)
        after(mod, output, cast)
        return cast

    state._pre_forward, state._post_forward = pre_forward, post_forward

    def undo() -> None:
        for name in names:
            vars(state).pop(name, None)
        vars(state).update(shadowed)

    return undo


def shards_of(module: nn.Module) -> frozenset[int]:
    """Return the ids of the tensors that are a sharded module's parameters while it is not gathered."""
    groups = fsdp_state(module)._fsdp_param_groups
    return frozenset(id(fsdp_param.sharded_param) for group in groups for fsdp_param in group.fsdp_params)


def named_shards(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield (owner, name, shard) of the parameters of the unit of a sharded module."""
    for group in fsdp_state(module)._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            yield info.module, info.param_name, fsdp_param.sharded_param


def is_entered(module: nn.Module) -> bool:
    """Whether a forward or backward of a sharded module's unit is going on, as its hooks know it."""
    return fsdp_state(module)._training_state is not TrainingState.IDLE


def watch_communication(
    module: nn.Module, around: Callable[[], AbstractContextManager[object]]
) -> Callable[[], None]:
    """Enter `around()` whenever the unit of a sharded module gathers its parameters or reduces gradients.

    Returns:
        A function that undoes it.
    """
    undo: list[Callable[[], None]] = []
    for group in fsdp_state(module)._fsdp_param_groups:
        for name in ("unshard", "post_backward"):
            undo.append(surround(group, name, around))

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def surround(
    owner: Any, name: str, around: Callable[[], AbstractContextManager[object]]
) -> Callable[[], None]:
    """Put a method that runs inside `around()` in the place of an object's own; return what takes it away."""
    method = getattr(owner, name)

    @wraps(method)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        with around():
            return method(*args, **kwargs)

    return _replace(owner, name, surrounded)


def is_gathered(module: nn.Module) -> bool:
    """Whether the unit of a sharded module holds its whole parameters now."""
    groups = fsdp_state(module)._fsdp_param_groups
    return bool(groups) and all(group.is_unsharded for group in groups)


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes, on this rank, of the whole parameters of the units that are gathered now."""
    states = (fsdp_state(module) for module in model.modules())
    groups = {id(group): group for state in states if state for group in state._fsdp_param_groups}
    whole = (
        fsdp_param._unsharded_param
        for group in groups.values()
        if group.is_unsharded
        for fsdp_param in group.fsdp_params
    )
    local = (value._local_tensor if isinstance(value, DTensor) else value for value in whole)
    return sum(value.numel() * value.element_size() for value in local)


def forwards_before(
    modules: Iterable[tuple[str, nn.Module]],
) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return which units ran since the last backward, in order, and at which of these places each did.

    Args:
        modules: the path and the first module of each unit.
    """
    groups = [(path, group) for path, module in modules for group in fsdp_state(module)._fsdp_param_groups]
    names = {id(group): path for path, group in groups}
    # absent before the first forward
    order = getattr(groups[0][1].comm_ctx, "post_forward_order", ()) if groups else ()
    indices = ((path, tuple(group._post_forward_indices)) for path, group in groups)
    return tuple(names.get(id(group), "?") for group in order), tuple(pair for pair in indices if pair[1])


def unreduced_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (owner, name) of the unit's parameters whose gradients an earlier microbatch did not reduce."""
    for group in fsdp_state(module)._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            whole = getattr(fsdp_param, "_unsharded_param", None)  # absent before the first gather
            gradients = (fsdp_param.unsharded_accumulated_grad, None if whole is None else whole.grad)
            if any(gradient is not None for gradient in gradients):
                yield fsdp_param._module_info.module, fsdp_param._module_info.param_name


def reduced_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (owner, name) of the parameters whose gradients the unit's next reduction holds."""
    for group in fsdp_state(module)._fsdp_param_groups:
        if group.reduce_scatter_unused_params:
            for fsdp_param in group.fsdp_params:
                if fsdp_param.sharded_param.requires_grad:
                    yield fsdp_param._module_info.module, fsdp_param._module_info.param_name
            return
    yield from unreduced_of(module)


def ranks_of(module: nn.Module) -> list[int]:
    """Return the ranks that the unit of a sharded module communicates with; none in a fake process group."""
    groups = fsdp_state(module)._fsdp_param_groups
    meshes = [group.mesh_info.mesh for group in groups]
    if not meshes or any(dist.get_backend(each) == "fake" for each in meshes[0].get_all_groups()):
        return []
    return sorted(meshes[0].mesh.flatten().tolist())


def switches_of(module: nn.Module) -> Switches:
    """Return what is switched on the unit of a sharded module."""
    groups = fsdp_state(module)._fsdp_param_groups
    return Switches(
        reduces=all(group.reduce_grads for group in groups),
        all_reduces=all(group.all_reduce_grads for group in groups),
        reshards=all(group.reshard_after_backward for group in groups),
    )


def _read_unit(state: Any, nodes: list[Node], held_by_id: dict[int, Held]) -> Unit:
    groups = list(state._fsdp_param_groups)
    found = list(_read_parameters(groups, held_by_id))
    order = {held.path: position for position, held in enumerate(held_by_id.values())}
    parameters = tuple(sorted(found, key=lambda info: order[info.path]))
    is_root = nodes[0].index == 0
    return Unit(
        paths=tuple(node.path for node in nodes),
        members=tuple(info.path for info in parameters),
        policy=with_reduce_dtype(state._mp_policy),
        reshard_after_forward=_read_reshard(state, groups, is_root),
        mesh=_read_mesh(groups),
        offload_policy=groups[0].offload_policy if groups else OffloadPolicy(),
        class_names=tuple(node.class_name for node in nodes),
        provenance="read back",
        param_dtypes=_read_param_dtypes(state, groups, held_by_id),
        reduces_unused=any(group.reduce_scatter_unused_params for group in groups),
        parameters=parameters,
        gathers_again=len(nodes) > 1 and all(gathers_again(node.module) for node in nodes),
        forward_methods=tuple((node.path, name) for node in nodes for name in node.entry_points),
    )


def _with_casts(units: list[Unit], tree: Tree, held_by_id: dict[int, Held]) -> list[Unit]:
    """Add what our own hooks cast, each module's to the unit that gathers its parameters."""
    casts: dict[str, list[Cast]] = {}
    owner_of: dict[str, str] | None = None
    for node in sorted(tree.nodes, key=lambda node: node.finished):
        boundary = boundary_of(node.module)
        if boundary is None:
            continue
        if owner_of is None:
            owner_of = {member: unit.path for unit in units for member in unit.members}
        held = held_by_id.get(id(boundary.owner._parameters[boundary.name]))
        if held is not None and held.path in owner_of:
            casts.setdefault(owner_of[held.path], []).append(replace(boundary.cast, path=node.path))
    return [replace(unit, casts=tuple(casts.get(unit.path, ()))) for unit in units] if casts else units


def _read_parameters(groups: list[Any], held_by_id: dict[int, Held]) -> Iterator[ParamInfo]:
    for group in groups:
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            held = held_by_id.get(id(info.module._parameters[info.param_name]))
            if held is None:
                continue  # of a module in the same `fully_shard` call that lies outside of the tree
            sharded = fsdp_param.sharded_param
            yield ParamInfo(
                path=held.path,
                shape=tuple(sharded.shape),
                local_shape=tuple(fsdp_param._orig_size),
                dtype=sharded.dtype,
                trainable=held.parameter.requires_grad,
                aliases=tuple(held.aliases),
            )


def _read_param_dtypes(
    state: Any, groups: list[Any], held_by_id: dict[int, Held]
) -> tuple[tuple[str, torch.dtype], ...]:
    """Return (FQN, dtype) of the parameters whose compute dtype is not the policy's."""
    found = {}
    for group in groups:
        for fsdp_param in group.fsdp_params:
            own = fsdp_param.mp_policy.param_dtype
            info = fsdp_param._module_info
            held = held_by_id.get(id(info.module._parameters[info.param_name]))
            if held is not None and own != state._mp_policy.param_dtype:
                found[held.path] = own
    order = {held.path: position for position, held in enumerate(held_by_id.values())}
    return tuple(sorted(found.items(), key=lambda item: order[item[0]]))


def _read_reshard(state: Any, groups: list[Any], is_root: bool) -> bool | int:
    if not groups:
        return False
    if state._auto_reshard_after_forward:
        return not is_root
    group = groups[0]
    after = group.post_forward_mesh_info
    if after is None:
        return False
    if after is group.mesh_info or after.shard_mesh_size == group.mesh_info.shard_mesh_size:
        return True
    return int(after.shard_mesh_size)


def _read_mesh(groups: list[Any]) -> MeshSpec | None:
    if not groups:
        return None
    info = groups[0].mesh_info
    shard = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
    replicated = isinstance(info, HSDPMeshInfo) or not isinstance(info, FSDPMeshInfo)
    replicate = info.replicate_mesh_size if replicated and isinstance(info, DDPMeshInfo) else 1
    return MeshSpec(replicate, shard, tuple(info.mesh.mesh_dim_names or ()))
