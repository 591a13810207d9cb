"""Listeners and connections of the provider ``kernel`` on a device that is removed."""

from __future__ import annotations

from interop.scenario import Guest


def test_listeners_end_with_their_device(guest: Guest) -> None:
    """Blocking, asyncio, servers, synchronous ids; the one of a wildcard address goes on with the next device."""
    done = guest.run("rxe python3 -m interop.kernel_listeners", timeout=60, record=False)
    assert done.output.splitlines() == ["as expected"], done.output
