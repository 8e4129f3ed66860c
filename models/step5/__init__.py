"""Step5, a mixture-of-experts language model with sliding-window and compressed sparse attention."""

from annotate_fsdp.models.step5.choices import Choices, record_choices
from annotate_fsdp.models.step5.config import Step5Config, Step5SparseConfig
from annotate_fsdp.models.step5.decoder import Step5DecoderLayer
from annotate_fsdp.models.step5.model import FP32_MODULES, Step5ForCausalLM, Step5TextModel
from annotate_fsdp.models.step5.norm import Step5RMSNorm

__all__ = [
    "FP32_MODULES",
    "Choices",
    "Step5Config",
    "Step5DecoderLayer",
    "Step5ForCausalLM",
    "Step5RMSNorm",
    "Step5SparseConfig",
    "Step5TextModel",
    "record_choices",
]
