"""Sequence diagrams for Mermaid, as Markdown pages of GitHub and others show them."""

from __future__ import annotations

from rdmacm.trace.connection import Connection
from rdmacm.trace.rows import heads, rows
from rdmacm.trace.text import verdict_text
from rdmacm.trace.verdicts import Verdict, duration_text

#: Characters with a meaning in Mermaid, and the entities that stand for them.
_ENTITIES = {ord("#"): "#35;", ord(";"): "#59;", ord("<"): "#lt;", ord(">"): "#gt;"}


def mermaid(number: int, connection: Connection, verdict: Verdict) -> str:
    """The diagram of a connection, without a fence around it."""
    first, second = heads(connection)
    lines = [
        "sequenceDiagram",
        f"    participant A as {_text(first)}",
        f"    participant B as {_text(second)}",
        f"    Note over A,B: {number}: {_text(verdict_text(verdict))}",
    ]
    for row in rows(connection):
        text = f"{duration_text(row.time)}: {row.text}"
        if row.took:
            text += f", {duration_text(row.took)}"
        if row.sender is None:
            lines.append(f"    Note over A,B: {_text(text)}")
        else:
            arrow = "-x" if row.is_bad else "->>"
            source, target = ("A", "B") if row.sender == 0 else ("B", "A")
            lines.append(f"    {source}{arrow}{target}: {_text(text)}")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    return text.translate(_ENTITIES)
