"""The DeepSeek-V4.1 model and its language-modelling head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.deepseek_v41.aligner import DeepseekV41VisionAligner
from annotate_fsdp.models.deepseek_v41.block import DeepseekV41Block, either
from annotate_fsdp.models.deepseek_v41.compressor import Compressed
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41Config
from annotate_fsdp.models.deepseek_v41.engram_hash import DeepseekV41EngramHash
from annotate_fsdp.models.deepseek_v41.hyper import DeepseekV41HyperConnection, collapse, first_stream
from annotate_fsdp.models.deepseek_v41.images import check_types, place_images, read_grid
from annotate_fsdp.models.deepseek_v41.linear import (
    DeepseekV41Embedding,
    DeepseekV41FP32Linear,
    DeepseekV41FP32Parameter,
    DeepseekV41Head,
    init_weight,
)
from annotate_fsdp.models.deepseek_v41.norm import DeepseekV41RMSNorm, DeepseekV41VisionRMSNorm
from annotate_fsdp.models.deepseek_v41.vision import DeepseekV41VisionTransformer, Grid

FP32_MODULES = (
    DeepseekV41HyperConnection,
    DeepseekV41FP32Linear,
    DeepseekV41FP32Parameter,
    DeepseekV41Head,
    DeepseekV41VisionRMSNorm,
)
STORAGE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class DeepseekV41Model(nn.Module):
    """Embedding, blocks and final norm, with the vision tower: token ids `[B, S] -> [B, S, hidden]`.

    Without a vision tower there is no vision, aligner or image_* parameter; without an active engram layer
    no engram_hash.
    """

    def __init__(self, config: DeepseekV41Config, token_map: Tensor | Sequence[int] | None = None) -> None:
        super().__init__()
        self.config = config
        text = config.text_config
        has_vision = config.vision_config.num_hidden_layers > 0
        self.image_start, self.image_end, self.image_newline = (
            nn.Parameter(torch.empty(text.hidden_size)) if has_vision else None for _ in range(3)
        )
        self.embed_tokens = fsdp_unit(DeepseekV41Embedding(text.vocab_size, text.hidden_size))
        self.engram_hash = DeepseekV41EngramHash(text, token_map) if text.engram_layers else None
        self.layers = nn.ModuleDict(
            {str(layer): DeepseekV41Block(text, layer) for layer in range(text.num_hidden_layers)}
        )
        self.norm = DeepseekV41RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.vision = DeepseekV41VisionTransformer(config.vision_config) if has_vision else None
        self.aligner = DeepseekV41VisionAligner(config) if has_vision else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the image markers."""
        for marker in (self.image_start, self.image_end, self.image_newline):
            if marker is not None:
                init_weight(marker)

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        grid: Tensor | Grid | None = None,
        types: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the normed hidden states `[B, S, hidden]` in the dtype of the embedding.

        Args:
            input_ids: int64 `[B, S]`.
            pixel_values: `[P, 3, p, p]`, the patches of all images, each image row by row.
            grid: int64 `[images, 2]`, rows and columns of patches of each image, in the order of the batch.
            types: int64 `[B, S]` of `TokenType`, where the images stand.
            attention_mask: bool `[B, S]` or 0 and 1, False at padding, which stands on the right.

        Raises:
            ValueError: the images do not fit the tokens, or padding stands on the left.
        """
        sizes = read_grid(self.config, pixel_values, grid)
        is_image = check_types(self.config, input_ids, types, sizes)
        valid = read_mask(input_ids, attention_mask)
        embedded = self.embed_tokens(input_ids)
        if is_image is not None:
            embedded = self._with_images(embedded, pixel_values, sizes, types)
        count = self.config.text_config.hc_mult
        streams = embedded.unsqueeze(2).expand(-1, -1, count, -1)
        mix = first_stream(input_ids, count)
        state = Compressed()
        rows = self._rows(input_ids, either(is_image, valid))
        for name, block in self.layers.items():
            streams, mix, made = block(streams, mix, state, rows.get(name), is_image, valid)
            state = state.after(made)
        return self.norm(collapse(streams, mix))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped

    def _with_images(
        self, embedded: Tensor, pixel_values: Tensor | None, sizes: Grid, types: Tensor | None
    ) -> Tensor:
        assert self.vision is not None
        assert self.aligner is not None
        assert types is not None
        assert self.image_start is not None
        assert self.image_newline is not None
        assert self.image_end is not None
        features = self.aligner(self.vision(pixel_values, sizes), sizes)
        return place_images(embedded, types, features, self.image_start, self.image_newline, self.image_end)

    def _rows(self, input_ids: Tensor, blocked: Tensor | None) -> dict[str, Tensor]:
        """Return the table rows of each engram layer, by its name in `layers`."""
        if self.engram_hash is None:
            return {}
        rows = self.engram_hash(input_ids, blocked)
        return {str(layer): of for layer, of in zip(self.config.text_config.engram_layers, rows, strict=True)}


class DeepseekV41ForCausalLM(nn.Module):
    """DeepSeek-V4.1 with its output projection: token ids `[B, S] ->` fp32 logits `[B, S, vocab]`.

    Parameters are stored in `config.text_config.dtype`, the fp32 islands always in fp32, on the default
    device: `with torch.device("meta"):` allocates nothing; on a real one they are initialised.

    Args:
        config: sizes and options.
        token_map: for the engram, see `DeepseekV41EngramHash`.

    Raises:
        ValueError: the engram needs a token map, or cannot use this one.
    """

    parallelizer: ClassVar[object]  # set by the package; what NeMo AutoModel's dispatcher looks for

    def __init__(self, config: DeepseekV41Config, token_map: Tensor | Sequence[int] | None = None) -> None:
        super().__init__()
        self.config = config
        self.model = DeepseekV41Model(config, token_map)
        self.lm_head = DeepseekV41Head(config.text_config.hidden_size, config.text_config.vocab_size)
        self.to_storage(STORAGE[config.text_config.dtype])

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        grid: Tensor | Grid | None = None,
        types: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return next-token logits in fp32; none depends on a later token. See `DeepseekV41Model.forward`."""
        hidden = self.model(input_ids, pixel_values, grid, types, attention_mask)
        return self.lm_head(hidden)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped

    def to_storage(self, dtype: torch.dtype) -> Self:
        """Store parameters in `dtype`, in place, but for the fp32 islands; return the model.

        Fp32 stay the hyper-connections, the sinks, the compressors' projections, the head, the vision
        tower's norms and the routers' biases.

        Raises:
            ValueError: `dtype` is not a floating-point dtype.
        """
        if not dtype.is_floating_point:
            raise ValueError(f"to_storage({dtype}): parameters need a floating-point dtype")
        for module in self.modules():
            is_island = isinstance(module, FP32_MODULES)
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.float32 if is_island else dtype)
        return self


def read_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Return the mask as bool `[B, S]`; None if nothing is padding.

    Raises:
        ValueError: it has another shape, or padding stands before a token.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: {list(attention_mask.shape)} for ids {list(input_ids.shape)}")
    valid = attention_mask.bool()
    if bool(valid.all()):
        return None
    if bool((valid[:, 1:] & ~valid[:, :-1]).any()):
        raise ValueError("attention_mask: padding must stand on the right of each row")
    return valid
