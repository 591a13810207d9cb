"""Work requests that are posted after the end of a connection on the kernel's devices."""

from __future__ import annotations

import pytest

from interop.scenario import Guest

FLUSHED = ["send: completed with status 5", "receive: completed with status 5"]


def late_send(guest: Guest, libraries: str, address: str) -> list[str]:
    done = guest.run(
        f"iwarp_network; rxe python3 -m interop.late_send {libraries} {address}", timeout=120, record=False
    )
    assert done.status == 0, done.output
    return done.output.splitlines()


@pytest.mark.parametrize("address", ["$RXE4", "$IWARP4"], ids=["rdma_rxe", "siw"])
def test_late_requests_complete_with_a_flush_error(guest: Guest, address: str) -> None:
    assert late_send(guest, "rdmacm", address) == FLUSHED


def test_siw_never_completes_late_requests_of_other_programs(guest: Guest) -> None:
    assert late_send(guest, "rdma-core", "$IWARP4") == ["send: not completed", "receive: not completed"]
