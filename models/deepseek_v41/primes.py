"""The moduli of the engram's hashes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice


@cache
def ngram_primes(layers: int, heads: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return for each layer its `heads` primes: the next unused ones from `vocab_size` up.

    With the released sizes (2 layers, 24 heads, 16,000,000) they sum to 384,006,168 and 384,016,682, the
    released row counts.
    """
    found = _primes_from(vocab_size)
    return tuple(tuple(islice(found, heads)) for _ in range(layers))


def _primes_from(start: int) -> Iterator[int]:
    number = max(start, 2)
    while True:
        if _is_prime(number):
            yield number
        number += 1


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))
