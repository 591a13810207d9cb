"""What makes the engines of queue pairs: those of the compiled core where it is (docs/core.md), else those in Python.

An engine stays with its queue pair. Both kinds have the same methods and the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.rc import RcEngine
from rdmacm.proto.roce.ud import UdEngine

if TYPE_CHECKING:
    from rdmacm.proto.engine import EngineCounters, EngineFactory, SharedReceives
    from rdmacm.proto.work import Memory

__all__ = ["UdEngineFactory", "make_rc_engine", "make_ud_engine"]

#: Makes the engine of a datagram queue pair in INIT: see :class:`UdEngine`.
UdEngineFactory: TypeAlias = "Callable[[int, Memory, SharedReceives | None, EngineCounters], UdEngine[Any]]"

make_rc_engine: EngineFactory = RcEngine if compiled is None else compiled.ConnectedEngine
make_ud_engine: UdEngineFactory = UdEngine if compiled is None else compiled.UdEngine
