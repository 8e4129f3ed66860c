"""Step5 sharded by its marks: the layout written by hand, what a real step does, and meta to real."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pool import Pool
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from annotate_fsdp import materialize, observe, plan_annotated, plan_of, shard_annotated
from annotate_fsdp.models.step5 import Step5Config, Step5ForCausalLM

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BLOCK = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
ISLAND = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
STORAGE = {"fp32": torch.float32, "bf16": torch.bfloat16}

Record = list[tuple[float, dict[str, torch.Tensor]]]


def step5(storage: str = "fp32", checkpointing: bool = False) -> Step5ForCausalLM:
    torch.manual_seed(0)
    model = Step5ForCausalLM(Step5Config.tiny()).to_storage(STORAGE[storage])
    if checkpointing:
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(layer)
    return model


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def shard_by_hand(
    model: Step5ForCausalLM,
    *,
    island: MixedPrecisionPolicy = ISLAND,
    block: MixedPrecisionPolicy = BLOCK,
    leave_out: str = "",
) -> Step5ForCausalLM:
    """The layout that a sidecar for this model would write out."""
    mesh = world_mesh()

    def shard(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        if module is not left_out:
            fully_shard(module, mesh=mesh, mp_policy=policy)

    left_out = model.get_submodule(leave_out) if leave_out else None
    shard(model.model.embed_tokens, BF16)
    for layer in model.model.layers:
        attention = layer.self_attn
        islands = [attention.q_norm, attention.k_norm]
        if attention.indexer is not None:
            islands += [attention.indexer.w_proj, attention.indexer.q_norm, attention.indexer.k_norm]
        for norm in (*islands, layer.input_layernorm, layer.post_attention_layernorm):
            shard(norm, island)
        shard(layer, block)
    shard(model.model.norm, island)
    shard(model.lm_head, BF16)
    shard(model, BF16)
    return model


def train(model: nn.Module, steps: int = 3) -> Record:
    """Losses and full gradients of a few AdamW steps with clipping, on this rank's own batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(10 + torch.distributed.get_rank())
    record: Record = []
    for _ in range(steps):
        ids = torch.randint(256, (2, 48), generator=generator)
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        gradients = {
            name.replace("_checkpoint_wrapped_module.", ""): p.grad.full_tensor().clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        record.append((loss.item(), gradients))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return record


def same_bits(ours: Record, theirs: Record) -> bool:
    return all(
        loss == other and mine.keys() == yours.keys() and all(torch.equal(mine[n], yours[n]) for n in mine)
        for (loss, mine), (other, yours) in zip(ours, theirs, strict=True)
    )


def marked_and_by_hand(storage: str, checkpointing: bool) -> tuple[bool, list[str], int, bool]:
    marked, by_hand = step5(storage, checkpointing), shard_by_hand(step5(storage, checkpointing))
    plan = plan_annotated(marked, world_mesh(), mp_policy=BF16, lowering="unit")
    shard_annotated(marked, world_mesh(), mp_policy=BF16, lowering="unit")
    differences = [*plan.differences(plan_of(by_hand)), *plan.differences(plan_of(marked))]
    ours, theirs = train(marked), train(by_hand)
    return plan_of(by_hand) == plan, differences, len(plan), same_bits(ours, theirs)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_the_marks_make_the_hand_written_layout_to_the_bit(
    ranks: Pool, storage: str, checkpointing: bool
) -> None:
    assert ranks.run(marked_and_by_hand, storage, checkpointing) == [(True, [], 30, True)] * 2


def test_bits_that_differ_would_be_seen() -> None:
    one, two = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.0 + 2**-23])}
    assert same_bits([(1.0, one)], [(1.0, one)])
    assert not same_bits([(1.0, one)], [(1.0, two)])
    assert not same_bits([(1.0, one)], [(2.0, one)])


def observed(storage: str) -> tuple[bool, tuple[str, ...], dict[str, tuple[tuple[torch.dtype, ...], ...]]]:
    """The verdict, and per unit the dtypes of its parameters, inputs and outputs inside forward."""
    model = shard_annotated(step5(storage), world_mesh(), mp_policy=BF16, lowering="unit")
    with observe(model) as seen:
        model(torch.randint(256, (2, 32))).float().logsumexp(-1).mean().backward()
    units = {unit.paths[0]: (unit.param_dtypes, unit.input_dtypes, unit.output_dtypes) for unit in seen.units}
    return seen.agrees, seen.disagreements, units


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_every_island_computes_in_fp32_and_every_block_in_bf16(ranks: Pool, storage: str) -> None:
    for agrees, disagreements, units in ranks.run(observed, storage):
        assert disagreements == ()
        assert agrees
        islands = {path for path in units if path.endswith(("norm", "w_proj"))}
        assert len(islands) == 4 * 4 + 2 * 3 + 1
        assert {units[path][0] for path in islands} == {(torch.float32,)}
        blocks = {f"model.layers.{index}" for index in range(4)}
        assert {units[path][0] for path in blocks} == {(torch.bfloat16,)}
        # the fp32 residual goes in and comes out, whatever the islands inside return
        assert {units[path][1:] for path in blocks} == {((torch.float32,), (torch.float32,))}


def fault(build: Callable[[], Step5ForCausalLM]) -> tuple[bool, tuple[str, ...]]:
    plan = plan_annotated(step5(), world_mesh(), mp_policy=BF16, lowering="unit")
    model = build()
    assert isinstance(model, FSDPModule)
    with observe(model, plan) as seen:
        try:
            model(torch.randint(256, (2, 32))).float().logsumexp(-1).mean().backward()
        except RuntimeError:  # a missing cast may end in torch's own error; the record is still there
            model.reset_iter_state()
    return seen.agrees, seen.disagreements


def wrong_dtype() -> Step5ForCausalLM:
    return shard_by_hand(
        step5(), island=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    )


def needless_cast() -> Step5ForCausalLM:
    return shard_by_hand(step5(), block=BF16)


def missing_unit() -> Step5ForCausalLM:
    return shard_by_hand(step5(), leave_out="model.layers.1.input_layernorm")


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (wrong_dtype, "model.layers.3.self_attn.indexer.w_proj"),
        (wrong_dtype, "model.norm"),
        (needless_cast, "model.layers.2"),
        (missing_unit, "model.layers.1.input_layernorm"),
    ],
)
def test_a_planted_fault_disagrees_and_names_the_path(
    ranks: Pool, build: Callable[[], Step5ForCausalLM], path: str
) -> None:
    for agrees, disagreements in ranks.run(fault, build):
        assert not agrees
        assert any(line.startswith(f"{path}:") for line in disagreements)


def from_meta(storage: str) -> tuple[list[str], bool, bool]:
    direct = step5(storage)
    state = {name: tensor.clone() for name, tensor in direct.state_dict().items()}
    with torch.device("meta"):
        model = Step5ForCausalLM(Step5Config.tiny()).to_storage(STORAGE[storage])
    shard_annotated(direct, world_mesh(), mp_policy=BF16, lowering="unit")
    shard_annotated(model, world_mesh(), mp_policy=BF16, lowering="unit")
    materialize(model, "cpu", state_dict=state)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    wrong = [name for name, p in direct.named_parameters() if p.dtype != dtypes[name]]
    return wrong, same_bits(train(model), train(direct)), all(t.device.type == "cpu" for t in state.values())


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_built_on_meta_it_trains_as_the_directly_built_one(ranks: Pool, storage: str) -> None:
    assert ranks.run(from_meta, storage) == [([], True, True)] * 2
