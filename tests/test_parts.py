"""CI's line for each part of the tests."""

from __future__ import annotations

from typing import Literal

import pytest

from support.parts import Parts

Outcome = Literal["passed", "failed", "skipped"]


def report(mark: str, outcome: Outcome, when: Literal["setup", "call", "teardown"] = "call") -> pytest.TestReport:
    return pytest.TestReport("test_it", ("test_it.py", 1, "test_it"), {mark: 1}, outcome, None, when, duration=1.5)


def test_each_part_has_a_line() -> None:
    parts = Parts()
    for each in (
        report("", "passed", "setup"),
        report("", "passed"),
        report("", "skipped", "setup"),
        report("slow", "failed", "setup"),
        report("interop", "passed"),
    ):
        parts.add(each)
    repeat = "CI=true python3 dev.py test -n 4 --dist loadfile -m 'slow and not interop and not wallclock'"
    assert parts.lines() == [
        "--- interop: 1 passed, 2 s of all processes",
        f"--- slow: 1 failed, 2 s of all processes; to repeat it: {repeat}",
        "--- quick: 1 passed, 1 skipped, 4 s of all processes",
    ]
