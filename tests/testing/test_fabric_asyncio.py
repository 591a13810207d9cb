"""asyncio on a fabric: an event loop in virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import rdmacm
from rdmacm import aio
from rdmacm.testing import Fabric, SimulationError
from support.fabric import two

PORT = 7471


async def reverse(connection: aio.AsyncConnection) -> None:
    async for message in connection:
        await connection.send(message[::-1])


async def ask(provider: rdmacm.testing.host.SimProvider | None, text: bytes) -> bytes:
    async with await aio.connect(("10.0.0.2", PORT), timeout=60, provider=provider) as connection:
        await connection.send(text)
        return await connection.recv()


def test_clients_and_a_server() -> None:
    fabric = Fabric(seed=1)
    a, b = two(fabric)

    async def main() -> list[bytes]:
        async with await aio.start_server(reverse, "10.0.0.2", PORT, provider=b.provider):
            return await asyncio.gather(*(ask(a.provider, text) for text in (b"live", b"stressed")))

    assert fabric.run(main()) == [b"evil", b"desserts"]
    assert 0 < fabric.now < 1


def test_the_default_host_of_a_task() -> None:
    fabric = Fabric(seed=1)
    a, b = two(fabric)

    async def serve() -> None:
        async with await aio.listen(("10.0.0.2", PORT)) as listener, await listener.accept() as connection:
            await reverse(connection)

    async def main() -> bytes:
        with b.as_default():
            server = asyncio.create_task(serve())
        await asyncio.sleep(0)
        with a.as_default():
            answer = await asyncio.create_task(ask(None, b"live"))
        await server
        return answer

    assert fabric.run(main()) == b"evil"
    assert {entry.packet.source for entry in fabric.log} == {"a", "b"}


def test_sleeps_and_timeouts_take_virtual_time() -> None:
    fabric = Fabric()
    _, b = two(fabric)

    async def main() -> list[float]:
        await asyncio.sleep(3600)
        times = [fabric.now, asyncio.get_running_loop().time()]
        async with await aio.listen(("10.0.0.2", PORT), provider=b.provider) as listener:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await listener.accept()
        return [*times, fabric.now]

    assert fabric.run(main()) == [3600, 3600, pytest.approx(3600.5)]


def test_a_task_that_polls_lets_time_pass() -> None:
    fabric = Fabric()

    async def main() -> None:
        while fabric.now < 1:
            await asyncio.sleep(0)

    fabric.run(main())
    assert fabric.now >= 1


def test_a_function_of_an_executor_waits_in_virtual_time() -> None:
    fabric = Fabric()
    a, b = two(fabric)

    def blocking() -> bytes:
        with rdmacm.connect(("10.0.0.2", PORT), provider=a.provider) as connection:
            connection.send(b"live")
            return connection.recv()

    async def main() -> bytes:
        async with await aio.start_server(reverse, "10.0.0.2", PORT, provider=b.provider):
            with pytest.raises(ZeroDivisionError):
                await asyncio.to_thread(lambda: 1 // 0)
            return await asyncio.to_thread(blocking)

    assert fabric.run(main()) == b"evil"


def test_waiting_for_ever_names_the_task() -> None:
    fabric = Fabric()
    _, b = two(fabric)

    async def hopeless() -> None:
        async with await aio.listen(("10.0.0.2", PORT), provider=b.provider) as listener:
            await listener.accept()

    async def main() -> None:
        await asyncio.create_task(hopeless(), name="the server")

    with pytest.raises(SimulationError, match=r"asyncio waits for ever.*the server in .*test_fabric_asyncio"):
        fabric.run(main())


def test_an_event_loop_in_real_time_is_refused() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    with pytest.raises(SimulationError, match=r"real time; try: fabric\.run"):
        asyncio.run(ask(a.provider, b""))


def test_a_coroutine_does_not_run_the_fabric_itself() -> None:
    fabric = Fabric()
    a, _ = two(fabric)

    async def main() -> str:
        for run in (lambda: fabric.run(seconds=1), lambda: fabric.run(asyncio.sleep(1)), program.result):
            with pytest.raises(SimulationError, match=r"tasks .* would stop .*; try: await asyncio\.sleep"):
                run()
        return await asyncio.to_thread(program.result)

    program = a.start(str, 1)
    assert fabric.run(main()) == "1"


def test_a_handler_may_wait_while_an_event_loop_does() -> None:
    fabric = Fabric()

    async def main() -> float:
        fabric.call_at(1, lambda: fabric.run(seconds=1))
        await asyncio.sleep(1.5)
        return fabric.now

    assert fabric.run(main()) == 2


def test_what_a_task_raises() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    with pytest.raises(rdmacm.CmTimeoutError, match="not connected within 60 s"):
        fabric.run(ask(a.provider, b""))
    assert fabric.now == 60


@pytest.mark.parametrize("seed", range(10))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    def run() -> tuple[str, str]:
        fabric = Fabric(seed, loss=0.2)
        a, b = two(fabric)

        async def client(number: int) -> bytes | None:
            with contextlib.suppress(rdmacm.RdmaError):
                return await ask(a.provider, b"%d live" % number)
            return None

        async def main() -> list[bytes | None]:
            async with await aio.start_server(reverse, "10.0.0.2", PORT, provider=b.provider) as server:
                answers = await asyncio.gather(*map(client, range(5)))
                server.close_clients()
                return answers

        return str(fabric.run(main())), fabric.log.to_text()

    assert run() == run()
