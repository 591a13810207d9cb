"""A thousand connections on unreliable networks, from connect to disconnect, each reproducible by its seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rdmacm.testing import Fabric
from support.life_cycles import live

SEEDS = 1000
BLOCK = 50


def lossy(seed: int) -> Fabric:
    return Fabric(seed, loss=0.1, duplicate=0.1, reorder=0.1)


def corrupting(seed: int) -> Fabric:
    return Fabric(seed, loss=0.05, duplicate=0.05, reorder=0.1, corrupt=0.1)


def slow(seed: int) -> Fabric:
    """Delays beyond the ACK timeout, one of two MTUs, no trains."""
    mtu = 4200 if seed % 2 else 400
    return Fabric(seed, loss=0.05, duplicate=0.2, reorder=0.2, reorder_delay=1.0, mtu=mtu, trains=False)


def live_through(network: Callable[[int], Fabric], seeds: range) -> None:
    for seed in seeds:
        try:
            live(network(seed))
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: {error}\nreplay: PYTHONPATH=src:tests:tests/conformance python -c "
                f"'import test_seeds as t; t.live(t.{network.__name__}({seed}))'"
            ) from error


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] * (first >= 2 * BLOCK)) for first in range(0, SEEDS, BLOCK)]
)
def test_all_bytes_arrive_despite_loss(first: int) -> None:
    live_through(lossy, range(first, first + BLOCK))


def test_all_bytes_arrive_despite_loss_and_corruption() -> None:
    live_through(corrupting, range(50))


def test_all_bytes_arrive_despite_very_late_packets() -> None:
    live_through(slow, range(50))


def test_same_seed_replays_the_same_packets() -> None:
    def run() -> list[tuple[float, str, int, int, str]]:
        fabric = lossy(7)
        live(fabric)
        # Not the bytes, which contain memory addresses of this process.
        packets = [(entry, entry.packet) for entry in fabric.log]
        return [
            (entry.time, packet.kind, packet.psn, len(entry.data), entry.outcome.value) for entry, packet in packets
        ]

    assert run() == run()
