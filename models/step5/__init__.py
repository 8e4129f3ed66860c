"""Step5, a mixture-of-experts language model with sliding-window and compressed sparse attention."""

from annotate_fsdp.models.step5.choices import Choices, record_choices
from annotate_fsdp.models.step5.config import Step5Config, Step5SparseConfig
from annotate_fsdp.models.step5.decoder import Step5DecoderLayer
from annotate_fsdp.models.step5.model import FP32_MODULES, Step5ForCausalLM, Step5TextModel
from annotate_fsdp.models.step5.norm import Step5RMSNorm
from annotate_fsdp.models.step5.parallelization import PARALLELIZER, Step5ModelParallelizer

__all__ = [
    "FP32_MODULES",
    "PARALLELIZER",
    "Choices",
    "Step5Config",
    "Step5DecoderLayer",
    "Step5ForCausalLM",
    "Step5ModelParallelizer",
    "Step5RMSNorm",
    "Step5SparseConfig",
    "Step5TextModel",
    "record_choices",
]

Step5ForCausalLM.parallelizer = PARALLELIZER
