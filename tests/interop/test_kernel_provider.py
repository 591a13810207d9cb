"""The provider ``kernel`` on rdma_rxe: with itself and with the software device, and what it does by itself."""

from __future__ import annotations

import pytest

from interop.scenario import Guest

ENDS = "python3 -m interop.kernel_ends"


@pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize(
    ("server", "client"),
    [
        pytest.param(
            "serve_rxe {ends} kernel passive $RXE{family}", "soft {ends} soft active $RXE{family}", id="passive"
        ),
        pytest.param(
            "serve_soft {ends} soft passive $SOFT{family}", "rxe {ends} kernel active $SOFT{family}", id="active"
        ),
        pytest.param(
            "serve_rxe {ends} kernel passive $RXE{family}", "rxe {ends} kernel active $RXE{family}", id="both"
        ),
    ],
)
def test_ids_connect_and_end_as_with_the_other_provider(guest: Guest, family: int, server: str, client: str) -> None:
    """Private data, depths, rejection, disconnection of either side and a datagram peer; librdmacm is not loaded."""
    script = f"{server}\n{client} || exit\nfinish".format(ends=ENDS, family=family)
    done = guest.run(script, timeout=60)
    assert done.status == 0, done.output
    assert done.output.splitlines() == ["active end: as expected", "passive end: as expected"]


def test_the_provider_keeps_the_rules_of_the_seam(guest: Guest) -> None:
    """Errors, options, migration, user events, wildcards, joins, forks, removal of the device, nothing left behind."""
    done = guest.run("rxe python3 -m interop.kernel_calls || exit\nrdma resource show cm_id", timeout=60, record=False)
    assert done.status == 0, done.output
    assert done.output.splitlines()[-1] == "as expected", done.output


def test_provider_does_what_is_said_of_it(guest: Guest) -> None:
    """Its capabilities, on rdma_rxe and on siw, and what it does by the type of a queue pair."""
    guest.network = "iwarp_network"
    run = "rxe python3 -m interop.kernel_capabilities"
    done = guest.run(f"{run} $RXE4 $SOFT4 || exit\n{run} $IWARP4 $PEER4", timeout=60, record=False)
    assert done.status == 0, done.output
    assert done.output.splitlines().count("as expected") == 2, done.output
