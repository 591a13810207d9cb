"""Exceptions that are faults of this package: each is counted, logged, and ends only what it belongs to.

An engine raises nothing, whatever a peer sends. If one raises all the same, its queue pair or connection ends with an
error, and everything else goes on. The multiplexer does this for queue pairs, a connection manager for connections, the
runtime for timers and for input and output as a whole.
"""

from __future__ import annotations

from collections import Counter

#: After so many errors of one part, only the 32nd, 64th, 128th and so on are logged.
_MAX_LOGGED = 20


class InternalErrors:
    """Counts and logs the faults of one provider."""

    def __init__(self) -> None:
        #: How often each part has raised: ``queue_pair``, ``connection``, ``timer``, ``gsi``, ``wire``, ``progress``,
        #: ``helper``.
        self.counts: Counter[str] = Counter()

    def report(self, part: str, text: str, error: BaseException) -> None:
        """Record an error of ``part``; ``text`` says for the log what has ended because of it."""
        self.counts[part] += 1
        count = self.counts[part]
        if count <= _MAX_LOGGED or not count & (count - 1):
            import logging

            logging.getLogger("rdmacm").error("internal error: %s", text, exc_info=error)
