"""The failure of a resolution, inside a provider."""

from __future__ import annotations

from dataclasses import replace

from rdmacm.errors import errno_name
from rdmacm.explanation import Explanation

__all__ = ["Failure"]


class Failure(Exception):
    """A resolution has failed. The provider turns this into an RdmaError or an event; it never leaves the provider."""

    def __init__(self, code: int, step: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        #: A positive errno.
        self.errno = code
        #: The step that failed: "bind", "route", "select", "neighbour", "path" or "service".
        self.step = step
        #: The cause, in words.
        self.message = message
        #: What the user may try.
        self.hint = hint

    def explained(self, explanation: Explanation) -> Explanation:
        """``explanation``, which has the steps before, with this failure as its end."""
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
