"""A scripted ibacm, and a provider with an InfiniBand port."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeAlias

from rdmacm.address import Gid, InetAddr
from rdmacm.proto.sa import PATH_FLAGS, PathRecord
from rdmacm.provider import RouteChoice
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, PortState, TransportType
from support.lookups import Nowhere

HERE, THERE = Gid("fe80::10:3"), Gid("fe80::10:5")
IB_PATH = PathRecord(THERE, HERE, dlid=5, slid=4, mtu=4, rate=3, packet_life_time=18)

#: An endpoint of a message: flags, type, and 64 bytes of an address, a name or a path record.
Endpoint: TypeAlias = "tuple[int, int, bytes]"


def path_endpoint(path: PathRecord = IB_PATH, flags: int = PATH_FLAGS) -> Endpoint:
    return flags, 0x10, path.pack()


def reply(tid: int, *endpoints: Endpoint, status: int = 0) -> bytes:
    """An answer as the daemon would make it."""
    body = b"".join(struct.pack("=IHH64s", flags, kind, 0, info) for flags, kind, info in endpoints)
    return struct.pack("=BBB3sHQ", 1, 1, status, b"", 16 + len(body), tid) + body


class Asked:
    """One request, and the connection on which it arrived."""

    def __init__(self, connection: socket.socket, data: bytes) -> None:
        self.connection = connection
        self.tid: int = struct.unpack_from("=Q", data, 8)[0]
        self.endpoints: list[Endpoint] = [
            (flags, kind, info) for flags, kind, _, info in struct.iter_unpack("=IHH64s", data[16:])
        ]

    def answer(self, *endpoints: Endpoint, status: int = 0) -> None:
        self.connection.sendall(reply(self.tid, *endpoints, status=status))


class Daemon:
    """Listens where ibacm would, and calls ``behave`` for each request, in one thread per connection."""

    def __init__(self, rundir: Path, behave: Callable[[Asked], None], *, tcp: bool = False) -> None:
        self.rundir = rundir
        self.behave = behave
        self.asked: list[Asked] = []
        self.connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        if tcp:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self._file = rundir / "ibacm.port"
            self._file.write_text(f"{self._listener.getsockname()[1]}\n")
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._file = rundir / "ibacm.sock"
            self._listener.bind(os.fspath(self._file))
            self._listener.listen()
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                self.connections.append(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while header := connection.recv(16, socket.MSG_WAITALL):
                rest = struct.unpack_from("=H", header, 6)[0] - 16
                asked = Asked(connection, header + (connection.recv(rest, socket.MSG_WAITALL) if rest else b""))
                self.asked.append(asked)
                self.behave(asked)

    def hang_up(self) -> None:
        """End all connections, as a restarted daemon does."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join()
        for connection in self.connections:
            connection.close()
        self._file.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def infiniband_device(state: PortState = PortState.ACTIVE, gid: Gid = HERE) -> Device:
    rows = (GidEntry(gid, 0, 1, GidType.IB, "", 0),)
    port = Port(1, state, LinkLayer.INFINIBAND, Mtu.MTU_4096, Mtu.MTU_2048, rows, (0xFFFF,))
    return Device("ib0", 1, "stub", NodeType.CA, TransportType.IB, 0x100002, (port,))


class WithInfiniBand(Nowhere):
    """A provider with one InfiniBand port; ``choice`` is the route that it finds for IP destinations."""

    def __init__(self, *devices: Device, choice: RouteChoice | None = None) -> None:
        super().__init__()
        self._devices = devices or (infiniband_device(),)
        self._choice = choice

    def devices(self) -> tuple[Device, ...]:
        return self._devices

    def find_route(
        self, destination: InetAddr, source: InetAddr | None, like: PathRecord | None = None
    ) -> RouteChoice | None:
        super().find_route(destination, source)
        return self._choice
