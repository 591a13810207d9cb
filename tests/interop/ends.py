"""What an end of a connection can do, whichever device it is on, and how two programs take turns with it.

``verbs_peer`` is an end on rdma-core, ``soft_peer`` one on this package; ``operations`` is written for either.
This imports neither. Numbers are those of ``infiniband/verbs.h``.
"""

from __future__ import annotations

import struct
import time
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
    "Region",
    "Remote",
    "Status",
    "WcFlag",
    "WcOpcode",
    "Work",
    "pattern",
]

#: Seconds after which what an end waits for does not come any more; the machine may be an emulated one.
PATIENCE = 30.0
#: Work requests that each queue of an end has room for.
QUEUE = 128
#: Bytes that an application may send along with a REQ, a REP and a REJ.
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
    BIND_MW = 8
    SEND_WITH_INV = 9


class WcOpcode(IntEnum):
    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    RECV = 128
    RECV_RDMA_WITH_IMM = 129


class Status(IntEnum):
    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
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


class Remote(NamedTuple):
    """The peer's memory."""

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


class Completion(NamedTuple):
    wr_id: int
    status: int
    opcode: int
    byte_len: int
    #: Immediate data, or the key that was invalidated.
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
    """An event, acknowledged. ``id`` is what its device understands."""

    kind: int
    status: int
    id: Any
    param: Param


@dataclass(frozen=True)
class Attributes:
    """What a queue pair has been given by its connection."""

    path_mtu: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    retry_cnt: int
    rnr_retry: int
    timeout: int
    min_rnr_timer: int

    @classmethod
    def of(cls, attr: object) -> Self:
        """Those of a queue pair's attributes, which have these names on either device."""
        return cls(*(getattr(attr, field.name) for field in fields(cls)))


def pattern(size: int, salt: int = 0) -> bytes:
    """Bytes that are wrong wherever one of them is in the wrong place: numbers, each in four bytes.

    None begins like an Ethertype, as Wireshark would take what follows it for a packet of that kind.
    """
    first = 0xA0000000 | salt * 0x10001 & 0xFFFFFFF
    return struct.pack(f">{size // 4 + 1}I", *range(first, first + size // 4 + 1))[:size]


class Device(ABC):
    """A program's device: where its ends come from, and the events of all of them."""

    name: str
    #: The path's MTU in bytes, which both ends know before they connect.
    mtu = 1024
    #: What the memory of a window has to allow.
    window_access = Access(0)

    def __init__(self) -> None:
        self._requests: deque[Event] = deque()

    @abstractmethod
    def listen(self, address: str, port: int) -> None:
        """Begin to take requests."""

    @abstractmethod
    def answer(self, request: Event) -> End:
        """The end that a request asks for, with a queue pair."""

    @abstractmethod
    def call(self, address: str, port: int) -> End:
        """An end that knows its way to a listener, with a queue pair."""

    @abstractmethod
    def next_event(self, seconds: float) -> Event:
        """The next event; TimeoutError."""

    def event(self, *kinds: EventKind, seconds: float = PATIENCE) -> Event:
        """The next event, which has to be of those kinds. Requests wait until they are asked for."""
        if EventKind.CONNECT_REQUEST in kinds and self._requests:
            return self._requests.popleft()
        deadline = time.monotonic() + seconds
        while True:
            event = self.next_event(max(0.0, deadline - time.monotonic()))
            if event.kind in kinds:
                return event
            if event.kind == EventKind.CONNECT_REQUEST:
                self._requests.append(event)
            elif event.kind != EventKind.TIMEWAIT_EXIT:
                expected = " or ".join(kind.name for kind in kinds)
                raise AssertionError(f"{event} where {expected} was expected")


#: What private data begins with: the operation's number and the sender's memory.
_HEADER = struct.Struct("!BQII")


@dataclass
class End(ABC):
    """One end of a connection. ``connect()`` comes once memory and receives are ready, ``finish()`` in the end."""

    device: Device
    #: The request that a passive end answers.
    request: Event | None
    #: The operation's number, which a passive end has from its request.
    number: int = 0
    #: The event that made the connection. A passive kernel whose RTU was lost learns of a short one by its end alone.
    established: Event | None = field(default=None, init=False)

    # -- what a device brings ---------------------------------------------------------------------------

    @abstractmethod
    def region(self, content: bytes, access: int = Access.LOCAL_WRITE) -> Region: ...

    @abstractmethod
    def window(self, region: Region) -> int:
        """The key of the whole region, for writing, that the peer may invalidate; only once connected."""

    @abstractmethod
    def post_receive(self, wr_id: int, pieces: Sequence[Piece]) -> None: ...

    @abstractmethod
    def post(self, *works: Work) -> None: ...

    @abstractmethod
    def completions(self, of_sends: bool, number: int) -> list[Completion]:
        """So many, waiting for them; TimeoutError."""

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

    # -- what they have in common -----------------------------------------------------------------------

    def private_data(self, message: str, remote: Remote = NOWHERE) -> bytes:
        """As much as a message takes."""
        head = _HEADER.pack(self.number, *remote)
        return head + pattern(PRIVATE_DATA[message] - len(head), self.number)

    def connect(self, region: Region | None = None, param: Param = Param()) -> Remote:
        """Connect or accept, tell the peer of a region, and return what it tells."""
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
        """End the connection, or wait until the peer does."""
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
