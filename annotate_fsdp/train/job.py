"""What one rank does in a training run, from the audit to the verdict."""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp import audit, observe, shard_annotated
from annotate_fsdp.train.batches import Source
from annotate_fsdp.train.checkpoint import (
    check_fresh,
    check_resume,
    checkpoint_path,
    load_checkpoint,
    save_checkpoint,
)
from annotate_fsdp.train.files import write_atomically
from annotate_fsdp.train.loop import Trainer, make_optimizer, mean_over_ranks
from annotate_fsdp.train.parity import ParityReport, check_comparable, compare
from annotate_fsdp.train.progress import show_progress
from annotate_fsdp.train.registry import ModelEntry, check_config, find_model, find_source
from annotate_fsdp.train.settings import TrainSettings, UsageError, check_settings

JOB = "annotate_fsdp.train.job:train_rank"


def check_run(settings: TrainSettings) -> int:
    """Reject what can be known to fail before a rank starts; return the step that the run starts from.

    Raises:
        UsageError: with one line that names the option and what to write.
    """
    check_settings(settings)
    entry = find_model(settings.model)
    check_config(entry, settings.config, train=True)
    if settings.images:
        find_source(entry, settings.config, settings.images, settings.sequence_length)
    if settings.check_parity:
        check_comparable(settings)
    if settings.checkpoint_dir is None:
        return 0
    root = Path(settings.checkpoint_dir)
    if settings.resume:
        return check_resume(root, settings.identity(), settings.last_step)
    check_fresh(root)
    return 0


def train_rank(argument: dict[str, Any]) -> int:
    """Run one rank of a training run inside a process group; return the exit code, the same on every rank.

    0: done, and the observed step agrees with the plan; 1: it does not, or parity does not hold.
    """
    started = time.monotonic()
    settings = TrainSettings(**argument)
    entry = find_model(settings.model)
    source = find_source(entry, settings.config, settings.images, settings.sequence_length)
    mesh = init_device_mesh("cpu", (settings.ranks,), mesh_dim_names=("fsdp",))
    figures: dict[str, Any] = {"settings": settings.to_dict()}
    holds = True
    if settings.check_parity:
        parity = check_parity(settings, entry, source, mesh)
        _say(str(parity))
        holds = parity.holds
        figures["parity"] = parity.to_dict()
    if holds:
        trained, holds = train(settings, entry, source, mesh)
        figures.update(trained)
    figures["seconds"] = time.monotonic() - started
    if settings.json is not None and dist.get_rank() == 0:
        write_atomically(settings.json, json.dumps(figures, indent=1))
    return 0 if holds else 1


def train(
    settings: TrainSettings, entry: ModelEntry, source: Source, mesh: DeviceMesh
) -> tuple[dict[str, Any], bool]:
    """Train, and return the run's figures and whether the observed step agrees with the plan."""
    model = build_model(settings, entry)
    options: dict[str, Any] = {"mp_policy": mixed_precision(settings), "lowering": settings.lowering}
    report = audit(model, mesh, **options)
    _say(str(report))
    shard_annotated(model, mesh, **options)
    trainer = _trainer(settings, entry, source, model)
    start = _restore(trainer)
    before, _ = trainer.held_out()
    chance = "" if source.chance is None else f" (without a look at the image: {source.chance:.4f} at best)"
    _say(f"held-out loss before: {before:.4f}{chance}")
    losses: list[float] = []
    observation: Any = None
    with show_progress(start, settings.last_step, visible=trainer.rank == 0) as show:
        for step in range(start, settings.last_step):
            with observe(model) if step == start else nullcontext() as observed:
                loss = trainer.backward(step)
            observation = observation or observed
            losses.append(_finite(mean_over_ranks(loss), step))
            trainer.update(step)
            _save_if_due(trainer, step + 1)
            show(step + 1, losses[-1])
    after, accuracy = trainer.held_out()
    agrees = mean_over_ranks(torch.tensor(float(observation.agrees))) == 1.0
    _say(f"held-out loss: {before:.4f} before, {after:.4f} after step {settings.last_step}")
    if settings.images:
        _say(f"held-out images named right: {accuracy:.1%} of {source.held_out_rows}")
    _say(_verdict(observation, agrees, len(report.plan.units)))
    figures = {
        "losses": losses,
        "start_step": start,
        "held_out_loss_before": before,
        "held_out_loss": after,
        "held_out_accuracy": accuracy if settings.images else None,
        "units": len(report.plan.units),
        "observation": observation.to_dict(),
        "collectives_per_step": dict(observation.collectives.counts()),
    }
    return figures, agrees


def check_parity(
    settings: TrainSettings, entry: ModelEntry, source: Source, mesh: DeviceMesh
) -> ParityReport:
    """Compare the sharded model with the unsharded one of the same weights, on the same global batches."""
    sharded = build_model(settings, entry)
    shard_annotated(sharded, mesh, mp_policy=mixed_precision(settings), lowering=settings.lowering)
    whole = build_model(settings, entry)
    unsharded = Trainer(settings, entry, source, whole, make_optimizer(whole, settings.lr), rank=0, ranks=1)
    return compare(_trainer(settings, entry, source, sharded), unsharded)


def build_model(settings: TrainSettings, entry: ModelEntry) -> nn.Module:
    """Build the model with the seed's weights, the same on every rank."""
    torch.manual_seed(settings.seed)
    model = entry.build(settings.config, settings.storage)
    if settings.activation_checkpointing:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=checkpoint_wrapper,  # non-reentrant by default
            check_fn=lambda module: isinstance(module, entry.layer_classes),
        )
    return model


def mixed_precision(settings: TrainSettings) -> MixedPrecisionPolicy:
    """Return the policy of a run: gradients are reduced in fp32 under either compute dtype."""
    compute = torch.bfloat16 if settings.mp == "bf16" else torch.float32
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def _trainer(settings: TrainSettings, entry: ModelEntry, source: Source, model: nn.Module) -> Trainer:
    optimizer = make_optimizer(model, settings.lr)
    return Trainer(settings, entry, source, model, optimizer, dist.get_rank(), dist.get_world_size())


def _restore(trainer: Trainer) -> int:
    """Read the latest complete checkpoint if asked to; return the number of steps that are done."""
    settings = trainer.settings
    if not settings.resume:
        return 0
    root = Path(str(settings.checkpoint_dir))
    step = check_resume(root, settings.identity(), settings.last_step)
    load_checkpoint(checkpoint_path(root, step), trainer.model, trainer.optimizer)
    _say(f"resumed from {checkpoint_path(root, step)}")
    return step


def _save_if_due(trainer: Trainer, done: int) -> None:
    settings = trainer.settings
    if settings.checkpoint_dir is None:
        return
    due = settings.checkpoint_every is not None and done % settings.checkpoint_every == 0
    if due or done == settings.last_step:
        root = Path(settings.checkpoint_dir)
        save_checkpoint(root, done, trainer.model, trainer.optimizer, settings.identity())


def _finite(loss: float, step: int) -> float:
    """Return the loss, or end the run: every rank holds the same one."""
    if not math.isfinite(loss):
        raise UsageError(f"the loss of step {step} is {loss}: write a smaller --lr")
    return loss


def _verdict(observation: Any, agrees: bool, units: int) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in observation.collectives.counts().items())
    if agrees:
        return f"observed step: agrees with the plan ({units} units; {counts})"
    shown = "; ".join(observation.disagreements) or "another rank saw a disagreement"
    return f"observed step: DISAGREES with the plan: {shown}"


def _say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)
