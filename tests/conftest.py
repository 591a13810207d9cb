"""Fixtures of several test files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rdmacm import EventChannel
from rdmacm.testing import MemoryNetwork, VirtualClock, memory_provider
from support.world import World


@pytest.fixture
def world() -> Iterator[World]:
    network = MemoryNetwork()
    eth0 = network.add_interface("eth0", "10.0.0.1/24", "fd00::1/64", "fe80::1/64")
    network.add_route("0.0.0.0/0", eth0, gateway="10.0.0.254", source="10.0.0.1")
    network.add_neighbour(eth0, "10.0.0.2")
    clock = VirtualClock()
    provider = memory_provider(network, clock)
    with EventChannel(provider) as channel:
        yield World(network, eth0, clock, provider, channel)
