"""Capture files for Wireshark with the packets of the software devices. No privilege is needed.

Packets are captured at the device's sockets, and the headers below are restored (:mod:`rdmacm.proto.frames`). The
invariant CRC covers the IPv4 identification, which a socket does not give. It is computed from the CRC, so that the CRC
of the captured packet is valid. If no identification matches the CRC, the packet was damaged; the capture marks it with
a comment.

Of an ICMP error about a connection request, a socket gives the errno and the first bytes of the request. The capture
has an error of the code that means the same.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import Self

from rdmacm.errors import cm_error
from rdmacm.interrupts.protection import renew_in_child
from rdmacm.proto.frames import udp_frame, unreachable_frame
from rdmacm.proto.pcapng import Direction, enhanced_packet, interface_description, section_header
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.wire import Buffer, WireError
from rdmacm.provider import Provider, Tapped, TellsUndelivered, get_provider

#: Bounded, because peers choose the ports that distinguish flows.
_flow = lru_cache(maxsize=256)(Icrc)

_DAMAGED = "the ICRC is wrong"
#: The code of "destination unreachable" by errno, of IPv4 and of IPv6.
_CODES = {
    errno.ECONNREFUSED: (3, 4),
    errno.EHOSTUNREACH: (1, 3),
    errno.ENETUNREACH: (0, 0),
    errno.EACCES: (13, 1),
}
#: Peers whose local address is kept in mind.
_MOST_PEERS = 4096
#: Bytes of an Ethernet header.
_ETHERNET = 14
_FLUSH = bytes([Opcode.RC_FLUSH])


def _system() -> str:
    """The operating system, for the header of the file."""
    if not hasattr(os, "uname"):
        return os.name
    name = os.uname()
    return f"{name.sysname} {name.release}"


class Capture:
    """An open capture file in the pcapng format. An existing file is replaced.

    Each call of :attr:`tap` writes its packets before it returns, so the file of a killed process is complete. If the
    file cannot be written (ENOSPC), the capture stops with a warning to the logger ``rdmacm``, :attr:`error` is set,
    and the traffic is not affected.

    ``path`` may be an open file descriptor, which stays open: of a pipe, for example. ``clock`` returns nanoseconds
    since 1970. OSError if the file cannot be opened.

    Attributes:

    - ``packets``: the number of packets in the file.
    - ``error``: the error that stopped the capture, or None.
    - ``path``: the path of the file, or the descriptor.
    """

    packets: int = 0
    error: OSError | None = None

    def __init__(
        self, path: str | os.PathLike[str] | int, *, interface: str = "rdmacm", clock: Callable[[], int] = time.time_ns
    ) -> None:
        self.path: int | str = path if isinstance(path, int) else os.fspath(path)
        self._clock = clock
        # Reentrant, because a garbage collection during a tap may run the finalizer of an id, which sends packets.
        self._lock = threading.RLock()
        renew_in_child(self)
        #: The sources of packets.
        self._tapped: list[Tapped] = []
        #: The local address and UDP port of the last packet to each peer, and the peer's port.
        self._flows: dict[bytes, tuple[bytes, int, int]] = {}
        #: The size of the file in bytes: the end of the last whole block.
        self._end = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self._fd = os.dup(path) if isinstance(path, int) else os.open(path, flags, 0o666)
        try:
            self._write(section_header("rdmacm", _system()) + interface_description(interface))
        except OSError as error:
            error.filename = str(self.path)
            self.close()
            raise

    # -- packets -------------------------------------------------------------------------------------

    def attach(self, wire: Tapped) -> None:
        """Capture the packets of a wire, or of a provider, until the capture is closed or stops.

        A wire has one tap at a time.
        """
        with self._lock:
            if self._fd < 0:
                return
            self._tapped.append(wire)
        # Without the lock: the wire takes its own, with which it calls the tap.
        wire.tap = self.tap
        if isinstance(wire, TellsUndelivered):
            wire.undelivered_tap = self.undelivered
        if self._fd < 0:  # closed meanwhile
            self._detach(wire)

    def _detach(self, wire: Tapped) -> None:
        if wire.tap == self.tap:
            wire.tap = None
        if isinstance(wire, TellsUndelivered) and wire.undelivered_tap == self.undelivered:
            wire.undelivered_tap = None

    def tap(
        self,
        outgoing: bool,
        local: bytes,
        remote: bytes,
        source_port: int,
        dest_port: int,
        data: Sequence[bytes | bytearray | memoryview] | memoryview,
        segment: int,
    ) -> None:
        """Write packets to the file (:data:`~rdmacm.provider.Tap`). Never raises, not even if the write fails."""
        self.write(self._clock(), outgoing, local, remote, source_port, dest_port, data, segment)

    def write(
        self,
        nanoseconds: int,
        outgoing: bool,
        local: bytes,
        remote: bytes,
        source_port: int,
        dest_port: int,
        data: Sequence[Buffer] | memoryview,
        segment: int,
    ) -> None:
        """As :meth:`tap`, for packets that passed at a time, in nanoseconds since 1970."""
        if self._fd < 0:
            return
        if outgoing:
            if len(self._flows) >= _MOST_PEERS:
                self._flows.clear()
            self._flows[remote] = local, source_port, dest_port
        self._write_blocks(self._blocks(nanoseconds, outgoing, local, remote, source_port, dest_port, data, segment))

    def undelivered(self, quote: bytes, destination: bytes, code: int, reporter: bytes) -> None:
        """Write the ICMP error about a packet (:data:`~rdmacm.provider.UndeliveredTap`). Never raises."""
        flow, codes = self._flows.get(destination), _CODES.get(code)
        if flow is None or codes is None or len(reporter) != len(destination):
            return
        local, source_port, dest_port = flow
        quoted = udp_frame(local, destination, source_port, dest_port, quote)[_ETHERNET:]
        frame = unreachable_frame(reporter, local, codes[len(reporter) == 16], quoted)
        self._write_blocks([enhanced_packet(frame, self._clock(), Direction.INBOUND, "")])

    def _write_blocks(self, blocks: list[bytes]) -> None:
        """Write packets, or stop."""
        with self._lock:
            if self._fd < 0:
                return
            try:
                self._write(b"".join(blocks))
                self.packets += len(blocks)
                return
            except OSError as failure:
                self.error = error = failure
        with suppress(OSError):
            self.close()
        import logging

        logging.getLogger("rdmacm").warning(
            "the capture to %s stopped after %d packets: %s", _place(self.path), self.packets, error.strerror or error
        )

    def _blocks(
        self,
        nanoseconds: int,
        outgoing: bool,
        local: bytes,
        remote: bytes,
        source_port: int,
        dest_port: int,
        data: Sequence[Buffer] | memoryview,
        segment: int,
    ) -> list[bytes]:
        whole = data if isinstance(data, memoryview) else memoryview(b"".join(data))
        source, destination = (local, remote) if outgoing else (remote, local)
        direction = Direction.OUTBOUND if outgoing else Direction.INBOUND
        step = segment if segment > 0 else max(1, len(whole))
        blocks = []
        # Packet i of a sent train has identification i. For received trains the next number is the first to try.
        identification = 0
        for at in range(0, len(whole) or 1, step):
            packet = whole[at : at + step]
            comment = ""
            if not outgoing:
                flow = _flow(source, destination, source_port, dest_port)
                found = flow.solve([packet], identification)
                if found is None and bytes(packet[:1]) == _FLUSH:  # rxe's ICRC is another one
                    found = flow.solve_twice(packet, identification)
                if found is None:
                    comment = _DAMAGED
                else:
                    identification = found
            with suppress(WireError):  # longer than a UDP datagram, so it was not sent
                frame = udp_frame(source, destination, source_port, dest_port, packet, identification=identification)
                blocks.append(enhanced_packet(frame, nanoseconds, direction, comment))
            identification = identification + 1 & 0xFFFF
        return blocks

    # -- the file -------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        """Write all blocks, or none of them."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            if len(left) < len(data):
                with suppress(OSError):
                    os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Stop the capture and close the file. May be called again."""
        with self._lock:
            tapped, self._tapped = self._tapped, []
            fd, self._fd = self._fd, -1
        for wire in tapped:
            self._detach(wire)
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _place(path: str | os.PathLike[str] | int) -> str:
    return f"descriptor {path}" if isinstance(path, int) else os.fspath(path)


def capture(path: str | os.PathLike[str] | int, provider: str | Provider | None = None) -> Capture:
    """Write the packets of this process's devices to a file, until the capture is closed.

    ``path`` may be an open file descriptor. ``provider``: as for :class:`rdmacm.CmId`. A provider has one capture at a
    time, the latest. RdmaError with ENOENT, EACCES and so on if the file cannot be created.

    >>> from rdmacm.testing import Fabric
    >>> with capture("/dev/null", Fabric().host("a", "10.0.0.1/24").provider) as packets:
    ...     packets.packets
    0
    """
    try:
        found = Capture(path)
    except OSError as error:
        raise cm_error(error.errno or 0, error.strerror or str(error), "capture", _place(path)) from error
    try:
        found.attach(get_provider(provider))
    except BaseException:
        found.close()
        raise
    return found
