"""Scenarios: faults of hosts and of the network at given times, as text."""

from __future__ import annotations

from functools import partial

import pytest

from rdmacm.testing import Fabric, FaultRule, Outcome, Scenario, ScenarioEvent
from support.fabric import ENDS, route, two

TEXT = """
at 1 set loss 1
at 2 set loss 0
at 2 set latency 0.5 from a to b
at 3 partition a b
at 4 heal
at 5 partition from a to b
at 6 heal
at 7 pause b
at 8 resume b
at 9 slow a 0.25
at 9 drift b 2
at 9 jump a 3
at 10 crash b
lose REQ 1
"""


def test_events_happen_in_time() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    fabric.play(TEXT)
    seen: dict[int, object] = {}

    def send(at: int) -> None:
        a.wire.send(route(a, *ENDS), [bytes(16)])
        b.wire.send(route(b, *ENDS[::-1]), [bytes(16)])
        last = len(fabric.log)
        seen[at] = (fabric.loss, fabric.link("a", "b").latency, a.lag, b.clock.rate, b.paused, last)

    for at in range(1, 12):
        fabric.call_at(at, partial(send, at))
    fabric.run(until=20)
    assert [entry.outcome for entry in fabric.log if 1 <= entry.packet.time < 2] == [Outcome.LOST] * 2
    assert [entry.time for entry in fabric.log if entry.packet.time == 2] == [2 + fabric.latency, 2.5]
    outcomes = {at: sorted(e.outcome.value for e in fabric.log if e.packet.time == at) for at in (3, 5, 11)}
    assert outcomes == {
        3: ["partitioned", "partitioned"],
        5: ["delivered", "partitioned"],
        11: ["crashed", "crashed"],
    }
    assert seen[7] == (0.0, 0.5, 0.0, 1.0, True, seen[7][-1])  # type: ignore[index]
    assert not b.alive
    assert (a.lag, b.clock.rate, a.clock() - fabric.now) == (0.25, 2.0, 3.0)


def test_text_of_a_scenario() -> None:
    scenario = Scenario.parse("at 0.5 crash b  # for ever\nlose REQ 1\n\n# nothing else\n")
    assert scenario.events == (ScenarioEvent(0.5, "crash b"),)
    assert scenario.rules == (FaultRule("lose", "REQ"),)
    assert str(scenario) == "at 0.5 crash b\nlose REQ 1"
    assert Scenario.parse(TEXT).events == Scenario.parse(str(Scenario.parse(TEXT))).events


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("at", "no event"),
        ("at x heal", "no event"),
        ("at 1", "try: crash HOST"),
        ("at 1 explode b", "try: crash HOST"),
        ("at 1 crash", "try: crash HOST"),
        ("at 1 slow b soon", "could not convert"),
        ("at 1 set colour 1", "none of loss"),
        ("at 1 set loss 2", "loss"),
        ("explode REQ 1", "no rule"),
    ],
)
def test_lines_that_are_none(line: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Scenario.parse(line)


def test_an_unknown_host() -> None:
    fabric = Fabric()
    fabric.play("at 1 crash nobody")
    with pytest.raises(ValueError, match="no host nobody"):
        fabric.run()
