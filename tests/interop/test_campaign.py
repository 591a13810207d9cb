"""Random draws of a tool, its two ends, the state of the link and kills, against rdma_rxe and siw.

``RDMACM_CAMPAIGN`` sets how many are drawn for each device, ``RDMACM_CAMPAIGN_SEED`` which, and
``RDMACM_CAMPAIGN_FIRST`` the number of the first. A failed draw prints the command that repeats it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from interop.campaign.draws import DEVICES
from interop.scenario import Guest

COUNT = int(os.environ.get("RDMACM_CAMPAIGN", "4"))
SEED = os.environ.get("RDMACM_CAMPAIGN_SEED", "23")
FIRST = os.environ.get("RDMACM_CAMPAIGN_FIRST", "217")
ARTIFACTS = Path(__file__).parent / "artifacts"
#: Seconds that a draw may take, where the others of its block run beside it.
EACH = 60


@pytest.mark.parametrize("device", DEVICES)
def test_no_draw_fails_but_by_its_peer(guest: Guest, device: str) -> None:
    guest.network = "iwarp_network"
    script = f"rxe python3 -m interop.campaign.run {device} {SEED} {FIRST} {COUNT}"
    done = guest.run(script, timeout=300 + EACH * COUNT, record=False)
    for recording in guest.machine.share.glob(f"campaign-{device}-*.pcap"):
        shutil.move(recording, ARTIFACTS / recording.name)
    assert done.status == 0, done.output
    assert done.output.endswith(f"{COUNT} draws, 0 failed\n"), done.output


#: ``gsi``: the state of rxe0's queue pair 1. ``pings N``: whether C's rping of both ends reaches a server on rxe0.
RPINGS = """
gsi() { [[ $(rdma resource show qp) =~ "type GSI state "([A-Z]+) ]] && echo "queue pair 1: ${BASH_REMATCH[1]}"; }
pings() {
    timeout 8 rping -c -a $RXE4 -C 1 -v >/tmp/client.out 2>&1
    echo "$1: $(grep -c "ping data" /tmp/client.out)"
}
serve_rxe rping -s -P -a $RXE4
"""


def test_rdma_rxe_loses_queue_pair_1_to_a_request_while_its_interface_is_down(guest: Guest) -> None:
    """librdmacm alone: from then on nobody of the host connects, until the device is made again."""
    done = guest.run(
        f"{RPINGS}\ngsi; pings before\n"
        "ip link set va down; pings down; gsi\n"
        "ip link set va up; pings up\n"
        "kill -9 $SERVER; rdma link delete rxe0; rdma link add rxe0 type rxe netdev va; gsi\n"
        "no_network; network",
        timeout=120,
        record=False,
    )
    said = [line for line in done.output.splitlines() if line.startswith(("queue pair", "before", "down", "up"))]
    assert said == ["queue pair 1: RTS", "before: 1", "down: 0", "queue pair 1: ERR", "up: 0", "queue pair 1: RTS"]
