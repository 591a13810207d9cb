"""Plain Python sockets, as a peer of ``bench/peers.py``.

Round trips use UDP datagrams as long as the packet of a SEND of 64 bytes. "send" uses UDP trains (UDP_SEGMENT), as many
outstanding as socket buffers hold, with periodic acknowledgements. Connections use TCP; the server sends one byte
before the client closes. ``serve`` prints its port and runs until it is terminated; ``measure PORT EFFORT`` prints the
figures as JSON.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable
from functools import partial

from peers import AT_ONCE, in_turn, run_script, times

HOST = "127.0.0.1"
#: Bytes of a SEND of 64 bytes with its BTH (12) and ICRC (4).
DATAGRAM = 80
ROUND_TRIPS, CONNECTIONS = 20_000, 5000
#: Number of messages by size in bytes, at full effort.
MESSAGES = {4096: 50_000, 65536: 10_000, 1 << 20: 1000}
#: Bytes of a packet with a path MTU of 4096, and packets in a train.
SEGMENT, TRAIN = 4096 + 16, 15
#: Outstanding trains: Linux's default socket buffer holds little more. Every half window is acknowledged.
WINDOW = 4
UDP_SEGMENT, UDP_GRO = 103, 104
#: The first bytes from a client: mode, and number of messages or packets.
HEAD = struct.Struct("!cQ")
PORT = struct.Struct("!H")
POLL, SLEEP, BULK = b"p", b"s", b"b"


def udp() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((HOST, 0))
    return made


def meet(connection: socket.socket, ours: socket.socket) -> tuple[str, int]:
    """Exchange UDP ports; return the address of the other end's socket."""
    connection.sendall(PORT.pack(ours.getsockname()[1]))
    return HOST, *PORT.unpack(connection.recv(PORT.size))


def polled(receive: Callable[[], bytes]) -> bytes:
    while True:
        try:
            return receive()
        except BlockingIOError:
            pass


def receiver(ours: socket.socket, poll: bool) -> Callable[[], bytes]:
    ours.setblocking(not poll)
    receive = partial(ours.recv, DATAGRAM)
    return partial(polled, receive) if poll else receive


def echo(connection: socket.socket, count: int, poll: bool) -> None:
    with udp() as ours:
        peer = meet(connection, ours)
        receive = receiver(ours, poll)
        for _ in range(count):
            ours.sendto(receive(), peer)


def acknowledgement(connection: socket.socket) -> bytes:
    if not (answer := connection.recv(1)):
        raise SystemExit("a datagram was lost")
    return answer


def take(connection: socket.socket, packets: int) -> None:
    with udp() as ours:
        ours.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        ours.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 5, 0)
        )  # settimeout() would poll first
        meet(connection, ours)
        buffers = [bytearray(1 << 16)]
        due = step = SEGMENT * TRAIN * WINDOW // 2
        left = packets * SEGMENT
        while left:
            size = ours.recvmsg_into(buffers, 64)[0]
            left -= size
            due -= size
            if due <= 0:
                due += step
                connection.sendall(b"!")
        connection.sendall(b".")


def serve_one(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"+")
        if len(head := connection.recv(HEAD.size)) < HEAD.size:
            return  # a client that only connects
        mode, count = HEAD.unpack(head)
        if mode == BULK:
            take(connection, count)
        else:
            echo(connection, count, mode == POLL)


def serve() -> None:
    with socket.create_server((HOST, 0), backlog=512) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            serve_one(connection)


def connected(port: int) -> socket.socket:
    connection = socket.create_connection((HOST, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.recv(1)
    return connection


def half_round_trip(port: int, count: int, poll: bool) -> float:
    """Return half the round-trip time in microseconds."""
    warm = count // 10
    with connected(port) as connection, udp() as ours:
        connection.sendall(HEAD.pack(POLL if poll else SLEEP, warm + count))
        peer = meet(connection, ours)
        receive = receiver(ours, poll)
        message = bytes(DATAGRAM)
        started = 0.0
        for i in range(warm + count):
            if i == warm:
                started = time.perf_counter()
            ours.sendto(message, peer)
            receive()
        return (time.perf_counter() - started) / count / 2 * 1e6


def bandwidth(port: int, size: int, count: int) -> float:
    """Return the bandwidth in GB/s (10^9 bytes of payload per second)."""
    packets = size // 4096 * count
    with connected(port) as connection, udp() as ours:
        connection.sendall(HEAD.pack(BULK, packets))
        peer = meet(connection, ours)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        payload = memoryview(bytearray(TRAIN * SEGMENT))
        segment = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", SEGMENT))]
        length = min(TRAIN, size // 4096)
        allowed = WINDOW * TRAIN
        left, answered = packets, b""
        started = time.perf_counter()
        while left:
            train = min(length, left)
            while allowed < train:
                acknowledgement(connection)
                allowed += WINDOW * TRAIN // 2
            ours.sendmsg([payload[: train * SEGMENT]], segment, 0, peer)
            left -= train
            allowed -= train
        while answered != b".":
            answered = acknowledgement(connection)
        return packets * 4096 / (time.perf_counter() - started) / 1e9


def connections(port: int, count: int) -> dict[str, float]:
    seconds: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        connected(port).close()
        seconds.append(time.perf_counter() - started)
    return in_turn(seconds)


def connections_at_once(port: int, count: int) -> float:
    """Open and close connections, with AT_ONCE under way; return how many a second."""
    left, ended = count, 0

    def start() -> None:
        nonlocal left
        left -= 1
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((HOST, port))
        selector.register(connection, selectors.EVENT_READ)  # readable once the server's byte is there

    started = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for _ in range(min(count, AT_ONCE)):
            start()
        while ended < count:
            for key, _ in selector.select(10):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                connection.recv(1)
                selector.unregister(connection)
                connection.close()
                ended += 1
                if left:
                    start()
    return count / (time.perf_counter() - started)


def figures(port: int, effort: float) -> dict[str, object]:
    return {
        "half_round_trip_us": half_round_trip(port, times(ROUND_TRIPS, effort), True),
        "half_round_trip_asleep_us": half_round_trip(port, times(ROUND_TRIPS, effort), False),
        "bandwidth": {"send": {size: bandwidth(port, size, times(count, effort)) for size, count in MESSAGES.items()}},
        "connections": connections(port, times(CONNECTIONS, effort)),
        "connections_at_once": connections_at_once(port, times(CONNECTIONS, effort)),
    }


if __name__ == "__main__":
    run_script(serve, figures)
