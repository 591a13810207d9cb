"""A child of fork(2) closes the objects it has inherited; those of its parent go on."""

from __future__ import annotations

import subprocess
import sys

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
