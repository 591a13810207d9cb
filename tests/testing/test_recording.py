"""A fabric tells its faults as rules, and repeats what happened by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from rdmacm import CmEvent, CmEventType, CmId, EventChannel
from rdmacm.testing import FabricPacket, FaultRule, FaultScript, Outcome, Verdict
from rdmacm.testing.recording import RecordedFabric

ADDRESS = ("10.0.0.2", 7471)


@contextmanager
def work_on(fabric: RecordedFabric) -> Iterator[None]:
    """Two hosts connect, and disconnect."""
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    accepted: list[CmId] = []

    def serve(event: CmEvent) -> None:
        if event.type is CmEventType.CONNECT_REQUEST and event.id is not None:
            event.id.create_qp()
            event.id.accept()
            accepted.append(event.id)
        elif event.type is CmEventType.DISCONNECTED and event.id is not None:
            event.id.disconnect()

    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel(b.provider))
        listener, client = stack.enter_context(CmId(channel)), stack.enter_context(CmId(provider=a.provider))
        b.on_event(channel, serve)
        listener.bind_addr(ADDRESS)
        listener.listen()
        client.resolve_addr(ADDRESS)
        client.resolve_route()
        client.create_qp()
        client.connect()
        fabric.run(seconds=1)
        client.disconnect()
        fabric.run(seconds=200)
        yield


def outcomes(fabric: RecordedFabric) -> list[tuple[int, str, Outcome, bytes]]:
    return [(entry.packet.number, entry.packet.kind, entry.outcome, entry.data) for entry in fabric.log]


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("chances", [{"loss": 0.3, "duplicate": 0.3}, {"corrupt": 0.4}])
def test_the_faults_as_rules_repeat_the_run(seed: int, chances: dict[str, Any]) -> None:
    fabric = RecordedFabric(seed, **chances)
    with work_on(fabric):
        rules = fabric.applied_faults()
    assert rules
    again = RecordedFabric(seed, script=FaultScript.parse("\n".join(map(str, rules))))
    with work_on(again):
        assert outcomes(again) == outcomes(fabric)
        assert again.applied_faults() == rules


def test_packets_that_are_held_back_arrive_when_they_did() -> None:
    fabric = RecordedFabric(3, reorder=0.5)
    with work_on(fabric):
        rules = fabric.applied_faults()
    assert rules
    assert {rule.action for rule in rules} == {"delay"}
    again = RecordedFabric(3, script=FaultScript(rules))
    with work_on(again):
        pass
    assert [entry.time for entry in again.log] == pytest.approx([entry.time for entry in fabric.log], abs=1e-9)


def test_a_script_replaces_chance_and_the_faults_of_the_test() -> None:
    fabric = RecordedFabric(1, loss=1.0, script=FaultScript([FaultRule("lose", "REQ", source="a", destination="b")]))
    seen: list[str] = []

    def faults(packet: FabricPacket) -> Verdict | None:
        seen.append(packet.kind)
        return Verdict(copies=0)

    fabric.faults = faults
    with work_on(fabric):
        pass
    lost = fabric.log.select(Outcome.LOST)
    assert [entry.packet.kind for entry in lost] == ["REQ"]
    assert seen[:3] == ["REQ", "REQ", "REP"], "what it does besides happens"
    assert fabric.faults is faults


def test_bytes_of_a_test_are_kept() -> None:
    fabric = RecordedFabric(1, script=FaultScript())
    replaced = {2: b"\0" * 280}
    fabric.faults = lambda packet: Verdict(data=replaced[packet.number]) if packet.number in replaced else None
    with work_on(fabric):
        pass
    assert [entry.packet.number for entry in fabric.log.select(Outcome.CORRUPTED)] == [2]


def test_faults_are_not_known_if_the_log_is_not_complete() -> None:
    fabric = RecordedFabric(1, loss=0.2, log_limit=2000)
    with work_on(fabric):
        assert fabric.applied_faults() is None
