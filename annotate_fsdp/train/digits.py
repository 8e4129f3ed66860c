"""Images to train on: scikit-learn's handwritten digits, each followed by its name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from annotate_fsdp.models.deepseek_v41 import DeepseekV41Config, TokenType, image_span
from annotate_fsdp.train.batches import IGNORED, Batch, stable_hash
from annotate_fsdp.train.settings import UsageError

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
END = "\n"
EDGE = 8  # pixels on a digit's edge
BRIGHTEST = 16
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Digits:
    """Pictures with their names: the image's tokens, then the name and a line end, then padding.

    - pixels: fp32 `[pictures, EDGE, EDGE]` in 0 .. BRIGHTEST.
    - labels: which digit each one shows.
    - train_rows, held_out_set: numbers of the pictures to train on, and of those that are kept from it.
    """

    config: DeepseekV41Config
    pixels: Tensor
    labels: Sequence[int]
    train_rows: Sequence[int]
    held_out_set: Sequence[int]

    @property
    def held_out_rows(self) -> int:
        """How many pictures are held out."""
        return len(self.held_out_set)

    @property
    def chance(self) -> float:
        """Mean loss of a row for one who knows the ten names but sees no picture: ln 10 / length of the name.

        Whichever letters are guessed from, all of them together tell ten equally likely names apart.
        """
        return sum(math.log(len(NAMES)) / len(name + END) for name in NAMES) / len(NAMES)

    def train(self, seed: int, step: int, rows: Iterable[int]) -> Batch:
        """Return the given rows of a step's global batch, drawn with repetition."""
        drawn = (stable_hash(f"{seed}/{step}/{row}") % len(self.train_rows) for row in rows)
        return self._batch([self.train_rows[index] for index in drawn])

    def held_out(self, rows: Iterable[int]) -> Batch:
        """Return some of the held-out pictures, by number."""
        return self._batch([self.held_out_set[row] for row in rows])

    def _batch(self, pictures: Sequence[int]) -> Batch:
        vision = self.config.vision_config
        patches = EDGE // vision.patch_size
        span = image_span(patches, patches, vision.downsample_ratio)
        most = max(len(name + END) for name in NAMES)
        inputs, targets, types, mask = [], [], [], []
        for picture in pictures:
            name = list((NAMES[self.labels[picture]] + END).encode())
            padding = most - len(name)
            tokens = [self.config.image_token_id] * len(span) + name
            pad = self.config.text_config.engram_pad_token_id
            inputs.append((tokens + [pad] * padding)[:-1])
            targets.append([IGNORED] * (len(span) - 1) + name + [IGNORED] * padding)
            types.append([int(kind) for kind in span] + [int(TokenType.TEXT)] * (most - 1))
            mask.append(([True] * len(tokens) + [False] * padding)[:-1])
        grid = torch.tensor([[patches, patches]] * len(pictures))
        extra = {
            "pixel_values": cut_patches(self.pixels[list(pictures)], vision.patch_size),
            "grid": grid,
            "types": torch.tensor(types),
            "attention_mask": torch.tensor(mask),
        }
        return Batch(torch.tensor(inputs), torch.tensor(targets), extra)


def cut_patches(pixels: Tensor, size: int) -> Tensor:
    """Return grey pictures `[N, E, E]` as patches `[P, 3, size, size]` in -1 .. 1, row by row."""
    scaled = pixels / BRIGHTEST * 2 - 1
    rows = torch.unflatten(torch.unflatten(scaled, 2, (-1, size)), 1, (-1, size))  # [N, h, size, w, size]
    return rows.transpose(2, 3).flatten(0, 2).unsqueeze(1).expand(-1, 3, -1, -1).contiguous()


def load_digits(config: DeepseekV41Config) -> Digits:
    """Read the digits that come with scikit-learn; every eighth one, by a hash of its number, is held out.

    Raises:
        UsageError: scikit-learn is not installed, or the pictures cannot be cut into the model's patches.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise UsageError("--images needs scikit-learn: pip install 'annotate-fsdp[images]'") from error
    size = config.vision_config.patch_size
    if not config.vision_config.num_hidden_layers or EDGE % size:
        raise UsageError(f"--images: pictures of {EDGE} pixels cannot be cut into patches of {size}")
    found = datasets.load_digits()
    held_out = [stable_hash(f"digit {n}") % HELD_OUT_ONE_IN == 0 for n in range(len(found.target))]
    return Digits(
        config=config,
        pixels=torch.from_numpy(found.images.astype(np.float32)),
        labels=[int(label) for label in found.target],
        train_rows=[n for n, out in enumerate(held_out) if not out],
        held_out_set=[n for n, out in enumerate(held_out) if out],
    )
