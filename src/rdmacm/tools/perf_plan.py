"""A measurement of ``rdmacm perf``: what the client asks the server for, and the result.

The private data of the client's request describes the measurement, in network byte order: ``rPf1``, operation, flags (1
latency, 2 blocking, 4 bidirectional), two reserved bytes, size, depth; then R_Key and address of the client's buffer,
which the server uses in the other direction. The private data of the answer describes the server's buffer: ``rPf1``,
R_Key, address.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag

from rdmacm.errors import cm_error
from rdmacm.tools.measure import size_text
from rdmacm.tools.output import table
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
_MAGIC = b"rPf1"
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
        return {
            "type": self.plan.qp_type.name.lower(),
            "op": self.plan.op.name.lower(),
            "size": self.plan.size,
            "depth": self.plan.depth,
            "mode": self.plan.mode,
            "kind": "latency" if self.plan.latency else "bandwidth",
            "count": self.count,
            "lost": None if self.plan.qp_type is QPType.RC else self.lost,
            "received": self.received if self.plan.bidirectional else None,
            "bytes": self.arrived * self.plan.size,
            "seconds": round(self.seconds, 6),
            "latency_us": self.latency_us or None,
            "bytes_per_second": round(self.bytes_per_second),
            "messages_per_second": round(self.arrived / self.seconds, 1),
            "intervals": self.intervals if self.plan.interval else None,
        }


def _what(plan: Plan) -> str:
    kind = "" if plan.qp_type is QPType.RC else f" ({plan.qp_type.name})"
    return f"{plan.op.name.lower()}{kind}{', both ways' if plan.bidirectional else ''}"


def _microseconds(key: str) -> Callable[[Result], str]:
    return lambda result: f"{result.latency_us[key]:.1f}" if result.latency_us else ""


#: The columns of the tables, by title: the text of each in a result. "lost" is shown only for UC and UD.
_LATENCIES: dict[str, Callable[[Result], str]] = {
    "latency": lambda r: f"{_what(r.plan)}{' (half a round trip)' if r.plan.op is Op.SEND else ''}",
    "size": lambda r: size_text(r.plan.size),
    "mode": lambda r: r.plan.mode,
    "count": lambda r: str(r.count),
    "lost": lambda r: str(r.lost),
    **{f"{key} us": _microseconds(key) for key in ("min", "p50", "p99", "max")},
}
_BANDWIDTHS: dict[str, Callable[[Result], str]] = {
    "bandwidth": lambda r: _what(r.plan),
    "size": lambda r: size_text(r.plan.size),
    "depth": lambda r: str(r.plan.depth),
    "count": lambda r: str(r.count + r.received),
    "lost": lambda r: str(r.lost),
    "MB/s": lambda r: f"{r.bytes_per_second / 1e6:.1f}",
    "Gbit/s": lambda r: f"{r.bytes_per_second * 8 / 1e9:.2f}",
    "messages/s": lambda r: f"{r.arrived / r.seconds:,.0f}",
}
#: The columns that are aligned to the left.
_LEFT = ("latency", "bandwidth", "size", "mode")


def text(results: list[Result]) -> str:
    """The results as tables."""
    tables = []
    for is_latency, columns in ((True, _LATENCIES), (False, _BANDWIDTHS)):
        shown = [result for result in results if result.plan.latency is is_latency]
        can_lose = any(result.plan.qp_type is not QPType.RC for result in shown)
        head = [title for title in columns if can_lose or title != "lost"]
        rows = [[columns[title](result) for title in head] for result in shown]
        if rows:
            tables.append(table(head, rows, right=[title for title in head if title not in _LEFT]))
    return "\n".join(tables)
