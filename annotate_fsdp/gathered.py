"""A unit's full weights outside of its forward, for fused losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from torch import nn

from annotate_fsdp.collect import collect_tree, wrapper_chain
from annotate_fsdp.errors import Finding, NotGatheredError
from annotate_fsdp.introspect import hold_gathered


@contextmanager
def gathered(model: nn.Module, *paths: str) -> Iterator[None]:
    """Hold the full parameters at `paths` inside the block, in compute dtype, for uses other than forward.

        with gathered(model, "lm_head"):
            loss = fused_linear_ce(hidden, model.lm_head.weight)
        loss.backward()

    The units that own them are gathered; every rank must enter. Gradients are reduced into the shards at
    the end of the backward, those of forward with them. The units are freed at the end of the block, or,
    if anything was saved inside for a backward, at the end of that. What was gathered before stays.
    An unsharded model is left as it is.

    Args:
        model: the root, as it is called in training.
        paths: FQNs of modules (all parameters inside them are meant) or of single parameters. A group, a
            tied weight or a module that was folded is gathered with all of the unit that owns it.

    Raises:
        NotGatheredError: a path does not exist or holds no parameters.
    """
    places: set[tuple[int, str]] = set()
    findings: list[Finding] = []
    if not paths:
        findings.append(_no_path())
    for path in paths:
        if not isinstance(path, str):
            findings.append(_no_text(model, path))
            continue
        found = _find(model, path)
        if found:
            places |= found
        else:
            findings.append(_missing(model, path) if found is None else _empty(path))
    if findings:
        raise NotGatheredError(findings)
    with hold_gathered(model, places):
        yield


def _find(model: nn.Module, path: str) -> set[tuple[int, str]] | None:
    """Return the id of the owner and the name of each parameter at `path`; None if there is no such path."""
    module = wrapper_chain(model)[-1]
    names = path.split(".") if path else []
    for index, name in enumerate(names):
        child = module._modules.get(name)
        if child is not None:
            module = wrapper_chain(child)[-1]
        elif index == len(names) - 1 and module._parameters.get(name) is not None:
            return {(id(module), name)}
        else:
            return None
    return {
        (id(owner), name)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    }


def _missing(model: nn.Module, path: str) -> Finding:
    tree = collect_tree(model)
    known = [name for node in tree.nodes for name in (node.path, *node.aliases) if name]
    known += [name for held in tree.held for name in (held.path, *held.aliases)]
    near = get_close_matches(path, known, n=3) or [node.path for node in tree.nodes[1:4]]
    return Finding(
        "AF305",
        "error",
        path,
        f'gathered(model, "{path}")',
        "the model has no module and no parameter of that name",
        f"Write the path of one, such as {', '.join(near)}" if near else "Write the path of one",
    )


def _no_text(model: nn.Module, given: object) -> Finding:
    near = next((name for name, module in model.named_modules() if module is given and name), "")
    return Finding(
        "AF305",
        "error",
        near,
        f"gathered(model, ...) with a {type(given).__name__}",
        "it takes paths",
        f'Write its path: gathered(model, "{near or "lm_head"}")',
    )


def _empty(path: str) -> Finding:
    return Finding(
        "AF306",
        "error",
        path,
        f'gathered(model, "{path}")',
        "no parameter is inside that module",
        "Write the path of the module whose weights are used",
    )


def _no_path() -> Finding:
    return Finding(
        "AF306",
        "error",
        "",
        "gathered(model)",
        "no path is given",
        'Write the paths of the modules whose weights are used: gathered(model, "lm_head")',
    )
