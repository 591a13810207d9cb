"""Debug messages through :mod:`logging`.

The loggers are ``rdmacm.id``, ``rdmacm.cm``, ``rdmacm.qp``, ``rdmacm.resolution`` and ``rdmacm.device``. Each message
is behind :data:`enabled`, so that it costs one look at a variable when it is off. There is none for packets of data.

    if log.enabled:
        log.QP.debug("QP 0x%06x: ...", qp_num)

The environment variable ``RDMACM_LOG`` turns messages on without a line of code.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger

#: Names the loggers to write to standard error: ``debug`` for all, or some of ``id,cm,qp,resolution,device``.
ENVIRONMENT = "RDMACM_LOG"

#: Whether a logger took DEBUG messages at the last :func:`refresh`.
enabled: bool = False

_DEBUG = 10  # logging.DEBUG: importing logging takes milliseconds, so programs that do not log are spared it
_FORMAT = "%(asctime)s.%(msecs)03d %(process)d %(name)s: %(message)s"


class Channel:
    """One logger, made at its first message or :func:`refresh` after the program has imported :mod:`logging`."""

    __slots__ = ("logger", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        #: None until :meth:`make_logger`.
        self.logger: Logger | None = None

    def make_logger(self) -> Logger:
        """Make the logger of that name."""
        import logging

        self.logger = logging.getLogger(self.name)
        return self.logger

    def debug(self, text: str, *values: object) -> None:
        """Log a message; ``values`` are formatted only if the logger takes it."""
        (self.logger or self.make_logger()).debug(text, *values)


ID = Channel("rdmacm.id")
CM = Channel("rdmacm.cm")
QP = Channel("rdmacm.qp")
RESOLUTION = Channel("rdmacm.resolution")
DEVICE = Channel("rdmacm.device")
_CHANNELS = (ID, CM, QP, RESOLUTION, DEVICE)


def refresh() -> None:
    """Set :data:`enabled` by the present levels of the loggers. Opening an event channel or a device does this."""
    global enabled
    if "logging" in sys.modules:
        enabled = any((channel.logger or channel.make_logger()).isEnabledFor(_DEBUG) for channel in _CHANNELS)


def _begin(wanted: str) -> None:
    """Write the messages that ``RDMACM_LOG`` names to standard error."""
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
    logging.getLogger("rdmacm").addHandler(handler)
    for word in wanted.lower().split(","):
        chosen = [channel for channel in _CHANNELS if word.strip() in ("debug", channel.name.rpartition(".")[2])]
        for channel in chosen:
            channel.make_logger().setLevel(_DEBUG)
        if not chosen:
            known = ", ".join(channel.name.rpartition(".")[2] for channel in _CHANNELS)
            logging.getLogger("rdmacm").warning(
                "%s: no messages %r; debug (all), or some of %s", ENVIRONMENT, word, known
            )
    refresh()


if os.environ.get(ENVIRONMENT):
    _begin(os.environ[ENVIRONMENT])
