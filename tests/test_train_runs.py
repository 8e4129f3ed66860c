"""Whole training runs: they learn, resume to the bit, and equal the unsharded and the hand-written one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from annotate_fsdp import plan_of, shard_annotated
from annotate_fsdp.models.step5.decoder import Step5DecoderLayer
from annotate_fsdp.train.data import Text, load_corpus
from annotate_fsdp.train.job import build_model, mixed_precision, train_rank
from annotate_fsdp.train.loop import Trainer, full_tensor, make_optimizer
from annotate_fsdp.train.parity import compare
from annotate_fsdp.train.registry import find_model
from annotate_fsdp.train.settings import TrainSettings

SHORT = TrainSettings(model="step5", steps=4, batch=8, sequence_length=64)
FP32_PARTS = {
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.indexer.w_proj",
    "self_attn.indexer.q_norm",
    "self_attn.indexer.k_norm",
    "input_layernorm",
    "post_attention_layernorm",
}


def run(ranks: Pool, settings: TrainSettings, file: Path, code: int = 0) -> dict[str, Any]:
    """Train on a pool of as many ranks as the settings ask for; return the figures."""
    argument = replace(settings, json=str(file)).to_dict()
    assert ranks.run(train_rank, argument, world=settings.ranks, timeout=120) == [code] * settings.ranks
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def shard_by_hand(model: nn.Module, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy) -> nn.Module:
    """Shard Step5 as a framework would have to write it, without a look at the marks."""
    fp32 = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    block = replace(mp_policy, cast_forward_inputs=False)
    for layer in model.modules():
        if isinstance(layer, Step5DecoderLayer):
            for name, part in layer.named_modules():
                if name in FP32_PARTS:
                    fully_shard(part, mesh=mesh, mp_policy=fp32)
            fully_shard(layer, mesh=mesh, mp_policy=block)
    fully_shard(model.get_submodule("model.embed_tokens"), mesh=mesh, mp_policy=mp_policy)
    fully_shard(model.get_submodule("model.norm"), mesh=mesh, mp_policy=fp32)
    fully_shard(model.get_submodule("lm_head"), mesh=mesh, mp_policy=mp_policy)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    return model


def trainer_by(settings: TrainSettings, by_hand: bool) -> Trainer:
    """Return this rank's trainer of a model that is sharded by hand or by its marks."""
    entry = find_model(settings.model)
    mesh = init_device_mesh("cpu", (settings.ranks,), mesh_dim_names=("fsdp",))
    model = build_model(settings, entry)
    if by_hand:
        shard_by_hand(model, mesh, mixed_precision(settings))
    else:
        shard_annotated(model, mesh, mp_policy=mixed_precision(settings), lowering="unit")
    optimizer = make_optimizer(model, settings.lr)
    source = Text(load_corpus(), settings.sequence_length)
    return Trainer(settings, entry, source, model, optimizer, dist.get_rank(), settings.ranks)


def trained_by_hand_and_by_marks(argument: dict[str, Any]) -> bool:
    """Train both; return whether plans, losses and weights are the same to the last bit."""
    settings = TrainSettings(**argument)
    hand, marks = trainer_by(settings, by_hand=True), trainer_by(settings, by_hand=False)
    assert plan_of(hand.model) == plan_of(marks.model)
    for step in range(settings.steps):
        assert torch.equal(hand.backward(step), marks.backward(step))
        hand.update(step)
        marks.update(step)
    theirs = dict(marks.model.named_parameters())
    return all(
        torch.equal(full_tensor(value), full_tensor(theirs[name]))
        for name, value in hand.model.named_parameters()
    )


def parity_with_a_fault(argument: dict[str, Any], fault: str) -> tuple[bool, str, bool]:
    """Compare with an unsharded run that differs by one planted fault; return what the report says."""
    settings = TrainSettings(**argument)
    sharded = trainer_by(settings, by_hand=False)
    whole = build_model(settings, sharded.entry)
    optimizer = make_optimizer(whole, settings.lr)
    unsharded = Trainer(settings, sharded.entry, sharded.source, whole, optimizer, rank=0, ranks=1)
    if fault == "gradient":
        whole.get_parameter("lm_head.weight").register_hook(double_gradient)
    else:
        whole.get_buffer("model.layers.1.moe.gate.e_score_correction_bias")[0] = 1.0
    report = compare(sharded, unsharded)
    return report.holds, report.where, report.same_choices


def double_gradient(gradient: Tensor) -> Tensor:
    """Return the gradient of a loss that counts twice."""
    return gradient * 2


@pytest.mark.slow
def test_default_run_brings_the_held_out_loss_below_three(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "annotate_fsdp.cli", "train", "step5", "--json", "figures.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert 5.4 < figures["held_out_loss_before"] < 5.7
    assert figures["held_out_loss"] < 2.8
    assert len(figures["losses"]) == figures["settings"]["steps"]
    assert figures["units"] == 8
    assert figures["observation"]
    assert set(figures["collectives_per_step"]) >= {"all_gather", "reduce_scatter"}
    assert figures["seconds"] > 0
    assert done.stdout.splitlines()[-1].startswith("observed step: agrees with the plan (8 units; ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"mp": "bf16"}, {"mp": "bf16", "storage": "bf16", "activation_checkpointing": True}],
    ids=["bf16", "bf16 storage, recomputed"],
)
def test_resumed_run_has_the_losses_of_an_unbroken_one_to_the_bit(
    ranks: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    settings = replace(SHORT, **options)
    unbroken = run(ranks, settings, tmp_path / "unbroken.json")
    saved = replace(settings, checkpoint_dir=str(tmp_path / "checkpoints"))
    stopped = run(ranks, replace(saved, stop_after=2), tmp_path / "stopped.json")
    resumed = run(ranks, replace(saved, resume=True), tmp_path / "resumed.json")
    assert stopped["losses"] == unbroken["losses"][:2]
    assert resumed["losses"] == unbroken["losses"][2:]
    assert resumed["start_step"] == 2
    assert resumed["held_out_loss"] == unbroken["held_out_loss"]


@pytest.mark.slow
def test_parity_and_checkpoints_between_numbers_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    settings = replace(SHORT, mp="fp32", check_parity=True)
    unbroken = run(ranks, settings, tmp_path / "unbroken.json")
    saved = replace(settings, checkpoint_dir=str(tmp_path / "2"), check_parity=False)
    run(ranks, replace(saved, stop_after=2), tmp_path / "stopped.json")
    assert unbroken["parity"]["holds"]
    assert 0 < unbroken["parity"]["largest"] <= 1e-5
    for number in (1, 4):
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "2", directory)
        again = replace(saved, ranks=number, checkpoint_dir=str(directory), resume=True)
        resumed = run(ranks, replace(again, check_parity=number == 4), tmp_path / "resumed.json")
        assert resumed["losses"] == pytest.approx(unbroken["losses"][2:], rel=0, abs=1e-5)
        assert resumed["held_out_loss"] == pytest.approx(unbroken["held_out_loss"], rel=0, abs=1e-5)
        assert number == 1 or resumed["parity"]["holds"]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_bf16_run_equals_the_layout_written_by_hand_to_the_bit(ranks: Pool, storage: str) -> None:
    settings = replace(SHORT, steps=3, storage=storage)
    assert ranks.run(trained_by_hand_and_by_marks, settings.to_dict()) == [True, True]


@pytest.mark.slow
def test_parity_sees_a_wrong_gradient_and_another_choice(ranks: Pool) -> None:
    settings = replace(SHORT, mp="fp32").to_dict()
    for holds, where, _ in ranks.run(parity_with_a_fault, settings, "gradient"):
        assert (holds, where) == (False, "lm_head.weight")
    for holds, _, same_choices in ranks.run(parity_with_a_fault, settings, "choice"):
        assert (holds, same_choices) == (False, False)
