"""Ids with a subnet administrator or a port that fails; only a subnet in memory can be made to fail so."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from infiniband.hosts import ALL_BITS, PORT, SID, IbHost, event, param
from infiniband.sites import Virtual
from rdmacm import CmEventType, CmId, EventChannel, IbOption, OptionLevel, RaiFlag, RdmaError, getaddrinfo
from rdmacm.address import Gid, SockAddrIB
from rdmacm.proto.cm.messages import REQ, unpack_mad
from rdmacm.proto.mad import MadAddress
from rdmacm.proto.sa import PATH_FLAGS, PathData, PathRecord
from rdmacm.proto.sa.mad import SaMad
from rdmacm.proto.sa.subnet import ServiceRecord
from rdmacm.provider.cmstate import State
from rdmacm.testing import SaFault, SubnetMad, Verdict
from rdmacm.verbs.enums import PortState, QPState
from support.rows import for_each


@pytest.fixture
def site() -> Virtual:
    return Virtual()


class Pair:
    """Two hosts: a sends queries about b."""

    def __init__(self, site: Virtual, a: IbHost, b: IbHost) -> None:
        self.site, self.a, self.b = site, a, b
        self.subnet, self.sa, self.fabric = site.subnet, site.subnet.sa, site.fabric
        self.one, self.other = site.subnet.ports["HostA"], site.subnet.ports["HostB"]
        self.here, self.there = self.one.port().gids[0], self.other.port().gids[0]

    def asked(self, kind: type[Any]) -> list[tuple[float, MadAddress, SaMad]]:
        """The queries for a kind of record."""
        return [one for one in self.sa.requests if one[2].attribute_id == kind.ATTRIBUTE]

    def path(self, **fields: Any) -> PathRecord:
        return self.sa.path(self.here, self.there).replace(**fields)

    def bound(self, channel: EventChannel | None = None) -> CmId:
        cmid = self.a.id(channel)
        cmid.bind_addr(self.a.source)
        return cmid

    def addressed(self, channel: EventChannel | None = None) -> CmId:
        """An id whose address is resolved."""
        cmid = self.a.id(channel)
        cmid.resolve_addr(self.b.at())
        if channel is not None:
            event(channel).ack()
        return cmid

    def dropped(self) -> dict[str, int]:
        return self.a.provider.host.ib.subnets[0].sa.client.dropped


@pytest.fixture
def pair(site: Virtual) -> Iterator[Pair]:
    with site.host("HostA") as a, site.host("HostB") as b:
        yield Pair(site, a, b)


class TestSilentSa:
    @pytest.mark.parametrize("timeout_ms", [1, 50, 2000, 3_600_000])
    def test_resolve_route_times_out(self, pair: Pair, timeout_ms: int) -> None:
        pair.sa.silence = 1.0
        with pair.addressed() as cmid:
            began = pair.fabric.now
            with pytest.raises(TimeoutError, match="at LID 1, did not respond") as late:
                cmid.resolve_route(timeout_ms)
            assert late.value.errno == errno.ETIMEDOUT
            assert pair.fabric.now - began == pytest.approx(timeout_ms / 1000, rel=1e-9)
            assert cmid.state is State.ADDR_RESOLVED
            assert len(pair.asked(PathRecord)) == 10
            assert "did not respond" in cmid.explain().text()

    def test_service_query_times_out_after_two_seconds(self, pair: Pair) -> None:
        pair.sa.silence = 1.0
        with pair.bound() as cmid:
            began = pair.fabric.now
            with pytest.raises(TimeoutError):
                cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            assert pair.fabric.now - began == pytest.approx(2.0)
            assert cmid.state is State.ADDR_BOUND

    def test_registration_and_getaddrinfo_time_out(self, pair: Pair) -> None:
        pair.sa.silence = 1.0
        with pair.b.listening() as listener, pytest.raises(TimeoutError):
            listener.register_service("storage")
        with pytest.raises(RdmaError):
            getaddrinfo(None, "storage", flags=RaiFlag.SA, provider=pair.a.provider)

    def test_failed_withdrawal_raises_and_stops_renewal(self, pair: Pair) -> None:
        with pair.b.listening() as listener:
            service = listener.register_service("storage", lease=10)
            pair.sa.silence = 1.0
            with pytest.raises(TimeoutError):
                service.withdraw()
            pair.sa.silence = 0.0
            pair.fabric.run(seconds=60)
            assert pair.sa.services(pair.fabric.now) == []


class TestMisbehavingSa:
    def test_busy_answer_is_retried(self, pair: Pair) -> None:
        pair.sa.faults = lambda _: SaFault.BUSY if len(pair.sa.requests) <= 3 else None
        with pair.addressed() as cmid:
            began = pair.fabric.now
            cmid.resolve_route(2000)
            assert cmid.route.num_paths == 1
            assert pair.fabric.now - began == pytest.approx(0.6, abs=0.01)

    def test_always_busy_sa_times_out(self, pair: Pair) -> None:
        pair.sa.busy = 1.0
        with pair.addressed() as cmid, pytest.raises(TimeoutError):
            cmid.resolve_route(1000)

    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            (SaFault.WRONG_METHOD, "method"),
            (SaFault.WRONG_ATTRIBUTE, "attribute"),
            (SaFault.WRONG_TRANSACTION, "transaction"),
            (SaFault.WRONG_VERSION, "version"),
            (SaFault.TRUNCATED, "length"),
            (SaFault.UNSOLICITED, "transaction"),
        ],
    )
    def test_wrong_responses_are_dropped(self, pair: Pair, fault: SaFault, reason: str) -> None:
        pair.sa.faults = lambda _: fault if len(pair.sa.requests) == 1 else None
        with EventChannel(pair.a.provider), pair.addressed() as cmid:
            cmid.resolve_route()
            assert cmid.route.path_rec == (pair.path(),)
            assert pair.dropped() == {reason: 1}

    def test_responses_from_another_source_are_dropped(self, pair: Pair) -> None:
        """Host B sends a forged answer before the administrator's."""
        pair.sa.delay = 0.1

        def overhear(mad: SubnetMad) -> None:
            if mad.destination == "sa" and mad.kind == "GET PATH_RECORD":
                forged = mad.data[:3] + b"\x81" + mad.data[4:]
                pair.other.send(MadAddress(pair.one.port().lid), forged)

        with pair.b.listening(), pair.addressed() as cmid:
            pair.subnet.faults = overhear
            cmid.resolve_route()
            assert cmid.route.path_rec == (pair.path(),)
            assert pair.dropped()["source"] == 1

    @for_each("seed", range(30))
    def test_lossy_subnet_delays_queries_within_their_timeout(self, seed: int) -> None:
        """Ten tries at 20 % loss each way: a query fails once in ten thousand runs."""
        site = Virtual(seed)
        with site.host("HostA") as a, site.host("HostB") as b, b.listening() as listener:
            listener.register_service("storage")
            site.subnet.loss = 0.2
            began = site.fabric.now
            with a.id() as cmid:
                cmid.bind_addr(a.source)
                cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
                assert cmid.query_addrinfo()[0].dst_addr == b.at()
                assert site.fabric.now - began <= 2.0
                cmid.resolve_route(2000)
                assert cmid.route.num_paths == 1
                assert site.fabric.now - began <= 4.0
            site.subnet.loss = 0.0

    @for_each("seed", range(60))
    def test_corrupted_answers_give_a_route_an_error_or_a_timeout(self, seed: int) -> None:
        """Any bits of the administrator's answers may be wrong."""
        site, random = Virtual(seed), Random(seed)
        with site.host("HostA") as a, site.host("HostB") as b, a.id() as cmid:
            cmid.resolve_addr(b.at())
            site.subnet.faults = lambda mad: Verdict(flips=random.randint(1, 64)) if mad.source == "sa" else None
            with contextlib.suppress(RdmaError):
                cmid.resolve_route(500)
            cmid.explain().text()
            if cmid.state is State.ADDR_RESOLVED:
                return
            site.subnet.faults = None
            site.subnet.sa.silence = 1.0
            with b.listening():
                with contextlib.suppress(RdmaError):
                    cmid.connect(param())
                assert cmid.state in (State.ROUTE_RESOLVED, State.CONNECT)


class TestTables:
    def test_all_of_three_hundred_services_are_found(self, pair: Pair) -> None:
        for number in range(300):
            pair.sa.add_service(ServiceRecord(SID + number, pair.there, service_name=b"many"))
        with pair.bound() as cmid:
            cmid.resolve_addrinfo(None, "many", flags=RaiFlag.SA)
            found = [info.dst_addr for info in cmid.query_addrinfo()]
        assert found == [SockAddrIB(pair.there, SID + number, ALL_BITS) for number in range(300)]
        assert len(pair.asked(ServiceRecord)) == 1

    @for_each("seed", range(10))
    def test_table_over_a_lossy_subnet_is_complete_or_times_out(self, seed: int) -> None:
        site = Virtual(seed)
        with site.host("HostA") as a, a.id() as cmid:
            for number in range(300):
                site.subnet.sa.add_service(ServiceRecord(SID + number, Gid("fe80::9"), service_name=b"many"))
            cmid.bind_addr(a.source)
            site.subnet.loss = site.subnet.reorder = site.subnet.duplicate = 0.02
            began = site.fabric.now
            try:
                cmid.resolve_addrinfo(None, "many", flags=RaiFlag.SA)
            except TimeoutError:
                assert site.fabric.now - began == pytest.approx(2.0)
            else:
                found = [info.dst_addr.port for info in cmid.query_addrinfo() if isinstance(info.dst_addr, SockAddrIB)]
                assert found == [PORT + number for number in range(300)]
            site.subnet.loss = 0.0

    def test_cancelled_transfer_is_aborted(self, pair: Pair) -> None:
        """The administrator need not retransmit segments to a destroyed id."""
        for number in range(300):
            pair.sa.add_service(ServiceRecord(SID + number, pair.there, service_name=b"many"))
        with EventChannel(pair.a.provider) as channel:
            cmid = pair.bound(channel)
            cmid.resolve_addrinfo(None, "many", flags=RaiFlag.SA)
            segments = 0

            def count(mad: SubnetMad) -> None:
                nonlocal segments
                segments += mad.source == "sa"

            pair.subnet.faults = count
            pair.fabric.run(lambda: segments > 4, seconds=1)
            pair.fabric.run(seconds=15e-6)
            cmid.destroy()
            pair.fabric.run(seconds=0.001)
            assert segments < 200
            assert pair.sa.next_deadline() is None, "the administrator waits for acknowledgements"


class TestPaths:
    def set_two_paths(self, pair: Pair) -> tuple[PathRecord, PathRecord]:
        """Give the administrator two paths to host B, which has four LIDs."""
        pair.subnet.change_port("HostB", lid=16, lmc=2)
        first, second = pair.path(), pair.path(dlid=17, sl=2)
        pair.sa.set_paths(pair.here, pair.there, first, first.replace(mtu=3), second)
        return first, second

    def test_req_carries_the_alternate_path(self, pair: Pair) -> None:
        first, second = self.set_two_paths(pair)
        requests: list[REQ] = []

        def keep(mad: SubnetMad) -> None:
            if mad.kind == "REQ":
                message = unpack_mad(mad.data)[0]
                assert isinstance(message, REQ)
                requests.append(message)

        with pair.b.listening() as listener, EventChannel(pair.a.provider) as channel, pair.addressed(channel) as cmid:
            cmid.resolve_route(alternate=True)
            event(channel).ack()
            assert cmid.route.path_rec == (first, second)
            pair.subnet.faults = keep
            cmid.connect(param())
            with event(listener.channel) as request:
                server = request.id
            server.destroy()
        ways = [(req.primary.remote_lid, req.alternate.remote_lid, req.alternate.sl) for req in requests]
        assert ways == [(16, 17, 2)]
        assert requests[0].alternate.remote_gid == pair.there

    def test_route_has_one_path_without_the_alternate_option(self, pair: Pair) -> None:
        first, _ = self.set_two_paths(pair)
        with pair.addressed() as cmid:
            cmid.resolve_route()
            assert cmid.route.path_rec == (first,)

    def test_path_of_the_application_is_used_without_a_query(self, pair: Pair) -> None:
        mine = pair.path(sl=5, packet_life_time=12)
        with pair.b.listening() as listener, EventChannel(pair.a.provider) as channel, pair.addressed(channel) as cmid:
            cmid.set_option(OptionLevel.IB, IbOption.PATH, PathData(mine, PATH_FLAGS).pack())
            with event(channel) as found:
                assert found.type is CmEventType.ROUTE_RESOLVED
            assert cmid.route.path_rec == (mine,)
            assert pair.asked(PathRecord) == []
            cmid.connect(param())
            with event(listener.channel) as request:
                assert request.id.route.path_rec[0].sl == 5
                server = request.id
            server.destroy()

    def test_init_qp_attr_uses_the_resolved_path(self, pair: Pair) -> None:
        pair.subnet.change_port("HostA", pkeys=(0x7FFF, 0x8001))
        pair.subnet.change_port("HostB", lid=16, lmc=2, pkeys=(0x7FFF, 0x8001))
        pair.sa.set_paths(pair.here, pair.there, pair.path(sl=4, rate=7))
        with pair.b.listening() as listener, EventChannel(pair.a.provider) as channel, pair.a.id(channel) as cmid:
            cmid.resolve_addr(pair.b.at(pkey=0x8001))
            event(channel).ack()
            cmid.resolve_route()
            event(channel).ack()
            assert cmid.init_qp_attr(QPState.INIT)[0].pkey_index == 1
            cmid.connect(param())
            with event(listener.channel) as request:
                server = request.id
                server.accept(param())
            event(channel).ack()
            vector = cmid.init_qp_attr(QPState.RTR)[0].ah_attr
            assert (vector.dlid, vector.sl, vector.static_rate, vector.is_global) == (16, 4, 7, False)
            server.destroy()


class TestPartitions:
    def test_connections_use_the_paths_pkey(self, pair: Pair) -> None:
        """Both hosts are limited members of the default partition, so no packet passes there."""
        pair.subnet.change_port("HostA", pkeys=(0x7FFF, 0x8001))
        pair.subnet.change_port("HostB", pkeys=(0x7FFF, 0x8002, 0x8001))
        with pair.b.listening() as listener, EventChannel(pair.a.provider) as channel, pair.a.id(channel) as cmid:
            cmid.resolve_addr(pair.b.at(pkey=0x8001))
            event(channel).ack()
            cmid.resolve_route()
            event(channel).ack()
            assert cmid.route.path_rec[0].pkey == 0x8001
            cmid.connect(param())
            with event(listener.channel) as request:
                server = request.id
                assert server.route.pkey == 0x8001
                server.accept(param())
            with event(channel) as reply:
                assert reply.type is CmEventType.CONNECT_RESPONSE
            server.destroy()

    def test_limited_member_connects_to_a_full_member(self, pair: Pair) -> None:
        pair.subnet.change_port("HostA", pkeys=(0x7FFF,))
        with pair.b.listening() as listener, EventChannel(pair.a.provider) as channel, pair.addressed(channel) as cmid:
            cmid.resolve_route()
            event(channel).ack()
            cmid.connect(param())
            with event(listener.channel) as request:
                assert request.id.route.pkey == 0xFFFF
                server = request.id
            server.destroy()

    def test_two_limited_members_have_no_path(self, pair: Pair) -> None:
        pair.subnet.change_port("HostA", pkeys=(0x7FFF,))
        pair.subnet.change_port("HostB", pkeys=(0x7FFF,))
        with pair.addressed() as cmid, pytest.raises(RdmaError, match=r"knows no path|no record") as none:
            cmid.resolve_route()
        assert none.value.errno == errno.EINVAL

    def test_connect_on_a_path_with_a_pkey_the_port_lacks_raises(self, pair: Pair) -> None:
        with pair.addressed() as cmid:
            mine = PathData(pair.path(pkey=0x8123), PATH_FLAGS)
            cmid.set_option(OptionLevel.IB, IbOption.PATH, mine.pack())
            with pytest.raises(RdmaError, match="0x8123") as refused:
                cmid.connect(param())
            assert refused.value.errno == errno.EINVAL
            assert cmid.state is State.ROUTE_RESOLVED


class TestPort:
    def test_resolve_addr_on_a_port_that_is_down_raises(self, pair: Pair) -> None:
        pair.subnet.change_port("HostA", state=PortState.DOWN)
        with pair.a.id() as cmid, pytest.raises(RdmaError, match="DOWN") as refused:
            cmid.resolve_addr(pair.b.at())
        assert refused.value.errno == errno.ENODEV

    def test_changed_lids_appear_in_the_next_route(self, pair: Pair) -> None:
        def lids() -> tuple[int, int]:
            with pair.addressed() as cmid:
                cmid.resolve_route()
                (path,) = cmid.route.path_rec
                return path.slid, path.dlid

        before = lids()
        pair.subnet.change_port("HostA", lid=100)
        pair.subnet.change_port("HostB", lid=200)
        assert (before, lids()) == ((2, 3), (100, 200))

    def test_lid_changed_after_the_address_appears_in_the_route(self, pair: Pair) -> None:
        with pair.addressed() as cmid:
            pair.subnet.change_port("HostA", lid=100)
            cmid.resolve_route()
            assert cmid.route.path_rec[0].slid == 100

    def test_query_goes_to_a_changed_sm_lid(self, pair: Pair) -> None:
        with pair.addressed() as cmid:
            pair.sa.lid = 50
            for name in ("HostA", "HostB"):
                pair.subnet.change_port(name, sm_lid=50)
            cmid.resolve_route()
            assert len(cmid.route.path_rec) == 1

    def test_queries_without_a_subnet_manager_raise(self, pair: Pair) -> None:
        with pair.addressed() as cmid, pair.bound() as other:
            pair.subnet.change_port("HostA", sm_lid=0)
            for call in (
                cmid.resolve_route,
                lambda: other.resolve_addrinfo(None, "storage", flags=RaiFlag.SA),
                lambda: other.register_service("storage"),
            ):
                with pytest.raises(RdmaError, match="no subnet manager") as refused:
                    call()
                assert refused.value.errno == errno.ENETUNREACH
            assert (cmid.state, other.state) == (State.ADDR_RESOLVED, State.ADDR_BOUND)
            with pytest.raises(RdmaError):
                getaddrinfo(None, "storage", flags=RaiFlag.SA, provider=pair.a.provider)
            pair.subnet.change_port("HostA", sm_lid=1)
            cmid.resolve_route()

    def test_calls_after_the_port_is_removed_raise(self, pair: Pair) -> None:
        with (
            pair.addressed() as cmid,
            pair.bound() as bound,
            pair.addressed() as ready,
            EventChannel(pair.a.provider) as own,
        ):
            ready.resolve_route()
            waiting = pair.addressed(own)
            waiting.resolve_route(1000)
            destination, source = pair.b.at(), pair.a.source
            pair.subnet.remove_port("HostA")
            with pair.a.id() as late:
                for call in (
                    cmid.resolve_route,
                    lambda: bound.resolve_addr(destination),
                    lambda: bound.resolve_addrinfo(None, "storage", flags=RaiFlag.SA),
                    lambda: bound.register_service("storage"),
                    lambda: ready.connect(param()),
                    lambda: late.bind_addr(source),
                    lambda: late.resolve_addr(destination),
                ):
                    with pytest.raises(RdmaError) as refused:
                        call()
                    assert refused.value.errno == errno.ENODEV
            with event(own) as ended:
                assert (ended.type, ended.status) == (CmEventType.ROUTE_ERROR, -errno.ETIMEDOUT)
            waiting.destroy()
            assert pair.a.provider.devices()
            pair.subnet.add_port("HostA")

    def test_service_is_registered_again_when_the_sm_returns(self, pair: Pair) -> None:
        with pair.b.listening() as listener:
            listener.register_service("storage", lease=10)
            pair.fabric.run(seconds=1)
            pair.subnet.change_port("HostB", sm_lid=0)
            pair.fabric.run(seconds=30)
            assert pair.sa.services(pair.fabric.now) == []
            pair.subnet.change_port("HostB", sm_lid=1)
            pair.fabric.run(seconds=10)
            assert [one.name for one in pair.sa.services(pair.fabric.now)] == ["storage"]


class TestConcurrentQueries:
    def test_fifty_ids_each_get_their_route(self, pair: Pair) -> None:
        pair.sa.delay, pair.sa.jitter = 0.05, 0.1
        with EventChannel(pair.a.provider) as channel:
            ids = [pair.addressed(channel) for _ in range(50)]
            for cmid in ids:
                cmid.resolve_route(1000)
            done = set()
            for _ in ids:
                with event(channel) as found:
                    assert found.type is CmEventType.ROUTE_RESOLVED
                    done.add(found.id)
            assert done == set(ids)
            for cmid in ids:
                cmid.destroy()

    def test_queries_beyond_the_limit_are_refused(self, pair: Pair) -> None:
        """A refused query can be repeated; the outstanding ones get their answers."""
        pair.sa.delay = 0.1
        with EventChannel(pair.a.provider) as channel, pair.addressed(channel) as one, pair.addressed(channel) as many:
            pair.a.provider.host.ib.subnets[0].sa.client.max_queries = 1
            one.resolve_route()
            for _ in range(2):
                with pytest.raises(RdmaError) as full:
                    many.resolve_route()
                assert full.value.errno == errno.ENOBUFS
            assert many.state is State.ADDR_RESOLVED
            with event(channel) as found:
                assert (found.type, found.id) == (CmEventType.ROUTE_RESOLVED, one)
            many.resolve_route()
            with event(channel) as found:
                assert found.id is many

    def test_closing_a_channel_cancels_its_queries(self, pair: Pair) -> None:
        pair.sa.silence = 1.0
        with EventChannel(pair.a.provider), EventChannel(pair.a.provider) as channel:
            cmid, other = pair.addressed(channel), pair.bound(channel)
            cmid.resolve_route()
            other.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            pair.fabric.run(seconds=0.01)
            channel.close()
            before = len(pair.sa.requests)
            pair.fabric.run(seconds=10)
            assert len(pair.sa.requests) == before
            cmid.destroy()
            other.destroy()

    def test_service_results_are_not_reused(self, pair: Pair) -> None:
        pair.sa.add_service(ServiceRecord(SID, Gid("fec0::9"), service_name=b"far"))
        with EventChannel(pair.a.provider) as channel, pair.bound(channel) as cmid:
            cmid.resolve_addrinfo(None, "far", flags=RaiFlag.SA)
            event(channel).ack()
            (far,) = cmid.query_addrinfo()
            assert far.dst_addr is not None
            with pytest.raises(RdmaError):
                cmid.resolve_addr(far.dst_addr)
            cmid.resolve_addrinfo(None, "nothing", flags=RaiFlag.SA)
            for _ in range(2):
                with pytest.raises(RdmaError) as none:
                    cmid.query_addrinfo()
                assert none.value.errno == errno.ENOENT
                pair.fabric.run(seconds=1)
            with event(channel) as failed:
                assert failed.type is CmEventType.ADDRINFO_ERROR


@for_each("seed", range(200))
def test_connections_over_a_lossy_subnet(seed: int) -> None:
    """10 % are lost, some come twice or late; both sides see ESTABLISHED and DISCONNECTED, and no state is left."""
    site = Virtual(seed)
    subnet, fabric = site.subnet, site.fabric
    with site.host("HostA") as a, site.host("HostB") as b:
        with b.listening() as listener, EventChannel(a.provider) as channel, a.id(channel) as cmid:
            servers: list[CmId] = []
            seen: list[CmEventType] = []

            def serve(event: Any) -> None:
                seen.append(event.type)
                if event.type is CmEventType.CONNECT_REQUEST:
                    servers.append(event.id)
                    event.id.accept(param())
                elif event.type is CmEventType.DISCONNECTED:
                    event.id.disconnect()

            fabric.hosts["HostB"].on_event(listener.channel, serve)
            cmid.resolve_addr(b.at())
            event(channel).ack()
            cmid.resolve_route()
            event(channel).ack()
            subnet.loss, subnet.duplicate, subnet.reorder, subnet.reorder_delay = 0.1, 0.1, 0.2, 0.1
            cmid.connect(param())
            with channel.get_event(3600) as reply:
                assert reply.type is CmEventType.CONNECT_RESPONSE
            cmid.establish()
            fabric.run(lambda: CmEventType.ESTABLISHED in seen, seconds=3600)
            cmid.disconnect()
            with channel.get_event(3600) as ended:
                assert ended.type is CmEventType.DISCONNECTED
            fabric.run(lambda: CmEventType.DISCONNECTED in seen, seconds=3600)
            assert seen[:3] == [CmEventType.CONNECT_REQUEST, CmEventType.ESTABLISHED, CmEventType.DISCONNECTED]
            assert (cmid.state, servers[0].state) == (State.DISCONNECT, State.DISCONNECT)
            subnet.loss = subnet.duplicate = subnet.reorder = 0.0
            fabric.run(seconds=3600)
            for host in (a, b):
                assert len(host.provider.host.ib.subnets[0].cm.agent) == 0
            servers[0].destroy()


def test_same_seed_replays_the_same_run() -> None:
    def run(seed: int) -> list[tuple[float, str, bytes]]:
        site, sent = Virtual(seed), []
        site.subnet.loss = site.subnet.reorder = 0.1

        def note(mad: SubnetMad) -> None:
            sent.append((mad.time, mad.source, mad.data))

        site.subnet.faults = note
        with site.host("HostA") as a, site.host("HostB") as b, b.listening() as listener:
            listener.register_service("storage")
            with a.resolved(b.at()), contextlib.suppress(RdmaError), a.resolved(b.at()) as cmid:
                cmid.connect(param())
        return sent

    assert run(1) == run(1) != run(2)
    assert not any(thread.name == "rdmacm-progress" for thread in threading.enumerate())
