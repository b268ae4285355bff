"""Exact loops: greedy text of a small model often ends by repeating itself, which flatters every kind of drafting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

REPEATS = 3  # how often the last stretch must stand there
SHORTEST = 24  # tokens in all: three line ends are no loop


def loop_start(tokens: Sequence[int], *, repeats: int = REPEATS, shortest: int = SHORTEST) -> int | None:
    """Where ``tokens`` begins to repeat itself until its end, or None if it does not.

    A loop is a tail of at least ``shortest`` tokens that repeats one stretch at least ``repeats`` times (the last time
    perhaps in part). The earliest start over all periods; a text that left its loop, if only to end, has none.
    """
    text = np.asarray(tokens, dtype=np.int64)
    length = len(text)
    best: int | None = None
    for period in range(1, length // repeats + 1):
        differs = np.flatnonzero(text[period:] != text[:-period])
        start = int(differs[-1]) + 1 if len(differs) else 0
        if length - start >= max(shortest, repeats * period) and (best is None or start < best):
            best = start
    return best


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether the continuation ends in an exact loop."""
    return loop_start(tokens) is not None
