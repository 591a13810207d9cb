"""Unreliable datagrams (UD) over RoCEv2 (InfiniBand Architecture 9.8.3): messages of one packet, to anybody.

:class:`UdEngine` is the protocol of one queue pair. The compiled core has an engine that does the same (docs/core.md),
and :data:`make_ud_engine` makes the one that a device uses: it stays with its queue pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.ud.engine import NO_RECEIVE, TOO_SHORT, UdEngine, UdFlow, UdSend, flow_between

if TYPE_CHECKING:
    from rdmacm.proto.engine import EngineCounters, SharedReceives
    from rdmacm.proto.work import Memory

__all__ = [
    "NO_RECEIVE",
    "TOO_SHORT",
    "UdEngine",
    "UdEngineFactory",
    "UdFlow",
    "UdSend",
    "flow_between",
    "make_ud_engine",
]

#: Makes the engine of a queue pair in INIT: see :class:`UdEngine`.
UdEngineFactory: TypeAlias = "Callable[[int, Memory, SharedReceives | None, EngineCounters], UdEngine[Any]]"

make_ud_engine: UdEngineFactory = UdEngine if compiled is None else compiled.UdEngine
