"""Which checkpoint counts: complete ones only, and only those of the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from annotate_fsdp.train.checkpoint import (
    RUN_FILE,
    check_fresh,
    check_resume,
    checkpoint_path,
    find_checkpoints,
    read_run,
)
from annotate_fsdp.train.files import write_atomically
from annotate_fsdp.train.settings import TrainSettings, UsageError

IDENTITY = TrainSettings(model="step5").identity()


def write_checkpoint(root: Path, step: int, **changes: Any) -> Path:
    """Write something that looks like a checkpoint, as far as its completeness goes."""
    path = checkpoint_path(root, step)
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"index")
    (path / "__0_0.distcp").write_bytes(b"tensors")
    run = {"format": 1, "step": step, "identity": IDENTITY, "files": {".metadata": 5, "__0_0.distcp": 7}}
    (path / RUN_FILE).write_text(json.dumps({**run, **changes}))
    return path


def test_latest_is_the_one_of_most_steps(tmp_path: Path) -> None:
    paths = [write_checkpoint(tmp_path, step) for step in (5, 20, 100)]
    assert find_checkpoints(tmp_path) == paths
    assert check_resume(tmp_path, IDENTITY, 200) == 100


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / RUN_FILE).unlink(),
        lambda path: (path / RUN_FILE).write_text('{"format": 1, "st'),
        lambda path: (path / RUN_FILE).write_text("[]"),
        lambda path: (path / ".metadata").unlink(),
        lambda path: (path / "__0_0.distcp").write_bytes(b"tens"),
        lambda path: path.rename(path.with_name(f".{path.name}.partial")),
        lambda path: path.rename(path.with_name("step-00000021")),
    ],
    ids=["no run file", "half a run file", "another run file", "no index", "cut off", "not renamed", "moved"],
)
def test_cut_off_checkpoint_is_never_taken_for_a_good_one(tmp_path: Path, damage: Any) -> None:
    good = write_checkpoint(tmp_path, 10)
    damage(write_checkpoint(tmp_path, 20))
    assert find_checkpoints(tmp_path) == [good]
    assert check_resume(tmp_path, IDENTITY, 200) == 10


def test_resume_without_a_checkpoint_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(UsageError) as error:
        check_resume(tmp_path, IDENTITY, 10)
    assert str(error.value) == f"--resume: there is no complete checkpoint in {tmp_path}"


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("seed", 1, "--seed 0, not 1"),
        ("batch", 16, "--batch 8, not 16"),
        ("sequence_length", 64, "--sequence-length 128, not 64"),
        ("config", "other", "--config tiny, not other"),
        ("model", "other", "MODEL step5, not other"),
        ("mp", "fp32", "--mp bf16, not fp32"),
    ],
)
def test_resume_of_another_run_names_the_option(tmp_path: Path, name: str, value: Any, option: str) -> None:
    path = write_checkpoint(tmp_path, 10)
    with pytest.raises(UsageError) as error:
        check_resume(tmp_path, {**IDENTITY, name: value}, 20)
    assert str(error.value) == f"--resume: {path} was written with {option}"


def test_resume_of_a_finished_run_is_a_usage_error(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 10)
    with pytest.raises(UsageError) as error:
        check_resume(tmp_path, IDENTITY, 10)
    assert str(error.value) == (
        f"--resume: {path} is already at step 10; write a larger --steps or --stop-after"
    )


def test_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    check_fresh(tmp_path)
    check_fresh(tmp_path / "not there yet")
    path = write_checkpoint(tmp_path, 10)
    with pytest.raises(UsageError) as error:
        check_fresh(tmp_path)
    assert str(error.value) == f"--checkpoint-dir: {path} exists; write --resume or another directory"


def test_ranks_lowering_and_steps_may_change_between_runs() -> None:
    other = TrainSettings(
        model="step5", ranks=4, lowering="unit", steps=7, activation_checkpointing=True, json="figures"
    )
    assert other.identity() == IDENTITY


def test_run_file_of_another_format_is_not_read(tmp_path: Path) -> None:
    assert read_run(write_checkpoint(tmp_path, 1, format=2)) is None


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new\udc80")
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert file.read_text() == "old"
