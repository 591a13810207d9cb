"""Makes and destroys many connections of the provider ``kernel``, and counts what is left.

    python3 -m interop.kernel_churn COUNT

Both ends are in this process. Each connection has two ids, two queue pairs and two regions of memory, and moves a
message. One in ten is a connection of :func:`rdmacm.connect`, one in ten of datagrams. Prints the memory of the process
at each tenth of the way.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable

import rdmacm
from rdmacm import CmEvent, CmEventType, CmId, EventChannel, PortSpace
from rdmacm.kernel.verbs import runtime
from rdmacm.provider.connparam import UdParam
from rdmacm.verbs import AH, WCStatus
from support.clock import Stopwatch

__all__ = ["descriptors", "progress", "resources"]

E = CmEventType
HERE, PORT, ENDPOINT_PORT = "10.0.0.1", 7480, 7481
PATIENCE = 20.0
#: Connections before the memory is measured for the first time: caches and pools have their size then.
WARM_UP = 200
#: KiB by which the memory of the process may grow. What each connection left behind would be more, times thousands.
GROWTH = 2048


def resources() -> dict[str, int]:
    """How many objects of each kind the kernel counts on all devices, with its own."""
    shown = subprocess.run(["rdma", "resource", "show"], check=True, capture_output=True, text=True).stdout
    found: Counter[str] = Counter()
    for kind, count in re.findall(r"\b(pd|cq|qp|cm_id|mr|ctx|srq) (\d+)", shown):
        found[kind] += int(count)
    return dict(found)


def descriptors() -> dict[str, int]:
    """How many descriptors this process has of each kind."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}"))] += 1
        except FileNotFoundError:  # the one that reads the folder
            continue
    return dict(found)


def memory() -> int:
    """The memory of the process, in KiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def progress() -> None:
    """What the garbage collector has left to the next call."""
    gc.collect()
    runtime().drive(lambda: True, 0)


class Ends:
    """A channel, the listeners of connections and datagrams on it, and their clients."""

    def __init__(self) -> None:
        self.channel = EventChannel("kernel")
        self.listeners = {space: CmId(self.channel, space) for space in (PortSpace.TCP, PortSpace.UDP)}
        for listener in self.listeners.values():
            listener.bind_addr((HERE, PORT))
            listener.listen()

    def events(self, *kinds: CmEventType) -> list[CmEvent]:
        """The next events, acknowledged, which are of these kinds in any order; returned in this order."""
        found = []
        for _ in kinds:
            with self.channel.get_event(PATIENCE) as event:
                assert event.status == 0, event
                found.append(event)
        assert sorted(event.type for event in found) == sorted(kinds), found
        return sorted(found, key=lambda event: kinds.index(event.type))

    def connect(self, space: PortSpace) -> None:
        active = CmId(self.channel, space)
        active.resolve_addr((HERE, PORT))
        self.events(E.ADDR_RESOLVED)
        active.resolve_route()
        self.events(E.ROUTE_RESOLVED)
        active.create_qp()
        active.connect()
        (request,) = self.events(E.CONNECT_REQUEST)
        passive = request.id
        passive.create_qp()
        received = bytearray(104)
        ends = active, passive
        sending, receiving = active.reg_msgs(bytearray(b"hello".ljust(64, b"."))), passive.reg_msgs(received)
        passive.post_recv(1, receiving)
        passive.accept()
        if space is PortSpace.TCP:
            self.events(E.ESTABLISHED, E.ESTABLISHED)
            active.post_send(2, sending)
        else:
            (event,) = self.events(E.ESTABLISHED)
            assert isinstance(event.param, UdParam)
            with AH(active.pd, event.param.ah_attr) as ah:
                active.post_ud_send(2, sending, ah, event.param.qp_num, event.param.qkey)
                assert active.get_send_comp(PATIENCE).status is WCStatus.SUCCESS
        if space is PortSpace.TCP:
            assert active.get_send_comp(PATIENCE).status is WCStatus.SUCCESS
        assert passive.get_recv_comp(PATIENCE).status is WCStatus.SUCCESS
        assert b"hello" in received
        if space is PortSpace.TCP:
            active.disconnect()
            self.events(E.DISCONNECTED, E.DISCONNECTED)
        sending.close()
        receiving.close()
        for end in ends:
            end.destroy_qp()
            end.destroy()

    def close(self) -> None:
        for listener in self.listeners.values():
            listener.destroy()
        self.channel.close()


class Echo:
    """A server of the simple interface, and its clients."""

    def __init__(self) -> None:
        self.listener = rdmacm.listen((HERE, ENDPOINT_PORT), provider="kernel")
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer = self.listener.accept()
            except rdmacm.RdmaError:
                return
            with peer:
                peer.send(peer.recv(PATIENCE))
                try:
                    peer.recv(PATIENCE)
                except rdmacm.CmDisconnectedError:
                    continue

    def connect(self) -> None:
        with rdmacm.connect((HERE, ENDPOINT_PORT), provider="kernel") as connection:
            with connection.register(bytearray(4096), remote_write=True):
                connection.send(b"hello")
                assert bytes(connection.recv(PATIENCE)) == b"hello"

    def close(self) -> None:
        self.listener.close()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def churn(count: int) -> None:
    ends, echo = Ends(), Echo()
    calls: list[Callable[[], None]] = [lambda: ends.connect(PortSpace.TCP)] * 8
    calls += [lambda: ends.connect(PortSpace.UDP), echo.connect]
    sizes: list[int] = []
    watch = Stopwatch()
    for number in range(WARM_UP + count):
        if number >= WARM_UP and (number - WARM_UP) % max(1, count // 10) == 0:
            sizes.append(memory())
        calls[number % len(calls)]()
    sizes.append(memory())
    ends.close()
    echo.close()
    print(f"{count} connections, {watch.seconds:.0f} s; memory in KiB: {sizes}")
    assert sizes[-1] - sizes[0] <= GROWTH, sizes


def main() -> None:
    before, files = resources(), descriptors()
    churn(int(sys.argv[1]))
    assert resources() == before, (resources(), before)
    assert descriptors() == files, (descriptors(), files)
    print(f"left behind: nothing; the kernel counts {before}")


if __name__ == "__main__":
    main()
