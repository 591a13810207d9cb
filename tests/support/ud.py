"""The engines of datagram queue pairs, that in Python and the compiled core's."""

from __future__ import annotations

from typing import Any, cast

from rdmacm.proto.core_choice import compiled
from rdmacm.proto.engine import EngineCounters, SharedReceives
from rdmacm.proto.roce.ud import UdEngine
from support.rc import Region

__all__ = ["ENGINES", "make_ud"]

#: The engines that do the same: that in Python, and the compiled core's where it is.
ENGINES: dict[str, type[UdEngine[Any]]] = {"python": UdEngine}
if compiled is not None:
    ENGINES["c"] = cast("type[UdEngine[Any]]", compiled.UdEngine)

#: The engine that tests make; a fixture of their folder sets it (``ud_engine``).
chosen = "python"


def make_ud(
    qp_num: int, shared: SharedReceives | None = None, *, name: str = "", memory: Region | None = None
) -> UdEngine[Any]:
    """An engine in INIT: the one of a name, or the chosen one."""
    return ENGINES[name or chosen](qp_num, memory or Region(), shared, EngineCounters())
