"""Connecting to a closed port or an unreachable host fails at once; forged errors have no effect."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import rdmacm
from rdmacm import AddrInfo, CmEventType, CmId, ConnParam, EventChannel, PortSpace, RdmaError
from rdmacm.proto.cm.connection import CmConnection
from rdmacm.proto.cm.messages import pack_message
from rdmacm.proto.constants import GSI_QPN, ROCE_PORT
from rdmacm.soft.ids.ib_cm import IbCmConnector
from rdmacm.soft.ids.identifier import SoftId
from support.endpoints import in_thread
from support.icmp import HOST_UNREACHABLE, gsi_packet, send_error
from support.netns import Host, TwoHosts, needs_netns

pytestmark = needs_netns

PORT = 7471
#: Seconds: less than the first retry of a REQ, which follows after 4.6 s.
AT_ONCE = 4.0


@contextmanager
def mute_peer(host: Host) -> Iterator[socket.socket]:
    """Open UDP port 4791 of a host, and answer nothing."""
    with host.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", ROCE_PORT))
        sock.settimeout(5)
        yield sock


def resolved(channel: EventChannel | None, host: str = "10.7.0.2", space: PortSpace = PortSpace.TCP) -> CmId:
    """An id whose route is resolved, with a queue pair if it needs one."""
    cmid = CmId(channel, space)
    cmid.resolve_addr((host, PORT))
    if channel is not None:
        channel.get_event(5).ack()
    cmid.resolve_route()
    if channel is not None:
        channel.get_event(5).ack()
    if space is PortSpace.TCP:
        cmid.create_qp()
    return cmid


def connection_of(cmid: CmId) -> CmConnection:
    backend = cmid._backend
    assert isinstance(backend, SoftId)
    connector = backend.connector
    assert isinstance(connector, IbCmConnector)
    assert connector.connection is not None
    return connector.connection


def request_of(connection: CmConnection, tid: int | None = None, **fields: int) -> bytes:
    """The packet of a connection's request, perhaps with other fields."""
    kept = {name: getattr(connection.request, name) for name in fields}
    for name, value in fields.items():
        setattr(connection.request, name, value)
    mad = pack_message(connection.request, connection.transaction_id if tid is None else tid)
    for name, value in kept.items():
        setattr(connection.request, name, value)
    return gsi_packet(mad)


@pytest.fixture
def no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is sent once: nothing but the report of its first copy can end the attempt."""
    monkeypatch.setattr("rdmacm.proto.cm.engine.seconds", lambda exponent: 3600.0)


@pytest.mark.usefixtures("no_retry")
class TestClosedPort:
    @pytest.mark.parametrize("host", ["10.7.0.2", "fd07::2"])
    def test_connect(self, net: TwoHosts, host: str) -> None:
        with pytest.raises(ConnectionRefusedError) as caught:
            rdmacm.connect((host, PORT))
        error = caught.value
        assert isinstance(error, rdmacm.CmRefusedError)
        assert error.errno == errno.ECONNREFUSED
        where = f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
        assert str(error) == (
            f"connect {where}: the REQ to UDP port 4791 was not delivered: {host} reports that the port is closed "
            "[ECONNREFUSED]; try: starting the peer (no process there has opened an RDMA device), or accepting UDP "
            "port 4791 in its firewall (rdmacm doctor C1)"
        )

    def test_asyncio(self, net: TwoHosts) -> None:
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(rdmacm.aio.connect(("10.7.0.2", PORT)))

    @pytest.mark.parametrize(("space", "message"), [(PortSpace.TCP, "REQ"), (PortSpace.UDP, "SIDR_REQ")])
    def test_synchronous_id(self, net: TwoHosts, space: PortSpace, message: str) -> None:
        cmid = resolved(None, space=space)
        with pytest.raises(ConnectionRefusedError, match=f"the {message} to UDP port 4791"):
            cmid.connect(ConnParam(qp_num=7) if space is PortSpace.UDP else None)
        cmid.destroy()

    def test_event(self, net: TwoHosts) -> None:
        with EventChannel() as channel, resolved(channel) as cmid:
            cmid.connect()
            with channel.get_event(AT_ONCE) as event:
                assert (event.type, event.status) == (CmEventType.UNREACHABLE, -errno.ECONNREFUSED)
                assert isinstance(event.error, rdmacm.CmRefusedError)

    def test_other_processes_share_the_port(self, net: TwoHosts) -> None:
        """An error arrives at the socket of any process, and the helper thread of each forwards it."""
        code = (
            "import rdmacm, sys; listener = rdmacm.listen(('', 0)); print('ready', flush=True);"
            "sys.stdin.read(); listener.close()"
        )
        others = [net.a.popen_python(["-c", code], stdin=-1, stdout=-1) for _ in range(3)]
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline()
        net.b.sysctl("net.ipv4.icmp_ratelimit", 0)
        net.b.ip_batch(*(f"address add 10.7.0.{last}/24 dev vb" for last in range(10, 20)))
        for last in range(10, 20):
            with pytest.raises(ConnectionRefusedError):
                rdmacm.connect((f"10.7.0.{last}", PORT), timeout=10)
        for other in others:
            other.communicate()


class TestOtherErrors:
    def test_route_of_a_router_prohibits(self, net: TwoHosts) -> None:
        net.a.ip_batch("route add 10.9.0.0/16 via 10.7.0.2")
        net.b.ip_batch("route add unreachable 10.9.0.0/16")
        net.b.sysctl("net.ipv4.ip_forward", 1)
        with pytest.raises(RdmaError, match=r"10\.7\.0\.2 reports that the host is unreachable") as caught:
            rdmacm.connect(("10.9.9.9", PORT), timeout=10)
        assert caught.value.errno == errno.EHOSTUNREACH

    @pytest.mark.usefixtures("no_retry")
    @pytest.mark.parametrize(
        ("kind", "code"),
        [("prohibit", errno.EACCES), ("unreachable", errno.EHOSTUNREACH), ("throw", errno.ENETUNREACH)],
    )
    def test_route_added_after_the_resolution(self, net: TwoHosts, kind: str, code: int) -> None:
        cmid = resolved(None)
        net.a.ip_batch(f"route add {kind} 10.7.0.2/32", *(["route del 10.7.0.0/24"] if kind == "throw" else []))
        with pytest.raises(RdmaError, match="this host reports") as caught:
            cmid.connect()
        assert caught.value.errno == code
        assert isinstance(caught.value, PermissionError) == (kind == "prohibit")
        cmid.destroy()

    @pytest.mark.slow
    def test_neighbour_is_gone(self, net: TwoHosts) -> None:
        cmid = resolved(None)
        net.b.ip_batch("address del 10.7.0.2/24 dev vb")
        net.a.ip_batch("neighbour flush dev va")
        with pytest.raises(RdmaError, match="this host reports that the host is unreachable") as caught:
            cmid.connect()
        assert caught.value.errno == errno.EHOSTUNREACH
        cmid.destroy()

    def test_next_address_is_tried_at_once(self, net: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> None:
        """An attempt that fails does not leave the next one to wait for its start."""
        monkeypatch.setattr("rdmacm.endpoint.race._ATTEMPT_DELAY", 60.0)
        net.a.ip_batch("route add 10.9.0.0/16 via 10.7.0.2")
        net.b.ip_batch("route add unreachable 10.9.0.0/16")
        net.b.sysctl("net.ipv4.ip_forward", 1)
        infos = [
            AddrInfo(family=socket.AF_INET, port_space=PortSpace.TCP, dst_addr=(host, PORT))
            for host in ("10.9.9.9", "10.9.9.8", "10.9.9.7", "10.9.9.6", "10.7.0.2")
        ]
        with net.b.enter():
            listener = rdmacm.listen(("10.7.0.2", PORT))
        with listener, in_thread(lambda: listener.accept(timeout=10).close()):
            with rdmacm.connect(infos, timeout=10) as connection:
                assert connection.peer_addr == infos[-1].dst_addr


class TestForgedErrors:
    def test_only_the_errors_of_a_request_count(self, net: TwoHosts) -> None:
        with mute_peer(net.b) as peer, EventChannel() as channel, resolved(channel) as cmid:
            cmid.connect()
            sent = peer.recv(1000)
            connection = connection_of(cmid)
            right = request_of(connection)
            assert sent[20:-4] == right[20:]
            comm_id, tid = connection.comm_id, connection.transaction_id
            with net.b.enter():

                def forge(packet: bytes, destination: str = "10.7.0.2") -> None:
                    send_error("10.7.0.1", destination, ROCE_PORT, packet)

                forge(request_of(connection, local_comm_id=comm_id ^ 1))
                forge(request_of(connection, local_comm_id=comm_id ^ 1 << 31))
                forge(request_of(connection, tid ^ 1))
                forge(right, "10.7.0.3")
                forge(right[:59])
                forge(gsi_packet(right[20:], source_qpn=GSI_QPN + 1))
                with pytest.raises(TimeoutError):
                    channel.get_event(0.3)
                assert connection_of(cmid) is connection
                send_error("10.7.0.1", "10.7.0.2", ROCE_PORT, right, error=HOST_UNREACHABLE)
            with channel.get_event(AT_ONCE) as event:
                assert (event.type, event.status) == (CmEventType.UNREACHABLE, -errno.EHOSTUNREACH)
                assert event.message.endswith("10.7.0.2 reports that the host is unreachable")

    def test_established_connection_survives(self, net: TwoHosts) -> None:
        with net.b.enter():
            listener = rdmacm.listen(("10.7.0.2", PORT))
        accepted: list[rdmacm.Connection] = []
        server = threading.Thread(target=lambda: accepted.append(listener.accept(timeout=10)))
        server.start()
        with rdmacm.connect(("10.7.0.2", PORT), timeout=10) as conn:
            server.join()
            packet = request_of(connection_of(conn.id))
            with net.b.enter():
                for _ in range(100):
                    send_error("10.7.0.1", "10.7.0.2", ROCE_PORT, packet)
            for count in range(50):
                conn.send(b"%d" % count)
                assert accepted[0].recv(5) == b"%d" % count
        accepted[0].close()
        listener.close()
