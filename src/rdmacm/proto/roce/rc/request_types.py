"""How each opcode of work requests is sent over a reliable connection."""

from __future__ import annotations

from rdmacm.enums import WCOpcode, WROpcode
from rdmacm.proto.roce.rc.codes import (
    SEND_FIRST,
    SEND_LAST,
    SEND_LAST_WITH_IMMEDIATE,
    SEND_LAST_WITH_INVALIDATE,
    SEND_MIDDLE,
    SEND_ONLY,
    SEND_ONLY_WITH_IMMEDIATE,
    SEND_ONLY_WITH_INVALIDATE,
    WRITE_FIRST,
    WRITE_LAST,
    WRITE_LAST_WITH_IMMEDIATE,
    WRITE_MIDDLE,
    WRITE_ONLY,
    WRITE_ONLY_WITH_IMMEDIATE,
)

__all__ = ["REQUEST_TYPES", "UNSUPPORTED", "RequestType"]


class RequestType:
    """How the requests of one opcode are sent, and how they complete."""

    __slots__ = ("completes", "first", "is_atomic", "is_data", "is_local", "is_plain", "is_read", "is_write", "last",
                 "middle", "only", "with_immediate", "with_invalidate")  # fmt: skip

    def __init__(
        self,
        completes: WCOpcode,
        opcodes: tuple[int, int, int, int] | None = None,
        *,
        immediate: bool = False,
        invalidate: bool = False,
    ) -> None:
        #: The opcode of its completion.
        self.completes = completes
        #: BTH opcodes of the packets of its message, if it sends one.
        self.first, self.middle, self.last, self.only = opcodes or (0, 0, 0, 0)
        #: Whether it sends a message, which an ACK completes; a READ or atomic completes with its response.
        self.is_data = opcodes is not None
        self.is_write = completes is WCOpcode.RDMA_WRITE
        self.is_read = completes is WCOpcode.RDMA_READ
        self.is_atomic = completes in (WCOpcode.COMP_SWAP, WCOpcode.FETCH_ADD)
        #: Whether it sends nothing: it is complete once this side has executed it.
        self.is_local = completes in (WCOpcode.BIND_MW, WCOpcode.LOCAL_INV)
        #: Whether the last packet has immediate data, or a key to invalidate.
        self.with_immediate = immediate
        self.with_invalidate = invalidate
        #: Whether it sends a message and nothing else.
        self.is_plain = self.is_data and not immediate and not invalidate


_SEND = (SEND_FIRST, SEND_MIDDLE, SEND_LAST, SEND_ONLY)
_SEND_IMMEDIATE = (SEND_FIRST, SEND_MIDDLE, SEND_LAST_WITH_IMMEDIATE, SEND_ONLY_WITH_IMMEDIATE)
_SEND_INVALIDATE = (SEND_FIRST, SEND_MIDDLE, SEND_LAST_WITH_INVALIDATE, SEND_ONLY_WITH_INVALIDATE)
_WRITE = (WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_ONLY)
_WRITE_IMMEDIATE = (WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST_WITH_IMMEDIATE, WRITE_ONLY_WITH_IMMEDIATE)
_TYPES = {
    WROpcode.RDMA_WRITE: RequestType(WCOpcode.RDMA_WRITE, _WRITE),
    WROpcode.RDMA_WRITE_WITH_IMM: RequestType(WCOpcode.RDMA_WRITE, _WRITE_IMMEDIATE, immediate=True),
    WROpcode.SEND: RequestType(WCOpcode.SEND, _SEND),
    WROpcode.SEND_WITH_IMM: RequestType(WCOpcode.SEND, _SEND_IMMEDIATE, immediate=True),
    WROpcode.SEND_WITH_INV: RequestType(WCOpcode.SEND, _SEND_INVALIDATE, invalidate=True),
    WROpcode.RDMA_READ: RequestType(WCOpcode.RDMA_READ),
    WROpcode.ATOMIC_CMP_AND_SWP: RequestType(WCOpcode.COMP_SWAP),
    WROpcode.ATOMIC_FETCH_AND_ADD: RequestType(WCOpcode.FETCH_ADD),
    WROpcode.BIND_MW: RequestType(WCOpcode.BIND_MW),
    WROpcode.LOCAL_INV: RequestType(WCOpcode.LOCAL_INV),
}
#: The type of all opcodes that a reliable connection does not send.
UNSUPPORTED = RequestType(WCOpcode.TSO)
#: By opcode of work requests.
REQUEST_TYPES = [UNSUPPORTED] * (max(WROpcode) + 1)
for _opcode, _type in _TYPES.items():
    REQUEST_TYPES[_opcode] = _type
