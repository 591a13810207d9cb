"""What the software devices send and receive, as a capture file for Wireshark, with no privilege needed.

The packets are taken where they pass the device's sockets, and the frames around them are made up again
(:mod:`rdmacm.proto.frames`).  The invariant CRC covers the IPv4 identification of a packet, which a socket does not
tell; it is found from the CRC, so that a reader of the file who checks the CRC finds it right.  A packet received whose
CRC no identification explains was damaged, and a comment says so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import Protocol, Self

from rdmacm.errors import cm_error
from rdmacm.proto.frames import udp_frame
from rdmacm.proto.pcapng import Direction, enhanced_packet, interface_description, section_header
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.wire import Buffer, WireError
from rdmacm.provider import Provider, Tap, get_provider

__all__ = ["Capture", "Tap", "Tapped", "capture"]

#: Flows are told apart by what strangers send, so only some are remembered.
_flow = lru_cache(maxsize=256)(Icrc)

_DAMAGED = "the ICRC is wrong"


def _system() -> str:
    """The operating system, as readers of a file show it."""
    if not hasattr(os, "uname"):
        return os.name
    name = os.uname()
    return f"{name.sysname} {name.release}"


class Tapped(Protocol):
    """What shows its packets to a tap: a wire of the software device."""

    tap: Tap | None


class Capture:
    """A capture file being written, in the pcapng format; a file of that name is replaced.

    Each call of :attr:`tap` writes its packets to the file before it returns, so the file of a process that was killed
    ends with the last of them.  Where the file cannot be written (ENOSPC), the capture stops, the log (``rdmacm``)
    has a warning, :attr:`error` is set, and the traffic goes on.

    ``clock`` gives nanoseconds since 1970.  OSError where the file cannot be opened.
    """

    #: Packets in the file.
    packets: int = 0
    #: Why the capture stopped on its own, or None.
    error: OSError | None = None

    def __init__(
        self, path: str | os.PathLike[str], *, interface: str = "rdmacm", clock: Callable[[], int] = time.time_ns
    ) -> None:
        self.path = os.fspath(path)
        self._clock = clock
        # Re-entrant: while a tap runs, this thread may collect garbage, and an id's finalizer may send.
        self._lock = threading.RLock()
        self._tapped: list[Tapped] = []
        self._end = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self._fd = os.open(self.path, flags, 0o666)
        try:
            self._write(section_header("rdmacm", _system()) + interface_description(interface))
        except OSError as error:
            error.filename = self.path
            self.close()
            raise

    # -- where packets come from ----------------------------------------------------------------------

    def attach(self, wire: Tapped) -> None:
        """Take the wire's packets until the capture is closed, or stops; there is one tap to a wire."""
        with self._lock:
            if self._fd >= 0:
                self._tapped.append(wire)
                wire.tap = self.tap

    def tap(
        self,
        outgoing: bool,
        local: bytes,
        remote: bytes,
        source_port: int,
        dest_port: int,
        data: Sequence[Buffer] | memoryview,
        segment: int,
    ) -> None:
        """Write packets to the file; never raises for what is in them or what becomes of the file."""
        with self._lock:
            if self._fd < 0:
                return
            blocks = self._blocks(outgoing, local, remote, source_port, dest_port, data, segment)
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
            "the capture to %s stopped after %d packets: %s", self.path, self.packets, error.strerror or error
        )

    def _blocks(
        self,
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
        now = self._clock()
        step = segment if segment > 0 else max(1, len(whole))
        blocks = []
        # Of a train sent, packet i leaves with identification i; of one received, the next number is a good guess.
        identification = 0
        for at in range(0, len(whole) or 1, step):
            packet = whole[at : at + step]
            comment = ""
            if not outgoing:
                found = _flow(source, destination, source_port, dest_port).solve([packet], identification)
                if found is None:
                    comment = _DAMAGED
                else:
                    identification = found
            with suppress(WireError):  # longer than UDP carries: it cannot have passed
                frame = udp_frame(source, destination, source_port, dest_port, packet, identification=identification)
                blocks.append(enhanced_packet(frame, now, direction, comment))
            identification = identification + 1 & 0xFFFF
        return blocks

    # -- the file -------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        """Write whole blocks, or none."""
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
        """Stop, and close the file; again is no matter."""
        with self._lock:
            for wire in self._tapped:
                if wire.tap == self.tap:
                    wire.tap = None
            self._tapped.clear()
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def capture(path: str | os.PathLike[str], provider: str | Provider | None = None) -> Capture:
    """Write every packet of this process's devices to a file, until the capture is closed.

    ``provider``: as of :class:`rdmacm.CmId`; there is one capture of it at a time, the latest. ENOENT, EACCES and the
    like where the file cannot be made.

    >>> from rdmacm.testing import Fabric
    >>> with capture("/dev/null", Fabric().host("a", "10.0.0.1/24").provider) as packets:
    ...     packets.packets
    0
    """
    try:
        found = Capture(path)
    except OSError as error:
        raise cm_error(error.errno or 0, error.strerror or str(error), "capture", os.fspath(path)) from error
    try:
        found.attach(get_provider(provider))
    except BaseException:
        found.close()
        raise
    return found
