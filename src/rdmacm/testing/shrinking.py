"""Find the shortest part of a list that still fails: delta debugging (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def shortest(items: Sequence[T], fails: Callable[[Sequence[T]], bool | None]) -> tuple[list[T], bool]:
    """Return a part of ``items``, in their order, that fails, and whether it would pass without any one of its items.

    ``items`` have to fail. ``fails`` is called with parts of them, each once; None ends the search early.
    """
    found = list(items)
    known: dict[tuple[int, ...], bool] = {}
    at = list(range(len(found)))

    def is_failing(part: Sequence[int]) -> bool | None:
        key = tuple(part)
        if key not in known:
            answer = fails([items[place] for place in key])
            if answer is None:
                return None
            known[key] = answer
        return known[key]

    if found and (empty := is_failing(())) is not False:
        return ([], True) if empty else (found, False)
    pieces = 2
    while len(at) > 1:
        bounds = [len(at) * piece // pieces for piece in range(pieces + 1)]
        parts = [at[low:high] for low, high in pairwise(bounds)]
        rests = [[place for place in at if place not in set(part)] for part in parts]
        for part, count in [*((part, 2) for part in parts), *((rest, max(pieces - 1, 2)) for rest in rests)]:
            answer = is_failing(part)
            if answer is None:
                return [items[place] for place in at], False
            if answer:
                at, pieces = list(part), count
                break
        else:
            if pieces == len(at):
                break
            pieces = min(len(at), 2 * pieces)
    return [items[place] for place in at], True
