"""The engram: a table of n-gram memories, looked up by hash and gated into every residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig
from annotate_fsdp.models.deepseek_v41.linear import DeepseekV41Embedding, DeepseekV41Linear

GATE_FLOOR = 1e-6


@fsdp_unit
class DeepseekV41EngramTable(DeepseekV41Embedding):
    """The memories, `[rows, engram_head_dim]`: as a unit of its own it is not gathered with its block."""


class DeepseekV41Engram(nn.Module):
    """Add gated memories to the streams: `[B, S, s, hidden] -> [B, S, s, hidden]`.

    q_weight and k_weight `[s, hidden]` scale streams and keys; wkv makes, of a token's memories, a key for
    each stream (the first s * hidden rows) and one value.
    """

    def __init__(self, config: DeepseekV41TextConfig, layer: int) -> None:
        super().__init__()
        streams, hidden = config.hc_mult, config.hidden_size
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        self.streams, self.hidden = streams, hidden
        self.eps = config.rms_norm_eps
        self.q_weight = nn.Parameter(torch.empty(streams, hidden))
        self.k_weight = nn.Parameter(torch.empty(streams, hidden))
        self.embed = DeepseekV41EngramTable(rows, config.engram_head_dim, config.initializer_range)
        memories = config.engram_heads * config.engram_head_dim
        self.wkv = DeepseekV41Linear(memories, hidden * (streams + 1), config.initializer_range)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set q_weight and k_weight to one."""
        nn.init.ones_(self.q_weight)
        nn.init.ones_(self.k_weight)

    def forward(self, streams: Tensor, rows: Tensor, blocked: Tensor | None = None) -> Tensor:
        """Return the streams with a gated value added to each, in their dtype.

        The gate is sigmoid(sign(g) sqrt(max(|g|, 1e-6))), where g is the product of stream and key, both
        divided by their root mean square, over sqrt(hidden); all of it in fp32.

        Args:
            streams: `[B, S, s, hidden]`.
            rows: int64 `[B, S, heads]` of the table.
            blocked: bool `[B, S]`, True where nothing is added; None if nowhere.
        """
        memories = self.embed(rows).flatten(-2).to(streams.dtype)
        keys, value = self.wkv(memories).split([self.streams * self.hidden, self.hidden], dim=-1)
        keys, wide = torch.unflatten(keys, -1, (self.streams, -1)).float(), streams.float()
        weight = self.q_weight.float() * self.k_weight.float()
        product = (wide * weight * keys).sum(-1)  # [B, S, s]
        scale = torch.rsqrt(wide.square().mean(-1) + self.eps) * torch.rsqrt(
            keys.square().mean(-1) + self.eps
        )
        score = product * scale * self.hidden**-0.5
        gate = (score.sign() * score.abs().clamp(min=GATE_FLOOR).sqrt()).sigmoid()
        if blocked is not None:
            gate = gate.masked_fill(blocked.unsqueeze(-1), 0.0)
        moved: Tensor = wide + gate.unsqueeze(-1) * value.float().unsqueeze(-2)
        return moved.to(streams.dtype)
