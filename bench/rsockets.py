"""Sockets over RDMA (:mod:`rdmacm.rsocket`), as a peer of ``bench/peers.py``: a server, and a client that measures.

Compare with the column of rdmacm: a round trip with that of its SENDs, and the stream with its WRITEs of 64 KiB, which
is as long as a message of a stream may be. ``serve`` prints its port and runs until it is terminated; ``measure PORT
EFFORT`` prints the figures as JSON.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from peers import in_turn, run_script, times

from rdmacm import rsocket

HOST = "127.0.0.1"
#: The first bytes from a client: mode, size of a message in bytes, number of messages.
HEAD = struct.Struct("!cIQ")
POLL, SLEEP, BULK = b"p", b"s", b"b"
SMALL, ROUND_TRIPS, CONNECTIONS = 64, 10_000, 1000
#: Number of messages by size in bytes, at full effort.
MESSAGES = {4096: 20_000, 65536: 5000, 1 << 20: 400}
#: Bytes of each buffer. With librdmacm's 128 KiB, the ends take turns.
BUFFER = 1 << 20


def receive(stream: rsocket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += stream.recv_into(view[done:])


def polled(stream: rsocket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        try:
            done += stream.recv_into(view[done:])
        except BlockingIOError:
            os.sched_yield()  # as a poll of a completion queue does


def serve_one(stream: rsocket.socket) -> None:
    with stream:
        if len(head := stream.recv(HEAD.size, socket.MSG_WAITALL)) < HEAD.size:
            return  # a client that only connects
        mode, size, count = HEAD.unpack(head)
        if mode == BULK:
            view, left = memoryview(bytearray(BUFFER)), size * count
            while left:
                left -= stream.recv_into(view)
            stream.sendall(b"!")
            return
        view = memoryview(bytearray(size))
        stream.setblocking(mode == SLEEP)
        for _ in range(count):
            (receive if mode == SLEEP else polled)(stream, view)
            stream.send(view)
        stream.setblocking(True)


def options(stream: rsocket.socket) -> rsocket.socket:
    for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        stream.setsockopt(socket.SOL_SOCKET, name, BUFFER)
    return stream


def serve() -> None:
    with options(rsocket.socket()) as listener:
        listener.bind((HOST, 0))
        listener.listen()
        print(listener.getsockname()[1], flush=True)
        while True:
            serve_one(listener.accept()[0])


def connected(port: int) -> rsocket.socket:
    stream = options(rsocket.socket())
    stream.connect((HOST, port))
    return stream


def half_round_trip(port: int, count: int, mode: bytes) -> float:
    """Return half the round-trip time in microseconds."""
    warm = count // 10
    with connected(port) as stream:
        stream.sendall(HEAD.pack(mode, SMALL, warm + count))
        view = memoryview(bytearray(SMALL))
        stream.setblocking(mode == SLEEP)
        started = 0.0
        for i in range(warm + count):
            if i == warm:
                started = time.perf_counter()
            stream.send(view)
            (receive if mode == SLEEP else polled)(stream, view)
        elapsed = time.perf_counter() - started
        stream.setblocking(True)
    return elapsed / count / 2 * 1e6


def bandwidth(port: int, size: int, count: int) -> float:
    """Return the bandwidth in GB/s (10^9 bytes per second)."""
    with connected(port) as stream:
        stream.sendall(HEAD.pack(BULK, size, count))
        data = bytes(size)
        started = time.perf_counter()
        for _ in range(count):
            stream.sendall(data)
        stream.recv(1)
        return size * count / (time.perf_counter() - started) / 1e9


def connections(port: int, count: int) -> dict[str, float]:
    """Open and close connections one after the other."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        connected(port).close()
        seconds.append(time.perf_counter() - started)
    return in_turn(seconds)


def figures(port: int, effort: float) -> dict[str, object]:
    return {
        "half_round_trip_us": half_round_trip(port, times(ROUND_TRIPS, effort), POLL),
        "half_round_trip_asleep_us": half_round_trip(port, times(ROUND_TRIPS, effort), SLEEP),
        "bandwidth": {"send": {size: bandwidth(port, size, times(count, effort)) for size, count in MESSAGES.items()}},
        "connections": connections(port, times(CONNECTIONS, effort)),
    }


if __name__ == "__main__":
    run_script(serve, figures)
