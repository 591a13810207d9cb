"""Ids on InfiniBand: their devices, addresses and routes."""

from __future__ import annotations

import errno
import select

import pytest

from infiniband.hosts import ALL_BITS, SID, IbHost, event
from infiniband.sites import Site
from rdmacm import CmEventType, EventChannel, RdmaError
from rdmacm.address import Gid, SockAddrIB
from rdmacm.provider.cmstate import State
from rdmacm.verbs.enums import LinkLayer, PortState

FOREIGN = Gid("fec0::1:2:3")
UNKNOWN = Gid("fe80::1:2:3")


class TestDevice:
    def test_device_is_listed_with_its_port(self, a: IbHost) -> None:
        device = next(d for d in a.provider.devices() if d.name == a.device)
        (port,) = device.ports
        assert (port.link_layer, port.state, port.pkeys) == (LinkLayer.INFINIBAND, PortState.ACTIVE, (0xFFFF,))
        assert port.active_mtu is not None
        assert port.active_mtu.bytes == 2048
        assert port.gids[0].gid.subnet_prefix == 0xFE80 << 48

    def test_queue_pairs_are_unsupported(self, a: IbHost, b: IbHost) -> None:
        with a.resolved(b.at()) as cmid, pytest.raises(RdmaError, match="driver") as refused:
            cmid.create_qp()
        assert refused.value.errno == errno.EOPNOTSUPP


class TestBinding:
    def test_bind_to_the_ports_gid_selects_the_port(self, a: IbHost) -> None:
        with a.id() as cmid:
            cmid.bind_addr(a.at())
            assert (cmid.verbs.name, cmid.port_num, cmid.gid_index) == (a.device, 1, 0)
            assert (cmid.route.sgid, cmid.route.pkey) == (a.gid, 0xFFFF)
            assert cmid.local_addr == a.at()

    def test_bind_to_a_foreign_gid_raises(self, a: IbHost, b: IbHost) -> None:
        with a.id() as cmid, pytest.raises(RdmaError, match=str(b.gid)) as refused:
            cmid.bind_addr(b.at())
        assert refused.value.errno == errno.ENODEV

    def test_bind_with_a_pkey_the_port_lacks_raises(self, a: IbHost) -> None:
        with a.id() as cmid, pytest.raises(RdmaError, match="0x8001") as refused:
            cmid.bind_addr(a.at(pkey=0x8001))
        assert refused.value.errno == errno.EINVAL


class TestAddress:
    def test_port_is_chosen_by_subnet_prefix(self, a: IbHost, b: IbHost) -> None:
        with a.id() as cmid:
            cmid.resolve_addr(b.at())
            assert cmid.state is State.ADDR_RESOLVED
            assert (cmid.route.sgid, cmid.route.dgid) == (a.gid, b.gid)
            assert isinstance(cmid.local_addr, SockAddrIB)
            assert cmid.local_addr.addr == a.gid
            assert cmid.src_port > 0
            chosen = cmid.explain().chosen
            assert chosen is not None
            assert (chosen.device, chosen.rule) == (a.device, "subnet")

    @pytest.mark.parametrize(
        ("destination", "why"),
        [
            (SockAddrIB(FOREIGN, SID, ALL_BITS), "subnet"),
            (SockAddrIB(UNKNOWN, SID, ALL_BITS, pkey=0x8123), "0x8123"),
        ],
    )
    def test_destination_without_a_matching_port_raises(self, a: IbHost, destination: SockAddrIB, why: str) -> None:
        with a.id() as cmid:
            with pytest.raises(RdmaError, match=why) as refused:
                cmid.resolve_addr(destination)
            assert refused.value.errno == errno.ENODEV
            assert refused.value.explanation is not None
            assert refused.value.explanation.error == "select"
            assert cmid.state is State.ADDR_BOUND

    @pytest.mark.parametrize("itself", [False, True])
    def test_own_gid_and_the_wildcard_resolve_to_the_port_itself(self, a: IbHost, itself: bool) -> None:
        with a.id() as cmid:
            cmid.resolve_addr(a.at() if itself else SockAddrIB(sid=SID, sid_mask=ALL_BITS))
            assert (cmid.route.sgid, cmid.route.dgid) == (a.gid, a.gid)

    def test_destination_must_match_the_bound_subnet(self, a: IbHost, b: IbHost) -> None:
        with a.id() as cmid:
            cmid.bind_addr(a.source)
            with pytest.raises(RdmaError) as refused:
                cmid.resolve_addr(b.at(), b.at())
            assert refused.value.errno == errno.EINVAL
            cmid.resolve_addr(b.at())


class TestRoute:
    def test_route_is_the_sa_path_record(self, a: IbHost, b: IbHost) -> None:
        with a.resolved(b.at()) as cmid:
            (path,) = cmid.route.path_rec
            assert (path.sgid, path.dgid) == (a.gid, b.gid)
            assert (path.mtu_bytes, path.rate, path.pkey, path.reversible) == (2048, 3, 0xFFFF, True)
            assert [step.name for step in cmid.steps] == ["bind", "select", "path"]

    def test_route_to_an_unknown_gid_raises(self, a: IbHost) -> None:
        with a.id() as cmid:
            cmid.resolve_addr(SockAddrIB(UNKNOWN, SID, ALL_BITS))
            with pytest.raises(RdmaError, match=str(UNKNOWN)) as refused:
                cmid.resolve_route()
            assert refused.value.errno == errno.EINVAL
            assert cmid.state is State.ADDR_RESOLVED
            assert cmid.explain().text().count(str(UNKNOWN))

    def test_route_is_reported_by_event(self, site: Site, a: IbHost, b: IbHost) -> None:
        site.needs_real_time()
        with EventChannel(a.provider) as channel, a.id(channel) as cmid:
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            cmid.resolve_addr(b.at())
            with event(channel) as resolved:
                assert resolved.type is CmEventType.ADDR_RESOLVED
            cmid.resolve_route()
            assert cmid.state is State.ROUTE_QUERY
            while cmid.state is State.ROUTE_QUERY:
                assert poll.poll(5000)
                with event(channel) as found:
                    assert (found.type, found.status) == (CmEventType.ROUTE_RESOLVED, 0)

    def test_destroy_during_the_query_suppresses_the_event(self, a: IbHost, b: IbHost) -> None:
        with EventChannel(a.provider) as channel:
            cmid = a.id(channel)
            cmid.resolve_addr(b.at())
            event(channel).ack()
            cmid.resolve_route()
            cmid.destroy()
            with pytest.raises(TimeoutError):
                channel.get_event(0.2)

    def test_single_cable_has_no_alternate_path(self, a: IbHost, b: IbHost) -> None:
        with a.id() as cmid:
            cmid.resolve_addr(b.at())
            cmid.resolve_route(alternate=True)
            assert len(cmid.route.path_rec) == 1


class TestSubnetManager:
    def test_missing_sm_is_awaited_until_the_timeout(self, own_site: Site) -> None:
        with own_site.host("HostA") as a, own_site.host("HostB") as b, a.id() as cmid:
            cmid.resolve_addr(b.at())
            own_site.end_administrator()
            began = a.provider.clock()
            with pytest.raises(TimeoutError) as late:
                cmid.resolve_route(timeout_ms=400)
            assert 0.39 <= a.provider.clock() - began < 10
            assert late.value.errno == errno.ETIMEDOUT
            assert cmid.state is State.ADDR_RESOLVED
            own_site.begin_administrator()
            cmid.resolve_route()
            assert cmid.route.path_rec

    def test_route_resolves_when_the_sm_returns_before_the_timeout(self, own_site: Site) -> None:
        with (
            own_site.host("HostA") as a,
            own_site.host("HostB") as b,
            EventChannel(a.provider) as channel,
            a.id(channel) as cmid,
        ):
            cmid.resolve_addr(b.at())
            event(channel).ack()
            own_site.end_administrator()
            cmid.resolve_route(timeout_ms=own_site.outage_ms)
            own_site.begin_administrator()
            with event(channel) as found:
                assert (found.type, found.status) == (CmEventType.ROUTE_RESOLVED, 0)
