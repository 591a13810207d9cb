"""What is known of a connection: its ends, its handshake, and its two halves."""

from __future__ import annotations

from dataclasses import dataclass, field
from socket import AF_INET, inet_ntop
from typing import TypeAlias

from rdmacm.address import Gid
from rdmacm.constants import PortSpace
from rdmacm.proto.cm.messages import REJ, REQ
from rdmacm.proto.constants import PKEY_BITS
from rdmacm.trace.halves import Direction

#: Events of a connection that are kept, without repetitions, and P_Keys.
_MOST_EVENTS, _MOST_PKEYS = 128, 16

#: Kinds of connections, and of what may have been meant to become one.
RC, UC, UD, XRC, IWARP, TCP, SA, ARP, ND = "RC", "UC", "UD", "XRC", "iWARP", "TCP", "SA", "ARP", "ND"


@dataclass(slots=True)
class Event:
    """An arrow of the sequence diagram: who sends, 0 or 1, and what; or a note, of neither.

    ``count`` is how often it was sent, ``last`` when it was for the last time.
    """

    time: int
    sender: int | None
    label: str
    detail: str = ""
    count: int = 1
    last: int = 0
    #: What tells a repetition from another message of the same text.
    key: object = None

    @property
    def text(self) -> str:
        """The label, the detail, and how often it was sent."""
        again = f" (sent {self.count} times)" if self.count > 1 and self.sender is not None else ""
        times = f" ({self.count} times)" if self.count > 1 and self.sender is None else ""
        return f"{self.label} {self.detail}".rstrip() + again + times


@dataclass(slots=True)
class End:
    """One end. ``address`` is packed: an IP address, a GID, or a LID in two bytes."""

    address: bytes
    port: int | None = None
    qpn: int | None = None
    comm_id: int | None = None
    psn: int | None = None

    @property
    def host(self) -> str:
        """The address as text."""
        return address_text(self.address)

    @property
    def name(self) -> str:
        """The address and the port as text, such as ``10.0.0.1:7471``."""
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(slots=True)
class Unreachable:
    """ICMP errors of one kind: the sender's address, type and code, and for "too big" the MTU.

    ``about``: the end whose packets they quote; ``last``: the time of the last one.
    """

    version: int
    sender: bytes
    type: int
    code: int
    mtu: int = 0
    count: int = 1
    about: int = 0
    last: int = 0

    @property
    def kind(self) -> tuple[int, int, bytes, int]:
        """What errors of one kind have in common."""
        return self.type, self.code, self.sender, self.about


@dataclass(slots=True, eq=False)
class Connection:
    """A connection, in the order of the packets: ``ends[0]`` has asked for it, or sent its first packet."""

    kind: str
    ends: tuple[End, End]
    first: int
    last: int
    #: From ``ends[0]`` to ``ends[1]``, and back.
    halves: list[Half | None] = field(default_factory=lambda: [None, None])
    events: list[Event] = field(default_factory=list)
    left_out: int = 0
    service_id: int | None = None
    #: Payload bytes of a packet; 0 as long as it is not known.
    mtu: int = 0
    pkeys: set[int] = field(default_factory=set)
    # The handshake: how often each message was sent, by its name.
    sent: dict[str, int] = field(default_factory=dict)
    first_request: int = 0
    last_request: int = 0
    request: REQ | None = None
    rejected: REJ | None = None
    rejected_by: int = 1
    refusal: str = ""
    status: int | None = None
    private_data: bytes = b""
    unreachable: list[Unreachable] = field(default_factory=list)
    established: int | None = None
    closed_by: int | None = None
    #: iWARP: why the stream was terminated.
    terminated: str = ""
    #: SA: the attribute that was asked for, and the status of the answer.
    attribute: str = ""

    @property
    def is_acknowledged(self) -> bool:
        """Whether the transport has acknowledgements."""
        return self.kind in (RC, XRC)

    @property
    def is_connected(self) -> bool:
        """Whether data could move."""
        return self.established is not None

    @property
    def port_space(self) -> str:
        """The port space of the service id, or "" if it is not one of rdma_cm."""
        if self.service_id is None or self.service_id >> 32:
            return ""
        try:
            return PortSpace(self.service_id >> 16).name
        except ValueError:
            return ""

    @property
    def port(self) -> int | None:
        """The port that was asked for."""
        return self.ends[1].port

    def note(self, now: int, sender: int | None, label: str, detail: str = "", key: object = None) -> None:
        """Add an event, or count it as a repetition if it has the key of an earlier one."""
        if key is not None:
            for event in reversed(self.events[-16:]):
                if event.key == key and event.sender == sender and event.label == label:
                    event.count += 1
                    event.last = now
                    return
        if len(self.events) == _MOST_EVENTS:
            self.left_out += 1
            return
        self.events.append(Event(now, sender, label, detail, 1, now, key))

    def add_pkey(self, pkey: int) -> None:
        """Add the P_Key of a packet; its highest bit, that of full members, does not matter."""
        if len(self.pkeys) < _MOST_PKEYS:
            self.pkeys.add(pkey & PKEY_BITS)

    def count(self, name: str) -> int:
        """Count a message of the handshake."""
        self.sent[name] = count = self.sent.get(name, 0) + 1
        return count

    def learn_mtu(self, mtu: int) -> None:
        """Take the payload of a full packet for the MTU, which no handshake has told."""
        self.mtu = mtu
        for half in self.halves:
            if half is not None and mtu:
                half.limit = mtu

    def join(self, side: int, half: Half) -> None:
        """Make a half that of the packets of ``ends[side]``."""
        self.halves[side] = half
        half.connection = self
        other = self.halves[1 - side]
        half.reverse = other
        if other is not None:
            other.reverse = half
        self.ends[1 - side].qpn = half.qpn
        if self.mtu:
            half.limit = self.mtu


class Half(Direction):
    """A direction of a connection that is known."""

    def __init__(self, connection: Connection, pair: Pair, qpn: int, now: int) -> None:
        super().__init__(pair, qpn, now)
        self.connection = connection

    @property
    def mtu(self) -> int:
        """Payload bytes of a packet; 0 if that is not known."""
        return self.connection.mtu

    @property
    def is_acknowledged(self) -> bool:
        """Whether the transport has acknowledgements."""
        return self.connection.is_acknowledged


#: What packets are between: both addresses, packed, one behind the other.
Pair: TypeAlias = bytes


def split(pair: Pair) -> tuple[bytes, bytes]:
    """The two addresses of a pair."""
    middle = len(pair) // 2
    return pair[:middle], pair[middle:]


def address_text(address: bytes) -> str:
    """An address as text: an IP address, a GID, or a LID."""
    if len(address) == 4:
        return inet_ntop(AF_INET, address)
    if len(address) == 2:
        return f"LID {int.from_bytes(address, 'big')}"
    if address[:12] == bytes(10) + b"\xff\xff":
        return inet_ntop(AF_INET, address[12:])
    return str(Gid(address)) if len(address) == 16 else address.hex()
