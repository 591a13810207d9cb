"""Ten thousand ids on one channel."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.netns import Host, needs_netns, python_environment, two_hosts

COUNT = 10_000

# Runs in a process of its own, to count its descriptors and threads.
SCRIPT = f"""
import collections, json, os, sys, threading
import rdmacm
host = sys.argv[1]
def descriptors():
    return sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
before = descriptors()
channel = rdmacm.EventChannel()
ids = [rdmacm.CmId(channel) for _ in range({COUNT})]
for cmid in ids:
    cmid.resolve_addr((host, 7471), timeout_ms=20000)
print("resolving", flush=True)
seen = collections.Counter()
per_id = collections.Counter()
while sum(seen.values()) < 2 * {COUNT}:
    with channel.get_event(timeout=20) as event:
        seen[event.type.name] += 1
        per_id[id(event.id)] += 1
        if event.type is rdmacm.CmEventType.ADDR_RESOLVED:
            event.id.resolve_route()
most = len(descriptors())
ports = len({{cmid.src_port for cmid in ids}})
states = collections.Counter(cmid.state.name for cmid in ids)
for cmid in ids:
    cmid.destroy()
channel.close()
print(json.dumps([seen, ports, states, sorted(set(per_id.values())), most - len(before),
                  descriptors() == before, threading.active_count()]))
"""


def check(output: str) -> None:
    seen, ports, states, per_id, extra, restored, threads = json.loads(output.splitlines()[-1])
    assert seen == {"ADDR_RESOLVED": COUNT, "ROUTE_RESOLVED": COUNT}, "no event is lost"
    assert per_id == [2], "no event is reported twice"
    assert ports == COUNT
    assert states == {"ROUTE_RESOLVED": COUNT}
    assert extra < 10, "an id needs no descriptor of its own"
    assert restored, "no descriptor is left after close"
    assert threads == 1, "no thread is left after close"


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.slow
def test_ten_thousand_ids_resolve_over_loopback() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, "127.0.0.1"],
        env={**os.environ, **python_environment()},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    check(done.stdout)


@pytest.mark.slow
@needs_netns
def test_ten_thousand_waiting_ids_resolve_when_the_neighbour_answers() -> None:
    with two_hosts() as net:
        silence(net.b)
        child = net.a.popen(
            [sys.executable, "-W", "error", "-c", SCRIPT, "10.7.0.2"],
            env={**os.environ, **python_environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "resolving\n"
        # Every id waits now for the neighbour's address.
        net.a.ip("neigh", "replace", "10.7.0.2", "lladdr", net.vb.mac, "dev", "va", "nud", "reachable")
        output, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors
    check(output)


def silence(host: Host) -> None:
    """Let a host answer no ARP requests."""
    host.ip("link", "set", "vb", "arp", "off")
