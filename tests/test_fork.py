"""A child of fork(2) closes the objects it has inherited; those of its parent go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.netns import Topology, needs_netns, python_environment

PROGRAM = """
import os, select, threading, time
from rdmacm import CmId, ConnParam, EventChannel

channel, other = EventChannel(), EventChannel()
listener = CmId(channel)
listener.bind_addr(("127.0.0.1", 0))
listener.listen()
poll = select.poll()
poll.register(channel.fileno(), select.POLLIN)
pending = CmId(channel)
pending.resolve_addr(("127.0.0.1", listener.src_port))
polling = threading.Event()

def wait():
    polling.set()
    other.get_event()

threading.Thread(target=wait, daemon=True).start()
polling.wait()
while not other.provider.runtime.waiters.polling:
    time.sleep(0.001)
child = os.fork()
if not child:
    try:
        pending.destroy()
        listener.destroy()
        channel.close()
        other.close()
    finally:
        os._exit(0)
os.waitpid(child, 0)
began = time.process_time()
time.sleep(0.5)
print("idle" if time.process_time() - began < 0.1 else "busy")

def next_event():
    while True:
        assert poll.poll(5000), "no event arrives"
        try:
            return channel.get_event(timeout=0)
        except BlockingIOError:
            pass

with next_event() as event:
    print(event.type.name)
assert not poll.poll(0), "readable without an event"
pending.resolve_route()
next_event().ack()
pending.connect(ConnParam(qp_num=1))
with next_event() as event:
    print(event.type.name)
    event.id.reject()
    request = event.id
with next_event() as event:
    print(event.type.name)
os._exit(0)
"""


def test_closing_in_the_child_does_not_affect_the_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.split() == ["idle", "ADDR_RESOLVED", "CONNECT_REQUEST", "REJECTED"]


FORKING = Path(__file__).parent / "support" / "forking.py"
#: How many children each of the slow tests forks.
MANY = int(os.environ.get("RDMACM_FORKS", "100"))
COUNTS = [10, pytest.param(MANY, marks=pytest.mark.slow)]


def judge(done: subprocess.CompletedProcess[str], count: int) -> None:
    assert done.stderr == ""
    assert json.loads(done.stdout) == {"good": count, "sent": 0}


@needs_netns
@pytest.mark.parametrize("count", COUNTS)
def test_children_close_all_objects_in_any_order_and_send_nothing(count: int) -> None:
    with Topology() as net:
        judge(net.host().python([str(FORKING), str(count), "1", "quiet"], check=False, timeout=60 + count), count)


@pytest.mark.parametrize("count", COUNTS)
def test_children_close_all_objects_whose_locks_other_threads_of_the_parent_held(count: int) -> None:
    command = [sys.executable, str(FORKING), str(count), "1", "busy"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60 + count, check=False, env=python_environment()
    )
    judge(done, count)
