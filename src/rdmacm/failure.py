"""How a resolution fails, inside a provider."""

from __future__ import annotations

from dataclasses import replace

from rdmacm.errors import errno_name
from rdmacm.explanation import Explanation

__all__ = ["Failure"]


class Failure(Exception):
    """A resolution that cannot succeed. It never leaves the provider: the id turns it into an error or an event.

    ``errno`` is positive; ``step`` is the step that failed ("bind", "route", "select", "neighbour", "path", "service");
    ``message`` says why and ``hint`` what to try.
    """

    def __init__(self, code: int, step: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.errno = code
        self.step = step
        self.message = message
        self.hint = hint

    def explained(self, explanation: Explanation) -> Explanation:
        """``explanation`` of the steps before, ending in this failure."""
        return replace(
            explanation,
            # A candidate that passed the rules is not "chosen" when the resolution failed afterwards.
            candidates=tuple(replace(c, chosen=False) for c in explanation.candidates),
            error=self.step,
            errno=self.errno,
            errno_name=errno_name(self.errno),
            message=self.message,
            hint=self.hint,
        )
