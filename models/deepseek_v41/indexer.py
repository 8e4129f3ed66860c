"""The indexer: which compressed keys each query reads. It is frozen and chooses without gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from annotate_fsdp.models.deepseek_v41.compressor import Compressed, visible_keys, whole_groups
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig
from annotate_fsdp.models.deepseek_v41.linear import DeepseekV41Linear
from annotate_fsdp.models.deepseek_v41.norm import DeepseekV41RMSNorm
from annotate_fsdp.models.deepseek_v41.quantize import fake_mxfp4
from annotate_fsdp.models.deepseek_v41.rotary import apply_rotary

Table = tuple[Tensor, Tensor]  # cosine and sine


class DeepseekV41Indexer(nn.Module):
    """Choose up to `index_topk` compressed keys for every query.

    A KV source makes new index keys (wk, k_norm) and forgets earlier candidates; other index sources have
    queries only. No parameter has a gradient.
    """

    def __init__(self, config: DeepseekV41TextConfig, layer: int) -> None:
        super().__init__()
        heads, dim, std = config.index_n_heads, config.index_head_dim, config.initializer_range
        makes_keys = layer in config.kv_source_layer_ids
        self.heads = heads
        self.scale = dim**-0.5 * heads**-0.5
        self.ratio = config.compress_ratios[layer]
        self.topk = config.index_topk
        self.fake_quantization = config.cache_fake_quantization
        self.narrows = layer == config.candidate_source_layer_id
        self.blocks, self.block_size = config.candidate_topk_blocks, config.candidate_block_size
        self.wq_b = DeepseekV41Linear(config.q_lora_rank, heads * dim, std)
        self.weights_proj = DeepseekV41Linear(config.hidden_size, heads, std)
        self.wk = DeepseekV41Linear(config.head_dim, dim, std) if makes_keys else None
        self.k_norm = DeepseekV41RMSNorm(dim, config.rms_norm_eps) if makes_keys else None
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self,
        x: Tensor,
        latent: Tensor,
        state: Compressed,
        valid: Tensor | None,
        table: Table,
        unrotated: Tensor | None,
        key_table: Table | None,
    ) -> Compressed:
        """Return a new choice, and new index keys and candidates if this layer makes them.

        Args:
            x: `[B, S, hidden]`, the normed input of the layer.
            latent: `[B, S, q_lora_rank]`, the normed latent of its queries.
            state: from the layers before; on a KV source its own keys only.
            valid: bool `[B, S]`, False at padding; None if there is none.
            table: rotary table of the positions, `[S, R/2]`.
            unrotated: `[B, W, D]`, the compressor's output on a KV source.
            key_table: rotary table of the compressed keys, `[W, R/2]`, on a KV source.
        """
        if self.wk is not None and self.k_norm is not None:
            assert unrotated is not None
            assert key_table is not None
            made = Compressed(
                index_keys=self._quantize(apply_rotary(self.k_norm(self.wk(unrotated)), *key_table))
            )
        else:
            made = Compressed()
        keys = state.index_keys if made.index_keys is None else made.index_keys
        assert keys is not None
        queries = torch.unflatten(self.wq_b(latent), -1, (self.heads, -1))  # [B, S, H, d]
        queries = self._quantize(apply_rotary(queries, *(t[:, None] for t in table)))
        weights = self.weights_proj(x) * self.scale
        allowed = self._allowed(x, valid)
        scores = score_keys(queries, keys, weights)
        if self.narrows:
            visible = visible_keys(x.shape[1], self.ratio, x.device)
            candidates = select_candidates(scores, allowed, visible, self.blocks, self.block_size)
            made = made._replace(candidates=candidates)
        elif made.index_keys is None and state.candidates is not None:
            allowed = allowed & state.candidates
        return made._replace(chosen=select_keys(scores, allowed, self.topk))

    def _quantize(self, x: Tensor) -> Tensor:
        return fake_mxfp4(x) if self.fake_quantization else x

    def _allowed(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return which keys a query may choose: bool `[B, S, W]`."""
        length = x.shape[1]
        ids = torch.arange(length // self.ratio, device=x.device)
        allowed = (ids < visible_keys(length, self.ratio, x.device)[:, None]).expand(len(x), -1, -1)
        return allowed if valid is None else allowed & whole_groups(valid, self.ratio)[:, None]


def score_keys(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return sum_h weights_h * relu(queries_h . keys): `[B, S, W]`, every step in the inputs' dtype.

    Args:
        queries: `[B, S, H, d]`.
        keys: `[B, W, d]`.
        weights: `[B, S, H]`, of either sign.
    """
    dots = torch.einsum("bshd,bwd->bshw", queries, keys)
    return (dots.relu() * weights.unsqueeze(-1)).sum(dim=2)


def select_candidates(scores: Tensor, allowed: Tensor, visible: Tensor, blocks: int, size: int) -> Tensor:
    """Return the keys in each query's best blocks: bool `[B, S, W]`; the last visible block is always kept.

    A block is `size` consecutive keys and as good as its best allowed one; among equals `topk` decides.

    Args:
        scores: `[B, S, W]`.
        allowed: bool `[B, S, W]`.
        visible: int64 `[S]`, how many keys lie at or before the query.
        blocks: how many are kept at most.
        size: keys in a block.
    """
    width = scores.shape[-1]
    count = -(-width // size)
    scores = torch.nn.functional.pad(
        scores.masked_fill(~allowed, -torch.inf), (0, count * size - width), value=-torch.inf
    )
    best = torch.unflatten(scores, -1, (count, size)).amax(-1)  # [B, S, count]
    last = (visible - 1).clamp(min=0) // size
    is_last = torch.arange(count, device=scores.device) == last[:, None]
    ranked = best.masked_fill(is_last, torch.inf).topk(min(blocks, count), dim=-1).indices
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, ranked, True)
    return kept.repeat_interleave(size, dim=-1)[..., :width] & allowed


def select_keys(scores: Tensor, allowed: Tensor, topk: int) -> Tensor:
    """Return each query's best allowed keys, int64 `[B, S, min(topk, W)]`, ascending, then -1.

    Among equal scores (the ReLU makes many zeros) `topk` decides, as in the release.

    Args:
        scores: `[B, S, W]`.
        allowed: bool `[B, S, W]`.
        topk: how many at most.
    """
    width = scores.shape[-1]
    chosen = scores.masked_fill(~allowed, -torch.inf).topk(min(topk, width), dim=-1).indices
    chosen = chosen.masked_fill(~allowed.gather(-1, chosen), width).sort(dim=-1).values
    return chosen.masked_fill(chosen == width, -1)
