"""TCP through asyncio's streams, as a peer of ``bench/peers.py``: a server, and a client that measures.

``serve`` prints its port and runs until it is terminated; ``measure PORT EFFORT`` prints the figures as JSON.
"""

from __future__ import annotations

import asyncio
import struct
import time

from peers import in_turn, run_script, times

HOST = "127.0.0.1"
#: The first bytes from a client: mode, size of a message in bytes, number of messages.
HEAD = struct.Struct("!cIQ")
ECHO, BULK = b"e", b"b"
#: Buffer size of the streams: with the default of 64 KiB, messages of 64 KiB and more take twice as long.
LIMIT = 1 << 21
#: Number of messages by size in bytes, at full effort.
MESSAGES = {4096: 50_000, 65536: 20_000, 1 << 20: 3000}


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        mode, size, count = HEAD.unpack(await reader.readexactly(HEAD.size))
        if mode == ECHO:
            for _ in range(count):
                writer.write(await reader.readexactly(size))
        elif mode == BULK:
            # Reading whatever is available is fastest, and a stream has no message boundaries to preserve.
            left = size * count
            while left and (data := await reader.read(min(left, LIMIT))):
                left -= len(data)
            writer.write(b"!")
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # a client that only connects
    finally:
        writer.close()


async def serve() -> None:
    server = await asyncio.start_server(handle, HOST, 0, limit=LIMIT, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def half_round_trip(port: int, size: int, count: int) -> float:
    """Return half the round-trip time in microseconds."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=LIMIT)
    warm = count // 10
    writer.write(HEAD.pack(ECHO, size, warm + count))
    message = bytes(size)
    started = 0.0
    for i in range(warm + count):
        if i == warm:
            started = time.perf_counter()
        writer.write(message)
        await reader.readexactly(size)
    elapsed = time.perf_counter() - started
    writer.close()
    return elapsed / count / 2 * 1e6


async def bandwidth(port: int, size: int, count: int) -> float:
    """Return the bandwidth in GB/s (10^9 bytes per second)."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=LIMIT)
    message = bytes(size)
    started = time.perf_counter()
    writer.write(HEAD.pack(BULK, size, count))
    for _ in range(count):
        writer.write(message)
        await writer.drain()
    await reader.readexactly(1)
    elapsed = time.perf_counter() - started
    writer.close()
    return size * count / elapsed / 1e9


async def connections(port: int, count: int) -> dict[str, float]:
    """Open and close connections one after the other."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        _, writer = await asyncio.open_connection(HOST, port)
        writer.close()
        await writer.wait_closed()
        seconds.append(time.perf_counter() - started)
    return in_turn(seconds)


async def figures(port: int, effort: float) -> dict[str, object]:
    return {
        "half_round_trip_us": await half_round_trip(port, 64, times(10_000, effort)),
        "bandwidth": {"send": {size: await bandwidth(port, size, times(n, effort)) for size, n in MESSAGES.items()}},
        "connections": await connections(port, times(3000, effort)),
    }


if __name__ == "__main__":
    run_script(lambda: asyncio.run(serve()), lambda port, effort: asyncio.run(figures(port, effort)))
