"""Ranks tell each other what they are about to do in a step, so that none waits for what never comes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from annotate_fsdp.errors import Finding, StepMismatchError

PREFIX = "annotate_fsdp/lockstep"
SHORT, LONG = 0.0005, 0.02  # seconds between two looks into the store, at first and at most
SHOWN = 3  # names of parameters in a message


@dataclass(frozen=True)
class Announcement:
    """What a rank is about to do.

    - text: in words, such as "the all-gather of unit 'head' in forward (bf16, 128 elements)".
    - unit: path of the unit that it is done for, None if for none.
    - position: the unit's place in the model, negative in backward: what is less comes first.
    - gradients: FQNs of the parameters whose gradients are reduced.
    - is_last: the rank announces nothing after it.
    """

    text: str
    unit: str | None = None
    position: int = 0
    gradients: tuple[str, ...] = ()
    is_last: bool = False


class Lockstep:
    """The announcements of some ranks, one after the other, exchanged through the process group's store.

    The store is no collective: a rank that waits for a word can give up, and tell why. Each announcement
    waits for those of the other ranks with the same number, so that all see the first difference and raise.

    Args:
        ranks: those that tell each other, this one among them.
        limit: how long to wait for a word; None takes the store's timeout.
    """

    def __init__(self, ranks: Sequence[int], limit: timedelta | None = None) -> None:
        assert dist.group.WORLD is not None
        store: Any = dist.group.WORLD.get_group_store()  # Any: torch's annotations lack half of it
        self.ranks = sorted(ranks)
        self.rank = dist.get_rank()
        self.store = store
        self.limit = store.timeout if limit is None else limit
        self.count = 0
        self.is_over = False
        self.prefix = f"{PREFIX}/{'-'.join(map(str, self.ranks))}"
        self.prefix += f"/{store.add(f'{self.prefix}/blocks/{self.rank}', 1)}"

    @contextmanager
    def block(self) -> Iterator[None]:
        """Announce the end of what runs inside, or what it raises."""
        try:
            yield
        except BaseException as error:
            if not self.is_over:
                self._tell(Announcement(f"an exception: {type(error).__name__}: {error}", is_last=True))
            raise
        self.announce(Announcement("the end of the observed block", is_last=True))

    def announce(self, mine: Announcement) -> None:
        """Tell the other ranks what comes next here, and wait until all have said the same.

        Raises:
            StepMismatchError: a rank does something else, or said nothing within the limit.
        """
        if self.is_over:
            return
        self._tell(mine)
        heard = self._listen()
        finding = self._missing(mine, heard) or self._difference(heard)
        if finding is not None:
            if len(heard) < len(self.ranks):  # who comes late is told not to go on alone
                self._tell(Announcement("an exception: it has waited in vain", is_last=True))
            self.is_over = True
            raise StepMismatchError([finding])
        if self.count:  # who has come this far has read what was said before
            self.store.delete_key(self._key(self.count - 1, self.rank))
        self.count += 1

    def _key(self, number: int, rank: int) -> str:
        return f"{self.prefix}/{number}/{rank}"

    def _tell(self, mine: Announcement) -> None:
        self.is_over = mine.is_last
        self.store.set(self._key(self.count, self.rank), json.dumps(asdict(mine)))

    def _listen(self) -> dict[int, Announcement]:
        """Return the announcement of every rank, without those of whom nothing was heard."""
        deadline, pause = time.monotonic() + self.limit.total_seconds(), SHORT
        heard: dict[int, Announcement] = {}
        while True:
            for rank in self.ranks:
                key = self._key(self.count, rank)
                if rank not in heard and self.store.check([key]):
                    said = json.loads(self.store.get(key))
                    heard[rank] = Announcement(**{**said, "gradients": tuple(said["gradients"])})
            if len(heard) == len(self.ranks) or time.monotonic() > deadline:
                return heard
            time.sleep(pause)  # a waiting `get` would keep the store's client from other threads
            pause = min(2 * pause, LONG)

    def _missing(self, mine: Announcement, heard: dict[int, Announcement]) -> Finding | None:
        silent = [rank for rank in self.ranks if rank not in heard]
        if not silent:
            return None
        return Finding(
            "AF704",
            "error",
            mine.unit or "",
            f"call {self.count + 1} of the step is {mine.text} on rank {self.rank}",
            f"nothing was heard from rank {', '.join(map(str, silent))} for {self.limit.total_seconds():g} s",
            "Run the same step on every rank, inside observe(model, cross_rank=True)",
        )

    def _difference(self, heard: dict[int, Announcement]) -> Finding | None:
        """Describe the first rank that does something else than the first one."""
        first = self.ranks[0]
        other = next((rank for rank in self.ranks if heard[rank] != heard[first]), None)
        if other is None:
            return None
        here, there = heard[first], heard[other]
        texts = (here.text, there.text)
        if here.unit == there.unit and here.gradients != there.gradients:
            texts = (_with_gradients(here, there), _with_gradients(there, here))
        units = [each for each in (here, there) if each.unit is not None]
        unit = min(units, key=lambda each: each.position).unit if units else None
        return Finding(
            "AF703",
            "error",
            unit or "",
            f"call {self.count + 1} of the step is {texts[0]} on rank {first}",
            f"it is {texts[1]} on rank {other}: such ranks wait for each other or mix up numbers",
            "Run the same units and use the same parameters in each step on every rank, or mark what some "
            "ranks skip with conditional=True",
        )


def _with_gradients(mine: Announcement, other: Announcement) -> str:
    """The text, with the gradients that only one of two has."""
    only = [name for name in mine.gradients if name not in other.gradients]
    more = f" and {len(only) - SHOWN} more" if len(only) > SHOWN else ""
    return f"{mine.text} with the gradient of {', '.join(only[:SHOWN])}{more}" if only else mine.text
