"""connect() and listen() in threads, on loopback."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import rdmacm
from rdmacm import (
    AddrInfo,
    CmDisconnectedError,
    CmPermissionError,
    CmRejectedError,
    CmTimeoutError,
    GaiError,
    IdOption,
    OptionLevel,
    RdmaError,
    RemoteRegion,
    connect,
    listen,
)
from rdmacm.provider import get_provider
from support.clock import Stopwatch, eventually
from support.endpoints import accepting, connected, in_thread
from support.netns import python_environment


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _no_resources_left() -> Iterator[None]:
    yield
    gc.collect()
    provider = get_provider("soft")
    assert not provider.runtime.in_use  # type: ignore[attr-defined]
    assert len(provider.host.mux) == 0  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="module")
def _no_descriptors_left() -> Iterator[None]:
    before = descriptors()
    yield
    eventually(lambda: descriptors() <= before, "the helper thread closes its own")


# -- setting up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_sides_know_the_peer_address(host: str) -> None:
    with listen((host, 0)) as listener:
        with accepting(listener, private_data=b"welcome") as accepted:
            active = connect((host, listener.port), private_data=b"v1", timeout=20)
        with active, accepted[0] as passive:
            assert active.private_data.rstrip(b"\0") == b"welcome"
            assert passive.private_data.rstrip(b"\0") == b"v1"
            assert active.peer_addr == passive.local_addr == listener.address
            assert active.local_addr == passive.peer_addr
            names = [step.name for step in active.steps]
            assert names[-2:] == ["qp", "connect"]
            assert all(step.microseconds >= 0 for step in active.steps)
            assert [step.name for step in passive.steps][-2:] == ["qp", "accept"]
            assert passive.explain().steps == passive.steps
            assert active.explain().ok
            assert active.explain().steps == active.steps
            assert "established" in repr(active)


@pytest.mark.parametrize("any_host", ["", None])
def test_wildcard_listener_accepts_both_families(any_host: str | None) -> None:
    with listen((any_host, 0)) as listener:  # type: ignore[arg-type]
        for host in ("127.0.0.1", "::1"):
            with accepting(listener) as accepted:
                active = connect((host, listener.port), timeout=20)
            with active, accepted[0] as passive:
                active.send(host.encode())
                assert passive.recv(20) == host.encode()


def test_connect_tries_the_next_address_of_a_name_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port, *more: [(*a[:4], (a[4][0], int(port))) for a in answers]
    )
    monkeypatch.setattr("rdmacm.endpoint.race._ATTEMPT_DELAY", 60.0)
    with listen(("127.0.0.1", 0)) as listener:  # nothing listens on ::1
        with accepting(listener) as accepted:
            active = connect(("storage-7", listener.port), timeout=20)  # a refusal starts the next attempt at once
        with active, accepted[0]:
            assert active.peer_addr == ("127.0.0.1", listener.port)
            assert active.steps[0].name == "name"
        listener.close()
        with pytest.raises(CmRejectedError) as caught:
            connect(("storage-7", active.id.dst_port), timeout=20)
        notes = caught.value.__notes__
        assert len(notes) == 2
        assert "[::1]" in notes[0]
        assert "127.0.0.1" in notes[1]


def test_connect_accepts_results_of_getaddrinfo() -> None:
    with listen(("127.0.0.1", 0)) as listener:
        infos = rdmacm.getaddrinfo("127.0.0.1", listener.port, port_space=rdmacm.PortSpace.TCP)
        for address in (infos, infos[0]):
            with accepting(listener) as accepted:
                active = connect(address, timeout=20, source=("127.0.0.1", 0))
            active.close()
            accepted[0].close()


def test_rejection_raises_with_reason_and_private_data() -> None:
    with listen(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            request = listener.get_request(20)
            assert request.private_data.rstrip(b"\0") == b"let me in"
            assert request.peer_addr is not None
            request.reject(b"not you")
            with pytest.raises(RdmaError, match="already been answered"):
                request.accept()

        with in_thread(refuse), pytest.raises(CmRejectedError) as caught:
            connect(("127.0.0.1", listener.port), private_data=b"let me in", timeout=20)
        assert caught.value.reason == 28
        assert caught.value.private_data.rstrip(b"\0") == b"not you"
        port = listener.port
    with pytest.raises(CmRejectedError, match="nobody listens") as caught:
        connect(("127.0.0.1", port), timeout=20)
    assert isinstance(caught.value, ConnectionRefusedError)


def test_request_can_be_inspected_and_accepted() -> None:
    with listen(("127.0.0.1", 0)) as listener:
        conns = []
        with in_thread(lambda: conns.append(listener.get_request(20).accept(b"yes", timeout=20))):
            active = connect(("127.0.0.1", listener.port), timeout=20)
        with active, conns[0] as passive:
            passive.send(b"hello")
            assert active.recv(20) == b"hello"
            assert active.private_data.rstrip(b"\0") == b"yes"


@pytest.mark.wallclock
def test_connect_and_accept_time_out() -> None:
    with listen(("127.0.0.1", 0)) as listener:  # and never accepts
        watch = Stopwatch()
        with pytest.raises(CmTimeoutError, match="still in connect") as caught:
            connect(("127.0.0.1", listener.port), timeout=0.1)
        assert 0.1 <= watch.seconds < 5
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(CmTimeoutError, match="no connection request arrived"):
            listener.get_request(timeout=0) and listener.accept(timeout=0.01)


def test_invalid_arguments_raise() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        rdmacm.no_such_name  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(GaiError):
        connect(("no-such-host.invalid.", 7471), timeout=20)
    with pytest.raises(RdmaError, match="private data"):
        connect(("127.0.0.1", 7471), private_data=bytes(57), timeout=20)
    with pytest.raises(RdmaError, match="no address"):
        connect([])
    with pytest.raises(ValueError, match="depth"):
        connect(("127.0.0.1", 7471), depth=0)
    with pytest.raises(RdmaError, match="not an address for a reliable connection"):
        connect(AddrInfo(dst_addr=("127.0.0.1", 1), qp_type=rdmacm.QPType.UD, port_space=rdmacm.PortSpace.UDP))
    with listen(("127.0.0.1", 0)) as listener:
        with pytest.raises(RdmaError, match="carries up to 196 bytes of private data, not 197"):
            listener.accept(0, private_data=bytes(197))
        with pytest.raises(RdmaError) as caught:
            listen(("127.0.0.1", listener.port))
        assert caught.value.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


def test_iterating_over_a_listener_ends_when_it_is_closed() -> None:
    listener = listen(("127.0.0.1", 0))
    seen = []

    def serve() -> None:
        for conn in listener:
            with conn:
                seen.append(conn.recv(20))

    with in_thread(serve):
        for text in (b"one", b"two"):
            with connect(("127.0.0.1", listener.port), timeout=20) as conn:
                conn.send(text)
        while len(seen) < 2:
            threading.Event().wait(0.001)
        listener.close()
    assert seen == [b"one", b"two"]
    with pytest.raises(RdmaError, match="closed"):
        listener.accept()


def test_unclosed_objects_warn_and_are_released() -> None:
    listener = listen(("127.0.0.1", 0))
    with accepting(listener) as accepted:
        active = connect(("127.0.0.1", listener.port), timeout=20)
    with pytest.warns(ResourceWarning, match="unclosed connection"):
        del active
        gc.collect()
    with pytest.raises(CmDisconnectedError):
        accepted[0].recv(20)
    accepted[0].close()
    with pytest.warns(ResourceWarning, match="unclosed listener"):
        del listener
        gc.collect()


# -- messages -----------------------------------------------------------------------------------------------


def test_messages_of_all_sizes_arrive() -> None:
    with connected(depth=4, max_message=10_000) as (active, passive):
        for data in (b"", b"x", bytes(256), bytes(257), bytearray(b"y" * 10_000), memoryview(b"zz")):
            active.send(data, timeout=20)
            assert passive.recv(20) == bytes(data)
            passive.send(data, timeout=20)
            assert active.recv(20) == bytes(data)
        active.send(memoryview(bytearray(b"a" * 1000)).toreadonly(), timeout=20)
        assert passive.recv_message(20) == (b"a" * 1000, None)
        active.send(b"with a number", 0xFFFFFFFF, timeout=20)
        assert passive.recv_message(20) == (b"with a number", 0xFFFFFFFF)
        with pytest.raises(ValueError, match="32 bits"):
            active.send(b"", 1 << 32)


def test_messages_beyond_the_receive_buffers_wait() -> None:
    with connected(depth=2, max_message=100) as (active, passive):

        def produce() -> None:
            for number in range(50):
                active.send(b"%d" % number, timeout=20)

        with in_thread(produce):
            assert [int(passive.recv(20)) for _ in range(50)] == list(range(50))


def test_one_thread_sends_while_another_receives() -> None:
    with connected() as (active, passive):

        def echo() -> None:
            for message in passive:
                passive.send(message)

        def send() -> None:
            for number in range(200):
                active.send(b"%d" % number, timeout=20)

        with in_thread(echo):
            with in_thread(send):
                assert [int(active.recv(20)) for _ in range(200)] == list(range(200))
            active.disconnect()


def test_many_threads_share_a_connection() -> None:
    with connected(depth=4) as (active, passive):
        region = passive.register(bytearray(8), remote_atomic=True)
        remote = region.remote

        def add() -> None:
            for _ in range(5):
                active.fetch_add(remote, 1, timeout=20)

        threads = [threading.Thread(target=add) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert int.from_bytes(region.view, sys.byteorder) == 150


def test_oversized_message_ends_the_connection() -> None:
    with connected(max_message=100) as (active, passive):
        with pytest.raises(RdmaError, match="longer than its buffers"):
            active.send(bytes(101), timeout=20)
        with pytest.raises(CmDisconnectedError):
            passive.recv(20)
        with pytest.raises(CmDisconnectedError, match="a send failed"):
            active.send(b"", timeout=20)


def test_recv_times_out() -> None:
    with connected() as (active, passive):
        with pytest.raises(CmTimeoutError, match=r"no message arrived within 0\.01 s"):
            active.recv(0.01)
        with pytest.raises(CmTimeoutError):
            active.recv(0)
        passive.send(b"late", timeout=20)
        assert active.recv(20) == b"late"


# -- disconnecting ------------------------------------------------------------------------------------------------


def test_data_sent_before_disconnect_arrives() -> None:
    with connected() as (active, passive):
        for text in (b"one", b"two", b"three"):
            passive.send(text, timeout=20)
        passive.close()
        assert list(active) == [b"one", b"two", b"three"]
        with pytest.raises(CmDisconnectedError, match="the peer has disconnected"):
            active.recv(20)
        with pytest.raises(CmDisconnectedError) as caught:
            active.send(b"x", timeout=20)
        assert isinstance(caught.value, ConnectionResetError)
        assert "ended" in repr(active)
        assert "closed" in repr(passive)
        assert passive.closed
        passive.close()


def test_received_messages_remain_after_disconnect() -> None:
    with connected() as (active, passive):
        passive.send(b"before", timeout=20)
        active.disconnect()
        active.disconnect()
        assert active.recv(20) == b"before"
        with pytest.raises(CmDisconnectedError, match="disconnected locally"):
            active.recv(20)
        assert list(passive) == []


def test_close_wakes_a_receiver() -> None:
    with connected() as (active, _passive):
        waiting = threading.Event()

        def receive() -> None:
            waiting.set()
            with pytest.raises(CmDisconnectedError):
                active.recv(20)

        with in_thread(receive):
            waiting.wait()
            active.close()


def test_close_wakes_a_sender_and_an_accepter() -> None:
    with connected(depth=1) as (active, _passive):
        active.send(b"fills the buffer", timeout=20)

        def send() -> None:
            with pytest.raises(CmDisconnectedError, match="closed locally"):
                active.send(b"x" * 1000)

        with in_thread(send):
            threading.Event().wait(0.05)
            active.close()
    listener = listen(("127.0.0.1", 0))

    def accept() -> None:
        with pytest.raises(RdmaError, match="the listener is closed"):
            listener.accept()

    with in_thread(accept):
        threading.Event().wait(0.05)
        listener.close()


CHILD = """
import signal, sys
from rdmacm import connect
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
with connect(("127.0.0.1", int(sys.argv[1])), timeout=20) as conn:
    conn.send(b"I am here")
    for message in conn:
        conn.send(message)
"""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_leaves_the_connection_alone() -> None:
    with connected() as (active, passive):
        active.send(b"before", timeout=20)
        child = os.fork()
        if not child:
            try:
                # As garbage collection would: close() raises in the child.
                active._state.release()
                passive._state.release()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert passive.recv(20) == b"before"
        passive.send(b"after", timeout=20)
        assert active.recv(20) == b"after"


def test_peers_in_two_processes_exchange_messages() -> None:
    with listen(("127.0.0.1", 0)) as listener:
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(listener.port)], env=python_environment())
        try:
            with listener.accept(20) as conn:
                assert conn.recv(20) == b"I am here"
                for number in range(20):
                    conn.send(b"%d" % number, timeout=20)
                    assert conn.recv(20) == b"%d" % number
            assert child.wait(20) == 0
        finally:
            child.kill()
            child.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_recv_fails_when_the_peer_is_killed(how: signal.Signals) -> None:
    with listen(("127.0.0.1", 0), keepalive=0.05) as listener:
        listener.id.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 10)  # 4 ms, retried seven times
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(listener.port)], env=python_environment(), stderr=subprocess.DEVNULL
        )
        try:
            with listener.accept(20) as conn:
                assert conn.recv(20) == b"I am here"
                with pytest.raises(CmTimeoutError):
                    conn.recv(0.2)  # a few keepalives
                child.send_signal(how)
                with pytest.raises(CmDisconnectedError):
                    conn.recv(20)
        finally:
            child.kill()
            child.wait()


# -- remote memory ------------------------------------------------------------------------------------------


def test_peer_memory_is_read_and_written() -> None:
    with connected() as (active, passive):
        memory = bytearray(1 << 20)
        region = passive.register(memory, remote_read=True, remote_write=True, remote_atomic=True)
        passive.send(region.remote.pack(), timeout=20)
        remote = RemoteRegion.unpack(active.recv(20))
        assert remote == region.remote
        assert len(remote) == len(region) == 1 << 20

        data = os.urandom(1 << 20)
        active.write(remote, data, timeout=20)
        assert memory == data
        assert active.read(remote, timeout=20) == data
        into = bytearray(1 << 20)
        assert active.read(remote, into, timeout=20) is None
        assert into == data
        active.write(remote[5:10], b"12345", timeout=20)
        assert memory[4:11] == data[4:5] + b"12345" + data[10:11]
        with active.register(bytearray(b"own-region")) as own:
            active.write(remote, own, timeout=20)
            assert memory[:10] == b"own-region"
            active.write(remote[:5], b"OTHER", timeout=20)
            active.read(remote[:10], own, timeout=20)
            assert bytes(own.view) == b"OTHERegion"
        active.write(remote[:0], b"", timeout=20)

        active.write(remote, b"look", 42, timeout=20)
        assert passive.recv_message(20) == (b"", 42)
        assert memory[:4] == b"look"


def test_atomics_change_peer_memory() -> None:
    with connected() as (active, passive):
        memory = bytearray(64)
        region = passive.register(memory, remote_atomic=True)
        skip = -region.remote.addr % 8
        remote = region.remote[skip : skip + 8]
        assert active.fetch_add(remote, 5, timeout=20) == 0
        assert active.fetch_add(remote, -1, timeout=20) == 5
        assert active.compare_swap(remote, 4, 1 << 63, timeout=20) == 4
        assert active.compare_swap(remote, 4, 9, timeout=20) == 1 << 63
        assert int.from_bytes(memory[skip : skip + 8], sys.byteorder) == 1 << 63
        with pytest.raises(ValueError, match="divisible by 8"):
            active.fetch_add(region.remote[skip + 1 : skip + 9], 1)


@pytest.mark.parametrize("wrong", ["key", "range", "permission", "closed"])
def test_forbidden_remote_access_ends_the_connection(wrong: str) -> None:
    with connected() as (active, passive):
        region = passive.register(bytearray(100), remote_read=True, remote_write=wrong != "permission")
        remote = region.remote
        if wrong == "key":
            remote = RemoteRegion(remote.addr, remote.rkey ^ 1, 100)
        elif wrong == "range":
            remote = RemoteRegion(remote.addr + 1, remote.rkey, 100)
        elif wrong == "closed":
            region.close()
        with pytest.raises(
            CmPermissionError, match="the peer refused access: wrong key, range or permission"
        ) as caught:
            active.write(remote, bytes(100), timeout=20)
        assert caught.value.step == "write"
        assert "remote_write" in str(caught.value)
        with pytest.raises(CmDisconnectedError, match="a write failed: the peer refused"):
            active.recv(20)
        with pytest.raises(CmDisconnectedError):
            passive.recv(20)


def test_local_errors_are_raised_before_sending() -> None:
    with connected() as (active, passive):
        remote = passive.register(bytearray(10), remote_read=True, remote_write=True).remote
        with pytest.raises(ValueError, match="11 bytes do not fit"):
            active.write(remote, bytes(11))
        with pytest.raises(ValueError, match="does not fit into a buffer of 9 bytes"):
            active.read(remote, bytearray(9))
        with pytest.raises(RdmaError, match="read-only"):
            active.read(remote, bytes(10))
        with pytest.raises(TypeError):
            active.send("text")  # type: ignore[arg-type]
        with pytest.raises(RdmaError, match="read-only"):
            active.register(b"constant", remote_write=True)
        own = active.register(bytearray(5))
        own.close()
        own.close()
        with pytest.raises(RdmaError, match="the region is closed"):
            active.send(own)
        active.send(b"still there", timeout=20)
        assert passive.recv(20) == b"still there"


def test_remote_region_is_packed_and_sliced() -> None:
    remote = RemoteRegion(0x7F0000001000, 0x1234, 100)
    assert remote.pack() == bytes.fromhex("00007f0000001000 00001234 00000064")
    assert RemoteRegion.unpack(remote.pack() + b"more") == remote
    assert remote[10:] == RemoteRegion(0x7F000000100A, 0x1234, 90)
    assert remote[100:].length == 0
    for part in (slice(0, 101), slice(-1, 5), slice(6, 5)):
        with pytest.raises(IndexError):
            remote[part]
    with pytest.raises(TypeError):
        remote[::2]
    with pytest.raises(ValueError, match="16 bytes"):
        RemoteRegion.unpack(bytes(15))
    with pytest.raises(ValueError, match="does not fit"):
        RemoteRegion(0, 0, 1 << 32).pack()


def test_timed_out_operation_releases_the_buffer() -> None:
    with connected(depth=1) as (active, passive):
        data = bytearray(1000)
        active.send(b"fills the only buffer", timeout=20)
        with pytest.raises(CmTimeoutError):
            active.send(bytes(1000), timeout=0.02)  # immutable data, which may still arrive
        assert passive.recv(20) == b"fills the only buffer"
        assert passive.recv(20) == bytes(1000)
        active.send(b"fills it again", timeout=20)
        with pytest.raises(CmTimeoutError, match="send"):
            active.send(data, timeout=0.02)
        data.extend(b"no longer in use")
        with pytest.raises(CmDisconnectedError, match="was abandoned"):
            active.send(b"", timeout=20)
        assert list(passive) == [b"fills it again"]
