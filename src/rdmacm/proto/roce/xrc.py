"""Extended reliable connections (XRC) over RoCEv2 (InfiniBand Architecture, annex A14).

An XRC connection has an initiator, which sends requests, and a target, which executes and answers them. It is a
reliable connection with one direction, so both are an :class:`~rdmacm.proto.roce.rc.engine.RcEngine` with other
packets:

- every opcode has the transport service XRC;
- every request packet has an XRCETH after its BTH: the number of the target's shared receive queue that it is for. The
  protection domain of that queue decides which memory the request may touch.

All packets of a message name the same queue. FLUSH and ATOMIC WRITE are for reliable connections only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from rdmacm.enums import WCStatus
from rdmacm.proto.constants import BTH_LENGTH, ICRC_LENGTH, LONGEST_PACKET, NAK_INVALID_REQUEST
from rdmacm.proto.engine import QPEngine, SharedReceives
from rdmacm.proto.roce.headers import XRCETH_STRUCT
from rdmacm.proto.roce.icrc import ICRC_STRUCT, Icrc, crc32
from rdmacm.proto.roce.opcodes import HEADER_LENGTH, IS_REQUEST, IS_RESPONSE, TRANSPORT_MASK, TransportService
from rdmacm.proto.roce.rc import requester, responder, responses
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.roce.rc.failure import fail_receive
from rdmacm.proto.roce.rc.request_types import REQUEST_TYPES
from rdmacm.proto.roce.rc.trains import Trains
from rdmacm.proto.wire import Buffer
from rdmacm.proto.work import WC, Memory, SendWork

_XRC = int(TransportService.XRC)
_XRCETH_LENGTH = XRCETH_STRUCT.size
_LENGTHS = bytes(HEADER_LENGTH[o] if o & TRANSPORT_MASK == _XRC else 0 for o in range(256))
#: By opcode: bytes of its headers, 0 for packets that an initiator, or a target, does not accept.
_RESPONSE_LENGTHS = bytes(length if IS_RESPONSE[o] else 0 for o, length in enumerate(_LENGTHS))
_REQUEST_LENGTHS = bytes(length if IS_REQUEST[o] else 0 for o, length in enumerate(_LENGTHS))
_LONGEST_PACKET = LONGEST_PACKET + _XRCETH_LENGTH
_SRQN_MASK = 0xFFFFFF

#: What a target needs of a shared receive queue: the memory that requests for it may touch, and its receives.
SharedQueue = tuple[Memory, SharedReceives]


def _extended(headers: bytes, srqn: int | None) -> bytes:
    """The headers of an XRC packet, from those of a reliable connection; ``srqn`` is None for a response."""
    xrceth = b"" if srqn is None else XRCETH_STRUCT.pack(srqn)
    return bytes((headers[0] | _XRC,)) + headers[1:BTH_LENGTH] + xrceth + headers[BTH_LENGTH:]


class _XrcTrains(Trains):
    """Makes XRC packets of those of a reliable connection."""

    __slots__ = ("_find_srqn",)

    def __init__(self, icrc: Icrc, train: int, find_srqn: Callable[[], int | None]) -> None:
        super().__init__(icrc, train)
        #: The number for the XRCETH of the packet that is added; None for a response, which has none.
        self._find_srqn = find_srqn

    def add(self, headers: bytes, pieces: Sequence[Buffer], size: int, *, twice: bool = False) -> None:
        found = _extended(headers, self._find_srqn())
        super().add(found, pieces, size + len(found) - len(headers), twice=twice)


@dataclass(slots=True, eq=False, repr=False)
class XrcInitiator(RcEngine):
    """The end that sends requests (XRC_SEND). Implements :class:`rdmacm.proto.engine.QPEngine`."""

    longest_packet: ClassVar[int] = _LONGEST_PACKET
    header_lengths: ClassVar[bytes] = _RESPONSE_LENGTHS

    def post_send(self, work: SendWork) -> None:
        if REQUEST_TYPES[work.opcode].has_empty_response:
            raise ValueError(f"{work.opcode!r} is for reliable connections only")
        RcEngine.post_send(self, work)

    def _srqn(self) -> int:
        """The number of the request that is being sent."""
        return self.outstanding[self.send_index].remote_srqn

    def _trains(self, train: int) -> Trains:
        return _XrcTrains(self.icrc_out, train, self._srqn)

    def probe(self) -> list[Buffer]:
        headers, _ = requester.duplicate(self)
        found = _extended(bytes(headers), 0)  # the target does not execute it, for whatever queue it is
        return [found, ICRC_STRUCT.pack(crc32(found, self.icrc_out.start(len(found) + ICRC_LENGTH)))]

    def _execute(self, opcode: int, psn: int, flags: int, body: memoryview, now: float) -> bool:  # noqa: ARG002
        return responses.received(self, opcode & ~TRANSPORT_MASK, psn, body, now)


class TargetEngine(QPEngine, Protocol):
    """What the engines of targets have. Their completions are taken with :meth:`take_completed` alone."""

    @property
    def srqn(self) -> int:
        """The number of the queue that the last request was for; -1 before."""

    def take_completed(self) -> list[tuple[int, WC]]:
        """Take the completions since the last call, oldest first, each with the number of its queue."""


@dataclass(slots=True, eq=False, repr=False)
class XrcTarget(RcEngine):
    """The end that executes requests (XRC_RECV). Implements :class:`TargetEngine`.

    A request for a queue that is not there, and a packet that names another queue than the message it is part of, are
    refused (NAK, invalid request).
    """

    longest_packet: ClassVar[int] = _LONGEST_PACKET
    header_lengths: ClassVar[bytes] = _REQUEST_LENGTHS
    #: The shared receive queue with a number in the target's XRC domain, None if there is none.
    find_queue: Callable[[int], SharedQueue | None] = lambda _srqn: None
    srqn: int = -1
    #: The numbers of the queues of the completions in ``completed``, but those of the last queue.
    completed_srqns: list[int] = field(default_factory=list)

    def take_completed(self) -> list[tuple[int, WC]]:
        self._note_queue()
        found = list(zip(self.completed_srqns, self.completed, strict=True))
        self.completed_srqns.clear()
        self.completed.clear()
        return found

    def _note_queue(self) -> None:
        """Note for which queue the latest completions are."""
        self.completed_srqns += [self.srqn] * (len(self.completed) - len(self.completed_srqns))

    def _trains(self, train: int) -> Trains:
        return _XrcTrains(self.icrc_out, train, lambda: None)

    def _execute(self, opcode: int, psn: int, flags: int, body: memoryview, now: float) -> bool:  # noqa: ARG002
        if psn == self.expected_psn and not self._select(XRCETH_STRUCT.unpack_from(body)[0] & _SRQN_MASK):
            responder.respond(self, psn, NAK_INVALID_REQUEST)
            self.nak_sent = True
            self.counters.dropped["refused"] += 1
            fail_receive(self, WCStatus.REM_INV_REQ_ERR)
            return False
        return responder.received(self, opcode & ~TRANSPORT_MASK, psn, flags, body[_XRCETH_LENGTH:])

    def _select(self, srqn: int) -> bool:
        """Use the memory and the receives of a shared receive queue; False where the packet may not name it."""
        if self.operation and srqn != self.srqn:
            return False
        found = self.find_queue(srqn)
        if found is None or self.failed:  # the completion queue of the queue before may have overflowed just now
            return False
        self._note_queue()
        self.srqn = srqn
        self.memory: Memory = found[0]
        self.shared: SharedReceives | None = found[1]
        return True
