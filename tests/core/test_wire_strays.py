"""Packets of strangers, and many atomics of a peer, at a server that computes: its other peers are served meanwhile.

The server has a switch interval of 1,000 seconds: while it computes, no other thread of it gets the interpreter.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from core.test_wire import SIGNALED, End, connected
from rdmacm.proto.constants import ROCE_PORT
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.verbs import SendWR, WCOpcode, WCStatus, WROpcode
from support.netns import python_environment
from support.roce_packets import BTH, RocePacket

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

#: Two peers; it computes if that is wanted until one of them writes to its memory, and prints its counters.
_SERVER = """
import json, struct, sys
import rdmacm
from rdmacm import CmId
from rdmacm.verbs import MR, SendFlag
from rdmacm.verbs.enums import AccessFlag
listener = CmId()
listener.bind_addr((sys.argv[1], 0))
listener.listen()
print(listener.src_port, flush=True)
peers, memory = [], bytearray(64)
for _ in range(2):
    peer = listener.get_request(20)
    peer.create_qp()
    access = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
    region = MR(peer.pd, memory, access)
    for number in range(4):
        peer.post_recv(number, region, 32, 16)
    peer.accept()
    description = struct.pack("!QI", region.addr, region.rkey)
    peer.post_send(0, description, flags=SendFlag.INLINE | SendFlag.SIGNALED)
    peer.get_send_comp(20)
    peers.append((peer, region))
for peer, region in peers:
    for number in range(8):
        peer.get_recv_comp(20)
        peer.post_recv(number, region, 32, 16)
if sys.argv[2] == "computing":
    with peers[0][0].qp.backend._mux.runtime.lock:  # no other thread is in the midst of something
        sys.setswitchinterval(1000)  # and none gets the interpreter
elif sys.argv[2] == "sharing":  # each call that gives up the interpreter takes so long
    sys.setswitchinterval(0.03)
print("ready", flush=True)
while not memory[0]:
    if sys.argv[2] == "polling":
        peers[0][0].recv_cq.poll(1)
sys.setswitchinterval(0.005)
sys.stdin.readline()
counters = rdmacm.query_counters()
counts = dict(counters.udp)
for device in counters.devices.values():
    for name, count in device.items():
        counts[name] = counts.get(name, 0) + count
print(json.dumps([counts, int.from_bytes(memory[8:16], sys.byteorder)]), flush=True)
sys.stdin.readline()
"""


@dataclass
class Served:
    """The server and its peers: ``usual`` reads its memory, ``other`` does what the test is about."""

    host: str
    process: subprocess.Popen[str]
    other: End
    usual: End
    address: int
    rkey: int

    def read(self) -> None:
        """A READ is answered."""
        self.usual.cmid.post_read(1, self.usual.region, self.address, self.rkey, 0, 8, SIGNALED)
        assert self.usual.completions(of_sends=True) == [(1, WCStatus.SUCCESS, WCOpcode.RDMA_READ, 8)]

    def finish(self) -> tuple[dict[str, int], int]:
        """End the computation; the counters, and the number that atomics have added to."""
        self.usual.memory[:1] = b"x"
        self.usual.cmid.post_write(3, self.usual.region, self.address, self.rkey, 0, 1, SIGNALED)
        self.usual.completions(of_sends=True)
        return self.result()

    def result(self) -> tuple[dict[str, int], int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 20)[0], "it computes for ever"
        counters, number = json.loads(self.process.stdout.readline())
        return counters, number

    @property
    def qpn(self) -> int:
        """The number of the server's queue pair of ``other``."""
        return self.other.qp.query()[0].dest_qp_num


@contextmanager
def serving(host: str, how: str = "computing", core: str = "c") -> Iterator[Served]:
    command = [sys.executable, "-c", _SERVER, host, how]
    environment = {**python_environment(), "RDMACM_CORE": core}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        ends: list[End] = []
        try:
            port = int(process.stdout.readline())
            (other, address, rkey), (usual, *_) = connected(port, host), connected(port, host)
            ends += (other, usual)
            for end in ends:  # both ends join the port
                for _ in range(8):
                    end.send(b"ready")
                    end.completions(of_sends=True)
            assert process.stdout.readline() == "ready\n"
            yield Served(host, process, other, usual, address, rkey)
            with suppress(BrokenPipeError):
                process.communicate("\n", timeout=20)
        finally:
            process.kill()
            for end in ends:
                end.region.close()
                end.cmid.close()


def _sealed(qpn: int, psn: int, source: bytes, destination: bytes, sport: int) -> bytes:
    """A SEND with a right ICRC."""
    packet = RocePacket(BTH(Opcode.RC_SEND_ONLY, qpn, psn), payload=bytes(64)).pack()
    return bytes(packet) + icrc_between(source, destination, sport).seal([packet])


COUNT = 300


def _send_strays(served: Served) -> dict[str, int]:
    """Send packets that no queue pair of the server accepts; how many are counted by which name."""
    host, qpn, other = served.host, served.qpn, served.other
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    usual = served.usual.qp.query()[0].dest_qp_num
    unknown = next(number for number in (qpn ^ 1, qpn ^ 2) if number != usual)
    own = other.wire._out.sockets[is_ipv6]
    assert own is not None
    damaged = bytes(RocePacket(BTH(Opcode.RC_SEND_ONLY, qpn, 5), payload=bytes(64)).pack()) + b"icrc"
    unnamed = bytes(RocePacket(BTH(Opcode.RC_SEND_ONLY, unknown, 5), payload=bytes(64)).pack()) + b"icrc"
    sent = {"rx_unknown_qp": COUNT, "rx_icrc_encapsulated": 2 * COUNT, "dropped_opcode": COUNT}
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        for _ in range(COUNT):
            sock.sendto(unnamed, (host, ROCE_PORT))
            sock.sendto(damaged, (host, ROCE_PORT))  # of the peer's host, from another port
            own.sendto(damaged, (host, ROCE_PORT))  # of the peer
            own.sendto(bytes([0xFF]) + damaged[1:], (host, ROCE_PORT))
            sock.sendto(damaged[:12], (host, ROCE_PORT))
    sent["short"] = COUNT
    if not is_ipv6:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.2", 0))
            packet = _sealed(qpn, 5, bytes((127, 0, 0, 2)), bytes((127, 0, 0, 1)), sock.getsockname()[1])
            for _ in range(COUNT):
                sock.sendto(packet, (host, ROCE_PORT))
        sent["rx_address"] = COUNT
    return sent


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
def test_strays_are_dropped_without_the_interpreter(host: str) -> None:
    with serving(host) as served:
        sent = _send_strays(served)
        for _ in range(8):
            served.read()
        counters, _ = served.finish()
    assert {name: counters.get(name) for name in sent} == sent


@pytest.mark.slow
@pytest.mark.parametrize("core", ["c", "python"])
def test_strays_are_counted_by_the_same_names_with_either_core(core: str) -> None:
    with serving("127.0.0.1", "polling", core) as served:
        sent = _send_strays(served)
        served.read()
        counters, _ = served.finish()
    assert {name: counters.get(name) for name in sent} == sent


def test_without_the_core_strays_cost_no_established_connection_while_the_application_computes() -> None:
    with serving("127.0.0.1", "sharing", "python") as served:
        sent = _send_strays(served)
        served.read()
        counters, _ = served.finish()
    assert {name: counters.get(name) for name in sent} == sent


def test_atomics_of_a_peer_leave_the_others_alone() -> None:
    with serving("127.0.0.1") as served:
        other, region = served.other, served.other.region
        depth = 32
        for number in range(depth):
            other.qp.post_send(
                SendWR(
                    number, WROpcode.ATOMIC_FETCH_AND_ADD, [region.sge(0, 8)], SIGNALED,
                    remote_addr=served.address + 8, rkey=served.rkey, compare_add=1,
                )
            )  # fmt: skip
            served.read()
        served.usual.memory[:1] = b"x"
        served.usual.cmid.post_write(3, served.usual.region, served.address, served.rkey, 0, 1, SIGNALED)
        served.usual.completions(of_sends=True)
        assert [wr_id for wr_id, *_ in other.completions(depth, of_sends=True)] == list(range(depth))
        assert served.result()[1] == depth
