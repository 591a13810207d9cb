"""repoll_create1 and its kin, :mod:`rdmacm.cma`: epoll(7) for rsockets and other descriptors."""

from __future__ import annotations

import errno
import os
import signal
import socket as plain
import threading
from collections.abc import Iterator
from select import EPOLLET, EPOLLIN, EPOLLONESHOT, EPOLLOUT
from typing import Any

import pytest

from rdmacm import RdmaError, cma
from rdmacm.cma.rsockets import Epoll, Socket
from rdmacm.rsocket import create_connection, create_server

ADD, DEL, MOD = cma.EPOLL_CTL_ADD, cma.EPOLL_CTL_DEL, cma.EPOLL_CTL_MOD


@pytest.fixture
def epoll() -> Iterator[Epoll]:
    made = cma.repoll_create1(0)
    yield made
    cma.rclose(made)


@pytest.fixture
def ends() -> Iterator[tuple[Socket, Socket]]:
    with create_server(("127.0.0.1", 0)) as server:
        client = create_connection(server.getsockname())
        peer, _ = server.accept()
    with client, peer:
        yield client, peer


def refused(code: int, call: Any, *args: object) -> None:
    with pytest.raises(RdmaError) as caught:
        call(*args)
    assert caught.value.errno == code


def test_events_come_with_the_users_data(epoll: Epoll, ends: tuple[Socket, Socket]) -> None:
    client, peer = ends
    here, there = plain.socketpair()
    with here, there:
        cma.repoll_ctl(epoll, ADD, peer, (EPOLLIN, "peer"))
        cma.repoll_ctl(epoll, ADD, here, (EPOLLIN, "here"))
        assert cma.repoll_wait(epoll, 8, 0) == []
        client.send(b"hello")
        assert cma.repoll_wait(epoll, 8, -1) == [(EPOLLIN, "peer")]
        assert cma.repoll_wait(epoll, 8, -1) == [(EPOLLIN, "peer")]  # as long as there is something to read
        peer.recv(5)
        there.send(b"hello")
        assert cma.repoll_wait(epoll, 8, -1) == [(EPOLLIN, "here")]
        cma.repoll_ctl(epoll, MOD, peer, (EPOLLIN | EPOLLOUT, "room"))
        assert sorted(cma.repoll_wait(epoll, 8, -1), key=str) == [(EPOLLIN, "here"), (EPOLLOUT, "room")]
        cma.repoll_ctl(epoll, DEL, here.fileno(), None)
        assert cma.repoll_wait(epoll, 8, -1) == [(EPOLLOUT, "room")]


def test_event_that_is_reported_once(epoll: Epoll, ends: tuple[Socket, Socket]) -> None:
    client, peer = ends
    cma.repoll_ctl(epoll, ADD, peer, (EPOLLIN | EPOLLONESHOT, 1))
    client.send(b"hello")
    assert cma.repoll_wait(epoll, 8, -1) == [(EPOLLIN, 1)]
    assert cma.repoll_wait(epoll, 8, 0) == []
    cma.repoll_ctl(epoll, MOD, peer, (EPOLLIN | EPOLLONESHOT, 2))
    assert cma.repoll_wait(epoll, 8, -1) == [(EPOLLIN, 2)]


def test_little_room_is_shared(epoll: Epoll) -> None:
    pairs = [plain.socketpair() for _ in range(3)]
    for number, (here, _) in enumerate(pairs):
        cma.repoll_ctl(epoll, ADD, here, (EPOLLOUT, number))
    assert [cma.repoll_wait(epoll, 1, -1)[0][1] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    for here, there in pairs:
        here.close()
        there.close()
    assert cma.repoll_wait(epoll, 1, 0) == []


def test_closed_descriptors_are_gone(epoll: Epoll, ends: tuple[Socket, Socket]) -> None:
    reader, writer = os.pipe()
    cma.repoll_ctl(epoll, ADD, ends[0], (EPOLLOUT, "socket"))
    cma.repoll_ctl(epoll, ADD, writer, (EPOLLOUT, "pipe"))
    ends[0].close()
    assert cma.repoll_wait(epoll, 8, -1) == [(EPOLLOUT, "pipe")]
    os.close(reader)
    os.close(writer)
    assert cma.repoll_wait(epoll, 8, 0) == []
    refused(errno.EBADF, cma.repoll_ctl, epoll, ADD, ends[0], (EPOLLOUT, 0))


def waiting(epoll: Epoll) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def wait() -> None:
        try:
            found.append(cma.repoll_wait(epoll, 8, -1))
        except RdmaError as error:
            found.append(error.errno)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, found


def test_thread_that_waits_sees_what_another_one_adds(epoll: Epoll, ends: tuple[Socket, Socket]) -> None:
    thread, found = waiting(epoll)
    cma.repoll_ctl(epoll, ADD, ends[0], (EPOLLOUT, "added"))
    thread.join()
    assert found == [[(EPOLLOUT, "added")]]


def test_close_ends_a_wait(ends: tuple[Socket, Socket]) -> None:
    epoll = cma.repoll_create(1)
    cma.repoll_ctl(epoll, ADD, ends[0], (EPOLLIN, 0))
    thread, found = waiting(epoll)
    cma.rclose(epoll)
    thread.join()
    assert found == [errno.EBADF]
    assert ends[0].fileno() >= 0
    refused(errno.EBADF, cma.repoll_wait, epoll, 1, 0)
    refused(errno.EBADF, cma.repoll_ctl, epoll, ADD, ends[0], (EPOLLIN, 0))


def test_signals_are_blocked_during_a_wait(epoll: Epoll, ends: tuple[Socket, Socket]) -> None:
    cma.repoll_ctl(epoll, ADD, ends[0], (EPOLLOUT, 0))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert cma.repoll_pwait(epoll, 1, -1, {signal.SIGUSR1}) == [(EPOLLOUT, 0)]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_wrong_arguments_are_refused(epoll: Epoll, ends: tuple[Socket, Socket]) -> None:
    end = ends[0]
    refused(errno.EINVAL, cma.repoll_create, 0)
    refused(errno.EINVAL, cma.repoll_create1, 1)
    refused(errno.EINVAL, cma.repoll_wait, epoll, 0, 0)
    refused(errno.EINVAL, cma.repoll_ctl, epoll, 4, end, (EPOLLIN, 0))
    refused(errno.EINVAL, cma.repoll_ctl, epoll, ADD, end, (EPOLLIN | EPOLLET, 0))
    refused(errno.EINVAL, cma.repoll_ctl, epoll, ADD, end, None)
    refused(errno.ENOENT, cma.repoll_ctl, epoll, MOD, end, (EPOLLIN, 0))
    refused(errno.ENOENT, cma.repoll_ctl, epoll, DEL, end, None)
    cma.repoll_ctl(epoll, ADD, end, (EPOLLIN, 0))
    refused(errno.EEXIST, cma.repoll_ctl, epoll, ADD, end, (EPOLLIN, 0))
