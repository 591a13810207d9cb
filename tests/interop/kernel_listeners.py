"""Listeners on a device of the kernel that is removed: each wait for a connection ends, and so do the connections.

python3 -m interop.kernel_listeners
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
from collections.abc import Awaitable

from rdmacm import CmId, aio, connect, devices, listen
from rdmacm.address import SockAddr
from support.clock import eventually

HERE = "10.0.0.1"
PORT = 7520
#: Seconds.
PATIENCE = 10


async def ended(wait: Awaitable[object], code: int, text: str) -> None:
    """Fail unless the wait ends with this errno and text."""
    found: OSError | None = None
    try:
        await asyncio.wait_for(wait, PATIENCE)
    except OSError as error:
        found = error
    assert found is not None
    assert found.errno == code, found
    assert text in str(found), found


async def remove() -> None:
    process = await asyncio.create_subprocess_exec("rdma", "link", "delete", "rxe0")
    assert await asyncio.wait_for(process.wait(), PATIENCE) == 0


async def serve(_: aio.AsyncConnection) -> None:
    raise AssertionError("no client")


async def every_wait_ends() -> None:
    def at(number: int) -> SockAddr:
        return HERE, PORT + number

    blocking = listen(at(0), provider="kernel"), listen(at(1), provider="kernel")
    listener = await aio.listen(at(2), provider="kernel")
    server = await aio.start_server(serve, HERE, PORT + 3, provider="kernel")
    cmid = CmId(provider="kernel")
    cmid.bind_addr(at(4))
    cmid.listen()
    others = listen(("", PORT + 5), provider="kernel")
    connecting = asyncio.create_task(aio.connect(at(2), provider="kernel"))
    accepted, connected = await listener.accept(), await connecting
    waits: list[tuple[Awaitable[object], int, str]] = [
        (asyncio.to_thread(blocking[0].accept, PATIENCE), errno.ENODEV, "rxe0 was removed"),
        (asyncio.to_thread(blocking[1].get_request, PATIENCE), errno.ENODEV, "rxe0 was removed"),
        (listener.accept(), errno.ENODEV, "rxe0 was removed"),
        (server.serve_forever(), errno.ENODEV, "rxe0 was removed"),
        (asyncio.to_thread(cmid.get_request, PATIENCE), errno.ENODEV, "rxe0 was removed"),
        (accepted.recv(), errno.ECONNRESET, "removed"),
        (connected.recv(), errno.ECONNRESET, "removed"),
    ]
    tasks = [asyncio.create_task(ended(*wait)) for wait in waits]
    await asyncio.sleep(0.1)  # the threads wait; a call that begins later ends the same
    await asyncio.gather(remove(), *tasks)
    assert not server.is_serving()
    for connection in (accepted, connected):
        await connection.close()
    for each in (*blocking, listener):
        each.close()
    cmid.destroy()
    restore()
    with others:  # a wildcard address is of no device
        accepting = asyncio.create_task(asyncio.to_thread(others.accept, PATIENCE))
        with await asyncio.to_thread(connect, at(5), provider="kernel", timeout=PATIENCE), await accepting:
            pass


def restore() -> None:
    subprocess.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "va"], check=True)
    eventually(has_gids, "the GIDs come a moment later")


def has_gids() -> bool:
    rows = [row for device in devices("kernel") for port in device.ports for row in port.gids]
    return len({len(row.gid.ip) for row in rows if not str(row.gid).startswith("fe80")}) == 2


if __name__ == "__main__":
    asyncio.run(every_wait_ends())
    print("as expected")
