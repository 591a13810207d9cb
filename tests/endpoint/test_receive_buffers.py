"""Where registered memory is locked, a connection registers a part of its receive buffers at first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from rdmacm.capabilities import SOFT
from rdmacm.soft.device.device import SoftDevice
from rdmacm.verbs.enums import TransportType
from support.endpoints import connected, in_thread

SIZE = 65536
MESSAGES = [bytes([number]) * 1000 for number in range(16)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SoftDevice]:
    """The loopback device, as if it locked memory."""
    with connected() as (active, _):
        found = active.id.verbs.backend
        assert isinstance(found, SoftDevice)
        monkeypatch.setattr(found, "capabilities", replace(SOFT, locks_memory=True))
        yield found


def registered(device: SoftDevice) -> int:
    """The bytes of all regions."""
    return sum(region.length for region in device._memory._regions.values())


def test_idle_connection_registers_four_of_sixteen_buffers(device: SoftDevice) -> None:
    before = registered(device)
    with connected() as (active, passive):
        assert registered(device) - before == 2 * 4 * SIZE
        for _ in range(20):
            active.send(b"request")
            assert passive.recv(timeout=20) == b"request"
        assert registered(device) - before == 2 * 4 * SIZE, "no message ever waits for another"
    assert registered(device) == before


def test_sixteen_messages_arrive_while_the_receiver_makes_no_call(device: SoftDevice) -> None:
    before = registered(device)
    with connected() as (active, passive):
        for message in MESSAGES:
            active.send(message, timeout=20)
        assert registered(device) - before == (16 + 4) * SIZE
        assert [passive.recv(timeout=20) for _ in MESSAGES] == MESSAGES
        for message in MESSAGES * 2:
            active.send(message, timeout=20)
            assert passive.recv(timeout=20) == message


def test_connection_goes_on_with_few_buffers_where_memory_is_short(
    device: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected() as (active, passive):
        before = registered(device)
        monkeypatch.setattr(device, "attr", replace(device.attr, max_mr=0))

        def send_all() -> None:
            for message in MESSAGES:
                active.send(message[:100], timeout=20)

        with in_thread(send_all):
            assert [passive.recv(timeout=20) for _ in MESSAGES] == [message[:100] for message in MESSAGES]
        assert registered(device) == before


def test_all_buffers_are_registered_where_a_message_without_one_ends_the_connection(
    device: SoftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """iWARP has no RNR NAK."""
    monkeypatch.setattr(device, "transport_type", TransportType.IWARP)
    before = registered(device)
    with connected():
        assert registered(device) - before == 2 * 16 * SIZE


def test_small_buffers_are_registered_at_once(device: SoftDevice) -> None:
    before = registered(device)
    with connected(max_message=1024):  # of the passive end
        assert registered(device) - before == 4 * SIZE + 16 * 1024
