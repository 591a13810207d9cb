"""Rejected connections between librdmacm's tools and ours, in both directions."""

from __future__ import annotations

import pytest

from interop.scenario import Guest

RDMACM = "python3 -m rdmacm"
NO_LISTENER = "rejected: no listener (reason 8)"
BY_CONSUMER = "rejected by the application (reason 28)"
#: Prints the reason for which our client is rejected. A wait that runs out is another exception.
CLIENT = """
import sys, rdmacm
try:
    rdmacm.connect((sys.argv[1], 7471), timeout=30)
except ConnectionRefusedError as error:
    print(error.reason)
"""
#: Rejects the first request.
SERVER = """
import sys, rdmacm
with rdmacm.listen((sys.argv[1], 7471)) as listener:
    listener.get_request().reject(b"full")
"""
#: Requests two connections; prints the reason for which one is rejected. Without a queue pair, nothing is established
#: before that: ucmatose reads no events any more once its one connection is.
TWO_CLIENTS = """
import sys, rdmacm
with rdmacm.EventChannel() as channel:
    ids = [rdmacm.CmId(channel) for _ in range(2)]
    for cmid in ids:
        cmid.resolve_addr((sys.argv[1], 7471))
        channel.get_event(timeout=10).ack()
        cmid.resolve_route()
        channel.get_event(timeout=10).ack()
    for number, cmid in enumerate(ids):
        cmid.connect(rdmacm.ConnParam(qp_num=0x800 + number))
    refused = None
    while refused is None:
        with channel.get_event(timeout=30) as event:
            if event.type is rdmacm.CmEventType.REJECTED:
                refused = event.status
    print("refused", refused)
    for cmid in ids:
        cmid.destroy()
"""

pytestmark = pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])


@pytest.mark.cell(NO_LISTENER, "passive")
def test_librdmacms_clients_are_rejected_without_a_listener(guest: Guest, family: int) -> None:
    """Each client reports the reason; a listener on another port still serves its client."""
    done = guest.run(
        f"serve_soft {RDMACM} rping -s -a $SOFT{family} -p 7999 -V\n"
        f"rxe rping -c -a $SOFT{family} -C 1; echo rping: $?\n"
        f"rxe ucmatose -s $SOFT{family}; echo ucmatose: $?\n"
        f"rxe rdma_client -s $SOFT{family}; echo rdma_client: $?\n"
        f"rxe rping -c -a $SOFT{family} -p 7999 -C 1 -V\n"
        "finish",
        timeout=180,
    )
    assert done.status == 0, done.output
    said = done.output.splitlines()
    assert said.index("cma event RDMA_CM_EVENT_REJECTED, error 8") < said.index("rping: 255")
    assert said.index("cmatose: event: RDMA_CM_EVENT_REJECTED, error: 8") < said.index("ucmatose: 8")
    assert said.index("rdma_connect: Connection refused") < said.index("rdma_client: 255")


@pytest.mark.cell(NO_LISTENER, "active")
def test_our_clients_are_rejected_without_a_listener(guest: Guest, family: int) -> None:
    """The exception has the reason. Our ucmatose prints what librdmacm's does, and a line on standard error."""
    done = guest.run(
        f"soft python3 -c '{CLIENT}' $RXE{family} || exit\nsoft {RDMACM} ucmatose -s $RXE{family}", timeout=180
    )
    assert done.status == 1, done.output
    exception, *said = done.output.splitlines()
    assert exception == "8"
    expected = ["cmatose: event: RDMA_CM_EVENT_REJECTED, error: 8", "test complete", "return status 8"]
    assert said[2:5] == expected, done.output
    assert "nobody listens on that port [ECONNREFUSED]" in said[5]


@pytest.mark.debian_kernel(in_ci=False)
@pytest.mark.cell(BY_CONSUMER, "passive")
def test_librdmacms_client_is_rejected_by_our_server(guest: Guest, family: int) -> None:
    """test_operations compares the private data of a rejection."""
    done = guest.run(
        f"serve_soft python3 -c '{SERVER}' $SOFT{family}\nrxe ucmatose -s $SOFT{family}; echo ucmatose: $?\nfinish",
        timeout=180,
    )
    assert done.status == 0, done.output
    rejected, *rest = done.output.splitlines()[2:]
    assert rejected == "cmatose: event: RDMA_CM_EVENT_REJECTED, error: 28"
    assert rest == ["test complete", "return status 28", "ucmatose: 28"]


@pytest.mark.debian_kernel(in_ci=False)
@pytest.mark.cell(BY_CONSUMER, "active")
def test_our_client_is_rejected_by_librdmacms_server(guest: Guest, family: int) -> None:
    """ucmatose rejects a connection beyond its count and exits with -ENOMEM."""
    done = guest.run(
        f"serve_rxe ucmatose -b $RXE{family}\nsoft python3 -c '{TWO_CLIENTS}' $RXE{family} || exit\nfinish", timeout=180
    )
    assert done.status == 244, done.output
    assert done.output.splitlines() == [
        "refused 28",
        *("cmatose: starting server", "cmatose: failing connection request", "test complete", "return status -12"),
    ]
