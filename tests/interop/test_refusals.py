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


def test_loopback_address_where_all_devices_are_of_iwarp(guest: Guest) -> None:
    """The kernel's errno is that of another family; the text names an address to use."""
    guest.network = "iwarp_network"
    resolve = "rxe env RDMACM_PROVIDER=kernel python3 -m rdmacm resolve 127.0.0.1 7471"
    done = guest.run(f"rdma link delete rxe0\n{resolve}", record=False)
    assert done.status == 1, done.output
    assert "the kernel does not resolve 127.0.0.1" in done.output
    assert "try: 10.0.1.1, an address of an RDMA device" in done.output
    assert "families" not in done.output


def test_iwarp_results_have_no_route(guest: Guest) -> None:
    """rdma_getaddrinfo(3): ai_route_len is 0 if the transport does not require routing data."""
    guest.network = "iwarp_network"
    code = "from rdmacm import getaddrinfo; i = getaddrinfo('$PEER4', 7471)[0]; print(i.device, i.route_len)"
    done = guest.run(f'rxe env RDMACM_PROVIDER=kernel python3 -c "{code}"', record=False)
    assert done.output.splitlines() == ["siw0 0"], done.output
