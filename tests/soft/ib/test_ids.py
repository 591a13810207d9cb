"""InfiniBand ids on a subnet in memory, in situations that ibsim cannot produce."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rdmacm import CmId, ConnParam, EventChannel, PortSpace, RaiFlag, RdmaError, SockAddrIB, getaddrinfo
from rdmacm.address import Gid, service_id
from rdmacm.provider.cmstate import State
from rdmacm.testing import MemoryNetwork, MemorySubnet, VirtualClock, memory_provider
from support.clock import REAL

SID = service_id(PortSpace.IB, 7471)
ALL_BITS = (1 << 64) - 1
TIMEOUT = 10.0
UNREACHABLE = SockAddrIB(Gid("fec0::1"), SID, ALL_BITS)


class Pair:
    """A subnet with a server and a client."""

    def __init__(self, clock: Callable[[], float] = REAL) -> None:
        self.subnet = MemorySubnet(clock=clock)
        ports = [self.subnet.add_port(name) for name in ("one", "two")]
        self.server, self.client = (memory_provider(MemoryNetwork(), clock, infiniband=[port]) for port in ports)
        self.here, self.there = (port.port().gids[0] for port in reversed(ports))
        self.service = SockAddrIB(self.there, SID, ALL_BITS)

    @contextmanager
    def listening(self) -> Iterator[CmId]:
        with EventChannel(self.server) as channel, CmId(channel, PortSpace.IB) as listener:
            listener.bind_addr(self.service)
            listener.listen()
            yield listener

    def id(self) -> CmId:
        return CmId(port_space=PortSpace.IB, provider=self.client)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
    return Pair()


def test_resolve_route_returns_an_alternate_path_if_asked(pair: Pair) -> None:
    path = pair.subnet.sa.path(pair.here, pair.there)
    same, other = path.replace(sl=1), path.replace(dlid=path.dlid + 100)
    pair.subnet.sa.set_paths(pair.here, pair.there, path, same, other)
    with pair.id() as cmid:
        cmid.resolve_addr(pair.service)
        cmid.resolve_route()
        assert [found.dlid for found in cmid.route.path_rec] == [path.dlid]
    with pair.id() as cmid:
        cmid.resolve_addr(pair.service)
        cmid.resolve_route(alternate=True)
        assert [found.dlid for found in cmid.route.path_rec] == [path.dlid, other.dlid]


def test_private_data_is_not_mistaken_for_an_ip_header(pair: Pair) -> None:
    """With AF_IB addresses, private data does not begin with rdma_cm's IP header."""
    data = bytes([0, 0x40, 0x1D, 0x2F]) + bytes(12) + bytes([10, 0, 0, 1]) + bytes(12) + bytes([10, 0, 0, 2])
    with pair.listening() as listener, EventChannel(pair.client) as channel, CmId(channel, PortSpace.IB) as cmid:
        cmid.resolve_addr(pair.service)
        channel.get_event(TIMEOUT).ack()
        cmid.resolve_route()
        channel.get_event(TIMEOUT).ack()
        cmid.connect(ConnParam(data, qp_num=7))
        with listener.channel.get_event(TIMEOUT) as request:
            assert request.private_data == data.ljust(92, b"\0")
            peer = request.id
        source = peer.peer_addr
        peer.destroy()
        assert isinstance(source, SockAddrIB)
        assert source.addr == pair.here


def test_service_can_be_resolved_repeatedly(pair: Pair) -> None:
    with pair.listening() as listener, pair.id() as cmid:
        listener.register_service("storage")
        cmid.bind_addr(SockAddrIB(pair.here))
        for _ in range(2):
            cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            (found,) = cmid.query_addrinfo()
            assert found.dst_addr == pair.service
            with pytest.raises(RdmaError):
                cmid.resolve_addr(UNREACHABLE)
            assert cmid.state is State.ADDR_BOUND


def test_service_name_that_is_not_utf8(pair: Pair) -> None:
    """A name of a command line may hold bytes that are not UTF-8, as surrogates (PEP 383)."""
    with pair.listening() as listener:
        listener.register_service("caf\udce9")
        (found,) = getaddrinfo(None, "caf\udce9", flags=RaiFlag.SA, provider=pair.client)
        assert found.dst_addr == pair.service
        (record,) = pair.subnet.sa.services(REAL())
        assert (record.service_name, record.name) == (b"caf\xe9", "caf\\xe9")
        for refused in (
            lambda: listener.register_service("\ud800"),
            lambda: getaddrinfo(None, "\ud800", flags=RaiFlag.SA, provider=pair.client),
        ):
            with pytest.raises(RdmaError):
                refused()


def test_silent_sa_raises_enoent_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
    clock = VirtualClock(0)
    pair = Pair(clock)
    pair.subnet.sa.silence = 1.0
    with pytest.raises(RdmaError) as raised:
        getaddrinfo(None, "storage", flags=RaiFlag.SA, provider=pair.client)
    assert raised.value.errno == errno.ENOENT
    assert clock.now == pytest.approx(2)
