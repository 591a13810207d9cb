"""How each opcode of work requests is sent over a reliable connection."""

from __future__ import annotations

from rdmacm.enums import WCOpcode, WCStatus, WROpcode
from rdmacm.proto.constants import (
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
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.work import WC


class RequestType:
    """How the requests of one opcode are sent, and how they complete."""

    first: int
    last: int
    middle: int
    only: int

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
        #: Whether it sends a message; the requests of other opcodes are one packet each.
        self.is_data: bool = opcodes is not None
        self.is_write: bool = completes is WCOpcode.RDMA_WRITE
        self.is_read: bool = completes is WCOpcode.RDMA_READ
        self.is_atomic: bool = completes in (WCOpcode.COMP_SWAP, WCOpcode.FETCH_ADD)
        #: Whether it sends nothing: it is complete once this side has executed it.
        self.is_local: bool = completes in (WCOpcode.BIND_MW, WCOpcode.LOCAL_INV)
        self.is_flush: bool = completes is WCOpcode.FLUSH
        self.is_atomic_write: bool = completes is WCOpcode.ATOMIC_WRITE
        #: Whether its response is a READ response of no bytes (InfiniBand Architecture, annex A19).
        self.has_empty_response: bool = self.is_flush or self.is_atomic_write
        #: Whether an ACK of this request or of a later one completes it. A READ or atomic needs its own response, for
        #: the data in it.
        self.is_acknowledged: bool = self.is_data or self.has_empty_response
        #: Whether the last packet has immediate data, or a key to invalidate.
        self.with_immediate = immediate
        self.with_invalidate = invalidate


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
    WROpcode.FLUSH: RequestType(WCOpcode.FLUSH),
    WROpcode.ATOMIC_WRITE: RequestType(WCOpcode.ATOMIC_WRITE),
}
#: The type of all opcodes that a reliable connection does not send.
UNSUPPORTED = RequestType(WCOpcode.TSO)
#: By opcode of work requests.
REQUEST_TYPES = [UNSUPPORTED] * (max(WROpcode) + 1)
for _opcode, _type in _TYPES.items():
    REQUEST_TYPES[_opcode] = _type

if compiled is not None:
    compiled.configure_wc(
        *(WC, tuple(WCStatus), tuple(kind.completes for kind in REQUEST_TYPES)),
        *(WCOpcode.RECV, WCOpcode.RECV_RDMA_WITH_IMM),
    )
