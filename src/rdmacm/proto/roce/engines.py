"""What makes the engines of queue pairs: those of the compiled core where it is (docs/core.md), else those in Python.

An engine stays with its queue pair. Both kinds have the same methods and the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.opcodes import TransportService
from rdmacm.proto.roce.ud import UdEngine

if TYPE_CHECKING:
    from rdmacm.proto._core import XrcDomain
    from rdmacm.proto.engine import EngineCounters, EngineFactory, QPEngine, SharedReceives
    from rdmacm.proto.roce.uc import UnreliableEngine
    from rdmacm.proto.roce.xrc import SharedQueue, TargetEngine
    from rdmacm.proto.work import Memory

#: Makes the engine of a datagram queue pair in INIT: see :class:`UdEngine`.
UdEngineFactory: TypeAlias = "Callable[[int, Memory, SharedReceives | None, EngineCounters], UdEngine[Any]]"

# The modules of Python's engines are imported where those run: they take long.
make_rc_engine: EngineFactory
if compiled is None:
    from rdmacm.proto.roce.rc.engine import RcEngine

    make_rc_engine = RcEngine
else:
    make_rc_engine = compiled.ConnectedEngine
make_ud_engine: UdEngineFactory = UdEngine if compiled is None else compiled.UdEngine


def make_uc_engine(
    qp_num: int, memory: Memory, shared: SharedReceives | None, counters: EngineCounters
) -> UnreliableEngine:
    """The engine of an unreliable connection in INIT."""
    if compiled is None:
        from rdmacm.proto.roce.uc import UcEngine

        return UcEngine(qp_num, memory, shared, counters)
    engine: UnreliableEngine = compiled.ConnectedEngine(qp_num, memory, shared, counters, int(TransportService.UC))
    return engine


def make_xrc_initiator(
    qp_num: int, memory: Memory, shared: SharedReceives | None, counters: EngineCounters
) -> QPEngine:
    """The engine of an initiator of XRC in INIT."""
    if compiled is None:
        from rdmacm.proto.roce.xrc import XrcInitiator

        return XrcInitiator(qp_num, memory, shared, counters)
    engine: QPEngine = compiled.ConnectedEngine(qp_num, memory, shared, counters, int(TransportService.XRC))
    return engine


def make_xrc_target(
    qp_num: int,
    memory: Memory,
    counters: EngineCounters,
    find_queue: Callable[[int], SharedQueue | None],
    domain: XrcDomain | None,
) -> TargetEngine:
    """The engine of a target of XRC in INIT, with the queues of its XRC domain as Python and as the core have them."""
    if compiled is None or domain is None:
        from rdmacm.proto.roce.xrc import XrcTarget

        return XrcTarget(qp_num, memory, counters=counters, find_queue=find_queue)
    engine: TargetEngine = compiled.ConnectedEngine(qp_num, memory, None, counters, int(TransportService.XRC), domain)
    return engine
