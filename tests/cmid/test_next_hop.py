"""A connected id whose peer gets another hardware address reports UNREACHABLE, and stays connected."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from rdmacm import CmEventType
from rdmacm.net.types import NeighbourState
from support.pair import Ends, ends

OTHER = bytes.fromhex("020000000099")


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both


def report(both: Ends, mac: bytes, ip: str = "10.0.0.2", state: NeighbourState = NeighbourState.REACHABLE) -> None:
    """Have a's network report a neighbour."""
    network = both.a.host.network
    (ifindex,) = (each.index for each in network.interfaces() if each.name == "eth0")
    network.add_neighbour(ifindex, ip, state, mac)


def mac_of_b(both: Ends) -> bytes:
    (interface,) = (each for each in both.b.host.network.interfaces() if each.name == "eth0")
    return interface.address


def test_connected_id_reports_another_hardware_address_of_its_peer_once(both: Ends) -> None:
    active, passive = both.connect()
    for state in (NeighbourState.STALE, NeighbourState.DELAY, NeighbourState.REACHABLE):
        report(both, mac_of_b(both), state=state)
    assert both.a.quiet()
    for state in (NeighbourState.REACHABLE, NeighbourState.STALE):
        report(both, OTHER, state=state)
    event = both.a.event(CmEventType.UNREACHABLE)
    assert (event.id, event.status) == (active, -errno.ETIMEDOUT)
    assert "10.0.0.2 has another hardware address: 02:00:00:00:00:99, before" in event.message
    assert event.message.endswith("(rdmacm doctor C5)")
    assert both.a.quiet()
    assert both.b.quiet(), "the passive side has not resolved its peer"
    report(both, mac_of_b(both))
    both.a.event(CmEventType.UNREACHABLE)
    active.disconnect()
    both.b.event(CmEventType.DISCONNECTED)
    assert passive


def test_address_that_changes_again_and_again_is_reported_once_until_that_is_read(both: Ends) -> None:
    """Any host of the link can claim an address, and the application may never read events."""
    both.connect()
    for number in range(100):
        report(both, bytes((2, 0, 0, 0, 0, number)))
    for _ in range(2):
        both.a.event(CmEventType.UNREACHABLE)
        assert both.a.quiet()
        report(both, OTHER)
        report(both, mac_of_b(both))


def test_neighbours_of_no_concern(both: Ends) -> None:
    both.connect()
    report(both, OTHER, ip="10.0.0.77")
    report(both, OTHER, state=NeighbourState.FAILED)
    report(both, OTHER, state=NeighbourState.INCOMPLETE)
    assert both.a.quiet()


def test_ids_that_are_not_connected_report_nothing(both: Ends) -> None:
    both.b.listen("10.0.0.2")
    both.a.resolve("10.0.0.2")
    active, _ = both.connect()
    active.disconnect()
    both.a.event(CmEventType.DISCONNECTED)
    report(both, OTHER)
    assert both.a.quiet()
