"""What a host lacks or forbids is an error that names it, with a test and a command, by the provider ``kernel``."""

from __future__ import annotations

from interop.scenario import Guest

CASES = "python3 -m interop.kernel_refusals"


def test_each_refusal_says_why(guest: Guest) -> None:
    """Nodes, permissions, locked memory, the library, ports, addresses, groups; and a device of another namespace."""
    script = f"rxe {CASES} || exit\nsoft {CASES} a_device_of_another_namespace"
    done = guest.run(script, timeout=60, record=False)
    assert done.output.splitlines() == ["as expected"] * 2, done.output


def test_a_device_without_datagrams(guest: Guest) -> None:
    guest.network = "iwarp_network"
    done = guest.run("rxe env RDMACM_PROVIDER=kernel python3 -m rdmacm mckey -m 239.1.2.3 -b $IWARP4", record=False)
    assert done.status == 1, done.output
    assert "siw0: the device has no queue pairs of type UD [EOPNOTSUPP]" in done.output
