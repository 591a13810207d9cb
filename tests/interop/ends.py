"""The interface of one end of a connection, on either device; ``operations`` uses it.

``verbs_peer`` implements it with rdma-core, ``soft_peer`` with this package; this module imports neither. Numbers are
those of ``infiniband/verbs.h``.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, Self

__all__ = [
    "NOWHERE",
    "PATIENCE",
    "PRIVATE_DATA",
    "QUEUE",
    "Access",
    "Attributes",
    "Completion",
    "Device",
    "End",
    "Event",
    "EventKind",
    "Flag",
    "Opcode",
    "Param",
    "Piece",
    "Placement",
    "Region",
    "Remote",
    "Selectivity",
    "Status",
    "WcFlag",
    "WcOpcode",
    "Window",
    "Work",
    "pattern",
]

#: Seconds to wait for an event or a completion. The machine may be an emulated one.
PATIENCE = 30.0
#: The capacity of each queue of an end, in work requests.
QUEUE = 128
#: Bytes of private data that an application may send in a REQ, a REP and a REJ.
PRIVATE_DATA = {"request": 56, "reply": 196, "reject": 148}


class EventKind(IntEnum):
    ADDR_RESOLVED = 0
    ROUTE_RESOLVED = 2
    CONNECT_REQUEST = 4
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    TIMEWAIT_EXIT = 15


class Opcode(IntEnum):
    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    FLUSH = 14
    ATOMIC_WRITE = 15


class Placement(IntFlag):
    GLOBAL = 1
    PERSISTENT = 2


class Selectivity(IntEnum):
    RANGE = 0
    MR = 1


class WcOpcode(IntEnum):
    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    FLUSH = 8
    ATOMIC_WRITE = 9
    RECV = 128
    RECV_RDMA_WITH_IMM = 129


class Status(IntEnum):
    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13


class Access(IntFlag):
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    MW_BIND = 16
    ZERO_BASED = 32
    FLUSH_GLOBAL = 1 << 8
    FLUSH_PERSISTENT = 1 << 9


class Flag(IntFlag):
    FENCE = 1
    SIGNALED = 2
    SOLICITED = 4
    INLINE = 8


class WcFlag(IntFlag):
    WITH_IMM = 2
    WITH_INV = 8


class Piece(NamedTuple):
    """A scatter/gather element."""

    addr: int
    length: int
    lkey: int


class Region(ABC):
    """Registered memory."""

    addr: int
    length: int
    lkey: int
    rkey: int

    def piece(self, offset: int, length: int) -> Piece:
        return Piece(self.addr + offset, length, self.lkey)

    @abstractmethod
    def read(self, offset: int = 0, length: int | None = None) -> bytes: ...

    @abstractmethod
    def write(self, data: bytes, offset: int = 0) -> None: ...


class Window(NamedTuple):
    """A memory window; the type of ``mw`` depends on the device."""

    mw: Any
    mw_type: int


class Remote(NamedTuple):
    """A region of the peer."""

    addr: int
    rkey: int
    length: int


NOWHERE = Remote(0, 0, 0)


@dataclass(frozen=True)
class Work:
    """A send work request."""

    opcode: Opcode
    pieces: Sequence[Piece] = ()
    wr_id: int = 0
    flags: int = Flag.SIGNALED
    imm: int = 0
    invalidate: int = 0
    addr: int = 0
    rkey: int = 0
    compare_add: int = 0
    swap: int = 0
    #: ATOMIC_WRITE: the value.
    data: bytes = b""
    #: FLUSH.
    length: int = 0
    placement: int = 0
    selectivity: int = 0


class Completion(NamedTuple):
    wr_id: int
    status: int
    opcode: int
    byte_len: int
    #: Immediate data, or the invalidated key.
    extra: int
    flags: int


@dataclass(frozen=True)
class Param:
    """``struct rdma_conn_param``."""

    responder_resources: int = 16
    initiator_depth: int = 16
    flow_control: int = 0
    retry_count: int = 7
    rnr_retry_count: int = 7
    private_data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Event:
    """An acknowledged event. The type of ``id`` depends on the device."""

    kind: int
    status: int
    id: Any
    param: Param


@dataclass(frozen=True)
class Attributes:
    """The queue pair's attributes that the connection set."""

    path_mtu: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    retry_cnt: int
    rnr_retry: int
    timeout: int
    min_rnr_timer: int

    @classmethod
    def of(cls, attr: object) -> Self:
        """From a queue pair's attributes, which have these names on either device."""
        return cls(*(getattr(attr, field.name) for field in fields(cls)))


def pattern(size: int, salt: int = 0) -> bytes:
    """Consecutive numbers of four bytes, so that misplaced bytes are noticed.

    None begins like an Ethertype: Wireshark would dissect the rest as a packet of that type.
    """
    first = 0xA0000000 | salt * 0x10001 & 0xFFFFFFF
    return struct.pack(f">{size // 4 + 1}I", *range(first, first + size // 4 + 1))[:size]


class Device(ABC):
    """The device of a program: creates its ends and receives the events of all of them."""

    name: str
    #: The path MTU in bytes. Both ends know it before they connect.
    mtu = 1024

    def __init__(self) -> None:
        self._requests: deque[Event] = deque()

    @abstractmethod
    def listen(self, address: str, port: int) -> None:
        """Listen for connection requests: in the port space TCP for RC, and in the port space IB for UC."""

    @abstractmethod
    def answer(self, request: Event) -> End:
        """The passive end for a request, with a queue pair."""

    @abstractmethod
    def call(self, address: str, port: int, unreliable: bool = False) -> End:
        """An active end with a resolved route to a listener, and a queue pair: of type UC if it is unreliable."""

    @abstractmethod
    def next_event(self, seconds: float) -> Event:
        """The next event. TimeoutError if none arrives."""

    def event(self, *kinds: EventKind, seconds: float = PATIENCE) -> Event:
        """The next event. AssertionError if it is of another kind; connection requests are kept for later calls."""
        if EventKind.CONNECT_REQUEST in kinds and self._requests:
            return self._requests.popleft()
        while True:
            event = self.next_event(seconds)
            if event.kind in kinds:
                return event
            if event.kind == EventKind.CONNECT_REQUEST:
                self._requests.append(event)
            elif event.kind != EventKind.TIMEWAIT_EXIT:
                expected = " or ".join(kind.name for kind in kinds)
                raise AssertionError(f"{event} where {expected} was expected")


#: The beginning of private data: the operation's number and the sender's region.
_HEADER = struct.Struct("!BQII")


@dataclass
class End(ABC):
    """One end of a connection. Call ``connect()`` when memory and receives are ready, and ``finish()`` last."""

    device: Device
    #: The request that a passive end answers.
    request: Event | None
    #: The operation's number. A passive end takes it from its request.
    number: int = 0
    #: The event that established the connection: DISCONNECTED if the kernel was passive and the RTU was lost.
    established: Event | None = field(default=None, init=False)

    # -- implemented by each device ----------------------------------------------------------------------

    @abstractmethod
    def region(self, content: bytes, access: int = Access.LOCAL_WRITE) -> Region: ...

    @abstractmethod
    def window(self, mw_type: int) -> Window:
        """A memory window that is not bound."""

    @abstractmethod
    def post_bind(self, window: Window, region: Region, offset: int, length: int, access: int) -> int:
        """Post a signaled bind to a part of a region; return the window's new key. The end must be connected."""

    @abstractmethod
    def post_receive(self, wr_id: int, pieces: Sequence[Piece]) -> None: ...

    @abstractmethod
    def post(self, *works: Work) -> None:
        """Post requests. LOCAL_INV has its key in ``invalidate``."""

    @abstractmethod
    def completions(self, of_sends: bool, number: int) -> list[Completion]:
        """The next ``number`` completions. TimeoutError if they do not arrive."""

    @abstractmethod
    def attributes(self) -> Attributes: ...

    @abstractmethod
    def connect_or_accept(self, param: Param) -> None: ...

    @abstractmethod
    def reject(self, private_data: bytes) -> None: ...

    @abstractmethod
    def disconnect(self) -> None: ...

    @abstractmethod
    def destroy(self) -> None: ...

    # -- the same for both devices -----------------------------------------------------------------------

    def bind(self, window: Window, region: Region, offset: int, length: int, access: int) -> int:
        """Bind a window, and return its new key."""
        key = self.post_bind(window, region, offset, length, access)
        self.sent(0)
        return key

    def private_data(self, message: str, remote: Remote = NOWHERE) -> bytes:
        """As much private data as the message has room for."""
        head = _HEADER.pack(self.number, *remote)
        return head + pattern(PRIVATE_DATA[message] - len(head), self.number)

    def connect(self, region: Region | None = None, param: Param = Param()) -> Remote:
        """Connect or accept, and exchange regions with the peer in the private data; returns the peer's."""
        passive = self.request is not None
        mine, theirs = ("reply", "request") if passive else ("request", "reply")
        own = Remote(region.addr, region.rkey, region.length) if region else NOWHERE
        values = {**vars(param), "private_data": self.private_data(mine, own)}
        self.connect_or_accept(Param(**values))
        late = (EventKind.DISCONNECTED,) if passive else ()
        self.established = self.device.event(EventKind.ESTABLISHED, *late)
        came = (self.request or self.established).param.private_data
        remote = Remote(*_HEADER.unpack_from(came)[1:])
        assert came == self.private_data(theirs, remote), f"private data of the {theirs}: {came.hex()}"
        return remote

    def finish(self, first: bool) -> None:
        """Disconnect, or wait until the peer does."""
        if first:
            self.disconnect()
        event = self.established
        if event is None or event.kind != EventKind.DISCONNECTED:
            event = self.device.event(EventKind.DISCONNECTED)
        assert event.status == 0, event
        if not first:
            self.disconnect()

    def sent(self, *wr_ids: int, status: Status = Status.SUCCESS) -> list[Completion]:
        return self._completed(True, wr_ids, status)

    def received(self, *wr_ids: int, status: Status = Status.SUCCESS) -> list[Completion]:
        return self._completed(False, wr_ids, status)

    def _completed(self, of_sends: bool, wr_ids: Sequence[int], status: Status) -> list[Completion]:
        found = self.completions(of_sends, len(wr_ids))
        what = [(wr_id, _name(Status, status)) for wr_id, status, *_ in found]
        assert what == [(wr_id, status.name) for wr_id in wr_ids], f"completed: {what}"
        return found


def _name(enum: type[IntEnum], value: int) -> str:
    try:
        return enum(value).name
    except ValueError:
        return str(value)
