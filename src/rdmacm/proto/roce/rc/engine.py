"""A reliable connection: both halves behind one stream of packets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rdmacm.proto.roce.opcodes import IS_RESPONSE
from rdmacm.proto.roce.rc.codes import BTH
from rdmacm.proto.roce.rc.requester import Requester
from rdmacm.proto.roce.rc.responder import Responder
from rdmacm.proto.roce.work import WC, AccessFlag, Memory, Packet, RecvWork, SendWork, WCOpcode, WCStatus


@dataclass(frozen=True, slots=True)
class RcAttributes:
    """What connects two engines: the QP attributes that reach RTS. ``timeout`` is in seconds, 0 for never."""

    qp_num: int
    dest_qp_num: int
    sq_psn: int
    rq_psn: int
    path_mtu: int = 1024
    timeout: float = 0.067
    retry_cnt: int = 7
    rnr_retry: int = 7
    min_rnr_timer: int = 12
    max_rd_atomic: int = 16
    max_dest_rd_atomic: int = 16
    access: AccessFlag = (
        AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
    )
    pkey: int = 0xFFFF


class RcEngine:
    """Driven by the user's posts, :meth:`packet_received` and :meth:`timer`.

    What it wants comes out of :meth:`packets_to_send`, :attr:`deadline` and :meth:`completions`. Nothing a peer sends
    raises: what does not fit is counted in :attr:`dropped`.
    """

    def __init__(self, attributes: RcAttributes, memory: Memory) -> None:
        a = attributes
        self._recvs: deque[RecvWork] = deque()
        self._completions: list[WC] = []
        self._qp_num = a.qp_num
        self._dropped = 0
        self.requester = Requester(
            dest_qp_num=a.dest_qp_num,
            sq_psn=a.sq_psn,
            mtu=a.path_mtu,
            complete=self._completions.append,
            timeout=a.timeout,
            retry_cnt=a.retry_cnt,
            rnr_retry=a.rnr_retry,
            max_rd_atomic=a.max_rd_atomic,
            pkey=a.pkey,
        )
        self.responder = Responder(
            dest_qp_num=a.dest_qp_num,
            rq_psn=a.rq_psn,
            mtu=a.path_mtu,
            access=a.access,
            memory=memory,
            receive=self._next_recv,
            complete=self._completions.append,
            max_dest_rd_atomic=a.max_dest_rd_atomic,
            min_rnr_timer=a.min_rnr_timer,
            pkey=a.pkey,
        )

    def _next_recv(self) -> RecvWork | None:
        return self._recvs.popleft() if self._recvs else None

    @property
    def failed(self) -> bool:
        """Whether the connection is over."""
        return self.requester.failed

    @property
    def dropped(self) -> int:
        """Packets that were received and ignored."""
        return self._dropped + self.requester.dropped + self.responder.dropped

    def post_send(self, work: SendWork) -> None:
        """Queue a send, write, read or atomic."""
        self.requester.post(work)

    def post_recv(self, work: RecvWork) -> None:
        """Queue a buffer for a message; flushed at once where the connection is over."""
        if self.failed:
            self._completions.append(WC(work.wr_id, WCStatus.WR_FLUSH_ERR, WCOpcode.RECV))
        else:
            self._recvs.append(work)

    def packet_received(self, data: memoryview, now: float) -> None:
        """A packet for this QP: BTH to the end of the padding; ICRC, addresses and P_Key have been checked."""
        if len(data) < 12:
            self._dropped += 1
            return
        opcode, flags, _, destination, word = BTH.unpack_from(data)
        pad = flags >> 4 & 3
        if flags & 0xF or destination & 0xFFFFFF != self._qp_num or len(data) < 12 + pad:
            self._dropped += 1
            return
        body = data[12 : len(data) - pad]
        psn = word & 0xFFFFFF
        if IS_RESPONSE[opcode]:
            self.requester.received(opcode, psn, body, now)
            if self.requester.failed:
                self.flush()
        else:
            status = self.responder.received(opcode, psn, flags & 0x80 | word >> 31, body)
            if status is not None:
                self.flush()

    @property
    def deadline(self) -> float | None:
        """When :meth:`timer` wants to be called, in the time of ``now``."""
        return self.requester.deadline

    def timer(self, now: float) -> None:
        """The deadline has come."""
        self.requester.timer(now)
        if self.requester.failed:
            self.flush()

    def packets_to_send(self, now: float, limit: int = 128) -> list[Packet]:
        """Up to ``limit`` packets, answers first."""
        out = self.responder.packets(limit)
        if len(out) < limit:
            out += self.requester.packets(now, limit - len(out))
        return out

    def completions(self) -> list[WC]:
        """Completions since the last call, oldest first."""
        found = self._completions[:]
        self._completions.clear()
        return found

    def flush(self) -> None:
        """To the error state: everything that was posted completes as flushed, after what failed."""
        self.requester.fail(WCStatus.WR_FLUSH_ERR)
        self.responder.fail(WCStatus.WR_FLUSH_ERR)
        while self._recvs:
            self._completions.append(WC(self._recvs.popleft().wr_id, WCStatus.WR_FLUSH_ERR, WCOpcode.RECV))
