"""How packets leave and arrive: the seam below the software device.

A wire is UDP port 4791 of a network namespace (:mod:`rdmacm.soft.wire.udp`) or a simulated network
(:mod:`rdmacm.testing`). It carries RoCEv2 packets, from the BTH to the end of the ICRC. The wire reads their
destination queue pair numbers if several processes share it, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from socket import AF_INET, AF_INET6, inet_ntop
from typing import NamedTuple, Protocol, TypeAlias

from rdmacm.address import interface_text
from rdmacm.proto.roce.grh import DEFAULT_HOP_LIMIT
from rdmacm.proto.wire import Buffer
from rdmacm.provider import Tap

__all__ = [
    "IpFields",
    "PacketBuffer",
    "Received",
    "SocketAddress",
    "Undelivered",
    "Wire",
    "WirePath",
    "WireRoute",
    "group_key",
    "group_of",
]


class WirePath(NamedTuple):
    """A local address and one of a peer: ``local`` and ``remote`` are packed IP addresses.

    ``scope_id`` is the interface index if they are link-local or ``remote`` is a multicast group, else 0.
    """

    local: bytes
    remote: bytes
    scope_id: int = 0

    def __str__(self) -> str:
        """The peer's address, for messages."""
        host = inet_ntop(AF_INET if len(self.remote) == 4 else AF_INET6, self.remote)
        return f"{host}%{interface_text(self.scope_id)}" if self.scope_id else host


#: A socket address of IPv4 or IPv6, as Python's sockets return it.
SocketAddress: TypeAlias = "tuple[str, int] | tuple[str, int, int, int]"


class IpFields(NamedTuple):
    """Fields of the IP header of a received packet, 8 bits each.

    - ``traffic_class``: IPv4's type of service.
    - ``hop_limit``: IPv4's time to live.
    """

    traffic_class: int = 0
    hop_limit: int = DEFAULT_HOP_LIMIT


class PacketBuffer(bytearray):
    """Memory for a received packet.

    - ``ip_fields``: the :class:`IpFields` of the packet, if the wire was asked to report them; else the usual ones.
    """

    __slots__ = ("ip_fields",)

    def __init__(self, source: int | bytes, ip_fields: IpFields | None = None) -> None:
        super().__init__(source)
        self.ip_fields: IpFields = ip_fields or IpFields()


#: (data, segment, source, destination) of a packet that was received, or with ``segment`` > 0 of a train of packets of
#: that many bytes, of which the last may be shorter. ``data`` is valid until the next ``receive()``. ``source`` is a
#: socket address, ``destination`` a packed local address, or of a multicast packet its :func:`group_key`. ``data`` is a
#: view of a :class:`PacketBuffer`, or of an object without fields of the IP header.
Received: TypeAlias = "tuple[memoryview, int, SocketAddress, bytes]"


def group_key(group: bytes, ifindex: int) -> bytes:
    """A multicast group on an interface: the packed address, and the index of the interface in four bytes more."""
    return group + ifindex.to_bytes(4, "big")


def group_of(destination: bytes) -> bytes:
    """The packed address of the destination of a packet, of which a multicast group is a :func:`group_key`."""
    return destination if len(destination) in (4, 16) else destination[:-4]


class Undelivered(NamedTuple):
    """A packet of this host that the network reports it has not delivered. Anybody may have forged the report."""

    #: The packet from the BTH on: its first bytes, possibly few.
    quote: bytes
    #: The address it was sent to, packed.
    destination: bytes
    #: ECONNREFUSED (a closed port), EHOSTUNREACH, ENETUNREACH, EACCES (prohibited) or another errno.
    errno: int
    #: The packed address of the host that reports it; empty if this host has refused to send the packet.
    reporter: bytes


class WireRoute(Protocol):
    """A path prepared for sending, for senders that use it often."""

    #: The addresses of both ends.
    path: WirePath
    #: The host part of the socket address that packets from the peer have.
    remote_host: str
    #: The UDP port that packets leave from.
    source_port: int
    #: Whether the path has refused trains: the packets for it are made one by one.
    no_trains: bool


#: The names of the counters of packets and of bytes, from BTH to ICRC, sent and received, of packets that the system
#: has refused to send, and of the packets of multicast groups among those that were sent and received.
TRAFFIC = (
    *("sent_pkts", "sent_bytes", "rcvd_pkts", "rcvd_bytes", "send_err"),
    *("multicast_xmit_packets", "multicast_rcv_packets"),
)


class Wire(Protocol):
    """A wire; only one thread at a time uses it."""

    #: The upper 12 bits of the queue pair numbers whose packets arrive here, 1 to 4095. Known once the wire is open.
    slots: Sequence[int]
    #: The first of them. Communication ids have it as their upper 12 bits.
    slot: int
    #: Packets that were lost or took the slow way, by reason.
    counters: Counter[str]
    #: Packets and bytes that have passed, by the names of :data:`TRAFFIC`; those of the compiled core are added when
    #: somebody asks (:meth:`rdmacm.soft.device.multiplexer.QPMultiplexer.count_traffic`).
    traffic: Counter[str]
    #: If set, is called with every packet and train that passes (:data:`rdmacm.provider.Tap`).
    tap: Tap | None
    #: Set once a DREQ or DREP was sent: it may be lost, and then the peer sends a DREQ after :meth:`close`.
    leaves_peers: bool
    #: If set, is called with each connection request of this process that the network reports as undelivered, during
    #: :meth:`receive`, :meth:`resume_requests` or :meth:`send`. A wire that gets no such reports never calls it.
    on_undelivered: Callable[[Undelivered], None] | None
    #: If set, is called with each packet that may be a connection request, before anything is done with it, and with
    #: its source and destination. True if it is taken. Set while too many requests arrive.
    hold_request: Callable[[memoryview, SocketAddress, bytes], bool] | None

    def open(self) -> None:
        """Begin to receive. EADDRINUSE if the port is taken, EACCES if another user's processes share it."""

    def claim_slot(self) -> None:
        """Add one to ``slots``. EUSERS if none is left, EBUSY or another errno if that fails now."""

    def close(self) -> None:
        """Stop to receive, and release every descriptor."""

    def abandon(self) -> None:
        """In a child of fork(2): close the child's copies of descriptors, without an effect on the parent."""

    def filenos(self) -> Sequence[int]:
        """Descriptors that poll readable when :meth:`receive` has something; none before :meth:`open`."""

    def unread_request_fds(self) -> Sequence[int]:
        """Descriptors that poll readable while a connection request waits that this process leaves to others.

        The processes that listen read these requests. They may be gone or busy, so a request that waits long has to be
        taken here, see :meth:`resume_requests`.
        """

    def resume_requests(self) -> bool:
        """If a request waits there, read requests again with :meth:`receive`. Return whether one waits."""

    def receive(self, skip_poll: bool = False) -> Sequence[Received]:
        """Return what has arrived, a bounded number of datagrams; never waits.

        With ``skip_poll`` only the socket that was busy last may be read: for callers that call again at once.
        """

    def route(self, path: WirePath, traffic_class: int = 0, hop_limit: int = 0) -> WireRoute:
        """Prepare to send along a path. ValueError if its addresses are of two families.

        ``traffic_class``, 8 bits, and ``hop_limit``, 1 to 255, are those of the IP header; hop limit 0: the system's.
        """

    def send(self, route: WireRoute, buffers: Sequence[Buffer], segment: int = 0) -> bool:
        """Send a packet, or with ``segment`` a train. False if the system had no room: the packet is lost."""

    def can_segment(self) -> int:
        """How many bytes a train may have; 0 if trains cannot be sent."""

    def listen(self, service_id: int, local: bytes | None) -> object:
        """Receive requests for a service id, at one local address or any (None). Returns a token."""

    def unlisten(self, token: object) -> None:
        """End a :meth:`listen`."""

    def report_ip_fields(self) -> None:
        """Have :class:`IpFields` in each :class:`PacketBuffer` from now on."""

    def join_group(self, group: bytes, ifindex: int) -> None:
        """Receive the packets for QP 0xFFFFFF of a multicast group that arrive at an interface. The wire is open.

        The host is a member of the group there until :meth:`leave_group`. A group is joined once at a time. ENODEV: the
        interface is gone; EMFILE or ENOBUFS: the system has no room for another membership.
        """

    def leave_group(self, group: bytes, ifindex: int) -> None:
        """End a :meth:`join_group`. Does nothing if the wire was closed meanwhile."""
