"""The digits: cut into patches, named, held out by number, and learned."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pool import Pool

from annotate_fsdp.models.deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM, TokenType
from annotate_fsdp.train.batches import IGNORED, Batch, run_batch
from annotate_fsdp.train.data import Text, load_corpus
from annotate_fsdp.train.digits import NAMES, Digits, cut_patches, load_digits
from annotate_fsdp.train.job import check_run, train_rank
from annotate_fsdp.train.registry import find_model, find_source
from annotate_fsdp.train.settings import TrainSettings, UsageError


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits(DeepseekV41Config.tiny())


def test_every_picture_is_trained_on_or_held_out(digits: Digits) -> None:
    assert sorted([*digits.train_rows, *digits.held_out_set]) == list(range(1797))
    assert 150 < digits.held_out_rows < 300
    assert {digits.labels[n] for n in digits.held_out_set} == set(range(10))


def test_a_row_is_the_picture_then_its_name(digits: Digits) -> None:
    batch = digits.held_out(range(40))
    for row, picture in enumerate(digits.held_out_set[:40]):
        name = NAMES[digits.labels[picture]] + "\n"
        spelled = [int(token) for token in batch.targets[row] if token != IGNORED]
        assert bytes(spelled).decode() == name
        types = batch.extra["types"][row].tolist()
        assert types[:8] == [0, 1, 1, 2, 1, 1, 2, 3]
        assert set(types[8:]) == {int(TokenType.TEXT)}
        valid = batch.extra["attention_mask"][row]
        assert int(valid.sum()) == min(8 + len(name), batch.inputs.shape[1])
        # each target is the input after it, as far as there is one
        known = batch.targets[row, :-1] != IGNORED
        assert torch.equal(batch.targets[row, :-1][known], batch.inputs[row, 1:][known])


def test_patches_are_the_picture_cut_row_by_row() -> None:
    pixels = torch.arange(64.0).reshape(1, 8, 8) / 4
    patches = cut_patches(pixels, 2)
    assert patches.shape == (16, 3, 2, 2)
    assert torch.equal(patches[1, 0] * 8 + 8, torch.tensor([[0.5, 0.75], [2.5, 2.75]]))
    assert torch.equal(patches[4, 2] * 8 + 8, torch.tensor([[4.0, 4.25], [6.0, 6.25]]))
    assert cut_patches(torch.tensor([[[0.0, 16.0], [8.0, 4.0]]]), 1).flatten().tolist()[::3] == [
        -1,
        1,
        0,
        -0.5,
    ]


def test_batches_are_pure_functions_of_seed_step_and_row(digits: Digits) -> None:
    whole, part = digits.train(1, 2, range(8)), digits.train(1, 2, range(4, 8))
    assert torch.equal(whole.targets[4:], part.targets)
    assert torch.equal(whole.extra["pixel_values"][64:], part.extra["pixel_values"])
    assert not torch.equal(whole.targets, digits.train(1, 3, range(8)).targets)
    assert not torch.equal(whole.targets, digits.train(2, 2, range(8)).targets)


def test_chance_is_the_loss_of_one_who_knows_the_names_only(digits: Digits) -> None:
    # spelled out: at each letter, guess in proportion to the names that are left
    total = 0.0
    for name in NAMES:
        spelled, loss = name + "\n", 0.0
        for index in range(len(spelled)):
            left = [n + "\n" for n in NAMES if (n + "\n").startswith(spelled[:index])]
            loss -= math.log(sum(n.startswith(spelled[: index + 1]) for n in left) / len(left))
        total += loss / len(spelled)
    assert digits.chance == pytest.approx(total / 10)


def test_rows_weigh_the_same_however_long_their_names_are() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(inputs, 5).float() * 3

    targets = torch.tensor([[1, 2, IGNORED, IGNORED], [1, 2, 3, 0]])
    losses, right = run_batch(Fixed(), Batch(torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4]]), targets))
    hit = math.log(math.exp(3) + 4) - 3
    assert losses.tolist() == pytest.approx([hit, hit + 3 / 4])
    assert right.tolist() == [True, False]


def test_text_rows_are_windows_of_the_corpus() -> None:
    text = Text(load_corpus(), 16)
    batch = text.train(0, 0, range(3))
    assert batch.inputs.shape == batch.targets.shape == (3, 16)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.extra == {}
    assert text.chance is None


def test_images_for_a_model_without_eyes_are_a_usage_error_before_any_rank_starts() -> None:
    with pytest.raises(UsageError, match=r"^--images: step5 takes no images$"):
        check_run(TrainSettings(model="step5", images=True))
    assert isinstance(find_source(find_model("deepseek_v41"), "tiny", True, 128), Digits)


@pytest.mark.parametrize("patch", [3, 16])
def test_patches_that_do_not_fit_the_pictures_are_a_usage_error(patch: int) -> None:
    tiny = DeepseekV41Config.tiny()
    config = replace(tiny, vision_config=replace(tiny.vision_config, patch_size=patch))
    with pytest.raises(UsageError, match=f"patches of {patch}"):
        load_digits(config)


def test_one_batch_runs_through_the_model(digits: Digits) -> None:
    torch.manual_seed(0)
    losses, right = run_batch(DeepseekV41ForCausalLM(DeepseekV41Config.tiny()), digits.held_out(range(4)))
    assert losses.shape == right.shape == (4,)
    assert bool((losses > 2).all())
    assert not bool(right.any())


@pytest.mark.slow
def test_it_learns_to_name_digits_that_it_has_not_seen(ranks: Pool, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    settings = TrainSettings(model="deepseek_v41", images=True, batch=32, json=str(file))
    assert ranks.run(train_rank, settings.to_dict(), timeout=300) == [0, 0]
    figures = json.loads(file.read_text())
    assert figures["held_out_loss_before"] > 2
    assert figures["held_out_loss"] < 0.472 / 2  # the loss of one who does not look at the picture
    assert figures["held_out_accuracy"] > 0.7


@pytest.mark.slow
def test_it_learns_text(ranks: Pool, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    settings = TrainSettings(model="deepseek_v41", steps=40, json=str(file), activation_checkpointing=True)
    assert ranks.run(train_rank, settings.to_dict(), timeout=300) == [0, 0]
    figures = json.loads(file.read_text())
    assert figures["units"] == 13
    assert figures["held_out_loss"] < 3.5 < 5 < figures["held_out_loss_before"]
    assert figures["held_out_accuracy"] is None
