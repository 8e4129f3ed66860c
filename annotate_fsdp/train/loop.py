"""The steps: loss, gradients, update, and the loss on held-out text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from annotate_fsdp.train.batches import Source, rank_rows, run_batch
from annotate_fsdp.train.registry import ModelEntry
from annotate_fsdp.train.settings import TrainSettings

WARM_UP_STEPS = 10
CLIP_NORM = 1.0


def learning_rate(peak: float, step: int) -> float:
    """Return the rate of step `step`: a linear warm-up, then peak * sqrt(warm-up / step).

    It does not depend on the length of the run, so a run that goes on from a checkpoint may be lengthened.
    """
    return peak * min((step + 1) / WARM_UP_STEPS, math.sqrt(WARM_UP_STEPS / (step + 1)))


def make_optimizer(model: nn.Module, peak: float) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # foreach: one dispatch for all parameters, where one for each DTensor would cost more than the model
    return torch.optim.AdamW(trainable, lr=peak, betas=(0.9, 0.95), weight_decay=0.01, foreach=True)


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of one number over the ranks, each of which saw equally many tokens."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def full_tensor(value: Tensor) -> Tensor:
    """Return a sharded tensor whole, and any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def plain_name(name: str) -> str:
    """Return a parameter's name without what activation checkpointing put into it."""
    return name.replace("_checkpoint_wrapped_module.", "")


@dataclass(frozen=True)
class Trainer:
    """A model and what one step of it needs.

    - rank, ranks: which share of each global batch is this one's; `(0, 1)` is all of it.
    """

    settings: TrainSettings
    entry: ModelEntry
    source: Source
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    ranks: int

    def backward(self, step: int) -> Tensor:
        """Leave the gradients of step `step`'s global batch; return the mean loss of this rank's rows."""
        rows = rank_rows(self.settings.batch, self.rank, self.ranks)
        losses, _ = run_batch(self.model, self.source.train(self.settings.seed, step, rows))
        loss = losses.mean()
        torch.autograd.backward(loss)
        return loss.detach()

    def update(self, step: int) -> None:
        """Clip the gradients of step `step` by their norm over all ranks, apply them, and drop them."""
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings.lr, step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held_out(self) -> tuple[float, float]:
        """Return, of the held-out rows, the mean loss and the share whose targets are all ranked first.

        The same on any number of ranks. A rank that runs out of rows computes one more with weight zero,
        as all ranks must run equally many forwards.
        """
        number = self.source.held_out_rows
        mine = range(self.rank, number, self.ranks)
        most = -(-number // self.ranks)
        share = self.settings.batch // self.ranks
        total = torch.zeros(2, dtype=torch.float64)
        self.model.eval()
        with torch.no_grad():
            for first in range(0, most, share):
                rows = mine[first : first + share]
                losses, right = run_batch(self.model, self.source.held_out(rows or [0]))
                if rows:
                    total += torch.stack((losses.double().sum(), right.double().sum()))
        self.model.train()
        free_gathered(self.model)
        dist.all_reduce(total)
        loss, share = (total / number).tolist()
        return loss, share


def free_gathered(model: nn.Module) -> None:
    """Free what a forward without backward left gathered, so that the next step starts as usual."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
