"""After clients that abort at any step of the handshake, a listener of the provider ``kernel`` serves the next one.

``RDMACM_ABORTS`` sets how many abort at each of the eight servers, and lets some of them vanish without a word to the
server, whose end takes a minute. ``RDMACM_ABORTS_SEED`` draws others.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest

from interop.abort_servers import SERVERS
from interop.scenario import Guest

ABORTS = int(os.environ.get("RDMACM_ABORTS", "25"))
SEED = os.environ.get("RDMACM_ABORTS_SEED", "1")
LARGE = " vanish" if "RDMACM_ABORTS" in os.environ else ""


class Device(NamedTuple):
    network: str
    host: str
    options: str


DEVICES = {
    "rdma_rxe": Device("network", "$RXE4", "c" + LARGE),
    "siw": Device("iwarp_network", "$IWARP4", "c iwarp"),
}


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("name", DEVICES)
def test_the_next_client_is_served_and_nothing_is_left_of_the_others(guest: Guest, name: str, kind: str) -> None:
    device = DEVICES[name]
    guest.network = device.network
    script = f"rxe python3 -m interop.aborts kernel {device.host} {kind} {SEED} {ABORTS} {device.options}"
    done = guest.run(script, timeout=180 + ABORTS, record=False)
    assert done.status == 0, done.output
    assert "served after each batch; the counts are as before" in done.output
