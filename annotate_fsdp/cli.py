"""The command line: `annotate-fsdp audit`, `train`, `bench` and `findings`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from annotate_fsdp.catalogue import catalogue_table
from annotate_fsdp.errors import AnnotationError
from annotate_fsdp.train.bench_settings import (
    BenchSettings,
    bench_models,
    check_bench,
    layout_options,
    parse_layouts,
)
from annotate_fsdp.train.settings import (
    DEFAULT_RANKS,
    IMAGE_BATCH,
    LOWERING_CHOICES,
    MP_CHOICES,
    STORAGE_CHOICES,
    TrainSettings,
    UsageError,
    check_writable_file,
)

EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose options are written in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done, nothing to report. 1: findings, a failed run, or figures that do not hold. 2: wrong usage.
    130: interrupted.
    """
    try:
        arguments = make_parser().parse_args(argv)
        code: int = arguments.run(arguments)
    except (UsageError, AnnotationError) as error:
        print(f"annotate-fsdp: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("annotate-fsdp: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as leaving:  # --help
        return leaving.code if isinstance(leaving.code, int) else EXIT_CLEAN
    return code


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; `run` of its result is the function of the chosen command."""
    parser = _Parser(prog="annotate-fsdp", description="FSDP2 layouts from marks in the model's own source.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(
        commands.add_parser(
            "train", help="train a reference model on Python's standard library, or on images"
        )
    )
    _add_audit(commands.add_parser("audit", help="say what sharding a model would do, and what is wrong"))
    _add_bench(commands.add_parser("bench", help="measure what each way of sharding a model costs"))
    commands.add_parser("findings", help="list every finding there is, as a Markdown table").set_defaults(
        run=_findings
    )
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    default = TrainSettings(model="")
    add = parser.add_argument
    add("model", metavar="MODEL", help="a reference model: step5 or deepseek_v41")
    add("--config", default=default.config, metavar="NAME", help="its configuration (%(default)s)")
    add(
        "--ranks",
        type=int,
        metavar="N",
        help=f"local ranks ({DEFAULT_RANKS}; under torchrun, its own)",
    )
    add("--steps", type=int, default=default.steps, metavar="N", help="length of the run (%(default)s)")
    rows = f"rows in a global batch ({default.batch}; with --images {IMAGE_BATCH})"
    add("--batch", type=int, metavar="N", help=rows)
    add(
        "--sequence-length",
        type=int,
        default=default.sequence_length,
        metavar="N",
        help="bytes predicted in each row (%(default)s)",
    )
    add("--lr", type=float, default=default.lr, metavar="X", help="peak learning rate (%(default)s)")
    add("--seed", type=int, default=default.seed, metavar="N", help="of weights and batches (%(default)s)")
    _add_layout(parser)
    add("--images", action="store_true", help="train on scikit-learn's digits, with their names as text")
    add("--activation-checkpointing", action="store_true", help="recompute each layer in the backward")
    add("--check-parity", action="store_true", help="compare three steps with a reference before training")
    add("--checkpoint-dir", metavar="DIR", help="save here at the end")
    add("--checkpoint-every", type=int, metavar="N", help="save every N steps as well")
    add("--resume", action="store_true", help="go on from the latest complete checkpoint")
    add("--stop-after", type=int, metavar="K", help="end once K steps are done, with a checkpoint")
    add("--json", metavar="FILE", help="write the run's figures to FILE")
    parser.set_defaults(run=_train)


def _add_audit(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="a reference model, or package.module:callable that makes one")
    add("--config", metavar="NAME", help="configuration of a reference model (tiny)")
    add("--world-size", default="1", metavar="N", help="ranks, or REPLICASxSHARDS (%(default)s)")
    _add_layout(parser)
    add("--link", metavar="NAME", help="also say what each lowering costs there: h100x8 or loopback")
    add("--json", metavar="FILE", help="write the report to FILE as JSON")
    add("--strict", action="store_true", help="exit with 1 on warnings too")
    parser.set_defaults(run=_audit)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    default = BenchSettings(model="")
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"what to measure: {', '.join(bench_models())}")
    add("--ranks", type=int, default=default.ranks, metavar="N", help="local ranks (%(default)s)")
    add("--rounds", type=int, default=default.rounds, metavar="N", help="steps of each layout (%(default)s)")
    latency = "milliseconds to wait before each collective (%(default)s)"
    add("--latency", type=float, default=default.latency, metavar="MS", help=latency)
    add(
        "--layouts",
        default=",".join(layout_options(default.layouts)),
        metavar="LIST",
        help="what to compare (%(default)s)",
    )
    add("--json", metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=_bench)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mp", choices=MP_CHOICES, default="bf16", help="compute dtype (%(default)s)")
    add("--storage", choices=STORAGE_CHOICES, help="dtype of stored parameters (fp32; released: bf16)")
    add("--lowering", choices=LOWERING_CHOICES, default="auto", help="how units are made (%(default)s)")


def _train(arguments: argparse.Namespace) -> int:
    from annotate_fsdp.train.launch import LaunchError, run_here, run_ranks, torchrun_world

    options = {name: value for name, value in vars(arguments).items() if name != "run" and value is not None}
    if arguments.images:
        options.setdefault("batch", IMAGE_BATCH)
    world = torchrun_world()
    if world is not None and options.setdefault("ranks", world[1]) != world[1]:
        raise UsageError(f"--ranks {options['ranks']}: torchrun started {world[1]} ranks; leave it out")
    settings = TrainSettings(**options)
    from annotate_fsdp.train.job import JOB, check_run

    check_run(settings)
    if world is not None:
        return run_here(JOB, settings.to_dict())
    try:
        return run_ranks(JOB, settings.to_dict(), settings.ranks)
    except LaunchError as error:
        print(f"annotate-fsdp: error: {error}", file=sys.stderr)
        return EXIT_FINDINGS


def _bench(arguments: argparse.Namespace) -> int:
    from annotate_fsdp.train.launch import LaunchError, run_ranks, torchrun_world

    options = {name: value for name, value in vars(arguments).items() if name != "run"}
    settings = BenchSettings(**{**options, "layouts": parse_layouts(arguments.layouts)})
    check_bench(settings)
    if torchrun_world() is not None:
        raise UsageError("bench starts its own ranks; run it without torchrun")
    from annotate_fsdp.train.bench import JOB

    try:
        return run_ranks(JOB, settings.to_dict(), settings.ranks)
    except LaunchError as error:
        print(f"annotate-fsdp: error: {error}", file=sys.stderr)
        return EXIT_FINDINGS


def _audit(arguments: argparse.Namespace) -> int:
    from annotate_fsdp.train.target import audit_target

    world_size = parse_world_size(arguments.world_size)
    if arguments.json is not None:
        check_writable_file(arguments.json, "--json")
    return audit_target(
        arguments.target,
        config=arguments.config,
        storage=arguments.storage,
        world_size=world_size,
        mp=arguments.mp,
        lowering=arguments.lowering,
        link=arguments.link,
        json_file=arguments.json,
        strict=arguments.strict,
    )


def _findings(arguments: argparse.Namespace) -> int:
    print(catalogue_table())
    return EXIT_CLEAN


def parse_world_size(text: str) -> int | tuple[int, int]:
    """Return `"64"` as 64 ranks to shard over, and `"8x128"` as 8 replicas of 128.

    Raises:
        UsageError: it is neither.
    """
    try:
        sizes = [int(part) for part in text.split("x")]
    except ValueError:
        sizes = []
    if len(sizes) not in (1, 2) or min(sizes) < 1:
        raise UsageError(f"--world-size {text}: write a number of ranks, or REPLICASxSHARDS such as 8x128")
    return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


if __name__ == "__main__":
    sys.exit(main())
