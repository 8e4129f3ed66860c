"""The command line in process: exit codes, and one clear line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from annotate_fsdp import fsdp_unit
from annotate_fsdp.cli import main, parse_world_size
from annotate_fsdp.train.settings import UsageError

HERE = "test_cli"
NOT_A_CALLABLE = 3


@fsdp_unit
class Block(nn.Module):
    """A marked module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        result: torch.Tensor = self.linear(x)
        return result


def good_model() -> nn.Module:
    """Return a model with nothing to say against it; it must be built on meta."""
    model = nn.Sequential(Block(), Block())
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def wrong_model() -> nn.Module:
    """Return a model with an unknown policy name."""
    return fsdp_unit(nn.Sequential(Block(), Block()), policy="fp99")


def unmarked_model() -> nn.Module:
    """Return a model without a mark."""
    return nn.Linear(4, 4)


def raising() -> nn.Module:
    """Fail with a message of two lines."""
    raise ArithmeticError("first line\nsecond line")


def leaving() -> nn.Module:
    """Try to end the process."""
    raise SystemExit(0)


def number() -> int:
    """Return something that is no module."""
    return 3


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line that a wrong command line gets on stderr, without its beginning."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("annotate-fsdp: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("annotate-fsdp: error: ").rstrip("\n")


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["audit", "--help"]])
def test_help_is_no_mistake(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert "usage: annotate-fsdp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "the following arguments are required: COMMAND (see annotate-fsdp --help)"),
        ("train step5 --step 3", "unrecognized arguments: --step 3 (see annotate-fsdp --help)"),
        (
            "train step5 --steps x",
            "argument --steps: invalid int value: 'x' (see annotate-fsdp train --help)",
        ),
        ("train step6", "there is no model 'step6'; write one of deepseek_v41, step5"),
        ("train step5 --config released", "--config released: step5 offers tiny here"),
        ("train step5 --ranks 0", "--ranks 0: write a number of at least 1"),
        ("train step5 --steps -1", "--steps -1: write a number of at least 1"),
        ("train step5 --seed -1", "--seed -1: write a number from 0 to 2**63 - 1"),
        ("train step5 --lr nan", "--lr nan: write a positive number"),
        (
            "train step5 --ranks 3 --batch 8",
            "--batch 8 cannot be split evenly over 3 ranks: write a multiple of 3",
        ),
        ("train step5 --resume", "--resume needs --checkpoint-dir"),
        ("train step5 --stop-after 3", "--stop-after needs --checkpoint-dir"),
        ("train step5 --checkpoint-every 3", "--checkpoint-every needs --checkpoint-dir"),
        ("train step5 --steps 3 --stop-after 4", "--stop-after 4 lies beyond --steps 3"),
        ("train step5 --json nowhere/x.json", "--json nowhere/x.json: the directory nowhere does not exist"),
        (
            "train step5 --check-parity",
            "--check-parity needs --mp fp32 and --storage fp32: bf16 rounds gradients before they are summed "
            "over the ranks, so a sharded run differs from an unsharded one by more than any fault would",
        ),
        ("audit step6", "there is no target 'step6'; write deepseek_v41, step5 or package.module:callable"),
        ("audit step5 --config small", "--config small: step5 offers tiny, released here"),
        ("audit step5 --link x", "--link x: there is no such link; write h100x8 or loopback"),
        ("audit step5 --json .", "--json .: that is a directory; write the name of a file"),
        (
            "audit step5 --world-size x2",
            "--world-size x2: write a number of ranks, or REPLICASxSHARDS such as 8x128",
        ),
        (
            f"audit {HERE}:good_model --config tiny",
            f"--config goes with a reference model; {HERE}:good_model is called without arguments",
        ),
        ("audit no/file:f", "target 'no/file:f': write package.module:callable"),
        ("audit test_cli:", "target 'test_cli:': write package.module:callable"),
        (
            "audit not_there_at_all:f",
            "target not_there_at_all:f: cannot import not_there_at_all: "
            "ModuleNotFoundError: No module named 'not_there_at_all'",
        ),
        (f"audit {HERE}:missing", f"target {HERE}:missing: {HERE} has no missing"),
        (f"audit {HERE}:NOT_A_CALLABLE", f"target {HERE}:NOT_A_CALLABLE: NOT_A_CALLABLE is not callable"),
        (f"audit {HERE}:raising", f"target {HERE}:raising: calling it raised ArithmeticError: first line"),
        (f"audit {HERE}:leaving", f"target {HERE}:leaving: calling it raised SystemExit: 0"),
        (f"audit {HERE}:number", f"target {HERE}:number: it returned a int, not a torch.nn.Module"),
    ],
)
def test_mistake_of_the_user_is_one_clear_line(
    argv: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert usage_error(capsys, *argv.split()) == message


def test_value_that_is_no_choice_names_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    message = usage_error(capsys, "train", "step5", "--mp", "fp16")
    assert message.startswith("argument --mp: invalid choice: 'fp16' (choose from ")
    assert "bf16" in message
    assert message.endswith("(see annotate-fsdp train --help)")


def test_checkpoint_directory_that_cannot_be_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    train = ("train", "step5", "--checkpoint-dir")
    assert usage_error(capsys, *train, str(file)) == f"--checkpoint-dir {file}: that is not a directory"
    missing = tmp_path / "a" / "b"
    assert usage_error(capsys, *train, str(missing)) == (
        f"--checkpoint-dir {missing}: the directory {missing.parent} does not exist"
    )
    assert usage_error(capsys, *train, str(missing), "--resume") == (
        f"--resume: the directory {missing} does not exist"
    )
    assert usage_error(capsys, *train, str(tmp_path), "--resume") == (
        f"--resume: there is no complete checkpoint in {tmp_path}"
    )


def test_ranks_that_torchrun_did_not_start_are_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    message = usage_error(capsys, "train", "step5", "--ranks", "2")
    assert message == "--ranks 2: torchrun started 4 ranks; leave it out"


def test_audit_of_a_clean_target_exits_with_0_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert main(["audit", f"{HERE}:good_model", "--world-size", "2x4", "--json", str(file)]) == 0
    assert "Block" in capsys.readouterr().out
    assert isinstance(json.loads(file.read_text()), dict)


@pytest.mark.parametrize("target", ["wrong_model", "unmarked_model"])
def test_audit_of_a_target_with_errors_exits_with_1(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{HERE}:{target}"]) == 1
    out, err = capsys.readouterr()
    assert "AF" in out + err


def test_audit_of_step5_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "step5", "--world-size", "2", "--strict"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.0" in out
    assert max(map(len, out.splitlines())) <= 100


def test_interrupt_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("annotate_fsdp.train.launch.run_ranks", interrupt)
    assert main(["train", "step5"]) == 130
    assert capsys.readouterr().err == "annotate-fsdp: interrupted\n"


@pytest.mark.parametrize(("text", "sizes"), [("64", 64), ("8x128", (8, 128))])
def test_world_size_is_a_number_or_replicas_by_shards(text: str, sizes: int | tuple[int, int]) -> None:
    assert parse_world_size(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "2x", "1x2x3", "1.5"])
def test_world_size_that_is_neither_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--world-size .*: write a number of ranks"):
        parse_world_size(text)


def test_released_step5_is_audited_with_the_storage_of_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "audit.json"
    command = f"audit step5 --config released --world-size 1024 --lowering unit --json {report}"
    assert main(command.split()) == 0
    text = capsys.readouterr().out
    assert "598,476,021,504 parameters in 533 units; stored: bf16 1.1 TiB, fp32 8.8 MiB" in text
    assert max(map(len, text.splitlines())) <= 100
    plan = json.loads(report.read_text())["plan"]
    assert (plan["numel"], len(plan["units"]), plan["mesh"]) == (598_476_021_504, 533, [1, 1024])


COSTS = """\
communication of one step on h100x8 if nothing overlaps (an upper bound), in ms; per rank,
padding in storage and most bytes gathered at once
lowering  units   coll    ms/step    forward    latency  bound    padding   gathered
-------- ------ ------ ---------- ---------- ---------- ------ ---------- ----------
"""


def test_link_says_what_each_lowering_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    command = f"audit {HERE}:good_model --world-size 8 --link h100x8 --json {file}"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    report, _, costs = out.partition("\n\ncommunication of one step")
    assert report.endswith("findings: none")
    assert f"communication of one step{costs}".startswith(COSTS)
    # Two units in a root without parameters: 6 collectives of 30 us. A gathered one has 8 padded rows of 5
    # elements in bf16, the other one lies beside it ahead of its turn; half of what is stored is padding.
    assert "unit          3      6       0.18       0.06       0.18      2       20 B      160 B" in out
    assert "auto: the same plan as unit\n" in out
    assert "latency-bound units under unit: {0-1} (2)" in out
    cost = json.loads(file.read_text())["cost"]
    assert cost["link"] == "h100x8"
    assert next(iter(cost["lowerings"])) == "unit"
    assert cost["lowerings"]["unit"]["same_as"] is None
    assert cost["lowerings"]["auto"]["same_as"] == "unit"
    assert cost["lowerings"]["unit"]["seconds"]["latency"] == pytest.approx(6 * 30e-6)


def test_without_a_link_nothing_is_said_about_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert main(["audit", f"{HERE}:good_model", "--world-size", "8", "--json", str(file)]) == 0
    assert "communication" not in capsys.readouterr().out
    assert "cost" not in json.loads(file.read_text())


def test_a_model_with_errors_has_no_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{HERE}:wrong_model", "--world-size", "8", "--link", "loopback"]) == 1
    assert "communication" not in capsys.readouterr().out


@pytest.mark.parametrize("world", ["1", "2", "8x128", "1024"])
@pytest.mark.parametrize("config", ["tiny", "released"])
def test_costs_of_step5_fit_the_terminal(config: str, world: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"audit step5 --config {config} --world-size {world} --link h100x8".split()) == 0
    out = capsys.readouterr().out
    assert "ms/step" in out
    assert max(map(len, out.splitlines())) <= 100
