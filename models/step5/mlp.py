"""Clamped SwiGLU and the MLP of dense layers and shared experts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.models.step5.linear import Step5Linear


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Return min(silu(gate), limit) * clamp(up, -limit, limit), in fp32, rounded once.

    The clamp follows the silu and, there, bounds from above only.

    Args:
        gate: `[..., inter]`; its dtype is the result's.
        up: `[..., inter]`.
        limit: None or 0 clamps nothing.
    """
    activated, linear = F.silu(gate.float()), up.float()
    if limit:
        activated, linear = activated.clamp(max=limit), linear.clamp(-limit, limit)
    return (activated * linear).to(gate.dtype)


class Step5MLP(nn.Module):
    """down(clamped_swiglu(gate(h), up(h))): `[..., hidden] -> [..., hidden]`, `inter` channels inside."""

    def __init__(self, hidden_size: int, intermediate_size: int, limit: float | None) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj = Step5Linear(hidden_size, intermediate_size)
        self.up_proj = Step5Linear(hidden_size, intermediate_size)
        self.down_proj = Step5Linear(intermediate_size, hidden_size)

    def forward(self, h: Tensor) -> Tensor:
        """Return the MLP's output for `h` `[..., hidden]`, in its dtype."""
        act = clamped_swiglu(self.gate_proj(h), self.up_proj(h), self.limit)
        return self.down_proj(act)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped
