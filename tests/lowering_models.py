"""A small model rich in islands, with everything that can make one lowering differ from another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from annotate_fsdp import fsdp_forward, fsdp_unit

WIDTH = 16


@dataclass(frozen=True)
class Case:
    """One training run, as data: the same under every lowering.

    - form: how the islands say fp32: `"casts itself"`, `"default"` or `"output"` (`output_dtype=float32`).
    - checkpointing: `"none"`, `"block"`, `"sub-block"` or `"reentrant"` (blocks).
    - schedule: `"plain"`, `"accumulate"` (3 microbatches), `"two forwards"` before one backward, or
      `"evaluate"` before each step, or, between backward and the optimizer's step, `"evaluate late"`,
      `"method late"`, `"raise late"`, `"part late"` (all without gradients) or `"gradients late"`.
    - member: what the member that runs last does: `"used"`, `"no_grad"`, `"detached"`, `"unused"`, or
      `"skipped"` (a block with its members does not run on any rank in two of the steps), or `"idle"` (the
      block itself does run then, its members do not).
    - frozen: whether some of the islands are frozen.
    - mesh: `"2"`, `"4"` or `"2x2"`.
    """

    model: str = "islands"
    form: str = "casts itself"
    storage: str = "fp32"
    checkpointing: str = "none"
    compiled: bool = False
    schedule: str = "plain"
    member: str = "used"
    frozen: bool = False
    mesh: str = "2"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return 2 if self.mesh == "2" else 4

    def __str__(self) -> str:
        plain = Case()
        changed = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        return " ".join(
            [self.model, *(name if value is True else str(value) for name, value in changed.items())]
        )


class CastingNorm(nn.Module):
    """RMS norm that computes in fp32 and returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def island(form: str) -> nn.Module:
    """A norm that says fp32 in one of the three forms."""
    if form == "casts itself":
        return fsdp_unit(CastingNorm(), policy="fp32", casts_itself=True)
    if form == "default":
        return fsdp_unit(nn.LayerNorm(WIDTH), policy="fp32")
    return fsdp_unit(nn.LayerNorm(WIDTH), policy="fp32", output_dtype=torch.float32)


class Sub(nn.Module):
    """Part of a block: an island, a projection, an island."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first = island(form)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = island(form)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.linear(self.first(x).to(x.dtype)))
        return self.second(hidden).to(x.dtype)


@fsdp_unit
class Block(nn.Module):
    """Two parts with six islands."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.before = island(form)
        self.attention = Sub(form)
        self.between = island(form)
        self.mlp = Sub(form)
        self.is_on = True
        self.is_idle = False
        self.is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_idle:
            return x * 1
        if self.is_reentrant:
            return checkpoint(self.run, x, use_reentrant=True)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        """The block itself."""
        x = x + self.attention(self.before(x).to(x.dtype))
        return x + self.mlp(self.between(x).to(x.dtype))


class Islands(nn.Module):
    """Embedding, two blocks, a norm, a head; the loss is its output, in fp32."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Block(case.form) for _ in range(2)])
        self.norm = island(case.form)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.tail = island(case.form)
        self.member = case.member

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(tokens)

    @fsdp_forward
    def score(self, tokens: Tensor) -> Tensor:
        """What forward does, as a further entry point."""
        return self.run(tokens)

    def run(self, tokens: Tensor) -> Tensor:
        """The model itself."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) if layer.is_on else x
        x = self.norm(x).to(x.dtype)
        loss = self.head(x).float().logsumexp(-1).mean()
        if self.member == "used":
            return loss + self.tail(x).float().square().mean()
        if self.member == "no_grad":
            with torch.no_grad():
                self.seen = self.tail(x)
        elif self.member == "detached":
            self.seen = self.tail(x.detach()).detach()
        elif self.member == "unused":
            self.seen = self.tail(x)
        return loss


def islands(case: Case) -> Islands:
    """The model of a case, its weights drawn anew from the same seed."""
    torch.manual_seed(0)
    model = Islands(case)
    norms = [module for module in model.modules() if isinstance(module, CastingNorm | nn.LayerNorm)]
    if case.storage == "bf16":
        model.to(torch.bfloat16)
        for norm in norms:
            norm.float()
    if case.frozen:
        for norm in norms[::3]:
            norm.requires_grad_(False)
    if case.checkpointing == "reentrant":
        for layer in model.layers:
            layer.is_reentrant = True
    elif case.checkpointing == "block":
        for index, layer in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(layer)
    elif case.checkpointing == "sub-block":
        for layer in model.layers:
            layer.attention = checkpoint_wrapper(layer.attention)
            layer.mlp = checkpoint_wrapper(layer.mlp)
    return model
