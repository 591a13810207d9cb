"""The engine of a reliable connection over RoCEv2: requester and responder behind one stream of packets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from rdmacm.enums import AccessFlag, WCStatus
from rdmacm.proto.constants import (
    BTH_LENGTH,
    FLUSH,
    ICRC_LENGTH,
    LONGEST_PACKET,
    LOWEST_NAK_AETH,
    PSN_MASK,
    QPN_MASK,
    SHORTEST_PACKET,
)
from rdmacm.proto.engine import ACK_ONLY, NOTHING, PACKETS, Datagram, RtrAttributes, RtsAttributes
from rdmacm.proto.roce.headers import BTH_HALVES
from rdmacm.proto.roce.icrc import Icrc, icrc_between
from rdmacm.proto.roce.opcodes import HEADER_LENGTH, IS_RESPONSE, TRANSPORT_MASK
from rdmacm.proto.roce.rc import requester, responder, responses
from rdmacm.proto.roce.rc.failure import fail, flush_recv
from rdmacm.proto.roce.rc.request_types import REQUEST_TYPES, UNSUPPORTED
from rdmacm.proto.roce.rc.state import RcState, Resource
from rdmacm.proto.roce.rc.trains import Trains
from rdmacm.proto.wire import Buffer
from rdmacm.proto.work import WC, RecvWork, SendWork

#: By opcode: bytes of its headers at least, 0 for opcodes that a reliable connection does not have.
_HEADER_LENGTHS = bytes(0 if opcode & TRANSPORT_MASK else HEADER_LENGTH[opcode] for opcode in range(256))


def _matching_pkeys(pkey: int) -> frozenset[int]:
    """The P_Keys that match ``pkey``: same partition, one of the two a full member (InfiniBand Architecture 10.9.3)."""
    base = pkey & 0x7FFF
    if not base:
        return frozenset()
    return frozenset({base | 0x8000, base} if pkey & 0x8000 else {base | 0x8000})


@dataclass(slots=True, eq=False, repr=False)
class RcEngine(RcState):
    """Implements :class:`rdmacm.proto.engine.QPEngine`, which describes the methods.

    It is its own state (:class:`RcState`), and begins in the state INIT.
    """

    #: The longest packet, in bytes from its BTH to the end of its ICRC.
    longest_packet: ClassVar[int] = LONGEST_PACKET
    #: By opcode: bytes of its headers at least, 0 for opcodes that it does not accept.
    header_lengths: ClassVar[bytes] = _HEADER_LENGTHS

    # -- the user -------------------------------------------------------------------------------------

    def set_route(self, local: bytes, remote: bytes, source_port: int) -> None:
        self.local_address: bytes = local
        self.remote_address: bytes = remote
        self.icrc_out: Icrc = icrc_between(local, remote, source_port)

    def set_peer_port(self, port: int) -> None:
        self.icrc_in: Icrc = icrc_between(self.remote_address, self.local_address, port)

    def ready_to_receive(self, attributes: RtrAttributes) -> None:
        a = attributes
        self.path_mtu: int = a.path_mtu
        self.accepted_pkeys: frozenset[int] = _matching_pkeys(a.pkey)
        self.send_bth: int = a.pkey << 32 | a.dest_qp_num
        self.expected_psn: int = a.rq_psn & PSN_MASK
        self.executed_psn: int = self.expected_psn
        self.access: int = int(a.access)
        self.min_rnr_timer: int = a.min_rnr_timer
        self.max_dest_rd_atomic: int = a.max_dest_rd_atomic
        self.resources: deque[Resource] = deque(maxlen=a.max_dest_rd_atomic)
        self.can_receive = True

    def ready_to_send(self, attributes: RtsAttributes) -> None:
        if not self.can_receive:
            raise ValueError("a queue pair has to be ready to receive before it is ready to send")
        a = attributes
        self.next_psn: int = a.sq_psn & PSN_MASK
        self.end_psn: int = self.next_psn
        self.unacked_psn: int = self.next_psn
        self._take_send_attributes(a)
        requester.set_window(self)
        self.can_send = True

    def set_access(self, access: AccessFlag) -> None:
        self.access = int(access)

    def set_min_rnr_timer(self, code: int) -> None:
        self.min_rnr_timer = code

    def set_max_dest_rd_atomic(self, count: int) -> None:
        self.max_dest_rd_atomic = count
        self.resources = deque(self.resources, maxlen=count)

    def set_send_attributes(self, attributes: RtsAttributes, now: float) -> None:
        self._take_send_attributes(attributes)
        requester.start_timer(self, now)

    def _take_send_attributes(self, attributes: RtsAttributes) -> None:
        a = attributes
        self.timeout: float = a.timeout
        self.retry_cnt: int = a.retry_cnt
        self.retries_left: int = a.retry_cnt
        self.rnr_retry: int = a.rnr_retry
        self.rnr_retries_left: int = a.rnr_retry
        self.max_rd_atomic: int = a.max_rd_atomic

    def post_send(self, work: SendWork) -> None:
        """See :meth:`QPEngine.post_send`. ValueError also for an opcode that a reliable connection does not send."""
        kind = REQUEST_TYPES[work.opcode]
        if kind is UNSUPPORTED:
            raise ValueError(f"{work.opcode!r} cannot be sent on a reliable connection")
        if self.failed:
            self.completed.append(WC(work.wr_id, WCStatus.WR_FLUSH_ERR, kind.completes, qp_num=self.qp_num))
        elif not self.can_send:
            raise ValueError("the queue pair is not ready to send")
        else:
            self.pending_sends.append(work)

    def post_recv(self, work: RecvWork) -> None:
        if self.failed:
            flush_recv(self, work.wr_id)
        else:
            self.recv_queue.append(work)

    def look_up_again(self, _lkey: int, look_up: Callable[[Iterable[RecvWork]], None]) -> None:
        look_up(self.recv_queue)

    def pause(self) -> None:
        self.paused: bool = True

    def resume(self) -> None:
        self.paused = False

    @property
    def drained(self) -> bool:
        return not self.outstanding

    def flush(self) -> None:
        if not self.failed:
            self.responses.clear()
            self.ack_psn = -1
        fail(self)

    def completions(self) -> list[WC]:
        """Take the completions since the last call, oldest first."""
        found = self.completed[:]
        self.completed.clear()
        return found

    def timer(self, now: float) -> None:
        requester.timer(self, now)

    # -- packets to send ------------------------------------------------------------------------------

    def probe(self) -> list[Buffer]:
        """A duplicate of the last request: a WRITE of no bytes with its PSN. The responder acknowledges it again.

        A duplicate is acknowledged whatever the peer permits (InfiniBand Architecture 9.7.5.1.2, C9-105), takes neither
        a PSN nor a receive, and with no bytes names no memory. TCP's keepalive works in the same way.
        """
        return requester.duplicate(self)

    @property
    def peer_activity(self) -> tuple[int, int, int]:
        # When all requests are acknowledged, the ACK of a duplicate is an answer to no request.
        return self.expected_psn, self.unacked_psn, self.stray_answers

    @property
    def sent_again(self) -> int:
        return self.retry_cnt - self.retries_left

    @property
    def to_send(self) -> int:
        if self.responses:
            return PACKETS
        if (self.pending_sends or self.next_psn != self.end_psn) and requester.wants_to_send(self):
            return PACKETS
        if self.ack_psn < 0:
            return NOTHING
        return ACK_ONLY if self.ack_aeth < LOWEST_NAK_AETH else PACKETS

    def _trains(self, train: int) -> Trains:
        return Trains(self.icrc_out, train)

    def datagrams(self, now: float, limit: int, train: int) -> list[Datagram]:
        """See :meth:`QPEngine.datagrams`. Responses go first, but an ACK without others before it goes last."""
        if limit <= 0:
            return []
        out = self._trains(train)
        has_ack = self.ack_psn >= 0
        if self.responses:
            limit -= responder.packets(self, out, limit)
        if requester.wants_to_send(self):
            requester.packets(self, out, now, limit - has_ack)
        if self.ack_psn >= 0:
            out.end_single()
            responder.packets(self, out, 1)
        return out.close()

    # -- packets received -----------------------------------------------------------------------------

    def received(self, data: memoryview, segment: int, now: float) -> int:
        """See :meth:`QPEngine.received`. Packets are from their BTH to the end of their ICRC."""
        step = segment or len(data) or 1
        accepted, first_identification = 0, -1
        for at in range(0, len(data), step):
            accepted += self._receive_packet(data[at : at + step], now)
            if first_identification < 0:
                first_identification = self.identification
            self.identification: int = self.identification + 1 & 0xFFFF
        # A peer whose first packet had 0 sends trains that count from 0, or packets that all have 0.
        if first_identification <= 0:
            self.identification = 0
        return accepted

    def _receive_packet(self, packet: memoryview, now: float) -> bool:
        """Check one packet and pass it to the requester or the responder; return whether it was accepted.

        Sets ``identification`` to the one its ICRC was made with.
        """
        size = len(packet)
        reason = self._check_headers(packet) if SHORTEST_PACKET <= size <= self.longest_packet else "length"
        if not reason:
            reason = self._solve_icrc(packet)
        if reason:
            self.counters.dropped[reason] += 1
            return False
        half, word = BTH_HALVES.unpack_from(packet)
        body = packet[BTH_LENGTH : size - ICRC_LENGTH - (half >> 52 & 3)]
        return self._execute(half >> 56, word & PSN_MASK, half >> 48 & 0x80 | word >> 31, body, now)

    def _execute(self, opcode: int, psn: int, flags: int, body: memoryview, now: float) -> bool:
        """Process a packet that has passed the checks; return whether it was accepted."""
        if IS_RESPONSE[opcode]:
            return responses.received(self, opcode, psn, body, now)
        return responder.received(self, opcode, psn, flags, body)

    def _solve_icrc(self, packet: memoryview) -> str:
        """Find the IPv4 identification that a packet was sealed with; return "icrc" for a damaged packet.

        A FLUSH may have rxe's ICRC.
        """
        found = self.icrc_in.solve((packet,), self.identification)
        if found is None and packet[0] == FLUSH:
            found = self.icrc_in.solve_twice(packet, self.identification)
        if found is None:
            return "icrc"
        self.identification = found
        return ""

    def _check_headers(self, packet: memoryview) -> str:
        """Return why a packet is not for this queue pair in its state."""
        half, _ = BTH_HALVES.unpack_from(packet)
        opcode = half >> 56
        length = self.header_lengths[opcode]
        if not length:
            return "opcode"
        if len(packet) < length + (half >> 52 & 3) + ICRC_LENGTH:
            return "length"
        if half >> 48 & 0xF:
            return "version"
        if half & QPN_MASK != self.qp_num:
            return "qpn"
        if self.failed or not (self.can_send if IS_RESPONSE[opcode] else self.can_receive):
            return "state"
        return "" if half >> 32 & 0xFFFF in self.accepted_pkeys else "pkey"
