"""A program is killed while data moves: its peer is told, and serves the next one."""

from __future__ import annotations

import pytest

from interop.scenario import Guest

OURS = "python3 -m rdmacm"
ROW = "a peer killed while data moves: noticed, and the next one is served"
#: until_has FILE REGEX: wait until the file has a text that matches.
UNTIL_HAS = """
until_has() { until [[ $(<$1) =~ $2 ]]; do nap 0.05; done; }
"""
#: The kernel may free a killed process's memory before its queue pair, which then refuses packets: by NAK 0x62 where
#: they name a key, else 0x63.
ENDED = ("the peer has ended the connection [ECONNRESET]", "REM_OP_ERR [EIO]", "REM_ACCESS_ERR [EIO]")
NO_MEMORY = {0x62, 0x63}

pytestmark = pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])


@pytest.mark.cell(ROW, "passive")
def test_our_server_serves_on_when_librdmacms_client_is_killed(guest: Guest, family: int) -> None:
    """The kernel disconnects for it, or refuses our packets before; our server serves the next client."""
    done = guest.run(
        f"{UNTIL_HAS}\n"
        f"serve_soft {OURS} rping -s -P -a $SOFT{family} -V -v -d\n"
        f"rping -c -a $SOFT{family} >/dev/null & client=$!; disown\n"
        'until_has /tmp/server.out "server ping data: rdma-ping-3"\n'
        "kill -9 $client\n"
        'until_has /tmp/server.out "has disconnected|REM_(OP|ACCESS)_ERR"\n'
        f"rxe rping -c -a $SOFT{family} -C 3 -v -V\n"
        "kill $SERVER; finish; [ $SERVER_STATUS = 143 ]",
        timeout=180,
        naks=NO_MEMORY,
    )
    assert done.status == 0, done.output
    assert "\nping data: rdma-ping-2" in f"\n{done.output}"
    assert "Error" not in done.output


@pytest.mark.cell(ROW, "passive")
def test_our_server_fails_when_librdmacms_client_is_killed_while_it_sends(guest: Guest, family: int) -> None:
    """Our server has unacknowledged sends. ucmatose serves one client only."""
    argv = "-C 5000 -S 4000"
    done = guest.run(
        f"{UNTIL_HAS}\n"
        f"serve_soft {OURS} ucmatose -b $SOFT{family} {argv}\n"
        f"ucmatose -s $SOFT{family} {argv} >/dev/null & client=$!; disown\n"
        'until_has /tmp/server.out "completing sends"\n'
        "kill -9 $client\n"
        "began=$EPOCHSECONDS; finish; echo seconds $((EPOCHSECONDS - began))",
        timeout=180,
        naks=NO_MEMORY,
    )
    said = done.output.splitlines()
    assert said.pop(1).startswith("rdmacm: listening on ")
    assert said[:3] == ["cmatose: starting server", "initiating data transfers", "completing sends"]
    assert any(end in done.output for end in ENDED)
    assert int(said[-1].split()[1]) < 15


@pytest.mark.cell(ROW, "active")
def test_librdmacms_server_serves_on_when_our_client_is_killed(guest: Guest, family: int) -> None:
    """Nobody disconnects for it. The next client of ours takes the UDP port over."""
    done = guest.run(
        f"{UNTIL_HAS}\n"
        f"serve_rxe rping -s -P -a $RXE{family} -v\n"
        f"ip netns exec soft {OURS} rping -c -a $RXE{family} >/dev/null & client=$!; disown\n"
        'until_has /tmp/server.out "server ping data: rdma-ping-3"\n'
        "kill -9 $client\n"
        f"soft {OURS} rping -c -a $RXE{family} -C 3 -v -V || exit\n"
        "kill -9 $SERVER; finish; [ $SERVER_STATUS = 137 ]",
        timeout=180,
    )
    assert done.status == 0, done.output
    assert "\nping data: rdma-ping-2" in f"\n{done.output}"


@pytest.mark.cell(ROW, "active")
def test_our_client_fails_when_librdmacms_server_is_killed(guest: Guest, family: int) -> None:
    done = guest.run(
        f"{UNTIL_HAS}\n"
        f"serve_rxe rping -s -a $RXE{family} -v\n"
        f"soft {OURS} rping -c -a $RXE{family} >/tmp/client.out 2>&1 & client=$!\n"
        'until_has /tmp/server.out "server ping data: rdma-ping-3"\n'
        "disown $SERVER; kill -9 $SERVER; began=$EPOCHSECONDS\n"
        "wait $client; echo ours: $? seconds $((EPOCHSECONDS - began)); cat /tmp/client.out",
        timeout=180,
        naks=NO_MEMORY,
    )
    first, _summary, complaint = done.output.splitlines()[-3:]
    assert first.startswith("ours: 1 seconds ")
    assert int(first.split()[-1]) < 15
    assert complaint.endswith(ENDED)
