"""Reliable connected transport: InfiniBand Architecture chapter 9.7, as Linux's rxe speaks it.

:class:`Requester` turns work requests into packets and answers into completions; :class:`Responder` does what the
peer's packets ask. :class:`RcEngine` is both, with one stream of packets in and out.
"""

from __future__ import annotations

from rdmacm.proto.roce.rc.engine import RcAttributes, RcEngine
from rdmacm.proto.roce.rc.requester import Requester
from rdmacm.proto.roce.rc.responder import Responder

__all__ = ["RcAttributes", "RcEngine", "Requester", "Responder"]
