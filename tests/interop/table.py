"""The table of docs/interop.md: the tests with librdmacm and rdma_rxe, made from their outcomes.

A test takes part by ``@pytest.mark.cell("what is done", "which end we are")``; the table counts its parameters.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Kernel", "Outcome", "inserted", "table", "wrapped"]

#: The columns of each kernel, by the end that our device is.
ENDS = {"passive": "librdmacm calls, we answer", "active": "we call, librdmacm answers"}
#: The end of a test in which our device is both active and passive.
BOTH = "both"
BEGIN, END = "<!-- interop: made by python3 dev.py interop --write -->", "<!-- interop: end -->"


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel of a machine and how it ran."""

    #: As uname(1) prints it: "6.1.0-56-amd64".
    release: str
    #: What follows "Linux 6.1.0-56-amd64" in a sentence: "of Debian in QEMU, emulated".
    description: str
    #: The version of librdmacm beside it.
    librdmacm: str

    @property
    def short(self) -> str:
        """The first two numbers of the release."""
        return ".".join(self.release.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one test of a cell, which ``row``, ``end`` and ``kernel`` name."""

    row: str
    end: str
    kernel: Kernel
    passed: bool


def table(outcomes: Iterable[Outcome], day: str) -> str:
    """The table in Markdown, and below it a line with the kernels and the day."""
    kernels: list[Kernel] = []
    cells: dict[str, dict[tuple[str, Kernel], list[bool]]] = {}
    for outcome in outcomes:
        if outcome.kernel not in kernels:
            kernels.append(outcome.kernel)
        row = cells.setdefault(outcome.row, {})
        for end in ENDS if outcome.end == BOTH else (outcome.end,):
            row.setdefault((end, outcome.kernel), []).append(outcome.passed)
    columns = [(end, kernel) for kernel in kernels for end in ENDS]
    lines = ["| | " + " | ".join(f"{kernel.short}: {ENDS[end]}" for end, kernel in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name, row in cells.items():
        lines.append(f"| {name} | " + " | ".join(_shown(row.get(column, [])) for column in columns) + " |")
    seen = "; ".join(f"Linux {kernel.release} {kernel.description}, librdmacm {kernel.librdmacm}" for kernel in kernels)
    note = f"Seen on {day}: {seen}. The numbers count tests, of both families of addresses."
    return "\n".join([*lines, "", wrapped(note)])


def wrapped(text: str) -> str:
    """The text in lines as long as those of the documents."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _shown(passed: list[bool]) -> str:
    if not passed:
        return ""
    failures = passed.count(False)
    return f"{failures} of {len(passed)} **fail**" if failures else f"✓ {len(passed)}"


def inserted(document: str, made: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """The document with ``made`` between the marks, in place of what was there."""
    begin, end = marks
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not between.search(document):
        raise ValueError(f"no place for the table: the document lacks {begin} and {end}")
    return between.sub(lambda _: f"{begin}\n{made}\n{end}", document)
