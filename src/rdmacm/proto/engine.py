"""What a device needs of a wire protocol, and what a new wire (iWARP, say) must provide.

1. **An engine** for each connected queue pair: a class with the methods of :class:`QPEngine`. It has the format of
   packets and their check sums, sequence numbers, acknowledgements, retransmission, and access to the memory that a
   peer names. RoCEv2's is :class:`rdmacm.proto.roce.rc.engine.RcEngine`. (A datagram queue pair has no peer, and an
   engine with methods of its own: :class:`rdmacm.proto.roce.ud.UdEngine`.)
2. **A multiplexer** that finds the queue pair of each packet that arrives, makes engines, and decides which engine may
   send and which timer is due. :class:`rdmacm.soft.device.multiplexer.QPMultiplexer` does this for all engines, and
   finds queue pairs as RoCEv2 does, by the BTH.
3. **A wire** that carries packets (:class:`rdmacm.soft.wire.base.Wire`).
4. **A way for connection managers** to reach each other (:class:`rdmacm.soft.connection_manager.Gsi`).
5. **For ids, a link**, which resolves addresses on the new wire (:class:`rdmacm.soft.ids.link.Link`). If it connects
   without the InfiniBand connection manager, also a connector (:class:`rdmacm.soft.ids.connector.Connector`).

Only the link and the connection managers are needed for connections without data, as on InfiniBand ports here. Another
way to carry RoCEv2 packets is a wire alone, as a simulated network is.

What all wires share stays in the queue pair of the device: the states and attributes of the verbs, the depths of the
queues, local keys, completion queues, and whose packets are accepted.

An engine is sans-IO: it has no socket, clock, thread or randomness of its own. The time ``now`` is an argument, in
seconds of any monotonic clock; packets, completions and the next deadline are fetched from it. Nothing that a peer
sends raises an exception.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from rdmacm.address import DEFAULT_PKEY
from rdmacm.enums import AccessFlag
from rdmacm.proto.wire import Buffer
from rdmacm.proto.work import WC, Memory, RecvWork, SendWork

#: Values of :attr:`QPEngine.to_send`: nothing; one ACK, which may wait for a moment; packets that may not wait.
NOTHING, ACK_ONLY, PACKETS = range(3)

#: The pieces of one ``sendmsg(2)``, and the segment size if they are a train of packets (0: a single packet).
Datagram: TypeAlias = "tuple[list[Buffer], int]"


class RtrAttributes(NamedTuple):
    """The attributes of a queue pair that take it from INIT to RTR, ready to receive (``struct ibv_qp_attr``)."""

    dest_qp_num: int
    #: The PSN of the peer's first request.
    rq_psn: int
    #: Payload bytes of a packet.
    path_mtu: int = 1024
    #: READ and atomic requests of the peer that may be outstanding.
    max_dest_rd_atomic: int = 16
    #: The timer code, 0 to 31, of an RNR NAK.
    min_rnr_timer: int = 12
    #: What the peer may do with registered memory.
    access: AccessFlag = (
        AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
    )
    #: The P_Key of the packets.
    pkey: int = DEFAULT_PKEY


class RtsAttributes(NamedTuple):
    """The attributes of a queue pair that take it from RTR to RTS, ready to send."""

    #: The PSN of the first request.
    sq_psn: int
    #: Seconds to wait for an acknowledgement; 0: without limit.
    timeout: float = 0.067
    #: How often to retransmit without progress.
    retry_cnt: int = 7
    #: How often to try again after an RNR NAK; 7: without limit.
    rnr_retry: int = 7
    #: READ and atomic requests that may be outstanding at the peer.
    max_rd_atomic: int = 16


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What the engines of one device count. They share it, so that the counts outlive the queue pairs.

    Only drops and errors are counted, so a packet that is accepted costs nothing.
    """

    #: Received packets that were not accepted, by reason. Each packet is in it once at the most.
    dropped: Counter[str] = field(default_factory=Counter)
    #: NAKs, timeouts and retries, by the names that :meth:`rdmacm.Context.query_counters` has for them.
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, counts: Iterable[tuple[str, str, int]]) -> None:
        """Add what the compiled core has counted: ``dropped`` or ``errors``, the name, and the count."""
        for counter, name, count in counts:
            (self.dropped if counter == "dropped" else self.errors)[name] += count


class QPEngine(Protocol):
    """The protocol of one connected queue pair, from INIT on.

    Its owner serialises all calls. ``completed`` and ``failed`` are plain attributes, read after every packet.
    """

    #: Completions that the owner has not taken yet, oldest first. The owner clears the list; it is never replaced.
    completed: list[WC]
    #: Whether the connection has ended: by an error, or by :meth:`flush`. Then everything posted has completed. Before
    #: the owner flushes an engine that has raised an exception, it sets this to False.
    failed: bool
    #: The error that has ended it, as a text for the log; empty after :meth:`flush`.
    failure: str

    def set_route(self, local: bytes, remote: bytes, source_port: int) -> None:
        """Send packets from the packed address ``local`` and the port ``source_port`` to ``remote``."""

    def set_peer_port(self, port: int) -> None:
        """Expect packets from this port of the remote address. Called after :meth:`set_route`, before a packet."""

    def ready_to_receive(self, attributes: RtrAttributes) -> None:
        """INIT to RTR: execute and answer the peer's requests from now on."""

    def ready_to_send(self, attributes: RtsAttributes) -> None:
        """RTR to RTS: accept :meth:`post_send` from now on. ValueError before RTR."""

    def set_access(self, access: AccessFlag) -> None:
        """Change what the peer may do, from its next request on."""

    def set_min_rnr_timer(self, code: int) -> None:
        """Change how long a peer has to wait if no receive is posted, as a timer code, 0 to 31."""

    def set_max_dest_rd_atomic(self, count: int) -> None:
        """Change how many READ and atomic requests of the peer may be outstanding."""

    def set_send_attributes(self, attributes: RtsAttributes, now: float) -> None:
        """Change how requests are sent: all attributes but ``sq_psn``. Timers and retries begin again. RTS only."""

    def post_send(self, work: SendWork) -> None:
        """Queue a request. Once the connection has ended it completes as flushed. ValueError before RTS."""

    def post_recv(self, work: RecvWork) -> None:
        """Queue a receive. Once the connection has ended it completes as flushed."""

    def look_up_again(self, lkey: int, look_up: Callable[[Iterable[RecvWork]], None]) -> None:
        """The region of a local key has changed: look up the receives that no message has taken yet.

        ``look_up`` takes the memory away from those that the key does not stand for any more. An engine that knows the
        regions itself does the same without it.
        """

    def pause(self) -> None:
        """RTS to SQD: complete the requests that have begun, begin no other. Posts are still queued."""

    def resume(self) -> None:
        """SQD to RTS."""

    @property
    def drained(self) -> bool:
        """Whether no request that has begun waits for its completion."""

    def flush(self) -> None:
        """To the error state: everything posted completes as flushed.

        Nothing more is sent, except what a connection that failed by itself still has to answer.
        """

    @property
    def deadline(self) -> float | None:
        """When :meth:`timer` has to be called, in the time of ``now``; None for never."""

    def timer(self, now: float) -> None:
        """Do what is due: retransmit, or end the connection."""

    def received(self, data: memoryview, segment: int, now: float) -> int:
        """Process a packet for this queue pair, or with ``segment`` > 0 a train of packets of that many bytes.

        The last packet of a train may be shorter. ``data`` is valid during the call. The owner has checked the
        addresses and, if the wire has them, the ports. Return how many packets were accepted.
        """

    def probe(self) -> Sequence[Buffer]:
        """Return a packet that a live peer answers and that has no other effect, ready for the wire."""

    @property
    def peer_activity(self) -> Hashable:
        """A value that changes when the peer answers :meth:`probe`, and with whatever else of the peer is accepted."""

    @property
    def sent_again(self) -> int:
        """How often the oldest request was sent again since the peer has acknowledged anything."""

    @property
    def to_send(self) -> int:
        """Whether :meth:`datagrams` may return something: NOTHING, ACK_ONLY or PACKETS."""

    def datagrams(self, now: float, limit: int, train: int) -> list[Datagram]:
        """Return up to ``limit`` packets that may be sent now, ready for the wire, acknowledgements included.

        Packets may be joined to trains of up to ``train`` bytes; if that is 0, each packet is by itself.
        """


class SharedReceives(Protocol):
    """A shared receive queue."""

    @property
    def first(self) -> RecvWork | None:
        """The receive that :meth:`take` takes."""

    def take(self) -> RecvWork | None:
        """Take the next receive, for a message; None if the queue is empty."""


#: Makes the engine of a queue pair in INIT: from its number, the memory that its peer may access, its shared receive
#: queue, None without one, and the device's counters.
EngineFactory: TypeAlias = "Callable[[int, Memory, SharedReceives | None, EngineCounters], QPEngine]"
