"""What queue pairs and shared receive queues report by themselves, without a call."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["AsyncEvent"]


class AsyncEvent(IntEnum):
    """Affiliated asynchronous events; values are those of ``enum ibv_event_type``."""

    QP_FATAL = 1
    COMM_EST = 4
    SQ_DRAINED = 5
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
