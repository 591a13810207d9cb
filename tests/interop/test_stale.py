"""A forged REQ says that a peer with the kernel's device has restarted: the peer is asked, and the connection stays."""

from __future__ import annotations

import pytest

from interop.scenario import Guest

SCRIPT = "python3 tests/interop/stale_peer.py"


@pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])
def test_kernel_device_answers_on_an_idle_connection(guest: Guest, family: int) -> None:
    done = guest.run(
        f"rping -s -a $RXE{family} -p 7471 >/dev/null 2>&1 & disown\n"
        f"until soft {SCRIPT} $RXE{family} 7471; do nap 0.2; done",
        timeout=120,
    )
    assert "ESTABLISHED rejections at once 0 asked 0" in done.output


def test_connection_ends_if_the_kernel_device_is_gone(guest: Guest) -> None:
    done = guest.run(
        "rping -s -a $RXE4 -p 7471 >/dev/null 2>&1 & disown\n"
        f"until soft {SCRIPT} $RXE4 7471 'tc -n soft qdisc replace dev vb root netem loss 100%'; do nap 0.2; done\n"
        "soft tc qdisc delete dev vb root",
        timeout=120,
    )
    assert "DREQ_SENT rejections at once 0 asked 0" in done.output
