"""Processes on hosts of a fabric: two that connect, one that forks, and one that exits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from infiniband.fabric import SimulatedFabric
from infiniband.hosts import IbHost, event, param
from infiniband.sites import OpenSM
from rdmacm import CmEventType, EventChannel, RaiFlag, RdmaError, getaddrinfo


class Program:
    """A program on a node, and the lines that it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stdin is not None
        self._output: IO[str] = process.stdout
        self._input: IO[str] = process.stdin

    def line(self) -> str:
        return self._output.readline().rstrip("\n")

    def go_on(self) -> None:
        self._input.write("\n")
        self._input.flush()

    def rest(self) -> list[str]:
        return self.process.communicate(timeout=30)[0].split("\n")


@contextmanager
def running(fabric: SimulatedFabric, node: str, program: str) -> Iterator[Program]:
    environ = dict(os.environ, RDMACM_IB=f"ibsim:{node}@{fabric.base}")
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


@pytest.fixture
def c(fabric: SimulatedFabric) -> Iterator[IbHost]:
    with OpenSM(fabric).host("HostC") as host:
        yield host


def is_offered(host: IbHost, service: str) -> bool:
    try:
        return bool(getaddrinfo(None, service, flags=RaiFlag.SA, provider=host.provider))
    except RdmaError:
        return False


SERVER = """
from rdmacm import CmId, ConnParam, EventChannel, PortSpace, SockAddrIB, devices
from rdmacm.verbs.enums import LinkLayer
(port,) = (p for d in devices() for p in d.ports if p.link_layer is LinkLayer.INFINIBAND)
with EventChannel() as channel, CmId(channel, PortSpace.IB) as listener:
    listener.bind_addr(SockAddrIB(port.gids[0].gid))
    listener.listen()
    listener.register_service("two-processes")
    print("ready", flush=True)
    for event in channel:
        print(event.type.name, event.private_data.rstrip(b"\\0").decode(), flush=True)
        if event.type.name == "CONNECT_REQUEST":
            peer = event.id
            peer.accept(ConnParam(b"welcome", 1, 1, qp_num=7))
        elif event.type.name == "DISCONNECTED":
            peer.disconnect()
            event.ack()
            peer.destroy()
            break
        event.ack()
"""
CLIENT = """
from rdmacm import CmId, ConnParam, PortSpace, RaiFlag, getaddrinfo
(info,) = getaddrinfo(None, "two-processes", flags=RaiFlag.SA)
with CmId(None, PortSpace.IB) as cmid:
    cmid.resolve_addr(info.dst_addr, info.src_addr)
    cmid.resolve_route()
    cmid.connect(ConnParam(b"hello", 1, 1, qp_num=8))
    print(cmid.event.type.name, cmid.event.private_data.rstrip(b"\\0").decode())
    cmid.establish()
    cmid.disconnect()
    print(cmid.event.type.name)
"""


def test_processes_on_two_hosts_connect(fabric: SimulatedFabric) -> None:
    with running(fabric, "HostA", SERVER) as server:
        assert server.line() == "ready"
        with running(fabric, "HostC", CLIENT) as client:
            assert client.rest() == ["CONNECT_RESPONSE welcome", "DISCONNECTED", ""]
        assert server.rest() == ["CONNECT_REQUEST hello", "ESTABLISHED ", "DISCONNECTED ", ""]


COMMON = """
import os, select, sys, time
from rdmacm import CmId, EventChannel, PortSpace, RaiFlag, SockAddrIB, devices
from rdmacm.verbs.enums import LinkLayer
(port,) = (p for d in devices() for p in d.ports if p.link_layer is LinkLayer.INFINIBAND)
channel = EventChannel()
listener = CmId(channel, PortSpace.IB)
listener.bind_addr(SockAddrIB(port.gids[0].gid))
listener.listen()
service = listener.register_service("offered", lease=2)
"""
FORKING = (
    COMMON
    + """
poll = select.poll()
poll.register(channel.fileno(), select.POLLIN)
asking = CmId(channel, PortSpace.IB)
asking.bind_addr(SockAddrIB(port.gids[0].gid))
asking.resolve_addrinfo(None, "offered", flags=RaiFlag.SA)
child = os.fork()
if not child:
    code = 1
    try:
        service.withdraw()
        asking.destroy()
        listener.destroy()
        channel.close()
        devices()
        code = 0
    finally:
        os._exit(code)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
began = time.process_time()
while True:
    assert poll.poll(10_000)
    try:
        with channel.get_event(timeout=0) as event:
            print(event.type.name, flush=True)
            if event.type.name == "CONNECT_REQUEST":
                event.id.reject(b"hello")
                break
    except BlockingIOError:
        pass
print("idle" if time.process_time() - began < 1 else "busy")
sys.stdin.readline()
"""
)


def test_forked_child_does_not_affect_its_parent(fabric: SimulatedFabric, c: IbHost) -> None:
    """The child may destroy what it inherits; the port, the service and the query stay with the parent."""
    with running(fabric, "HostA", FORKING) as program, EventChannel(c.provider) as channel, c.id(channel) as cmid:
        assert program.line() == "child 0"
        assert program.line() == "ADDRINFO_RESOLVED"
        # Longer than the service's lease: the parent still renews it.
        with pytest.raises(TimeoutError):
            channel.get_event(2.2)
        (info,) = getaddrinfo(None, "offered", flags=RaiFlag.SA, provider=c.provider)
        assert info.dst_addr is not None
        cmid.resolve_addr(info.dst_addr)
        event(channel).ack()
        cmid.resolve_route()
        event(channel).ack()
        cmid.connect(param())
        with event(channel) as refused:
            assert (refused.type, refused.private_data[:5]) == (CmEventType.REJECTED, b"hello")
        program.go_on()
        assert program.rest() == ["CONNECT_REQUEST", "idle", ""]


@pytest.mark.parametrize("end", ["", "raise KeyError", "import os, signal; signal.raise_signal(2)"])
def test_process_exit_withdraws_its_services(fabric: SimulatedFabric, c: IbHost, end: str) -> None:
    ready = "print('ready', flush=True)\nsys.stdin.readline()\nsys.stderr.close()\n"
    program = COMMON.replace("lease=2", "lease=3600") + ready + end
    with running(fabric, "HostA", program) as process:
        assert process.line() == "ready"
        assert is_offered(c, "offered")
        process.go_on()
        process.process.wait(30)
        assert not is_offered(c, "offered")
