"""The route in the hints of rdma_getaddrinfo(3) restricts: what is set is asked for, what is 0 is open."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import Any

import pytest

from rdmacm import (
    AddressFamily,
    CmEventType,
    CmId,
    EventChannel,
    GaiError,
    PathData,
    PathRecord,
    PortSpace,
    RaiFlag,
    RdmaError,
    SockAddrIB,
    create_ep,
    getaddrinfo,
)
from rdmacm.address import Gid
from rdmacm.addrinfo import AddrInfo
from rdmacm.constants import EAI
from rdmacm.proto.ipoib import IpoibAddress
from rdmacm.proto.sa.attributes import Selector
from rdmacm.proto.sa.restriction import describe, made_like, meets
from rdmacm.soft import routes
from rdmacm.testing import MemoryNetwork, MemorySubnet, memory_provider
from rdmacm.verbs import QPInitAttr
from support.clock import REAL
from support.lookups import Resolver, stream
from support.pair import ADDRESSES, PORT, Ends, ends

A, B = ADDRESSES["ipv4"]
GID_A, GID_B, FOREIGN = Gid(f"::ffff:{A}"), Gid(f"::ffff:{B}"), Gid("::ffff:203.0.113.9")
OPEN = PathRecord(Gid(), Gid(), pkey=0)
EXACTLY, LESS, GREATER, LARGEST = Selector.EXACTLY, Selector.LESS, Selector.GREATER, Selector.LARGEST


# -- the comparison -------------------------------------------------------------------------------------

PATH = PathRecord(GID_B, GID_A, flow_label=5, hop_limit=64, mtu=4, rate=3, packet_life_time=16)


@pytest.mark.parametrize(
    ("fields", "met"),
    [
        ({}, True),
        ({"sgid": GID_A, "dgid": GID_B}, True),
        ({"sgid": GID_B}, False),
        ({"dgid": FOREIGN}, False),
        ({"pkey": 0x7FFF}, True),
        ({"pkey": 0x8001}, False),
        ({"flow_label": 5, "hop_limit": 64}, True),
        ({"flow_label": 6}, False),
        ({"dlid": 1}, False),
        ({"mtu": 4}, True),
        ({"mtu": 3}, False),
        ({"mtu": 3, "mtu_selector": GREATER}, True),
        ({"mtu": 4, "mtu_selector": GREATER}, False),
        ({"mtu": 5, "mtu_selector": LESS}, True),
        ({"mtu": 1, "mtu_selector": LARGEST}, True),
        ({"rate": 3}, True),
        ({"rate": 5, "rate_selector": GREATER}, True),
        ({"rate": 2, "rate_selector": LESS}, False),
        ({"rate": 63}, False),
        ({"packet_life_time": 16}, True),
        ({"packet_life_time": 15, "packet_life_time_selector": LESS}, False),
        ({"preference": 9, "numb_path": 5, "reversible": False}, True),
    ],
)
def test_set_fields_are_compared_by_their_selectors(fields: dict[str, Any], met: bool) -> None:
    assert meets(PATH, OPEN.replace(**fields)) is met


OF_THE_HOST = {"sl": 3, "traffic_class": 8, "flow_label": 9, "hop_limit": 1}


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({}, {}),
        ({"mtu": 3}, {"mtu": 3}),
        ({"mtu": 5}, None),
        ({"mtu": 6}, None),
        ({"mtu": 3, "mtu_selector": LESS}, {"mtu": 2}),
        ({"mtu": 1, "mtu_selector": LESS}, None),
        ({"mtu": 3, "mtu_selector": GREATER}, {}),
        (OF_THE_HOST, OF_THE_HOST),
        ({"service_id": 7}, {"service_id": 7}),
        ({"packet_life_time": 20}, {"packet_life_time": 20}),
        ({"packet_life_time": 10, "packet_life_time_selector": LESS}, {"packet_life_time": 9}),
        ({"packet_life_time": 63, "packet_life_time_selector": GREATER}, None),
        ({"packet_life_time": 1, "packet_life_time_selector": LARGEST}, {}),
        ({"slid": 1}, None),
        ({"qos_class": 1}, None),
        ({"rate": 2}, None),
    ],
)  # fmt: skip
def test_path_of_roce_is_made_like_the_record(fields: dict[str, Any], made: dict[str, Any] | None) -> None:
    assert made_like(PATH, OPEN.replace(**fields)) == (None if made is None else PATH.replace(**made))


def test_description_names_the_set_fields() -> None:
    like = OPEN.replace(sgid=GID_A, pkey=0x8001, sl=3, mtu=3, mtu_selector=LESS, rate=2, rate_selector=LARGEST)
    assert describe(like) == f"SGID {GID_A}, P_Key 0x8001, sl 3, mtu less than 1024"


# -- RoCE -----------------------------------------------------------------------------------------------


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both


def lookup(both: Ends, *likes: PathRecord, **hints: Any) -> AddrInfo:
    (found,) = getaddrinfo(B, PORT, route=[PathData(like) for like in likes], provider=both.a.provider, **hints)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"pkey": 0x8001},
        {"sgid": FOREIGN},
        {"dgid": FOREIGN},
        {"mtu": 5, "mtu_selector": GREATER},
        {"dlid": 3},
        {"service_id": 0x1061D30},
    ],
    ids=["P_Key", "SGID", "DGID", "MTU", "LID", "service"],
)
def test_restriction_that_no_path_of_roce_meets_is_nodata(both: Ends, fields: dict[str, Any]) -> None:
    like = OPEN.replace(**fields)
    for node, hints in ((B, {}), (None, {"dst_addr": (B, PORT)})):
        with pytest.raises(GaiError) as caught:
            getaddrinfo(node, PORT, route=[PathData(like)], provider=both.a.provider, **hints)  # type: ignore[arg-type]
        assert caught.value.errno == EAI.NODATA
        assert describe(like) in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [{"mtu": 64}, {"mtu": 2, "mtu_selector": 4}, {"hop_limit": 256}, {"flow_label": 1 << 20}, {"sl": 16}, {"pkey": -1}],
)
def test_field_out_of_range_is_refused(both: Ends, fields: dict[str, Any]) -> None:
    with pytest.raises(RdmaError, match="out of range") as caught:
        lookup(both, OPEN.replace(**fields))
    assert caught.value.errno == errno.EINVAL


def test_destination_without_a_route_has_none_with_hints_as_well() -> None:
    (found,) = getaddrinfo("203.0.113.9", PORT, route=[PathData(OPEN)], provider=memory_provider(MemoryNetwork()))
    assert (found.route_len, found.device, found.dst_addr) == (0, None, ("203.0.113.9", PORT))


@pytest.mark.parametrize(
    ("family", "addresses"), [("ipv4", ("10.0.0.1", "10.0.0.7")), ("ipv6", ("fd00::1", "fd00::7"))]
)
def test_sgid_of_the_hints_is_the_source(family: str, addresses: tuple[str, str]) -> None:
    network, there = MemoryNetwork(), ADDRESSES[family][1]
    eth0 = network.add_interface("eth0", *(f"{address}/{24 if family == 'ipv4' else 64}" for address in addresses))
    network.add_neighbour(eth0, there)
    for address in addresses:
        like = OPEN.replace(sgid=Gid.from_ip(inet_pton(AF_INET if family == "ipv4" else AF_INET6, address)))
        (info,) = getaddrinfo(there, PORT, route=[PathData(like)], provider=memory_provider(network))
        assert info.src_addr is not None
        assert not isinstance(info.src_addr, SockAddrIB)
        assert (info.src_addr[0], info.route[0].path.sgid) == (address, like.sgid)


def test_records_of_the_hints_are_alternatives(both: Ends) -> None:
    info = lookup(both, OPEN.replace(pkey=0x8001), OPEN.replace(mtu=2))
    assert [data.path.mtu for data in info.route] == [2]


def test_answers_that_the_hints_exclude_are_left_out(both: Ends) -> None:
    resolver = Resolver(stream(ADDRESSES["ipv6"][1], PORT), stream(B, PORT))
    like = OPEN.replace(dgid=GID_B)
    found = getaddrinfo("b.test", PORT, route=[PathData(like)], provider=both.a.provider, resolver=resolver)
    assert [info.dst_addr for info in found] == [(B, PORT)]


def test_noroute_leaves_the_route_out(both: Ends) -> None:
    """Nothing is resolved, so it is not known whether the record of the hints is a path."""
    assert lookup(both, OPEN.replace(mtu=3), flags=RaiFlag.NOROUTE).route_len == 0


def test_own_answer_as_hints_is_the_answer(both: Ends) -> None:
    (first,) = getaddrinfo(B, PORT, provider=both.a.provider)
    assert lookup(both, first.route[0].path) == first


HERE = Gid("::ffff:127.0.0.1")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sgid": HERE, "dgid": HERE},
        {"mtu": 2},
        {"pkey": 0xFFFF, "sl": 2, "traffic_class": 32, "flow_label": 0x123, "hop_limit": 9},
    ],
    ids=["open", "GIDs only", "MTU", "what the host decides"],
)
def test_endpoint_connects_by_an_answer_that_meets_the_hints(fields: dict[str, Any]) -> None:
    with CmId(provider="soft") as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()

        def accept() -> None:
            with listener.get_request() as request:
                request.create_qp()
                request.accept()
                ended.wait()

        ended = threading.Event()
        server = threading.Thread(target=accept)
        server.start()
        try:
            like = OPEN.replace(**fields)
            (info,) = getaddrinfo("127.0.0.1", listener.src_port, route=[PathData(like)], provider="soft")
            (path,) = (data.path for data in info.route)
            assert meets(path, like)
            with create_ep(info, None, QPInitAttr(), provider="soft") as cmid:
                cmid.connect()
                assert cmid.route.path_rec == (path,)
                attr, _ = cmid.qp.query()
                assert attr.path_mtu == path.mtu
                route = attr.ah_attr.grh
                assert (route.flow_label, route.hop_limit) == (path.flow_label, path.hop_limit)
                assert route.traffic_class == path.traffic_class
        finally:
            ended.set()
            server.join()


def test_record_without_mtu_is_no_route(both: Ends) -> None:
    """An entry that a program has made itself: the error names the field, and not the peer's refusal of an MTU of 0."""
    (info,) = getaddrinfo(B, PORT, provider=both.a.provider)
    bad = replace(info, route=(PathData(info.route[0].path.replace(mtu=0)),))
    with pytest.raises(RdmaError, match="MTU") as caught:
        create_ep(bad, provider=both.a.provider)
    assert caught.value.errno == errno.EINVAL


# -- InfiniBand -----------------------------------------------------------------------------------------


class Subnet:
    """A client and a server on a subnet in memory, each with IPoIB (10.9.0.1 and 10.9.0.2)."""

    def __init__(self) -> None:
        self.subnet = MemorySubnet(clock=REAL)
        self.ports = [self.subnet.add_port(name, pkeys=(0xFFFF, 0x8001)) for name in ("one", "two")]
        self.here, self.there = (port.port().gids[0] for port in self.ports)
        self.network = MemoryNetwork()
        self.ib0 = self.network.add_ipoib_interface("ib0", "10.9.0.1/24", gid=self.here)
        self.network.add_neighbour(self.ib0, "10.9.0.2", mac=IpoibAddress(self.there, 0x48).pack())
        self.provider = memory_provider(self.network, infiniband=[self.ports[0]])

    def to_gid(self, *likes: PathRecord, **hints: Any) -> AddrInfo:
        fields = {"flags": RaiFlag.FAMILY, "family": AddressFamily.IB, "port_space": PortSpace.IB, **hints}
        (info,) = getaddrinfo(
            str(self.there), PORT, route=[PathData(each) for each in likes], provider=self.provider, **fields
        )
        return info

    def to_ip(self, *likes: PathRecord, **hints: Any) -> AddrInfo:
        (info,) = getaddrinfo(
            "10.9.0.2", PORT, route=[PathData(each) for each in likes], provider=self.provider, **hints
        )
        return info


@pytest.fixture
def ib(monkeypatch: pytest.MonkeyPatch) -> Subnet:
    monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
    return Subnet()


TO_EITHER = pytest.mark.parametrize("kind", ["to_gid", "to_ip"])


@TO_EITHER
@pytest.mark.parametrize(
    "fields", [{}, {"sl": 0, "mtu": 3}, {"mtu": 5, "mtu_selector": LESS}, {"slid": 2}, {"dlid": 3}]
)
def test_administrator_is_asked_for_what_is_set(ib: Subnet, kind: str, fields: dict[str, Any]) -> None:
    info = getattr(ib, kind)(OPEN.replace(**fields))
    (data,) = info.route
    path = data.path
    assert meets(path, OPEN.replace(**fields))
    assert (path.sgid, path.dgid, path.slid, path.dlid) == (ib.here, ib.there, 2, 3)
    assert path.mtu_bytes > 0
    assert (info.device, info.port_num) == ("one", 1)


@TO_EITHER
@pytest.mark.parametrize(
    "fields", [{"sl": 5}, {"sgid": FOREIGN}, {"dgid": FOREIGN}, {"mtu": 5, "mtu_selector": GREATER}, {"dlid": 77}]
)
def test_path_that_the_administrator_does_not_have_is_nodata(ib: Subnet, kind: str, fields: dict[str, Any]) -> None:
    with pytest.raises(GaiError) as caught:
        getattr(ib, kind)(OPEN.replace(**fields))
    assert caught.value.errno == EAI.NODATA
    assert describe(OPEN.replace(**fields)) in str(caught.value)


def test_partition_of_the_hints(ib: Subnet) -> None:
    info = ib.to_gid(OPEN.replace(pkey=0x8001))
    assert info.route[0].path.pkey == 0x8001
    assert isinstance(info.dst_addr, SockAddrIB)
    assert info.dst_addr.pkey == 0x8001
    with create_ep(info, provider=ib.provider) as cmid:
        assert (cmid.route.pkey, cmid.route.path_rec[0].pkey) == (0x8001, 0x8001)
    # ib0 is in the default partition, and no port is in that of 0x8123.
    for ask, pkey in ((ib.to_ip, 0x8001), (ib.to_gid, 0x8123), (ib.to_ip, 0x8123)):
        with pytest.raises(GaiError) as caught:
            ask(OPEN.replace(pkey=pkey))
        assert caught.value.errno == EAI.NODATA


@TO_EITHER
@pytest.mark.parametrize("likes", [(), (OPEN,), (OPEN.replace(sl=3),)], ids=["no hints", "open", "SL"])
def test_silent_administrator_leaves_the_route_out(
    ib: Subnet, kind: str, likes: tuple[PathRecord, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "ROUTE_TIMEOUT", 0.05)
    ib.subnet.sa.silence = 1.0
    info = getattr(ib, kind)(*likes)
    assert (info.route_len, info.device, info.port_num) == (0, "one", 1)
    ib.subnet.sa.silence = 0.0
    with create_ep(info, provider=ib.provider) as cmid:  # it resolves the route itself
        assert cmid.route.path_rec[0].dlid == 3


@TO_EITHER
def test_record_of_the_administrator_without_lid_or_mtu_is_not_used(ib: Subnet, kind: str) -> None:
    path = ib.subnet.sa.path(ib.here, ib.there)
    ib.subnet.sa.set_paths(ib.here, ib.there, path.replace(dlid=0))
    assert getattr(ib, kind)().route_len == 0
    info = replace(ib.to_gid(), route=(PathData(path.replace(dlid=0)),))
    with pytest.raises(RdmaError, match="LID") as caught:
        create_ep(info, provider=ib.provider)
    assert caught.value.errno == errno.EINVAL


def test_address_on_ipoib_has_the_route_of_the_administrator(ib: Subnet) -> None:
    info = ib.to_ip()
    assert (info.src_addr, info.dst_addr) == (("10.9.0.1", 0), ("10.9.0.2", PORT))
    assert info.route_len == 72
    with create_ep(info, provider=ib.provider) as cmid:
        assert cmid.route.path_rec == (info.route[0].path,)
        with CmId(None, provider=ib.provider) as other:
            other.resolve_addr(("10.9.0.2", PORT))
            other.resolve_route()
            assert other.route.path_rec == cmid.route.path_rec


class AnsweringNetwork(MemoryNetwork):
    """A network whose neighbours are not known before they are probed."""

    link_layer_address = b""

    def probe(self, family: int, ifindex: int, ip: bytes, destination: bytes | None = None) -> None:
        super().probe(family, ifindex, ip, destination)
        self.add_neighbour(ifindex, inet_ntop(family, ip), mac=self.link_layer_address)


def test_neighbour_on_ipoib_that_has_to_be_asked(ib: Subnet) -> None:
    network = AnsweringNetwork()
    network.link_layer_address = IpoibAddress(ib.there, 0x48).pack()
    network.add_ipoib_interface("ib0", "10.9.0.1/24", gid=ib.here)
    (info,) = getaddrinfo("10.9.0.3", PORT, provider=memory_provider(network, infiniband=[ib.ports[0]]))
    assert info.route[0].path.dgid == ib.there


def test_neighbour_on_ipoib_that_does_not_answer_leaves_the_route_out(
    ib: Subnet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "ROUTE_TIMEOUT", 0.05)
    (info,) = getaddrinfo("10.9.0.9", PORT, provider=ib.provider)
    assert (info.route_len, info.device, info.dst_addr) == (0, "one", ("10.9.0.9", PORT))


@pytest.mark.parametrize("flags", [RaiFlag.NOROUTE, RaiFlag.PASSIVE])
def test_administrator_is_not_asked(ib: Subnet, flags: RaiFlag) -> None:
    ib.subnet.sa.faults = lambda request: pytest.fail(f"asked: {request}")
    (info,) = getaddrinfo("10.9.0.1", PORT, flags=flags, provider=ib.provider)
    assert info.route_len == 0


def test_resolve_addrinfo_asks_the_administrator_without_waiting(ib: Subnet) -> None:
    with EventChannel(ib.provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addrinfo("10.9.0.2", PORT)
        with channel.get_event(10) as event:
            assert event.type is CmEventType.ADDRINFO_RESOLVED
        (info,) = cmid.query_addrinfo()
        assert info.route[0].path.dgid == ib.there
