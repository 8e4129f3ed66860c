"""Routed experts: a sigmoid router with a selection bias, and stacked expert weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.models.experts import run_experts
from annotate_fsdp.models.step5.config import Step5Config
from annotate_fsdp.models.step5.linear import init_weight
from annotate_fsdp.models.step5.mlp import clamped_swiglu


class Step5Router(nn.Module):
    """Choose `moe_top_k` experts a token in fp32, whatever the dtype of activations and weight.

    weight `[E, hidden]`; the buffer e_score_correction_bias `[E]`, always fp32, is no parameter: it moves
    the choice, is not in the weights, and gets no gradient.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: Step5Config) -> None:
        super().__init__()
        self.top_k = config.moe_top_k
        self.scaling_factor = config.moe_router_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.moe_num_experts, config.hidden_size))
        bias = torch.empty(config.moe_num_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight and set the bias to zero."""
        init_weight(self.weight)
        nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (fp32, with gradient) and expert ids, each `[..., k]`, for `h` `[..., hidden]`.

        The ids of a token descend by sigmoid(logit) + bias, the lower id first where two are equal.
        """
        scores = F.linear(h.float(), self.weight.float()).sigmoid()  # [..., E]
        ranked = (scores + self.e_score_correction_bias.float()).sort(dim=-1, descending=True, stable=True)
        experts = ranked.indices[..., : self.top_k]  # [..., k]
        weights = scores.gather(-1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling_factor
        return weights, experts


class Step5Experts(nn.Module):
    """Run each token through its experts and sum.

    gate_and_up_projs `[E, hidden, 2*inter]`, of whose columns the first `inter` are the gate's, and
    down_projs `[E, inter, hidden]`; both stand on the right: `x @ W`.
    """

    def __init__(self, config: Step5Config, limit: float | None) -> None:
        super().__init__()
        self.limit = limit
        experts, hidden, inter = config.moe_num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_and_up_projs = nn.Parameter(torch.empty(experts, hidden, 2 * inter))
        self.down_projs = nn.Parameter(torch.empty(experts, inter, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise both weights in place."""
        init_weight(self.gate_and_up_projs)
        init_weight(self.down_projs)

    def forward(self, h: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return sum_k weights[n, k] * expert_{experts[n, k]}(h[n]): `[N, hidden]` in the dtype of `h`.

        An expert's output is rounded to that dtype; the sum runs in fp32, slot by slot.

        Args:
            h: `[N, hidden]`.
            weights: `[N, k]` in fp32.
            experts: `[N, k]` expert ids.
        """
        # unbind, so that the gradient is stacked once
        gate_ups, downs = self.gate_and_up_projs.unbind(), self.down_projs.unbind()

        def run(expert: int, x: Tensor, _: Tensor) -> Tensor:
            gate, up = (x @ gate_ups[expert]).chunk(2, dim=-1)
            return clamped_swiglu(gate, up, self.limit) @ downs[expert]

        by_slot = run_experts(h, experts, len(downs), run)
        total = torch.zeros_like(h, dtype=torch.float32)
        for slot in range(experts.shape[1]):
            total = total + weights[:, slot, None] * by_slot[:, slot].float()
        return total.to(h.dtype)


class Step5MoE(nn.Module):
    """Router and routed experts of one layer: `[B, S, hidden] -> [B, S, hidden]`."""

    def __init__(self, config: Step5Config, limit: float | None) -> None:
        super().__init__()
        self.gate = Step5Router(config)
        self.experts = Step5Experts(config, limit)

    def forward(self, h: Tensor) -> Tensor:
        """Return the routed experts' output for `h` `[B, S, hidden]`, in its dtype."""
        tokens = (x.flatten(0, -2) for x in (h, *self.gate(h)))
        return self.experts(*tokens).view_as(h)  # type: ignore[no-any-return]  # __call__
