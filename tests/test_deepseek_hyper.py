"""Hyper-connections, and how a block hands the streams' mixes from one sublayer to the next."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotate_fsdp.models.deepseek_v41 import DeepseekV41Block, DeepseekV41Config, DeepseekV41ForCausalLM
from annotate_fsdp.models.deepseek_v41.compressor import Compressed
from annotate_fsdp.models.deepseek_v41.hyper import (
    DeepseekV41HyperConnection,
    HyperMix,
    collapse,
    expand,
    first_stream,
    sinkhorn,
)

seeds = st.integers(0, 2**31 - 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hyper_of(streams: int, hidden: int, **changes: Any) -> DeepseekV41HyperConnection:
    """A hyper-connection whose three parameters all matter."""
    text = DeepseekV41Config.tiny().text_config
    config = dataclasses.replace(text, hc_mult=streams, hidden_size=hidden, **changes)
    hyper = DeepseekV41HyperConnection(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in hyper.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return hyper


def slow_sinkhorn(logits: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    """Rows and columns in turn, the first rows by softmax."""
    n = len(logits)
    z = []
    for row in logits:
        total = sum(math.exp(value) for value in row)
        z.append([math.exp(value) / total + eps for value in row])
    for iteration in range(iterations):
        if iteration:
            z = [[value / (sum(row) + eps) for value in row] for row in z]
        sums = [sum(z[i][j] for i in range(n)) + eps for j in range(n)]
        z = [[z[i][j] / sums[j] for j in range(n)] for i in range(n)]
    return z


@settings(max_examples=15, deadline=None)
@given(seed=seeds, streams=st.integers(1, 4), iterations=st.integers(1, 4), eps=st.sampled_from([1e-6, 0.1]))
def test_sinkhorn_divides_columns_then_rows_and_columns(
    seed: int, streams: int, iterations: int, eps: float
) -> None:
    logits = normal(2, streams, streams, seed=seed) * 2
    out = sinkhorn(logits, iterations, eps)
    for at in range(2):
        expected = torch.tensor(slow_sinkhorn(logits[at].tolist(), iterations, eps))
        torch.testing.assert_close(out[at], expected, rtol=1e-4, atol=1e-6)


def test_sinkhorn_makes_rows_and_columns_sum_to_one() -> None:
    out = sinkhorn(normal(5, 4, 4), iterations=20, eps=1e-6)
    assert (out > 0).all()
    torch.testing.assert_close(out.sum(-1), torch.ones(5, 4), rtol=0, atol=1e-3)
    torch.testing.assert_close(out.sum(-2), torch.ones(5, 4), rtol=0, atol=1e-4)
    once = sinkhorn(normal(5, 4, 4), iterations=1, eps=1e-6)
    torch.testing.assert_close(once.sum(-2), torch.ones(5, 4), rtol=0, atol=1e-4)
    assert (once.sum(-1) - 1).abs().max() > 0.1, "one round balances the columns only"


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_the_mixes_are_a_sigmoid_two_sigmoids_and_a_balanced_matrix_of_projections_scaled_by_the_norm(
    streams: int,
) -> None:
    hyper = hyper_of(streams, 6, hc_eps=0.01, hc_sinkhorn_iters=3, rms_norm_eps=0.3)
    x = normal(2, 3, streams, 6, seed=1)
    pre, post, comb = hyper(x)
    assert pre.shape == post.shape == (2, 3, streams)
    assert comb.shape == (2, 3, streams, streams)
    for b in range(2):
        for p in range(3):
            flat = x[b, p].flatten().tolist()
            norm = 1 / math.sqrt(sum(value * value for value in flat) / len(flat) + 0.3)
            logits = []
            for row, (weights, base) in enumerate(zip(hyper.fn.tolist(), hyper.base.tolist(), strict=True)):
                dot = sum(w * value for w, value in zip(weights, flat, strict=True)) * norm
                logits.append(base + dot * hyper.scale[min(row // streams, 2)].item())
            sigmoids = [1 / (1 + math.exp(-value)) for value in logits]
            assert pre[b, p].tolist() == pytest.approx([s + 0.01 for s in sigmoids[:streams]], rel=1e-4)
            assert post[b, p].tolist() == pytest.approx([2 * s for s in sigmoids[streams : 2 * streams]])
            rows = [logits[(2 + i) * streams : (3 + i) * streams] for i in range(streams)]
            expected = torch.tensor(slow_sinkhorn(rows, 3, 0.01))
            torch.testing.assert_close(comb[b, p], expected, rtol=1e-4, atol=1e-5)


def test_the_mixes_are_fp32_from_bf16_streams_and_parameters() -> None:
    hyper = hyper_of(4, 8)
    x = normal(2, 3, 4, 8).bfloat16()
    mix = hyper(x)
    assert [part.dtype for part in mix] == [torch.float32] * 3
    for narrow, wide in zip(mix, hyper(x.float()), strict=True):
        assert torch.equal(narrow, wide)
    assert {parameter.dtype for parameter in hyper.to(torch.bfloat16).parameters()} == {torch.bfloat16}
    assert [part.dtype for part in hyper(x)] == [torch.float32] * 3


def test_streams_of_zero_have_finite_mixes_at_an_eps_of_1e_20() -> None:
    hyper = hyper_of(2, 4, rms_norm_eps=1e-20)
    pre, post, comb = hyper(torch.zeros(1, 1, 2, 4))
    torch.testing.assert_close(pre[0, 0], hyper.base[:2].sigmoid() + 1e-6)
    torch.testing.assert_close(post[0, 0], 2 * hyper.base[2:4].sigmoid())
    assert comb.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(seed=seeds, streams=st.integers(1, 4))
def test_collapse_and_expand_sum_over_the_stream_that_is_left(seed: int, streams: int) -> None:
    x, out = normal(streams, 3, seed=seed), normal(3, seed=seed + 1)
    pre, post = normal(streams, seed=seed + 2), normal(streams, seed=seed + 3)
    comb = normal(streams, streams, seed=seed + 4)
    read = sum((pre[i] * x[i] for i in range(streams)), torch.zeros(3))
    torch.testing.assert_close(collapse(x, pre), read, rtol=1e-4, atol=1e-5)
    moved = expand(out, x, HyperMix(pre, post, comb))
    for j in range(streams):
        expected = post[j] * out
        for i in range(streams):
            expected = expected + comb[i, j] * x[i]
        torch.testing.assert_close(moved[j], expected, rtol=1e-4, atol=1e-5)


def test_the_residual_goes_through_the_transpose_of_the_matrix() -> None:
    x = torch.tensor([[1.0], [0.0]])  # stream 0 holds something
    comb = torch.tensor([[0.25, 0.75], [0.0, 0.0]])  # three quarters of it go to stream 1
    mix = HyperMix(torch.zeros(2), torch.zeros(2), comb)
    assert expand(torch.zeros(1), x, mix).tolist() == [[0.25], [0.75]]


def test_collapse_and_expand_compute_in_fp32_and_round_once() -> None:
    x, out = normal(50, 4, 8).bfloat16(), normal(50, 8, seed=1).bfloat16()
    mix = HyperMix(normal(50, 4, seed=2), normal(50, 4, seed=3), normal(50, 4, 4, seed=4))
    read, moved = collapse(x, mix.pre), expand(out, x, mix)
    assert read.dtype == moved.dtype == torch.bfloat16
    assert torch.equal(read, collapse(x.float(), mix.pre).bfloat16())
    assert torch.equal(moved, expand(out.float(), x.float(), mix).bfloat16())
    assert not torch.equal(read, (x * mix.pre.bfloat16().unsqueeze(-1)).sum(-2))


def test_the_first_mix_reads_stream_zero() -> None:
    mix = first_stream(torch.zeros(2, 3, dtype=torch.int64), 4)
    assert mix.dtype == torch.float32
    assert mix.tolist() == [[[1.0, 0.0, 0.0, 0.0]] * 3] * 2


def lively_model(**changes: Any) -> DeepseekV41ForCausalLM:
    tiny = DeepseekV41Config.tiny()
    torch.manual_seed(0)
    model = DeepseekV41ForCausalLM(
        dataclasses.replace(tiny, text_config=dataclasses.replace(tiny.text_config, **changes))
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


def watch(module: nn.Module, seen: dict[str, Any], name: str) -> None:
    """Keep under `name` what goes into `module` and comes out."""

    def note(_: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        seen[name] = inputs[0]
        seen[f"{name} out"] = output

    module.register_forward_hook(note)


def test_the_streams_start_as_copies_of_the_embedding_and_are_read_one_hot() -> None:
    model = lively_model(hc_mult=3, engram_layer_ids=(), engram_num_embeddings=())
    seen: list[tuple[Tensor, ...]] = []
    model.model.layers["0"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    ids = torch.tensor([[3, 1, 2]])
    model(ids)
    streams, mix, state = seen[0][:3]
    for stream in range(3):
        assert torch.equal(streams[:, :, stream], model.model.embed_tokens(ids))
    assert mix.tolist() == [[[1.0, 0.0, 0.0]] * 3]
    assert state == Compressed()


def test_attention_reads_the_incoming_mix_and_the_experts_read_attentions() -> None:
    block: DeepseekV41Block = lively_model().model.layers["4"]
    previous: DeepseekV41Block = lively_model().model.layers["3"]
    streams, mix = normal(1, 9, 2, 64), normal(1, 9, 2, seed=1).sigmoid()
    _, _, state = previous(streams, mix, Compressed())
    seen: dict[str, Any] = {}
    for name in ("attn_hc", "ffn_hc", "attn_norm", "ffn_norm", "attn", "ffn"):
        watch(getattr(block, name), seen, name)
    out, carried, _ = block(streams, mix, state)

    assert torch.equal(seen["attn_hc"], streams)
    assert torch.equal(seen["attn_norm"], collapse(streams, mix))
    assert not torch.allclose(seen["attn_norm"], collapse(streams, seen["attn_hc out"].pre), atol=0.01)
    assert torch.equal(seen["attn"], seen["attn_norm out"])
    between = expand(seen["attn out"][0], streams, seen["attn_hc out"])
    assert torch.equal(seen["ffn_hc"], between)
    assert torch.equal(seen["ffn_norm"], collapse(between, seen["attn_hc out"].pre))
    assert not torch.allclose(seen["ffn_norm"], collapse(between, seen["ffn_hc out"].pre), atol=0.01)
    assert torch.equal(seen["ffn"], seen["ffn_norm out"])
    assert torch.equal(out, expand(seen["ffn out"], between, seen["ffn_hc out"]))
    assert torch.equal(carried, seen["ffn_hc out"].pre)


def test_the_final_norm_reads_the_last_mix() -> None:
    model, seen = lively_model(), dict[str, Any]()
    watch(model.model.layers["4"], seen, "last")
    watch(model.model.norm, seen, "norm")
    model(torch.arange(9)[None])
    streams, mix, _ = seen["last out"]
    assert torch.equal(seen["norm"], collapse(streams, mix))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_mix_that_is_not_fp32_is_refused(dtype: torch.dtype) -> None:
    block = lively_model().model.layers["4"]
    with pytest.raises(
        TypeError,
        match=rf"^the carried mix came as {dtype}, not torch.float32; a unit around a block must not cast "
        r"its inputs or outputs \(mark it with casts_itself=True\)$",
    ):
        block(normal(1, 2, 2, 64), torch.zeros(1, 2, 2, dtype=dtype), Compressed())


def test_stored_in_bf16_the_streams_are_bf16_and_the_carried_mix_is_fp32() -> None:
    model = lively_model().to_storage(torch.bfloat16)
    dtypes: list[tuple[torch.dtype, torch.dtype]] = []

    def note(_: nn.Module, __: object, output: tuple[Tensor, Tensor, Compressed]) -> None:
        dtypes.append((output[0].dtype, output[1].dtype))

    for block in model.model.layers.values():
        block.register_forward_hook(note)
    model(torch.arange(20)[None])
    assert dtypes == [(torch.bfloat16, torch.float32)] * 5
