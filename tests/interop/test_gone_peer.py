"""A process of the software device that has ended while its peer, the kernel, waits for the end of the connection."""

from __future__ import annotations

import pytest

from interop.scenario import Guest

SCRIPT = """
rm -f /tmp/go /tmp/other.out
serve_rxe python3 -m interop.gone_peer server $RXE{family}
soft python3 -m rdmacm rping -s -P >/tmp/other.out 2>&1 &
OTHER=$!
for ((i = 0; i < 3000; i++)); do grep -qs listening /tmp/other.out && break; nap 0.01; done
soft python3 -m interop.gone_peer client $RXE{family}
soft tc qdisc delete dev vb root
touch /tmp/go
finish
status=$?
kill -INT $OTHER
wait $OTHER
exit $status
"""


@pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])
def test_another_process_confirms_the_end_for_one_that_is_gone(guest: Guest, family: int) -> None:
    done = guest.run(SCRIPT.format(family=family), timeout=120)
    assert (done.status, done.output.splitlines()[:1]) == (0, ["disconnected with status 0"]), done.output
