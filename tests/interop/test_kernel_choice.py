"""The provider ``auto`` beside the kernel's devices: what it chooses, and the reason that is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from interop.scenario import Guest

RULE = "python3 -m interop.kernel_choice"
BESIDE_RXE = (
    "a_usable_device_is_chosen_without_a_reason",
    "a_connection_manager_that_may_not_be_opened",
    "a_device_file_that_may_not_be_opened",
    "a_module_that_is_not_loaded",
    "a_library_that_is_missing",
    "a_loopback_address_is_not_the_kernels",
    "a_loopback_listener_of_the_kernel_warns",
    "a_host_without_sysfs",
)
#: After these the network is made again.
CHANGING = ("a_port_that_is_down", "the_port_of_a_deleted_device_stays_taken")
PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize("rule", [*BESIDE_RXE, *CHANGING])
def test_choice_beside_rxe(guest: Guest, rule: str) -> None:
    restored = "no_network" if rule in CHANGING else "true"
    done = guest.run(f"rxe {RULE} {rule}\nstatus=$?\n{restored}\nexit $status", timeout=60, record=False)
    assert (done.status, done.output.splitlines()[-1:]) == (0, ["as expected"]), done.output


def test_loopback_is_the_software_devices_beside_siw(guest: Guest) -> None:
    guest.network = "iwarp_network"
    done = guest.run(f"iwarp {RULE} a_loopback_address_is_the_software_devices", timeout=60, record=False)
    assert (done.status, done.output.splitlines()[-1:]) == (0, ["as expected"]), done.output


def test_first_programs_of_readme_beside_siw(guest: Guest) -> None:
    """The server and the client of README, on 127.0.0.1, where ``auto`` uses the kernel's device."""
    guest.network = "iwarp_network"
    programs = re.findall(
        r"^```python\n(# \w+\.py\n.*?)^```", (PROJECT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    for program in programs:
        (guest.machine.share / program.split()[1]).write_text(program)
    script = """
ip netns exec iwarp python3 -u /mnt/share/server.py >/tmp/server.out 2>&1 &
SERVER=$!
_until_it_listens 'grep -q listening /tmp/server.out'
iwarp python3 /mnt/share/client.py; finish
"""
    done = guest.run(script, timeout=60, record=False)
    assert "wrote to 1048576 bytes at the server" in done.output, done.output
    assert "in memory b'straight into its memory'" in done.output, done.output
