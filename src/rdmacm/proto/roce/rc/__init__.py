"""Reliable connected transport: InfiniBand Architecture chapter 9.7, as Linux's rxe speaks it.

A requester turns work requests into packets and answers into completions; a responder does what the peer's packets
ask. :class:`RcEngine` is both, with one stream of packets in and out.
"""

from __future__ import annotations

from rdmacm.proto.roce.rc.engine import ACK_ONLY, NOTHING, PACKETS, RcEngine, RtrAttributes, RtsAttributes
from rdmacm.proto.roce.rc.trains import Datagram

__all__ = ["ACK_ONLY", "NOTHING", "PACKETS", "Datagram", "RcEngine", "RtrAttributes", "RtsAttributes"]
