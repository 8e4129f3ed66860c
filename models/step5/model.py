"""The Step5 text model and its language-modelling head."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.step5.config import Step5Config
from annotate_fsdp.models.step5.decoder import Step5DecoderLayer
from annotate_fsdp.models.step5.indexer import Step5IndexerWeightProjection
from annotate_fsdp.models.step5.linear import Step5Embedding, Step5Linear
from annotate_fsdp.models.step5.norm import Step5IndexerLayerNorm, Step5IndexerRMSNorm, Step5RMSNorm

FP32_MODULES = (Step5RMSNorm, Step5IndexerRMSNorm, Step5IndexerLayerNorm, Step5IndexerWeightProjection)


class Step5TextModel(nn.Module):
    """Embedding, decoder layers and final norm: token ids `[B, S] -> [B, S, hidden]`."""

    def __init__(self, config: Step5Config) -> None:
        super().__init__()
        self.embed_tokens = fsdp_unit(Step5Embedding(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(
            Step5DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = Step5RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the normed hidden states `[B, S, hidden]` of `input_ids` `[B, S]`, in the compute dtype.

        That dtype is the one the embedding computes in. Between the layers the residual is fp32; it is
        rounded before the final norm.
        """
        x = self.embed_tokens(input_ids)
        residual = x.float()
        for layer in self.layers:
            residual = layer(residual)
        return self.norm(residual.to(x.dtype))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


class Step5ForCausalLM(nn.Module):
    """Step5 with its output projection: token ids `[B, S] ->` logits `[B, S, vocab]`.

    Parameters are made in torch's default dtype, fp32 unless changed (the fp32 islands always), on the
    default device: `with torch.device("meta"):` allocates nothing; on a real one they are initialised.
    `to_storage` changes the dtype they are stored in.
    """

    parallelizer: ClassVar[object]  # set by the package; what NeMo AutoModel's dispatcher looks for

    def __init__(self, config: Step5Config) -> None:
        super().__init__()
        self.config = config
        self.model = Step5TextModel(config)
        self.lm_head = fsdp_unit(Step5Linear(config.hidden_size, config.vocab_size))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return next-token logits for `input_ids` `[B, S]`; none depends on a later token."""
        return self.lm_head(self.model(input_ids))  # type: ignore[no-any-return]  # as above

    def to_storage(self, dtype: torch.dtype) -> Self:
        """Store parameters in `dtype`, in place, but for the fp32 islands; return the model.

        `torch.bfloat16` gives the dtypes of the released checkpoint. Fp32 stay every norm, the indexer's
        norms and head-weight projection, and the router's bias.

        Raises:
            ValueError: `dtype` is not a floating-point dtype.
        """
        if not dtype.is_floating_point:
            raise ValueError(f"to_storage({dtype}): parameters need a floating-point dtype")
        for module in self.modules():
            for parameter in module.parameters(recurse=False):
                is_island = isinstance(module, FP32_MODULES)
                parameter.data = parameter.data.to(torch.float32 if is_island else dtype)
        return self
