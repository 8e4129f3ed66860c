"""Hyper-connections: s residual streams that every sublayer reads and writes through learned mixes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig


class HyperMix(NamedTuple):
    """How a sublayer is tied to the streams of a token, all in fp32.

    - pre `[..., s]`: weights of the streams in what is read next.
    - post `[..., s]`: weights of the sublayer's output in each stream.
    - comb `[..., s, s]`: how much of stream i (second last) goes on into stream j (last).
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


# casts_itself: it reads streams of any dtype and what it returns must stay fp32
@fsdp_unit(policy="fp32", casts_itself=True)
class DeepseekV41HyperConnection(nn.Module):
    """Compute the mixes of one sublayer from the streams, in fp32 from end to end.

    fn `[s(s+2), s * hidden]`, base `[s(s+2)]` and scale `[3]` are fp32; the rows are pre, post, comb.
    """

    def __init__(self, config: DeepseekV41TextConfig) -> None:
        super().__init__()
        self.streams = config.hc_mult
        self.iterations = config.hc_sinkhorn_iters
        self.eps = config.hc_eps
        self.norm_eps = config.rms_norm_eps
        self.std = config.initializer_range
        rows = self.streams * (self.streams + 2)
        self.fn = nn.Parameter(torch.empty(rows, self.streams * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(rows, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise fn; set base to zero and scale to one."""
        nn.init.normal_(self.fn, std=self.std)
        nn.init.zeros_(self.base)
        nn.init.ones_(self.scale)

    def forward(self, streams: Tensor) -> HyperMix:
        """Return the mixes for `streams` `[..., s, hidden]`; post is 2 sigmoid, comb doubly stochastic."""
        flat = streams.flatten(-2).float()
        norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        mix = F.linear(flat, self.fn.float()) * norm
        s = self.streams
        sizes = torch.tensor([s, s, s * s], device=mix.device)
        scale = self.scale.float().repeat_interleave(sizes, output_size=s * (s + 2))
        pre, post, comb = torch.addcmul(self.base.float(), mix, scale).split([s, s, s * s], dim=-1)
        return HyperMix(
            pre.sigmoid() + self.eps,
            2.0 * post.sigmoid(),
            sinkhorn(torch.unflatten(comb, -1, (s, s)), self.iterations, self.eps),
        )


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Return a matrix whose rows and columns sum to one, nearly, from `logits` `[..., s, s]`.

    A softmax over each row, then columns, then `iterations - 1` times rows and columns, are divided by
    their sums; eps is added to the softmax and to every sum.
    """
    z = logits.softmax(-1) + eps
    z = z / (z.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        z = z / (z.sum(-1, keepdim=True) + eps)
        z = z / (z.sum(-2, keepdim=True) + eps)
    return z


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Return sum_i pre_i * streams_i, `[..., hidden]`, of `[..., s, hidden]` and fp32 `[..., s]`."""
    return (streams.float() * pre.unsqueeze(-1)).sum(-2).to(streams.dtype)


def expand(out: Tensor, streams: Tensor, mix: HyperMix) -> Tensor:
    """Return the streams with a sublayer's output: stream j is post_j * out + sum_i comb_ij * streams_i.

    Args:
        out: `[..., hidden]`; its dtype is the result's.
        streams: `[..., s, hidden]`, as the sublayer found them before they were collapsed.
        mix: that sublayer's.
    """
    carried = mix.comb.transpose(-1, -2) @ streams.float()
    return (mix.post.unsqueeze(-1) * out.float().unsqueeze(-2) + carried).to(out.dtype)


def first_stream(tokens: Tensor, streams: int) -> Tensor:
    """Return the mix with which the first layer reads: one for stream 0, fp32 `[B, S, s]`."""
    mix = torch.zeros(*tokens.shape[:2], streams, dtype=torch.float32, device=tokens.device)
    mix[..., 0] = 1.0
    return mix
