"""Connections of the package's own engines, on a simulated network with faults: what their captures show."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rdmacm import CmTimeoutError, RdmaError, connect
from rdmacm.diagnosis.captures import Capture
from rdmacm.endpoint.connection_state import ConnectionState
from rdmacm.testing import LOSE, Fabric, FabricPacket
from rdmacm.testing import Verdict as Fate
from rdmacm.trace.verdicts import FAILED, NOTE, OK, Judge, Verdict
from support.endpoints import Ends, play, receive, send
from support.traces import traced


class Captured:
    """Two hosts, and a capture at the first one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fabric = Fabric(1)
        self.open: list[ConnectionState] = []
        self.ends = Ends(self.fabric)
        self.capture = Capture(path, clock=lambda: int(self.fabric.now * 10**9))
        self.capture.attach(self.ends.a.provider)

    def talk(self, count: int, size: int, before: Callable[[], None] = lambda: None) -> None:
        """Connect, and send messages, until one fails."""
        active, passive = play(self.fabric, self.ends.connecting("10.0.0.2"), self.ends.accepting())
        before()
        self.open += [active, passive]
        with suppress(RdmaError):
            for _ in range(count):
                play(self.fabric, send(active, bytes(size)), receive(passive))

    def verdict(self) -> Verdict:
        self.fabric.run(seconds=1)
        self.capture.close()
        self.ends.close(*self.open)
        tracer, file = traced(self.path.read_bytes())
        assert (tracer.malformed, file.damage) == (0, "")
        (found,) = tracer.found()
        return Judge(tracer).verdict(found)


@pytest.fixture
def hosts(tmp_path: Path) -> Captured:
    return Captured(tmp_path / "host.pcapng")


def test_without_faults(hosts: Captured) -> None:
    hosts.talk(20, 5000)
    found = hosts.verdict()
    assert (found.level, "20 SEND of 100.0 kB" in found.text) == (OK, True), found


def test_loss(hosts: Captured) -> None:
    hosts.talk(100, 5000, lambda: setattr(hosts.fabric, "loss", 0.05))
    found = hosts.verdict()
    assert (found.level, "% of the packets were lost" in found.text) == (NOTE, True), found
    assert 1 < float(found.text.split()[0]) < 10


def test_long_packets_are_lost(hosts: Captured) -> None:
    def faults(packet: FabricPacket) -> Fate | None:
        return LOSE if len(packet.data) > 900 else None

    hosts.talk(3, 5000, lambda: setattr(hosts.fabric, "faults", faults))
    found = hosts.verdict()
    assert (found.level, found.rule) == (FAILED, "G8"), found


def test_peer_that_goes_away(hosts: Captured) -> None:
    hosts.talk(3, 100, lambda: hosts.fabric.partition("a", "b"))
    found = hosts.verdict()
    assert found.level == FAILED, found
    assert "stopped" in found.text


def test_nobody_answers(hosts: Captured) -> None:
    hosts.fabric.faults = lambda packet: LOSE if packet.source == "b" else None
    with pytest.raises(CmTimeoutError):
        connect(("10.0.0.2", 7471), timeout=60, provider=hosts.ends.a.provider)
    found = hosts.verdict()
    assert (found.level, found.rule) == (FAILED, "C1"), found
