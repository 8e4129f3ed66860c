"""Images: the tower, the aligner, their place among the tokens, and what does not fit."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotate_fsdp.models.deepseek_v41 import (
    DeepseekV41Config,
    DeepseekV41ForCausalLM,
    DeepseekV41VisionBlock,
    DeepseekV41VisionTransformer,
    TokenType,
    image_span,
)
from annotate_fsdp.models.deepseek_v41.aligner import DeepseekV41VisionAligner, fold_squares
from annotate_fsdp.models.deepseek_v41.images import place_images
from annotate_fsdp.models.deepseek_v41.vision import grid_angles, rotate_halves

TINY = DeepseekV41Config.tiny()
IMAGE, TEXT = TINY.image_token_id, int(TokenType.TEXT)
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lively(config: DeepseekV41Config = TINY) -> DeepseekV41ForCausalLM:
    """A tiny model whose weights are large enough for every part to matter."""
    torch.manual_seed(0)
    model = DeepseekV41ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def model() -> DeepseekV41ForCausalLM:
    """One that no test changes."""
    return lively()


def tower_of() -> DeepseekV41VisionTransformer:
    torch.manual_seed(0)
    tower = DeepseekV41VisionTransformer(TINY.vision_config)
    for parameter in tower.parameters():
        parameter.data.normal_(std=0.3)
    return tower


def row_of(*parts: int | tuple[int, int]) -> tuple[list[int], list[int]]:
    """Ids and types of a row of text ids and of images, given by their rows and columns of patches."""
    ids: list[int] = []
    types: list[int] = []
    for part in parts:
        span = [TEXT] if isinstance(part, int) else [int(kind) for kind in image_span(*part, 2)]
        ids += [part] if isinstance(part, int) else [IMAGE] * len(span)
        types += span
    return ids, types


def inputs_of(*rows: tuple[list[int], list[int]]) -> tuple[Tensor, Tensor]:
    ids, types = zip(*rows, strict=True)
    return torch.tensor(ids), torch.tensor(types)


def test_a_span_is_a_start_rows_that_end_with_a_newline_and_an_end() -> None:
    start, image, newline, end = 0, 1, 2, 3
    assert image_span(3, 5, 2) == [start, image, image, image, newline, image, image, image, newline, end]
    assert image_span(1, 1, 3) == [start, image, newline, end]
    assert image_span(3, 4, 3) == [start, image, image, newline, end]
    assert TokenType.TEXT == -1


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 7), columns=st.integers(1, 7), ratio=st.integers(1, 3), channels=st.integers(1, 3))
def test_squares_are_unfolded_with_zeros_on_the_right_and_at_the_bottom(
    rows: int, columns: int, ratio: int, channels: int
) -> None:
    patches = normal(rows * columns, channels)
    image = patches.T.reshape(1, channels, rows, columns)
    image = F.pad(image, (0, -columns % ratio, 0, -rows % ratio))
    expected = F.unfold(image, ratio, stride=ratio)[0].T
    assert torch.equal(fold_squares(patches, (rows, columns), ratio), expected)
    images = [kind for kind in image_span(rows, columns, ratio) if kind == TokenType.IMAGE]
    assert len(expected) == len(images)


def test_the_aligner_projects_squares_through_an_exact_gelu_image_after_image() -> None:
    torch.manual_seed(0)
    aligner = DeepseekV41VisionAligner(TINY)
    for parameter in aligner.parameters():
        parameter.data.normal_(std=0.3)
    features = normal(3 * 2 + 1 * 5, 32)
    tokens = aligner(features, [(3, 2), (1, 5)])
    squares = torch.cat([fold_squares(features[:6], (3, 2), 2), fold_squares(features[6:], (1, 5), 2)])
    wide = squares @ aligner.w1.weight.T + aligner.w1.bias
    wide = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
    assert tokens.shape == (2 + 3, 64)
    torch.testing.assert_close(tokens, wide @ aligner.w2.weight.T + aligner.w2.bias, rtol=1e-4, atol=1e-4)


def test_a_patchs_angles_are_its_row_then_its_column_times_falling_frequencies() -> None:
    angles = grid_angles([(2, 3), (1, 2)], head_dim=8, theta=100.0, device=CPU)
    assert angles.dtype == torch.float32
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 0), (0, 1)]
    frequencies = [1.0, 100.0 ** (-2 / 4)]
    expected = [[place * f for place in at for f in frequencies] for at in places]
    torch.testing.assert_close(angles, torch.tensor(expected))


def test_rotation_turns_the_pairs_of_both_halves_of_every_head_in_fp32() -> None:
    x, angles = normal(5, 2, 8), normal(5, 4, seed=1)
    y = rotate_halves(x, angles.cos(), angles.sin())
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 4), angles)[:, None]
    torch.testing.assert_close(y, torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-5, atol=1e-5)
    narrow = rotate_halves(x.bfloat16(), angles.cos(), angles.sin())
    wide = rotate_halves(x.bfloat16().float(), angles.cos(), angles.sin())
    assert torch.equal(narrow, wide.bfloat16())


def test_a_vision_block_is_attention_and_a_gated_mlp_on_normed_patches() -> None:
    torch.manual_seed(0)
    block = DeepseekV41VisionBlock(TINY.vision_config)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.3)
    x, angles, sizes = normal(7, 32), normal(7, 8, seed=1), [4, 3]
    out = block(x, angles.cos(), angles.sin(), sizes)
    rows = block.norm1(x) @ block.attn.wqkv.weight.T + block.attn.wqkv.bias
    heads = []
    for head in range(2):
        q, k, v = (rows[:, 32 * part + 16 * head :][:, :16] for part in range(3))
        q, k = (rotate_halves(t[:, None], angles.cos(), angles.sin())[:, 0] for t in (q, k))
        seen = torch.tensor([[(i < 4) == (j < 4) for j in range(7)] for i in range(7)])
        scores = (q @ k.T / 4.0).masked_fill(~seen, -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    x = x + torch.cat(heads, dim=-1) @ block.attn.wo.weight.T + block.attn.wo.bias
    gate, up = (block.norm2(x) @ block.mlp.w1.weight.T).split(64, dim=-1)
    x = x + (gate * gate.sigmoid() * up) @ block.mlp.w2.weight.T
    torch.testing.assert_close(out, x, rtol=1e-4, atol=1e-4)


def test_the_tower_embeds_flattened_patches_and_norms_its_output() -> None:
    tower, pixels = tower_of(), normal(6, 3, 2, 2)
    inputs: list[Tensor] = []
    tower.blocks[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    last: list[Tensor] = []
    tower.blocks[1].register_forward_hook(lambda _, __, output: last.append(output))
    out = tower(pixels, [(2, 3)])
    proj = tower.patch_embed.proj
    torch.testing.assert_close(inputs[0], pixels.view(6, 12) @ proj.weight.T + proj.bias)
    assert torch.equal(out, tower.norm(last[0]))
    assert tower.to(torch.bfloat16)(pixels, [(2, 3)]).dtype == torch.bfloat16


def test_images_do_not_see_each_other() -> None:
    tower, pixels = tower_of(), normal(6 + 4, 3, 2, 2)
    both = tower(pixels, [(2, 3), (4, 1)])
    torch.testing.assert_close(both[:6], tower(pixels[:6], [(2, 3)]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both[6:], tower(pixels[6:], [(4, 1)]), rtol=1e-4, atol=1e-4)
    merged = tower(pixels[:6], [(6, 1)])
    assert not torch.allclose(merged, both[:6], atol=0.01), "where a patch stands matters"


def test_two_images_in_a_batch_are_each_as_alone(model: DeepseekV41ForCausalLM) -> None:
    pixels = normal(6 + 4, 3, 2, 2)
    first, second = row_of(7, 8, (2, 3)), row_of((4, 1), 5)
    ids, types = inputs_of(first, second)
    logits = model(ids, pixels, [(2, 3), (4, 1)], types)
    one = model(*(ids[:1], pixels[:6], [(2, 3)], types[:1]))
    two = model(*(ids[1:], pixels[6:], torch.tensor([[4, 1]]), types[1:]))
    torch.testing.assert_close(logits, torch.cat((one, two)), rtol=1e-3, atol=1e-3)
    ids, types = inputs_of(row_of(7, (2, 3), 9, (4, 1), 3))
    swapped = torch.cat((pixels[6:], pixels[:6]))
    there = model(ids, pixels, [(2, 3), (4, 1)], types)
    assert not torch.allclose(there, model(ids, swapped, [(2, 3), (4, 1)], types), atol=0.01)


def test_markers_and_features_stand_where_the_types_say() -> None:
    model, pixels = lively(), normal(6, 3, 2, 2)
    ids, types = inputs_of(row_of(7, (2, 3), 9))
    seen: list[Tensor] = []
    model.model.layers["0"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, :, 0]))
    model(ids, pixels, [(2, 3)], types)
    inner = model.model
    assert inner.aligner is not None
    assert inner.vision is not None
    features = inner.aligner(inner.vision(pixels, [(2, 3)]), [(2, 3)])
    assert inner.image_start is not None
    assert inner.image_newline is not None
    assert inner.image_end is not None
    text = inner.embed_tokens.weight
    expected = [text[7], inner.image_start, *features, inner.image_newline, inner.image_end, text[9]]
    assert torch.equal(seen[0], torch.stack(expected)[None])


def test_placing_rounds_features_and_markers_to_the_dtype_of_the_embeddings() -> None:
    embedded, markers = torch.zeros(1, 5, 4).bfloat16(), normal(3, 4)
    types = torch.tensor([[0, 1, 2, 3, -1]])
    placed = place_images(embedded, types, normal(1, 4, seed=1), *markers)
    assert placed.dtype == torch.bfloat16
    expected = torch.stack((markers[0], normal(1, 4, seed=1)[0], markers[1], markers[2], torch.zeros(4)))
    assert torch.equal(placed[0], expected.bfloat16())


def test_gradients_reach_the_pixels_the_tower_and_the_markers_but_not_the_image_tokens_embedding() -> None:
    model, pixels = lively(), normal(6, 3, 2, 2).requires_grad_()
    ids, types = inputs_of(row_of(7, (2, 3), 9))
    model(ids, pixels, [(2, 3)], types).square().mean().backward()
    assert pixels.grad is not None
    assert (pixels.grad.flatten(1).abs().sum(1) > 0).all()
    for name, parameter in model.named_parameters():
        if name.startswith(("model.vision.", "model.aligner.", "model.image_")):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
    grad = model.model.embed_tokens.weight.grad
    assert grad is not None
    assert grad.any(dim=1).nonzero().flatten().tolist() == [7, 9]


def test_without_images_the_tower_has_no_gradient_and_types_of_text_change_nothing() -> None:
    model, ids = lively(), torch.arange(9)[None]
    plain = model(ids)
    assert torch.equal(model(ids, types=torch.full((1, 9), -1)), plain)
    assert torch.equal(model(ids, torch.zeros(0, 3, 2, 2), torch.zeros(0, 2, dtype=torch.int64)), plain)
    plain.sum().backward()
    for name, parameter in model.named_parameters():
        is_image = name.startswith(("model.vision.", "model.aligner.", "model.image_"))
        assert (parameter.grad is None) == (is_image or ".indexer." in name), name


def test_image_tokens_are_routed_by_their_own_bias_in_every_layer() -> None:
    model, pixels = lively(), normal(4, 3, 2, 2)
    ids, types = inputs_of(row_of(7, (2, 2), 9))
    chosen: list[Tensor] = []
    for block in model.model.layers.values():
        block.ffn.gate.e_score_correction_bias[[0, 1]] = 100.0
        block.ffn.gate.bias_vl[[4, 5]] = 100.0
        block.ffn.gate.register_forward_hook(lambda _, __, output: chosen.append(output[1].amin(-1)))
    model(ids, pixels, [(2, 2)], types)
    assert [of.tolist() for of in chosen] == [[[0, 4, 4, 4, 4, 0]]] * 5


def test_stored_in_bf16_pixels_of_any_dtype_are_seen_and_logits_are_fp32() -> None:
    model, pixels = lively().to_storage(torch.bfloat16), normal(6, 3, 2, 2)
    ids, types = inputs_of(row_of(7, (2, 3), 9))
    logits = model(ids, pixels, [(2, 3)], types)
    assert logits.dtype == torch.float32
    assert torch.equal(model(ids, pixels.bfloat16(), [(2, 3)], types), logits)
    assert torch.equal(model(ids, pixels.double(), [(2, 3)], types), logits)


PIXELS, GRID = normal(6, 3, 2, 2), [(2, 3)]
IDS, TYPES = inputs_of(row_of(7, (2, 3), 9))
SPAN = "5 tokens [0, 1, 1, 2, 3]"


def changed(tensor: Tensor, at: int, value: int) -> Tensor:
    other = tensor.clone()
    other[0, at] = value
    return other


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((IDS, PIXELS, None, TYPES), "pixel_values and grid belong together; pass both or neither"),
        ((IDS, None, GRID, TYPES), "pixel_values and grid belong together; pass both or neither"),
        (
            (IDS, PIXELS, [(2, 3, 1)], TYPES),
            "grid: rows and columns of patches of each image, not [(2, 3, 1)]",
        ),
        (
            (IDS, PIXELS, torch.tensor([[2, 0]]), TYPES),
            "grid: rows and columns of patches of each image, not [[2, 0]]",
        ),
        (
            (IDS, PIXELS, torch.tensor([[2.0, 3.0]]), TYPES),
            "grid: rows and columns of patches of each image, not [[2.0, 3.0]]",
        ),
        ((IDS, PIXELS, GRID, torch.full_like(TYPES, -2)), "types: -2 is no TokenType"),
        (
            (IDS, PIXELS[:, :2], GRID, TYPES),
            "pixel_values: [patches, 3, 2, 2], not [6, 2, 2, 2]",
        ),
        ((IDS, PIXELS.flatten(1), GRID, TYPES), "pixel_values: [patches, 3, 2, 2], not [6, 12]"),
        ((IDS, PIXELS[:5], GRID, TYPES), "pixel_values: 5 patches, but grid counts 6"),
        ((IDS, PIXELS, [(2, 3), (1, 1)], TYPES), "pixel_values: 6 patches, but grid counts 7"),
        ((IDS, PIXELS, GRID, None), "types: say where the images stand, [B, S] of TokenType values"),
        ((IDS, PIXELS, GRID, TYPES[:, :6]), "types: [1, 6] for ids [1, 7]"),
        (
            (IDS, PIXELS, GRID, changed(TYPES, 3, -1)),
            f"types: the images of grid span {SPAN}, but types has 4 tokens [0, 1, 2, 3]",
        ),
        (
            (IDS, PIXELS, GRID, changed(TYPES, 3, 2)),
            f"types: the images of grid span {SPAN}, but types has 5 tokens [0, 1, 2, 2, 3]",
        ),
        (
            (IDS, PIXELS, GRID, changed(TYPES, 6, 7)),
            f"types: the images of grid span {SPAN}, but types has 6 tokens [0, 1, 1, 2, 3, 7]",
        ),
        (
            (IDS, None, None, TYPES),
            "types: the images of grid span 0 tokens [], but types has 5 tokens [0, 1, 1, 2, 3]",
        ),
        (
            (changed(IDS, 2, 7), PIXELS, GRID, TYPES),
            "ids: every token of an image must be image_token_id, 257",
        ),
        (
            (changed(IDS, 1, 7), PIXELS, GRID, TYPES),
            "ids: every token of an image must be image_token_id, 257",
        ),
    ],
)
def test_images_that_do_not_fit_are_refused(inputs: Any, message: str, model: DeepseekV41ForCausalLM) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model(*inputs)


def test_images_that_fit_are_accepted(model: DeepseekV41ForCausalLM) -> None:
    for grid in (GRID, torch.tensor(GRID)):
        assert model(IDS, PIXELS, grid, TYPES).isfinite().all()


@pytest.mark.parametrize(
    ("types", "image"),
    [
        ([[0, 1, 2, -1, 3]], 0),
        ([[-1, 0, 1], [2, 3, -1]], 0),
        ([[0, 1, 2, 3, -1], [0, 1, -1, 2, 3]], 1),
    ],
)
def test_a_span_that_text_or_the_end_of_a_row_tears_apart_is_refused(
    types: list[list[int]], image: int, model: DeepseekV41ForCausalLM
) -> None:
    kinds = torch.tensor(types)
    ids, count = torch.where(kinds >= 0, IMAGE, 7), image + 1
    message = f"types: image {image} must span 4 consecutive positions of one row"
    with pytest.raises(ValueError, match=f"^{message}$"):
        model(ids, normal(4 * count, 3, 2, 2), [(2, 2)] * count, kinds)


def test_images_may_follow_each_other_directly(model: DeepseekV41ForCausalLM) -> None:
    ids, types = inputs_of(row_of((2, 2), (1, 1)), row_of((2, 2), (2, 1)))
    assert model(ids, normal(11, 3, 2, 2), [(2, 2), (1, 1), (2, 2), (2, 1)], types).isfinite().all()


def test_long_spans_are_counted_but_not_listed(model: DeepseekV41ForCausalLM) -> None:
    ids, types = inputs_of(row_of((12, 12), 9))
    message = "types: the images of grid span 44 tokens, but types has 43 tokens"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model(ids, normal(144, 3, 2, 2), [(12, 12)], changed(types, 1, -1))


def test_a_model_without_a_tower_has_no_image_parts_and_refuses_pixels() -> None:
    vision = dataclasses.replace(TINY.vision_config, num_hidden_layers=0)
    model = lively(dataclasses.replace(TINY, vision_config=vision))
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if "vision" in name or "aligner" in name or "image_" in name]
    assert model.model.image_start is None
    assert model.model.vision is None
    assert model(torch.arange(5)[None]).isfinite().all()
    message = "pixel_values: this model has no vision tower (vision_config.num_hidden_layers is 0)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model(IDS, PIXELS, GRID, TYPES)
