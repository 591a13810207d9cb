"""IPoIB on a subnet in memory: partitions, ports, interfaces and neighbours that do not fit."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rdmacm import (
    CmEventType,
    CmId,
    ConnParam,
    EventChannel,
    PortSpace,
    RaiFlag,
    RdmaError,
    SockAddrIB,
    UdParam,
    connect,
    explain,
    getaddrinfo,
    listen,
)
from rdmacm.address import Gid
from rdmacm.constants import IdOption, OptionLevel
from rdmacm.explanation import Explanation
from rdmacm.proto.ipoib import IpoibAddress
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.query import PathMask
from rdmacm.testing import MemoryNetwork, MemorySubnet, memory_provider
from rdmacm.tools.main import main
from rdmacm.verbs.enums import PortState, QPState
from support.clock import REAL

PATIENCE = 10.0
THERE = ("10.9.0.2", 7471)


class Host:
    """A host with an InfiniBand port, ``ib0`` on it (10.9.0.1), and ``eth0`` (10.0.0.1). "two" is another port.

    ``ib0.8001`` (10.8.0.1) is on the same port, in partition 0x8001.
    """

    def __init__(self) -> None:
        self.subnet = MemorySubnet(clock=REAL)
        port = self.subnet.add_port("one", pkeys=(0xFFFF, 0x8001))
        self.two = self.subnet.add_port("two").port().gids[0]
        self.gid = port.port().gids[0]
        self.network = MemoryNetwork()
        self.eth0 = self.network.add_interface("eth0", "10.0.0.1/24")
        self.ib0 = self.network.add_ipoib_interface("ib0", "10.9.0.1/24", "fd09::1/64", gid=self.gid)
        self.child = self.network.add_ipoib_interface("ib0.8001", "10.8.0.1/24", gid=self.gid, pkey=0x8001)
        for ifindex, address in ((self.ib0, THERE[0]), (self.child, "10.8.0.2")):
            self.network.add_neighbour(ifindex, address, mac=IpoibAddress(self.two, 0x48).pack())
        self.provider = memory_provider(self.network, infiniband=[port])

    def id(self, space: PortSpace = PortSpace.TCP) -> CmId:
        return CmId(port_space=space, provider=self.provider)

    def refused(self, destination: tuple[str, int] = THERE, source: tuple[str, int] | None = None) -> RdmaError:
        """The error of a resolution."""
        with self.id() as cmid, pytest.raises(RdmaError) as failed:
            cmid.resolve_addr(destination, source, 50)
        return failed.value

    def explain(self, node: str = THERE[0]) -> Explanation:
        return explain(node, 7471, provider=self.provider, timeout_ms=50)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
    return Host()


@contextmanager
def watched(host: Host) -> Iterator[tuple[EventChannel, CmId]]:
    """A channel and an id that has resolved its address."""
    with EventChannel(host.provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addr(THERE)
        channel.get_event(PATIENCE).ack()
        yield channel, cmid


def without_port(host: Host) -> None:
    host.provider = memory_provider(host.network)


class TestPort:
    def test_interface_without_a_port(self, host: Host) -> None:
        without_port(host)
        failed = host.refused()
        assert failed.errno == errno.ENODEV
        for part in ("ib0 is IPoIB", str(host.gid), "RDMACM_IB"):
            assert part in str(failed)
        with host.id() as cmid, pytest.raises(RdmaError, match=str(host.gid)) as unbound:
            cmid.bind_addr(("10.9.0.1", 0))
        assert unbound.value.errno == errno.ENODEV
        explanation = host.explain()
        assert {c.rule for c in explanation.candidates if c.source == "10.9.0.1"} == {"infiniband-port"}
        assert not any("ib0" in device.name for device in host.provider.devices())

    def test_other_ports_are_not_taken(self, host: Host) -> None:
        host.provider = memory_provider(host.network, infiniband=[host.subnet.ports["two"]])
        assert host.refused().errno == errno.ENODEV

    def test_port_that_is_down(self, host: Host) -> None:
        host.subnet.change_port("one", state=PortState.DOWN)
        failed = host.refused()
        assert failed.errno == errno.ENODEV
        assert "one port 1 is DOWN" in str(failed)

    def test_interface_that_is_down(self, host: Host) -> None:
        host.network.set_interface(host.ib0, up=False)
        assert host.refused(source=("10.9.0.1", 0)).errno in (errno.ENETUNREACH, errno.EINVAL)

    def test_port_appears(self, host: Host) -> None:
        """The ports are looked up by each resolution."""
        host.subnet.change_port("one", gids=(Gid("fe80::7"),))
        assert host.refused().errno == errno.ENODEV
        host.subnet.change_port("one", gids=(Gid("fe80::7"), host.gid))
        with host.id() as cmid:
            cmid.resolve_addr(THERE)
            assert (cmid.gid_index, cmid.route.sgid) == (1, host.gid)


class TestPartition:
    def test_p_key_of_the_interface(self, host: Host) -> None:
        host.subnet.change_port("two", pkeys=(0xFFFF, 0x8001))
        with host.id() as cmid:
            cmid.resolve_addr(("10.8.0.2", 1))
            assert (cmid.route.sgid, cmid.route.dgid, cmid.route.pkey) == (host.gid, host.two, 0x8001)
            cmid.resolve_route()
            assert cmid.route.path_rec[0].pkey == 0x8001
            assert cmid.init_qp_attr(QPState.INIT)[0].pkey_index == 1

    def test_destination_outside_the_partition(self, host: Host) -> None:
        with host.id() as cmid:
            cmid.resolve_addr(("10.8.0.2", 1))
            with pytest.raises(RdmaError, match="no path") as failed:
                cmid.resolve_route()
            assert failed.value.errno == errno.EINVAL

    def test_port_outside_the_partition(self, host: Host) -> None:
        host.subnet.change_port("one", pkeys=(0xFFFF,))
        failed = host.refused(("10.8.0.2", 1))
        assert failed.errno == errno.ENODEV
        assert "P_Key 0x8001 of ib0.8001 is not in the table of one: 0xffff" in str(failed)
        with host.id() as cmid, pytest.raises(RdmaError, match="P_Key 0x8001") as unbound:
            cmid.bind_addr(("10.8.0.1", 0))
        assert unbound.value.errno == errno.EINVAL
        assert {c.rule for c in host.explain("10.8.0.2").candidates if c.source == "10.8.0.1"} == {"partition"}

    def test_sidr_request_has_the_partition_of_the_interface(self, host: Host) -> None:
        host.subnet.change_port("two", pkeys=(0x8001,))
        network = MemoryNetwork()
        network.add_ipoib_interface("ib0.8001", "10.8.0.2/24", gid=host.two, pkey=0x8001)
        server = memory_provider(network, infiniband=[host.subnet.ports["two"]])
        with EventChannel(server) as channel, CmId(channel, PortSpace.UDP) as listener:
            listener.bind_addr(("10.8.0.2", 7471))
            listener.listen()
            with EventChannel(host.provider) as events, CmId(events, PortSpace.UDP) as cmid:
                cmid.resolve_addr(("10.8.0.2", 7471))
                events.get_event(PATIENCE).ack()
                cmid.resolve_route()
                events.get_event(PATIENCE).ack()
                cmid.connect(ConnParam(b"who"))
                with channel.get_event(PATIENCE) as request:
                    peer = request.id
                with peer:
                    assert (peer.peer_addr, peer.route.pkey) == (("10.8.0.1", cmid.src_port), 0x8001)

    @pytest.mark.parametrize(("name", "pkey"), [("ib0", 0xFFFF), ("ib0.8001", 0x8001)])
    def test_link_local_addresses_of_two_partitions(self, host: Host, name: str, pkey: int) -> None:
        """Both interfaces of a port have the same link-local address: the P_Key of the request tells which is meant."""
        host.subnet.change_port("two", pkeys=(0xFFFF, 0x8001))
        server_network = MemoryNetwork()
        scopes = {}
        for interface, key, ifindex in (("ib0", 0xFFFF, host.ib0), ("ib0.8001", 0x8001, host.child)):
            host.network.add_address(ifindex, "fe80::1/64")
            host.network.add_neighbour(ifindex, "fe80::2", mac=IpoibAddress(host.two, 0x48).pack())
            scopes[interface] = server_network.add_ipoib_interface(interface, "fe80::2/64", gid=host.two, pkey=key)
        server = memory_provider(server_network, infiniband=[host.subnet.ports["two"]])
        scope = {"ib0": host.ib0, "ib0.8001": host.child}[name]
        with EventChannel(server) as channel, CmId(channel) as listener:
            listener.bind_addr(("::", 7471))
            listener.listen()
            with EventChannel(host.provider) as events, CmId(events) as cmid:
                cmid.resolve_addr(("fe80::2", 7471, 0, scope))
                events.get_event(PATIENCE).ack()
                assert (cmid.local_addr, cmid.route.pkey) == (("fe80::1", cmid.src_port, 0, scope), pkey)
                cmid.resolve_route()
                events.get_event(PATIENCE).ack()
                cmid.connect(ConnParam(qp_num=7))
                with channel.get_event(PATIENCE) as request:
                    peer = request.id
                with peer:
                    assert (peer.local_addr, peer.route.pkey) == (("fe80::2", 7471, 0, scopes[name]), pkey)
                    assert peer.peer_addr == ("fe80::1", cmid.src_port, 0, scopes[name])


class TestNeighbour:
    def test_hardware_address_of_another_length(self, host: Host) -> None:
        host.network.add_neighbour(host.ib0, "10.9.0.3", mac=bytes(6))
        failed = host.refused(("10.9.0.3", 1))
        assert failed.errno == errno.EADDRNOTAVAIL
        assert "no IPoIB hardware address" in str(failed)

    def test_gateway(self, host: Host) -> None:
        """A router of IP is not the destination's port, and does not forward RDMA."""
        host.network.add_route("10.7.0.0/16", host.ib0, gateway="10.9.0.2")
        failed = host.refused(("10.7.0.1", 1))
        assert failed.errno == errno.EADDRNOTAVAIL
        assert "10.7.0.1 is behind the gateway 10.9.0.2" in str(failed)

    @pytest.mark.parametrize(
        ("group", "source", "mgid"),
        [
            ("224.1.2.3", "10.9.0.1", "ff12:401b:ffff::1:203"),
            ("239.255.0.1", "10.8.0.1", "ff12:401b:8001::fff:1"),
            ("ff0e::1:2:3", "fd09::1", "ff12:601b:ffff::1:2:3"),
        ],
    )
    def test_multicast_address_is_mapped(self, host: Host, group: str, source: str, mgid: str) -> None:
        with host.id(PortSpace.UDP) as cmid:
            cmid.resolve_addr((group, 1), (source, 0))
            assert cmid.route.dgid == Gid(mgid)

    def test_type_of_service_is_the_qos_class(self, host: Host) -> None:
        with host.id() as cmid:
            cmid.resolve_addr(THERE)
            cmid.set_option(OptionLevel.ID, IdOption.TOS, 0x20)
            cmid.resolve_route()
        (query,) = (mad for _, _, mad in host.subnet.sa.requests if mad.attribute_id == Attribute.PATH_RECORD)
        asked = PathRecord.unpack(query.data[: PathRecord.SIZE])
        assert (asked.qos_class, asked.traffic_class) == (0x20, 0)
        assert PathMask(query.component_mask) & PathMask.QOS_CLASS


class TestOtherLinkLayer:
    def test_ethernet_is_still_roce(self, host: Host) -> None:
        host.network.add_neighbour(host.eth0, "10.0.0.2")
        with host.id() as cmid:
            cmid.resolve_addr(("10.0.0.2", 1))
            assert cmid.verbs.name == "soft_eth0"
        with host.id(PortSpace.IPOIB) as cmid, pytest.raises(OSError, match="IPOIB"):
            cmid.resolve_addr(("10.0.0.2", 1))

    @pytest.mark.parametrize(("source", "destination"), [("10.0.0.1", "10.9.0.1"), ("10.9.0.1", "10.0.0.1")])
    def test_own_address_of_another_link_layer(self, host: Host, source: str, destination: str) -> None:
        failed = host.refused((destination, 1), (source, 0))
        assert failed.errno == errno.ENODEV
        explanation = failed.explanation
        assert explanation is not None
        assert {c.rule for c in explanation.candidates if c.source == source} == {"egress-interface"}


class TestEvents:
    def test_interface_changes(self, host: Host) -> None:
        with watched(host) as (channel, _):
            changes: list[tuple[Callable[[], None], int]] = [
                (lambda: host.network.set_interface(host.ib0, mac=IpoibAddress(host.gid, 0x77).pack()), 0),
                (lambda: host.network.set_interface(host.ib0, up=False), errno.ENETDOWN),
                (lambda: host.network.remove_address(host.ib0, "10.9.0.1"), errno.EADDRNOTAVAIL),
            ]
            for change, code in changes:
                change()
                host.provider.devices()  # looks at the network
                with channel.get_event(PATIENCE) as changed:
                    assert (changed.type, changed.status) == (CmEventType.ADDR_CHANGE, -code)

    def test_interface_is_removed(self, host: Host) -> None:
        with watched(host) as (channel, _):
            host.network.remove_interface(host.child)  # not this id's
            host.network.remove_interface(host.ib0)
            host.provider.devices()
            with channel.get_event(PATIENCE) as changed:
                assert (changed.type, changed.status) == (CmEventType.ADDR_CHANGE, -errno.EADDRNOTAVAIL)
                assert "ib0 is gone" in changed.message

    def test_ids_with_gids_are_not_concerned(self, host: Host) -> None:
        with EventChannel(host.provider) as channel, CmId(channel, PortSpace.IB) as cmid:
            cmid.bind_addr(SockAddrIB(host.gid))
            host.network.remove_interface(host.ib0)
            host.provider.devices()
            with pytest.raises(BlockingIOError):
                channel.get_event(0)


class TestQKey:
    def test_q_key_that_the_administrator_does_not_tell(self, host: Host) -> None:
        """The P_Key of the child interface has no broadcast group."""
        host.subnet.change_port("two", pkeys=(0xFFFF, 0x8001))
        with host.id(PortSpace.IPOIB) as cmid:
            cmid.resolve_addr(("10.8.0.2", 1))
            cmid.resolve_route()
            with pytest.raises(RdmaError, match="knows no group ff12:401b:8001::ffff:ffff") as unknown:
                cmid.init_qp_attr(QPState.INIT)
            assert unknown.value.errno == errno.EADDRNOTAVAIL

    def test_groups_of_the_port_space_are_those_of_ipoib(self, host: Host) -> None:
        """They have the MGID of IPoIB, and the broadcast group's Q_Key."""
        with host.id(PortSpace.IPOIB) as cmid:
            cmid.bind_addr(("10.9.0.1", 0))
            cmid.join_multicast(("239.1.2.3", 0))
            param = cmid.event.param
            assert isinstance(param, UdParam)
            assert param.ah_attr.gr.dgid == Gid("ff12:401b:ffff::f01:203")
            with host.id(PortSpace.IPOIB) as other:
                other.bind_addr(("10.9.0.1", 0))
                other.join_multicast(("239.1.2.3", 0))
            assert host.subnet.sa.members(param.ah_attr.gr.dgid)
            assert param.qkey == 0xB1B

    def test_group_of_a_partition_without_a_broadcast_group(self, host: Host) -> None:
        with host.id(PortSpace.IPOIB) as cmid:
            cmid.bind_addr(("10.8.0.1", 0))
            with pytest.raises(RdmaError, match="knows no group") as refused:
                cmid.join_multicast(("239.1.2.3", 0))
            assert refused.value.errno == errno.EADDRNOTAVAIL


class TestNames:
    def test_result_has_the_device_of_a_passive_address(self, host: Host) -> None:
        (info,) = getaddrinfo("10.9.0.1", "7471", flags=RaiFlag.PASSIVE, provider=host.provider)
        assert (info.device, info.port_num) == ("one", 1)
        without_port(host)
        (info,) = getaddrinfo("10.9.0.1", "7471", flags=RaiFlag.PASSIVE, provider=host.provider)
        assert info.device is None

    def test_services_are_at_gids(self, host: Host) -> None:
        with host.id() as cmid:
            cmid.bind_addr(("10.9.0.1", 0))
            with pytest.raises(RdmaError, match=r"10\.9\.0\.1") as refused:
                cmid.register_service("storage")
            assert refused.value.errno == errno.EOPNOTSUPP


def test_table_of_devices(host: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdmacm.tools.devices.devices", lambda _: host.provider.devices())
    assert main(["devices", "--provider", "soft"]) == 0
    tables = capsys.readouterr().out.split("\n\n")
    (gids,) = (table for table in tables if table.startswith("one/1, IPoIB interface ib0"))
    assert gids.splitlines()[2].split() == ["0", str(host.gid), "IB", "-"]


def test_endpoints_refuse_because_there_is_no_data(host: Host) -> None:
    """A listener of rdmacm.listen() gets requests over IPoIB, too. It refuses them, and serves others."""
    server_network = MemoryNetwork()
    server_network.add_ipoib_interface("ib0", "10.9.0.2/24", gid=host.two)
    server = memory_provider(server_network, infiniband=[host.subnet.ports["two"]])
    with listen(("", THERE[1]), provider=server) as listener, EventChannel(host.provider) as events:
        for _ in range(2):
            with CmId(events) as cmid:
                cmid.resolve_addr(THERE)
                events.get_event(PATIENCE).ack()
                cmid.resolve_route()
                events.get_event(PATIENCE).ack()
                cmid.connect(ConnParam(b"hello", qp_num=7))
                with pytest.raises(TimeoutError):
                    listener.accept(timeout=0.05)
                with events.get_event(PATIENCE) as refused:
                    assert refused.type is CmEventType.REJECTED
    with pytest.raises(RdmaError, match="driver") as unsupported:
        connect(THERE, provider=host.provider)
    assert unsupported.value.errno == errno.EOPNOTSUPP


def test_gid_listener_takes_the_request_of_an_ip_address(host: Host) -> None:
    """To an AF_IB listener the header of IP addresses is private data, as in Linux."""
    server = memory_provider(MemoryNetwork(), infiniband=[host.subnet.ports["two"]])
    with EventChannel(server) as channel, CmId(channel, PortSpace.TCP) as listener:
        listener.bind_addr(SockAddrIB(host.two, 0x01060000 | THERE[1], (1 << 64) - 1))
        listener.listen()
        with EventChannel(host.provider) as events, CmId(events) as cmid:
            cmid.resolve_addr(THERE)
            events.get_event(PATIENCE).ack()
            cmid.resolve_route()
            events.get_event(PATIENCE).ack()
            cmid.connect(ConnParam(b"hello", qp_num=7))
            with channel.get_event(PATIENCE) as request:
                assert request.private_data[36:41] == b"hello"
                peer = request.id
            with peer:
                assert isinstance(peer.peer_addr, SockAddrIB)
                assert peer.peer_addr.addr == host.gid


def test_service_is_found_by_an_id_with_an_ip_address(host: Host) -> None:
    """rdma_resolve_addrinfo(3) asks only that the id is bound to an InfiniBand port."""
    server = memory_provider(MemoryNetwork(), infiniband=[host.subnet.ports["two"]])
    with EventChannel(server) as channel, CmId(channel, PortSpace.IB) as listener:
        listener.bind_addr(SockAddrIB(host.two))
        listener.listen()
        with EventChannel(host.provider) as clients, CmId(clients) as cmid:
            cmid.bind_addr(("10.9.0.1", 0))
            port = cmid.src_port
            cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            with clients.get_event(PATIENCE) as event:
                assert (event.type, event.status) == (CmEventType.ADDRINFO_ERROR, -errno.ENODATA)
            assert cmid.local_addr == ("10.9.0.1", port)
            listener.register_service("storage")
            cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            with clients.get_event(PATIENCE) as event:
                assert event.type is CmEventType.ADDRINFO_RESOLVED
            (storage,) = cmid.query_addrinfo()
            assert isinstance(cmid.local_addr, SockAddrIB)
            assert (cmid.local_addr.addr, cmid.src_port) == (host.gid, port)
            assert cmid.peer_addr == storage.dst_addr
            cmid.resolve_addr(storage.dst_addr)
            clients.get_event(PATIENCE).ack()
            cmid.resolve_route()
            with clients.get_event(PATIENCE) as event:
                assert event.type is CmEventType.ROUTE_RESOLVED
            assert cmid.route.path_rec[0].dgid == host.two
            cmid.connect(ConnParam(b"hello", qp_num=0x10))
            with channel.get_event(PATIENCE) as request:
                assert request.private_data.rstrip(b"\0") == b"hello"
                assert isinstance(request.id.peer_addr, SockAddrIB)
                request.id.accept(ConnParam(qp_num=0x11))
            with clients.get_event(PATIENCE) as event:
                assert event.type is CmEventType.CONNECT_RESPONSE
            request.id.destroy()


def test_endpoint_of_a_service_is_resolved_at_once(host: Host) -> None:
    """Without resolve_addr, the first record is the destination."""
    server = memory_provider(MemoryNetwork(), infiniband=[host.subnet.ports["two"]])
    with EventChannel(server) as channel, CmId(channel, PortSpace.IB) as listener:
        listener.bind_addr(SockAddrIB(host.two))
        listener.listen()
        listener.register_service("storage")
        with host.id() as cmid:
            cmid.bind_addr(("10.9.0.1", 0))
            cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            cmid.resolve_route()
            assert cmid.route.path_rec[0].dgid == host.two
