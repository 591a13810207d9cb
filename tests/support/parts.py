"""The parts of all tests, as CI reports them: a line for each, with what repeats it where a test of it has failed.

They run together, because the longest of them wait for a machine while others compute.
"""

from __future__ import annotations

from collections import Counter

import pytest

__all__ = ["PARTS", "Parts"]

#: The parts, and pytest's expression for each. A test is of the first whose mark it has.
PARTS = {
    "wallclock": "wallclock",
    "interop": "interop and not wallclock",
    "slow": "slow and not interop and not wallclock",
    "quick": "not slow and not wallclock",
}


class Parts:
    """How the tests of each part went."""

    def __init__(self) -> None:
        self._outcomes = {name: Counter[str]() for name in PARTS}
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def add(self, report: pytest.TestReport) -> None:
        """Count a report of a test's set-up, call or tear-down."""
        name = next((name for name in PARTS if name in report.keywords), "quick")
        self._seconds[name] += report.duration
        if report.failed or report.skipped or report.when == "call":
            self._outcomes[name][report.outcome] += 1

    def lines(self) -> list[str]:
        """A line for each part that has run. The seconds are those of all processes together."""
        return [self._line(name, outcomes) for name, outcomes in self._outcomes.items() if outcomes]

    def _line(self, name: str, outcomes: Counter[str]) -> str:
        counts = ", ".join(f"{outcomes[each]} {each}" for each in ("passed", "failed", "skipped") if outcomes[each])
        line = f"--- {name}: {counts}, {self._seconds[name]:.0f} s of all processes"
        if outcomes["failed"]:
            line += f"; to repeat it: CI=true python3 dev.py test -n 4 --dist loadfile -m '{PARTS[name]}'"
        return line
