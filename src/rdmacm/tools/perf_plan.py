"""A measurement of ``rdmacm perf``: what the client asks the server for, and the result.

The private data of the client's request describes the measurement, in network byte order: ``rPf2``, operation, flags (1
latency, 2 blocking, 4 bidirectional), two reserved bytes, size, depth; then R_Key and address of the client's buffer,
which the server uses in the other direction. The private data of the answer describes the server's buffer: ``rPf2``,
R_Key, address. At the end the client tells the server the result, and the server what it has used of the processor.
"""

from __future__ import annotations

import errno
import math
import struct
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag

from rdmacm.errors import cm_error
from rdmacm.tools.measure import STATISTICS
from rdmacm.verbs.enums import AccessFlag, QPType, WROpcode


class Op(IntEnum):
    """The operation that is measured."""

    SEND = 0
    WRITE = 1
    READ = 2


class _Flag(IntFlag):
    LATENCY = 1
    BLOCKING = 2
    BIDIRECTIONAL = 4


#: The private data of the request and of the answer, as the module describes.
_REQUEST = struct.Struct(">4sBBHII")
_BUFFER = struct.Struct(">IQ")
_ANSWER = struct.Struct(">4sIQ")
_MAGIC = b"rPf2"
#: What a client has measured: count, lost and received; seconds and its use of the processor; the latency.
_SUMMARY = struct.Struct(f">QQQdd{len(STATISTICS)}d")
#: An end's use of the processor.
_USE = struct.Struct(">d")
#: Limits of the size in bytes and of the depth in work requests.
MAX_SIZE, MAX_DEPTH = 16 << 20, 1024
OPCODES = {Op.SEND: WROpcode.SEND, Op.WRITE: WROpcode.RDMA_WRITE, Op.READ: WROpcode.RDMA_READ}
#: What the peer may do with a buffer.
ACCESS = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE
#: The outstanding work requests are posted in this many batches, each with one signaled request.
BATCHES = 4
#: The operations of each type of queue pair.
_OPS = {QPType.RC: tuple(Op), QPType.UC: (Op.SEND, Op.WRITE), QPType.UD: (Op.SEND,)}


@dataclass(frozen=True, slots=True)
class Plan:
    """A measurement. Either ``seconds`` or ``count`` is not 0 and ends it."""

    op: Op
    #: Bytes of each operation.
    size: int
    #: Work requests outstanding.
    depth: int
    #: Whether latency is measured, not bandwidth.
    latency: bool
    #: Whether both ends sleep, not poll.
    blocking: bool
    seconds: float = 0.0
    #: Number of operations.
    count: int = 0
    #: RC, UC or UD.
    qp_type: QPType = QPType.RC
    #: Whether the server does the same in the other direction at the same time.
    bidirectional: bool = False
    #: Seconds from one report to the next; 0 for none.
    interval: float = 0.0
    #: Work requests that the client posts together; 0 for a fourth of ``depth``.
    post_list: int = 0

    @property
    def flags(self) -> _Flag:
        """The flags of the request."""
        chosen = {_Flag.LATENCY: self.latency, _Flag.BLOCKING: self.blocking, _Flag.BIDIRECTIONAL: self.bidirectional}
        return _Flag(sum(flag for flag, is_set in chosen.items() if is_set))

    @property
    def mode(self) -> str:
        """``polling`` or ``blocking``."""
        return "blocking" if self.blocking else "polling"

    @property
    def batch(self) -> int:
        """Work requests that are posted together."""
        return self.post_list or max(1, self.depth // BATCHES)

    def as_dict(self) -> dict[str, object]:
        """Return JSON data."""
        return {
            "type": self.qp_type.name.lower(),
            "op": self.op.name.lower(),
            "size": self.size,
            "depth": self.depth,
            "mode": self.mode,
            "kind": "latency" if self.latency else "bandwidth",
        }

    @property
    def fault(self) -> str:
        """Why there is no such measurement; an empty text if there is."""
        kind = self.qp_type.name
        if self.op not in _OPS[self.qp_type]:
            return f"{kind} has no {self.op.name}"
        if self.latency and self.qp_type is not QPType.RC and self.op is not Op.SEND:
            return f"nothing tells the latency of {self.op.name} over {kind}"
        if self.latency and self.bidirectional:
            return "latency has no second direction"
        if self.post_list > self.depth:
            return f"lists of {self.post_list} are longer than the depth of {self.depth}"
        if self.post_list and (self.latency or self.bidirectional or self.qp_type is not QPType.RC):
            return "lists can be chosen for the bandwidth of one direction over RC"
        return ""

    def is_data(self, length: int) -> bool:
        """Whether a message of this length is one that is measured; a one-sided operation has empty ones."""
        return length == (self.size if self.op is Op.SEND else 0)

    def told_apart(self, length: int) -> int:
        """The length of a message that tells figures of this length: one more if a measured one is as long.

        iWARP has no immediate data to mark it with.
        """
        return length + self.is_data(length)

    def pack(self, rkey: int = 0, address: int = 0) -> bytes:
        """Return the private data of the request, with R_Key and address of the client's buffer."""
        head = _REQUEST.pack(_MAGIC, self.op, self.flags, 0, self.size, self.depth)
        return head + _BUFFER.pack(rkey, address)

    @classmethod
    def unpack(cls, data: bytes, qp_type: QPType = QPType.RC) -> Plan | None:
        """Parse the private data of a request; return None for one that the server does not support."""
        if len(data) < _REQUEST.size:
            return None
        magic, op, flags, _, size, depth = _REQUEST.unpack_from(data)
        if (
            magic != _MAGIC
            or op not in OPCODES
            or flags > sum(_Flag)
            or not 0 < size <= MAX_SIZE
            or not 0 < depth <= MAX_DEPTH
        ):
            return None
        made = cls(Op(op), size, depth, bool(flags & _Flag.LATENCY), bool(flags & _Flag.BLOCKING))
        made = replace(made, qp_type=qp_type, bidirectional=bool(flags & _Flag.BIDIRECTIONAL))
        return None if made.fault else made

    @staticmethod
    def buffer_of(data: bytes) -> tuple[int, int]:
        """R_Key and address of the client's buffer, from the private data of a request; 0 and 0 without it."""
        found: tuple[int, int] = (0, 0)
        if len(data) >= _REQUEST.size + _BUFFER.size:
            found = _BUFFER.unpack_from(data, _REQUEST.size)
        return found


def answer_of(data: bytes, peer: str) -> tuple[int, int]:
    """R_Key and address of the server's buffer, from the private data of its answer; EPROTO for another program's."""
    magic, rkey, address = _ANSWER.unpack_from(data) if len(data) >= _ANSWER.size else (b"", 0, 0)
    if magic != _MAGIC:
        raise cm_error(errno.EPROTO, "the server is not 'rdmacm perf -s'", "connect", peer)
    return rkey, address


def pack_answer(rkey: int, address: int) -> bytes:
    """Return the private data of the answer."""
    return _ANSWER.pack(_MAGIC, rkey, address)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a measurement."""

    plan: Plan
    #: Number of operations measured.
    count: int
    #: Duration of the measurement.
    seconds: float
    #: ``min``, ``mean``, ``p50``, ``p99`` and ``max`` in microseconds; empty for bandwidth.
    latency_us: dict[str, float]
    #: UC and UD: how many of the operations did not arrive.
    lost: int = 0
    #: The operations of the server that have arrived, in a bidirectional measurement.
    received: int = 0
    #: What was reported at each interval: ``seconds`` since the begin, ``count`` and ``bytes_per_second``.
    intervals: list[dict[str, float]] = field(default_factory=list)
    #: What part of a processor the client and the server have used, 1.0 for all of one; None if it is not known.
    client_use: float | None = None
    server_use: float | None = None
    #: Whether it has ended early, by an interrupt.
    is_interrupted: bool = False

    @property
    def arrived(self) -> int:
        """Operations that have arrived, in both directions."""
        return self.count - self.lost + self.received

    @property
    def bytes_per_second(self) -> float:
        """Bytes of payload per second, in both directions."""
        return self.arrived * self.plan.size / self.seconds

    def as_dict(self) -> dict[str, object]:
        """Return JSON data."""
        return self.plan.as_dict() | {
            "count": self.count,
            "lost": None if self.plan.qp_type is QPType.RC else self.lost,
            "received": self.received if self.plan.bidirectional else None,
            "bytes": self.arrived * self.plan.size,
            "seconds": round(self.seconds, 6),
            "latency_us": self.latency_us or None,
            "bytes_per_second": round(self.bytes_per_second),
            "messages_per_second": round(self.arrived / self.seconds, 1),
            "processors": {"client": _rounded(self.client_use), "server": _rounded(self.server_use)},
            "interrupted": self.is_interrupted,
            "intervals": self.intervals if self.plan.interval else None,
        }

    def pack(self) -> bytes:
        """Return what the client tells the server."""
        times = [self.latency_us.get(name, math.nan) for name in STATISTICS]
        use = math.nan if self.client_use is None else self.client_use
        return _SUMMARY.pack(self.count, self.lost, self.received, self.seconds, use, *times)


def _rounded(use: float | None) -> float | None:
    return None if use is None else round(use, 3)


#: Bytes of :meth:`Result.pack`.
SUMMARY_SIZE = _SUMMARY.size
#: The use of a processor that no machine has: the peer's figure is wrong.
_TOO_MANY = 1e5


def result_of(data: bytes | bytearray | memoryview, plan: Plan, server_use: float | None) -> Result | None:
    """The server's view of what a client has told it; None if that is no result."""
    if len(data) < _SUMMARY.size:
        return None
    count, lost, received, seconds, use, *times = _SUMMARY.unpack_from(data)
    if lost > count or not 0 < seconds < math.inf:
        return None
    known = [each for each in times if 0 <= each < math.inf]
    latency = dict(zip(STATISTICS, known, strict=True)) if len(known) == len(times) else {}
    return Result(plan, count, seconds, latency, lost, received, [], _known(use), server_use)


def pack_use(use: float) -> bytes:
    """Return what the server tells the client: its use of the processor."""
    return _USE.pack(use)


def use_of(data: bytes | bytearray | memoryview) -> float | None:
    """The server's use of the processor, from its message."""
    return _known(_USE.unpack_from(data)[0]) if len(data) >= _USE.size else None


def _known(use: float) -> float | None:
    return use if 0 <= use < _TOO_MANY else None
