"""A collected tree and the caller's options to a `Plan`: the decisions, without any sharding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from annotate_fsdp.collect import Held, Node, Tree, dtensor_of, original_class
from annotate_fsdp.errors import Finding
from annotate_fsdp.marks import Ignore, Policy, Reshard, UnitSpec, did_you_mean
from annotate_fsdp.plan import Cast, MeshSpec, ParamInfo, Plan, Unit, order_units, policy_to_dict
from annotate_fsdp.policies import PolicyProblem, resolve_policy, with_reduce_dtype

TIE_STAYS_GATHERED = "tied modules: gathered from the first use of the weight to the last"
GROUP_STAYS_GATHERED = "a group stays gathered until its last member has run"


@dataclass(frozen=True)
class PlanOptions:
    """The caller's words, as `shard_annotated` takes them; `ignored` holds ids of parameters.

    - is_part: the tree may lie inside a larger model, so that its root takes the caller's reshard flag as
      any unit does, and a flag that nobody gave is left to FSDP2.
    """

    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    reshard_after_forward: Reshard | None = None
    ignored: frozenset[int] = frozenset()
    policies: Mapping[str, Policy] = field(default_factory=dict)
    mesh: MeshSpec | None = None
    is_part: bool = False
    prefetch: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Site:
    """Where a planned unit lies, and whether it may be carried out in another way than by itself.

    - around: paths of the units nearest around it; more than one if it is shared; () for the root.
    - stays: why it must keep a call of its own, "" if it need not.
    - names_precision: whether its mark asks for a dtype or a cast.
    - is_conditional: whether it or a unit around it is marked as conditional.
    - why_alone: why it cannot join the unit around it whatever that is, "" if it can.
    """

    around: tuple[tuple[str, ...], ...]
    stays: str
    names_precision: bool
    is_conditional: bool = False
    why_alone: str = ""


@dataclass(eq=False, slots=True)
class _Draft:
    """A unit in the making: its nodes, and the mark of each node (None: the library made it a unit)."""

    nodes: list[int]
    specs: list[UnitSpec | None]
    provenance: str
    why: str = ""
    kept: Unit | None = None
    is_tie: bool = False
    policy: MixedPrecisionPolicy | None = None
    reshard: bool | int | None = None
    members: list[Held] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)


class Planner:
    """Turns one tree into one plan; every finding on the way is kept, and planning goes on."""

    def __init__(self, tree: Tree, options: PlanOptions, kept: Iterable[Unit] = ()) -> None:
        self.tree = tree
        self.options = options
        self.is_sharded = tree.has_sharded
        self.findings: list[Finding] = []
        self.parents_first = sorted(tree.nodes, key=lambda node: node.finished, reverse=True)
        self.ignored = self._ignored_parameters()
        self.drafts: list[_Draft] = []
        self._resolved: dict[tuple[object, ...], MixedPrecisionPolicy] = {}
        self._stored: dict[int, torch.dtype | None] = {}  # draft -> the one dtype it stores, if it is one
        self.draft_of: dict[int, _Draft] = {}  # node -> its draft
        self.around: list[tuple[_Draft, ...]] = []  # node -> nearest enclosing drafts, itself left out
        self.on_every_way: list[frozenset[int]] = []  # node -> ids of drafts on every way to it from the root
        self._declare(tuple(kept))
        self._last_of_class = self._find_last_siblings()

    def plan(self) -> Plan:
        """Return the plan; `findings` is complete afterwards."""
        self._look_around()
        self._merge_named_groups()
        self._place_shared_modules()
        owners = self._place_parameters()
        for draft in self.drafts:
            self._resolve(draft, ())
        self._check_ties(owners)
        units = [self._unit(draft) for draft in self.drafts]
        paths = {node.path: node.finished for node in self.tree.nodes}
        parents = {node.path: [self.tree.nodes[p].path for p in node.parents] for node in self.tree.nodes}
        ignored = tuple(held.path for held in self.tree.held if id(held.parameter) in self.ignored)
        sequence = [path for unit in units for path in unit.paths]
        sequence.sort(key=paths.__getitem__)
        registered = tuple(held.path for held in self.tree.held)
        ordered = order_units(units, paths, parents)
        return Plan(ordered, self.options.mesh, ignored, tuple(sequence), self.options.prefetch, registered)

    def sites(self) -> dict[tuple[str, ...], Site]:
        """Return where each unit of the plan lies, by its paths; to be called after `plan`."""
        paths = {id(draft): self._paths(draft) for draft in self.drafts}
        conditional = self._conditional()
        sites = {}
        for draft in self.drafts:
            around = {id(outer): paths[id(outer)] for node in draft.nodes for outer in self.around[node]}
            is_precise = any(spec is not None and spec.names_precision for spec in draft.specs)
            sites[paths[id(draft)]] = Site(
                tuple(around.values()),
                self._why_it_stays(draft),
                is_precise,
                id(draft) in conditional,
                self._why_alone(draft),
            )
        return sites

    @property
    def has_conditional(self) -> bool:
        """Whether any unit may be skipped on some ranks."""
        return any(map(_is_conditional, self.drafts))

    def _conditional(self) -> set[int]:
        """Ids of the drafts that may be skipped on some ranks, or that lie inside one of those."""
        waiting = [draft for draft in self.drafts if _is_conditional(draft)]
        found = {id(draft) for draft in waiting}
        if not found:
            return found
        inside: dict[int, list[_Draft]] = {}
        for draft in self.drafts:
            for outer in (outer for node in draft.nodes for outer in self.around[node]):
                inside.setdefault(id(outer), []).append(draft)
        while waiting:
            for draft in inside.get(id(waiting.pop()), ()):
                if id(draft) not in found:
                    found.add(id(draft))
                    waiting.append(draft)
        return found

    def _why_alone(self, draft: _Draft) -> str:
        """Why a unit cannot join one around it, "" if it can."""
        if draft.kept is not None:
            return "it is sharded already"
        if draft.nodes == [0]:
            return "nothing is around the root"
        if len(draft.nodes) > 1:
            return f"{_name(self._paths(draft))} are one unit"
        if self.tree.nodes[draft.nodes[0]].entry_points:
            return "it has @fsdp_forward methods"
        if not self.is_sharded and any(dtensor_of(held.parameter) is not None for held in draft.members):
            return "its parameters are DTensors"
        return ""

    def _why_it_stays(self, draft: _Draft) -> str:
        """Why a unit cannot be grouped or folded whatever the others are; "" if it can."""
        spec = draft.specs[0]
        node = self.tree.nodes[draft.nodes[0]]
        if draft.kept is not None:
            return "sharded before"
        if draft.is_tie or any(len(held.owners) > 1 for held in draft.members):
            return "it holds a tied weight"
        if spec is None or len(draft.nodes) > 1:
            return draft.why or draft.provenance
        if draft.nodes == [0]:
            return "the root"
        if not spec.names_precision:
            return "its mark names no precision, only what is gathered and freed at once"
        if spec.reshard_after_forward not in (None, False):
            return f"its mark says reshard_after_forward={spec.reshard_after_forward!r}"
        if spec.param_dtypes:
            return "its mark lists param_dtypes"
        if node.entry_points:
            return "it has @fsdp_forward methods"
        if getattr(draft.policy, "param_dtype_override_fn", None) is not None:
            return "its policy has a param_dtype_override_fn"
        if not draft.members:
            return "it has nothing to gather"
        if not self.is_sharded and any(dtensor_of(held.parameter) is not None for held in draft.members):
            return "its parameters are DTensors"
        return ""

    # -- which modules are units -------------------------------------------------------------------

    def _ignored_parameters(self) -> set[int]:
        """Ids of the parameters that are not FSDP's: the caller's and those under an ignored module."""
        ignored_nodes: set[int] = set()
        if any(isinstance(node.mark, Ignore) for node in self.tree.nodes):
            for node in self.parents_first:
                if isinstance(node.mark, Ignore) or not ignored_nodes.isdisjoint(node.parents):
                    ignored_nodes.add(node.index)
        self.ignored_nodes = ignored_nodes
        return set(self.options.ignored) | {
            id(held.parameter) for held in self.tree.held if not ignored_nodes.isdisjoint(held.owners)
        }

    def _declare(self, kept: tuple[Unit, ...]) -> None:
        kept_at = {path: unit for unit in kept for path in unit.paths}
        folded = {cast.path for unit in kept for cast in unit.casts}  # carried out by the unit around
        kept_drafts: dict[int, _Draft] = {}
        for node in self.tree.nodes:
            if (unit := kept_at.get(node.path)) is not None:
                draft = kept_drafts.get(id(unit))
                if draft is None:
                    draft = kept_drafts[id(unit)] = _Draft([], [], "sharded before", kept=unit)
                    self.drafts.append(draft)
                draft.nodes.append(node.index)
                draft.specs.append(None)
                self.draft_of[node.index] = draft
            elif node.path in folded:
                continue
            elif node.index not in self.ignored_nodes and isinstance(node.mark, UnitSpec):
                self._new_draft([node.index], [node.mark], node.provenance)
            elif node.index == 0:
                self._new_draft([0], [None], "default: the root is always a unit")

    def _new_draft(self, nodes: list[int], specs: list[UnitSpec | None], provenance: str) -> _Draft:
        draft = _Draft(nodes, specs, provenance)
        self.drafts.append(draft)
        for node in nodes:
            self.draft_of[node] = draft
        return draft

    def _look_around(self) -> None:
        """Find the drafts nearest around every node, and those on every way to it."""
        self.around = [()] * len(self.tree.nodes)
        self.on_every_way = [frozenset()] * len(self.tree.nodes)
        for node in self.parents_first:
            self._look_around_node(node)

    def _look_around_node(self, node: Node) -> None:
        if len(node.parents) == 1:  # the way of almost all nodes
            parent = node.parents[0]
            own = self.draft_of.get(parent)
            way = self.on_every_way[parent]
            self.around[node.index] = self.around[parent] if own is None else (own,)
            self.on_every_way[node.index] = way if own is None else way | {id(own)}
            return
        nearest: dict[int, _Draft] = {}
        ways: list[frozenset[int]] = []
        for parent in node.parents:
            own = self.draft_of.get(parent)
            way = self.on_every_way[parent]
            for draft in (own,) if own is not None else self.around[parent]:
                nearest[id(draft)] = draft
            ways.append(way if own is None else way | {id(own)})
        self.around[node.index] = tuple(nearest.values())
        self.on_every_way[node.index] = ways[0].intersection(*ways[1:]) if ways else frozenset()

    def _nearest(self, node: int) -> tuple[_Draft, ...]:
        """The drafts whose `fully_shard` call would reach the parameters that `node` owns."""
        own = self.draft_of.get(node)
        return (own,) if own is not None else self.around[node]

    def _outermost(self, drafts: Iterable[_Draft]) -> _Draft | None:
        """The one of `drafts` that is gathered whenever any of the others runs, if there is one."""
        drafts = list(drafts)
        if len(drafts) == 1:
            return drafts[0]
        for draft in drafts:
            if all(other is draft or self._encloses(draft, other) for other in drafts):
                return draft
        return None

    def _encloses(self, outer: _Draft, inner: _Draft) -> bool:
        """Whether `inner` is reached through `outer` only."""
        return all(id(outer) in self.on_every_way[node] for node in inner.nodes)

    def _merge_named_groups(self) -> None:
        groups: dict[tuple[str, frozenset[int]], list[_Draft]] = {}
        for draft in self.drafts:
            spec = draft.specs[0]
            if spec is not None and spec.group is not None and draft.nodes != [0]:
                around = frozenset(id(outer) for outer in self.around[draft.nodes[0]])
                groups.setdefault((spec.group, around), []).append(draft)
        several = [(name, drafts) for (name, _), drafts in groups.items() if len(drafts) > 1]
        for name, drafts in several:
            merged = self._merge(drafts, f"{drafts[0].provenance}, group {name!r}")
            merged.why = GROUP_STAYS_GATHERED
        if several:
            self._drop_merged()

    def _merge(self, drafts: list[_Draft], provenance: str) -> _Draft:
        """Make one draft of several, at the place of the first."""
        first = drafts[0]
        marked = [pair for draft in drafts for pair in zip(draft.nodes, draft.specs, strict=True)]
        marked.sort(key=lambda pair: pair[0])
        first.nodes = [node for node, _ in marked]
        first.specs = [spec for _, spec in marked]
        for node in first.nodes:
            self.draft_of[node] = first
        first.provenance = provenance
        return first

    def _drop_merged(self) -> None:
        """Forget the drafts that became part of another."""
        self.drafts = [draft for draft in self.drafts if self.draft_of.get(draft.nodes[0]) is draft]
        self._look_around()

    def _place_shared_modules(self) -> None:
        """Make a unit of each module that several units register and none of them encloses the rest."""
        is_changed = False
        for node in self.parents_first:
            if is_changed:
                self._look_around_node(node)
            if len(node.parents) < 2 or node.index in self.draft_of or node.index in self.ignored_nodes:
                continue
            around = self.around[node.index]
            if all(draft.kept is not None for draft in around):
                continue
            if len(around) > 1 and self._outermost(around) is None:
                users = " and ".join(repr(_name(self._paths(draft))) for draft in around)
                draft = self._new_draft([node.index], [None], f"default: shared by {users}")
                draft.is_tie = True
                draft.why = TIE_STAYS_GATHERED
                is_changed = True

    # -- which unit owns which parameter -----------------------------------------------------------

    def _reached(self, held: Held) -> list[_Draft]:
        """The drafts that reach the parameter through any of its owners."""
        if len(held.owners) == 1:  # almost all parameters
            return list(self._nearest(held.owners[0]))
        found: dict[int, _Draft] = {}
        for owner in held.owners:
            for draft in self._nearest(owner):
                found[id(draft)] = draft
        return list(found.values())

    def _place_parameters(self) -> list[tuple[Held, _Draft, list[_Draft]]]:
        """Give every parameter to one draft; return (parameter, its draft, the drafts that reach it)."""
        self._bundle_tied_owners()
        placed = []
        for held in self.tree.held:
            reached = self._reached(held)
            if id(held.parameter) in self.ignored:
                for draft in reached:
                    draft.excluded.append(held.path)
                continue
            owner = self._outermost(reached) or reached[0]
            owner.members.append(held)
            for draft in reached:
                if draft is not owner:
                    draft.excluded.append(held.path)
            placed.append((held, owner, reached))
        return placed

    def _bundle_tied_owners(self) -> None:
        """Put modules that hold one weight into one unit where no unit encloses them all."""
        leader: dict[int, int] = {}

        def find(node: int) -> int:
            while leader.setdefault(node, node) != node:
                node = leader[node]
            return node

        for held in self.tree.held:
            if len(held.owners) < 2 or id(held.parameter) in self.ignored:
                continue
            reached = self._reached(held)
            if len(reached) > 1 and self._outermost(reached) is None:
                first, *others = held.owners
                for other in others:
                    leader[find(other)] = find(first)
        bundles: dict[int, list[int]] = {}
        for node in sorted(leader):
            bundles.setdefault(find(node), []).append(node)
        for nodes in bundles.values():
            self._bundle(nodes)
        if bundles:
            self._drop_merged()

    def _bundle(self, nodes: list[int]) -> None:
        drafts: dict[int, _Draft] = {}
        for node in nodes:
            draft = self.draft_of.get(node) or self._new_draft([node], [None], "default")
            drafts[id(draft)] = draft
        marks = {draft.provenance for draft in drafts.values()}
        merged = self._merge(list(drafts.values()), "; ".join(sorted(marks)) + "; tied")
        self._leave_out_nested(merged)
        merged.is_tie = True
        merged.why = TIE_STAYS_GATHERED

    def _leave_out_nested(self, draft: _Draft) -> None:
        """Leave out the nodes that lie inside another of the same unit: that one's call reaches them."""
        members = dict(zip(draft.nodes, draft.specs, strict=True))
        for node, spec in list(members.items()):
            outer = self._enclosing_member(node, members)
            if outer is None:
                continue
            if spec is not None and spec != members[outer]:
                paths = self.tree.nodes
                self._disagree(paths[node].path, spec, paths[outer].path, members[outer], "mark")
            del members[node], self.draft_of[node]
        draft.nodes, draft.specs = list(members), list(members.values())

    def _enclosing_member(self, node: int, members: Mapping[int, object]) -> int | None:
        """The nearest of `members` that every way from the root to `node` passes."""
        while len(parents := self.tree.nodes[node].parents) == 1:
            node = parents[0]
            if node in members:
                return node
        return None

    def _check_ties(self, placed: list[tuple[Held, _Draft, list[_Draft]]]) -> None:
        """A tied weight can have one compute and one reduce dtype only."""
        for held, owner, reached in placed:
            for draft in reached:
                if draft.policy == owner.policy:
                    continue
                here, there = _dtypes(owner.policy), _dtypes(draft.policy)
                if here != there:
                    self._disagree(
                        self._using(held, owner), here, self._using(held, draft), there, "compute and reduce"
                    )

    def _using(self, held: Held, draft: _Draft) -> str:
        """The FQN under which `draft` uses the parameter."""
        name = held.path.rsplit(".", 1)[-1]
        for owner in held.owners:
            if draft in self._nearest(owner):
                path = self.tree.nodes[owner].path
                names = [
                    n for n, p in self.tree.nodes[owner].inner._parameters.items() if p is held.parameter
                ]
                return f"{path}.{names[0]}" if path else names[0]
        return name

    def _disagree(self, path: str, declared: object, other: str, there: object, what: str) -> None:
        self.findings.append(
            Finding(
                "AF204",
                "error",
                path,
                f"{what} {declared} here and {there} at {other or 'the root module'}",
                "both hold one parameter or share one unit, which can have one policy only",
                "Give both the same mark",
            )
        )

    # -- how each unit is sharded ------------------------------------------------------------------

    def _resolve(self, draft: _Draft, running: tuple[_Draft, ...]) -> None:
        """Set the draft's policy and reshard flag, its enclosing drafts' first."""
        if draft.policy is not None:
            return
        if draft in running:
            self.findings.append(
                Finding(
                    "AF210",
                    "error",
                    self._paths(draft)[0],
                    f"one unit with {_name(self._paths(draft))}",
                    "units that share weights lie inside each other in a circle",
                    "Untie one of the weights",
                )
            )
            draft.policy, draft.reshard = MixedPrecisionPolicy(), False
            return
        for node in draft.nodes:
            for outer in self.around[node]:
                self._resolve(outer, (*running, draft))
        if draft.policy is not None:  # a circle ended here
            return
        if draft.kept is not None:
            draft.policy, draft.reshard = draft.kept.policy, draft.kept.reshard_after_forward
            return
        draft.policy = self._one_policy(draft)
        if len(draft.nodes) > 1:
            self._check_one_word(draft, "reshard_after_forward")
            self._check_one_word(draft, "offload_policy")
        draft.reshard = self._reshard(draft)

    def _one_policy(self, draft: _Draft) -> MixedPrecisionPolicy:
        """The policy of all its nodes: the marked ones decide, the others must compute in the same dtypes."""
        if len(draft.nodes) == 1:
            return self._policy(draft.nodes[0], draft.specs[0])
        said = sorted(zip(draft.nodes, draft.specs, strict=True), key=lambda pair: pair[1] is None)
        (first, first_spec), *others = said
        decided = self._policy(first, first_spec)
        for node, spec in others:
            policy = self._policy(node, spec)
            if spec is None and _dtypes(policy) == _dtypes(decided):
                continue
            if policy != decided:
                here, there = _policy_difference(decided, policy)
                paths = self.tree.nodes
                self._disagree(paths[first].path, here, paths[node].path, there, "policy")
        return decided

    def _check_one_word(self, draft: _Draft, option: str) -> None:
        """The marks of a unit's modules may say a thing once, or the same."""
        said = [
            (self.tree.nodes[node].path, getattr(spec, option))
            for node, spec in zip(draft.nodes, draft.specs, strict=True)
            if getattr(spec, option, None) is not None
        ]
        for path, value in said[1:]:
            if value != said[0][1] or type(value) is not type(said[0][1]):
                self._disagree(said[0][0], said[0][1], path, value, option)

    def _policy(self, node: int, spec: UnitSpec | None) -> MixedPrecisionPolicy:
        path, is_root = self.tree.nodes[node].path, node == 0
        if spec is None and not is_root:  # the library's own unit computes as the units around it
            outer = [draft.policy or MixedPrecisionPolicy() for draft in self.around[node]]
            for other, policy in zip(self.around[node][1:], outer[1:], strict=True):
                if _dtypes(policy) != _dtypes(outer[0]):
                    where = self._paths(other)[0]
                    self._disagree(path, _dtypes(outer[0]), where, _dtypes(policy), "compute and reduce")
            return replace(outer[0], output_dtype=None, cast_forward_inputs=False)
        spec = spec or UnitSpec()
        enclosing = self._enclosing_dtype(node, spec)
        # the policy by identity: a callable need not be hashable, and may return another one each time
        word = id(spec.policy), spec.casts_itself, spec.reduce_dtype, spec.output_dtype
        key = (*word, enclosing, is_root)
        if (known := self._resolved.get(key)) is not None:
            return known
        try:
            policy = resolve_policy(
                spec,
                base=self.options.mp_policy,
                enclosing_dtype=enclosing,
                policies=self.options.policies,
                is_root=is_root,
            )
            self._resolved[key] = policy  # once for all units that say the same
            return policy
        except PolicyProblem as problem:
            declared = f"policy={_policy_text(spec.policy)} ({self.draft_of[node].provenance})"
            self.findings.append(Finding("AF108", "error", path, declared, problem.wrong, problem.write))
            return with_reduce_dtype(self.options.mp_policy)

    def _enclosing_dtype(self, node: int, spec: UnitSpec) -> torch.dtype | None:
        """Compute dtype of the unit around, which must be one if the output is cast back to it."""
        if node == 0:
            return self.options.mp_policy.param_dtype
        dtypes = {self._compute_dtype(draft): draft for draft in self.around[node]}
        if len(dtypes) > 1:
            dtypes.pop(None, None)  # a unit that holds nothing and casts nothing does not mind
        computes = spec.policy != "inherit" or self.options.mp_policy.param_dtype is not None
        is_cast_back = spec.output_dtype == "enclosing" and not spec.casts_itself and computes
        if len(dtypes) > 1 and is_cast_back and not isinstance(spec.policy, MixedPrecisionPolicy):
            (first, here), (second, there) = list(dtypes.items())[:2]
            self.findings.append(
                Finding(
                    "AF205",
                    "error",
                    self.tree.nodes[node].path,
                    f"shared by {_name(self._paths(here))} ({first}) "
                    f"and {_name(self._paths(there))} ({second})",
                    "its output cannot be cast back to two compute dtypes",
                    "Give both users one compute dtype, or mark the shared module with output_dtype=...",
                )
            )
        return next(iter(dtypes), self.options.mp_policy.param_dtype)

    def _compute_dtype(self, draft: _Draft) -> torch.dtype | None:
        """What a draft computes in: as it is stored, if its policy names nothing and it stores one dtype."""
        if (dtype := (draft.policy or self.options.mp_policy).param_dtype) is not None:
            return dtype
        if id(draft) not in self._stored:  # looked up for every unit inside it
            dtypes = {held.parameter.dtype for held in draft.members if held.parameter.is_floating_point()}
            self._stored[id(draft)] = dtypes.pop() if len(dtypes) == 1 else None
        return self._stored[id(draft)]

    def _reshard(self, draft: _Draft) -> bool | int | None:
        own = next(
            (s.reshard_after_forward for s in draft.specs if s and s.reshard_after_forward is not None), None
        )
        value: Reshard | None = self._inherited_reshard(draft) if own is None else own
        if value == "except_last":
            return draft.nodes[0] not in self._last_of_class
        if value is None:
            return None if self.options.is_part else True
        return self._world_to_reshard_to(draft, value)

    def _inherited_reshard(self, draft: _Draft) -> Reshard | None:
        """The flag of a unit whose marks say none; None if nobody around it, nor the caller, says one."""
        if draft.nodes == [0] and self.options.is_part:
            return self.options.reshard_after_forward
        if draft.nodes == [0] or len(draft.nodes) > 1 or draft.is_tie:
            return False
        outer = self._tagged_around(draft)
        if outer.nodes != [0]:
            return outer.reshard
        root = outer.specs[0]
        own = root.reshard_after_forward if root is not None else None
        return self.options.reshard_after_forward if own is None else own

    def _tagged_around(self, draft: _Draft) -> _Draft:
        """The nearest draft around this one that a mark made, else the root's."""
        outer = self.around[draft.nodes[0]][0]
        while outer.nodes != [0] and not any(outer.specs) and outer.kept is None:
            outer = self.around[outer.nodes[0]][0]
        return outer

    def _world_to_reshard_to(self, draft: _Draft, value: bool | int | str) -> bool | int:
        """Check an int against the mesh; the two trivial sizes are the two bools."""
        if isinstance(value, bool) or not isinstance(value, int):
            return bool(value)
        mesh = self.options.mesh
        if mesh is None:
            return value
        if not 1 <= value <= mesh.shard or mesh.shard % value:
            divisors = ", ".join(str(d) for d in range(2, mesh.shard) if mesh.shard % d == 0) or "none"
            self.findings.append(
                Finding(
                    "AF206",
                    "error",
                    self._paths(draft)[0],
                    f"reshard_after_forward={value}",
                    f"it does not divide the {mesh.shard} ranks that shard",
                    f"Write True, False or a divisor between (here: {divisors})",
                )
            )
            return True
        return {1: False, mesh.shard: True}.get(value, value) if mesh.shard > 1 else False

    def _find_last_siblings(self) -> set[int]:
        """Nodes that are the last tagged child of their class in their container."""
        last: dict[tuple[int, type], int] = {}
        for node in self.tree.nodes:
            draft = self.draft_of.get(node.index)
            if draft is not None and node.parents:
                last[node.parents[0], original_class(node.inner)] = node.index
        return set(last.values())

    def _param_dtypes(self, draft: _Draft) -> Iterator[tuple[str, torch.dtype]]:
        """Yield (FQN, dtype) of the members that a mark gives a dtype other than the rest of the unit has."""
        listed = {
            (node, name): dtype
            for node, spec in zip(draft.nodes, draft.specs, strict=True)
            if spec is not None and spec.param_dtypes
            for name, dtype in spec.own_dtypes
        }
        if not listed:
            return
        mine = {id(held.parameter): held for held in draft.members}
        compute = getattr(draft.policy, "param_dtype", None)
        # without one each computes as it is stored, but a unit trains one storage dtype only
        stored = {held.parameter.dtype for held in draft.members if held.parameter.requires_grad}
        found: dict[str, torch.dtype] = {}
        for (node, name), dtype in listed.items():
            parameter = self.tree.nodes[node].inner._parameters.get(name)
            held = mine.get(id(parameter))
            if held is None:
                self._no_such_parameter(node, name, dtype, parameter is not None)
            elif dtype != (compute or held.parameter.dtype) or (compute is None and len(stored) > 1):
                found[held.path] = dtype
        yield from ((held.path, found[held.path]) for held in draft.members if held.path in found)

    def _no_such_parameter(self, index: int, name: str, dtype: torch.dtype, is_other: bool) -> None:
        node = self.tree.nodes[index]
        names = sorted(key for key, value in node.inner._parameters.items() if value is not None)
        wrong = (
            "another unit owns it, or nobody" if is_other else "the module holds no parameter of that name"
        )
        write = f"{did_you_mean(name, names)}Write one of {', '.join(names)}" if names else "Take it away"
        self.findings.append(
            Finding("AF212", "error", node.path, f"param_dtypes={{{name!r}: {dtype}}}", wrong, write)
        )

    # -- the result --------------------------------------------------------------------------------

    def _paths(self, draft: _Draft) -> tuple[str, ...]:
        return tuple(self.tree.nodes[node].path for node in draft.nodes)

    def _unit(self, draft: _Draft) -> Unit:
        nodes = [self.tree.nodes[node] for node in draft.nodes]
        if draft.kept is not None:
            return replace(
                draft.kept,
                class_names=tuple(node.class_name for node in nodes),
                provenance=draft.provenance,
                lowering="kept",
            )
        offload = next((s.offload_policy for s in draft.specs if s and s.offload_policy), None)
        has_members = bool(draft.members)  # without any, FSDP2 has nothing to reshard or offload
        policy, casts = self._boundary(draft)
        return Unit(
            paths=self._paths(draft),
            members=tuple(held.path for held in draft.members),
            policy=policy,
            casts=casts,
            reshard_after_forward=draft.reshard if has_members else False,
            mesh=self.options.mesh,
            offload_policy=(offload or self.options.offload_policy) if has_members else OffloadPolicy(),
            param_dtypes=tuple(self._param_dtypes(draft)),
            gathers_again=len(nodes) > 1,
            is_freed_after_evaluation=draft.nodes == [0] and not self.options.is_part and not draft.reshard,
            class_names=tuple(node.class_name for node in nodes),
            provenance=draft.provenance,
            why=draft.why,
            parameters=tuple(describe_parameter(held, self.is_sharded) for held in draft.members),
            excluded=tuple(draft.excluded),
            forward_methods=tuple((n.path, name) for n in nodes for name in n.entry_points),
        )

    def _boundary(self, draft: _Draft) -> tuple[MixedPrecisionPolicy, tuple[Cast, ...]]:
        """Its policy, and what our own hooks cast in place of FSDP2's, if it is a unit of several modules.

        FSDP2 casts the output of the module that runs last. If a member does not run, or runs again, that is
        the root: the loss would be cast to the unit's output dtype.
        """
        policy = draft.policy or MixedPrecisionPolicy()
        if len(draft.nodes) < 2 or policy.output_dtype is None or not draft.members:
            return policy, ()
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        marked = [node for node, spec in zip(draft.nodes, draft.specs, strict=True) if spec is not None]
        first = draft.members[0].path
        casts = tuple(
            Cast(self.tree.nodes[node].path, inputs, policy.output_dtype, parameter=first) for node in marked
        )
        return replace(policy, cast_forward_inputs=False, output_dtype=None), casts


def describe_parameter(held: Held, is_sharded: bool) -> ParamInfo:
    """Return a parameter's facts without its values; in a sharded model a DTensor counts as whole."""
    parameter = held.parameter
    shape = tuple(parameter.shape)
    data = None if is_sharded else dtensor_of(parameter)
    local = shape if data is None else tuple(data.to_local().shape)
    return ParamInfo(held.path, shape, local, parameter.dtype, parameter.requires_grad, tuple(held.aliases))


def _is_conditional(draft: _Draft) -> bool:
    return any(spec is not None and spec.conditional for spec in draft.specs)


def _policy_text(policy: Policy) -> str:
    """A policy as every rank prints it alike: a callable by its name, not by its address."""
    return str(getattr(policy, "__qualname__", "a callable")) if callable(policy) else repr(policy)


def _dtypes(policy: MixedPrecisionPolicy | None) -> str:
    """A policy's compute and reduce dtype as text."""
    words = policy_to_dict(policy or MixedPrecisionPolicy())
    return f"{words['param_dtype'] or 'as stored'}/{words['reduce_dtype'] or 'as stored'}"


def _policy_difference(first: MixedPrecisionPolicy, second: MixedPrecisionPolicy) -> tuple[str, str]:
    ours, theirs = policy_to_dict(first), policy_to_dict(second)
    names = [name for name in ours if ours[name] != theirs[name]]
    return tuple(", ".join(f"{name}={words[name]}" for name in names) for words in (ours, theirs))  # type: ignore[return-value]  # two items


def _name(paths: tuple[str, ...]) -> str:
    return ", ".join(path or "(root)" for path in paths)
