"""Where images stand among the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from annotate_fsdp.models.deepseek_v41.config import DeepseekV41Config
from annotate_fsdp.models.deepseek_v41.vision import Grid
from annotate_fsdp.models.fields import is_count


class TokenType(IntEnum):
    """What stands at a position; every id in an image's span is `image_token_id`."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


def image_span(rows: int, columns: int, ratio: int) -> list[TokenType]:
    """Return the types of the tokens of an image of `rows` x `columns` patches, `ratio` as in the aligner.

    A start, a newline after each row of image tokens, and an end.
    """
    row = [TokenType.IMAGE] * -(-columns // ratio) + [TokenType.NEWLINE]
    return [TokenType.START, *row * -(-rows // ratio), TokenType.END]


def read_grid(config: DeepseekV41Config, pixel_values: Tensor | None, grid: Tensor | Grid | None) -> Grid:
    """Return the grid as pairs of integers, after holding it against the pixels; empty without images.

    Raises:
        ValueError: pixels and grid do not fit each other or the model.
    """
    if pixel_values is None and grid is None:
        return []
    if pixel_values is None or grid is None:
        raise ValueError("pixel_values and grid belong together; pass both or neither")
    if not config.vision_config.num_hidden_layers:
        raise ValueError(
            "pixel_values: this model has no vision tower (vision_config.num_hidden_layers is 0)"
        )
    pairs = grid.tolist() if isinstance(grid, Tensor) else [tuple(pair) for pair in grid]
    if not all(len(pair) == 2 and all(is_count(size) for size in pair) for pair in pairs):
        raise ValueError(f"grid: rows and columns of patches of each image, not {pairs}")
    patch = (3, config.vision_config.patch_size, config.vision_config.patch_size)
    if tuple(pixel_values.shape[1:]) != patch:
        raise ValueError(
            f"pixel_values: [patches, {', '.join(map(str, patch))}], not {list(pixel_values.shape)}"
        )
    patches = sum(rows * columns for rows, columns in pairs)
    if len(pixel_values) != patches:
        raise ValueError(f"pixel_values: {len(pixel_values)} patches, but grid counts {patches}")
    return [(rows, columns) for rows, columns in pairs]


def check_types(config: DeepseekV41Config, ids: Tensor, types: Tensor | None, grid: Grid) -> Tensor | None:
    """Return which tokens belong to images, bool `[B, S]`, None without images.

    Raises:
        ValueError: the spans in `types` are not those of `grid`, one is torn apart, or an id in them is not
            the image's.
    """
    if types is None:
        if grid:
            raise ValueError("types: say where the images stand, [B, S] of TokenType values")
        return None
    if types.shape != ids.shape:
        raise ValueError(f"types: {list(types.shape)} for ids {list(ids.shape)}")
    if bool((types < TokenType.TEXT).any()):
        raise ValueError(f"types: {int(types.min())} is no TokenType")
    is_image = types >= 0
    ratio = config.vision_config.downsample_ratio
    spans = [image_span(rows, columns, ratio) for rows, columns in grid]
    expected = [kind for span in spans for kind in span]
    found = types[is_image].tolist()
    if found != expected:
        raise ValueError(
            f"types: the images of grid span {_summary(expected)}, but types has {_summary(found)}"
        )
    if not grid:
        return None
    for image, places in enumerate(is_image.nonzero().split([len(span) for span in spans])):
        (row, first), last = places[0].tolist(), places[-1].tolist()
        if last != [row, first + len(places) - 1]:
            raise ValueError(f"types: image {image} must span {len(places)} consecutive positions of one row")
    if bool((ids[is_image] != config.image_token_id).any()):
        raise ValueError(f"ids: every token of an image must be image_token_id, {config.image_token_id}")
    return is_image


def place_images(
    embedded: Tensor, types: Tensor, features: Tensor, start: Tensor, newline: Tensor, end: Tensor
) -> Tensor:
    """Return `embedded` `[B, S, hidden]` with features `[T, hidden]` and markers `[hidden]` in place."""
    dtype = embedded.dtype
    for kind, marker in ((TokenType.START, start), (TokenType.NEWLINE, newline), (TokenType.END, end)):
        embedded = torch.where((types == kind).unsqueeze(-1), marker.to(dtype), embedded)
    return embedded.masked_scatter((types == TokenType.IMAGE).unsqueeze(-1), features.to(dtype))


def _summary(types: Sequence[int]) -> str:
    return f"{len(types)} tokens" + (f" {[int(kind) for kind in types]}" if len(types) <= 32 else "")
