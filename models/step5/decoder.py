"""One decoder layer: attention and feed-forward around an fp32 residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.step5.attention import Step5Attention
from annotate_fsdp.models.step5.config import Step5Config
from annotate_fsdp.models.step5.mlp import Step5MLP
from annotate_fsdp.models.step5.moe import Step5MoE
from annotate_fsdp.models.step5.norm import Step5RMSNorm


# casts_itself: a cast of the layer's input to the compute dtype would round the residual stream
@fsdp_unit(casts_itself=True)
class Step5DecoderLayer(nn.Module):
    """Add attention, then feed-forward, to the residual; each reads it normed in the compute dtype.

    A layer has either `mlp` (dense) or `moe` and `share_expert`; those that it has not are None.
    """

    def __init__(self, config: Step5Config, layer: int) -> None:
        super().__init__()
        hidden, limit = config.hidden_size, config.swiglu_limits_shared[layer]
        is_moe = layer in config.moe_layer_list
        self.self_attn = Step5Attention(config, layer)
        self.mlp = None if is_moe else Step5MLP(hidden, config.intermediate_size, limit)
        self.moe = Step5MoE(config, config.swiglu_limits[layer]) if is_moe else None
        self.share_expert = Step5MLP(hidden, config.share_expert_dim, limit) if is_moe else None
        self.input_layernorm = Step5RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = Step5RMSNorm(hidden, config.rms_norm_eps)

    def forward(self, residual: Tensor) -> Tensor:
        """Return the residual `[B, S, hidden]`, fp32 as it came, with this layer's two outputs added."""
        # the weight's dtype here, inside forward, is the one the layer computes in
        dtype = self.self_attn.qkv_proj.weight.dtype
        residual = residual + self.self_attn(self.input_layernorm(residual, dtype)).float()
        h = self.post_attention_layernorm(residual, dtype)
        return residual + self._feed_forward(h)

    def _feed_forward(self, h: Tensor) -> Tensor:
        """Return the dense MLP's, or routed plus shared experts', output in fp32."""
        if self.mlp is not None:
            return self.mlp(h).float()  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped
        assert self.moe is not None
        assert self.share_expert is not None
        return self.moe(h).float() + self.share_expert(h).float()  # type: ignore[no-any-return]  # as above
