"""What the tools say on a slow machine."""

from __future__ import annotations

import re

__all__ = ["without_waiting"]

_WAITING = re.compile(r"^rdmacm: waiting for .*\n", re.MULTILINE)


def without_waiting(output: str) -> str:
    """The output without the lines of standard error that say that a tool waits for an answer."""
    return _WAITING.sub("", output)
