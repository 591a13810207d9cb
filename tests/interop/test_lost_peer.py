"""A peer that is killed without a word, and that no ICMP message reports."""

from __future__ import annotations

from interop.scenario import Guest

SCRIPT = """
rm -f /tmp/lost_peer.out
serve_rxe env RDMACM_PROVIDER=kernel python3 -m interop.lost_peer server $RXE4
soft python3 -m rdmacm rping -s -P >/tmp/lost_peer.out 2>&1 &
OTHER=$!
for ((i = 0; i < 3000; i++)); do grep -qs listening /tmp/lost_peer.out && break; nap 0.01; done
soft python3 -m interop.lost_peer client $RXE4
finish
status=$?
kill -INT $OTHER
wait $OTHER
exit $status
"""


def test_keepalive_of_a_kernel_device_notices_a_lost_peer(guest: Guest) -> None:
    done = guest.run(SCRIPT, timeout=180)
    assert done.status == 0, done.output
    assert "the peer does not answer" in done.output.splitlines()[1], done.output
