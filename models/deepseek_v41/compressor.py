"""The compressed keys: one key, which is also the value, for every few tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig
from annotate_fsdp.models.deepseek_v41.linear import DeepseekV41FP32Linear
from annotate_fsdp.models.deepseek_v41.norm import DeepseekV41RMSNorm


class Compressed(NamedTuple):
    """What source layers make for themselves and those after them. W is the number of compressed keys.

    - kv `[B, W, D]`: keys, and values; the layers that read them send gradients back to their source.
    - index_keys `[B, W, index_head_dim]`: the indexer's, without gradient.
    - chosen: int64 `[B, S, K]`, which keys a query reads, ascending; -1 where there are fewer.
    - candidates: bool `[B, S, W]`, to which later choices are held.
    """

    kv: Tensor | None = None
    index_keys: Tensor | None = None
    chosen: Tensor | None = None
    candidates: Tensor | None = None

    def after(self, made: Compressed) -> Compressed:
        """Return what the next layer reads: new keys replace everything, a new choice the choice alone."""
        if made.kv is not None:
            return made
        return self if made.chosen is None else self._replace(chosen=made.chosen)


class DeepseekV41Compressor(nn.Module):
    """Pool every `ratio` tokens into one key: `[B, S, hidden] -> [B, S // ratio, D]`; a rest is dropped.

    wgate exists if there is something to pool, at a ratio above one.
    """

    def __init__(self, config: DeepseekV41TextConfig, layer: int) -> None:
        super().__init__()
        self.ratio = config.compress_ratios[layer]
        self.wkv = DeepseekV41FP32Linear(config.hidden_size, config.head_dim)
        self.norm = DeepseekV41RMSNorm(config.head_dim, config.rms_norm_eps)
        self.wgate = DeepseekV41FP32Linear(config.hidden_size, config.head_dim) if self.ratio > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed keys of `x` `[B, S, hidden]` without rotation, in its dtype.

        Pooling, and its two projections, are fp32; at ratio one the projection is in the dtype of `x`.
        """
        if self.wgate is None:
            return self.norm(self.wkv(x))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped
        whole = x[:, : x.shape[1] // self.ratio * self.ratio].float()
        values = torch.unflatten(self.wkv(whole), 1, (-1, self.ratio))  # [B, W, ratio, D]
        weights = torch.unflatten(self.wgate(whole), 1, (-1, self.ratio)).softmax(dim=2)
        return self.norm((values * weights).sum(dim=2).to(x.dtype))  # type: ignore[no-any-return]  # as above


def whole_groups(valid: Tensor, ratio: int) -> Tensor:
    """Return which compressed keys have valid tokens only: bool `[B, S] -> [B, S // ratio]`."""
    count = valid.shape[1] // ratio
    return torch.unflatten(valid[:, : count * ratio], 1, (count, ratio)).all(-1)


def visible_keys(length: int, ratio: int, device: torch.device) -> Tensor:
    """Return how many compressed keys lie wholly at or before each position: int64 `[length]`."""
    return (torch.arange(length, device=device) + 1) // ratio
