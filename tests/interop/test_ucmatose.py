"""librdmacm's ucmatose and ours: many connections at once, and messages that the client sends back."""

from __future__ import annotations

import json
import re

import pytest

from interop.scenario import Guest

OURS = "python3 -m rdmacm ucmatose"
ROW = "ucmatose: 1 and 100 connections, to another channel, port space IB, 20 messages of 64 KiB"
ARGUMENTS = [pytest.param("", marks=pytest.mark.debian_kernel), "-P ib -C 1", "-c 100 -C 2 -m", "-C 20 -S 65536"]
CLIENT = ["cmatose: starting client", "cmatose: connecting", "receiving data transfers", "sending replies"]
SERVER = [
    *("cmatose: starting server", "initiating data transfers", "completing sends", "receiving data transfers"),
    "data transfers complete",
]
DISCONNECTING = ["cmatose: disconnecting", "disconnected"]
COMPLETE = ["test complete", "return status 0"]
MIGRATING = "migrating to new event channel"

pytestmark = [
    pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"]),
    pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda value: value.replace(" ", "") or "default"),
]


def server_lines(arguments: str) -> list[str]:
    migrating = [MIGRATING] if "-m" in arguments else []
    return [*SERVER, *migrating, *DISCONNECTING, *COMPLETE]


@pytest.mark.cell(ROW, "passive")
def test_librdmacms_client_exchanges_messages_with_our_server(guest: Guest, family: int, arguments: str) -> None:
    """The client returns each message, and -V compares it with the one that our server sent."""
    done = guest.run(
        f"serve_soft {OURS} -b $SOFT{family} {arguments} -V\nrxe ucmatose -s $SOFT{family} {arguments} || exit\nfinish",
        timeout=180,
    )
    assert done.status == 0, done.output
    migrating = [MIGRATING] if "-m" in arguments else []
    expected = [*CLIENT, "data transfers complete", *migrating, *COMPLETE, *server_lines(arguments)]
    lines = done.output.splitlines()
    # On standard error; librdmacm's server prints nothing about its address.
    assert re.fullmatch(r"rdmacm: listening on \S+:7471, device \S+", lines.pop(expected.index(SERVER[0]) + 1))
    assert lines == expected


@pytest.mark.cell(ROW, "active")
def test_our_client_exchanges_messages_with_librdmacms_server(guest: Guest, family: int, arguments: str) -> None:
    """Our client counts the bytes that it received and sent, as ucmatose does not set the content of its messages."""
    done = guest.run_again(
        f"serve_rxe ucmatose -b $RXE{family} {arguments}\n"
        f"soft {OURS} -s $RXE{family} {arguments} --json || exit\n"
        "finish",
        # ucmatose disconnects as soon as it has the last message, sometimes before rxe has acknowledged it. Then rxe
        # never does, and our end cannot know that it arrived.
        ["the peer has ended the connection"],
        180,
    )
    assert done.status == 0, done.output
    summary, _, said = done.output.partition("\n}\n")
    found = json.loads(summary + "}")
    moved = found["connections"] * found["messages"] * found["size"]
    assert moved == {"": 1000, "-P ib -C 1": 100, "-c 100 -C 2 -m": 20_000, "-C 20 -S 65536": 1_310_720}[arguments]
    assert (found["sent"], found["received"]) == (moved, moved)
    assert said.splitlines() == server_lines(arguments)
