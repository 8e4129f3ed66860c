"""The sparse indexer: which regions of the past each query of a full-attention layer reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.step5.config import Step5Config
from annotate_fsdp.models.step5.linear import Step5Linear, init_weight, round_to
from annotate_fsdp.models.step5.norm import Step5IndexerLayerNorm, Step5IndexerRMSNorm
from annotate_fsdp.models.step5.rotary import Step5RotaryEmbedding, apply_rotary


@fsdp_unit(policy="fp32", casts_itself=True)
class Step5IndexerWeightProjection(nn.Module):
    """Project to one number a head; the fp32 weight `[heads, hidden]` is rounded to the input's dtype."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, hidden_size, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight in place."""
        init_weight(self.weight)

    def forward(self, h: Tensor) -> Tensor:
        """Return `[..., heads]` in fp32, the product itself in the dtype of `h` `[..., hidden]`."""
        return F.linear(h, self.weight.to(h.dtype)).float()


class Step5SparseIndexer(nn.Module):
    """Choose regions: for each query and KV group the `topk` best of the past, and always its own.

    A region is `region_block_size` consecutive positions. Queries have H heads, shared out over the G
    groups in order; keys, their averaging gates and thus the region summaries have one head for all. The
    choice is discrete and made without gradient, so that these parameters' gradients are None.
    """

    def __init__(self, config: Step5Config, layer: int) -> None:
        super().__init__()
        sparse = config.sparse_config
        heads, proxy = sparse.sparse_indexer_num_heads, sparse.proxy_dim
        self.groups = config.num_attention_groups
        self.heads_per_group = heads // self.groups
        self.topk = sparse.topk
        self.region = sparse.region_block_size
        self.fp8_rounding = config.indexer_fp8_rounding
        self.q_proj = Step5Linear(config.hidden_size, heads * proxy)
        self.k_proj = Step5Linear(config.hidden_size, proxy)
        self.z_proj = Step5Linear(config.hidden_size, proxy)
        self.w_proj = Step5IndexerWeightProjection(config.hidden_size, heads)
        self.q_norm = Step5IndexerRMSNorm(proxy, config.rms_norm_eps)
        self.k_norm = Step5IndexerLayerNorm(proxy, config.rms_norm_eps)
        self.rotary_emb = Step5RotaryEmbedding(sparse.sparse_indexer_rope_dim, config.rope_theta[layer])

    @torch.no_grad()
    def forward(self, h: Tensor) -> Tensor:
        """Return for `h` `[B, S, hidden]` which regions are read: bool `[B, S, G, ceil(S / region)]`."""
        cos, sin = self.rotary_emb(h.shape[1], h.device)
        heads = (self.groups, self.heads_per_group)
        q = self.q_norm(torch.unflatten(self.q_proj(h), -1, (*heads, -1)))  # [B, S, G, H/G, P]
        q = apply_rotary(q.movedim(1, -2), cos, sin).movedim(-2, 1)
        k = apply_rotary(self.k_norm(self.k_proj(h)), cos, sin)  # [B, S, P]
        w = torch.unflatten(self.w_proj(h), -1, heads) * self.heads_per_group**-0.5  # [B, S, G, H/G]
        summaries = summarize_regions(k, self.z_proj(h), self.region)  # [B, S // region, P]
        if self.fp8_rounding:
            summaries = round_to(summaries.to(torch.bfloat16), torch.float8_e4m3fn)
            q = round_to(q, torch.float8_e4m3fn)
        return select_regions(score_regions(q, w, summaries), self.topk, self.region)


def summarize_regions(keys: Tensor, gates: Tensor, region: int) -> Tensor:
    """Average the keys of each complete region, weighted by a softmax of `gates` over its positions.

    Args:
        keys: `[B, S, P]`.
        gates: `[B, S, P]`: each of the P channels has a softmax of its own.
        region: positions in a region.

    Returns:
        `[B, S // region, P]` in fp32.
    """
    complete = keys.shape[1] // region
    keys = torch.unflatten(keys[:, : complete * region].float(), 1, (complete, region))
    gates = torch.unflatten(gates[:, : complete * region].float(), 1, (complete, region))
    return (gates.softmax(dim=2) * keys).sum(dim=2)  # over [B, C, region, P]


def score_regions(q: Tensor, w: Tensor, summaries: Tensor) -> Tensor:
    """Return sum_j w_j * relu(q_j . s), over the heads j of a group, for every query and summary s.

    Args:
        q: `[B, S, G, H/G, P]`.
        w: `[B, S, G, H/G]` in fp32, of either sign.
        summaries: `[B, C, P]` in fp32.

    Returns:
        `[B, S, G, C]` in fp32.
    """
    dots = torch.einsum("bsgjp,bcp->bsgjc", q.float(), summaries)
    return (w.unsqueeze(-1) * dots.relu()).sum(dim=-2)


def select_regions(scores: Tensor, topk: int, region: int) -> Tensor:
    """Return for each query the best `topk` regions strictly before its own, and its own.

    Of equal scores the lowest region wins; -0.0 equals 0.0 (the ReLU makes many of both).

    Args:
        scores: `[B, S, G, S // region]`, of the complete regions.
        topk: how many past regions at most.
        region: positions in a region.

    Returns:
        bool `[B, S, G, ceil(S / region)]`.
    """
    length, complete = scores.shape[1], scores.shape[-1]
    own = torch.arange(length, device=scores.device) // region  # [S]
    ids = torch.arange(-(-length // region), device=scores.device)
    past = (ids[:complete] < own[:, None])[:, None]  # [S, 1, C]
    # adding 0.0 turns -0.0 into 0.0, which a sort by bits would tell apart
    ranked = (scores + 0.0).masked_fill(~past, -torch.inf).sort(dim=-1, descending=True, stable=True)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ranked.indices[..., :topk], True)
    chosen = F.pad(best & past, (0, len(ids) - complete))
    return chosen | (ids == own[:, None])[:, None]


def visible_tokens(regions: Tensor, region: int) -> Tensor:
    """Return which positions a query reads: those of its regions up to its own position.

    Args:
        regions: bool `[B, S, G, ceil(S / region)]`.
        region: positions in a region.

    Returns:
        bool `[B, G, S, S]`, queries before keys.
    """
    length = regions.shape[1]
    tokens = regions.repeat_interleave(region, dim=-1)[..., :length]  # [B, S, G, S]
    return tokens.transpose(1, 2) & causal(length, regions.device)


def causal(length: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return bool `[length, length]`: key j is at or before query i, and i - j < window if there is one."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
