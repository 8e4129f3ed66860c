"""DeepSeek-V4.1, a mixture-of-experts language model with hyper-connections, shared compressed keys, n-gram
memories and a vision tower.

Left out, since they change no number of this model:

- the DSpark draft layers: a model of its own, whose parameters are none of these;
- packed sequences and context parallelism, which say how a batch is laid out over rows and ranks;
- the custom kernels (their arithmetic is here, `cache_fake_quantization` included) and a decoding cache;
- expert parallelism and the engram's owner-sharded exchange: every rank runs all experts, and looks up whole
  tables, which FSDP gathers;
- the making of the token map and image preprocessing, which belong to the tokenizer and the processor;
- updates of the routers' selection biases and an auxiliary loss, which the release has switched off.
"""

from annotate_fsdp.models.deepseek_v41.block import DeepseekV41Block
from annotate_fsdp.models.deepseek_v41.choices import Choices, record_choices
from annotate_fsdp.models.deepseek_v41.config import (
    DeepseekV41Config,
    DeepseekV41TextConfig,
    DeepseekV41VisionConfig,
    DeepseekV41YarnConfig,
)
from annotate_fsdp.models.deepseek_v41.images import TokenType, image_span
from annotate_fsdp.models.deepseek_v41.model import (
    FP32_MODULES,
    DeepseekV41ForCausalLM,
    DeepseekV41Model,
)
from annotate_fsdp.models.deepseek_v41.parallelization import (
    PARALLELIZER,
    DeepseekV41ModelParallelizer,
    fully_shard_deepseek_v41,
)
from annotate_fsdp.models.deepseek_v41.vision import DeepseekV41VisionBlock, DeepseekV41VisionTransformer

__all__ = [
    "FP32_MODULES",
    "PARALLELIZER",
    "Choices",
    "DeepseekV41Block",
    "DeepseekV41Config",
    "DeepseekV41ForCausalLM",
    "DeepseekV41Model",
    "DeepseekV41ModelParallelizer",
    "DeepseekV41TextConfig",
    "DeepseekV41VisionBlock",
    "DeepseekV41VisionConfig",
    "DeepseekV41VisionTransformer",
    "DeepseekV41YarnConfig",
    "TokenType",
    "fully_shard_deepseek_v41",
    "image_span",
    "record_choices",
]

DeepseekV41ForCausalLM.parallelizer = PARALLELIZER
