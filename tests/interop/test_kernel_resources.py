"""The provider ``kernel`` leaves nothing behind, whatever ends its connections.

``RDMACM_CHURN`` sets the number of connections, ``RDMACM_KILLS`` that of killed processes, ``RDMACM_KILLS_SEED`` when.
"""

from __future__ import annotations

import os

import pytest

from interop.scenario import Guest

CHURN = int(os.environ.get("RDMACM_CHURN", "200"))
KILLS = int(os.environ.get("RDMACM_KILLS", "10"))
KILLS_SEED = os.environ.get("RDMACM_KILLS_SEED", "1")
RULES = (
    "ctrl_c_ends_each_wait",
    "a_wait_lets_other_threads_run",
    "no_event_is_lost_to_a_signal",
    "a_connection_belongs_to_the_parent",
    "a_peer_that_leaves_at_once_has_disconnected",
    "references_are_dropped_in_any_order",
    "a_device_is_removed_under_connections_and_waits",
)


def test_connections_leave_no_object_descriptor_or_memory_behind(guest: Guest) -> None:
    done = guest.run(f"rxe python3 -m interop.kernel_churn {CHURN}", timeout=60 + CHURN / 5, record=False)
    assert done.status == 0, done.output
    assert "left behind: nothing" in done.output


def test_killed_processes_leave_nothing_behind_and_the_next_is_served(guest: Guest) -> None:
    """Servers and clients, at random moments of connecting, moving data and disconnecting."""
    script = f"rxe python3 -m interop.kernel_killed {KILLS_SEED} {KILLS}"
    done = guest.run(script, timeout=60 + 5 * KILLS, record=False)
    assert done.status == 0, done.output
    assert done.output.startswith("killed: "), done.output


def test_twelve_connections_fit_into_eight_mebibytes_of_locked_memory(guest: Guest) -> None:
    done = guest.run("rxe python3 -m interop.kernel_locked 12", timeout=120, record=False)
    assert done.status == 0, done.output
    assert done.output.splitlines()[-1] == "as expected", done.output


@pytest.mark.parametrize("rule", RULES)
def test_waits_end_as_they_should(guest: Guest, rule: str) -> None:
    done = guest.run(f"rxe python3 -m interop.kernel_interrupts {rule}", timeout=120, record=False)
    assert done.status == 0, done.output
    assert done.output.splitlines()[-1] == "as expected", done.output
