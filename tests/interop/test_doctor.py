"""``rdmacm doctor`` beside Linux's rxe, with faults that are made for real."""

from __future__ import annotations

import pytest

from interop.doctor_faults import CHANGING, RULES
from interop.scenario import Guest

RULE = "python3 -m interop.doctor_faults"
_CHANGING = {rule.__name__ for rule in CHANGING}


@pytest.mark.parametrize("rule", [rule.__name__ for rule in RULES])
def test_rule_sees_its_fault(guest: Guest, rule: str) -> None:
    restored = "no_network" if rule in _CHANGING else "true"
    done = guest.run(f"rxe {RULE} {rule}\nstatus=$?\n{restored}\nexit $status", timeout=60, record=False)
    assert (done.status, done.output.splitlines()[-1:]) == (0, ["as expected"]), done.output


def test_iwarp_port_is_a_tcp_port(guest: Guest) -> None:
    guest.network = "iwarp_network"
    done = guest.run(f"iwarp {RULE} j7_a_tcp_port", timeout=60, record=False)
    assert (done.status, done.output.splitlines()[-1:]) == (0, ["as expected"]), done.output
