"""Find a model by name or by `package.module:callable`, build it on meta, and audit it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from operator import attrgetter

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from annotate_fsdp import AnnotationError, audit
from annotate_fsdp.train.costs import cost_lowerings, costs_to_dict, find_link, render_costs
from annotate_fsdp.train.files import write_atomically
from annotate_fsdp.train.registry import check_config, find_model, model_names
from annotate_fsdp.train.settings import UsageError


def audit_target(
    target: str,
    *,
    config: str | None,
    storage: str | None,
    world_size: int | tuple[int, int],
    mp: str,
    lowering: str,
    link: str | None,
    json_file: str | None,
    strict: bool,
) -> int:
    """Print the audit of a target; return 0 if it is clean, 1 if it has errors, or with `strict` warnings.

    With a link's name it also says what each lowering costs there.

    Raises:
        UsageError: the target cannot be built, or there is no such link.
    """
    found = find_link(link) if link is not None else None
    model = build_target(target, config, storage)
    compute = torch.bfloat16 if mp == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    try:
        report = audit(model, world_size=world_size, mp_policy=policy, lowering=lowering)
    except AnnotationError as error:
        print(error, file=sys.stderr)
        return 1
    print(report)
    data = report.to_dict()
    if found is not None and report.ok:
        costs = cost_lowerings(model, found, world_size, policy)
        print(f"\n{render_costs(found, costs)}")
        data["cost"] = costs_to_dict(found, costs)
    if json_file is not None:
        write_atomically(json_file, json.dumps(data, indent=2))
    return 1 if report.errors or (strict and report.warnings) else 0


def build_target(target: str, config: str | None, storage: str | None) -> nn.Module:
    """Build a target on meta, so that no parameter takes memory.

    Raises:
        UsageError: it cannot be found or built.
    """
    if ":" not in target:
        if target not in model_names():
            known = ", ".join(model_names())
            raise UsageError(f"there is no target {target!r}; write {known} or package.module:callable")
        entry = find_model(target)
        check_config(entry, config or "tiny", train=False)
        with torch.device("meta"):
            # a released checkpoint stores bf16 beside its fp32 parts
            return entry.build(config or "tiny", storage or ("bf16" if config == "released" else "fp32"))
    for option, value in (("--config", config), ("--storage", storage)):
        if value is not None:
            raise UsageError(f"{option} goes with a reference model; {target} is called without arguments")
    return _call(target)


def _call(target: str) -> nn.Module:
    """Import and call `"package.module:callable"`; whatever goes wrong is one line about the target."""
    module_name, _, path = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise UsageError(f"target {target!r}: write package.module:callable")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look there; last, so that it hides nothing
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"target {target}: cannot import {module_name}: {_one_line(error)}") from error
    try:
        build = attrgetter(path)(module)
    except AttributeError as error:
        raise UsageError(f"target {target}: {module_name} has no {path}") from error
    if not callable(build):
        raise UsageError(f"target {target}: {path} is not callable")
    try:
        with torch.device("meta"):
            made = build()
    except (Exception, SystemExit) as error:
        raise UsageError(f"target {target}: calling it raised {_one_line(error)}") from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"target {target}: it returned a {type(made).__name__}, not a torch.nn.Module")
    return made


def _one_line(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
