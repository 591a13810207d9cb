"""librdmacm's udaddy and ours: queue pairs that find each other by SIDR, and datagrams both ways."""

from __future__ import annotations

import json
import re

import pytest

from interop.scenario import Guest

OURS = "python3 -m rdmacm udaddy"
ROW = "udaddy: UD, 1 and 20 pairs of queue pairs, messages of 1 byte to the MTU"
ARGUMENTS = [pytest.param("", marks=pytest.mark.debian_kernel(in_ci=False)), "-c 20 -C 5 -S 1", "-C 100 -S 1024"]
CLIENT = [
    *("udaddy: starting client", "udaddy: connecting", "initiating data transfers", "receiving data transfers"),
    *("data transfers complete", "test complete", "return status 0"),
]
SERVER = [
    *("udaddy: starting server", "receiving data transfers", "sending replies", "data transfers complete"),
    *("test complete", "return status 0"),
]

pytestmark = pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])
each_size = pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda value: value.replace(" ", "") or "default")


@each_size
@pytest.mark.cell(ROW, "passive")
def test_librdmacms_client_exchanges_datagrams_with_our_server(guest: Guest, family: int, arguments: str) -> None:
    done = guest.run(
        f"serve_soft {OURS} -b $SOFT{family} {arguments}\nrxe udaddy -s $SOFT{family} {arguments} || exit\nfinish",
        timeout=120,
    )
    assert done.status == 0, done.output
    lines = done.output.splitlines()
    # On standard error; librdmacm's server prints nothing about its address.
    assert re.fullmatch(r"rdmacm: listening on \S+:7174, device \S+", lines.pop(len(CLIENT) + 1))
    assert lines == [*CLIENT, *SERVER]


@each_size
@pytest.mark.cell(ROW, "active")
def test_our_client_exchanges_datagrams_with_librdmacms_server(guest: Guest, family: int, arguments: str) -> None:
    done = guest.run(
        f"serve_rxe udaddy -b $RXE{family} {arguments}\nsoft {OURS} -s $RXE{family} {arguments} --json || exit\nfinish",
        timeout=120,
    )
    assert done.status == 0, done.output
    summary, _, said = done.output.partition("\n}\n")
    found = json.loads(summary + "}")
    moved = found["connections"] * found["messages"] * found["size"]
    assert (found["sent"], found["received"]) == (moved, moved)
    assert said.splitlines() == SERVER


def test_refusals_are_those_of_rdma_cm(guest: Guest, family: int) -> None:
    """Nobody listens: status 1 at either end."""
    done = guest.run(
        f"serve_soft {OURS} -b $SOFT{family} --port 7000\nrxe udaddy -s $SOFT{family}\n"
        f"kill $SERVER\nsoft {OURS} -s $RXE{family}\ntrue",
        timeout=120,
    )
    refusals = re.findall(r"udaddy: event: (\w+), error: (-?\d+)", done.output)
    assert refusals == [("RDMA_CM_EVENT_UNREACHABLE", "1")] * 2, done.output
