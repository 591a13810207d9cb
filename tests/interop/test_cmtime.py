"""librdmacm's cmtime and ours: many connections, one after the other or at once."""

from __future__ import annotations

import json

import pytest

from interop.scenario import Guest

OURS = "python3 -m rdmacm cmtime"
ROW = "cmtime: 20 connections, one after the other and at once"
FAMILIES = pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])


@pytest.mark.cell(ROW, "passive")
@FAMILIES
def test_librdmacms_client_connects_to_our_server(guest: Guest, family: int) -> None:
    done = guest.run(
        f"serve_soft {OURS} -b $SOFT{family}\nrxe cmtime -s $SOFT{family} -c 20 || exit\nkill $SERVER", timeout=180
    )
    assert done.status == 0, done.output
    lines = done.output.splitlines()
    assert "connecting" in lines
    assert not [line for line in lines if "error" in line]
    steps = [line.split()[0] for line in lines if ":" in line and not line.startswith("rdmacm")]
    assert steps == ["create", "resolve", "resolve", "create", "connect", "disconnect", "destroy"]


@pytest.mark.cell(ROW, "active")
@FAMILIES
@pytest.mark.parametrize("order", ["serial", "concurrent"])
def test_our_client_connects_to_librdmacms_server(guest: Guest, family: int, order: str) -> None:
    """librdmacm's server refuses connections once its first one has ended."""
    done = guest.run(
        f"serve_rxe cmtime -b $RXE{family}\nsoft {OURS} -s $RXE{family} -c 20 --{order} --json || exit\nkill $SERVER",
        timeout=180,
    )
    assert done.status == 0, done.output
    found = json.loads(done.output[done.output.index("{") : done.output.rindex("}") + 1])
    assert {step["name"]: step["count"] for step in found["steps"]}["establish"] == 20


#: Connects 20 times to a server. All requests but the first leave as one train, whose length is printed with the number
#: of messages that were sent again.
TRAINS = """
import sys
from rdmacm import CmEventType, CmId, EventChannel
from rdmacm.soft import open_provider

provider = open_provider()
host, runtime, channel, trains = provider.host, provider.runtime, EventChannel(), []
ids = [CmId(channel) for _ in range(20)]

def tap(is_out, local, remote, source_port, port, buffers, segment):
    if is_out and segment:
        trains.append(sum(map(len, buffers)) // segment)

def events(kind, count):
    for _ in range(count):
        with channel.get_event(60) as event:
            assert event.type is kind, event

for cmid in ids:
    cmid.resolve_addr((sys.argv[1], 7471))
    events(CmEventType.ADDR_RESOLVED, 1)
    cmid.resolve_route()
    events(CmEventType.ROUTE_RESOLVED, 1)
    cmid.create_qp()
ids[0].connect()
events(CmEventType.ESTABLISHED, 1)
host.mux.wire.tap = tap
outbox = host.mux.gsi.outbox
with runtime.lock:
    outbox.may_wait = runtime.has_more_events = True
    for cmid in ids[1:]:
        cmid.connect()
    outbox.may_wait = runtime.has_more_events = False
    outbox.send()
events(CmEventType.ESTABLISHED, 19)
host.mux.wire.tap = None
for cmid in ids:
    cmid.disconnect()
events(CmEventType.DISCONNECTED, 20)
for cmid in ids:
    cmid.destroy()
print("train", *trains, "repeated", host.cm.retries)
"""


@FAMILIES
def test_librdmacms_server_takes_a_train_of_requests(guest: Guest, family: int) -> None:
    done = guest.run(
        f"serve_rxe cmtime -b $RXE{family}\nsoft python3 -c '{TRAINS}' $RXE{family} || exit\nkill $SERVER", timeout=180
    )
    assert done.status == 0, done.output
    assert done.output.splitlines() == ["train 19 repeated 0"]
