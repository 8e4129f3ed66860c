"""Read a released configuration's values into a config's fields, and check what they may hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn

Broken = tuple[str, object, str]  # field, value, rule


@dataclass(frozen=True, kw_only=True)
class Released:
    """How the keys of a released configuration are read beside the fields.

    - model: what messages call the config; `prefix` stands before every field that they name.
    - ignored: keys that cannot change the model's output.
    - fixed: switches that the model knows in one position only.
    """

    model: str
    prefix: str = ""
    ignored: Collection[str] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def fail(self, name: str, value: object, rule: str) -> NoReturn:
        """Raise the ValueError that names the field, its value and the rule it breaks."""
        raise ValueError(f"{self.model}: {self.prefix}{name} is {value!r}, but {rule}")

    def check_other(self, name: str, value: object, known: Collection[str]) -> None:
        """Refuse a key that is no field: unknown, or a switch in a position that the model has not."""
        if name in self.fixed:
            if value != self.fixed[name]:
                self.fail(name, value, f"this model knows {self.fixed[name]!r} only")
        elif name not in self.ignored:
            self.fail(name, value, f"there is no such field; the fields are {', '.join(sorted(known))}")

    def check_missing(self, required: Collection[str], chosen: Mapping[str, Any]) -> None:
        """Refuse `chosen` if a field without a default is not in it."""
        if missing := [self.prefix + name for name in required if name not in chosen]:
            raise ValueError(f"{self.model}: no value for {', '.join(missing)}; there is no default")


def required_fields(cls: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that have no default."""
    return tuple(f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)


def is_count(value: object, least: int = 1) -> bool:
    """Whether `value` is an integer, `least` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def broken_counts(config: object, names: Collection[str]) -> Iterator[Broken]:
    """Yield the fields among `names` that are no positive integer."""
    for name in names:
        if not is_count(value := getattr(config, name)):
            yield name, value, "it must be a positive integer"


def broken_positives(config: object, names: Collection[str]) -> Iterator[Broken]:
    """Yield the fields among `names` that are no positive number."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or value <= 0:
            yield name, value, "it must be a positive number"
