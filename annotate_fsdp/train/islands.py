"""A model of many small fp32 islands, in which the layout weighs more than the arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from annotate_fsdp import fsdp_unit
from annotate_fsdp.train.batches import Batch, stable_hash

WIDTH = 32
VOCABULARY = 64
BLOCKS = 4
EPS = 1e-6


@fsdp_unit(policy="fp32", casts_itself=True)
class IslandsNorm(nn.Module):
    """Normalise by the root mean square in fp32; the output has the input's dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` `[..., dim]` normalised."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return (self.weight * wide * scale).to(x.dtype)


class IslandsPart(nn.Module):
    """A linear layer between two norms."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_in = IslandsNorm(dim)
        self.linear = nn.Linear(dim, dim)
        self.norm_out = IslandsNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., dim]` for `x` `[..., dim]`."""
        result: Tensor = self.norm_out(torch.relu(self.linear(self.norm_in(x))))
        return result


@fsdp_unit
class IslandsBlock(nn.Module):
    """Two parts with a residual each, and six norms in all."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = IslandsNorm(dim)
        self.part1 = IslandsPart(dim)
        self.norm2 = IslandsNorm(dim)
        self.part2 = IslandsPart(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., dim]` for `x` `[..., dim]`."""
        x = x + self.part1(self.norm1(x))
        result: Tensor = x + self.part2(self.norm2(x))
        return result


class Islands(nn.Module):
    """An embedding, blocks, a last norm and a head: 30 units of which 25 are norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(IslandsBlock(WIDTH) for _ in range(BLOCKS))
        self.norm = IslandsNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[rows, length, 64]` of tokens `[rows, length]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


@dataclass(frozen=True)
class RandomTokens:
    """Rows of `length` random tokens to read, and as many to predict."""

    length: int

    def train(self, seed: int, step: int, rows: Iterable[int]) -> Batch:
        """Return the given rows of a step's global batch."""
        tokens = torch.stack([self._row(f"{seed}/{step}/{row}") for row in rows])
        return Batch(tokens[:, :-1], tokens[:, 1:])

    def _row(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(stable_hash(name) >> 1)
        return torch.randint(0, VOCABULARY, (self.length + 1,), generator=generator)
