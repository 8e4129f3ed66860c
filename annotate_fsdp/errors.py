"""What goes wrong, as data: findings, and the errors that carry them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
_NUMBER = re.compile(r"\d+")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # a path component that is a number


@dataclass(frozen=True)
class Finding:
    """One rule broken at one place.

    - code: stable name of the rule, such as `AF201`; a code never changes its meaning.
    - severity: `"error"` stops sharding; `"warning"` and `"info"` are shown by `audit`.
    - path: FQN of the module or parameter (`""` is the root module).
    - declared: what the model, the mark or the caller says.
    - wrong: why that cannot work.
    - write: what to write instead.
    """

    code: str
    severity: Severity
    path: str
    declared: str
    wrong: str
    write: str

    def __str__(self) -> str:
        where = self.path or "the root module"
        return f"{self.code} {self.severity} at {where}: {self.declared}, but {self.wrong}. {self.write}."


def fold_findings(findings: Iterable[Finding]) -> list[str]:
    """Return the text of the findings, one line for all that differ by an index only: ninety layers alike."""
    folded: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.code, _INDEX.sub("#", finding.path), _NUMBER.sub("#", finding.declared))
        folded.setdefault(key, []).append(finding)
    more = (f" (and {len(alike) - 1} more like it)" if len(alike) > 1 else "" for alike in folded.values())
    return [f"{alike[0]}{words}" for alike, words in zip(folded.values(), more, strict=True)]


class AnnotationError(ValueError):
    """A mark, an option or the model itself cannot be sharded as declared; nothing was changed.

    `findings` holds every finding of severity `"error"`; the text has one line for all of a kind whose paths
    differ by an index only.
    """

    outcome = "nothing was sharded"

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings: tuple[Finding, ...] = tuple(findings)
        count = len(self.findings)
        head = f"{count} finding{'' if count == 1 else 's'}; {self.outcome}"
        super().__init__("\n".join([head, *(f"  {line}" for line in fold_findings(self.findings))]))

    def __reduce__(self) -> tuple[type[AnnotationError], tuple[tuple[Finding, ...]]]:
        return type(self), (self.findings,)


class FoldedCallError(AnnotationError):
    """A folded module was called outside of its unit's forward; the call was refused."""

    outcome = "the call was refused"


class NotGatheredError(AnnotationError):
    """What `gathered` was asked for is not there; nothing was gathered."""

    outcome = "nothing was gathered"


class NotReducedError(AnnotationError):
    """The gradients of a unit cannot be reduced as its parameters are now; the backward was stopped."""

    outcome = "the gradients were not reduced"


class PlanMismatchError(AnnotationError):
    """The ranks of the mesh do not hold the same plan; nothing was sharded on any of them."""


class StepMismatchError(AnnotationError):
    """The ranks of the mesh do not run the same step; it was stopped on all of them."""

    outcome = "the step was stopped before the ranks could wait for each other"


class PartlyShardedError(AnnotationError):
    """`fully_shard` failed although every check had passed; the model must be built again."""

    outcome = "the model is sharded in part"


class MaterializeError(AnnotationError):
    """A model on `meta` could not be made real as asked; do not train it."""

    outcome = "the model is not ready for use"
