"""Networks of several test files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.netns import TwoHosts, two_hosts


@pytest.fixture
def net() -> Iterator[TwoHosts]:
    """Two hosts; the test runs in ``a``."""
    with two_hosts() as net, net.a.enter():
        yield net


@pytest.fixture
def two_ways() -> Iterator[TwoHosts]:
    """Two links between the hosts, and 10.9.9.9, fd09::9 behind both; the main table routes over the first.

    The second link: ``wa`` 10.8.0.1, fd08::1 to ``wb`` 10.8.0.2, fd08::2. Table 100 routes over it.
    """
    with two_hosts() as net:
        net.topology.link(
            net.a,
            "wa",
            net.b,
            "wb",
            addresses_a=("10.8.0.1/24", "fd08::1/64"),
            addresses_b=("10.8.0.2/24", "fd08::2/64"),
        )
        net.b.ip_batch("address add 10.9.9.9/32 dev lo", "address add fd09::9/128 dev lo nodad")
        net.a.ip_batch(
            "route add 10.9.0.0/16 via 10.7.0.2",
            "route add 10.9.0.0/16 via 10.8.0.2 table 100",
            "route add fd09::/64 via fd07::2",
            "route add fd09::/64 via fd08::2 table 100",
        )
        with net.a.enter():
            yield net
