"""What the provider ``kernel`` says about refusals, ports that are down."""

from __future__ import annotations

import pytest

from interop.scenario import Guest

RULE = "python3 -m interop.kernel_ports"
#: After these the network is made again.
CHANGING = ("a_port_that_is_down_is_named_at_once", "a_port_without_carrier_is_named")


@pytest.mark.parametrize("rule", CHANGING)
def test_rule_beside_rxe(guest: Guest, rule: str) -> None:
    done = guest.run(f"rxe {RULE} {rule}\nstatus=$?\nno_network\nexit $status", timeout=60, record=False)
    assert (done.status, done.output.splitlines()[-1:]) == (0, ["as expected"]), done.output


def test_refusal_of_iwarp_says_who_refuses(guest: Guest) -> None:
    guest.network = "iwarp_network"
    done = guest.run(f"rxe {RULE} a_refusal_of_iwarp_says_who_refuses", timeout=60, record=False)
    assert (done.status, done.output.splitlines()[-1:]) == (0, ["as expected"]), done.output
