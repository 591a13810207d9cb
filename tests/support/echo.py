"""A server process that sends every message back, over any number of connections, until it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

from rdmacm import CmId, ConnParam, EventChannel, IdOption, OptionLevel
from rdmacm.verbs import MR, AccessFlag, QPCap, QPInitAttr, SendFlag
from support.netns import python_environment

__all__ = ["EchoClient", "EchoServer"]

_SERVER = """
import sys, threading
import rdmacm

def serve(connection):
    with connection:
        for message in connection:
            connection.send(message)

with rdmacm.listen((sys.argv[1], int(sys.argv[2]))) as listener:
    print(listener.port, flush=True)
    for connection in listener:
        threading.Thread(target=serve, args=(connection,)).start()
"""

_SIZE = 4096
_SLOTS = 8


class EchoServer:
    """The process, listening on ``port``."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, host, str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=python_environment(),
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.port = int(line)

    def kill(self) -> str:
        """Kill the process; returns its error output."""
        self.process.send_signal(signal.SIGKILL)
        return self.process.communicate(timeout=20)[1]

    @property
    def resident(self) -> int:
        """Its resident memory in bytes."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * 4096

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        complaints = self.kill()
        assert not complaints or kind is not None, complaints


class EchoClient:
    """An id that is connected to an :class:`EchoServer`, in real time; its events arrive on ``channel``."""

    def __init__(self, host: str, port: int, ack_timeout: int | None = None, retry_count: int = 7) -> None:
        self.channel = EventChannel()
        self.cmid = CmId(self.channel)
        if ack_timeout is not None:
            self.cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, ack_timeout)
        self.cmid.resolve_addr((host, port))
        self.wait()
        self.cmid.resolve_route()
        self.wait()
        self.cmid.create_qp(QPInitAttr(cap=QPCap(64, 64, 1, 1, 64)))
        self.region = MR(self.cmid.pd, bytearray(_SLOTS * _SIZE), AccessFlag.LOCAL_WRITE)
        for slot in range(_SLOTS):
            self.cmid.post_recv(slot, self.region, slot * _SIZE, _SIZE)
        self.count = 0
        self.cmid.connect(ConnParam(retry_count=retry_count))

    def wait(self) -> int:
        """The status of the next event."""
        with self.channel.get_event(timeout=20) as event:
            self.kind, self.param = event.type, event._param
            return event.status

    def echo(self, rounds: int = 1) -> None:
        """Send messages and receive them back."""
        for _ in range(rounds):
            self.count += 1
            text = b"echo %d " % self.count * 5
            self.cmid.post_send(1, text, flags=SendFlag.SIGNALED | SendFlag.INLINE)
            wc = self.cmid.get_send_comp(20)
            assert wc.status == 0, wc
            wc = self.cmid.get_recv_comp(20)
            assert wc.status == 0, wc
            assert self.region.read(wc.byte_len, wc.wr_id * _SIZE) == text
            self.cmid.post_recv(wc.wr_id, self.region, wc.wr_id * _SIZE, _SIZE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cmid.destroy()
        self.region.close()
        self.channel.close()
