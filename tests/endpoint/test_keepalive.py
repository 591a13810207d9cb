"""A peer that vanishes without a word: noticed by ``keepalive`` in connect and listen, and not at all in verbs."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys

import pytest

import rdmacm
from rdmacm import CmDisconnectedError, CmTimeoutError, IdOption, OptionLevel
from rdmacm.endpoint.connection_state import ConnectionOptions, ConnectionState
from rdmacm.testing import Fabric
from rdmacm.verbs import QPState, SendWR, WCStatus, WROpcode
from support.endpoints import Ends, Part, play, receive
from support.hostile import ADDRESSES, Server, Talk
from support.netns import python_environment

DEFAULT = 15.0
#: Seconds that the device repeats a probe without an answer.
REPEATED = 4.5


def test_default_of_every_call() -> None:
    calls = (rdmacm.connect, rdmacm.listen, rdmacm.aio.connect, rdmacm.aio.listen, rdmacm.aio.start_server)
    assert {inspect.signature(call).parameters["keepalive"].default for call in calls} == {DEFAULT}
    assert ConnectionOptions().keepalive == DEFAULT
    for value in (0, -1.0):
        with pytest.raises(ValueError, match="keepalive must be a positive number"):
            rdmacm.connect(("127.0.0.1", 1), keepalive=value)


@pytest.mark.parametrize("side", ["active", "passive"])
def test_vanished_peer_is_noticed_by_default(side: str) -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    cores = ends.connect()
    waiting: ConnectionState = cores[side == "passive"]
    fabric.partition("a", "b")
    began = fabric.now
    with pytest.raises(CmDisconnectedError, match="the peer does not answer"):
        play(fabric, receive(waiting))
    assert DEFAULT < fabric.now - began < DEFAULT + REPEATED
    fabric.heal()
    ends.close(*cores)


def test_vanished_peer_is_not_noticed_without_keepalive() -> None:
    fabric = Fabric(1)
    ends = Ends(fabric, keepalive=None)
    active, passive = ends.connect()
    fabric.partition("a", "b")
    sent = len(fabric.log)
    with pytest.raises(CmTimeoutError):
        play(fabric, Part(passive.dispatcher, passive.receive(), 3600))
    assert len(fabric.log) == sent, "nothing is sent"
    fabric.heal()
    ends.close(active, passive)


def test_verbs_probe_only_when_the_application_does() -> None:
    """The same probe there is a WRITE of no bytes, which needs neither memory nor a key."""
    fabric = Fabric(1)
    server = Server(fabric.host("a", ADDRESSES[0]))
    talk = Talk(server, fabric.host("b", ADDRESSES[1]))
    talk.on()
    fabric.run(seconds=1)
    qp = talk.cmid.qp
    assert qp is not None
    qp.post_send(SendWR(1, opcode=WROpcode.RDMA_WRITE))
    assert talk.cmid.get_send_comp(60).status is WCStatus.SUCCESS
    fabric.partition("a", "b")
    sent = len(fabric.log)
    fabric.run(seconds=3600)
    assert len(fabric.log) == sent, "nothing is sent"
    assert qp.state is QPState.RTS
    qp.post_send(SendWR(2, opcode=WROpcode.RDMA_WRITE))
    assert talk.cmid.get_send_comp(60).status is WCStatus.RETRY_EXC_ERR
    fabric.heal()
    talk.release()
    fabric.run(seconds=100)
    server.close()


CHILD = """
import sys
from rdmacm import connect
with connect(("127.0.0.1", int(sys.argv[1])), timeout=20) as conn:
    conn.send(b"I am here")
    conn.recv()
"""


def test_killed_peer_is_noticed_in_asyncio() -> None:
    async def main() -> None:
        async with await rdmacm.aio.listen(("127.0.0.1", 0), keepalive=0.05) as listener:
            listener.id.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 10)  # 4 ms, retried seven times
            argv = (sys.executable, "-c", CHILD, str(listener.port))
            with subprocess.Popen(argv, env=python_environment(), stderr=subprocess.DEVNULL) as child:
                async with await listener.accept() as conn:
                    assert await conn.recv() == b"I am here"
                    child.send_signal(signal.SIGKILL)
                    with pytest.raises(CmDisconnectedError, match="does not answer"):
                        await asyncio.wait_for(conn.recv(), 30)

    asyncio.run(main())
