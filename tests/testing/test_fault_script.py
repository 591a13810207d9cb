"""Scripts of faults: rules as text and in Python, and which packets they concern."""

from __future__ import annotations

import pytest

from rdmacm.testing import Fabric, FaultRule, FaultScript, Outcome
from support.fabric import ENDS, received, route, sealed, two
from support.life_cycles import live
from support.rows import for_each

RULES = {
    "lose REQ 1": FaultRule("lose", "REQ"),
    "corrupt RC_SEND_* 3-5 from a bits 8": FaultRule("corrupt", "RC_SEND_*", 3, 5, source="a", bits=8),
    "delay REP 2- connection 3 by 0.5": FaultRule("delay", "REP", 2, 0, connection=3, delay=0.5),
    "repeat ACK * to b copies 3": FaultRule("repeat", "ACK", 1, 0, destination="b", copies=3),
    "deliver DATA *": FaultRule("deliver", "DATA", 1, 0),
}


@for_each("text", RULES)
def test_rule_is_text_and_python(text: str) -> None:
    assert FaultRule.parse(text) == RULES[text]
    assert str(RULES[text]) == text


def test_script_is_lines_with_comments() -> None:
    script = FaultScript.parse("\n# nothing\n  lose   REQ  1  # the first\nrepeat RTU 2\n")
    assert str(script) == "lose REQ 1\nrepeat RTU 2"


@for_each(
    "text",
    [
        *("", "drop REQ 1", "lose", "lose REQ 0", "lose REQ 5-3", "lose REQ x", "lose REQ 1 in", "lose REQ 1 of 2"),
        *("delay REP 1 by -1", "delay REP 1 by nan", "repeat REP 1 copies 1", "repeat REP 1 copies 65"),
        *("corrupt REP 1 bits 0", "lose REQ 1 connection -1"),
    ],
)
def test_line_that_is_no_rule(text: str) -> None:
    with pytest.raises(ValueError, match="no rule of faults"):
        FaultRule.parse(text)


def test_numbers_count_the_packets_that_the_rule_fits() -> None:
    fabric = Fabric()
    fabric.faults = FaultScript.parse("lose RC_SEND_ONLY 2\nlose * 5-6 to b\ndeliver * *")
    fabric.loss = 1.0  # the last rule is stronger
    a, b = two(fabric)
    for end, ends in ((a, ENDS), (b, ENDS[::-1])):
        way = route(end, *ends)
        for psn in range(8):
            end.wire.send(way, [sealed(way, b"", psn)])
    fabric.run()
    assert [data[11] for data, _, _, _ in received(b)] == [0, 2, 3, 6, 7]
    assert len(received(a)) == 8


def test_kinds_of_acknowledgements_and_data() -> None:
    """Each kind that a connection with receives that come too late must have."""
    counts: dict[str, int] = {}
    for kind in ("ACK", "RNR_NAK", "DATA", "RC_*", "RC_ACKNOWLEDGE"):
        fabric = Fabric(1)
        script = fabric.faults = FaultScript.parse(f"deliver {kind} *")
        live(fabric)
        counts[kind] = script._counts[0]
    assert counts["ACK"] + counts["RNR_NAK"] == counts["RC_ACKNOWLEDGE"] > 0
    assert counts["DATA"] + counts["RC_ACKNOWLEDGE"] == counts["RC_*"]


def test_rule_about_one_connection() -> None:
    """Two connections, one after the other: the script loses packets of the second alone, of both directions."""
    fabric = Fabric(3)
    fabric.faults = FaultScript.parse(
        "lose REQ 1 connection 2\nlose REP 1 connection 2\nlose DATA 1-2 connection 2\nlose DREQ 1 connection 2"
    )
    live(fabric)
    assert fabric.log.count(Outcome.LOST) == 0
    for name in ("passive", "active"):
        fabric.crash(name)
    live(fabric)
    lost = [entry.packet.kind for entry in fabric.log.select(Outcome.LOST)]
    assert (lost[:2], lost[-1], len(lost)) == (["REQ", "REP"], "DREQ", 5)


def test_script_finds_each_fault_of_a_lossy_run() -> None:
    """A connection survives whatever is done to one packet of any kind."""
    kinds = ("RC_SEND_*", "RC_RDMA_WRITE_*", "RC_RDMA_READ_*", "RC_FLUSH", "RC_ATOMIC_WRITE")
    for kind in ("REQ", "REP", "RTU", "DREQ", "DREP", "ACK", *kinds):
        for action in ("lose", "corrupt", "repeat", "delay"):
            fabric = Fabric(1)
            fabric.faults = FaultScript.parse(f"{action} {kind} 1 connection 1")
            live(fabric)
            assert fabric.log.count(Outcome.LOST) == (action == "lose"), (action, kind)
