"""librdmacm's examples and ours exchange messages: one each way (rdma_server), or only one (rdma_xserver)."""

from __future__ import annotations

import pytest

from interop.scenario import Guest

EXAMPLES = "python3 -W error /project/examples"
WITH_ANSWER = "rdma_server, rdma_client: one message there and back"
ONE_WAY = "rdma_xserver, rdma_xclient: one message, private data"
FAMILIES = pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])


@pytest.mark.debian_kernel(in_ci=False)
@pytest.mark.cell(WITH_ANSWER, "passive")
@FAMILIES
def test_librdmacms_rdma_client_reaches_our_server(guest: Guest, family: int) -> None:
    done = guest.run(
        f"serve_soft {EXAMPLES}/rdma_server.py -s $SOFT{family}\nrxe rdma_client -s $SOFT{family} || exit\nfinish",
        timeout=180,
    )
    ours = ["rdma_server: listening on port 7471", "rdma_server: end"]
    assert done.output.splitlines() == ["rdma_client: start", "rdma_client: end 0", *ours]
    assert done.status == 0


@pytest.mark.debian_kernel(in_ci=False)
@pytest.mark.cell(WITH_ANSWER, "active")
@FAMILIES
def test_our_rdma_client_reaches_librdmacms_server(guest: Guest, family: int) -> None:
    done = guest.run(
        f"serve_rxe rdma_server -s $RXE{family}\nsoft {EXAMPLES}/rdma_client.py -s $RXE{family} || exit\nfinish",
        timeout=180,
    )
    assert done.output.splitlines() == ["rdma_client: end", "rdma_server: start", "rdma_server: end 0"]
    assert done.status == 0


@pytest.mark.cell(ONE_WAY, "passive")
@FAMILIES
def test_librdmacms_rdma_xclient_reaches_our_server(guest: Guest, family: int) -> None:
    done = guest.run(
        f"serve_soft {EXAMPLES}/rdma_xserver.py -s $SOFT{family}\n"
        f"rxe rdma_xclient -c r -s $SOFT{family} || exit\n"
        "finish",
        timeout=180,
    )
    ours = ["rdma_xserver: listening on port 7471", "rdma_xserver: end"]
    assert done.output.splitlines() == ["rdma_xclient: start", "rdma_xclient: end 0", *ours]
    assert done.status == 0


@pytest.mark.cell(ONE_WAY, "active")
def test_our_rdma_xclient_reaches_librdmacms_server(guest: Guest) -> None:
    """librdmacm's rdma_xserver listens on IPv4 only."""
    done = guest.run(f"serve_rxe rdma_xserver -c r\nsoft {EXAMPLES}/rdma_xclient.py -s $RXE4 || exit\nfinish")
    assert done.output.splitlines() == ["rdma_xclient: end", "rdma_xserver: start", "rdma_xserver: end 0"]
    assert done.status == 0
