"""Make a failing script short: remove steps, rules and faults of the network as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from support.clock import Stopwatch
from swarm.script import Script

__all__ = ["shrink"]

T = TypeVar("T")


def shrink(script: Script, fails: Callable[[Script], bool], seconds: float) -> Script:
    """The shortest script found within some seconds of real time that ``fails`` as well."""
    watch = Stopwatch()

    def tried(candidate: Script) -> bool:
        return watch.seconds < seconds and fails(candidate)

    size = 0
    while (length := len(str(script))) != size and watch.seconds < seconds:
        size = length
        script = _fewer_steps(script, tried)
        script = _fewer_rules(script, tried)
        for name in list(script.fabric):
            fewer = replace(script, fabric={key: value for key, value in script.fabric.items() if key != name})
            if tried(fewer):
                script = fewer
    return script


def _fewer_steps(script: Script, fails: Callable[[Script], bool]) -> Script:
    return replace(script, steps=_fewest(script.steps, lambda part: fails(replace(script, steps=part))))


def _fewer_rules(script: Script, fails: Callable[[Script], bool]) -> Script:
    return replace(script, rules=_fewest(script.rules, lambda part: fails(replace(script, rules=part))))


def _fewest(parts: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Remove halves, quarters and so on, down to single parts, where what is left still fails."""
    kept = tuple(parts)
    chunk = len(kept) // 2
    while chunk:
        start = 0
        while start < len(kept):
            candidate = kept[:start] + kept[start + chunk :]
            if fails(candidate):
                kept = candidate
            else:
                start += chunk
        chunk //= 2
    return kept
