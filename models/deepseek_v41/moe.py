"""Routed experts with separate selection biases for text and image tokens, and one shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.models.deepseek_v41.config import DeepseekV41TextConfig
from annotate_fsdp.models.deepseek_v41.linear import DeepseekV41Linear
from annotate_fsdp.models.experts import run_experts


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit) in fp32.

    Args:
        gate: `[..., inter]`.
        up: `[..., inter]`.
        limit: 0 clamps nothing.
    """
    gate, up = gate.float(), up.float()
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


class DeepseekV41Router(nn.Module):
    """Choose `num_experts_per_tok` experts a token, in fp32 whatever the weight `[E, hidden]` is stored in.

    The fp32 buffers e_score_correction_bias and bias_vl `[E]` move the choice of text and of image tokens;
    they are not in the weights and get no gradient.
    """

    e_score_correction_bias: Tensor
    bias_vl: Tensor

    def __init__(self, config: DeepseekV41TextConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.normalises = config.norm_topk_prob and self.top_k > 1
        self.scaling_factor = config.routed_scaling_factor
        self.std = config.initializer_range
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        for name in ("e_score_correction_bias", "bias_vl"):
            self.register_buffer(name, torch.empty(config.n_routed_experts, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight and set the biases to zero."""
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.e_score_correction_bias)
        nn.init.zeros_(self.bias_vl)

    def forward(self, h: Tensor, is_image: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights (fp32, with gradient) and expert ids, each `[..., k]`, for `h` `[..., hidden]`.

        A score is sqrt(softplus(logit)). The ids of a token descend by score + bias, the lower id first
        where two are equal.

        Args:
            h: `[..., hidden]`.
            is_image: bool `[...]`, True where an image token stands; None if there is none.
        """
        scores = F.softplus(F.linear(h.float(), self.weight.float())).sqrt()  # [..., E]
        bias = self.e_score_correction_bias.float()
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(-1), self.bias_vl.float(), bias)
        experts = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        weights = scores.gather(-1, experts)
        if self.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scaling_factor, experts


class DeepseekV41Experts(nn.Module):
    """Run each token through its experts and sum.

    gate_and_up_projs `[E, hidden, 2*inter]`, of whose columns the first `inter` are the gate's, and
    down_projs `[E, inter, hidden]`; both stand on the right: `x @ W`.
    """

    def __init__(self, config: DeepseekV41TextConfig) -> None:
        super().__init__()
        self.limit, self.std = config.swiglu_limit, config.initializer_range
        experts, hidden, inter = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_and_up_projs = nn.Parameter(torch.empty(experts, hidden, 2 * inter))
        self.down_projs = nn.Parameter(torch.empty(experts, inter, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise both weights in place."""
        nn.init.normal_(self.gate_and_up_projs, std=self.std)
        nn.init.normal_(self.down_projs, std=self.std)

    def forward(self, h: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return the sum over a token's experts: `[N, hidden]`, accumulated in fp32, in the dtype of `h`.

        A routing weight multiplies the activations in fp32, before they are rounded and projected down.

        Args:
            h: `[N, hidden]`.
            weights: `[N, k]` in fp32.
            experts: `[N, k]` expert ids.
        """
        # unbind, so that the gradient is stacked once
        gate_ups, downs = self.gate_and_up_projs.unbind(), self.down_projs.unbind()
        shares = weights.flatten().unsqueeze(-1)

        def run(expert: int, x: Tensor, pairs: Tensor) -> Tensor:
            gate, up = (x @ gate_ups[expert]).chunk(2, dim=-1)
            act = clamped_swiglu(gate, up, self.limit) * shares[pairs]
            return act.to(x.dtype) @ downs[expert]

        by_slot = run_experts(h, experts, len(downs), run)
        return by_slot.float().sum(dim=1).to(h.dtype)


class DeepseekV41MLP(nn.Module):
    """down(clamped_swiglu(gate(h), up(h))): `[..., hidden] -> [..., hidden]`, the shared expert."""

    def __init__(self, config: DeepseekV41TextConfig) -> None:
        super().__init__()
        hidden, inter, std = config.hidden_size, config.moe_intermediate_size, config.initializer_range
        self.limit = config.swiglu_limit
        self.up_proj = DeepseekV41Linear(hidden, inter, std)
        self.gate_proj = DeepseekV41Linear(hidden, inter, std)
        self.down_proj = DeepseekV41Linear(inter, hidden, std)

    def forward(self, h: Tensor) -> Tensor:
        """Return the MLP's output for `h` `[..., hidden]`, in its dtype."""
        act = clamped_swiglu(self.gate_proj(h), self.up_proj(h), self.limit).to(h.dtype)
        return self.down_proj(act)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


class DeepseekV41MoE(nn.Module):
    """Routed and shared experts of one layer: `[B, S, hidden] -> [B, S, hidden]`."""

    def __init__(self, config: DeepseekV41TextConfig) -> None:
        super().__init__()
        self.gate = DeepseekV41Router(config)
        self.experts = DeepseekV41Experts(config)
        self.shared_experts = DeepseekV41MLP(config)

    def forward(self, h: Tensor, is_image: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Return the experts' output for `h` `[B, S, hidden]`, in its dtype.

        Args:
            h: `[B, S, hidden]`.
            is_image: bool `[B, S]`, True at image tokens; None if there is none.
            valid: bool `[B, S]`, False at padding, which no routed expert works on; None if there is none.
        """
        weights, experts = self.gate(h, is_image)
        tokens = (h.flatten(0, -2), weights.flatten(0, -2), experts.flatten(0, -2))
        if valid is None:
            routed = self.experts(*tokens)
        else:
            places = valid.flatten().nonzero().squeeze(-1)
            routed = torch.zeros_like(tokens[0]).index_copy(
                0, places, self.experts(*(t[places] for t in tokens))
            )
        return routed.view_as(h) + self.shared_experts(h)  # type: ignore[no-any-return]  # __call__
