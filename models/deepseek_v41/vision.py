"""The vision tower: patches of one or more images through bidirectional attention, image by image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41VisionConfig
from annotate_fsdp.models.deepseek_v41.linear import DeepseekV41Linear
from annotate_fsdp.models.deepseek_v41.norm import DeepseekV41VisionRMSNorm

Grid = Sequence[tuple[int, int]]  # rows and columns of patches of each image


class DeepseekV41VisionPatchEmbed(nn.Module):
    """Embed patches: `[P, 3, p, p] -> [P, C]`, in the dtype that the weight computes in."""

    def __init__(self, config: DeepseekV41VisionConfig) -> None:
        super().__init__()
        self.proj = DeepseekV41Linear(
            3 * config.patch_size**2, config.hidden_size, config.initializer_range, bias=True
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embedded patches; `pixels` may have any floating dtype."""
        # inside forward the weight has its compute dtype, which the pixels cannot know beforehand
        return self.proj(pixels.flatten(1).to(self.proj.weight.dtype))  # type: ignore[no-any-return]  # __call__


class DeepseekV41VisionAttention(nn.Module):
    """Attend within each image: `[P, C] -> [P, C]`; wqkv's rows are queries, keys, values."""

    def __init__(self, config: DeepseekV41VisionConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        hidden, std = config.hidden_size, config.initializer_range
        self.wqkv = DeepseekV41Linear(hidden, 3 * hidden, std, bias=True)
        self.wo = DeepseekV41Linear(hidden, hidden, std, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sizes: list[int]) -> Tensor:
        """Return the output for `x` `[P, C]`.

        Args:
            x: patches of all images, one image after the other.
            cos: `[P, C / heads / 2]` in fp32.
            sin: likewise.
            sizes: patches in each image.
        """
        q, k, v = torch.unflatten(self.wqkv(x), -1, (3, self.heads, -1)).unbind(1)  # each [P, heads, D]
        q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        images = zip(*(t.transpose(0, 1).split(sizes, dim=1) for t in (q, k, v)), strict=True)
        outputs = [F.scaled_dot_product_attention(*(t[None] for t in image))[0] for image in images]
        return self.wo(torch.cat(outputs, dim=1).transpose(0, 1).flatten(1))  # type: ignore[no-any-return]  # __call__


class DeepseekV41VisionMLP(nn.Module):
    """w2(silu(gate) * up) with gate and up the halves of w1(x): `[P, C] -> [P, C]`."""

    def __init__(self, config: DeepseekV41VisionConfig) -> None:
        super().__init__()
        hidden, inter, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.w1 = DeepseekV41Linear(hidden, 2 * inter, std)
        self.w2 = DeepseekV41Linear(inter, hidden, std)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output for `x` `[P, C]`."""
        gate, up = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


# casts_itself: a cast of the inputs would round the rotary tables
@fsdp_unit(casts_itself=True)
class DeepseekV41VisionBlock(nn.Module):
    """Attention and MLP, each on the normed patches and added to them: `[P, C] -> [P, C]`."""

    def __init__(self, config: DeepseekV41VisionConfig) -> None:
        super().__init__()
        self.norm1 = DeepseekV41VisionRMSNorm(config.hidden_size)
        self.attn = DeepseekV41VisionAttention(config)
        self.norm2 = DeepseekV41VisionRMSNorm(config.hidden_size)
        self.mlp = DeepseekV41VisionMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sizes: list[int]) -> Tensor:
        """Return the block's output; see `DeepseekV41VisionAttention.forward`."""
        x = x + self.attn(self.norm1(x), cos, sin, sizes)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


@fsdp_unit(casts_itself=True)
class DeepseekV41VisionTransformer(nn.Module):
    """Patches `[P, 3, p, p]` of some images `->` features `[P, C]`; images do not see each other."""

    def __init__(self, config: DeepseekV41VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.theta = config.rope_theta
        self.patch_embed = DeepseekV41VisionPatchEmbed(config)
        self.blocks = nn.ModuleList(DeepseekV41VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = DeepseekV41VisionRMSNorm(config.hidden_size)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Return the features of all patches, in the compute dtype.

        Args:
            pixels: `[P, 3, p, p]`, the patches of each image row by row, one image after the other.
            grid: rows and columns of patches of each image.
        """
        x = self.patch_embed(pixels)
        angles = grid_angles(grid, self.head_dim, self.theta, x.device)
        cos, sin = angles.cos(), angles.sin()
        sizes = [rows * columns for rows, columns in grid]
        for block in self.blocks:
            x = block(x, cos, sin, sizes)
        return self.norm(x)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


def grid_angles(grid: Grid, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return the rotary angles of every patch, in radians, fp32 `[P, head_dim / 2]`.

    The first half is row * f_i, the second column * f_i, with f_i = theta^(-2i / (head_dim / 2)).
    """
    half = head_dim // 2
    frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=device) / half)
    angles = []
    for rows, columns in grid:
        row, column = torch.meshgrid(
            *(torch.arange(n, dtype=torch.float32, device=device) for n in (rows, columns)), indexing="ij"
        )
        angles.append(torch.cat([torch.outer(p.flatten(), frequencies) for p in (row, column)], dim=-1))
    return torch.cat(angles)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head in fp32; rounded to the dtype of `x`.

    Args:
        x: `[P, heads, D]`.
        cos: `[P, D/2]` in fp32.
        sin: `[P, D/2]` in fp32.
    """
    x1, x2 = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
