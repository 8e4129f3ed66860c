"""From patches to image tokens: squares of patches side by side, projected to the language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotate_fsdp.marks import fsdp_unit
from annotate_fsdp.models.deepseek_v41.config import DeepseekV41Config
from annotate_fsdp.models.deepseek_v41.linear import DeepseekV41Linear
from annotate_fsdp.models.deepseek_v41.vision import Grid


@fsdp_unit(casts_itself=True)
class DeepseekV41VisionAligner(nn.Module):
    """w2(gelu(w1(squares of patches))): features `[P, C]` of some images `->` tokens `[T, hidden]`."""

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        vision, hidden = config.vision_config, config.text_config.hidden_size
        std = vision.initializer_range
        self.ratio = vision.downsample_ratio
        self.w1 = DeepseekV41Linear(vision.hidden_size * self.ratio**2, hidden, std, bias=True)
        self.w2 = DeepseekV41Linear(hidden, hidden, std, bias=True)

    def forward(self, features: Tensor, grid: Grid) -> Tensor:
        """Return the image tokens, image after image, row by row.

        Args:
            features: `[P, C]`, the patches of each image row by row, one image after the other.
            grid: rows and columns of patches of each image.
        """
        images = features.split([rows * columns for rows, columns in grid])
        squares = [fold_squares(image, size, self.ratio) for image, size in zip(images, grid, strict=True)]
        return self.w2(F.gelu(self.w1(torch.cat(squares))))  # type: ignore[no-any-return]  # __call__


def fold_squares(image: Tensor, size: tuple[int, int], ratio: int) -> Tensor:
    """Return the squares of ratio x ratio patches, row by row: `[h * w, C] -> [T, C * ratio^2]`.

    The image is filled with zeros on the right and at the bottom. Within a square the channel comes first,
    then the row, then the column.
    """
    rows, columns = size
    image = torch.unflatten(image, 0, (rows, columns))
    image = F.pad(image, (0, 0, 0, -columns % ratio, 0, -rows % ratio))
    blocks = torch.unflatten(torch.unflatten(image, 1, (-1, ratio)), 0, (-1, ratio))  # [h', r, w', r, C]
    return blocks.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
