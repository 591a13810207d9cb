"""rsocket(7) under C's names, :mod:`rdmacm.cma`."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import threading
from mmap import PROT_WRITE
from pathlib import Path
from select import POLLIN
from socket import AF_INET, MSG_DONTWAIT, SO_SNDBUF, SOCK_DGRAM, SOCK_STREAM, SOL_SOCKET

import pytest

from rdmacm import RdmaError, cma

EXAMPLE = Path(__file__).parents[2] / "examples" / "rsocket_echo.py"
HEADER = Path("/usr/include/rdma/rsocket.h")


def test_calls_are_those_of_sockets() -> None:
    listener = cma.rsocket(AF_INET, SOCK_STREAM, 0)
    cma.rbind(listener, ("127.0.0.1", 0))
    cma.rlisten(listener, 1)
    fd = cma.rsocket(AF_INET, SOCK_STREAM, 0)
    cma.rsetsockopt(fd, SOL_SOCKET, SO_SNDBUF, 5000)
    assert cma.rgetsockopt(fd, SOL_SOCKET, SO_SNDBUF) == 5000
    cma.rsetsockopt(fd, cma.SOL_RDMA, cma.RDMA_IOMAPSIZE, 1)
    accepted: list[tuple[cma.rsockets.Socket, object]] = []
    thread = threading.Thread(target=lambda: accepted.append(cma.raccept(listener)))
    thread.start()
    cma.rconnect(fd, cma.rgetsockname(listener))
    thread.join()
    peer, address = accepted[0]
    assert address == cma.rgetsockname(fd)
    assert cma.rgetpeername(fd) == cma.rgetsockname(listener)

    data, one, two = bytearray(20), bytearray(3), bytearray(20)
    with pytest.raises(BlockingIOError):
        cma.rrecv(peer, data, 20, MSG_DONTWAIT)
    assert cma.rsend(fd, b"hello world", 5, 0) == 5
    assert cma.rpoll([(peer, POLLIN)], -1) == [(peer, POLLIN)]
    assert cma.rselect([peer], [], [], None) == ([peer], [], [])
    assert cma.rread(peer, data, 20) == 5
    assert data[:5] == b"hello"
    assert cma.rwritev(fd, [b"hel", b"lo"]) == 5
    assert cma.rreadv(peer, [one, two]) == 5
    assert one + two[:2] == b"hello"
    assert cma.rsendto(fd, b"x", 1, 0, None) == 1
    assert cma.rrecvfrom(peer, data, 20, 0) == (1, address)
    with pytest.raises(RdmaError) as caught:
        cma.rsendto(fd, b"x", 1, 0, ("127.0.0.1", 1))
    assert caught.value.errno == errno.EISCONN

    assert cma.riomap(peer, two, 20, PROT_WRITE, 0, 100) == 100
    assert cma.rwrite(peer, b"x", 1) == 1
    assert cma.rread(fd, data, 1) == 1
    assert cma.riowrite(fd, b"mapped", 6, 100, 0) == 6
    assert cma.rsendmsg(fd, [b"y"], 0) == 1
    assert cma.rrecvmsg(peer, [data], 0) == 1
    assert two[:6] == b"mapped"
    cma.riounmap(peer, 100)

    assert cma.rfcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK) == 0
    assert cma.rfcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
    with pytest.raises(RdmaError) as caught:
        cma.rfcntl(fd, fcntl.F_GETFD)
    assert caught.value.errno == errno.EOPNOTSUPP
    for each in (fd, peer, listener):
        cma.rclose(each)


@pytest.mark.skipif(not HEADER.exists(), reason="needs librdmacm-dev")
def test_every_call_of_the_header_is_there() -> None:
    declared = set(re.findall(r"^\w+ (r\w+)\(", HEADER.read_text(), re.MULTILINE))
    assert len(declared) > 25
    assert {name for name in declared if not hasattr(cma, name)} == set()


def test_the_example() -> None:
    command = [sys.executable, str(EXAMPLE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().split()[-1]
            done = subprocess.run(
                [*command, port, "127.0.0.1", "hello"],
                capture_output=True,
                text=True,
                env=environment,
                timeout=60,
                check=True,
            )
            assert done.stdout == "hello\n"
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_datagrams_by_c_names() -> None:
    server, client = cma.rsocket(AF_INET, SOCK_DGRAM), cma.rsocket(AF_INET, SOCK_DGRAM)
    cma.rbind(server, ("127.0.0.1", 0))
    data = bytearray(20)
    assert cma.rsendto(client, b"hello", 4, 0, cma.rgetsockname(server)) == 4
    size, source = cma.rrecvfrom(server, data, 20, 0)
    assert (size, bytes(data[:4])) == (4, b"hell")
    assert cma.rsendto(server, data, 2, 0, source) == 2
    assert cma.rrecvfrom(client, data, 20, 0) == (2, cma.rgetsockname(server))
    cma.rclose(client)
    cma.rclose(server)
