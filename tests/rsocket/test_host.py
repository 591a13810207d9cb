"""The dispatcher of sockets, and what a connection that has lost messages becomes."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable

import pytest

from rdmacm import rsocket
from rdmacm.rsocket.host import HostDispatcher
from rdmacm.testing import LOSE, Fabric
from rdmacm.testing.faults import FabricPacket, Verdict


class _Completions:
    """A source of completions."""

    is_scheduled = False
    was_polled = False

    def poll(self) -> bool:
        self.was_polled = True
        return False

    def end(self, reason: str) -> None:
        raise AssertionError(reason)


def test_what_a_waiting_call_posts_may_complete_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread sleeps once it has looked. What completed during the look would wake nobody any more."""
    dispatcher = HostDispatcher.get(Fabric(1).host("a", "10.0.0.1").provider)
    completions = _Completions()

    def ready() -> bool:
        if not completions.was_polled:
            dispatcher.schedule(completions)
        return completions.was_polled

    def look_once(done: Callable[[], bool], timeout: float | None) -> bool:
        return done()

    with monkeypatch.context() as patch:
        patch.setattr(dispatcher.provider, "drive", look_once)
        assert dispatcher.wait(ready, None)
    dispatcher.release()


def test_a_dispatcher_that_is_being_closed_is_not_given_to_others() -> None:
    """One thread has released it as its last user, and not closed it yet, when another thread asks for one."""
    provider = Fabric(1).host("a", "10.0.0.1").provider
    first = HostDispatcher.get(provider)
    close, given = first._on_close, []
    assert close is not None

    def late() -> None:
        given.append(HostDispatcher.get(provider))
        close()

    first._on_close = late
    first.release()
    (second,) = given
    assert first.channel.closed
    assert not second.channel.closed
    assert HostDispatcher.get(provider) is second
    second.release()
    second.release()


def test_the_end_of_a_connection_whose_rtu_was_lost() -> None:
    """The server's end hears nothing but the DREQ: there was a connection, and accept() returns it."""
    fabric = Fabric(5)
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")

    def faults(packet: FabricPacket) -> Verdict | None:
        is_stream = packet.kind.startswith(("RDMA_WRITE", "RC"))
        return LOSE if packet.source == "a" and (packet.kind == "RTU" or is_stream) else None

    with rsocket.create_server(("10.0.0.2", 7471), provider=b.provider) as listener:
        fabric.faults = faults
        with rsocket.create_connection(("10.0.0.2", 7471), provider=a.provider) as client:
            drop = (1).to_bytes(4, "little") + bytes(4)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, drop)
        listener.settimeout(60)
        with listener.accept()[0] as server, pytest.raises(ConnectionResetError):
            server.recv(1)


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def test_in_a_child_of_fork_each_call_is_refused() -> None:
    """A clear error, at once, and no message to the peer; what the child makes itself works."""
    with rsocket.create_server(("127.0.0.1", 0)) as listener, rsocket.socket() as bound, rsocket.socket() as new:
        address = listener.getsockname()
        bound.bind(("127.0.0.1", 0))
        client = rsocket.create_connection(address)
        server = listener.accept()[0]
        calls: list[Callable[[], object]] = [
            listener.accept,
            lambda: listener.listen(5),
            lambda: bound.connect(address),
            lambda: client.send(b"x"),
            lambda: client.sendall(b"x"),
            lambda: client.sendmsg([b"x"]),
            lambda: client.recv(1),
            lambda: client.recv_into(bytearray(1)),
            lambda: client.shutdown(socket.SHUT_WR),
            lambda: client.riomap(bytearray(1)),
            lambda: rsocket.poll([(client, select.POLLIN)], 0),
            lambda: rsocket.select([client, 0], [], [], 0),
        ]
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, " ".join(map(_outcome, calls)).encode())
                with rsocket.create_server(("127.0.0.1", 0)) as mine:
                    new.connect(mine.getsockname())
                    with mine.accept()[0] as peer:
                        peer.sendall(b"of the child")
                        os.write(writing, b", " + new.recv(100))
                for inherited in (client, server, listener, bound):
                    inherited.close()
                os.write(writing, b", closed")
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as outcomes:
            assert outcomes.read() == b" ".join([b"EBADF"] * len(calls)) + b", of the child, closed"
        os.waitpid(child, 0)
        with client, server:
            client.sendall(b"of the parent")
            assert server.recv(100) == b"of the parent"
