"""A process that exits with open objects ends, and its peers get DISCONNECTED."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from rdmacm import CmEventType, CmId, EventChannel
from support.netns import python_environment

BEGIN = """
import sys, threading
from rdmacm import CmId, EventChannel
channel = EventChannel()
cmid = CmId()
cmid.resolve_addr(("127.0.0.1", int(sys.argv[1])))
cmid.resolve_route()
cmid.create_qp()
region = cmid.reg_msgs(bytearray(64))
cmid.post_recv(1, region)
cmid.connect()
"""

ENDS = {
    "last line": "",
    "sys.exit": "sys.exit(0)",
    "outstanding send": "cmid.post_send(2, b'x', flags=10)",
    "daemon thread that waits": "threading.Thread(target=channel.get_event, daemon=True).start()",
    "daemon thread that polls": (
        "threading.Thread(target=lambda: [cmid.recv_cq.poll(1) for _ in iter(int, 1)], daemon=True).start()"
    ),
}


@pytest.fixture
def port() -> Iterator[tuple[EventChannel, int]]:
    """A listener's channel and port; the channel reports what the client does."""
    with EventChannel() as channel, CmId(channel) as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        yield channel, listener.src_port


@pytest.mark.parametrize("end", ENDS)
def test_process_exit_disconnects_open_connections(end: str, port: tuple[EventChannel, int]) -> None:
    channel, number = port
    code = BEGIN + ENDS[end]
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(number)], env=python_environment(), stderr=subprocess.PIPE
    )
    try:
        with channel.get_event(20) as request:
            accepted = request.id
            accepted.create_qp()
            accepted.accept()
        for kind in (CmEventType.ESTABLISHED, CmEventType.DISCONNECTED):
            with channel.get_event(20) as event:
                assert event.type is kind
        accepted.destroy()
        assert child.stderr is not None
        assert child.wait(20) == 0, child.stderr.read().decode()
    finally:
        child.kill()
        child.communicate()


LAST_USER = """
import threading
from rdmacm import CmId

def helpers():
    return [thread for thread in threading.enumerate() if thread.name == "rdmacm-progress"]

for _ in range(3):
    with CmId() as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        (helper,) = helpers()
    helper.join(10)
    assert not helpers()
"""


def test_helper_thread_ends_with_its_last_user() -> None:
    subprocess.run([sys.executable, "-c", LAST_USER], env=python_environment(), check=True, timeout=30)
