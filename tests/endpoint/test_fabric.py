"""Connections on a simulated network in virtual time: unreachable addresses, lost packets, lost peers."""

from __future__ import annotations

import errno
import gc
from random import Random

import pytest

from rdmacm import AddrInfo, CmDisconnectedError, CmTimeoutError, RdmaError, connect
from rdmacm.address import Gid
from rdmacm.endpoint.connection_state import ConnectionOptions, ConnectionState
from rdmacm.endpoint.dispatcher import Dispatcher
from rdmacm.endpoint.race import connect_routine
from rdmacm.proto.cm.messages import REQ, Path, pack_message
from rdmacm.proto.constants import QPN_BITS
from rdmacm.soft.wire.base import WirePath
from rdmacm.testing import LOSE, Fabric, FabricPacket, Outcome, Verdict, nth
from rdmacm.verbs.enums import AccessFlag
from support.cm import communication_ids
from support.endpoints import Ends, Part, play, receive, send
from support.rows import for_each

# -- choice of the address ----------------------------------------------------------------------------------


def test_unreachable_address_delays_connect_by_a_quarter_second() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    unreachable = "10.0.0.99"
    active, passive = play(fabric, ends.connecting(unreachable, "10.0.0.2"), ends.accepting())
    assert 0.25 <= fabric.now < 0.26
    assert active.cmid.peer_addr == ("10.0.0.2", 7471)
    ends.close(active, passive)


def test_address_families_alternate() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    addresses = ["fd00::97", "fd00::98", "fd00::99", "10.0.0.2"]
    active, passive = play(fabric, ends.connecting(*addresses), ends.accepting())
    assert fabric.now < 0.26, "the other family is tried second"
    ends.close(active, passive)


def test_first_answer_wins_and_the_other_is_closed() -> None:
    fabric = Fabric(1, latency=0.2)
    ends = Ends(fabric)
    slow = ends.connecting("10.0.0.2", "fd00::2")
    active, first = play(fabric, slow, ends.accepting())
    assert active.cmid.peer_addr == ("10.0.0.2", 7471)
    play(fabric, send(active, b"x"), receive(first))
    assert len(ends.a.provider.host.mux) == 1
    fabric.run(seconds=1)
    ends.b_dispatcher.drive_once(ends.b_dispatcher.dispatch)
    ends.close(active, first)


def test_connect_times_out_if_no_address_answers() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    with pytest.raises(CmTimeoutError) as caught:
        connect([AddrInfo(dst_addr=(f"10.0.0.{n}", 1), family=2) for n in (98, 99)], provider=ends.a.provider)
    assert 2 <= fabric.now < 2.5
    assert [note.split(":")[0] for note in caught.value.__notes__] == ["tried 10.0.0.98", "tried 10.0.0.99"]
    ends.close()


# -- timeouts -----------------------------------------------------------------------------------------------


def test_error_names_the_failed_step() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    with pytest.raises(CmTimeoutError, match=r"not connected within 1 s: 10.0.0.99:1 still in resolve_addr") as caught:
        connect(("10.0.0.99", 1), timeout=1, provider=ends.a.provider)
    assert caught.value.step == "resolve_addr"
    assert fabric.now == pytest.approx(1)
    fabric.faults = nth("REQ", 1)
    with pytest.raises(CmTimeoutError, match=r"10\.0\.0\.2:7471 still in connect") as caught:
        connect(("10.0.0.2", 7471), timeout=0.01, provider=ends.a.provider)
    assert caught.value.step == "connect"
    several = [AddrInfo(dst_addr=(f"10.0.0.{n}", 1), family=2) for n in (97, 98, 99)]
    with pytest.raises(CmTimeoutError) as caught:
        connect(several, timeout=0.3, provider=ends.a.provider)
    assert caught.value.__notes__ == [
        "tried 10.0.0.97:1: still in resolve_addr",
        "tried 10.0.0.98:1: still in resolve_addr",
        "not tried 10.0.0.99:1",
    ]
    ends.close()


# -- long packets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["send", "read"])
def test_link_that_loses_long_packets_is_recognised(operation: str, caplog: pytest.LogCaptureFixture) -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    active, passive = ends.connect()
    play(fabric, send(active, bytes(300)), receive(passive))
    fabric.faults = lambda packet: LOSE if len(packet.data) > 500 else None
    region = passive.register(bytearray(1000), AccessFlag.REMOTE_READ)
    if operation == "send":
        long, arrived = send(active, bytes(1000)), 344
    else:
        long, arrived = Part(active.dispatcher, active.read(region.remote, None)), 60
    with pytest.raises(TimeoutError) as caught:
        play(fabric, long)
    text = f"packets of up to {arrived} bytes arrive, and one of 1044 does not: a link on the way has a smaller MTU"
    assert text in str(caught.value)
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert f"packets of up to {arrived} bytes arrive, and one of 1044 does not so far: likely a link" in told
    ends.close(active, passive)


@pytest.mark.parametrize("lost", [1, 2])
def test_long_packets_that_are_lost_by_accident_are_not_told(lost: int, caplog: pytest.LogCaptureFixture) -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    active, passive = ends.connect()
    left = [LOSE] * lost
    fabric.faults = lambda packet: left.pop() if len(packet.data) > 500 and left else None
    play(fabric, send(active, bytes(1000)), receive(passive))
    assert left == []
    assert fabric.now > 0.5, "the peer was asked"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    ends.close(active, passive)


@pytest.mark.parametrize("seconds", [0, 1.5], ids=["at once", "before the last repetitions"])
def test_a_peer_that_ends_is_no_such_link(seconds: float) -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    active, passive = ends.connect()
    play(fabric, send(active, bytes(300)), receive(passive))
    began = fabric.now
    # The message is lost. The peer answers short packets until it ends.
    fabric.faults = lambda packet: LOSE if len(packet.data) > 500 or fabric.now - began >= seconds else None
    with pytest.raises(TimeoutError, match="the peer does not answer"):
        play(fabric, send(active, bytes(1000)))
    fabric.faults = None
    ends.close(active, passive)


# -- half-open connections ----------------------------------------------------------------------------------


def test_missing_rtu_does_not_delay_other_connections() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    mute = fabric.host("mute", "10.0.0.66")
    fabric.faults = lambda packet: LOSE if packet.source == "mute" and packet.kind in ("RTU", "DREQ") else None
    mute_dispatcher = Dispatcher(mute.provider)
    info = AddrInfo(family=2, port_space=0x106, dst_addr=("10.0.0.2", 7471))
    silent = Part(mute_dispatcher, connect_routine(mute_dispatcher, info, ConnectionOptions(), None, 0))
    accepting = ends.accepting()
    while not silent.done:
        for part in (silent, accepting):
            part.turn()
        fabric.run(seconds=0.001)
    assert not accepting.done
    active, passive = play(fabric, ends.connecting("10.0.0.2"), accepting)
    assert passive.cmid.peer_addr == active.cmid.local_addr
    # Its first message replaces the RTU.
    late = ends.accepting()
    late_message = send(silent.result, b"hello")
    (other, _) = play(fabric, late, late_message)
    assert play(fabric, receive(other))[0].data == b"hello"
    silent.result.release()
    mute_dispatcher.release()
    ends.close(active, passive, other)


def test_missing_rtu_ends_the_request() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    accepting = ends.accepting()
    connecting = ends.connecting("10.0.0.2")
    fabric.faults = lambda packet: LOSE if packet.kind == "RTU" else None
    while not connecting.done:
        connecting.turn()
        accepting.turn()
        fabric.run(seconds=0.001)
    fabric.crash("a")
    fabric.run(lambda: (accepting.turn(), False)[1], seconds=200)  # type: ignore[func-returns-value]
    # No public attribute shows half-open connections.
    assert not ends.listener._admission._half_open
    assert len(ends.b.provider.host.mux) == 0
    assert not accepting.done
    accepting.cancel()
    ends.listener.close()
    ends.b_dispatcher.release()
    connecting.result.release()
    ends.a_dispatcher.release()


# -- lossy networks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_messages_arrive_over_a_lossy_network(seed: int) -> None:
    fabric = Fabric(seed, loss=0.05, duplicate=0.05, reorder=0.1, corrupt=0.02)
    ends = Ends(fabric, depth=4, max_message=5000)
    active, passive = ends.connect()
    for number in range(30):
        data = bytes([number]) * (number * 150)
        message = play(fabric, receive(passive), send(active, data))[0]
        assert message.data == data
    active.disconnect()
    with pytest.raises(CmDisconnectedError):
        play(fabric, receive(passive))
    ends.close(active, passive)


def test_many_messages_arrive_with_few_receive_buffers() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric, depth=2, max_message=100)
    active, passive = ends.connect()
    sends = [send(active, b"%d" % number) for number in range(40)]
    got = play(fabric, *(receive(passive) for _ in range(40)), *sends)[:40]
    assert sorted(int(message.data) for message in got) == list(range(40))
    ends.close(active, passive)


def test_messages_wait_for_a_late_receiver() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric, depth=64, max_message=100)
    active, passive = ends.connect()
    play(fabric, *(send(active, b"%d" % number) for number in range(60)))
    got = play(fabric, *(receive(passive, 1) for _ in range(60)))
    assert [int(message.data) for message in got] == list(range(60))
    ends.close(active, passive)


# -- lost peers ---------------------------------------------------------------------------------------------


def test_receiver_detects_a_lost_peer() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric, keepalive=5.0)
    active, passive = ends.connect()
    with pytest.raises(CmTimeoutError):
        play(fabric, receive(passive, 60))  # keepalives arrive
    fabric.crash("a")
    started = fabric.now
    with pytest.raises(CmDisconnectedError, match="the peer does not answer"):
        play(fabric, receive(passive))
    assert fabric.now - started < 60
    ends.close(active, passive)


def test_send_to_a_lost_peer_times_out() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    active, passive = ends.connect()
    fabric.partition("a", "b")
    with pytest.raises(CmTimeoutError, match="the peer does not answer") as caught:
        play(fabric, send(active, b"x"))
    assert caught.value.step == "send"
    fabric.heal()
    with pytest.raises(CmDisconnectedError):
        play(fabric, receive(passive))
    ends.close(active, passive)


def test_operations_on_a_silent_peer_time_out() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    active, passive = ends.connect()
    fabric.partition("a", "b")
    before = fabric.now
    with pytest.raises(CmTimeoutError, match=r"the operation did not complete within 0\.5 s"):
        play(fabric, send(active, b"x", 0.5))
    assert fabric.now - before == pytest.approx(0.5)
    fabric.heal()
    assert play(fabric, receive(passive))[0].data == b"x", "the message was sent, and the connection still works"
    ends.close(active, passive)


def test_lost_dreq_is_retransmitted() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    active, passive = ends.connect()
    fabric.faults = nth("DREQ", 1)
    active.disconnect()
    with pytest.raises(CmDisconnectedError, match="the peer has disconnected"):
        play(fabric, receive(passive))
    ends.close(active, passive)


@pytest.mark.parametrize("kind", ["REQ", "REP", "RTU"])
@pytest.mark.parametrize("fault", [LOSE, Verdict(copies=2), Verdict(delay=0.01)])
def test_handshake_survives_loss_and_delay_of_any_message(kind: str, fault: Verdict) -> None:
    fabric = Fabric(1)
    fabric.faults = nth(kind, 1, fault)
    ends = Ends(fabric)
    active, passive = ends.connect()
    play(fabric, send(active, b"1"), receive(passive), send(passive, b"2"), receive(active))
    ends.close(active, passive)


def test_silent_peers_do_not_block_the_listener() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric, depth=1, max_message=64)
    mute = fabric.host("mute", "10.0.0.66")
    fabric.faults = lambda packet: LOSE if packet.source == "mute" and packet.kind in ("RTU", "DREQ") else None
    mute_dispatcher = Dispatcher(mute.provider)
    info = AddrInfo(family=2, port_space=0x106, dst_addr=("10.0.0.2", 7471))
    parts = [
        Part(mute_dispatcher, connect_routine(mute_dispatcher, info, ConnectionOptions(1, 64), None, 0))
        for _ in range(150)
    ]
    accepting = ends.accepting()
    for _ in range(5):
        for part in (accepting, *parts):
            part.turn()
        fabric.run(seconds=0.001)
    active, passive = play(fabric, ends.connecting("10.0.0.2"), accepting)
    assert passive.cmid.peer_addr == active.cmid.local_addr
    assert fabric.now < 2
    for part in parts:
        part.cancel()
        if part.result is not None:
            part.result.release()
    mute_dispatcher.release()
    ends.close(active, passive)


def test_many_simultaneous_connections_are_accepted() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric, depth=1, max_message=64)
    clients = [ends.connecting("10.0.0.2") for _ in range(300)]
    servers = [ends.accepting() for _ in range(300)]
    ends.close(*play(fabric, *clients, *servers))


def test_half_open_connections_beyond_the_limit_drop_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit is not an option: it only bounds the memory that a flood of requests can take.
    monkeypatch.setattr("rdmacm.endpoint.admission._MAX_HALF_OPEN", 3)
    fabric = Fabric(1)
    ends = Ends(fabric)

    def faults(packet: FabricPacket) -> Verdict | None:
        return LOSE if packet.kind == "RTU" else None

    fabric.faults = faults
    accepting = ends.accepting()
    attempts = [ends.connecting("10.0.0.2") for _ in range(6)]
    while not all(attempt.done for attempt in attempts):
        for part in (accepting, *attempts):
            part.turn()
        fabric.run(seconds=0.001)
    assert len(ends.listener._admission._half_open) == 3
    assert len(ends.b.provider.host.mux) == 3
    accepting.cancel()
    made = [attempt.result for attempt in attempts if attempt.error is None]
    assert all(attempt.error is None or isinstance(attempt.error, RdmaError) for attempt in attempts)
    ends.close(*made)


def test_the_error_of_a_failed_request_keeps_no_object_of_it() -> None:
    """The kernel counts a protection domain until the last reference to it is gone."""
    fabric = Fabric(1)
    ends = Ends(fabric)
    ends.listener.options = ConnectionOptions(depth=1 << 30)
    accepting, connecting = ends.accepting(), ends.connecting("10.0.0.2")
    while ends.listener.last_error is None:
        accepting.turn()
        connecting.turn()
        fabric.run(seconds=0.001)
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, ConnectionState)]
    assert [core for core in found if core.dispatcher is ends.b_dispatcher] == []
    assert ends.listener.last_error.errno == errno.EINVAL
    connecting.cancel()
    accepting.cancel()
    ends.close()


# -- requests that say that a peer has restarted ------------------------------------------------------------


def forge_request(ends: Ends) -> None:
    """Send b a REQ that has the address, the GUID and the queue pair number of its peer."""
    agent = ends.b.provider.host.cm.agent
    connection = agent.connection(communication_ids(agent)[0])
    assert connection is not None
    assert connection.remote_qpn is not None
    assert connection.remote_guid is not None
    primary = Path(Gid("::ffff:10.0.0.1"), Gid("::ffff:10.0.0.2"), hop_limit=64)
    req = REQ(
        connection.request.service_id,
        primary,
        ends.a.random.getrandbits(32),
        connection.remote_guid,
        local_qpn=connection.remote_qpn,
    )
    path = WirePath(bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2)))
    ends.a.provider.host.mux.gsi.send_mad(path, pack_message(req, 1))


@for_each("traffic", ["none", "to the peer", "from the peer"])
def test_forged_requests_do_not_end_a_live_connection(traffic: str) -> None:
    fabric = Fabric(3)
    ends = Ends(fabric)
    active, passive = ends.connect()
    if traffic == "to the peer":
        play(fabric, send(passive, b"x"), receive(active))
    elif traffic == "from the peer":
        play(fabric, send(active, b"x"), receive(passive))
    for _ in range(20):
        forge_request(ends)
    fabric.run(seconds=30)
    for _ in range(3):
        play(fabric, send(active, b"hello"), receive(passive))
        play(fabric, send(passive, b"hello"), receive(active))
    assert fabric.log.count(Outcome.DELIVERED, kind="REJ") == 1
    assert fabric.log.count(kind="DREQ") == 0
    ends.close(active, passive)


def test_forged_request_does_not_end_a_connection_over_a_lossy_link() -> None:
    fabric = Fabric(5)
    ends = Ends(fabric)
    active, passive = ends.connect()
    fabric.loss = 0.3
    for _ in range(5):
        forge_request(ends)
        fabric.run(seconds=10)
    fabric.loss = 0.0
    assert fabric.log.count(Outcome.LOST) > 5
    play(fabric, send(active, b"hello"), receive(passive))
    ends.close(active, passive)


def test_restarted_peer_connects_with_its_second_request() -> None:
    """The queue pair has the number of a killed process's, whose connection the peer still has."""
    fabric = Fabric(7)
    ends = Ends(fabric)
    active, passive = ends.connect()
    number = active.cmid.qp.qp_num
    fabric.partition("a", "b")
    active.release()
    fabric.heal()
    mux = ends.a.provider.host.mux
    # A new process does not know which numbers the killed one used last.
    mux._held.clear()
    mux._freed.clear()
    mux.random = GivenNumberFirst(mux.random, number & (1 << QPN_BITS) - 1)
    start = fabric.now
    again, accepted = ends.connect()
    assert again.cmid.qp.qp_num == number
    assert 4.0 < fabric.now - start < 5.0
    assert fabric.log.count(Outcome.DELIVERED, kind="REJ") == 0
    play(fabric, send(again, b"hello"), receive(accepted))
    ends.close(again, accepted, passive)


class GivenNumberFirst(Random):
    """A random source that draws a given queue pair number first."""

    def __init__(self, others: Random, number: int) -> None:
        super().__init__()
        self.others = others
        self.number: int | None = number

    def getrandbits(self, k: int, /) -> int:
        if k == QPN_BITS and self.number is not None:
            number, self.number = self.number, None
            return number
        return self.others.getrandbits(k)


def test_connection_survives_another_hardware_address_of_its_peer() -> None:
    fabric = Fabric()
    ends = Ends(fabric)
    active, passive = ends.connect()
    network = ends.a.network
    (ifindex,) = (each.index for each in network.interfaces() if each.name == "eth0")
    network.add_neighbour(ifindex, "10.0.0.2", mac=bytes.fromhex("020000000099"))
    play(fabric, send(active, b"hello"), receive(passive))
    play(fabric, send(passive, b"hello"), receive(active))
    ends.close(active, passive)
