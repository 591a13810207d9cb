"""The state of a reliable connection: one object, which the requester and the responder share.

It has fields and no behaviour. The functions of :mod:`~rdmacm.proto.roce.rc.requester`,
:mod:`~rdmacm.proto.roce.rc.responses` and :mod:`~rdmacm.proto.roce.rc.responder` work on it;
:class:`~rdmacm.proto.roce.rc.engine.RcEngine` is the object with its entry points. PSNs and MSNs have 24 bits and wrap
(:mod:`rdmacm.proto.roce.psn`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rdmacm.proto.constants import PSN_MASK
from rdmacm.proto.engine import EngineCounters, SharedReceives
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.work import WC, Memory, RecvWork, SendWork

_NO_ICRC = Icrc(bytes(4), bytes(4), 0)


class Resource:
    """A responder resource: what is kept of a request to answer it again (InfiniBand Architecture 9.4.4).

    READs, atomics and ATOMIC WRITEs have one of the ``max_dest_rd_atomic`` resources. That of a FLUSH is not kept: all
    that its answer needs is its PSN, and rxe's requester does not limit their number.
    """

    __slots__ = ("address", "first_psn", "last_psn", "length", "memory", "operation", "original", "rkey")

    def __init__(
        self, operation: int, first_psn: int, packets: int, rkey: int, address: int, length: int, original: int = 0
    ):
        #: READ, ATOMIC, ATOMIC_WRITE or FLUSH of ``Operation``.
        self.operation: int = operation
        #: PSNs of its response.
        self.first_psn: int = first_psn
        self.last_psn: int = (first_psn + packets - 1) & PSN_MASK
        #: READ: the memory to send, ``length`` in bytes; 0 bytes for an ATOMIC WRITE or FLUSH.
        self.rkey: int = rkey
        self.address: int = address
        self.length: int = length
        #: READ: what ``rkey`` is looked up in; it differs from the connection's on XRC alone.
        self.memory: Memory | None = None
        #: The value that was there before an atomic.
        self.original: int = original


class Response:
    """Packets the responder has to send: an ACK, a NAK, the value of an atomic, or what is left of a READ response.

    FLUSH and ATOMIC WRITE are answered by a READ response of no bytes.
    """

    __slots__ = ("address", "is_repeated", "last_psn", "length", "msn", "offset", "psn", "resource", "syndrome")

    address: int
    last_psn: int
    length: int
    offset: int
    psn: int

    def __init__(self, psn: int, syndrome: int, msn: int, resource: Resource | None = None, *, repeated: bool = False):
        #: PSNs of the packets still to be sent. Only a READ response has more than one.
        self.psn = self.last_psn = psn
        self.syndrome: int = syndrome
        self.msn: int = msn
        #: What is answered; None for an ACK or NAK.
        self.resource: Resource | None = resource
        #: Whether it was answered before.
        self.is_repeated: bool = repeated
        #: READ: the memory to send, ``length`` bytes of which ``offset`` are sent.
        self.address = self.length = self.offset = 0


@dataclass(slots=True, eq=False, repr=False)
class RcState:
    """See the module. Fields marked RTR or RTS are set by the transition to that state and constant afterwards."""

    qp_num: int
    #: The memory that the peer may touch.
    memory: Memory
    #: Where receives come from; None: from ``recv_queue``.
    shared: SharedReceives | None = None
    #: Shared by the engines of a device. ``dropped`` has the reasons ``length``, ``opcode``, ``version``, ``qpn``,
    #: ``state``, ``pkey``, ``icrc``; and of packets that pass these checks ``sequence``, ``duplicate``, ``not ready``
    #: (no receive was posted), ``refused`` and ``answer`` (to no request that is outstanding).
    counters: EngineCounters = field(default_factory=EngineCounters)

    # -- what the owner reads --------------------------------------------------------------------------

    #: Completions that the owner has not taken yet, oldest first.
    completed: list[WC] = field(default_factory=list)
    #: Whether the connection has ended. Everything posted has completed; a last NAK may still have to be sent.
    failed: bool = False
    #: The status of the completion that reported the error, as a text; empty if there was none.
    failure: str = ""
    #: When the retransmission or RNR timer is due, in the time of the caller's clock; None while it does not run.
    deadline: float | None = None

    # -- the path --------------------------------------------------------------------------------------

    #: The ICRC of packets to the peer, and of packets from it.
    icrc_out: Icrc = _NO_ICRC
    icrc_in: Icrc = _NO_ICRC
    #: Packed addresses, for :attr:`icrc_in` once the peer's port is known.
    local_address: bytes = b""
    remote_address: bytes = b""
    #: RTR: payload bytes of a packet (PMTU).
    path_mtu: int = 0
    #: RTR: the P_Keys that packets may have.
    accepted_pkeys: frozenset[int] = frozenset()
    #: RTR: the first half of a BTH (``BTH_HALVES``) without opcode and flags, that is P_Key and destination queue pair.
    send_bth: int = 0

    # -- packets received ------------------------------------------------------------------------------

    #: The IPv4 identification that the next packet probably has: 0, unless the peer counts.
    identification: int = 0

    # -- requester: posted requests --------------------------------------------------------------------

    #: RTS: whether sends may be posted.
    can_send: bool = False
    #: Requests that were posted and have no PSNs yet.
    pending_sends: deque[SendWork] = field(default_factory=deque)
    #: Requests that have PSNs and are not complete, oldest first.
    outstanding: deque[SendWork] = field(default_factory=deque)
    #: Requests of READs, atomics, FLUSHes and ATOMIC WRITEs whose response is outstanding.
    outstanding_reads: int = 0
    #: RTS: how many of them may be outstanding.
    max_rd_atomic: int = 0
    #: SQD: no request is begun.
    paused: bool = False

    # -- requester: sequence numbers and window --------------------------------------------------------

    #: The PSN to be sent next. It runs ahead to ``end_psn`` and returns to retransmit.
    next_psn: int = 0
    #: One past the last PSN that was given to a request.
    end_psn: int = 0
    #: The oldest PSN that is not acknowledged.
    unacked_psn: int = 0
    #: Index in ``outstanding`` of the request that ``next_psn`` belongs to, or of one before it.
    send_index: int = 0
    #: Packets that may be outstanding.
    window: int = 0
    #: RTS: what ``window`` falls to when a packet is lost.
    loss_window: int = 0
    #: RTS: packets of a message from one ACK request to the next; packets of one part of a READ.
    ack_interval: int = 0

    # -- requester: timers and retries -----------------------------------------------------------------

    #: RTS: seconds to wait for an acknowledgement, 0 for ever.
    timeout: float = 0.0
    #: RTS: retransmissions without progress; 7 means seven (it is a limit, unlike 7 of ``rnr_retry``).
    retry_cnt: int = 0
    #: RTS: attempts after RNR NAKs; 7 is for ever (InfiniBand Architecture 9.7.5.2.8).
    rnr_retry: int = 0
    #: How many of each are left until there is progress.
    retries_left: int = 0
    rnr_retries_left: int = 0
    #: Whether packets are being retransmitted: other signs of the same loss are ignored until there is progress.
    retransmitting: bool = False
    #: Whether the peer sent an RNR NAK: nothing is sent before ``deadline``.
    rnr_waiting: bool = False

    #: Whether FLUSHes get rxe's ICRC at first (:mod:`rdmacm.proto.roce.icrc`): the last that the peer answered had it.
    #: No other device with FLUSH is known but this package, which takes both, so rxe's is tried first.
    flush_icrc_twice: bool = True

    #: Answers that were for no request that is outstanding, or ACKs of one whose response is missing.
    stray_answers: int = 0

    # -- responder: requests ---------------------------------------------------------------------------

    #: RTR: whether requests are executed.
    can_receive: bool = False
    #: Receives that were posted, oldest first. Empty with a shared receive queue.
    recv_queue: deque[RecvWork] = field(default_factory=deque)
    #: What the peer may do: bits of ``AccessFlag``.
    access: int = 0
    #: The timer code of RNR NAKs, 0 to 31.
    min_rnr_timer: int = 0
    #: ePSN, the PSN of the next request.
    expected_psn: int = 0
    #: One past the last PSN of a message that was executed as a whole.
    executed_psn: int = 0
    #: Messages executed: the MSN of acknowledgements.
    msn: int = 0
    #: Whether a NAK was sent for ``expected_psn``: later packets are dropped without another one.
    nak_sent: bool = False
    #: The operation of the message in progress, a value of ``Operation``; 0 between messages.
    operation: int = 0
    #: Bytes of the message in progress that have arrived.
    message_offset: int = 0
    #: SEND in progress: its receive, and the bytes that fit.
    current_recv: RecvWork | None = None
    recv_capacity: int = 0
    #: WRITE in progress: its R_Key, address and length.
    write_target: tuple[int, int, int] = (0, 0, 0)

    # -- responder: responses --------------------------------------------------------------------------

    #: The PSN of an ACK or NAK to be sent before all ``responses``, -1 if there is none; and its AETH.
    ack_psn: int = -1
    ack_aeth: int = 0
    #: The other responses, in the order of their requests.
    responses: deque[Response] = field(default_factory=deque)
    #: The latest READs, atomics and ATOMIC WRITEs, at most ``max_dest_rd_atomic``.
    resources: deque[Resource] = field(default_factory=deque)
    #: RTR: how many of them may be outstanding.
    max_dest_rd_atomic: int = 0
