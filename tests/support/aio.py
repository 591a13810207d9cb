"""Coroutines as tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a coroutine function as a test, at most for 40 seconds."""

    async def patiently() -> None:
        async with asyncio.timeout(40):
            await test()

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(patiently())

    return run
