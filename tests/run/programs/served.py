"""asyncio's echo server and clients, in one loop. Prints what was echoed, and whether it was by TCP."""

import asyncio

from support.run_command import has_tcp_socket

BIG = bytes(range(97, 123)) * 20_000 + b"\n"


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line.upper())
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def ask(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello\n")
    echoed = await reader.readline()
    writer.write(BIG)
    echoed += await reader.readexactly(len(BIG))
    writer.write_eof()
    echoed += await reader.read()
    writer.close()
    await writer.wait_closed()
    assert echoed == b"HELLO\n" + BIG.upper()
    return len(echoed)


async def main() -> None:
    async with await asyncio.start_server(echo, "127.0.0.1", 0, limit=1 << 20) as server:
        port = server.sockets[0].getsockname()[1]
        print(sum(await asyncio.gather(*(ask(port) for _ in range(3)))), "TCP" if has_tcp_socket() else "RDMA")


asyncio.run(main())
