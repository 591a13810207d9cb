"""What ids do on InfiniBand: addresses, routes and services by the subnet administrator, connections."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infiniband.datagrams import PATH_RECORD, message, question
from infiniband.fabric import SimulatedFabric
from infiniband.hosts import ALL_BITS, PORT, QPN, SID, IbHost, event, param
from rdmacm import AddrInfo, CmEventType, CmId, EventChannel, PortSpace, RaiFlag, RdmaError, getaddrinfo
from rdmacm.address import AF_IB, Gid, SockAddrIB, service_id, service_id_mask
from rdmacm.cmstate import State
from rdmacm.connparam import ConnParam, UdParam
from rdmacm.errors import CmRejectedError
from rdmacm.ib.ibsim import IbsimTransport
from rdmacm.proto.mad import MadAddress
from rdmacm.verbs.enums import LinkLayer, PortState

FOREIGN = Gid("fec0::1:2:3")
UNKNOWN = Gid("fe80::1:2:3")


@contextmanager
def host_on(fabric: SimulatedFabric, node: str) -> Iterator[IbHost]:
    host = IbHost(IbsimTransport(node, fabric.base))
    yield host
    assert host.provider.retire()


@pytest.fixture
def a(fabric: SimulatedFabric) -> Iterator[IbHost]:
    with host_on(fabric, "HostA") as host:
        yield host


@pytest.fixture
def b(fabric: SimulatedFabric) -> Iterator[IbHost]:
    with host_on(fabric, "HostB") as host:
        yield host


class TestDevice:
    def test_is_listed_with_its_port(self, a: IbHost) -> None:
        device = next(d for d in a.provider.devices() if d.name == a.device)
        (port,) = device.ports
        assert (port.link_layer, port.state, port.pkeys) == (LinkLayer.INFINIBAND, PortState.ACTIVE, (0xFFFF,))
        assert port.active_mtu is not None
        assert port.active_mtu.bytes == 2048
        assert port.gids[0].gid.subnet_prefix == 0xFE80 << 48

    def test_has_no_queue_pairs_and_says_whose_business_they_are(self, a: IbHost, b: IbHost) -> None:
        with a.resolved(b.at()) as cmid, pytest.raises(RdmaError, match="driver") as refused:
            cmid.create_qp()
        assert refused.value.errno == errno.EOPNOTSUPP


class TestBinding:
    def test_to_a_gid_takes_its_port(self, a: IbHost) -> None:
        with a.id() as cmid:
            cmid.bind_addr(a.at())
            assert cmid.verbs is not None
            assert (cmid.verbs.name, cmid.port_num, cmid.gid_index) == (a.device, 1, 0)
            assert (cmid.route.sgid, cmid.route.pkey) == (a.gid, 0xFFFF)
            assert cmid.local_addr == a.at()

    def test_to_no_port_of_this_host(self, a: IbHost, b: IbHost) -> None:
        with a.id() as cmid, pytest.raises(RdmaError, match=str(b.gid)) as refused:
            cmid.bind_addr(b.at())
        assert refused.value.errno == errno.ENODEV

    def test_to_a_partition_the_port_is_not_in(self, a: IbHost) -> None:
        with a.id() as cmid, pytest.raises(RdmaError, match="0x8001") as refused:
            cmid.bind_addr(a.at(pkey=0x8001))
        assert refused.value.errno == errno.EINVAL


class TestAddress:
    def test_leaves_by_the_port_of_its_subnet(self, a: IbHost, b: IbHost) -> None:
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
    def test_that_no_port_reaches(self, a: IbHost, destination: SockAddrIB, why: str) -> None:
        with a.id() as cmid:
            with pytest.raises(RdmaError, match=why) as refused:
                cmid.resolve_addr(destination)
            assert refused.value.errno == errno.ENODEV
            assert refused.value.explanation is not None
            assert refused.value.explanation.error == "select"
            assert cmid.state is State.ADDR_BOUND

    @pytest.mark.parametrize("itself", [False, True])
    def test_of_this_host(self, a: IbHost, itself: bool) -> None:
        with a.id() as cmid:
            cmid.resolve_addr(a.at() if itself else SockAddrIB(sid=SID, sid_mask=ALL_BITS))
            assert (cmid.route.sgid, cmid.route.dgid) == (a.gid, a.gid)

    def test_of_a_bound_id_must_go_with_its_source(self, a: IbHost, b: IbHost) -> None:
        with a.id() as cmid:
            cmid.bind_addr(a.source)
            with pytest.raises(RdmaError) as refused:
                cmid.resolve_addr(b.at(), b.at())
            assert refused.value.errno == errno.EINVAL
            cmid.resolve_addr(b.at())


class TestRoute:
    def test_is_the_path_record_of_the_subnet_administrator(self, a: IbHost, b: IbHost) -> None:
        with a.resolved(b.at()) as cmid:
            (path,) = cmid.route.path_rec
            assert (path.sgid, path.dgid) == (a.gid, b.gid)
            assert (path.mtu_bytes, path.rate, path.pkey, path.reversible) == (2048, 3, 0xFFFF, True)
            assert [step.name for step in cmid.steps] == ["bind", "select", "path"]

    def test_to_nobody(self, a: IbHost) -> None:
        with a.id() as cmid:
            cmid.resolve_addr(SockAddrIB(UNKNOWN, SID, ALL_BITS))
            with pytest.raises(RdmaError, match=str(UNKNOWN)) as refused:
                cmid.resolve_route()
            assert refused.value.errno == errno.EINVAL
            assert cmid.state is State.ADDR_RESOLVED
            assert cmid.explain().text().count(str(UNKNOWN))

    def test_comes_as_an_event_that_can_be_polled_for(self, a: IbHost, b: IbHost) -> None:
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

    def test_of_an_id_that_is_destroyed_meanwhile(self, a: IbHost, b: IbHost) -> None:
        with EventChannel(a.provider) as channel:
            cmid = a.id(channel)
            cmid.resolve_addr(b.at())
            event(channel).ack()
            cmid.resolve_route()
            cmid.destroy()
            with pytest.raises(TimeoutError):
                channel.get_event(0.2)

    def test_has_no_other_where_there_is_one_cable(self, a: IbHost, b: IbHost) -> None:
        with a.id() as cmid:
            cmid.resolve_addr(b.at())
            cmid.resolve_route(alternate=True)
            assert len(cmid.route.path_rec) == 1


class TestSubnetManager:
    def test_that_is_gone_is_waited_for_as_long_as_asked_and_no_longer(self, own_fabric: SimulatedFabric) -> None:
        with host_on(own_fabric, "HostA") as a, host_on(own_fabric, "HostB") as b, a.id() as cmid:
            cmid.resolve_addr(b.at())
            own_fabric.kill_opensm()
            began = time.monotonic()
            with pytest.raises(TimeoutError) as late:
                cmid.resolve_route(timeout_ms=400)
            assert 0.39 <= time.monotonic() - began < 2
            assert late.value.errno == errno.ETIMEDOUT
            assert cmid.state is State.ADDR_RESOLVED
            own_fabric.start_opensm()
            cmid.resolve_route()
            assert cmid.route.path_rec

    def test_that_comes_back_while_it_is_waited_for(self, own_fabric: SimulatedFabric) -> None:
        with (
            host_on(own_fabric, "HostA") as a,
            host_on(own_fabric, "HostB") as b,
            EventChannel(a.provider) as channel,
            a.id(channel) as cmid,
        ):
            cmid.resolve_addr(b.at())
            event(channel).ack()
            own_fabric.kill_opensm()
            # It is asked ten times in this time. ibsim would end a manager that is asked while it starts.
            cmid.resolve_route(timeout_ms=30_000)
            own_fabric.start_opensm()
            with event(channel) as found:
                assert (found.type, found.status) == (CmEventType.ROUTE_RESOLVED, 0)


@pytest.fixture
def offered(b: IbHost) -> Iterator[CmId]:
    """A listener of host B that is registered as ``storage``."""
    with b.listening() as listener:
        listener.register_service("storage", b"v1")
        yield listener


class TestServices:
    @pytest.mark.parametrize("service", ["storage", str(SID), hex(SID)])
    def test_are_found_by_name_or_id(self, a: IbHost, b: IbHost, offered: CmId, service: str) -> None:
        with a.id() as cmid:
            cmid.bind_addr(a.source)
            cmid.resolve_addrinfo(None, service, flags=RaiFlag.SA)
            assert cmid.state is State.ADDRINFO_RESOLVED
            assert (cmid.peer_addr, cmid.route.dgid) == (b.at(), b.gid)
            (info,) = cmid.query_addrinfo()
            assert (info.flags, info.family, info.port_space, info.qp_type) == (RaiFlag.SA, AF_IB, PortSpace.IB, 0)
            assert info.dst_addr == b.at()
            space = PortSpace.IB
            assert info.src_addr == SockAddrIB(a.gid, service_id(space, 0), service_id_mask(space, 0))
            with pytest.raises(RdmaError) as once:
                cmid.query_addrinfo()
            assert once.value.errno == errno.ENOENT
            cmid.resolve_route()
            assert cmid.route.path_rec

    def test_that_nobody_has_registered(self, a: IbHost) -> None:
        with a.id() as cmid:
            cmid.bind_addr(a.source)
            with pytest.raises(RdmaError, match="nobody") as none:
                cmid.resolve_addrinfo(None, "nothing", flags=RaiFlag.SA)
            assert none.value.errno == errno.ENODATA
            assert cmid.state is State.ADDR_BOUND
            with pytest.raises(RdmaError):
                cmid.resolve_addrinfo(None, "nothing", flags=RaiFlag.SA)

    def test_come_as_an_event(self, a: IbHost, offered: CmId) -> None:
        with EventChannel(a.provider) as channel, a.id(channel) as cmid:
            cmid.bind_addr(a.source)
            cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            with pytest.raises(RdmaError) as busy:
                cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            assert busy.value.errno == errno.EBUSY
            with event(channel) as found:
                assert (found.type, found.status) == (CmEventType.ADDRINFO_RESOLVED, 0)
            assert len(cmid.query_addrinfo()) == 1

    def test_that_nobody_has_registered_come_as_an_event(self, a: IbHost) -> None:
        with EventChannel(a.provider) as channel, a.id(channel) as cmid:
            cmid.bind_addr(a.source)
            cmid.resolve_addrinfo(None, "nothing", flags=RaiFlag.SA)
            with event(channel) as none:
                assert (none.type, none.status) == (CmEventType.ADDRINFO_ERROR, -errno.ENODATA)
            cmid.resolve_addrinfo(None, "nothing", flags=RaiFlag.SA)

    def test_of_an_unbound_id(self, a: IbHost) -> None:
        with a.id() as cmid, pytest.raises(RdmaError) as refused:
            cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
        assert refused.value.errno == errno.EINVAL

    def test_are_what_getaddrinfo_finds(self, a: IbHost, b: IbHost, offered: CmId) -> None:
        (info,) = getaddrinfo(None, "storage", flags=RaiFlag.SA, provider=a.provider)
        assert (info.dst_addr, info.device, info.port_num) == (b.at(), a.device, 1)
        with pytest.raises(RdmaError) as none:
            getaddrinfo(None, "nothing", flags=RaiFlag.SA, provider=a.provider)
        assert none.value.errno == errno.ENOENT

    def test_of_one_name_are_all_found_and_each_can_be_taken(self, a: IbHost, b: IbHost) -> None:
        other = service_id(PortSpace.IB, PORT + 1)
        with b.listening() as one, b.listening(other) as two, a.id() as cmid:
            one.register_service("pair")
            two.register_service("pair")
            cmid.bind_addr(a.source)
            cmid.resolve_addrinfo(None, "pair", flags=RaiFlag.SA)
            found = cmid.query_addrinfo()
            first = found[0].dst_addr
            if len(found) == 1:
                pytest.skip("OpenSM on ibsim tells no more than fits one datagram")
            second = found[1].dst_addr
            assert {first, second} == {b.at(), b.at(other)}
            assert second is not None
            cmid.resolve_addr(second)
            assert cmid.peer_addr == second


class TestRegistering:
    def test_lasts_until_it_is_withdrawn(self, a: IbHost, b: IbHost) -> None:
        with b.listening() as listener:
            service = listener.register_service("brief")
            (found,) = getaddrinfo(None, "brief", flags=RaiFlag.SA, provider=a.provider)
            assert found.dst_addr == b.at()
            service.withdraw()
            service.withdraw()
            with pytest.raises(RdmaError):
                getaddrinfo(None, "brief", flags=RaiFlag.SA, provider=a.provider)

    def test_ends_with_its_id(self, a: IbHost, b: IbHost) -> None:
        with EventChannel(b.provider):  # stays, so that what is sent last is sent
            with b.listening() as listener:
                listener.register_service("fleeting")
            with pytest.raises(RdmaError):
                getaddrinfo(None, "fleeting", flags=RaiFlag.SA, provider=a.provider)

    def test_is_renewed_while_the_process_lives(self, a: IbHost, b: IbHost) -> None:
        with b.listening() as listener:
            listener.register_service("renewed", lease=2)
            until = time.monotonic() + 5
            while time.monotonic() < until:
                with pytest.raises(TimeoutError):
                    listener.channel.get_event(0.3)
                assert getaddrinfo(None, "renewed", flags=RaiFlag.SA, provider=a.provider)

    def test_needs_an_infiniband_port(self, a: IbHost) -> None:
        with a.id() as cmid:
            with pytest.raises(RdmaError) as unbound:
                cmid.register_service("x")
            assert unbound.value.errno == errno.EINVAL
            cmid.bind_addr(a.at())
            for name, data in (("", b""), ("x" * 64, b""), ("x", bytes(17))):
                with pytest.raises(RdmaError) as refused:
                    cmid.register_service(name, data)
                assert refused.value.errno == errno.EINVAL
        with CmId(None, PortSpace.TCP, provider=a.provider) as roce:
            roce.bind_addr(("127.0.0.1", 0))
            with pytest.raises(RdmaError) as other:
                roce.register_service("x")
            assert other.value.errno == errno.EOPNOTSUPP


class TestGetaddrinfo:
    def test_brings_the_route_to_a_gid(self, a: IbHost, b: IbHost) -> None:
        (info,) = getaddrinfo(
            str(b.gid),
            PORT,
            flags=RaiFlag.FAMILY | RaiFlag.NUMERICHOST,
            family=AF_IB,
            port_space=PortSpace.IB,
            provider=a.provider,
        )
        assert (info.device, info.port_num, info.route_len) == (a.device, 1, 72)
        path = info.route[0].path
        assert (path.sgid, path.dgid, path.mtu_bytes) == (a.gid, b.gid, 2048)
        assert isinstance(info.src_addr, SockAddrIB)
        assert info.src_addr.addr == a.gid
        with a.id() as cmid:
            cmid.resolve_addr(b.at(), info.src_addr)

    def test_route_of_the_hints_restricts_it(self, a: IbHost, b: IbHost) -> None:
        def ask(rate: int) -> AddrInfo:
            with a.resolved(b.at()) as cmid:
                wanted = cmid.route.path_rec[0].replace(rate=rate)
            (info,) = getaddrinfo(dst_addr=b.at(), src_addr=a.source, route=wanted.pack(), provider=a.provider)
            return info

        assert ask(3).device == a.device
        assert ask(7).device is None  # there is no path of that rate


class TestConnecting:
    def test_up_to_established_and_down_again(self, a: IbHost, b: IbHost) -> None:
        with b.listening() as listener, EventChannel(a.provider) as channel, a.id(channel) as cmid:
            cmid.resolve_addr(b.at())
            event(channel).ack()
            cmid.resolve_route()
            event(channel).ack()
            cmid.connect(param(b"q" * 92))
            with event(listener.channel) as request:
                server = request.id
                assert request.type is CmEventType.CONNECT_REQUEST
                assert isinstance(request.param, ConnParam)
                assert (request.private_data, request.param.qp_num) == (b"q" * 92, QPN)
                assert (server.route.sgid, server.route.dgid) == (b.gid, a.gid)
                assert server.verbs.name == b.device
                server.accept(param(b"r" * 196, qp_num=QPN + 1))
            with event(channel) as reply:
                assert reply.type is CmEventType.CONNECT_RESPONSE
                assert isinstance(reply.param, ConnParam)
                assert (reply.private_data, reply.param.qp_num) == (b"r" * 196, QPN + 1)
            cmid.establish()
            with event(listener.channel) as established:
                assert (established.type, established.id) == (CmEventType.ESTABLISHED, server)
            cmid.disconnect()
            with event(listener.channel) as ended:
                assert ended.type is CmEventType.DISCONNECTED
            server.disconnect()
            with event(channel) as ended:
                assert ended.type is CmEventType.DISCONNECTED
            server.destroy()

    def test_to_a_service(self, a: IbHost, offered: CmId) -> None:
        with EventChannel(a.provider) as channel, a.id(channel) as cmid:
            cmid.bind_addr(a.source)
            cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            event(channel).ack()
            cmid.resolve_route()
            event(channel).ack()
            cmid.connect(param())
            with event(offered.channel) as request:
                request.id.accept(param())
                with event(channel) as reply:
                    assert reply.type is CmEventType.CONNECT_RESPONSE
                server = request.id
            server.destroy()

    def test_where_nobody_listens(self, a: IbHost, b: IbHost) -> None:
        with b.listening(), a.resolved(b.at(service_id(PortSpace.IB, 9))) as cmid:
            with pytest.raises(CmRejectedError) as refused:
                cmid.connect(param())
            assert refused.value.reason == 8

    def test_to_a_listener_that_refuses(self, a: IbHost, b: IbHost) -> None:
        with b.listening() as listener, EventChannel(a.provider) as channel, a.id(channel) as cmid:
            cmid.resolve_addr(b.at())
            event(channel).ack()
            cmid.resolve_route()
            event(channel).ack()
            cmid.connect(param())
            with event(listener.channel) as request:
                request.id.reject(b"no")
                server = request.id
            server.destroy()
            with event(channel) as refused:
                assert (refused.type, refused.status) == (CmEventType.REJECTED, 28)
                assert refused.private_data[:2] == b"no"

    def test_with_more_private_data_than_fits(self, a: IbHost, b: IbHost) -> None:
        with a.resolved(b.at()) as cmid:
            with pytest.raises(RdmaError, match="92") as refused:
                cmid.connect(param(bytes(93)))
            assert refused.value.errno == errno.EINVAL

    def test_to_a_wildcard_listener(self, a: IbHost, b: IbHost) -> None:
        with EventChannel(b.provider) as channel, b.id(channel) as listener:
            listener.bind_addr(SockAddrIB(Gid(), SID, ALL_BITS))
            listener.listen()
            with EventChannel(a.provider) as own, a.id(own) as cmid:
                cmid.resolve_addr(b.at())
                event(own).ack()
                cmid.resolve_route()
                event(own).ack()
                cmid.connect(param())
                with event(channel) as request:
                    assert request.id.local_addr == b.at()
                    request.id.reject()
                    server = request.id
                server.destroy()

    def test_of_datagram_services(self, a: IbHost, b: IbHost) -> None:
        sid = service_id(PortSpace.UDP, PORT)
        with b.listening(sid, PortSpace.UDP) as listener, EventChannel(a.provider) as channel:
            with a.id(channel, PortSpace.UDP) as cmid:
                cmid.resolve_addr(b.at(sid))
                event(channel).ack()
                cmid.resolve_route()
                event(channel).ack()
                cmid.connect(param(b"hello"))
                with event(listener.channel) as request:
                    request.id.accept(param(b"there", qp_num=77))
                    server = request.id
                with event(channel) as found:
                    assert found.type is CmEventType.ESTABLISHED
                    assert isinstance(found.param, UdParam)
                    assert (found.param.qp_num, found.param.private_data[:5]) == (77, b"there")
                server.destroy()


SERVER = """
from rdmacm import CmId, ConnParam, EventChannel, PortSpace, SockAddrIB, devices
from rdmacm.verbs.enums import LinkLayer
(port,) = (p for d in devices() for p in d.ports if p.link_layer is LinkLayer.INFINIBAND)
with EventChannel() as channel, CmId(channel, PortSpace.IB) as listener:
    listener.bind_addr(SockAddrIB(port.gids[0].gid))
    listener.listen()
    listener.register_service("two-processes")
    print("ready", flush=True)
    for event in channel:
        print(event.type.name, event.private_data.rstrip(b"\\0").decode(), flush=True)
        if event.type.name == "CONNECT_REQUEST":
            peer = event.id
            peer.accept(ConnParam(b"welcome", 1, 1, qp_num=7))
        elif event.type.name == "DISCONNECTED":
            peer.disconnect()
            event.ack()
            peer.destroy()
            break
        event.ack()
"""
CLIENT = """
from rdmacm import CmId, ConnParam, PortSpace, RaiFlag, getaddrinfo
(info,) = getaddrinfo(None, "two-processes", flags=RaiFlag.SA)
with CmId(None, PortSpace.IB) as cmid:
    cmid.resolve_addr(info.dst_addr, info.src_addr)
    cmid.resolve_route()
    cmid.connect(ConnParam(b"hello", 1, 1, qp_num=8))
    print(cmid.event.type.name, cmid.event.private_data.rstrip(b"\\0").decode())
    cmid.establish()
    cmid.disconnect()
    print(cmid.event.type.name)
"""


def test_two_processes_of_two_hosts_connect(fabric: SimulatedFabric) -> None:
    def run(node: str, program: str) -> subprocess.Popen[str]:
        environ = dict(os.environ, RDMACM_IB=f"ibsim:{node}@{fabric.base}")
        return subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True)

    with run("HostA", SERVER) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "ready\n"
            with run("HostC", CLIENT) as client:
                assert client.communicate(timeout=30)[0].split("\n") == [
                    "CONNECT_RESPONSE welcome",
                    "DISCONNECTED",
                    "",
                ]
            said = server.communicate(timeout=30)[0].split("\n")
        finally:
            server.kill()
    assert said == ["CONNECT_REQUEST hello", "ESTABLISHED ", "DISCONNECTED ", ""]


def test_garbage_is_dropped_and_counted(a: IbHost, b: IbHost, fabric: SimulatedFabric) -> None:
    """Datagrams of no class, of no query and no connection harm nobody."""
    with EventChannel(a.provider), b.listening() as listener:
        subnet = b.provider.ib.subnets[0]
        lid = subnet.transport.port().lid
        with a.id() as cmid:
            cmid.bind_addr(a.source)
            send = a.provider.ib.subnets[0].transport.send
            noise = bytes([1, 0x04, 1, 3]) + bytes(252)
            for mad in (noise, message(7, b"\xff" * 232), question(PATH_RECORD, 0, b"")):
                send(MadAddress(lid), mad)
            with pytest.raises(TimeoutError):
                listener.channel.get_event(0.3)
            assert subnet.dropped["class"] >= 1
            assert sum(subnet.cm.agent.dropped.values()) + sum(subnet.sa.dropped.values()) >= 1
            cmid.resolve_addr(b.at())
            cmid.resolve_route()
