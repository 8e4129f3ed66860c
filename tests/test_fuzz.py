"""Random models, marks and options: sharded with the right numbers, or refused and left untouched."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzz_models import (
    MESHES,
    OPTIONS,
    RIGHT,
    WRONG,
    WRONG_MESHES,
    WRONG_OPTIONS,
    Edit,
    Fuzzed,
    build,
    call_of,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pool import Pool
from test_lowering_property import CASES, QUIET, WIDTH, Spec, broken_promises
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from annotate_fsdp import AnnotationError, Plan, audit, plan_annotated, plan_of, shard_annotated
from annotate_fsdp.errors import PartlyShardedError
from annotate_fsdp.lowering import CAN_FOLD


def edits(table: dict[str, Any]) -> st.SearchStrategy[Edit]:
    return st.builds(
        Edit, kind=st.sampled_from(list(table)), place=st.integers(0, 20), variant=st.integers(0, 11)
    )


RIGHT_OPTIONS = st.fixed_dictionaries(
    {"mp_policy": st.integers(0, 5), "lowering": st.integers(0, 3)},
    optional={
        **{name: st.integers(0, 5) for name in OPTIONS if name not in ("mp_policy", "lowering", "existing")},
        "mesh": st.integers(0, len(MESHES) - len(WRONG_MESHES) - 1),
    },
)
WRONG_OPTION = st.one_of(
    st.tuples(st.sampled_from(list(WRONG_OPTIONS)), st.integers(-4, -1)),
    st.tuples(st.just("mesh"), st.integers(len(MESHES) - len(WRONG_MESHES), len(MESHES) - 1)),
    st.just(("existing", 1)),
)


@st.composite
def fuzzed_cases(draw: st.DrawFn) -> Fuzzed:
    """Half of the cases are meant to be right; the others have wrong edits, or a wrong option, or both."""
    done = draw(st.lists(edits(RIGHT), max_size=3))
    options = draw(RIGHT_OPTIONS)
    fault = draw(st.integers(0, 9))
    if fault >= 6:
        done += draw(st.lists(edits(WRONG), min_size=1, max_size=2))
    if fault in (5, 9):
        options.update([draw(WRONG_OPTION)])
    if any(each.kind == "sharded" for each in done) and draw(st.booleans()):
        options["existing"] = 1  # "keep"
    return Fuzzed(draw(CASES), tuple(done), tuple(options.items()))


# -- on a rank -------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that sharding may change: classes, attributes, hooks, and what the parameters hold."""
    seen: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = {
            key: {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)
            for key, value in vars(module).items()
        }
        seen.append((name, id(module), type(module), attributes))
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        seen.append((type(tensor), tensor.requires_grad, local.dtype, local.stride(), local.tolist()))
    return seen


def outcome(fuzzed: Fuzzed) -> tuple[list[str], list[str]]:
    """The codes of what was found (none if the model was sharded), and what broke the property."""
    mesh, options = call_of(fuzzed)
    try:
        model = build(fuzzed, mesh)
    except AnnotationError as error:
        return [finding.code for finding in error.findings], []
    before = snapshot(model)
    is_early = any(hasattr(module, "is_early") for module in model.modules())
    # dynamo's own doing while it traces; it matters only where warnings are errors
    warnings.filterwarnings("ignore", ".* should not be instantiated. Methods on", DeprecationWarning)
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    notes: list[str] = []
    try:
        report = audit(model, mesh, **options)
        str(report), report.to_json()
        predicted, notes = report.errors, [f.code for f in report.findings if f.severity != "error"]
    except AnnotationError as error:
        predicted = error.findings
    if snapshot(model) != before:
        return notes, ["audit changed the model"]
    try:
        shard_annotated(model, mesh, **options)
    except PartlyShardedError as error:
        return notes, [f"sharded in part: {error}"]
    except AnnotationError as error:
        codes = sorted({finding.code for finding in error.findings})
        broken = [] if snapshot(model) == before else ["a refused model was changed"]
        if not is_early and set(error.findings) != set(predicted):
            broken.append(f"audit predicted {predicted}, refused for {error.findings}")
        return codes + notes, broken
    if predicted and not is_early:
        return notes, [f"audit predicted {predicted}, but the model was sharded"]
    return notes, list(wrong_when_sharded(fuzzed, model))


def wrong_when_sharded(fuzzed: Fuzzed, model: nn.Module) -> Iterator[str]:
    """What a sharded model does otherwise than it must."""
    mesh, options = call_of(fuzzed)
    plain = build(fuzzed, mesh, is_plain=True)
    is_early = any(hasattr(module, "is_early") for module in plain.modules())
    report = audit(model)
    if not report.ok:
        yield f"audit after sharding: {report.errors}"
    options.pop("existing", None)
    if not is_early and plan_of(model) != (planned := plan_annotated(plain, mesh, **options)):
        yield f"the state read back is not the plan: {plan_of(model)} for {planned}"
    plan = plan_annotated(plain, mesh, **{**options, "lowering": "unit"})
    if not is_early:
        yield from broken_promises(plan, plan_annotated(plain, mesh, **options), plain)
    expected, found = plain_record(plain, plan), sharded_record(model)
    if len(expected) != len(found):
        yield f"{len(found)} numbers for {len(expected)}"
    for (name, number), (_, wanted) in zip(found, expected, strict=False):
        if (number is None) != (wanted is None) or (number is not None and not torch.equal(number, wanted)):
            yield f"{name}: {number} for {wanted}"


Record = list[tuple[str, Tensor | None]]


def sharded_record(model: nn.Module) -> Record:
    """Losses and full gradients of two steps on this rank's own batches."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    torch.manual_seed(1 + dist.get_rank())
    record: Record = []
    for _ in range(2):
        loss = model(torch.randn(3, WIDTH))
        loss.backward()
        record.append(("loss", loss.detach()))
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            record.append((name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient))
        optimizer.step()
        optimizer.zero_grad()
    return record


def plain_record(model: nn.Module, plan: Plan) -> Record:
    """The same of the unsharded model, with the casts that the plan means, each written out."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for unit in plan:
        policy = unit.policy
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        for path in unit.paths:
            _cast_around(modules[path], inputs, policy.output_dtype, joins=bool(unit.members))
        for cast in unit.casts:
            _cast_around(modules[cast.path], cast.inputs, cast.outputs)
    facts = {p.path: (unit, unit.compute_dtype(p)) for unit in plan for p in unit.parameters}
    masters = dict(model.named_parameters())
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    optimizer = torch.optim.SGD([p for p in masters.values() if p.requires_grad], 0.1)
    torch.manual_seed(1 + dist.get_rank())
    record: Record = []
    for _ in range(2):
        used: dict[int, nn.Parameter] = {}
        for name, master in masters.items():
            dtype = facts[name][1] if name in facts else master.dtype
            leaf = nn.Parameter(master.detach().to(dtype).clone(), master.requires_grad)
            if CAN_FOLD and name in facts:
                _reduce_as_newer_torch(leaf, facts[name][0].policy.reduce_dtype)
            used[id(master)] = leaf
        for module, name, master in places:
            module._parameters[name] = used[id(master)]
        loss = model(torch.randn(3, WIDTH))
        loss.backward()
        record.append(("loss", loss.detach()))
        for name, master in masters.items():
            gradient = used[id(master)].grad
            if gradient is not None and name in facts:
                gradient = gradient.to(facts[name][0].policy.reduce_dtype or gradient.dtype)
                dist.all_reduce(gradient)
                gradient = (gradient / dist.get_world_size()).to(master.dtype)
            master.grad = gradient
            record.append((name, gradient))
        optimizer.step()
    return record


def _reduce_as_newer_torch(leaf: nn.Parameter, reduce_dtype: torch.dtype | None) -> None:
    """From 2.15 on FSDP2 sums the gradients of two uses in the reduction's dtype, if that is smaller."""
    if reduce_dtype is not None and reduce_dtype.itemsize < leaf.dtype.itemsize:
        leaf.grad_dtype = reduce_dtype


def _cast_around(
    module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None, *, joins: bool = False
) -> None:
    """Cast as a unit does; one with parameters sums the gradients of its input in a node of its own."""

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args = tuple(each.to(inputs or each.dtype) for each in args)
        return tuple(each.view_as(each) for each in args) if joins else args

    module.register_forward_pre_hook(before)
    if outputs is not None:
        module.register_forward_hook(lambda _, args, output: output.to(outputs))


# -- tests -----------------------------------------------------------------------------------------


def hold(ranks: Pool, fuzzed: Fuzzed, hits: Counter[str]) -> None:
    """Hold the property for one case, and count what was found."""
    (codes, broken), (others, also_broken) = ranks.run(outcome, fuzzed)
    assert broken == also_broken == [], fuzzed
    assert codes == others, fuzzed
    hits.update(set(codes))
    hits["refused" if any(code in ERRORS for code in codes) else "sharded"] += 1


QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # what fails is printed as it was drawn

#: Every error that a model, a mark or an option can provoke; each is reached by a wrong edit or option.
ERRORS = frozenset(
    f"AF{number}"
    for number in (
        *range(101, 110),
        *range(201, 207),
        *range(208, 214),
        *(301, 302),
        *(401, 402, 403, 405),
        503,
    )
)


def test_a_member_of_a_named_group_that_runs_again_leaves_the_loss_in_fp32(ranks: Pool) -> None:
    part = Spec(mark=0, has_weight=True, is_frozen=False, is_half=False, inside=())
    tree = part._replace(has_weight=False, inside=(part,))
    for lowering in range(4):
        options = (("mp_policy", 0), ("lowering", lowering))
        fuzzed = Fuzzed((tree, None, True), (Edit("grouped", 1, 0),), options)
        assert ranks.run(outcome, fuzzed) == [([], []), ([], [])]


@settings(max_examples=40, derandomize=True, deadline=None, phases=QUICK, suppress_health_check=QUIET)
@given(fuzzed_cases())
def test_a_random_model_is_sharded_right_or_refused_untouched(ranks: Pool, fuzzed: Fuzzed) -> None:
    hold(ranks, fuzzed, Counter())


@pytest.mark.slow
def test_many_random_models_are_sharded_right_or_refused_untouched(
    ranks: Pool, pytestconfig: pytest.Config
) -> None:
    examples = pytestconfig.getoption("--fuzz-examples")
    hits: Counter[str] = Counter()

    @settings(max_examples=examples, derandomize=examples <= 500, deadline=None, suppress_health_check=QUIET)
    @given(fuzzed_cases())
    def run(fuzzed: Fuzzed) -> None:
        hold(ranks, fuzzed, hits)

    run()
    print(f"\n{hits['sharded']} sharded, {hits['refused']} refused; " + report_of(hits))
    assert min(hits["sharded"], hits["refused"]) >= 0.3 * (hits["sharded"] + hits["refused"])
    if examples >= 5000:
        assert [code for code in sorted(ERRORS) if hits[code] < 20] == []


def report_of(hits: Counter[str]) -> str:
    return ", ".join(f"{code} {hits[code]}" for code in sorted(ERRORS | set(hits)) if code.startswith("AF"))
