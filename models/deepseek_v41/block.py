"""One block: engram, attention and experts around s residual streams."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.deepseek_v41.attention import DeepseekV41Attention
from annotate_fsdp.models.deepseek_v41.compressor import Compressed
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig
from annotate_fsdp.models.deepseek_v41.engram import DeepseekV41Engram
from annotate_fsdp.models.deepseek_v41.hyper import DeepseekV41HyperConnection, collapse, expand
from annotate_fsdp.models.deepseek_v41.moe import DeepseekV41MoE
from annotate_fsdp.models.deepseek_v41.norm import DeepseekV41RMSNorm


# casts_itself: a cast of the inputs to the compute dtype would round the carried mix
@fsdp_unit(casts_itself=True)
class DeepseekV41Block(nn.Module):
    """Read the streams through a mix, write attention and experts back to them, and pass on the next mix.

    `engram` exists on the engram layers, else it is None.
    """

    def __init__(self, config: DeepseekV41TextConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attn = DeepseekV41Attention(config, layer)
        self.ffn = DeepseekV41MoE(config)
        self.attn_norm = DeepseekV41RMSNorm(hidden, eps)
        self.ffn_norm = DeepseekV41RMSNorm(hidden, eps)
        self.attn_hc = DeepseekV41HyperConnection(config)
        self.ffn_hc = DeepseekV41HyperConnection(config)
        self.engram = DeepseekV41Engram(config, layer) if layer in config.engram_layer_ids else None

    @property
    def self_attn(self) -> DeepseekV41Attention:
        """`attn`, under the name that frameworks look for."""
        return self.attn

    @property
    def mlp(self) -> DeepseekV41MoE:
        """`ffn`, likewise."""
        return self.ffn

    def forward(
        self,
        streams: Tensor,
        mix: Tensor,
        state: Compressed,
        rows: Tensor | None = None,
        is_image: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Compressed]:
        """Return streams and mix for the next block, and what this one has made to be shared.

        What it has read it does not return: FSDP would make views of it.

        Args:
            streams: `[B, S, s, hidden]`.
            mix: fp32 `[B, S, s]`, with which attention reads the streams.
            state: what source layers before this one made.
            rows: int64 `[B, S, heads]` of the engram's table, on an engram layer.
            is_image: bool `[B, S]`, True at image tokens; None if there is none.
            valid: bool `[B, S]`, False at padding; None if there is none.

        Raises:
            TypeError: the mix is not fp32: something on its way has rounded it.
        """
        if mix.dtype != torch.float32:
            raise TypeError(
                f"the carried mix came as {mix.dtype}, not torch.float32; a unit around a block must not "
                "cast its inputs or outputs (mark it with casts_itself=True)"
            )
        if self.engram is not None:
            assert rows is not None
            streams = self.engram(streams, rows, either(is_image, valid))
        attn_mix = self.attn_hc(streams)
        out, made = self.attn(self.attn_norm(collapse(streams, mix)), state, valid)
        streams = expand(out, streams, attn_mix)
        ffn_mix = self.ffn_hc(streams)
        out = self.ffn(self.ffn_norm(collapse(streams, attn_mix.pre)), is_image, valid)
        return expand(out, streams, ffn_mix), ffn_mix.pre, made


def either(is_image: Tensor | None, valid: Tensor | None) -> Tensor | None:
    """Return where a token is an image's or padding, bool `[B, S]`; None if nowhere."""
    if valid is None:
        return is_image
    return ~valid if is_image is None else is_image | ~valid
