"""A reliable connection: both halves behind one stream of packets."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from rdmacm.enums import AccessFlag, WCOpcode, WCStatus
from rdmacm.proto.roce.buffers import LocalProtectionError
from rdmacm.proto.roce.icrc import ICRC_LENGTH, RESIDUE, Icrc, crc32
from rdmacm.proto.roce.opcodes import (
    BTH_LENGTH,
    HEADER_LENGTH,
    IS_END,
    IS_RESPONSE,
    OPERATION,
    TRANSPORT_MASK,
    Operation,
)
from rdmacm.proto.roce.psn import PSN_MASK
from rdmacm.proto.roce.rc.codes import (
    ACKNOWLEDGE,
    HALVES,
    LITTLE,
    READ_MIDDLE,
    SEND_MIDDLE,
    SEND_ONLY,
    WRITE_MIDDLE,
    WRITE_ONLY,
)
from rdmacm.proto.roce.rc.requester import COMPLETES_AS, Requester
from rdmacm.proto.roce.rc.responder import NAKS, Responder
from rdmacm.proto.roce.rc.runs import take_run
from rdmacm.proto.roce.rc.trains import Datagram, Trains
from rdmacm.proto.wire import Buffer
from rdmacm.work import WC, Memory, RecvWork, SendWork

__all__ = ["ACK_ONLY", "NOTHING", "PACKETS", "RcEngine", "RtrAttributes", "RtsAttributes"]

#: In the first two words of a packet, all but the opcode, SE, M, PadCnt, FECN, BECN and what follows these.
_FIXED = 0x000FFFFF00FFFFFF
# How long the headers are at least, of the opcodes that are spoken here; 0 for the others.
_HEADERS = bytes(
    HEADER_LENGTH[o] if not o & TRANSPORT_MASK and OPERATION[o] not in {Operation.FLUSH, Operation.ATOMIC_WRITE} else 0
    for o in range(256)
)
_REQUEST_HEADERS = bytes(0 if IS_RESPONSE[o] else _HEADERS[o] for o in range(256))
_MIDDLES = frozenset({SEND_MIDDLE, WRITE_MIDDLE, READ_MIDDLE})
_SHORTEST = BTH_LENGTH + ICRC_LENGTH
#: The longest headers, with the longest path MTU. (The engine checks lengths again, against its own.)
_LONGEST = 40 + 4096 + ICRC_LENGTH


@dataclass(frozen=True, slots=True)
class RtrAttributes:
    """What a queue pair needs to receive (INIT to RTR). ``path_mtu`` is in bytes; ``min_rnr_timer`` a code, 0 to 31."""

    dest_qp_num: int
    rq_psn: int
    path_mtu: int = 1024
    max_dest_rd_atomic: int = 16
    min_rnr_timer: int = 12
    access: AccessFlag = (
        AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
    )
    pkey: int = 0xFFFF


@dataclass(frozen=True, slots=True)
class RtsAttributes:
    """What it needs to send as well (RTR to RTS). ``timeout`` is in seconds, 0 for never."""

    sq_psn: int
    timeout: float = 0.067
    retry_cnt: int = 7
    rnr_retry: int = 7
    max_rd_atomic: int = 16


#: What there is to send (:attr:`RcEngine.to_send`): nothing, an ACK alone, anything else.
NOTHING, ACK_ONLY, PACKETS = range(3)


def _matching(pkey: int) -> frozenset[int]:
    """The P_Keys that may talk to this one: the same partition (0 is none), and not both of them limited members."""
    base = pkey & 0x7FFF
    if not base:
        return frozenset()
    return frozenset({base | 0x8000, base} if pkey & 0x8000 else {base | 0x8000})


class RcEngine:
    """Driven by the user's posts, :meth:`received` and :meth:`timer`.

    What it wants comes out of :meth:`datagrams`, :attr:`deadline` and :meth:`completions`. It is made in the state
    INIT: :meth:`ready_to_receive` and :meth:`ready_to_send` take it on, an error or :meth:`flush` ends it. Nothing a
    peer sends raises: what does not fit is counted in :attr:`dropped`, by reason.

    ``receive`` says where receives come from when that is a shared receive queue: the next one, or None.
    """

    def __init__(self, qp_num: int, memory: Memory, receive: Callable[[], RecvWork | None] | None = None) -> None:
        self.qp_num = qp_num
        #: Whether the connection is over.
        self.failed = False
        #: Packets that were received and not accepted: ``length``, ``opcode``, ``version``, ``qpn``, ``state``,
        #: ``pkey``, ``icrc``, and of those that are in order so far, ``sequence``, ``duplicate``, ``not ready``
        #: (no receive was posted), ``refused`` and ``answer`` (to what was not asked).
        self.dropped: Counter[str] = Counter()
        self._memory = memory
        self._receive = receive
        self._recvs: deque[RecvWork] = deque()
        #: Completions that :meth:`completions` has not returned yet, oldest first.
        self.completed: list[WC] = []
        self._rtr: RtrAttributes | None = None
        self._pkeys: frozenset[int] = frozenset()
        self._common = 0  # the first two words of a packet in the middle of a message, for opcode 0
        self._headers = bytes(256)  # _HEADERS, with 0 for what is not taken in this state
        self._mtu = 0
        self._identification = 0  # of the IPv4 packet that is likely to come next
        self._responder: Responder | None = None
        self._requester: Requester | None = None

    # -- the user -------------------------------------------------------------------------------------

    def ready_to_receive(self, attributes: RtrAttributes) -> None:
        """INIT to RTR: requests of the peer are executed and answered."""
        a = self._rtr = attributes
        self._pkeys = _matching(a.pkey)
        self._mtu = a.path_mtu
        # A full member of the partition is what is most likely to talk to us, and may.
        self._common = (a.pkey | 0x8000) << 32 | self.qp_num if self._pkeys else -1
        self._headers = _REQUEST_HEADERS
        self._responder = Responder(
            qp_num=self.qp_num,
            dest_qp_num=a.dest_qp_num,
            rq_psn=a.rq_psn,
            mtu=a.path_mtu,
            access=a.access,
            memory=self._memory,
            recvs=self._recvs,
            receive=self._receive,
            complete=self.completed.append,
            dropped=self.dropped,
            max_dest_rd_atomic=a.max_dest_rd_atomic,
            min_rnr_timer=a.min_rnr_timer,
            pkey=a.pkey,
        )

    def ready_to_send(self, attributes: RtsAttributes) -> None:
        """RTR to RTS: sends may be posted."""
        r, a = self._rtr, attributes
        if r is None:
            raise ValueError("a queue pair has to be ready to receive before it is ready to send")
        self._headers = _HEADERS
        self._requester = Requester(
            qp_num=self.qp_num,
            dest_qp_num=r.dest_qp_num,
            sq_psn=a.sq_psn,
            mtu=r.path_mtu,
            complete=self.completed.append,
            dropped=self.dropped,
            timeout=a.timeout,
            retry_cnt=a.retry_cnt,
            rnr_retry=a.rnr_retry,
            max_rd_atomic=a.max_rd_atomic,
            pkey=r.pkey,
        )

    def set_access(self, access: AccessFlag) -> None:
        """Change what the peer may do, from its next request on."""
        if self._responder:
            self._responder.access = int(access)

    def set_min_rnr_timer(self, code: int) -> None:
        """Change how long the peer is told to wait where no receive is posted (the code of an RNR NAK)."""
        if self._responder:
            self._responder.min_rnr_timer = code

    def post_send(self, work: SendWork) -> None:
        """Queue a send, write, read or atomic; flushed at once where the connection is over.

        ValueError for what a reliable connection cannot do, and before :meth:`ready_to_send`.
        """
        opcode = COMPLETES_AS[work.opcode]
        if opcode is None:
            raise ValueError(f"{work.opcode!r} cannot be sent on a reliable connection")
        if self.failed:
            self.completed.append(WC(work.wr_id, WCStatus.WR_FLUSH_ERR, opcode, qp_num=self.qp_num))
        elif self._requester is None:
            raise ValueError("the queue pair is not ready to send")
        else:
            self._requester.waiting.append(work)

    def send(self, work: SendWork, flow: Icrc, now: float) -> list[Buffer] | None:
        """:meth:`post_send`, and the packet, where it takes one that may leave at once: its pieces, sealed.

        None where :meth:`datagrams` has to be asked.
        """
        responder, requester = self._responder, self._requester
        if requester is not None and responder is not None and not (requester.waiting or responder.answers):
            packet = requester.lone(work, flow, now)
            if packet is not None:
                return packet
        self.post_send(work)
        return None

    def post_recv(self, work: RecvWork) -> None:
        """Queue a buffer for a message; flushed at once where the connection is over."""
        if self.failed:
            self.completed.append(WC(work.wr_id, WCStatus.WR_FLUSH_ERR, WCOpcode.RECV, qp_num=self.qp_num))
        else:
            self._recvs.append(work)

    def pause(self) -> None:
        """Begin no other request than the one in progress (SQD); posts are still queued."""
        if self._requester:
            self._requester.paused = True

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        if self._requester:
            self._requester.paused = False

    @property
    def drained(self) -> bool:
        """Whether nothing that was begun waits for an answer: after :meth:`pause`, the send queue is drained."""
        return self._requester is None or self._requester.drained

    def flush(self) -> None:
        """To the error state: everything that was posted completes as flushed, and nothing more is sent.

        (Where the connection has failed by itself, but for what it still has to tell the peer.)
        """
        if self._responder and not self.failed:
            self._responder.forget()
        self._fail()

    def _fail(self) -> None:
        """The rest, after what failed."""
        self.failed = True
        self._headers = bytes(256)
        if self._requester:
            self._requester.fail(WCStatus.WR_FLUSH_ERR)
        if self._responder:
            self._responder.fail(WCStatus.WR_FLUSH_ERR)
        while self._recvs:
            work = self._recvs.popleft()
            self.completed.append(WC(work.wr_id, WCStatus.WR_FLUSH_ERR, WCOpcode.RECV, qp_num=self.qp_num))

    def completions(self) -> list[WC]:
        """Completions since the last call, oldest first."""
        found = self.completed[:]
        self.completed.clear()
        return found

    # -- time -----------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When :meth:`timer` wants to be called, in the time of ``now``."""
        requester = self._requester
        return requester.deadline if requester is not None else None

    def timer(self, now: float) -> None:
        """The deadline has come."""
        if self._requester:
            self._requester.timer(now)
            if self._requester.failed and not self.failed:
                self._fail()

    # -- packets --------------------------------------------------------------------------------------

    @property
    def to_send(self) -> int:
        """Whether :meth:`datagrams` may have something: NOTHING, ACK_ONLY or PACKETS.

        An ACK that is all there is may wait for a moment. Others that follow it join it.
        """
        responder, requester = self._responder, self._requester
        if responder is None:
            return NOTHING
        if responder.answers:
            return PACKETS
        if requester is not None and (requester.waiting or requester.next_psn != requester.end_psn):
            if requester.wants_to_send:
                return PACKETS
        if responder.owed < 0:
            return NOTHING
        return ACK_ONLY if responder.owed_aeth < NAKS else PACKETS

    def datagrams(self, flow: Icrc, now: float, limit: int, train: int) -> list[Datagram]:
        """What is to be sent, sealed: up to ``limit`` packets, answers first, but an ACK that is all of them last.

        ``flow`` is the one from here to the peer. ``train`` is how many bytes of packets one train may have; with 0
        each packet is a datagram of its own.
        """
        responder, requester = self._responder, self._requester
        if responder is None or limit <= 0:
            return []
        answers, owed = responder.answers, responder.owed >= 0
        if requester is not None:
            if not answers and len(requester.waiting) == 1:
                lone = requester.lone(requester.waiting[0], flow, now)
                if lone is not None:
                    requester.waiting.clear()
                    return [(lone, 0), (self._acknowledgement(flow), 0)] if owed else [(lone, 0)]
            if not requester.wants_to_send:
                requester = None
        if requester is None and not answers:
            return [(self._acknowledgement(flow), 0)] if owed else []
        out = Trains(flow, train)
        if answers:
            limit -= responder.packets(out, limit)
        if requester is not None:
            requester.packets(out, now, limit - owed)
        if responder.owed >= 0:
            responder.packets(out, 1)
        if not self.failed and (responder.failed or (requester is not None and requester.failed)):
            self._fail()
        return out.close()

    def _acknowledgement(self, flow: Icrc) -> list[Buffer]:
        """The ACK or NAK that is all there is to answer."""
        assert self._responder is not None
        packet = self._responder.acknowledgement()
        return [packet, LITTLE.pack(crc32(packet, flow.base ^ flow.lengths[len(packet) + ICRC_LENGTH]))]

    def received(self, data: memoryview, segment: int, flow: Icrc, now: float) -> int:
        """A packet for this queue pair, or with ``segment`` a train of packets of so many bytes.

        The last one of a train may be shorter. Packets are from their BTH to the end of their ICRC; ``flow`` is the one
        from the peer to here, and the addresses have been found to be those. Returns how many were accepted.
        """
        responder, requester = self._responder, self._requester
        length = len(data)
        if not (segment or self._identification) and _SHORTEST <= length <= _LONGEST:
            # Nearly every small message: a packet that is as it should be, from who sends them one by one.
            half, word = HALVES.unpack_from(data)
            opcode, end = half >> 56, length - ICRC_LENGTH - (half >> 52 & 3)
            headers = self._headers[opcode]
            if (
                headers
                and end >= headers
                and half & _FIXED == self._common
                and crc32(data, flow.base ^ flow.lengths[length]) == RESIDUE
            ):
                psn, body = word & PSN_MASK, data[BTH_LENGTH:end]
                if IS_RESPONSE[opcode]:
                    assert requester is not None
                    if opcode == ACKNOWLEDGE and requester.all_arrived(psn, body[0]):
                        return 1
                    accepted = requester.received(opcode, psn, body, now)
                    if requester.failed:
                        self._fail()
                else:
                    assert responder is not None
                    flags = half >> 48 & 0x80 | word >> 31
                    if opcode == SEND_ONLY:
                        if responder.send_only(psn, flags, body):
                            return 1
                    elif opcode == WRITE_ONLY and responder.write_only(psn, flags, body):
                        return 1
                    accepted = responder.received(opcode, psn, flags, body)
                    if responder.failed:
                        self._fail()
                    if not IS_END[opcode]:
                        responder.turned()
                return int(accepted)
        step = segment or length
        trained = segment == self._mtu + _SHORTEST
        at = count = 0
        identification = self._identification
        first = -1
        while at < length:
            if trained and at + step <= length and data[at] in _MIDDLES:
                taken = self._take_run(data, at, flow, identification, now)
                if taken:
                    if first < 0:
                        first = identification
                    identification = identification + taken & 0xFFFF
                    count += taken
                    at += taken * step
                    continue
            packet = data[at : at + step]
            at += step
            size = len(packet)
            reason = "length"
            if _SHORTEST <= size <= _LONGEST:
                half, word = HALVES.unpack_from(packet)
                opcode, pad = half >> 56, half >> 52 & 3
                reason = ""
                headers = self._headers[opcode]
                if not headers or size < headers + pad + ICRC_LENGTH or half & _FIXED != self._common:
                    reason = self._misfit(half, size)
                if not reason and crc32(packet, flow.start(size, identification)) != RESIDUE:
                    found = flow.solve((packet,), identification)
                    if found is None:
                        reason = "icrc"
                    else:
                        identification = found
            if first < 0:
                first = identification
            identification = identification + 1 & 0xFFFF
            if reason:
                self.dropped[reason] += 1
                continue
            body = packet[BTH_LENGTH : size - ICRC_LENGTH - pad]
            if IS_RESPONSE[opcode]:
                assert requester is not None
                count += requester.received(opcode, word & PSN_MASK, body, now)
                if requester.failed:
                    self._fail()
            else:
                assert responder is not None
                flags = half >> 48 & 0x80 | word >> 31
                count += responder.received(opcode, word & PSN_MASK, flags, body)
                if responder.failed:
                    self._fail()
        # Who began with 0 sends trains that count from there, or packets that are all 0.
        self._identification = identification if first > 0 else 0
        if responder is not None:
            responder.turned()
        return count

    def _misfit(self, half: int, size: int) -> str:
        """Why a packet is not for this queue pair as it is now, its ICRC aside; "" where only the P_Key is another."""
        opcode = half >> 56
        if not _HEADERS[opcode]:
            return "opcode"
        if size < _HEADERS[opcode] + (half >> 52 & 3) + ICRC_LENGTH:
            return "length"
        if half >> 48 & 0xF:
            return "version"
        if half & 0xFFFFFF != self.qp_num:
            return "qpn"
        if not self._headers[opcode]:
            return "state"
        if half >> 32 & 0xFFFF not in self._pkeys:
            return "pkey"
        return ""

    def _take_run(self, data: memoryview, at: int, flow: Icrc, identification: int, now: float) -> int:
        """Take packets of the middle of a message, from byte ``at`` of a train on; how many these are."""
        half: Requester | Responder | None = self._requester if data[at] == READ_MIDDLE else self._responder
        if half is None or self.failed:
            return 0
        try:
            run = half.run()
        except LocalProtectionError:
            run = None  # for the next packet to find out
        if run is None:
            return 0
        taken, asked = take_run(run, self._common, data, at, self._mtu, flow, identification)
        if taken:
            if isinstance(half, Requester):
                half.ran(taken, now)
            else:
                half.ran(taken, asked)
        return taken
