"""What the kernel's provider does by type; ``interop/kernel_capabilities.py`` has the same calls through the kernel."""

from __future__ import annotations

import pytest

from rdmacm.kernel.differences import DIFFERENCES, RULES, To, rules_of
from rdmacm.testing import Fabric
from rdmacm.verbs import QPState, QPType
from rdmacm.verbs.posting import REQUIRED_OPERANDS
from support.ends import states_of

INIT, RTS, ERR = QPState.INIT, QPState.RTS, QPState.ERR


@pytest.mark.parametrize("qp_type", [QPType.RC, QPType.UC])
def test_connection_of_software_devices_stays_until_disconnect(qp_type: QPType) -> None:
    found = states_of(Fabric().host("a", "10.0.0.1").provider, "10.0.0.1", qp_type)
    assert found == {"attached": INIT, "accepted": RTS, "disconnected": ERR, "ended": RTS}


def test_datagram_id_of_a_software_device_disconnects_to_err() -> None:
    found = states_of(Fabric().host("a", "10.0.0.1").provider, "10.0.0.1", QPType.UD)
    assert found == {"attached": RTS, "accepted": RTS, "disconnected": ERR}


def test_each_type_with_queue_pairs_has_rules() -> None:
    assert set(RULES) == set(REQUIRED_OPERANDS)
    assert {qp_type for each in DIFFERENCES for qp_type in each.types} == set(RULES)
    assert rules_of(QPType.RAW_PACKET) is RULES[QPType.RC]
    assert [QPType(each) for each, rules in RULES.items() if not REQUIRED_OPERANDS[QPType(each)]] == [
        QPType(each) for each, rules in RULES.items() if rules.to is To.NOTHING
    ]
