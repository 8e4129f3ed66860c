"""A model built on meta and sharded becomes the model that was built directly, or says what it lacks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from annotate_fsdp import AnnotationError, fsdp_unit, materialize, shard_annotated

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Positions(nn.Module):
    """A derived table that no state dict holds."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("table", torch.empty(4, size), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.table = torch.arange(4 * self.size, device=self.table.device).view(4, self.size) / 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[0]].to(x.dtype)


@fsdp_unit
class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = fsdp_unit(nn.LayerNorm(size), policy="fp32")
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embed = fsdp_unit(nn.Embedding(11, 8))
        self.positions = Positions(8)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        for parameter in self.blocks[1].norm.parameters():
            parameter.requires_grad_(False)
        self.scale = nn.Linear(3, 1, bias=bias)  # fewer rows than ranks: empty shards
        self.head = fsdp_unit(nn.Linear(8, 11, bias=False))
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("shift", torch.full((8,), 0.5, device="cpu"), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("shift", self.shift, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.positions(self.embed(ids)) + self.shift.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale.weight.sum())


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def weights() -> Model:
    torch.manual_seed(3)
    model = Model()
    model.blocks[0].norm.weight.data += torch.rand(8)
    model.steps += 5
    model.seen[1] = True
    return model


def build(shape: tuple[int, ...], device: str, model: Callable[[], nn.Module] = Model) -> Any:
    with torch.device(device):
        made = model()
    return shard_annotated(made, mesh_of(shape), mp_policy=BF16)


def train(model: nn.Module) -> list[torch.Tensor]:
    """Losses and gradients of three steps, whole."""
    results = []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for seed in range(3):
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        ids = torch.randint(11, (4,), generator=generator)
        loss = model(ids).float().square().mean()
        loss.backward()
        results.append(loss.detach())
        results += [
            p.grad.full_tensor().clone() for p in model.parameters() if p.requires_grad and p.grad is not None
        ]
        optimizer.step()
        optimizer.zero_grad()
    return results


def assert_same_training(model: nn.Module, shape: tuple[int, ...], start: Mapping[str, torch.Tensor]) -> None:
    """`model` trains as one that was built directly with the same weights and then sharded."""
    direct = Model()
    direct.load_state_dict(start)
    shard_annotated(direct, mesh_of(shape), mp_policy=BF16)
    for (name, parameter), (_, other) in zip(
        model.named_parameters(), direct.named_parameters(), strict=True
    ):
        facts = [
            (p.dtype, p.requires_grad, p.shape, p.placements, p.to_local().device) for p in (parameter, other)
        ]
        assert facts[0] == facts[1], name
    ours, theirs = train(model), train(direct)
    assert len(ours) == len(theirs) > 3
    assert all(map(torch.equal, ours, theirs))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


SHAPES = [(1,), (2,), (4,), (2, 2)]


def size_of(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# -- from a state dict -----------------------------------------------------------------------------


def from_full(shape: tuple[int, ...], drop: str | None) -> None:
    model = build(shape, "meta")
    assert model.embed.weight is model.head.weight
    tied, shift = model.embed.weight, model.shift
    full = weights().state_dict()
    if drop is not None:
        del full[drop]
    given = dict(full)
    copies = {name: value.clone() for name, value in full.items()}
    assert materialize(model, "cpu", state_dict=full) is model
    assert list(full) == list(given)
    assert all(full[name] is given[name] and torch.equal(full[name], copies[name]) for name in full)
    assert model.embed.weight is model.head.weight is tied
    assert model.shift is model.again.shift is shift
    assert torch.equal(model.shift, torch.full((8,), 0.5))
    assert torch.equal(model.positions.table, Positions(8).table)
    assert (model.steps.item(), model.seen.tolist()) == (5, [False, True, False])
    assert_same_training(model, shape, weights().state_dict())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_from_a_full_state_dict(ranks: Any, shape: tuple[int, ...]) -> None:
    ranks.run(from_full, shape, None, world=size_of(shape))


@pytest.mark.parametrize("drop", ["embed.weight", "head.weight"])
def test_a_tied_weight_may_be_given_once(ranks: Any, drop: str) -> None:
    ranks.run(from_full, (2,), drop)


def from_sharded(shape: tuple[int, ...]) -> None:
    source = weights()
    start = copy.deepcopy(source.state_dict())
    shard_annotated(source, mesh_of(shape), mp_policy=BF16)
    state = get_model_state_dict(source)
    kinds = {name: type(value) for name, value in state.items()}
    model = materialize(build(shape, "meta"), "cpu", state_dict=state)
    assert {name: type(value) for name, value in state.items()} == kinds
    assert model.head.weight is model.embed.weight
    assert_same_training(model, shape, start)


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
def test_from_a_sharded_state_dict(ranks: Any, shape: tuple[int, ...]) -> None:
    ranks.run(from_sharded, shape, world=size_of(shape))


def from_other_mesh() -> None:
    """Shards of four become shards of two, replicated."""
    source = weights()
    start = copy.deepcopy(source.state_dict())
    shard_annotated(source, mesh_of((4,)), mp_policy=BF16)
    model = materialize(build((2, 2), "meta"), "cpu", state_dict=get_model_state_dict(source))
    assert_same_training(model, (2, 2), start)


def test_from_shards_on_another_mesh(ranks: Any) -> None:
    ranks.run(from_other_mesh, world=4)


def into_island() -> None:
    state = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in weights().state_dict().items()
    }
    model = materialize(build((2,), "meta"), "cpu", state_dict=state)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    norm = model.blocks[0].norm.weight.full_tensor()
    assert torch.equal(norm, state["blocks.0.norm.weight"].float())
    assert all(value.dtype != torch.float32 for value in state.values())
    assert_same_training(
        model,
        (2,),
        {name: value.float() if value.is_floating_point() else value for name, value in state.items()},
    )


@pytest.mark.report(12)
def test_a_bf16_state_dict_leaves_fp32_storage_fp32(ranks: Any) -> None:
    ranks.run(into_island)


def through_wrappers(wrap_keys: bool) -> None:
    with torch.device("meta"):
        model = Model()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    shard_annotated(model, mesh_of((2,)), mp_policy=BF16)
    state = weights().state_dict()
    start = dict(state)
    if wrap_keys:
        for name in list(state):
            new = name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module.")
            state[new.replace("blocks.1.", "blocks.1._orig_mod.")] = state.pop(name)
    materialize(model, "cpu", state_dict=state)
    for name, parameter in model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        assert torch.equal(parameter.full_tensor(), start[plain])


@pytest.mark.parametrize("wrap_keys", [False, True])
def test_keys_may_hold_wrapper_names_or_not(ranks: Any, wrap_keys: bool) -> None:
    ranks.run(through_wrappers, wrap_keys)


def offloaded() -> None:
    with torch.device("meta"):
        model = Model()
    shard_annotated(model, mesh_of((2,)), mp_policy=BF16, offload_policy=CPUOffloadPolicy(pin_memory=False))
    materialize(model, "cpu", state_dict=weights().state_dict())
    model(torch.arange(4)).float().sum().backward()


def test_offloaded_units_load_too(ranks: Any) -> None:
    ranks.run(offloaded)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = fsdp_unit(nn.Linear(12, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def tensor_parallel() -> None:
    """FSDP's shards of tensor-parallel shards are strided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    state = Wide().state_dict()
    for given in (state, None):
        with torch.device("meta"):
            model = Wide()
        for linear, dim in ((model.up, 0), (model.down, 1)):
            weight = distribute_tensor(linear.weight, mesh["tp"], [Shard(dim)], src_data_rank=None)
            linear.weight = nn.Parameter(weight)
        materialize(shard_annotated(model, mesh["dp"]), "cpu", state_dict=given)
        for name, parameter in model.named_parameters():
            value = parameter.full_tensor()
            if given is not None:
                assert torch.equal(value, state[name])
            elif value.ndim == 2:
                assert len(value.unique(dim=0)) == value.shape[0], "ranks drew the same numbers"
                assert len(value.unique(dim=1)[0]) == value.shape[1]


def test_tensor_parallel_parameters(ranks: Any) -> None:
    ranks.run(tensor_parallel, world=4)


def twice() -> None:
    """Loading again, after training, is loading."""
    start = weights().state_dict()
    model = materialize(build((2,), "meta"), "cpu", state_dict=start)
    first = train(model)
    with torch.no_grad():
        model(torch.arange(4))  # leaves the root gathered
    materialize(model, "cpu", state_dict=start)
    assert all(map(torch.equal, first, train(model)))


def test_a_model_with_values_is_loaded_anew(ranks: Any) -> None:
    ranks.run(twice)


# -- from an initialisation ------------------------------------------------------------------------


def fill(model: Model) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.normal_(std=0.2).add_(index % 2)
    model.steps.fill_(5)
    model.seen.fill_(False)
    model.positions.table.fill_(0.25)


def from_init(shape: tuple[int, ...], seed_by_rank: bool) -> None:
    if seed_by_rank:
        torch.manual_seed(dist.get_rank())
    model = materialize(build(shape, "meta"), "cpu", init=fill)
    assert torch.equal(model.positions.table, torch.full((4, 8), 0.25)), "what init wrote is not recomputed"
    model.positions.reset_buffers()
    assert_same_training(model, shape, whole(model))


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
def test_from_init(ranks: Any, shape: tuple[int, ...]) -> None:
    ranks.run(from_init, shape, len(shape) == 2, world=size_of(shape))


class Plain(nn.Module):
    """Everything in it knows how to initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fsdp_unit(nn.Linear(8, 8))
        self.norm = fsdp_unit(nn.BatchNorm1d(8), policy="fp32")
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def from_reset(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    model = materialize(build(shape, "meta", Plain), "cpu")
    model(torch.ones(2, 8))
    return whole(model)


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
def test_from_reset_parameters(ranks: Any, shape: tuple[int, ...]) -> None:
    first, *others = ranks.run(from_reset, shape, world=size_of(shape))
    assert torch.equal(first["norm.weight"], torch.ones(8))
    assert first["norm.num_batches_tracked"] == 1
    assert 0 < first["first.weight"].abs().max() < 8**-0.5
    rows = torch.cat([first["first.weight"], first["second.weight"]])
    assert len(rows.unique(dim=0)) == len(rows), "ranks drew the same numbers"
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first if "running" not in name)


def keep_loaded() -> None:
    with torch.device("meta"):
        model = Plain()
    model.first = fsdp_unit(nn.Linear(8, 8, device="cpu"))
    before = [p.detach().clone() for p in model.first.parameters()]
    shard_annotated(model, mesh_of((2,)), mp_policy=BF16)
    materialize(model, "cpu")
    after = [p.full_tensor() for p in model.first.parameters()]
    assert all(map(torch.equal, before, after))


def test_what_has_values_keeps_them(ranks: Any) -> None:
    ranks.run(keep_loaded)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.ones(2), persistent=False)
        self.register_buffer("sin", torch.ones(2), persistent=False)

    def reset_buffers(self) -> None:
        self.cos, self.sin = torch.full((2,), 7.0), torch.full((2,), 8.0)


def test_reset_buffers_fills_only_what_init_left() -> None:
    with torch.device("meta"):
        rotary = Rotary()

    def init(module: Rotary) -> None:
        module.cos.fill_(3)

    materialize(rotary, "cpu", init=init)
    assert (rotary.cos.tolist(), rotary.sin.tolist()) == ([3, 3], [8, 8])


def test_a_model_that_is_not_sharded_keeps_its_ties() -> None:
    with torch.device("meta"):
        model = Model()
    model.embed.weight.note = "the author's"
    model.small = nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device="meta"), requires_grad=False)
    state = {**weights().state_dict(), "small": torch.ones(2)}
    materialize(model, "cpu", state_dict=state)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.note == "the author's"
    assert (model.small.dtype, model.small.requires_grad, model.small.tolist()) == (
        torch.bfloat16,
        False,
        [1, 1],
    )
    assert all(
        torch.equal(model.state_dict()[name], value) for name, value in state.items() if name != "small"
    )


class Odd(nn.Module):
    """Number formats that have no NaN."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int64,
            torch.complex64,
            torch.float16,
            torch.float8_e4m3fn,
        ):
            self.register_buffer(str(dtype).rpartition(".")[2], torch.zeros(3, dtype=dtype))


def test_every_dtype_that_nobody_wrote_is_found() -> None:
    with torch.device("meta"):
        model = Odd()
    with pytest.raises(AnnotationError) as caught:
        materialize(model, "cpu")
    assert [finding.path for finding in caught.value.findings] == list(Odd().state_dict())
    assert {finding.code for finding in caught.value.findings} == {"AF602"}
    with torch.device("meta"):
        model = Odd()
    materialize(model, "cpu", state_dict=Odd().state_dict())
    assert all(not value.to(torch.complex64).any() for value in model.state_dict().values())


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.loaded = 0

    def get_extra_state(self) -> int:
        return 4

    def set_extra_state(self, state: int) -> None:
        self.loaded = state


def test_extra_state_is_loaded_and_missed() -> None:
    with torch.device("meta"):
        model = Counted()
    assert materialize(model, "cpu", state_dict=Counted().state_dict()).loaded == 4
    with pytest.raises(AnnotationError, match=r"AF604 error at _extra_state: extra state of its module"):
        materialize(model, "cpu", state_dict={"weight": torch.ones(2)})


# -- what is wrong ---------------------------------------------------------------------------------


def complain(kind: str) -> str:
    """Return the error of one rank; the model has not been touched where only the dict was wrong."""
    model = build((2,), "meta")
    state = dict(weights().state_dict())
    init: Callable[[Any], None] | None = None
    given: dict[str, Any] | None = state
    if kind == "missing":
        del state["blocks.0.linear.bias"]
    elif kind == "both tied missing":
        del state["embed.weight"], state["head.weight"]
    elif kind == "misspelt":
        state["blocks.0.linear.bais"] = state.pop("blocks.0.linear.bias")
    elif kind == "unexpected":
        state["extra"] = torch.ones(1)
    elif kind == "not persistent":
        state["shift"] = torch.ones(8)
    elif kind == "shape":
        state["blocks.0.linear.weight"] = torch.ones(4, 8)
    elif kind == "kind":
        state["blocks.0.linear.weight"] = torch.ones(8, 8, dtype=torch.int64)
    elif kind == "meta":
        state["blocks.0.linear.weight"] = torch.ones(8, 8, device="meta")
    elif kind == "untied":
        state["head.weight"] = state["head.weight"] + 1
    elif kind == "one rank":
        if dist.get_rank() == 1:
            del state["blocks.0.linear.bias"]
    elif kind == "left by init":
        given = None

        def init(model: Model) -> None:
            fill(model)
            model.scale.weight.fill_(float("nan"))  # is a value
            unwritten = torch.empty_like(model.scale.bias)
            with torch.no_grad():
                unwritten.to_local().view(torch.int32).fill_(-1)
            model.scale.bias.copy_(unwritten)

    elif kind == "no reset":
        given = None
        model.positions.register_buffer("other", torch.empty(2, device="meta"), persistent=False)
        model.blocks[0].linear.plain = torch.empty(2, device="meta")
    elif kind == "init raises":
        given = None

        def init(model: Model) -> None:
            if dist.get_rank() == 1:
                raise ZeroDivisionError("no")
            fill(model)

    elif kind == "forward":
        with pytest.raises(RuntimeError):
            model(torch.arange(4))
    elif kind == "device":
        with pytest.raises(AnnotationError) as caught:
            materialize(model, "meta", state_dict=state)
        return str(caught.value)
    try:
        materialize(model, "cpu", init=init, state_dict=given)
    except (AnnotationError, ZeroDivisionError) as error:
        if given is not None and kind != "forward":
            assert all(p.is_meta for p in model.parameters())
            materialize(model, "cpu", state_dict=weights().state_dict())
            train(model)
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


COMPLAINTS = {
    "missing": [
        "AF604 error at blocks.0.linear.bias: a parameter of Linear, fp32 [8], but the state dict "
        "does not hold it. Add it, or untie or remove it from the model.",
    ],
    "both tied missing": [
        "AF604 error at embed.weight: a parameter of Embedding, fp32 [11x8], tied to head.weight, but"
        " the state dict does not hold it. Add it, or untie or remove it from the model.",
    ],
    "misspelt": [
        "AF604 error at blocks.0.linear.bias: a parameter of Linear, fp32 [8], but the state dict "
        "does not hold it. Rename the key 'blocks.0.linear.bais' to it.",
        "AF605 error at blocks.0.linear.bais: a key of the state dict, but the model has no parameter"
        " or buffer of that name. Rename it to 'blocks.0.linear.bias'.",
    ],
    "unexpected": [
        "AF605 error at extra: a key of the state dict, but the model has no parameter or buffer of "
        "that name. Take it out of the state dict.",
    ],
    "not persistent": [
        "AF605 error at shift: a key of the state dict, but the model's buffer of that name is not "
        "persistent. Take it out of the state dict.",
    ],
    "shape": [
        "AF606 error at blocks.0.linear.weight: a parameter of Linear, fp32 [8x8], but the state dict"
        " gives [4, 8]. Build the model with the checkpoint's configuration; a plain tensor must be "
        "the whole one, not a shard.",
    ],
    "kind": [
        "AF607 error at blocks.0.linear.weight: a parameter of Linear, fp32 [8x8], but the state dict"
        " gives int64, another kind of number. Convert it before loading.",
    ],
    "meta": [
        "AF607 error at blocks.0.linear.weight: a parameter of Linear, fp32 [8x8], but the state dict"
        " gives a tensor on meta, which has no values. Give a tensor with values.",
    ],
    "untied": [
        "AF608 error at embed.weight: a parameter of Embedding, fp32 [11x8], tied to head.weight, but"
        " the state dict gives different values for embed.weight and head.weight. Keep one of the "
        "keys, or untie them.",
    ],
    "one rank": [
        "AF604 error at blocks.0.linear.bias: a parameter of Linear, fp32 [8] (on rank 1), but the "
        "state dict does not hold it. Add it, or untie or remove it from the model.",
    ],
    "left by init": [
        "AF602 error at scale.bias: a parameter that was on meta (on rank 0), but nobody wrote its "
        "values, or not all of them. Write it in Linear.reset_parameters(), or in "
        "materialize(init=...), or pass it in state_dict.",
    ],
    "no reset": [
        "AF602 error at steps: a buffer that was on meta, but nobody wrote its values, or not all of "
        "them. Define reset_buffers() on Model, or write it in materialize(init=...), or pass it in "
        "state_dict.",
        "AF602 error at seen: a buffer that was on meta, but nobody wrote its values, or not all of "
        "them. Define reset_buffers() on Model, or write it in materialize(init=...), or pass it in "
        "state_dict.",
        "AF603 error at positions.other: a non-persistent buffer that was on meta, but nobody wrote "
        "its values, or not all of them. Write it in Positions.reset_buffers(), or in "
        "materialize(init=...).",
        "AF611 error at blocks.0.linear.plain: a plain attribute of Linear on meta, but it is no "
        "parameter and no buffer, so nothing gives it values. Write self.register_buffer('plain', "
        "..., persistent=False), or set it in init.",
    ],
    "init raises": [
        "AF612 error at the root module: initialising failed with ZeroDivisionError: no (on rank 1), "
        "but the model has no values. See the traceback of that rank.",
    ],
    "forward": [
        "AF609 error at the root module: 14 tensors on meta, such as steps, but a forward has "
        "run through the model, and FSDP2 keeps what it then found. Build and shard the model again, "
        "and materialize it before its first forward.",
    ],
    "device": [
        "AF610 error at the root module: device='meta', but it holds no values. Write device=\"cuda\" "
        'or device="cpu".',
    ],
}


@pytest.mark.parametrize("kind", COMPLAINTS)
def test_each_error_is_named_on_every_rank(ranks: Any, kind: str) -> None:
    first, second = ranks.run(complain, kind)
    if kind == "init raises":
        assert second == "ZeroDivisionError: no"
        second = first
    assert first == second
    lines = first.splitlines()
    assert re.search(r"\d+ findings?; the model is not ready for use$", lines[0])
    assert sorted(line.strip() for line in lines[1:]) == sorted(COMPLAINTS[kind])


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AnnotationError, match="device='nowhere', but torch has no such device here"):
        materialize(Counted(), "nowhere")
    with pytest.raises(AnnotationError, match=r"a int as model, but it is no torch\.nn\.Module"):
        materialize(3, "cpu")  # type: ignore[type-var]
