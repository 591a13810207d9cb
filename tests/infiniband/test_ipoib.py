"""IP addresses of IPoIB interfaces, in memory and with a real subnet administrator.

The network with the interfaces and neighbours is in memory: no kernel has IPoIB interfaces without an adapter.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infiniband.hosts import PATIENCE, PORT, IbHost, event, param
from infiniband.sites import Site
from rdmacm import (
    CmEventType,
    CmId,
    EventChannel,
    PortSpace,
    RaiFlag,
    RdmaError,
    SockAddrIB,
    create_ep,
    explain,
    getaddrinfo,
)
from rdmacm.address import Gid
from rdmacm.proto.ipoib import IpoibAddress
from rdmacm.provider.connparam import UdParam
from rdmacm.testing import MemoryNetwork
from rdmacm.verbs.enums import QPState

#: The Q_Key of the broadcast groups of IPoIB, in OpenSM and in memory.
IPOIB_QKEY = 0x0B1B
UDP_QKEY = 0x01234567
UNKNOWN = Gid("fe80::1:2:3")


class IpoibHost:
    """A host with one InfiniBand port and the interface ``ib0`` on it: 10.9.0.N and fd09::N."""

    def __init__(self, host: IbHost, number: int) -> None:
        self.host = host
        self.provider = host.provider
        network = host.provider.host.network
        assert isinstance(network, MemoryNetwork)
        self.network = network
        self.ip, self.ip6 = f"10.9.0.{number}", f"fd09::{number}"
        self.ib0 = network.add_ipoib_interface("ib0", f"{self.ip}/24", f"{self.ip6}/64", gid=host.gid)

    def knows(self, other: IpoibHost) -> None:
        """Add the other host to the neighbour table, as ARP and neighbour discovery would."""
        for address in (other.ip, other.ip6):
            self.network.add_neighbour(self.ib0, address, mac=IpoibAddress(other.host.gid, 0x48).pack())

    def id(self, space: PortSpace = PortSpace.TCP, channel: EventChannel | None = None) -> CmId:
        return self.host.id(channel, space)

    @contextmanager
    def listening(self, space: PortSpace, address: str = "") -> Iterator[CmId]:
        with EventChannel(self.provider) as channel, self.id(space, channel) as listener:
            listener.bind_addr((address, PORT))
            listener.listen()
            yield listener


@pytest.fixture
def one(site: Site) -> Iterator[IpoibHost]:
    with site.host("HostA", MemoryNetwork()) as host:
        yield IpoibHost(host, 1)


@pytest.fixture
def two(site: Site, one: IpoibHost) -> Iterator[IpoibHost]:
    with site.host("HostB", MemoryNetwork()) as host:
        two = IpoibHost(host, 2)
        one.knows(two)
        two.knows(one)
        yield two


@pytest.mark.parametrize("family", ["ip", "ip6"])
def test_ip_address_leads_to_the_port(one: IpoibHost, two: IpoibHost, family: str) -> None:
    here, there = getattr(one, family), getattr(two, family)
    with one.id() as cmid:
        cmid.resolve_addr((there, PORT))
        assert (cmid.route.sgid, cmid.route.dgid, cmid.route.pkey) == (one.host.gid, two.host.gid, 0xFFFF)
        assert (cmid.verbs.name, cmid.port_num, cmid.gid_index) == (one.host.device, 1, 0)
        assert cmid.local_addr is not None
        assert not isinstance(cmid.local_addr, SockAddrIB)
        assert cmid.local_addr[0] == here
        cmid.resolve_route()
        (path,) = cmid.route.path_rec
        assert (path.sgid, path.dgid, path.pkey, path.mtu_bytes) == (one.host.gid, two.host.gid, 0xFFFF, 2048)
        assert path.slid != path.dlid
        explanation = cmid.explain()
        chosen = explanation.chosen
        assert chosen is not None
        assert (chosen.source, chosen.device, chosen.interface) == (here, one.host.device, "ib0")
        assert [step.name for step in explanation.steps] == ["bind", "route", "select", "neighbour", "path"]
        assert f"GID {two.host.gid}" in explanation.steps[3].detail
        assert "subnet administrator" in explanation.steps[4].detail


@pytest.mark.parametrize("destination", ["own", "127.0.0.1", ""])
def test_own_address_leads_to_the_port_itself(one: IpoibHost, destination: str) -> None:
    with one.id(PortSpace.IPOIB) as cmid:
        cmid.resolve_addr((one.ip if destination == "own" else destination, PORT))
        assert (cmid.route.sgid, cmid.route.dgid) == (one.host.gid, one.host.gid)
        cmid.resolve_route()
        (path,) = cmid.route.path_rec
        assert path.slid == path.dlid
    with one.id() as cmid:
        cmid.bind_addr((one.ip, 0))
        cmid.resolve_addr((one.ip if destination == "own" else destination, PORT))
        assert (cmid.route.sgid, cmid.route.dgid) == (one.host.gid, one.host.gid)


@pytest.mark.parametrize("family", ["ip", "ip6"])
def test_result_of_a_lookup_has_the_route(one: IpoibHost, two: IpoibHost, family: str) -> None:
    (info,) = getaddrinfo(getattr(two, family), PORT, provider=one.provider)
    (path,) = (data.path for data in info.route)
    assert (path.sgid, path.dgid, path.mtu_bytes) == (one.host.gid, two.host.gid, 2048)
    assert info.src_addr is not None
    assert not isinstance(info.src_addr, SockAddrIB)
    assert (info.device, info.src_addr[0]) == (one.host.device, getattr(one, family))
    with create_ep(info, provider=one.provider) as cmid:
        assert cmid.route.path_rec == (path,)


def test_service_is_found_from_an_ip_address(one: IpoibHost, two: IpoibHost) -> None:
    with EventChannel(two.provider) as channel, CmId(channel, PortSpace.IB) as listener, one.id() as cmid:
        listener.bind_addr(SockAddrIB(two.host.gid))
        listener.listen()
        listener.register_service("ipoib-storage")
        cmid.bind_addr((one.ip, 0))
        cmid.resolve_addrinfo(None, "ipoib-storage", flags=RaiFlag.SA)
        cmid.resolve_route()
        assert cmid.route.path_rec[0].dgid == two.host.gid


def test_neighbour_that_the_administrator_does_not_know(one: IpoibHost) -> None:
    one.network.add_neighbour(one.ib0, "10.9.0.9", mac=IpoibAddress(UNKNOWN, 0x48).pack())
    with one.id() as cmid:
        cmid.resolve_addr(("10.9.0.9", PORT))
        assert cmid.route.dgid == UNKNOWN
        with pytest.raises(RdmaError, match=f"no path to {UNKNOWN}") as failed:
            cmid.resolve_route()
        assert failed.value.errno == errno.EINVAL


def test_administrator_without_response(own_site: Site) -> None:
    with own_site.host("HostA", MemoryNetwork()) as first, own_site.host("HostB", MemoryNetwork()) as second:
        one, two = IpoibHost(first, 1), IpoibHost(second, 2)
        one.knows(two)
        with one.id() as cmid:
            cmid.resolve_addr((two.ip, PORT))
            own_site.end_administrator()
            with pytest.raises(RdmaError, match="did not respond in time") as failed:
                cmid.resolve_route(200)
            assert failed.value.errno == errno.ETIMEDOUT
            own_site.begin_administrator()
            cmid.resolve_route(own_site.outage_ms)
            assert cmid.route.path_rec[0].dgid == two.host.gid


@pytest.mark.parametrize("address", ["", "10.9.0.2"])
def test_connection_between_ip_addresses(one: IpoibHost, two: IpoibHost, address: str) -> None:
    with (
        two.listening(PortSpace.TCP, address) as listener,
        EventChannel(one.provider) as channel,
        one.id(channel=channel) as cmid,
    ):
        cmid.resolve_addr((two.ip, PORT))
        event(channel).ack()
        cmid.resolve_route()
        event(channel).ack()
        cmid.connect(param(b"hello"))
        with event(listener.channel) as request:
            assert request.type is CmEventType.CONNECT_REQUEST
            assert request.private_data.rstrip(b"\0") == b"hello"
            assert len(request.private_data) == 56
            peer = request.id
        with peer:
            assert peer.local_addr == (two.ip, PORT)
            assert peer.peer_addr == (one.ip, cmid.src_port)
            assert (peer.route.sgid, peer.route.dgid) == (two.host.gid, one.host.gid)
            peer.accept(param(b"welcome"))
            with event(channel) as reply:
                assert reply.type is CmEventType.CONNECT_RESPONSE
                assert reply.private_data.rstrip(b"\0") == b"welcome"
            cmid.establish()
            with event(listener.channel) as established:
                assert established.type is CmEventType.ESTABLISHED


def test_listener_on_another_address_refuses(one: IpoibHost, two: IpoibHost) -> None:
    with (
        two.listening(PortSpace.TCP, two.ip6),
        EventChannel(one.provider) as channel,
        one.id(channel=channel) as cmid,
    ):
        cmid.resolve_addr((two.ip, PORT))
        event(channel).ack()
        cmid.resolve_route()
        event(channel).ack()
        cmid.connect(param())
        with event(channel) as refused:
            assert (refused.type, refused.status) == (CmEventType.REJECTED, 28)


@pytest.mark.parametrize(("space", "qkey"), [(PortSpace.IPOIB, IPOIB_QKEY), (PortSpace.UDP, UDP_QKEY)])
@pytest.mark.parametrize("address", ["", "10.9.0.2"])
def test_q_key_of_datagram_ids(one: IpoibHost, two: IpoibHost, space: PortSpace, qkey: int, address: str) -> None:
    with (
        two.listening(space, address) as listener,
        EventChannel(one.provider) as channel,
        one.id(space, channel) as cmid,
    ):
        cmid.resolve_addr((two.ip, PORT))
        event(channel).ack()
        cmid.resolve_route()
        event(channel).ack()
        assert cmid.init_qp_attr(QPState.INIT)[0].qkey == qkey
        cmid.connect(param(b"who"))
        with event(listener.channel) as request:
            peer = request.id
        with peer:
            assert (peer.local_addr, peer.peer_addr) == ((two.ip, PORT), (one.ip, cmid.src_port))
            peer.accept(param(b"me"))
            with event(channel) as found:
                assert found.type is CmEventType.ESTABLISHED
                assert isinstance(found.param, UdParam)
                assert (found.param.qp_num, found.param.qkey) == (0x1234, qkey)


def test_explanation_text(one: IpoibHost, two: IpoibHost) -> None:
    text = explain(two.ip, PORT, provider=one.provider).text()
    assert f"{one.host.device}/1" in text
    assert f"{one.ip} on ib0, IPoIB" in text
    assert "chosen: the only candidate that passes every rule" in text
    assert f"{two.ip} on ib0: reachable at 00:00:00:48:" in text


def test_interface_is_shown_on_its_port_and_is_no_roce_device(one: IpoibHost) -> None:
    found = {device.name: device for device in one.provider.devices()}
    assert "soft_ib0" not in found
    assert "soft_lo" in found
    (row,) = found[one.host.device].ports[0].gids[:1]
    assert (row.ndev_name, row.ndev_ifindex) == ("ib0", one.ib0)
    with one.id() as cmid:
        cmid.bind_addr((one.ip, 0))
        assert cmid.verbs.device == found[one.host.device]


def test_neighbour_answers_later(one: IpoibHost, two: IpoibHost) -> None:
    third = "10.9.0.3"
    with EventChannel(one.provider) as channel, one.id(channel=channel) as cmid:
        cmid.resolve_addr((third, PORT), timeout_ms=10_000)
        assert (one.ib0, bytes((10, 9, 0, 3))) in one.network.probed
        one.network.add_neighbour(one.ib0, third, mac=IpoibAddress(two.host.gid, 0x99).pack())
        with channel.get_event(PATIENCE) as resolved:
            assert resolved.type is CmEventType.ADDR_RESOLVED
        assert cmid.route.dgid == two.host.gid


def test_absent_neighbour(one: IpoibHost) -> None:
    with one.id() as cmid, pytest.raises(RdmaError, match=r"10\.9\.0\.9 did not answer on ib0") as failed:
        cmid.resolve_addr(("10.9.0.9", PORT), timeout_ms=20)
    assert failed.value.errno == errno.ETIMEDOUT
