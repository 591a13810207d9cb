"""README's table of what was tried against real peers, made from what the tests saw.

A test takes part by ``@pytest.mark.cell("what is done", "which end we are")``; its parameters are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Outcome", "inserted", "table"]

#: The columns: which end of it our device is.
ENDS = {"passive": "librdmacm calls, we answer", "active": "we call, librdmacm answers", "both": "both at once"}
BEGIN, END = "<!-- interop: made by python3 dev.py interop -->", "<!-- interop: end -->"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test of a cell ended: ``row`` and ``end`` name the cell."""

    row: str
    end: str
    passed: bool


def table(outcomes: Iterable[Outcome], circumstances: str) -> str:
    """The table in Markdown, with a line that says when and where: ``circumstances``."""
    cells: dict[str, dict[str, list[bool]]] = {}
    for outcome in outcomes:
        cells.setdefault(outcome.row, {}).setdefault(outcome.end, []).append(outcome.passed)
    ends = ["passive", "active"]
    lines = ["| | " + " | ".join(ENDS[end] for end in ends) + " |", "|---" * (len(ends) + 1) + "|"]
    for row, by_end in cells.items():
        shown = [_shown([*by_end.get(end, []), *by_end.get("both", [])]) for end in ends]
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", circumstances])


def _shown(passed: list[bool]) -> str:
    if not passed:
        return ""
    failures = passed.count(False)
    return f"{failures} of {len(passed)} **fail**" if failures else f"✓ {len(passed)}"


def inserted(document: str, made: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """The document with ``made`` in place of what stood between the marks."""
    begin, end = marks
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not between.search(document):
        raise ValueError(f"no place for the table: the document lacks {begin} and {end}")
    return between.sub(lambda _: f"{begin}\n{made}\n{end}", document)
