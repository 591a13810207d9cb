"""docs/limits.md has the values of the code, and tests that exist; and the tests that no other module has."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from functools import partial
from mmap import mmap
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Self

import pytest

from rdmacm import CmEventType, ConnParam, open_device
from rdmacm.cmid import lookups
from rdmacm.cmid.lookups import NameLookup, NameLookups
from rdmacm.endpoint import listening
from rdmacm.endpoint.admission import _MAX_HALF_OPEN
from rdmacm.net import NeighbourState
from rdmacm.progress import containment
from rdmacm.progress.containment import InternalErrors
from rdmacm.proto import acm, constants
from rdmacm.proto.cm import admission, timeouts
from rdmacm.proto.cm.connection import AMPLIFICATION
from rdmacm.proto.cm.messages import RTU, pack_message
from rdmacm.proto.rsocket import engine as rsocket_engine
from rdmacm.proto.rsocket import headers as rsocket_headers
from rdmacm.proto.rsocket import messages as rsocket_messages
from rdmacm.proto.rsocket import peers as rsocket_peers
from rdmacm.proto.sa import client as sa_client
from rdmacm.proto.sa.client import SaClient
from rdmacm.rsocket import listening as rsocket_listening
from rdmacm.rsocket import options as rsocket_options
from rdmacm.run import lookups as run_lookups
from rdmacm.run import protocol, server, sessions, slots
from rdmacm.soft import host as soft_host
from rdmacm.soft.device import async_events, datagram_queue_pair, groups, mad_trains, memory, multiplexer
from rdmacm.soft.device.device import SOFT_DEVICE_ATTR as ATTR
from rdmacm.soft.ids import identifier
from rdmacm.soft.wire import forwarding, group_names, heirs, port_group, source, udp
from rdmacm.soft.wire.base import WirePath
from rdmacm.soft.wire.forwarding import Delivery, ForwardReceiver, ForwardSender, bind_name
from rdmacm.soft.wire.source import RequestRate
from rdmacm.testing import Fabric
from rdmacm.tools import rping, serving
from rdmacm.verbs import (
    CQ,
    MR,
    PD,
    SRQ,
    AccessFlag,
    Context,
    QPCap,
    QPInitAttr,
    SendWR,
    SrqAttr,
    SrqInitAttr,
)
from support.cm import SERVICE, Scripted, request
from support.endpoints import Ends
from support.pair import ends, refused
from support.processes import linux_only

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")

#: The numbers in the second column of each row, by the beginning of its first column.
VALUES: dict[str, tuple[int | float | str, ...]] = {
    "queue pairs of a process": (multiplexer.MAX_QP, ATTR.max_qp),
    "memory regions": (ATTR.max_mr,),
    "memory windows": (ATTR.max_mw,),
    "protection domains": ("UNLIMITED",),
    "work requests of a queue": (ATTR.max_qp_wr, ATTR.max_srq_wr),
    "scatter/gather": (ATTR.max_sge, ATTR.max_sge_rd, ATTR.max_srq_sge),
    "bytes of inline": (ATTR.max_inline_data,),
    "entries of a completion": (ATTR.max_cqe,),
    "RDMA READs": (ATTR.max_qp_rd_atom, ATTR.max_qp_init_rd_atom),
    "P_Keys": (ATTR.max_pkeys,),
    "path MTU": (4096,),
    "bytes of a datagram": (4096,),
    "multicast groups": (groups.MAX_GROUPS,),
    "attached queue pairs": (groups.MAX_GROUP_QPS,),
    "senders": (datagram_queue_pair._MAX_FLOWS,),
    "asynchronous events": (async_events.MAX_EVENTS,),
    "queue pairs that are closed": (multiplexer._FREED_QPNS,),
    "regions that are deregistered": (memory._FREED_KEYS,),
    "packets that a queue pair": (constants.TURN,),
    "packets that one step": (constants.MOST_SENT, constants.MOST_TIMERS),
    "private data of `connect`": (56, 92),
    "private data of `accept`": (listening._MAX_ACCEPT_DATA,),
    "private data of `reject`": (148,),
    "private data of datagram": (180, 136),
    "retries": (7,),
    "connections of a process": (65536,),
    "backlog": (identifier._MAX_BACKLOG,),
    "connections in progress": (listening._MAX_IN_PROGRESS,),
    "half-open": (_MAX_HALF_OPEN,),
    "seconds of a timeout": (timeouts.seconds(timeouts.MAX_EXPONENT),),
    "UNREACHABLE": (1,),
    "alternate paths": (1,),
    "port numbers": ("ip_local_port_range",),
    "threads": (lookups._MAX_THREADS,),
    "logged errors": (containment._MAX_LOGGED,),
    "requests that are processed": (admission.PERMITS,),
    "such requests": (admission.RATE,),
    "requests that wait": (admission._MOST_WAITING,),
    "requests that need no": (admission._SMALL_PERMITS, admission._SMALL_RATE),
    "MADs to a peer": (AMPLIFICATION,),
    "questions": (9,),
    "management datagrams": (source._BURST, source._RATE),
    "processes that wait": (port_group._BACKLOG,),
    "names": (group_names.MAX_ABANDONED,),
    "other processes from": (forwarding._MAX_CONNECTIONS,),
    "other processes to": (forwarding._MAX_CONNECTIONS,),
    "bytes that wait": (forwarding._QUEUE_BYTES,),
    "slots of processes": (heirs._MOST, int(heirs._SECONDS)),
    "packets of a train": (constants.MOST_IN_TRAIN,),
    "peers whose": (mad_trains.MAX_PEERS, multiplexer._MAX_ROUTES),
    "hardware addresses": (soft_host._MAX_NEXT_HOPS,),
    "queries of a port": (SaClient(Random(1)).max_queries,),
    "bytes of a response": (SaClient(Random(1)).max_size,),
    "complete responses": (sa_client._MAX_LINGERING,),
    "requests at ib_umad": (4096,),
    "addresses in an answer": (acm.MAX_ENDPOINTS,),
    "ring of a stream": (rsocket_options._MIN_BUFFER, rsocket_options._MAX_BUFFER),
    "work requests of a stream": (rsocket_options._MIN_QUEUE, rsocket_options._MAX_QUEUE),
    "I/O mappings": (rsocket_messages.MAX_MAPPINGS,),
    "longest message": (rsocket_engine.MAX_MESSAGE,),
    "entries of the send queue": (rsocket_engine.CONTROL_SLOTS,),
    "what a peer sends without room": ("SO_RCVBUF",),
    "what a peer sends without a credit": ("RDMA_RQSIZE",),
    "targets of a peer": (rsocket_messages.TARGETS,),
    "established streams": (rsocket_listening._MAX_BACKLOG,),
    "streams that are half-open": (_MAX_HALF_OPEN,),
    "datagram of a socket": (rsocket_headers.MAX_LENGTH,),
    "datagrams that a socket": ("SO_RCVBUF / 2,048",),
    "peers of a datagram socket": (rsocket_peers.MAX_PEERS, rsocket_peers.MAX_RESOLVING),
    "elements, inline": ("those of devices",),
    "completion vectors": (1,),
    "ranges of queue pair numbers": (slots._MOST_SLOTS, 1 << constants.QPN_BITS),
    "ranges of all": (constants.MAX_SLOT,),
    "ids and memberships": (sessions._MOST_TARGETS,),
    "event channels": (sessions._MOST_CHANNELS,),
    "connections to the server": (server._MOST_CONNECTIONS, server._MOST_OF_ONE),
    "bytes of a request to": (protocol.MOST,),
    "name lookups": (run_lookups._MOST_THREADS,),
    "users": (1,),
    "packets in flight": (1 << 16,),
    "bytes of a Fabric's log": (64 << 20,),
    "unread MADs": (4096,),
    "bytes of a ping": (rping._SHORTEST, rping._LONGEST),
    "clients": (serving._MAX_CLIENTS,),
}


def rows() -> list[list[str]]:
    """The cells of each row of the page."""
    lines = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    return [line for line in lines if line[0] != "limit"]


def test_values_are_those_of_the_code() -> None:
    seen: set[str | None] = set()
    for limit, value, _, _ in rows():
        start = next((start for start in VALUES if limit.startswith(start)), None)
        seen.add(start)
        if start is not None:
            numbers = {f"{number:,}" if isinstance(number, int) else f"{number}" for number in VALUES[start]}
            assert set(re.split(", | to ", value)) == numbers, limit
        else:
            assert value in {"2^31", "2^63"}, limit
    assert seen == {*VALUES, None}


def test_tests_exist() -> None:
    everything = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for limit, _, _, tests in rows():
        names = re.findall(r"`(test_\w+)`", tests)
        assert names, limit
        for name in names:
            assert f"def {name}(" in everything, name


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def context() -> Iterator[Context]:
    with open_device("soft_lo") as opened:
        yield opened


def test_limits_of_a_region_and_a_message() -> None:
    """A message of 2^31 bytes and 32 is 32 times the same memory, which is never touched."""
    assert (ATTR.max_mr_size, ATTR.max_msg_sz) == (1 << 63, 1 << 31)
    length = (1 << 26) + 1
    with ends() as both, mmap(-1, length) as buffer:
        active, _ = both.connect(QPInitAttr(cap=QPCap(max_send_wr=4, max_recv_wr=1, max_send_sge=32, max_recv_sge=1)))
        with MR(active.pd, buffer, AccessFlag.LOCAL_WRITE) as mr:
            send = SendWR(1, sg=[mr.sge(0, length)] * 32)
            assert "a message has at most 2147483648" in str(refused(partial(active.qp.post_send, send)))


def test_a_thousand_of_what_is_unlimited(context: Context) -> None:
    with PD(context) as pd:
        made: list[PD | CQ | SRQ] = []
        for _ in range(1000):
            made += (PD(context), CQ(context, 1), SRQ(pd, SrqInitAttr(SrqAttr(1))))
        for each in made:
            each.close()


def test_one_partition_key(context: Context) -> None:
    assert context.query_pkey(1, 0) == 0xFFFF
    refused(lambda: context.query_pkey(1, 1))


# -- private data ----------------------------------------------------------------------------------------------------


def test_private_data_of_connect_and_accept() -> None:
    with ends() as both:
        both.b.listen("10.0.0.2")
        active = both.a.resolve("10.0.0.2")
        active.create_qp()
        refused(lambda: active.connect(ConnParam(bytes(57))))
        active.connect(ConnParam(bytes([1]) * 56))
        incoming = both.b.event(CmEventType.CONNECT_REQUEST)
        assert incoming.private_data[:56] == bytes([1]) * 56
        incoming.id.create_qp()
        refused(lambda: incoming.id.accept(ConnParam(bytes(197))))
        incoming.id.accept(ConnParam(bytes([2]) * 196))
        with both.a.channel.get_event(60) as event:
            assert event.private_data == bytes([2]) * 196


# -- connections -----------------------------------------------------------------------------------------------------


def test_backlog_is_at_most_1024() -> None:
    with ends() as both:
        for backlog in (-1, 0, 5000):
            listener = both.b.listen("10.0.0.2", port=8000 + abs(backlog), backlog=backlog)
            (found,) = listener._backend.connector._listeners[0][1:]  # type: ignore[attr-defined]
            assert found.backlog == 1024
    peer = Scripted(mra_service_timeout=None)
    made = peer.agent.listen(SERVICE, backlog=1024)
    for number in range(1030):
        peer.say(request(local_comm_id=number, local_qpn=number))
    assert made.pending == len(peer.agent) == 1024
    assert sum(peer.agent.dropped.values()) == 6


def test_connections_in_progress_are_limited() -> None:
    """Connections that are established count until accept() returns them."""
    fabric = Fabric(1)
    both = Ends(fabric)
    limit = listening._MAX_IN_PROGRESS
    assert both.listener._admission.has_room(limit)
    both.listener._admission._ready.extend([object()] * (limit - 1))  # type: ignore[list-item]
    assert both.listener._admission.has_room(limit)
    both.listener._admission._ready.append(object())  # type: ignore[arg-type]
    assert not both.listener._admission.has_room(limit)
    both.listener._admission._ready.clear()
    cores = both.connect()
    both.close(*cores)


def test_timeouts_of_a_peer_are_limited() -> None:
    assert timeouts.seconds(31) == timeouts.seconds(timeouts.MAX_EXPONENT) == 65.536


def test_name_lookups_of_a_channel_run_in_eight_threads() -> None:
    running, go, finished = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    def work() -> list[Any]:
        running.release()
        go.wait(20)
        return []

    made = NameLookups()
    for _ in range(20):
        made.submit(NameLookup(work, lambda *_: finished.release()))
    for _ in range(8):
        assert running.acquire(timeout=20)
    assert not running.acquire(timeout=0.02)
    assert len([each for each in threading.enumerate() if each.name == "rdmacm-lookup"]) == 8
    go.set()
    for _ in range(20):
        assert finished.acquire(timeout=20)


@pytest.mark.usefixtures("faults_expected")
def test_log_of_internal_errors_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    errors = InternalErrors()
    for _ in range(1000):
        errors.report("queue_pair", "queue pair 7 has ended", ValueError("x"))
    assert errors.counts["queue_pair"] == 1000
    assert len(caplog.records) == 20 + len([32, 64, 128, 256, 512])


# -- the network -----------------------------------------------------------------------------------------------------


def test_management_datagrams_beyond_the_rate_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rdmacm.soft.wire.source.time.monotonic", lambda: now[0])
    rate = RequestRate()
    assert [rate.permits(64) for _ in range(5)] == [True] * 4 + [False]
    now[0] += 0.1
    assert [rate.permits(64) for _ in range(5)] == [True] * 4 + [False], "256 at once, whatever was left before"
    now[0] += 0.04
    assert rate.permits(96)
    assert not rate.permits(1)
    assert udp._REQUEST_BATCH == 64


@linux_only
def test_forwarding_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "_MAX_CONNECTIONS", 3)
    readers: dict[int, Any] = {}
    name = f"rdmacm-test-{threading.get_native_id()}"
    listeners = [bind_name(f"{name}-{number}") for number in range(5)]
    receiver = ForwardReceiver(listeners[0], readers.__setitem__, readers.pop, lambda _: None, lambda _: None)
    senders = []
    for _ in range(5):
        senders.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        senders[-1].connect(f"\0{name}-0")
        readers[listeners[0].fileno()]([])
    assert len(receiver._senders) == 3
    assert [sock.recv(1) for sock in senders[:2]] == [b"", b""], "the least recently used are closed"
    sender = ForwardSender()
    packet = memoryview(bytes(16)), 0, ("127.0.0.1", 4791), bytes(4)
    for number in range(1, 5):
        listeners[number].listen()
        assert sender.send(f"{name}-{number}", packet) is Delivery.SENT
    assert list(sender._connections) == [f"{name}-{number}" for number in (2, 3, 4)]
    sender.close()
    receiver.close()
    for sock in (*senders, *listeners[1:]):
        sock.close()


@linux_only
def test_forwarding_connections_to_ended_processes_are_closed() -> None:
    """The next connection closes them."""
    name = f"rdmacm-test-{threading.get_native_id()}"
    listeners = [bind_name(f"{name}-{number}") for number in range(3)]
    sender = ForwardSender()
    packet = memoryview(bytes(16)), 0, ("127.0.0.1", 4791), bytes(4)
    for number in range(2):
        listeners[number].listen()
        assert sender.send(f"{name}-{number}", packet) is Delivery.SENT
    listeners[0].close()
    listeners[2].listen()
    assert sender.send(f"{name}-2", packet) is Delivery.SENT
    assert list(sender._connections) == [f"{name}-1", f"{name}-2"]
    sender.close()
    for sock in listeners[1:]:
        sock.close()


def test_what_is_kept_of_peers_is_limited() -> None:
    fabric = Fabric()
    host = fabric.host("a", "10.0.0.1")
    mux = host.provider.host.mux
    mad = pack_message(RTU(1, 2), 1)
    for number in range(600):
        ip = bytes((10, 1, number >> 8, number & 255))
        mux.gsi.send_mad(WirePath(bytes((10, 0, 0, 1)), ip), mad)
        mux.gsi._new_source((f"10.1.{number >> 8}.{number & 255}", 4791), bytes((10, 0, 0, 1)))
        outbox = mux.gsi.outbox
        outbox.answered(WirePath(bytes((10, 0, 0, 1)), ip))
        kept = outbox._peers, outbox.answering, mux.gsi._sources, mux._routes
        assert max(map(len, kept)) <= 256
    mux.close()


def test_next_hops_that_are_kept_are_limited() -> None:
    with ends() as both:
        both.connect()
        network, host = both.a.host.network, both.a.provider.host
        (ifindex,) = (each.index for each in network.interfaces() if each.name == "eth0")
        for number in range(1100):
            mac = bytes((2, 0, 0, 0, number >> 8, number & 255))
            network.add_neighbour(ifindex, f"10.0.{1 + (number >> 8)}.{number & 255}", NeighbourState.REACHABLE, mac)
        both.fabric.run(seconds=1)
        assert 0 < len(host._next_hops) <= 1024
        assert both.a.quiet()


# -- InfiniBand and tools --------------------------------------------------------------------------------------------


def test_remembered_responses_are_limited() -> None:
    client = SaClient(Random(1))
    for number in range(100):
        client._linger(SimpleNamespace(tid=number), 0.0)  # type: ignore[arg-type]
    assert sorted(client._lingering) == list(range(36, 100))
    client._linger(SimpleNamespace(tid=1), 10.0)  # type: ignore[arg-type]
    assert list(client._lingering) == [1], "and those of the past are forgotten"


def test_clients_at_a_time_are_limited() -> None:
    go, rejected = threading.Event(), []

    class Client:
        """An id of a request, as far as the server uses it before its work."""

        def reject(self, data: bytes) -> None:
            rejected.append(data)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    class Listener:
        """Has 70 requests."""

        left = 70

        def get_request(self) -> Client:
            self.left -= 1
            if self.left < 0:
                go.set()
                raise KeyboardInterrupt
            return Client()

    def work(_: object) -> None:
        go.wait(20)

    with pytest.raises(KeyboardInterrupt):
        serving.serve(Listener(), work, persistent=True)  # type: ignore[arg-type]
    assert rejected == [b"busy"] * 6
