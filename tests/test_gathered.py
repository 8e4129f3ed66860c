"""`gathered`: a unit's weights used other than by its forward, on real ranks against an unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from annotate_fsdp import AnnotationError, fsdp_forward, fsdp_unit, gathered, observe, shard_annotated

FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DIM, VOCAB, STEPS = 8, 13, 3
FOLDS = hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn")


class Fused(torch.autograd.Function):
    """Cross-entropy of a head that never holds its logits for the backward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, target)
        return functional.cross_entropy((hidden @ weight.t()).float(), target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, target = ctx.saved_tensors
        assert weight.untyped_storage().size(), "the weight was freed"
        logits = (hidden @ weight.t()).float()
        error = logits.softmax(-1) - functional.one_hot(target, VOCAB)
        error = (gradient * error / len(target)).to(hidden.dtype)
        return error @ weight, error.t() @ hidden, None


def fused(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    assert not isinstance(weight, DTensor)
    assert weight.shape == (VOCAB, DIM)
    return Fused.apply(hidden, weight, target)  # type: ignore[no-any-return, no-untyped-call]


@fsdp_unit
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = fsdp_unit(nn.LayerNorm(DIM), policy="fp32")
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = fsdp_unit(nn.Embedding(VOCAB, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = fsdp_unit(nn.Linear(DIM, VOCAB, bias=False))

    def forward(self, ids: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        x = self.backbone(ids)
        if target is None:
            return self.head(x) + 0.0
        with gathered(self, "head"):
            return fused(x, self.head.weight, target)

    @fsdp_forward
    def backbone(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    @fsdp_forward
    def mixed(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        with gathered(self, "blocks.1"):
            x = x @ self.blocks[1].up.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x) + 0.0


Loss = Callable[[Model, torch.Tensor, torch.Tensor], torch.Tensor | None]


def after_the_root(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    hidden = model.backbone(ids)
    with gathered(model, "head"):
        return fused(hidden, model.head.weight, target)


def before_any_forward(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with gathered(model, "head"):
        return fused(model.backbone(ids), model.head.weight, target)


def backward_inside(model: Model, ids: torch.Tensor, target: torch.Tensor) -> None:
    hidden = model.backbone(ids)
    with gathered(model, "head.weight"):
        fused(hidden, model.head.weight, target).backward()


def inside_the_root(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return model(ids, target)


def beside_its_forward(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    hidden = model.backbone(ids)
    with gathered(model, "head"):
        loss = fused(hidden, model.head.weight, target)
        return loss + functional.cross_entropy(model.head(hidden).float(), target)


def before_its_forward(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    hidden = model.backbone(ids)
    with gathered(model, "head"):
        loss = fused(hidden, model.head.weight, target)
    return loss + functional.cross_entropy(model.head(hidden.tanh()).float(), target)


def several_paths(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with gathered(model, "embed", "head"):
        return fused(model.embed.weight[ids] * 2, model.head.weight, target)


def behind_its_own_unit(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The block reduces its gradients before that of this use is there."""
    return functional.cross_entropy(model.mixed(ids).float(), target)


def an_island(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    hidden = model.backbone(ids)
    with gathered(model, "blocks.0.norm", "norm", "head"):
        assert model.blocks[0].norm.weight.dtype == torch.float32
        scale = model.blocks[0].norm.weight * model.norm.weight
        return fused(hidden * scale.to(hidden.dtype), model.head.weight, target)


def two_forwards_then_two_backwards(model: Model, ids: torch.Tensor, target: torch.Tensor) -> None:
    losses = [after_the_root(model, half, target[: len(half)]) for half in ids.chunk(2)]
    for loss in losses:
        loss.backward()


def accumulate(model: Model, ids: torch.Tensor, target: torch.Tensor) -> None:
    for index, half in enumerate(ids.chunk(2)):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(index == 1)
        after_the_root(model, half, target[: len(half)]).backward()


def in_chunks(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    hidden, loss = model.backbone(ids), torch.zeros(())
    for part, wanted in zip(hidden.chunk(2), target.chunk(2), strict=True):
        with gathered(model, "head"):
            loss = loss + checkpoint(fused, part, model.head.weight, wanted, use_reentrant=False)
    return loss


def nested(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with gathered(model, "head"):
        hidden = model.backbone(ids)
        with gathered(model, "head", "embed"):
            hidden = hidden + model.embed.weight[ids]
        return fused(hidden, model.head.weight, target)


def without_the_backbone(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.backbone(ids)
    with gathered(model, "head"):
        return fused(hidden, model.head.weight, target)


def as_it_is(model: Model) -> None:
    pass


def tied(model: Model) -> None:
    model.head.weight = model.embed.weight


def in_the_root(model: Model) -> None:
    del model.head.__fsdp_unit__


def tied_to_the_root(model: Model) -> None:
    tied(model)
    in_the_root(model)


def frozen_head(model: Model) -> None:
    model.head.requires_grad_(False)


LOSSES: list[Loss] = [
    after_the_root,
    before_any_forward,
    backward_inside,
    inside_the_root,
    beside_its_forward,
    before_its_forward,
    several_paths,
    behind_its_own_unit,
    an_island,
    two_forwards_then_two_backwards,
    accumulate,
    in_chunks,
    nested,
    without_the_backbone,
]


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids, target = torch.randint(VOCAB, (2, 6), generator=generator)
    return ids, target


def step(model: Model, loss: Loss, ids: torch.Tensor, target: torch.Tensor) -> None:
    result = loss(model, ids, target)
    if result is not None:
        result.backward()


def trained_whole(loss: Loss, shape: Callable[[Model], None]) -> dict[str, torch.Tensor]:
    """Train the unsharded model on the mean gradients of two ranks."""
    torch.manual_seed(0)
    model = Model()
    shape(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for index in range(STEPS):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(2):
            step(model, loss, *data(index, rank))
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / 2 if name in sums else None
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def evaluate(model: Model, ids: torch.Tensor, target: torch.Tensor) -> float:
    with torch.no_grad():
        whole = after_the_root(model, ids, target)
        with gathered(model, "head"):  # forwards inside, of a part and of the model, free nothing
            hidden = model.backbone(ids)
            model(ids)
            inside = fused(hidden, model.head.weight, target)
    assert torch.equal(whole, inside)
    return whole.item()


def gathered_now(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


def make(shape: Callable[[Model], None], lowering: str, policy: MixedPrecisionPolicy) -> Model:
    torch.manual_seed(0)
    model = Model()
    shape(model)
    return shard_annotated(model, init_device_mesh("cpu", (2,)), mp_policy=policy, lowering=lowering)


def train(loss: Loss, shape: Callable[[Model], None], lowering: str) -> tuple[list[Any], list[str], Any]:
    expected = trained_whole(loss, shape)
    model = make(shape, lowering, FP32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    left, losses = [], []
    for index in range(STEPS):
        step(model, loss, *data(index, dist.get_rank()))
        left += gathered_now(model)
        losses.append(evaluate(model, *data(index, 0)))
        left += gathered_now(model)
        optimizer.step()
        optimizer.zero_grad()
    # two backwards are reduced one by one: sums of other summands
    exact = loss is not two_forwards_then_two_backwards
    differences = [
        name
        for name, parameter in model.named_parameters()
        if not torch.allclose(
            parameter.full_tensor(), expected[name], rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
        )
    ]
    return differences, left, losses


def train_all(losses: list[Loss], shape: Callable[[Model], None], lowering: str) -> dict[str, Any]:
    return {loss.__name__: train(loss, shape, lowering)[:2] for loss in losses}


SLOW = ["unit", *(["fold"] if FOLDS else [])]


@pytest.mark.parametrize(
    "lowering", ["group", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_three_steps_equal_those_of_the_unsharded_model(ranks: Pool, lowering: str) -> None:
    for found in ranks.run(train_all, LOSSES, as_it_is, lowering):
        assert found == {loss.__name__: ([], []) for loss in LOSSES}


@pytest.mark.parametrize(
    "shape",
    [
        tied,
        tied_to_the_root,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (in_the_root, frozen_head)),
    ],
)
def test_tied_frozen_and_unmarked_heads_train_alike(ranks: Pool, shape: Callable[[Model], None]) -> None:
    losses = [after_the_root, beside_its_forward, several_paths, accumulate, two_forwards_then_two_backwards]
    for found in ranks.run(train_all, losses, shape, "group"):
        assert found == {loss.__name__: ([], []) for loss in losses}


# -- when it is freed ------------------------------------------------------------------------------


def freed(lowering: str) -> dict[str, list[str]]:
    model = make(as_it_is, lowering, BF16)
    ids, target = data(0, 0)
    head = model.head
    found = {}

    def note(name: str) -> None:
        found[name] = [name for name in gathered_now(model) if name == "head.weight"]

    with torch.no_grad(), gathered(model, "head"):
        note("inside an evaluation")
        assert head.weight.dtype == torch.bfloat16
    note("after an evaluation")
    with gathered(model, "head"):
        head.weight.float().sum()
    note("nothing is saved")
    with pytest.raises(RuntimeError, match="shape"), gathered(model, "head"):
        (head.weight @ head.weight.t()) @ torch.ones(2, 2)
    note("an error")
    loss = after_the_root(model, ids, target)
    note("before backward")
    loss.backward()
    note("after backward")
    with gathered(model, "head"):
        fused(model.backbone(ids), head.weight, target).backward()
        note("backward inside, before the end")
    note("backward inside, at the end")
    return found


@pytest.mark.parametrize("lowering", ["unit", "group"])
def test_it_is_freed_unless_a_backward_needs_it(ranks: Pool, lowering: str) -> None:
    held = ["inside an evaluation", "before backward", "backward inside, before the end"]
    for found in ranks.run(freed, lowering):
        assert [name for name, names in found.items() if names] == held


def outdated() -> list[bool]:
    """A loss without a backward leaves the head gathered; the optimizer's step is seen all the same."""
    model = make(as_it_is, "unit", FP32)
    ids, target = data(0, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after_the_root(model, ids, target).backward()
    same = []
    for by_forward in (False, True):
        after_the_root(model, ids, target)
        optimizer.step()
        if by_forward:
            seen = model(torch.arange(VOCAB))
            with torch.no_grad(), gathered(model, "head"):
                hidden = model.backbone(torch.arange(VOCAB))
                same.append(torch.equal(seen, hidden @ model.head.weight.t() + 0.0))
        full = optimizer.param_groups[0]["params"][-1].full_tensor()
        with torch.no_grad(), gathered(model, "head"):
            same.append(torch.equal(model.head.weight, full))
    return same


def test_what_stays_gathered_without_a_backward_is_not_used_after_a_step(ranks: Pool) -> None:
    assert ranks.run(outdated) == [[True, True, True]] * 2


def as_the_model(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(ids).float(), target)


def by_hand(model: Model, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    hidden = model.backbone(ids)
    with gathered(model, "head"):
        return by_forward_of(hidden, model.head.weight, target)


def by_forward_of(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy((functional.linear(hidden, weight) + 0.0).float(), target)


def train_bf16(loss: Loss) -> dict[str, torch.Tensor]:
    model = make(as_it_is, "group", BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for index in range(STEPS):
        step(model, loss, *data(index, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def both_in_bf16() -> list[str]:
    one, other = train_bf16(as_the_model), train_bf16(by_hand)
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_in_bf16_it_equals_the_heads_own_forward(ranks: Pool) -> None:
    assert ranks.run(both_in_bf16) == [[], []]


# -- paths -----------------------------------------------------------------------------------------


def test_an_unsharded_model_is_left_as_it_is() -> None:
    model = Model()
    before = dict(model.named_parameters())
    with gathered(model, "head", "blocks.0", "norm.weight"):
        assert dict(model.named_parameters()) == before
        assert all(model.get_parameter(name) is parameter for name, parameter in before.items())


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (
            ["heat"],
            'AF305 error at heat: gathered(model, "heat"), but the model has no module and no parameter of '
            "that name. Write the path of one, such as head.",
        ),
        (
            ["blocks.0.drop"],
            'AF306 error at blocks.0.drop: gathered(model, "blocks.0.drop"), but no parameter is inside that '
            "module. Write the path of the module whose weights are used.",
        ),
        (
            [],
            "AF306 error at the root module: gathered(model), but no path is given. Write the paths of the "
            'modules whose weights are used: gathered(model, "lm_head").',
        ),
    ],
)
def test_a_path_that_holds_nothing_is_named(paths: list[str], message: str) -> None:
    model = Model()
    model.blocks[0].drop = nn.Dropout()
    with pytest.raises(AnnotationError) as caught, gathered(model, *paths):
        pass
    assert str(caught.value) == f"1 finding; nothing was gathered\n  {message}"


def test_a_module_in_place_of_its_path_is_named() -> None:
    model = Model()
    for given, path in ((model.head, "head"), (nn.Linear(1, 1), "lm_head")):
        with pytest.raises(AnnotationError) as caught, gathered(model, given):  # type: ignore[arg-type]
            pass
        where = "head" if given is model.head else "the root module"
        assert str(caught.value) == (
            f"1 finding; nothing was gathered\n  AF305 error at {where}: gathered(model, ...) with a "
            f'Linear, but it takes paths. Write its path: gathered(model, "{path}").'
        )


def sharded_by_hand() -> list[str]:
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    for module in (model.embed, model.head):  # and no root
        fully_shard(module, mesh=mesh)
    ids, target = data(0, dist.get_rank())
    with gathered(model, "embed", "head"):
        fused(model.embed.weight[ids], model.head.weight, target).backward()
    whole = Model()
    whole.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    for rank in range(2):
        ids, target = data(0, rank)
        (fused(whole.embed.weight[ids], whole.head.weight, target) / 2).backward()
    pairs = [(model.embed.weight, whole.embed.weight), (model.head.weight, whole.head.weight)]
    return [str(a.shape) for a, b in pairs if not torch.allclose(full(a.grad), b.grad)]  # type: ignore[arg-type]


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_a_model_sharded_by_hand_without_a_root_will_do(ranks: Pool) -> None:
    assert ranks.run(sharded_by_hand) == [[], []]


# -- what `observe` says of a weight that is read otherwise ----------------------------------------


class Reader(Model):
    """Reads weights that no forward has gathered."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = read

    def forward(self, ids: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        x = self.backbone(ids)
        if self.read == "matmul":
            return x @ self.head.weight.t()
        if self.read == "elementwise":
            return self.head(x) + 0.0 * (self.blocks[0].up.weight * 2.0).to_local().sum()
        if self.read == "to_local":
            weight: Any = self.head.weight
            return x @ weight.to_local().t()
        if self.read == "forward":
            return self.head.forward(x)
        return self.head(x) + 0.0


def observe_reads(read: str) -> tuple[str | None, list[str], list[str]]:
    """Return the error, the notes on it, and what the observation says."""
    torch.manual_seed(0)
    model = shard_annotated(Reader(read), init_device_mesh("cpu", (2,)), mp_policy=BF16)
    ids, _ = data(0, 0)
    caught: Exception | None = None
    try:
        with observe(model) as observation:
            with torch.no_grad():
                sum(parameter.norm() for parameter in model.parameters())  # logged outside of a forward
            model.forward(ids) if read == "root" else model(ids)
    except RuntimeError as error:
        caught = error
    said = [text for text in observation.disagreements if " sharded, so" in text or "directly" in text]
    return str(caught) if caught else None, getattr(caught, "__notes__", []), said


def told(path: str, by: str) -> str:
    return (
        f"{path}: {by} read it while it was sharded, so it saw this rank's part or failed. Call the module, "
        "mark the method that reads it with fsdp_forward, or read it inside "
        f'`with gathered(model, "{path.rpartition(".")[0]}")`'
    )


DIRECTLY = (
    "{}: its forward was called directly, past the hooks that gather its parameters. Call the module itself"
)


@pytest.mark.parametrize(
    ("read", "error", "expected"),
    [
        ("matmul", "aten.mm.default got mixed", [told("head.weight", "t")]),
        ("elementwise", None, [told("blocks.0.up.weight", "mul")]),
        ("to_local", "to have the same dtype", [told("head.weight", "to_local")]),
        ("forward", "aten.mm.default got mixed", [DIRECTLY.format("head"), told("head.weight", "t")]),
        ("root", None, [DIRECTLY.format("(root)")]),
        ("nothing", None, []),
    ],
)
@pytest.mark.report(48)
def test_observe_names_what_is_read_while_sharded(
    ranks: Pool, read: str, error: str | None, expected: list[str]
) -> None:
    for raised, notes, said in ranks.run(observe_reads, read):
        assert raised is None if error is None else error in raised
        assert notes == (expected if error else [])
        assert said == expected


def observed(lowering: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for loss in (
        after_the_root,
        before_any_forward,
        inside_the_root,
        before_its_forward,
        behind_its_own_unit,
    ):
        model = make(as_it_is, lowering, BF16)
        with observe(model) as observation:
            step(model, loss, *data(0, 0))
        counts = observation.unit("head").collectives
        assert observation.backward
        found[loss.__name__] = (
            observation.disagreements,
            counts["all_gather"],
            counts["reduce_scatter"],
        )
    return found


@pytest.mark.parametrize("lowering", ["group", pytest.param("unit", marks=pytest.mark.slow)])
def test_observe_knows_what_gathered_calls(ranks: Pool, lowering: str) -> None:
    for found in ranks.run(observed, lowering):
        assert found == {
            "after_the_root": ((), 1, 1),
            "before_any_forward": ((), 1, 1),
            "inside_the_root": ((), 1, 1),
            "before_its_forward": ((), 3, 1),  # freed by its forward, and by its own backward
            "behind_its_own_unit": ((), 2, 1),
        }
