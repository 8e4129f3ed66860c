"""How NeMo AutoModel shards Step5: by its marks, the final norm in an fp32 unit of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp.interop.nemo import AnnotatedModelParallelizer
from annotate_fsdp.models.step5.model import Step5TextModel

# What the mark of Step5RMSNorm comes to: the norm casts for itself, so FSDP casts nothing.
_FP32_NORM_POLICY = MixedPrecisionPolicy(
    param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
)


class Step5ModelParallelizer(AnnotatedModelParallelizer):
    """Shard Step5 by its marks; module by module, only the final norm gets a unit of its own.

    The framework groups a decoder block's parameters by dtype, so that the block's fp32 islands are units
    before it arrives here. The final norm would fall to the root, which computes in the caller's dtype.
    """

    def islands(self, module: nn.Module) -> Iterable[nn.Module]:
        """Yield the final norm of each text model at or below `module`."""
        for each in module.modules():
            if isinstance(each, Step5TextModel):
                yield each.norm


PARALLELIZER = Step5ModelParallelizer()
