"""The options of rsockets: setsockopt() and getsockopt(), rsocket(7)."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import index

from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.rsocket.messages import MAX_MAPPINGS, decoded_size, encoded_size
from rdmacm.verbs.attr import DeviceAttr

#: The level of the options below, ``<rdma/rsocket.h>``.
SOL_RDMA = 0x10000
RDMA_SQSIZE = 0
RDMA_RQSIZE = 1
RDMA_INLINE = 2
RDMA_IOMAPSIZE = 3
RDMA_ROUTE = 4

#: Limits of a queue: librdmacm's.
_MIN_QUEUE, _MAX_QUEUE = 16, 0xFFFE
#: Limits of a ring in bytes.
_MIN_BUFFER, _MAX_BUFFER = 32, 1 << 30
_LINGER = struct.Struct("ii")


@dataclass(slots=True)
class StreamOptions:
    """The options of one socket; those of a listener are copied to the sockets that it accepts.

    Buffers are in bytes, queues in work requests, ``linger`` in seconds (None: close() waits as long as the connection
    lasts), ``keep_idle`` in seconds.
    """

    send_buffer: int = 1 << 17
    receive_buffer: int = 1 << 17
    send_queue: int = 384
    receive_queue: int = 384
    inline: int = 64
    mappings: int = 0
    reuse_address: bool = False
    v6only: bool = False
    keepalive: bool = False
    keep_idle: int = 7200
    linger: int | None = None
    #: ``struct ibv_path_data``, to use instead of resolving the route; empty for none.
    route: bytes = b""
    #: Options that are accepted and kept, and have no effect, by level and number.
    others: tuple[tuple[tuple[int, int], int], ...] = ()

    def with_sizes_of(self, other: StreamOptions) -> StreamOptions:
        """These options, with the sizes that a connection was made with."""
        return replace(self, **{name: getattr(other, name) for name in _SIZES})

    def fitted(self, limits: DeviceAttr) -> StreamOptions:
        """The same, with the sizes of queues reduced to what a device has."""
        most = min(limits.max_qp_wr, limits.max_cqe // 2)
        return replace(self, send_queue=min(self.send_queue, most), receive_queue=min(self.receive_queue, most))


def check_int(value: int) -> None:
    """OverflowError: it is no int of C; TypeError: it is no integer."""
    if not -(1 << 31) <= index(value) < 1 << 31:
        raise OverflowError("Python int too large to convert to C int")


def _limited(low: int, high: int) -> Callable[[int], int]:
    return lambda value: min(max(value, low), high)


def _table_size(value: int) -> int:
    return decoded_size(encoded_size(min(max(value, 0), MAX_MAPPINGS)))


#: Options that have no effect: what they ask for is so anyway, or does not exist here.
_KEPT = {
    (socket.SOL_SOCKET, socket.SO_OOBINLINE): 0,
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    (socket.IPPROTO_TCP, socket.TCP_MAXSEG): 2048,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 75,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 9,
}
#: Options with a number: the field, and the value that is kept for one that is set.
_NUMBERS: dict[tuple[int, int], tuple[str, Callable[[int], int | bool]]] = {
    # A ring is of two halves.
    (socket.SOL_SOCKET, socket.SO_RCVBUF): (
        "receive_buffer",
        lambda value: min(max(value, _MIN_BUFFER) + 1 & ~1, _MAX_BUFFER),
    ),
    (socket.SOL_SOCKET, socket.SO_SNDBUF): ("send_buffer", _limited(_MIN_BUFFER, _MAX_BUFFER)),
    (socket.SOL_SOCKET, socket.SO_REUSEADDR): ("reuse_address", bool),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): ("keepalive", bool),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): ("keep_idle", _limited(1, (1 << 31) - 1)),
    (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY): ("v6only", bool),
    (SOL_RDMA, RDMA_SQSIZE): ("send_queue", _limited(_MIN_QUEUE, _MAX_QUEUE)),
    (SOL_RDMA, RDMA_RQSIZE): ("receive_queue", _limited(_MIN_QUEUE, _MAX_QUEUE)),
    (SOL_RDMA, RDMA_INLINE): ("inline", _limited(0, _MAX_QUEUE)),
    (SOL_RDMA, RDMA_IOMAPSIZE): (
        "mappings",
        _table_size,
    ),
}
#: Options whose values count when the connection is made.
_SIZES = frozenset(("receive_buffer", "send_buffer", "send_queue", "receive_queue", "inline", "mappings"))


def set_option(
    options: StreamOptions, level: int, optname: int, value: int | bytes | None, *, is_connected: bool
) -> None:
    """Set an option. ENOPROTOOPT: there is no such option; EINVAL: the value, or too late."""
    key = level, optname
    if key == (SOL_RDMA, RDMA_ROUTE):
        if not isinstance(value, bytes | bytearray | memoryview) or is_connected:
            raise cm_error(errno.EINVAL, "RDMA_ROUTE takes paths as bytes, before the connection", "setsockopt")
        options.route = bytes(value)
    elif key == (socket.SOL_SOCKET, socket.SO_LINGER):
        try:
            is_on, seconds = _LINGER.unpack(value)  # type: ignore[arg-type]
        except (struct.error, TypeError):
            raise cm_error(errno.EINVAL, "SO_LINGER takes two ints as bytes", "setsockopt") from None
        options.linger = seconds if is_on else None
    elif key in _NUMBERS:
        field, kept = _NUMBERS[key]
        if is_connected and field in _SIZES:
            raise cm_error(errno.EINVAL, "sizes are set before the connection", "setsockopt")
        number = _number(value)
        if number < 0:
            raise cm_error(errno.EINVAL, f"{number} is less than 0", "setsockopt")
        setattr(options, field, kept(number))
    elif key in _KEPT:
        options.others = (*(each for each in options.others if each[0] != key), (key, _number(value)))
    else:
        raise _unknown(level, optname, "setsockopt")


def get_option(options: StreamOptions, level: int, optname: int) -> int | bytes:
    """The value of an option. ENOPROTOOPT: there is no such option."""
    key = level, optname
    if key == (SOL_RDMA, RDMA_ROUTE):
        return options.route
    if key == (socket.SOL_SOCKET, socket.SO_LINGER):
        return _LINGER.pack(options.linger is not None, options.linger or 0)
    if key in _NUMBERS:
        return int(getattr(options, _NUMBERS[key][0]))
    if key in _KEPT:
        return dict(options.others).get(key, _KEPT[key])
    raise _unknown(level, optname, "getsockopt")


def _number(value: int | bytes | None) -> int:
    if isinstance(value, int):
        check_int(value)
        return value
    try:
        return int(struct.unpack("i", value)[0])  # type: ignore[arg-type]
    except (struct.error, TypeError):
        raise cm_error(errno.EINVAL, "the value is not an int", "setsockopt") from None


def _unknown(level: int, optname: int, step: str) -> RdmaError:
    return cm_error(errno.ENOPROTOOPT, f"rsockets have no option {optname} at level {level}", step)
