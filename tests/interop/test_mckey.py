"""librdmacm's mckey and ours in one multicast group: datagrams from one sender to several receivers."""

from __future__ import annotations

import json

import pytest

from interop.scenario import Guest

OURS = "python3 -m rdmacm mckey"
ROW = "mckey: UD multicast, 1 and 3 queue pairs, messages of 1 byte to the MTU; IPv4"
GROUP = "239.1.2.3"
ARGUMENTS = [pytest.param("", marks=pytest.mark.debian_kernel(in_ci=False)), "-c 3 -C 5 -S 1", "-C 100 -S 1024"]
SENDER = ["mckey: starting client", "mckey: joining", "mckey: joined dgid: ::ffff:239.1.2.3 mlid 0x0 sl 0"]
SENT = ["initiating data transfers", "data transfers complete", "test complete", "return status 0"]
RECEIVER = ["mckey: starting server", *SENDER[1:]]
RECEIVED = ["receiving data transfers", *SENT[1:]]

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


def send(guest: Guest, count: int, arguments: str) -> str:
    """The command of librdmacm's mckey as a sender, which leaves the group after ``count`` packets were sent."""
    return f"send_all {count} {guest.preloaded('awaited_leave')} {arguments}"


def lines_of(arguments: str, first: list[str], last: list[str]) -> list[str]:
    queue_pairs = 3 if "-c 3" in arguments else 1
    return [*first, *first[-1:] * (queue_pairs - 1), *last]


@each_size
@pytest.mark.cell(ROW, "passive")
def test_librdmacms_sender_reaches_our_receivers(guest: Guest, arguments: str) -> None:
    posted = {"": 10, "-c 3 -C 5 -S 1": 15, "-C 100 -S 1024": 100}[arguments]
    sending = send(guest, posted, f"-m {GROUP} -b $RXE4 -s {arguments}")
    done = guest.run(
        f"{JOINED}\nsoft {OURS} -m {GROUP} -b $SOFT4 {arguments} >/tmp/server.out 2>&1 &\nSERVER=$!\n"
        f"joined soft vb || exit\nnap 0.5\n{sending} || exit\nfinish\nleft soft vb",
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


GROUP6 = "ff1e::7:7"
ROW6 = "UD multicast with rxe's verbs, messages of 1 byte to the MTU; IPv6"
PEER = "python3 -m interop.multicast_peer"
each_count = pytest.mark.parametrize(("count", "size"), [(10, 100), (5, 1), (100, 1024)])


@each_count
@pytest.mark.cell(ROW6, "passive")
def test_rxe_sends_to_an_ipv6_group(guest: Guest, count: int, size: int) -> None:
    done = guest.run(
        f"{JOINED.replace(GROUP, GROUP6)}\n"
        f"soft {OURS} -m {GROUP6} -b $SOFT6 -C {count} -S {size} --json >/tmp/server.out 2>&1 &\nSERVER=$!\n"
        f"joined soft vb || exit\nnap 0.5\nrxe {PEER} send {GROUP6} $RXE6 va {count} {size} || exit\nfinish\n"
        "left soft vb",
        timeout=120,
    )
    assert done.status == 0, done.output
    said, _, summary = done.output.partition("\n")
    assert said == f"sent {count} of {size}"
    assert json.loads(summary)["received"] == count * size


@each_count
@pytest.mark.cell(ROW6, "active")
def test_our_messages_to_an_ipv6_group_reach_rxe(guest: Guest, count: int, size: int) -> None:
    done = guest.run(
        f"rxe {PEER} receive {GROUP6} $RXE6 va {count} {size} >/tmp/server.out 2>&1 &\nSERVER=$!\n"
        "for ((i = 0; i < 1000; i++)); do grep -qs joined /tmp/server.out && break; nap 0.02; done\n"
        f"soft {OURS} -m {GROUP6} -b $SOFT6 -C {count} -S {size} -s --json || exit\nfinish",
        timeout=120,
    )
    assert done.status == 0, done.output
    assert done.output.endswith(f"joined\nreceived {count} of {{{size}}}\n")


def test_librdmacm_joins_no_ipv6_group(guest: Guest) -> None:
    """So the other tests with IPv6 use verbs."""
    done = guest.run(f"rxe mckey -m {GROUP6} -b $RXE6 -s 2>&1; true", timeout=60)
    assert "mckey: failure joining: Unknown error 524" in done.output
