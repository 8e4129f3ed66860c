"""Latent attention: all heads share one key, which is also the value, local and compressed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from annotate_fsdp.models.deepseek_v41.compressor import Compressed, DeepseekV41Compressor
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig
from annotate_fsdp.models.deepseek_v41.indexer import DeepseekV41Indexer
from annotate_fsdp.models.deepseek_v41.linear import DeepseekV41FP32Parameter, DeepseekV41Linear
from annotate_fsdp.models.deepseek_v41.norm import DeepseekV41RMSNorm
from annotate_fsdp.models.deepseek_v41.quantize import fake_fp8, fake_nvfp4
from annotate_fsdp.models.deepseek_v41.rotary import DeepseekV41RotaryEmbedding, apply_rotary


class DeepseekV41GroupedLinear(DeepseekV41Linear):
    """Project each of G groups by a matrix of its own: `[..., G, in] -> [..., G, out]`.

    weight `[G * out, in]`: the rows of one group after those of the other.
    """

    def __init__(self, groups: int, in_features: int, out_features: int) -> None:
        super().__init__(in_features, groups * out_features)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection of `x` `[..., G, in]`."""
        return torch.einsum("...gi,goi->...go", x, torch.unflatten(self.weight, 0, (self.groups, -1)))


class DeepseekV41Attention(nn.Module):
    """Attention of one layer over its window and over the compressed keys that are chosen for each query.

    `compressor` exists on KV sources, `indexer` on index sources; other layers read what these made last.
    """

    def __init__(self, config: DeepseekV41TextConfig, layer: int) -> None:
        super().__init__()
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        groups, eps = config.o_groups, config.rms_norm_eps
        self.heads, self.groups = heads, groups
        self.scale = dim**-0.5
        self.window = config.sliding_window
        self.ratio = config.compress_ratios[layer]
        self.fake_quantization = config.cache_fake_quantization
        self.wq_a = DeepseekV41Linear(hidden, config.q_lora_rank)
        self.q_norm = DeepseekV41RMSNorm(config.q_lora_rank, eps)
        self.wq_b = DeepseekV41Linear(config.q_lora_rank, heads * dim)
        self.wkv = DeepseekV41Linear(hidden, dim)
        self.kv_norm = DeepseekV41RMSNorm(dim, eps)
        self.wo_a = DeepseekV41GroupedLinear(groups, heads * dim // groups, config.o_lora_rank)
        self.wo_b = DeepseekV41Linear(groups * config.o_lora_rank, hidden)
        self.sinks_param = DeepseekV41FP32Parameter(heads)
        self.rotary_emb = DeepseekV41RotaryEmbedding(config, layer)
        is_source, is_index = (
            layer in ids for ids in (config.kv_source_layer_ids, config.index_source_layer_ids)
        )
        self.compressor = DeepseekV41Compressor(config, layer) if is_source else None
        self.indexer = DeepseekV41Indexer(config, layer) if is_index else None

    @property
    def attn_sink(self) -> nn.Parameter:
        """The sinks' logits `[heads]`; a shard of them in a sharded model."""
        return self.sinks_param.weight

    def forward(self, x: Tensor, state: Compressed, valid: Tensor | None = None) -> tuple[Tensor, Compressed]:
        """Return the output `[B, S, hidden]`, in the dtype of `x`, and what this layer has made to be shared.

        Args:
            x: `[B, S, hidden]`, normed; positions are 0, 1, ...
            state: what source layers before this one made.
            valid: bool `[B, S]`, False at padding, where the output is zero; None if there is none.
        """
        positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = self.rotary_emb(positions)
        latent = self.q_norm(self.wq_a(x))
        q = torch.unflatten(self.wq_b(latent), -1, (self.heads, -1))  # [B, S, heads, D]
        q = apply_rotary(q, cos[:, None], sin[:, None])
        keys = apply_rotary(self.kv_norm(self.wkv(x)), cos, sin)
        keys = fake_fp8(keys) if self.fake_quantization else keys
        made = self._make(x, latent, state, valid, (cos, sin))
        state = state.after(made)
        allowed = local_keys(positions, self.window).expand(len(x), -1, -1)
        if valid is not None:
            allowed = allowed & valid[:, None]
        if self.ratio:
            assert state.kv is not None
            assert state.chosen is not None
            keys = torch.cat((keys, state.kv), dim=1)
            allowed = torch.cat((allowed, chosen_mask(state.chosen, state.kv.shape[1])), dim=-1)
        out = attend(q, keys, allowed, self.sinks_param(), self.scale)
        out = apply_rotary(out, cos[:, None], sin[:, None], inverse=True)
        groups = torch.unflatten(out.flatten(2), -1, (self.groups, -1))
        out = self.wo_b(self.wo_a(groups).flatten(2))
        return out if valid is None else out * valid.unsqueeze(-1), made

    def _make(
        self,
        x: Tensor,
        latent: Tensor,
        state: Compressed,
        valid: Tensor | None,
        table: tuple[Tensor, Tensor],
    ) -> Compressed:
        """Return this layer's own keys and choice; a layer that only reads makes none."""
        made = Compressed()
        unrotated = key_table = None
        if self.compressor is not None:
            unrotated = self.compressor(x)
            key_table = self.rotary_emb(torch.arange(unrotated.shape[1], device=x.device) * self.ratio)
            keys = apply_rotary(unrotated, *key_table)
            made = Compressed(kv=fake_nvfp4(keys) if self.fake_quantization else keys)
        if self.indexer is not None:
            chosen = self.indexer(x, latent, state.after(made), valid, table, unrotated, key_table)
            return chosen._replace(kv=made.kv)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped
        return made


def local_keys(positions: Tensor, window: int) -> Tensor:
    """Return bool `[S, S]`: key j is at or before query i, and i - j < window."""
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window)


def chosen_mask(chosen: Tensor, width: int) -> Tensor:
    """Return bool `[B, S, width]`, True at the keys that int64 `chosen` `[B, S, K]` lists; -1 lists none."""
    mask = chosen.new_zeros(*chosen.shape[:2], width + 1, dtype=torch.bool)
    return mask.scatter_(-1, chosen.masked_fill(chosen < 0, width), True)[..., :width]


def attend(q: Tensor, keys: Tensor, allowed: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Return softmax(q k^T scale) k over the allowed keys, with exp(sink) added to each denominator.

    Scores, softmax and sum are fp32. A query without an allowed key, at padding, returns zero.

    Args:
        q: `[B, S, heads, D]`; its dtype is the result's.
        keys: `[B, T, D]`, also the values.
        allowed: bool `[B, S, T]`.
        sinks: `[heads]`, logits of a key whose value is zero.
        scale: of the scores.
    """
    wide = keys.float()
    logits = torch.einsum("bshd,btd->bhst", q.float(), wide) * scale
    logits = logits.masked_fill(~allowed[:, None], -torch.inf)
    sink = sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)
    weights = torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("bhst,btd->bshd", weights, wide).to(q.dtype)
