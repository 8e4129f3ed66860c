"""Step5 as a module: names, shapes, storage, marks, dtypes and what may depend on what."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from annotate_fsdp import UnitSpec, fsdp_off
from annotate_fsdp.marks import UNIT_ATTRIBUTE
from annotate_fsdp.models.step5 import (
    FP32_MODULES,
    Step5Config,
    Step5DecoderLayer,
    Step5ForCausalLM,
    Step5RMSNorm,
    Step5TextModel,
    record_choices,
)

FP32 = UnitSpec(policy="fp32", casts_itself=True)


def tiny(seed: int = 0) -> Step5ForCausalLM:
    torch.manual_seed(seed)
    return Step5ForCausalLM(Step5Config.tiny())


def lively(seed: int = 0) -> Step5ForCausalLM:
    """A tiny model whose weights are large enough for every part to matter."""
    model = tiny(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


def tokens(batch: int = 2, length: int = 128, seed: int = 0) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def mark_of(module: nn.Module) -> UnitSpec | None:
    """The mark of an instance, else of the nearest class."""
    holders = [vars(module), *(vars(cls) for cls in type(module).__mro__)]
    return next((holder[UNIT_ATTRIBUTE] for holder in holders if UNIT_ATTRIBUTE in holder), None)


@pytest.fixture(scope="module")
def released() -> Step5ForCausalLM:
    with torch.device("meta"):
        return Step5ForCausalLM(Step5Config.released()).to_storage(torch.bfloat16)


def test_released_has_598_476_021_504_parameters_all_on_meta(released: Step5ForCausalLM) -> None:
    assert sum(parameter.numel() for parameter in released.parameters()) == 598_476_021_504
    assert {tensor.device.type for tensor in released.state_dict().values()} == {"meta"}


ATTENTION = {
    "self_attn.qkv_proj.weight": ((13824, 4096), torch.bfloat16),
    "self_attn.o_proj.weight": ((4096, 12288), torch.bfloat16),
    "self_attn.g_proj.weight": ((64, 4096), torch.bfloat16),
    "self_attn.q_norm.weight": ((192,), torch.float32),
    "self_attn.k_norm.weight": ((192,), torch.float32),
    "input_layernorm.weight": ((4096,), torch.float32),
    "post_attention_layernorm.weight": ((4096,), torch.float32),
}
INDEXER = {
    "self_attn.indexer.q_proj.weight": ((4096, 4096), torch.bfloat16),
    "self_attn.indexer.k_proj.weight": ((256, 4096), torch.bfloat16),
    "self_attn.indexer.z_proj.weight": ((256, 4096), torch.bfloat16),
    "self_attn.indexer.w_proj.weight": ((16, 4096), torch.float32),
    "self_attn.indexer.q_norm.weight": ((256,), torch.float32),
    "self_attn.indexer.k_norm.weight": ((256,), torch.float32),
    "self_attn.indexer.k_norm.bias": ((256,), torch.float32),
}
DENSE = {
    "mlp.gate_proj.weight": ((13824, 4096), torch.bfloat16),
    "mlp.up_proj.weight": ((13824, 4096), torch.bfloat16),
    "mlp.down_proj.weight": ((4096, 13824), torch.bfloat16),
}
MOE = {
    "moe.gate.weight": ((352, 4096), torch.bfloat16),
    "moe.gate.e_score_correction_bias": ((352,), torch.float32),
    "moe.experts.gate_and_up_projs": ((352, 4096, 3072), torch.bfloat16),
    "moe.experts.down_projs": ((352, 1536, 4096), torch.bfloat16),
    "share_expert.gate_proj.weight": ((1536, 4096), torch.bfloat16),
    "share_expert.up_proj.weight": ((1536, 4096), torch.bfloat16),
    "share_expert.down_proj.weight": ((4096, 1536), torch.bfloat16),
}


def test_released_names_shapes_and_dtypes_are_the_checkpoints(released: Step5ForCausalLM) -> None:
    expected = {
        "model.embed_tokens.weight": ((128896, 4096), torch.bfloat16),
        "model.norm.weight": ((4096,), torch.float32),
        "lm_head.weight": ((128896, 4096), torch.bfloat16),
    }
    for layer in range(92):
        parts = ATTENTION | (INDEXER if layer % 4 == 3 else {}) | (MOE if 3 <= layer <= 90 else DENSE)
        expected |= {f"model.layers.{layer}.{name}": value for name, value in parts.items()}
    state = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in released.state_dict().items()}
    assert state == expected


def test_released_declares_533_units(released: Step5ForCausalLM) -> None:
    marked = [name for name, module in released.named_modules() if mark_of(module) is not None]
    assert "" not in marked, "the root is a unit without a mark"
    assert len(marked) + 1 == 533 == 69 * 5 + 23 * 8 + 4


def test_marks_stand_on_norms_indexer_islands_layers_embedding_and_head() -> None:
    model = tiny()
    marks = {name: mark_of(module) for name, module in model.named_modules() if mark_of(module) is not None}
    layer = UnitSpec(casts_itself=True)
    expected: dict[str, UnitSpec] = {
        "model.embed_tokens": UnitSpec(),
        "model.norm": FP32,
        "lm_head": UnitSpec(),
    }
    for index in range(4):
        at = f"model.layers.{index}"
        expected[at] = layer
        names = ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"]
        if index >= 2:
            names += [f"self_attn.indexer.{name}" for name in ("w_proj", "q_norm", "k_norm")]
        expected |= {f"{at}.{name}": FP32 for name in names}
    assert marks == expected


def test_fp32_modules_are_those_whose_mark_says_fp32() -> None:
    for name, module in tiny().named_modules():
        assert (mark_of(module) == FP32) == isinstance(module, FP32_MODULES), name


def test_taking_the_marks_away_leaves_outputs_and_gradients_equal() -> None:
    marked = lively()
    unmarked = copy.deepcopy(marked)
    for module in unmarked.modules():
        fsdp_off(module)
    assert all(not isinstance(mark_of(module), UnitSpec) for module in unmarked.modules())
    ids = tokens()
    assert torch.equal(unmarked(ids), marked(ids))
    loss_of(marked, ids).backward()
    loss_of(unmarked, ids).backward()
    for (name, one), two in zip(marked.named_parameters(), unmarked.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        assert one.grad is None or torch.equal(one.grad, two.grad), name
    assert marked.state_dict().keys() == unmarked.state_dict().keys()


def test_no_logit_depends_on_a_later_token() -> None:
    model, ids = lively(), tokens(1)
    before = model(ids)
    for changed in (1, 7, 8, 63, 64, 127):
        other = ids.clone()
        other[0, changed:] = (other[0, changed:] + 1) % 256
        after = model(other)
        torch.testing.assert_close(after[0, :changed], before[0, :changed], rtol=1e-4, atol=1e-4)
        assert not torch.isclose(after[0, changed], before[0, changed], atol=1e-2).all()


def test_a_sequence_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    model, ids = lively(), tokens(3)
    torch.testing.assert_close(model(ids)[1:2], model(ids[1:2]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3, 8, 9])
def test_short_sequences_run(length: int) -> None:
    logits = tiny()(tokens(1, length))
    assert logits.shape == (1, length, 256)
    assert logits.isfinite().all()


def test_every_parameter_but_the_indexers_gets_a_gradient() -> None:
    model = tiny()
    loss_of(model, tokens()).backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert without
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_tiny_selects_at_128_positions() -> None:
    with record_choices(model := lively()) as choices:
        model(tokens(1))
    assert choices.regions.keys() == {2, 3}
    assert choices.experts.keys() == {1, 2}
    last = choices.regions[2][0][127]
    assert [len(group) for group in last] == [4, 4]
    assert 100_000 < sum(parameter.numel() for parameter in model.parameters()) < 500_000


def test_recorded_choices_are_what_the_modules_returned_and_end_with_the_context() -> None:
    model, ids = lively(), tokens(2, 40)
    with record_choices(model) as choices:
        recorded = model(ids)
    assert torch.equal(recorded, model(ids))
    layer = model.model.layers[2]
    seen: list[Tensor] = []
    hook = layer.self_attn.indexer.register_forward_hook(lambda _, __, regions: seen.append(regions))
    model(ids)
    hook.remove()
    for batch, position, group in ((0, 0, 0), (1, 39, 1), (0, 20, 1)):
        ids_of = seen[0][batch, position, group].nonzero().flatten().tolist()
        assert choices.regions[2][batch][position][group] == ids_of
    assert [len(choices.experts[1]), len(choices.experts[1][0]), len(choices.experts[1][0][0])] == [2, 40, 2]
    before = copy.deepcopy(choices)
    model(tokens(1, 10))
    assert choices == before
    assert not any(module._forward_hooks for module in model.modules())


def test_choices_are_recorded_in_a_checkpointed_model_and_its_gradients_are_the_same() -> None:
    model, ids = lively(), tokens(1)
    with record_choices(model) as plain:
        loss_of(model, ids).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    with record_choices(model) as recomputed:
        loss_of(model, ids).backward()
    assert recomputed == plain
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, grads[name]), name


def test_storage_in_bf16_keeps_the_islands_and_the_router_bias_in_fp32() -> None:
    model = tiny()
    parameters = dict(model.named_parameters())
    assert model.to_storage(torch.bfloat16) is model
    assert dict(model.named_parameters()) == parameters, "the same Parameter objects"
    islands = ("norm.weight", "norm.bias", "w_proj.weight")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith(islands) else torch.bfloat16), name
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    model.to_storage(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_storage_in_an_integer_dtype_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^to_storage\(torch.int8\): parameters need a floating-point dtype$"
    ):
        tiny().to_storage(torch.int8)


def test_stored_in_bf16_the_model_trains_and_stays_close_to_fp32() -> None:
    model, ids = tiny(), tokens()
    exact = loss_of(model, ids)
    model.to_storage(torch.bfloat16)
    logits = model(ids)
    assert logits.dtype == torch.bfloat16
    loss = loss_of(model, ids)
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)
    loss.backward()
    for name, parameter in model.named_parameters():
        if ".indexer." not in name:
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.isfinite().all()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
    assert loss_of(model, ids) < loss - 0.01


def test_stored_in_bf16_the_residual_is_fp32_and_everything_between_is_bf16() -> None:
    model = tiny().to_storage(torch.bfloat16)
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding, Step5DecoderLayer, *FP32_MODULES)):

            def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
                dtypes[name] = (inputs[0].dtype, output.dtype)

            module.register_forward_hook(note)
    model(tokens(1))
    fp32, bf16 = torch.float32, torch.bfloat16
    for name, seen in dtypes.items():
        kind = type(model.get_submodule(name))
        if kind is Step5DecoderLayer:
            expected = (fp32, fp32)
        elif name.endswith("layernorm"):
            expected = (fp32, bf16)
        elif name.endswith("w_proj"):
            expected = (bf16, fp32)
        elif name.endswith("embed_tokens"):
            expected = (torch.int64, bf16)
        else:
            expected = (bf16, bf16)
        assert seen == expected, name
    kinds = Counter(type(model.get_submodule(name)).__name__ for name in dtypes)
    assert kinds["Step5RMSNorm"] == 17
    assert kinds["Step5IndexerWeightProjection"] == 2


def test_the_residual_is_rounded_before_the_final_norm() -> None:
    model = Step5TextModel(Step5Config.tiny())
    model.embed_tokens.to(torch.bfloat16)
    for layer in model.layers:
        layer.forward = lambda x: x + 1e-3  # type: ignore[method-assign]  # a layer that adds little
    ids = tokens(1)
    residual = model.embed_tokens(ids).float()
    for _ in model.layers:
        residual = residual + 1e-3
    expected = model.norm(residual.bfloat16())
    assert torch.equal(model(ids), expected)
    assert not torch.equal(model.norm(residual, torch.bfloat16), expected)


def test_an_fp32_model_rounds_nothing() -> None:
    seen: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            seen.update(x.dtype for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    model = tiny()
    with Watch():
        model(tokens(1, 40))
    assert seen == {torch.float32, torch.int64, torch.bool}


def test_a_model_built_on_a_device_is_initialised() -> None:
    model = tiny()
    for name, tensor in model.state_dict().items():
        if name.endswith("k_norm.weight") and ".indexer." in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif name.endswith(("norm.weight", "norm.bias", "e_score_correction_bias")):
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
        else:
            assert tensor.std().item() == pytest.approx(0.02, rel=0.15), name
            assert tensor.abs().max() <= 0.061, name
    assert loss_of(model, tokens()).item() == pytest.approx(5.55, abs=0.1)
    assert torch.equal(tiny().lm_head.weight, model.lm_head.weight), "the seed decides"


def test_a_model_built_on_meta_becomes_right_by_its_modules_reset_parameters() -> None:
    with torch.device("meta"):
        model = Step5ForCausalLM(Step5Config.tiny())
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan"))
    for module in model.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name
    assert loss_of(model, tokens()).item() == pytest.approx(5.55, abs=0.1)


def test_no_buffer_is_missing_from_the_state_dict() -> None:
    model = tiny()
    names = {name for name, _ in model.named_buffers()}
    assert names == {f"model.layers.{layer}.moe.gate.e_score_correction_bias" for layer in (1, 2)}
    assert names < model.state_dict().keys()


def test_a_whole_model_cast_to_bf16_still_has_exact_rotary_tables() -> None:
    model = tiny().to(torch.bfloat16)
    cos, _ = model.model.layers[0].self_attn.rotary_emb(1000, torch.device("cpu"))
    assert cos.dtype == torch.float32
    assert cos[999, 0].item() == pytest.approx(
        torch.tensor(999.0, dtype=torch.float64).cos().item(), abs=1e-5
    )


def test_a_norm_marked_by_its_class_keeps_its_mark_in_a_subclass() -> None:
    class Mine(Step5RMSNorm):
        pass

    assert mark_of(Mine(4, 1e-5)) == FP32


def test_both_lists_of_clamps_reach_their_layers() -> None:
    limits, shared = (1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0)
    config = dataclasses.replace(Step5Config.tiny(), swiglu_limits=limits, swiglu_limits_shared=shared)
    model = Step5ForCausalLM(config)
    layers = list(model.model.layers)
    assert [layer.mlp and layer.mlp.limit for layer in layers] == [5.0, None, None, 8.0]
    assert [layer.share_expert and layer.share_expert.limit for layer in layers] == [None, 6.0, 7.0, None]
    assert [layer.moe and layer.moe.experts.limit for layer in layers] == [None, 2.0, 3.0, None]


@pytest.mark.slow
def test_tiny_learns_a_text() -> None:
    model = tiny()
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 60))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        starts = torch.randint(len(text) - 128, (4,), generator=generator)
        loss = loss_of(model, torch.stack([text[start : start + 128] for start in starts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5.3
    assert losses[-1] < 1.0
