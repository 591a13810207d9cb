"""Requests for another transport or partition, or with a GID that no peer can have, are rejected for that reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rdmacm import CmEventType, CmId, ConnParam, EventChannel, PortSpace, QPType, SockAddrIB
from rdmacm.address import Gid, service_id
from rdmacm.proto.cm.messages import REQ
from rdmacm.soft.ids.ib_cm import IbCmConnector
from rdmacm.testing import MemoryNetwork, MemorySubnet, Outcome, memory_provider
from support.clock import REAL
from support.pair import ADDRESSES, Ends, ends
from support.rows import for_each

#: Reasons of a REJ.
INVALID_TRANSPORT, INVALID_GID = 9, 12


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both


def forge(monkeypatch: pytest.MonkeyPatch, primary: dict[str, Any] | None = None, **fields: Any) -> None:
    """Change these fields of each REQ from now on, and these of its primary path."""
    request = IbCmConnector._request

    def forged(*args: Any) -> REQ:
        req = request(*args)
        return replace(req, primary=replace(req.primary, **(primary or {})), **fields)

    monkeypatch.setattr(IbCmConnector, "_request", forged)


def rejection(both: Ends, family: str = "ipv4") -> int:
    """The reason of the REJ for a request from a to b."""
    both.b.listen(ADDRESSES[family][1])
    active = both.a.resolve(ADDRESSES[family][1])
    active.create_qp()
    active.connect()
    event = both.a.event(CmEventType.REJECTED)
    assert both.b.quiet()
    assert both.fabric.log.count(Outcome.DELIVERED, "REP") == 0
    return event.status


@for_each(("kind", "extended"), [(1, 0), (2, 0), (3, 1), (3, 0)])
def test_transport_is_the_listeners(monkeypatch: pytest.MonkeyPatch, kind: int, extended: int) -> None:
    with ends() as both:
        forge(monkeypatch, transport_service_type=kind, extended_transport_type=extended)
        assert rejection(both) == INVALID_TRANSPORT


@for_each("pkey", [0, 0x8000, 1, 0x8001, 0x7FFE])
def test_roce_has_the_default_partition_only(monkeypatch: pytest.MonkeyPatch, pkey: int) -> None:
    with ends() as both:
        forge(monkeypatch, partition_key=pkey)
        assert rejection(both) == INVALID_GID


def test_limited_member_of_the_default_partition_connects(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(monkeypatch, partition_key=0x7FFF)
    both.connect()


def test_request_whose_address_was_removed_meanwhile_is_rejected(both: Ends) -> None:
    address = ADDRESSES["ipv4"][1]
    both.b.listen("0.0.0.0")
    active = both.a.resolve(address)
    active.create_qp()
    active.connect()
    provider = both.b.host.provider
    both.fabric.run(lambda: both.fabric.log.count(Outcome.DELIVERED, "REQ") == 1)
    network = both.b.host.network
    network.remove_address(next(each.index for each in network.interfaces() if each.name == "eth0"), address)
    provider.host.view()
    assert len(provider.host.cm.agent) == 1
    assert both.b.quiet()
    assert len(provider.host.cm.agent) == 0  # the REJ itself has no way to a host without that address


NO_PEER = {
    "ipv4": ["::ffff:0.0.0.0", "::ffff:224.0.0.1", "::ffff:255.255.255.255", "::ffff:127.0.0.1", "fd00::1", "ff02::1"],
    "ipv6": ["::", "ff02::1", "ff0e::1", "::1", "fe80::1", "::ffff:10.0.0.1"],
}


def test_req_to_a_foreign_gid_is_rejected(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(monkeypatch, {"remote_gid": Gid("::ffff:10.0.0.9")})
    assert rejection(both) == INVALID_GID


@for_each(("family", "gid"), [(family, gid) for family, gids in NO_PEER.items() for gid in gids])
def test_gid_of_a_roce_peer_is_a_hosts_address(monkeypatch: pytest.MonkeyPatch, family: str, gid: str) -> None:
    with ends() as both:
        forge(monkeypatch, {"local_gid": Gid(gid)})
        assert rejection(both, family) == INVALID_GID


class Subnet:
    """Two InfiniBand ports."""

    def __init__(self) -> None:
        subnet = MemorySubnet(clock=REAL)
        ports = [subnet.add_port(name) for name in ("one", "two")]
        self.server, self.client = (memory_provider(MemoryNetwork(), infiniband=[port]) for port in ports)
        self.service = SockAddrIB(ports[0].port().gids[0], service_id(PortSpace.IB, 7471), (1 << 64) - 1)

    def outcome(self, listens: QPType = QPType.RC, connects: QPType = QPType.RC) -> int | None:
        """The reason of the REJ for a request; None if it arrives."""
        with (
            EventChannel(self.server) as there,
            EventChannel(self.client) as here,
            CmId(there, PortSpace.IB, qp_type=listens) as listener,
            CmId(here, PortSpace.IB, qp_type=connects) as active,
        ):
            listener.bind_addr(self.service)
            listener.listen()
            active.resolve_addr(self.service)
            here.get_event(10).ack()
            active.resolve_route()
            here.get_event(10).ack()
            active.connect(ConnParam(qp_num=7))
            while True:
                for channel in (here, there):
                    try:
                        event = channel.get_event(0)
                    except BlockingIOError:
                        continue
                    with event:
                        if event.type is CmEventType.REJECTED:
                            return event.status
                        assert event.type is CmEventType.CONNECT_REQUEST
                        event.id.destroy()
                        return None


@pytest.fixture
def subnet(monkeypatch: pytest.MonkeyPatch) -> Subnet:
    monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
    return Subnet()


@for_each("gid", ["::", "ff12:601b::1", "fe80::", "fec0::5"])
def test_gid_of_an_infiniband_peer_is_a_ports(monkeypatch: pytest.MonkeyPatch, gid: str) -> None:
    monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
    with monkeypatch.context() as patch:
        forge(patch, {"local_gid": Gid(gid), "subnet_local": True})
        assert Subnet().outcome() == INVALID_GID


@for_each("pkey", [0, 0x8001])
def test_infiniband_port_takes_requests_of_its_partitions(monkeypatch: pytest.MonkeyPatch, pkey: int) -> None:
    monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
    with monkeypatch.context() as patch:
        forge(patch, partition_key=pkey)
        assert Subnet().outcome() == INVALID_GID


TYPES = [QPType.RC, QPType.UC, QPType.XRC_SEND]


@for_each(("listens", "connects"), [(a, b) for a in TYPES for b in TYPES])
def test_infiniband_listener_takes_its_own_transport(subnet: Subnet, listens: QPType, connects: QPType) -> None:
    assert subnet.outcome(listens, connects) == (None if listens is connects else INVALID_TRANSPORT)
