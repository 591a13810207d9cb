"""Servers for :mod:`interop.aborts`: each echoes messages on every connection, until the connection ends.

The kinds are those of the API: ``listen`` and ``aio`` are the endpoints, ``ids`` are bare ids with an event channel,
and ``synchronous`` are bare ids without one. Each answers the message ``count`` with the objects that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable

import rdmacm
from rdmacm import CmEventType, CmId, EventChannel, PortSpace, RdmaError, aio
from rdmacm.errors import CmTimeoutError, CmWouldBlockError, cm_error
from rdmacm.kernel.verbs import opened
from rdmacm.soft.wire.udp import UdpWire
from rdmacm.verbs import CQ, MR, PD, QP, WC, WCStatus
from support.clock import Stopwatch
from support.descriptors import held_for_others

__all__ = ["COUNT", "IDLE", "SERVERS"]

E = CmEventType
#: The message that asks for the server's objects.
COUNT = b"count"
#: Seconds of silence after which a server ends a connection: its client may be gone without a word. A send has a limit
#: as well: siw loses some completions of a queue pair that goes to ERR.
IDLE = 20.0
SIZE = 512
#: Seconds between two looks of a synchronous server at its events.
GLANCE = 0.2
#: Events after which an id has no connection any more.
ENDS = (E.DISCONNECTED, E.REJECTED, E.UNREACHABLE, E.CONNECT_ERROR)

#: The errors of listening for datagrams on iWARP, where the port of both is one TCP socket's, and on other devices.
_NO_DATAGRAMS = (errno.EADDRINUSE, errno.EOPNOTSUPP, errno.ENOSYS)

Ready = Callable[[], object]


def answer(message: bytes) -> bytes:
    """The same message, or the objects of this process."""
    if message != COUNT:
        return message
    gc.collect()
    kinds = Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, CmId | QP | CQ | MR | PD))
    kinds += parts()
    kinds += descriptors()
    return json.dumps(kinds, sort_keys=True).encode()


def parts() -> Counter[str]:
    """What the kernel's provider has to release, by its own account: more than our objects where a release failed."""
    found: Counter[str] = Counter()
    for each in list(opened._opened):
        found.update(f"part {part.rank.name}" for part in list(each._parts.values()))
        found.update(f"refused {part.rank.name}" for part in list(each._refused))
    return found


def descriptors() -> Counter[str]:
    """The descriptors of this process, without those for other processes that share the UDP port.

    And without eventfd(2), of which threads that wait keep a few for the next wait.
    """
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that reads the folder
            found[re.sub(r"\[?\d+\]?", "", os.readlink(f"/proc/self/fd/{fd}"))] += 1
    del found["anon_inode:[eventfd]"]
    found["socket:"] -= sum(held_for_others(each) for each in gc.get_objects() if isinstance(each, UdpWire))
    return found


# -- endpoints ------------------------------------------------------------------------------------------


def serve_listen(provider: str, host: str, port: int, ready: Ready) -> None:
    def echo(peer: rdmacm.Connection) -> None:
        with contextlib.suppress(RdmaError), peer:
            while True:
                peer.send(answer(peer.recv(IDLE)), timeout=IDLE)

    with rdmacm.listen((host, port), provider=provider, max_message=SIZE) as listener:
        ready()
        while True:
            try:
                peer = listener.accept()
            except RdmaError:  # the client gave up
                continue
            threading.Thread(target=echo, args=(peer,), daemon=True).start()


def serve_aio(provider: str, host: str, port: int, ready: Ready) -> None:
    async def echo(peer: aio.AsyncConnection) -> None:
        with contextlib.suppress(RdmaError, TimeoutError):
            while True:
                message = await asyncio.wait_for(peer.recv(), IDLE)
                await asyncio.wait_for(peer.send(answer(message)), IDLE)

    async def serve() -> None:
        async with await aio.start_server(echo, host, port, provider=provider, max_message=SIZE) as server:
            ready()
            await server.serve_forever()

    asyncio.run(serve())


# -- bare ids -------------------------------------------------------------------------------------------


class Echo:
    """The queue pair of an accepted id, and a thread that echoes what comes."""

    def __init__(self, cmid: CmId) -> None:
        self.cmid = cmid
        self.received, self.sent = bytearray(SIZE), bytearray(SIZE)
        self.regions: list[MR] = []

    def accept(self) -> bool:
        """Accept the request, whose client may be gone: False, and the id is destroyed."""
        try:
            self.cmid.create_qp()
            for memory in (self.received, self.sent):
                self.regions.append(self.cmid.reg_msgs(memory))
            self.cmid.post_recv(1, self.regions[0])
            self.cmid.accept()
        except RdmaError:
            self.close()
            return False
        return True

    def run(self) -> None:
        cmid = self.cmid
        with contextlib.suppress(RdmaError):
            while (found := self.wait(cmid.get_recv_comp)).status is WCStatus.SUCCESS:
                reply = answer(bytes(self.received[: found.byte_len]))
                self.sent[: len(reply)] = reply
                cmid.post_recv(1, self.regions[0])
                cmid.post_send(2, self.regions[1], length=len(reply))
                if self.wait(cmid.get_send_comp).status is not WCStatus.SUCCESS:
                    break
        self.close()

    def wait(self, completion: Callable[[float], WC]) -> WC:
        """The next completion. Nobody else fetches the disconnection of a synchronous id."""
        watch = Stopwatch()
        while True:
            try:
                return completion(GLANCE)
            except CmTimeoutError:
                if watch.seconds > IDLE:
                    raise
                if self.cmid.is_synchronous:
                    with contextlib.suppress(CmWouldBlockError), self.cmid.channel.get_event(0) as event:
                        if event.type in ENDS:
                            raise cm_error(errno.ECONNRESET, "the peer has disconnected", "recv") from None

    def close(self) -> None:
        for region in self.regions:
            region.close()
        self.cmid.destroy()


def serve_ids(provider: str, host: str, port: int, ready: Ready) -> None:
    """One thread fetches all events. It listens for datagrams as well, where the device has them."""
    with EventChannel(provider) as channel, contextlib.ExitStack() as listeners:
        for space in (PortSpace.TCP, PortSpace.UDP):
            listener = listeners.enter_context(CmId(channel, space))
            try:
                listener.bind_addr((host, port))
                listener.listen()
            except RdmaError as error:
                if space is PortSpace.TCP or error.errno not in _NO_DATAGRAMS:
                    raise
        ready()
        while True:
            with channel.get_event() as event:
                cmid, kind = event.id, event.type
            if kind is E.CONNECT_REQUEST and cmid.ps is PortSpace.UDP:
                answer_datagram(cmid)
                continue
            if kind is E.CONNECT_REQUEST:
                cmid.context = Echo(cmid)
            echo = cmid.context
            assert isinstance(echo, Echo)
            if kind is E.CONNECT_REQUEST:
                echo.accept()
            elif kind is E.ESTABLISHED:
                threading.Thread(target=echo.run, daemon=True).start()
            elif kind is E.DISCONNECTED:  # its thread sees flushed work requests, and destroys the id
                with contextlib.suppress(RdmaError):
                    cmid.disconnect()
            elif kind in ENDS:
                echo.close()


def answer_datagram(cmid: CmId) -> None:
    with contextlib.suppress(RdmaError):
        cmid.create_qp()
        cmid.accept()
    cmid.destroy()


def serve_synchronous(provider: str, host: str, port: int, ready: Ready) -> None:
    def serve(cmid: CmId) -> None:
        echo = Echo(cmid)
        if echo.accept():
            echo.run()

    with CmId(provider=provider) as listener:
        listener.bind_addr((host, port))
        listener.listen()
        ready()
        while True:
            try:
                cmid = listener.get_request()
            except RdmaError:  # the client gave up
                continue
            threading.Thread(target=serve, args=(cmid,), daemon=True).start()


SERVERS: dict[str, Callable[[str, str, int, Ready], None]] = {
    "listen": serve_listen,
    "aio": serve_aio,
    "ids": serve_ids,
    "synchronous": serve_synchronous,
}
