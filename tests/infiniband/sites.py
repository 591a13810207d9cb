"""Where tests of InfiniBand ids have their hosts: a fabric of ibsim's with OpenSM, or a subnet in memory."""

from __future__ import annotations

import secrets
import time
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
from rdmacm.testing import Fabric, MemorySubnet

SITES = ("opensm", "embedded", "virtual")


class Site(Protocol):
    """A subnet with an administrator."""

    #: Whether tables are cut to what one datagram holds.
    cuts_tables: bool
    #: The timeout of a question that is to outlive the administrator's absence, long enough for it to come back.
    outage_ms: int

    def host(self, node: str) -> AbstractContextManager[IbHost]:
        """A host, which nothing holds any more at the end."""

    def end_administrator(self) -> None:
        """From now on questions get no answer."""

    def begin_administrator(self) -> None:
        """They do again."""

    def needs_real_time(self) -> None:
        """Skip a test that polls descriptors, where time is virtual."""


class OpenSM:
    """A fabric of ibsim's."""

    cuts_tables = True
    #: Asked ten times in this time; ibsim would end a manager that is asked while it starts.
    outage_ms = 30_000

    def __init__(self, fabric: SimulatedFabric) -> None:
        self.fabric = fabric

    @contextmanager
    def host(self, node: str) -> Iterator[IbHost]:
        host = IbHost(_provider(IbsimTransport(node, self.fabric.base)))
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
        return MemorySubnet(clock=time.monotonic)

    @contextmanager
    def host(self, node: str) -> Iterator[IbHost]:
        host = IbHost(self.provider(node))
        yield host
        assert host.provider.retire()
        assert not self.subnet.ports[node].is_open
        self.subnet.remove_port(node)

    def provider(self, node: str) -> SoftProvider:
        return _provider(self.subnet.add_port(node))

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

    def provider(self, node: str) -> SoftProvider:
        number = len(self.fabric.hosts) + 1
        return self.fabric.host(node, f"10.0.0.{number}", infiniband=[self.subnet.add_port(node)]).provider

    def needs_real_time(self) -> None:
        pytest.skip("in virtual time there is no descriptor to poll")


def _provider(transport: MadTransport) -> SoftProvider:
    return SoftProvider(open_network(), namespace=secrets.token_hex(8), infiniband=[transport])
