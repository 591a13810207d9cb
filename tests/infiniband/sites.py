"""Subnets for tests of InfiniBand ids: a fabric of ibsim with OpenSM, or a subnet in memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import pytest

from infiniband.fabric import SimulatedFabric
from infiniband.hosts import IbHost
from rdmacm.ib.ibsim import IbsimTransport
from rdmacm.ib.transport import MadTransport
from rdmacm.net import open_network
from rdmacm.soft.provider import SoftProvider
from rdmacm.testing import Fabric, MemoryNetwork, MemorySubnet
from support.clock import REAL

SITES = ("opensm", "embedded", "virtual")


class Site(Protocol):
    """A subnet with an administrator."""

    #: Whether tables are truncated to one datagram.
    cuts_tables: bool
    #: A timeout in milliseconds that is longer than a restart of the administrator.
    outage_ms: int

    def host(self, node: str, network: MemoryNetwork | None = None) -> AbstractContextManager[IbHost]:
        """A host; asserts at the end that its port is released.

        ``network`` replaces the system's. In virtual time the host has a network in memory of its own.
        """

    def end_administrator(self) -> None:
        """From now on the administrator does not answer."""

    def begin_administrator(self) -> None:
        """From now on the administrator answers again."""

    def needs_real_time(self) -> None:
        """Skip a test that polls descriptors if time is virtual."""


class OpenSM:
    """A fabric of ibsim with OpenSM."""

    cuts_tables = True
    #: A query is sent ten times in this time; more often, and ibsim would end the manager while it starts.
    outage_ms = 30_000

    def __init__(self, fabric: SimulatedFabric) -> None:
        self.fabric = fabric

    @contextmanager
    def host(self, node: str, network: MemoryNetwork | None = None) -> Iterator[IbHost]:
        host = IbHost(_provider(IbsimTransport(node, self.fabric.base), network))
        yield host
        assert host.provider.retire()

    def end_administrator(self) -> None:
        self.fabric.kill_opensm()

    def begin_administrator(self) -> None:
        self.fabric.start_opensm()

    def needs_real_time(self) -> None: ...


class Embedded:
    """A subnet in memory, in real time."""

    cuts_tables = False
    outage_ms = 2_000

    def __init__(self) -> None:
        self.subnet = self.make_subnet()

    def make_subnet(self) -> MemorySubnet:
        return MemorySubnet(clock=REAL)

    @contextmanager
    def host(self, node: str, network: MemoryNetwork | None = None) -> Iterator[IbHost]:
        host = IbHost(self.provider(node, network))
        yield host
        assert host.provider.retire()
        assert not self.subnet.ports[node].is_open
        self.subnet.remove_port(node)

    def provider(self, node: str, network: MemoryNetwork | None) -> SoftProvider:
        return _provider(self.subnet.add_port(node), network)

    def end_administrator(self) -> None:
        self.subnet.sa.silence = 1.0

    def begin_administrator(self) -> None:
        self.subnet.sa.silence = 0.0

    def needs_real_time(self) -> None: ...


class Virtual(Embedded):
    """A subnet in memory, in virtual time."""

    def __init__(self, seed: int = 0) -> None:
        self.fabric = Fabric(seed)
        super().__init__()

    def make_subnet(self) -> MemorySubnet:
        subnet = MemorySubnet(self.fabric.seed, clock=self.fabric.clock, latency=10e-6)
        self.fabric.attach(subnet)
        return subnet

    def provider(self, node: str, _: MemoryNetwork | None) -> SoftProvider:
        number = len(self.fabric.hosts) + 1
        return self.fabric.host(node, f"10.0.0.{number}", infiniband=[self.subnet.add_port(node)]).provider

    def needs_real_time(self) -> None:
        pytest.skip("in virtual time there is no descriptor to poll")


def _provider(transport: MadTransport, network: MemoryNetwork | None) -> SoftProvider:
    return SoftProvider(network or open_network(), namespace=secrets.token_hex(8), infiniband=[transport])
