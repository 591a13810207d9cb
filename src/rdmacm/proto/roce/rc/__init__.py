"""Reliable connected service (InfiniBand Architecture 9.7) as Linux's rxe speaks it.

The requester turns work requests into packets and the peer's answers into completions; the responder executes what the
peer's packets ask for. :class:`RcEngine` is both, with one stream of packets in and one out. ``state.py`` has the state
they share. The compiled core has an engine that does the same (docs/core.md), and :data:`make_rc_engine` makes the one
that a device uses: it stays with its queue pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.rc.engine import RcEngine

if TYPE_CHECKING:
    from rdmacm.proto.engine import EngineFactory

__all__ = ["RcEngine", "make_rc_engine"]

make_rc_engine: EngineFactory = RcEngine if compiled is None else compiled.ConnectedEngine
