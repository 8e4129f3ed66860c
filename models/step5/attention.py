"""Grouped-query attention over a sliding window or over the indexer's regions, gated per head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.models.step5.config import Step5Config
from annotate_fsdp.models.step5.indexer import Step5SparseIndexer, causal, visible_tokens
from annotate_fsdp.models.step5.linear import Step5Linear
from annotate_fsdp.models.step5.norm import Step5RMSNorm
from annotate_fsdp.models.step5.rotary import Step5RotaryEmbedding, apply_rotary


class Step5Attention(nn.Module):
    """Attention of one layer: `[B, S, hidden] -> [B, S, hidden]`.

    With G KV groups of Q query heads and D channels a head, the rows of qkv_proj are, for each group in
    turn: its Q query heads, its key, its value (`[G * (Q + 2) * D, hidden]`). q_norm and k_norm have one
    weight `[D]` for all heads. `indexer` is None on sliding layers.
    """

    def __init__(self, config: Step5Config, layer: int) -> None:
        super().__init__()
        heads, groups, dim = config.num_attention_heads, config.num_attention_groups, config.head_dim
        self.head_dim = dim
        self.heads_per_group = config.heads_per_group
        self.window = config.sliding_window
        self.qkv_proj = Step5Linear(config.hidden_size, (heads + 2 * groups) * dim)
        self.o_proj = Step5Linear(heads * dim, config.hidden_size)
        self.g_proj = Step5Linear(config.hidden_size, heads)
        self.q_norm = Step5RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = Step5RMSNorm(dim, config.rms_norm_eps)
        self.rotary_emb = Step5RotaryEmbedding(config.rotary_dim(layer), config.rope_theta[layer])
        is_full = config.layer_types[layer] == "full_attention"
        self.indexer = Step5SparseIndexer(config, layer) if is_full else None

    def forward(self, h: Tensor) -> Tensor:
        """Return the attention's output for the normed `h` `[B, S, hidden]`, in its dtype."""
        qkv = torch.unflatten(self.qkv_proj(h), -1, (-1, self.heads_per_group + 2, self.head_dim))
        q, k, v = torch.split(qkv, [self.heads_per_group, 1, 1], dim=-2)  # [B, S, G, Q | 1 | 1, D]
        cos, sin = self.rotary_emb(h.shape[1], h.device)
        q = apply_rotary(self.q_norm(q).movedim(1, -2), cos, sin)  # [B, G, Q, S, D]
        k = apply_rotary(self.k_norm(k).movedim(1, -2), cos, sin)  # [B, G, 1, S, D]
        out = attend(q, k, v.movedim(1, -2), self._visible(h)).movedim(-2, 1)  # [B, S, G, Q, D]
        gate = torch.unflatten(self.g_proj(h).sigmoid(), -1, (-1, self.heads_per_group))  # [B, S, G, Q]
        return self.o_proj((out * gate.unsqueeze(-1)).flatten(2))  # type: ignore[no-any-return]  # __call__

    def _visible(self, h: Tensor) -> Tensor:
        """Return which keys each query reads: bool `[S, S]`, or `[B, G, S, S]` where regions are chosen."""
        if self.indexer is None:
            return causal(h.shape[1], h.device, self.window)
        return visible_tokens(self.indexer(h), self.indexer.region)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v over the visible keys, each group's key and value for all its heads.

    Args:
        q: `[B, G, Q, S, D]`.
        k: `[B, G, 1, S, D]`.
        v: `[B, G, 1, S, D]`.
        visible: bool `[S, S]` or `[B, G, S, S]`; every query sees a key.

    Returns:
        `[B, G, Q, S, D]`.
    """
    batch = q.shape[:2]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    mask = visible if visible.dim() == 2 else visible.flatten(0, 1).unsqueeze(1)  # [B*G, 1, S, S]
    out = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), attn_mask=mask)
    return torch.unflatten(out, 0, batch)
