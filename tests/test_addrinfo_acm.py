"""rdmacm.getaddrinfo with ibacm: the entries, their order and their fields."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from socket import AF_INET, AF_INET6, inet_pton

import pytest

from rdmacm import CmEventType, CmId
from rdmacm.address import AF_IB, Gid, SockAddrIB, service_id, service_id_mask
from rdmacm.addrinfo import AddrInfo, getaddrinfo, needs_lookup
from rdmacm.constants import PathFlag, RaiFlag
from rdmacm.proto.cm.private_data import PrivateDataHeader
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.provider import RouteChoice
from rdmacm.resolution import acm
from rdmacm.resolution.acm import AcmClient
from rdmacm.soft import open_provider
from rdmacm.verbs.enums import PortState
from support.acm import HERE, IB_PATH, THERE, Asked, Daemon, WithInfiniBand, infiniband_device, path_endpoint
from support.clock import LONGEST
from support.lookups import (
    ALL_ONES,
    FAMILY,
    NOROUTE,
    NUMERICHOST,
    PASSIVE,
    PATH,
    RC,
    SOURCE,
    TCP,
    UDP,
    Resolver,
    h,
    stream,
)
from support.world import World

NODE = "192.168.7.2"
MASK = service_id_mask(TCP, 7471)
OTHER = replace(IB_PATH, sl=3)
ROCE = RouteChoice(SOURCE, "soft_eth0", 1, 3, PATH)


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    client = AcmClient(str(tmp_path), look=0)
    monkeypatch.setattr(acm, "CLIENT", client)
    monkeypatch.setattr(acm, "DEADLINE", LONGEST)  # where the daemon answers, it may take long
    yield tmp_path
    client.close()


@pytest.fixture
def daemon(rundir: Path) -> Iterator[Daemon]:
    with Daemon(rundir, lambda asked: asked.answer(path_endpoint(), path_endpoint(OTHER))) as daemon:
        yield daemon


def answering(*endpoints: tuple[int, int, bytes]) -> Callable[[Asked], None]:
    return lambda asked: asked.answer(*endpoints)


def asked_for(daemon: Daemon) -> list[list[tuple[int, int, bytes]]]:
    return [[(flags, kind, info.rstrip(b"\0")) for flags, kind, info in asked.endpoints] for asked in daemon.asked]


INFINIBAND = AddrInfo(
    flags=RaiFlag(0),
    family=AF_IB,
    qp_type=RC,
    port_space=TCP,
    src_addr=SockAddrIB(HERE, service_id(TCP, 0), service_id_mask(TCP, 0)),
    dst_addr=SockAddrIB(THERE, service_id(TCP, 7471), MASK),
    route=(PathData(IB_PATH), PathData(OTHER)),
    connect=bytes.fromhex("00400000" + "00" * 12 + "00000000" + "00" * 12 + "c0a80702"),
    device="ib0",
    port_num=1,
    gid_index=0,
)


class TestEntries:
    def test_infiniband_only_destination_comes_first(self, daemon: Daemon) -> None:
        first, second = getaddrinfo(NODE, 7471, port_space=TCP, provider=WithInfiniBand())
        assert first == INFINIBAND
        assert first.connect_len == 36
        assert second == AddrInfo(RaiFlag(0), AF_INET, RC, TCP, None, (NODE, 7471), route=INFINIBAND.route)
        assert asked_for(daemon) == [[(2, 2, bytes((192, 168, 7, 2)))]]

    def test_roce_route_precedes_infiniband(self, daemon: Daemon) -> None:
        first, second = getaddrinfo(NODE, 7471, port_space=TCP, provider=WithInfiniBand(choice=ROCE))
        assert (first.family, first.device, first.route) == (AF_INET, "soft_eth0", (PathData(PATH),))
        connect = PrivateDataHeader(4, 0, SOURCE.ip, bytes((192, 168, 7, 2))).pack()
        assert second == replace(INFINIBAND, connect=connect)

    def test_infiniband_device_with_the_ip_address_comes_first(self, daemon: Daemon) -> None:
        choice = RouteChoice(SOURCE, "ib0", 1, 0, PATH)
        first, second = getaddrinfo(NODE, 7471, port_space=TCP, provider=WithInfiniBand(choice=choice))
        assert (first.family, second.family) == (AF_IB, AF_INET)
        assert second.route == INFINIBAND.route
        assert second.src_addr == ("10.0.0.2", 0)

    def test_source_of_the_daemon_is_used(self, rundir: Path) -> None:
        ours = inet_pton(AF_INET6, "fd00::1")
        with Daemon(rundir, answering(path_endpoint(), (1, 3, ours))):
            first, second = getaddrinfo("fd00::2", 7471, port_space=TCP, provider=WithInfiniBand())
        assert second.src_addr == ("fd00::1", 0, 0, 0)
        assert first.connect == bytes.fromhex("00600000") + ours + inet_pton(AF_INET6, "fd00::2")

    def test_source_of_the_hints_is_used(self, daemon: Daemon) -> None:
        hints = AddrInfo(port_space=TCP, src_addr=("192.168.7.1", 99))
        first, second = getaddrinfo(NODE, 7471, hints, provider=WithInfiniBand())
        assert second.src_addr == hints.src_addr
        assert isinstance(first.src_addr, SockAddrIB)
        assert (first.src_addr.addr, first.src_addr.port) == (HERE, 99)
        assert first.connect == PrivateDataHeader(4, 0, bytes((192, 168, 7, 1)), bytes((192, 168, 7, 2))).pack()
        assert asked_for(daemon) == [[(1, 2, bytes((192, 168, 7, 1))), (2, 2, bytes((192, 168, 7, 2)))]]

    def test_every_answer_has_an_infiniband_entry(self, daemon: Daemon) -> None:
        resolver = Resolver(stream(NODE, 7471), stream("192.168.7.3", 7471))
        found = getaddrinfo("name.test", 7471, provider=WithInfiniBand(), resolver=resolver)
        assert [info.family for info in found] == [AF_IB, AF_INET] * 2
        assert [info.connect[-1:] for info in found] == [b"\x02", b"", b"\x03", b""]

    def test_entry_has_pkey_and_flow_label_of_the_path(self, rundir: Path) -> None:
        with Daemon(rundir, answering(path_endpoint(replace(IB_PATH, pkey=0x8001, flow_label=0x12345)))):
            first, _ = getaddrinfo(NODE, 7471, port_space=UDP, provider=WithInfiniBand())
        assert isinstance(first.dst_addr, SockAddrIB)
        assert (first.dst_addr.pkey, first.dst_addr.flowinfo, first.port_space) == (0x8001, 0x12345, UDP)

    def test_infiniband_address_gets_its_route(self, daemon: Daemon) -> None:
        hints = AddrInfo(FAMILY, AF_IB, port_space=TCP)
        (info,) = getaddrinfo(str(THERE), 7471, hints, provider=WithInfiniBand())
        assert info == replace(INFINIBAND, connect=b"")
        ((flags, kind, record),) = daemon.asked[0].endpoints
        path = PathRecord.unpack(record)
        assert (flags, kind, path.sgid, path.dgid, path.pkey) == (0, 0x10, HERE, THERE, 0xFFFF)

    def test_infiniband_address_in_the_hints_gets_its_route(self, daemon: Daemon) -> None:
        there = SockAddrIB(THERE, service_id(TCP, 1), ALL_ONES)
        (info,) = getaddrinfo(dst_addr=there, src_addr=SockAddrIB(HERE), provider=WithInfiniBand())
        assert (info.src_addr, info.dst_addr, info.device) == (SockAddrIB(HERE), there, "ib0")
        assert info.route == INFINIBAND.route


class TestDaemonNotUsed:
    @pytest.mark.parametrize(
        "provider",
        [
            WithInfiniBand(infiniband_device(PortState.INIT), choice=ROCE),
            pytest.param(None, id="soft"),
        ],
    )
    def test_daemon_is_not_asked_without_an_active_infiniband_port(
        self, daemon: Daemon, provider: WithInfiniBand | None
    ) -> None:
        for info in getaddrinfo(NODE, 7471, provider=provider or open_provider()):
            assert info.family == AF_INET
        assert not daemon.connections

    @pytest.mark.parametrize("flags", [PASSIVE, NOROUTE, NOROUTE | NUMERICHOST])
    def test_daemon_is_not_asked_with_these_flags(self, daemon: Daemon, flags: RaiFlag) -> None:
        assert len(getaddrinfo(NODE, 7471, flags=flags, provider=WithInfiniBand())) == 1
        assert not daemon.connections

    @pytest.mark.parametrize("node", ["127.0.0.1", "::1", "224.0.0.1", "ff02::1", "fe80::1", "0.0.0.0"])
    def test_daemon_is_not_asked_for_addresses_that_name_no_host(self, daemon: Daemon, node: str) -> None:
        assert len(getaddrinfo(node, 7471, provider=WithInfiniBand())) == 1
        assert not daemon.connections

    def test_daemon_is_not_asked_when_the_hints_have_a_route(self, daemon: Daemon) -> None:
        (info,) = getaddrinfo(NODE, 7471, route=[PathData(PATH)], provider=WithInfiniBand())
        assert info.route == ()
        assert not daemon.connections

    def test_daemon_is_not_asked_for_a_source_alone(self, daemon: Daemon) -> None:
        assert len(getaddrinfo(src_addr=("192.168.7.1", 1), provider=WithInfiniBand())) == 1
        assert not daemon.connections


class TestAnswers:
    def test_numeric_host_queries_only_the_daemons_cache(self, daemon: Daemon) -> None:
        getaddrinfo(NODE, 7471, flags=NUMERICHOST, provider=WithInfiniBand())
        assert asked_for(daemon) == [[(2 | 1 << 30, 2, bytes((192, 168, 7, 2)))]]

    @pytest.mark.parametrize(
        "behave",
        [
            pytest.param(lambda asked: asked.answer(status=3), id="knows-none"),
            pytest.param(answering(), id="empty"),
            pytest.param(answering(path_endpoint(replace(IB_PATH, sgid=Gid("fe80::bad")))), id="not-our-port"),
            pytest.param(answering(path_endpoint(flags=PathFlag.ALTERNATE)), id="not-for-connections"),
            pytest.param(lambda asked: asked.connection.sendall(b"?" * 16), id="garbage"),
        ],
    )
    def test_no_path_equals_no_daemon(self, rundir: Path, behave: Callable[[Asked], None]) -> None:
        before = getaddrinfo(NODE, 7471, provider=WithInfiniBand())
        with Daemon(rundir, behave) as daemon:
            assert getaddrinfo(NODE, 7471, provider=WithInfiniBand()) == before
            assert daemon.asked

    @pytest.mark.parametrize("gid", ["dgid", "sgid"])
    def test_infiniband_address_rejects_routes_of_other_gids(self, rundir: Path, gid: str) -> None:
        wrong = IB_PATH.replace(**{gid: Gid("fe80::bad")})
        two_ports = WithInfiniBand(infiniband_device(), infiniband_device(gid=Gid("fe80::bad")))
        with Daemon(rundir, answering(path_endpoint(wrong))) as daemon:
            (info,) = getaddrinfo(dst_addr=SockAddrIB(THERE), src_addr=SockAddrIB(HERE), provider=two_ports)
            assert daemon.asked
        assert info.route == ()

    def test_silent_daemon_costs_one_timeout(self, rundir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(acm, "DEADLINE", 0.5)
        resolver = Resolver(*(stream(f"192.168.7.{number}", 7471) for number in range(2, 50)))
        with Daemon(rundir, lambda asked: None) as daemon:
            found = getaddrinfo("name.test", 7471, provider=WithInfiniBand(), resolver=resolver)
        assert len(daemon.asked) <= 1
        assert [info.family for info in found] == [AF_INET] * 48


class TestNonBlocking:
    def test_numeric_addresses_need_a_lookup_with_infiniband(self, daemon: Daemon) -> None:
        provider = WithInfiniBand()
        assert needs_lookup(NODE, None, provider)
        assert needs_lookup(NODE, h(NUMERICHOST), provider)
        assert not needs_lookup(NODE, h(NOROUTE), provider)
        assert not needs_lookup(NODE, h(PASSIVE), provider)
        assert not needs_lookup(NODE, None, open_provider())

    def test_resolve_addrinfo_does_not_block_on_a_slow_daemon(
        self, rundir: Path, monkeypatch: pytest.MonkeyPatch, world: World
    ) -> None:
        monkeypatch.setattr(type(world.provider), "devices", lambda self: (infiniband_device(),))
        asked, go_on = threading.Event(), threading.Event()

        def slow(request: Asked) -> None:
            asked.set()
            go_on.wait(30)
            request.answer(path_endpoint())

        with Daemon(rundir, slow), CmId(world.channel, TCP) as cmid:
            cmid.resolve_addrinfo(NODE, "7471", port_space=TCP)
            assert asked.wait(30)
            assert world.events() == []
            go_on.set()
            poll = select.poll()
            poll.register(world.channel, select.POLLIN)
            assert poll.poll(1000 * LONGEST)
            world.one(CmEventType.ADDRINFO_RESOLVED)
            assert [info.family for info in cmid.query_addrinfo()] == [AF_INET, AF_IB]
