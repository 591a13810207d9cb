"""librdmacm's mckey and ours in one multicast group: datagrams from one sender to several receivers."""

from __future__ import annotations

import json

import pytest

from interop.scenario import Guest

OURS = "python3 -m rdmacm mckey"
ROW = "mckey: UD multicast, 1 and 3 queue pairs, messages of 1 byte to the MTU; IPv4"
GROUP = "239.1.2.3"
ARGUMENTS = [pytest.param("", marks=pytest.mark.debian_kernel), "-c 3 -C 5 -S 1", "-C 100 -S 1024"]
SENDER = ["mckey: starting client", "mckey: joining", "mckey: joined dgid: ::ffff:239.1.2.3 mlid 0x0 sl 0"]
SENT = ["initiating data transfers", "data transfers complete", "test complete", "return status 0"]
RECEIVER = ["mckey: starting server", *SENDER[1:]]
RECEIVED = ["receiving data transfers", *SENT[1:]]

#: mckey ends as soon as it has posted its sends, and rxe sends from a thread that has to come first.
SEND = "chrt --idle 0 mckey"

each_size = pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda value: value.replace(" ", "") or "default")
#: Waits until the host of a command (rxe or soft) is a member of the group at an interface.
JOINED = f"""
joined() {{
    local i
    for ((i = 0; i < 3000; i++)); do
        [[ $("$1" ip maddr show dev "$2") == *{GROUP}* ]] && return
        nap 0.01
    done
    return 1
}}
left() {{
    ! [[ $("$1" ip maddr show dev "$2") == *{GROUP}* ]] || echo "$2 is still a member"
}}
"""


def lines_of(arguments: str, first: list[str], last: list[str]) -> list[str]:
    queue_pairs = 3 if "-c 3" in arguments else 1
    return [*first, *first[-1:] * (queue_pairs - 1), *last]


@each_size
@pytest.mark.cell(ROW, "passive")
def test_librdmacms_sender_reaches_our_receivers(guest: Guest, arguments: str) -> None:
    done = guest.run(
        f"{JOINED}\nsoft {OURS} -m {GROUP} -b $SOFT4 {arguments} >/tmp/server.out 2>&1 &\nSERVER=$!\n"
        f"joined soft vb || exit\nnap 0.5\n{SEND} -m {GROUP} -b $RXE4 -s {arguments} || exit\nfinish\nleft soft vb",
        timeout=120,
    )
    assert done.status == 0, done.output
    assert done.output.splitlines() == [
        *lines_of(arguments, SENDER, SENT),
        *lines_of(arguments, RECEIVER, RECEIVED),
    ]


@each_size
@pytest.mark.cell(ROW, "active")
def test_our_sender_reaches_librdmacms_receivers(guest: Guest, arguments: str) -> None:
    done = guest.run(
        f"{JOINED}\nrxe mckey -m {GROUP} -b $RXE4 {arguments} >/tmp/server.out 2>&1 &\nSERVER=$!\n"
        f"joined rxe va || exit\nnap 0.5\nsoft {OURS} -m {GROUP} -b $SOFT4 -s {arguments} --json || exit\nfinish\n"
        "left soft vb",
        timeout=120,
    )
    assert done.status == 0, done.output
    summary, _, said = done.output.partition("\n}\n")
    found = json.loads(summary + "}")
    assert found["sent"] == found["connections"] * found["messages"] * found["size"]
    assert said.splitlines() == lines_of(arguments, RECEIVER, RECEIVED)
