"""Cost of name and address resolution, compared with the socket module in the same run.

    python3 dev.py bench [--json] [--rounds N]

Every figure is the median of several rounds that alternate between the contestants, so that noise on the machine
affects all of them. Destinations are on this machine; nothing is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import rdmacm
from rdmacm import CmId, EventChannel, PortSpace, RaiFlag

SERVICE = "7471"


def per_call(work: Callable[[], object], count: int) -> float:
    """Return the microseconds of one call."""
    started = time.perf_counter_ns()
    for _ in range(count):
        work()
    return (time.perf_counter_ns() - started) / count / 1000


def contest(contestants: dict[str, Callable[[], object]], rounds: int, count: int) -> dict[str, float]:
    """Return the median microseconds of each contestant, run in alternation."""
    times: dict[str, list[float]] = defaultdict(list)
    for work in contestants.values():
        per_call(work, 100)
    for _ in range(rounds):
        for name, work in contestants.items():
            times[name].append(per_call(work, count))
    return {name: statistics.median(samples) for name, samples in times.items()}


def full_resolution(channel: EventChannel, steps: dict[str, list[float]] | None = None) -> None:
    """Create an id, resolve address and route with events on a channel, and destroy the id.

    ``steps`` collects the microseconds of each step.
    """
    clock = time.perf_counter_ns
    t0 = clock()
    cmid = CmId(channel, PortSpace.TCP)
    t1 = clock()
    cmid.resolve_addr(("127.0.0.1", 7471))
    t2 = clock()
    channel.get_event().ack()
    t3 = clock()
    cmid.resolve_route()
    t4 = clock()
    channel.get_event().ack()
    t5 = clock()
    if steps is not None:
        for step in cmid.steps:
            steps[f"  in resolve: {step.name}"].append(step.microseconds)
    t6 = clock()
    cmid.destroy()
    t7 = clock()
    if steps is not None:
        named = zip(
            ("create_id", "resolve_addr", "ADDR_RESOLVED", "resolve_route", "ROUTE_RESOLVED", "", "destroy_id"),
            (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4, 0, t7 - t6),
            strict=True,
        )
        for name, nanoseconds in named:
            if name:
                steps[name].append(nanoseconds / 1000)


def concurrent(channel: EventChannel, count: int) -> float:
    """Return the full resolutions per second with ``count`` ids at a time."""
    started = time.perf_counter()
    ids = [CmId(channel, PortSpace.TCP) for _ in range(count)]
    for cmid in ids:
        cmid.resolve_addr(("127.0.0.1", 7471))
    for _ in range(2 * count):
        with channel.get_event() as event:
            if event.type is rdmacm.CmEventType.ADDR_RESOLVED:
                event.id.resolve_route()
    for cmid in ids:
        cmid.destroy()
    return count / (time.perf_counter() - started)


#: What a program imports, and what is imported with it when it resolves an address, and when it connects.
IMPORTS = {
    "import_ms": "import rdmacm",
    "import_to_resolve_ms": "from rdmacm import CmId, getaddrinfo; import rdmacm.soft",
    "import_to_connect_ms": "from rdmacm import connect; import rdmacm.soft",
}


def import_times(rounds: int) -> dict[str, float]:
    """Return the milliseconds that :data:`IMPORTS` add to the start of an interpreter (medians, in alternation)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    times: dict[str, list[float]] = {code: [] for code in ("", *IMPORTS.values())}
    for _ in range(rounds):
        for code, samples in times.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], env=environment, check=True)
            samples.append((time.perf_counter() - started) * 1000)
    bare = statistics.median(times[""])
    return {name: statistics.median(times[code]) - bare for name, code in IMPORTS.items()}


def contest_lookups(rounds: int) -> dict[str, float]:
    """Return the median microseconds of rdmacm's and of the socket module's lookups."""
    tcp = {"port_space": PortSpace.TCP}
    stream = {"type": socket.SOCK_STREAM}
    return contest(
        {
            "getaddrinfo numeric, with route": lambda: rdmacm.getaddrinfo("127.0.0.1", SERVICE, **tcp),
            "getaddrinfo numeric, NOROUTE": lambda: rdmacm.getaddrinfo(
                "127.0.0.1", SERVICE, flags=RaiFlag.NOROUTE, **tcp
            ),
            "socket.getaddrinfo numeric": lambda: socket.getaddrinfo("127.0.0.1", SERVICE, **stream),
            "getaddrinfo localhost, with route": lambda: rdmacm.getaddrinfo("localhost", SERVICE, **tcp),
            "socket.getaddrinfo localhost": lambda: socket.getaddrinfo("localhost", SERVICE, **stream),
        },
        rounds,
        2000,
    )


def main() -> int:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each contest (7)")
    options = parser.parse_args()
    rounds = max(1, options.rounds)

    lookups = contest_lookups(rounds)
    steps: dict[str, list[float]] = defaultdict(list)
    with EventChannel() as channel:
        serial = contest({"full": lambda: full_resolution(channel)}, rounds, 2000)["full"]
        for _ in range(2000):
            full_resolution(channel, steps)
        rate = statistics.median(concurrent(channel, 10_000) for _ in range(3))
    medians = {name: statistics.median(samples) for name, samples in steps.items()}
    imported = import_times(max(5, rounds))

    if options.json:
        print(
            json.dumps(
                {
                    "lookups_us": lookups,
                    "full_resolution_us": serial,
                    "full_resolutions_per_second": 1e6 / serial,
                    "concurrent_resolutions_per_second": rate,
                    "steps_us": {name.strip(): value for name, value in medians.items()},
                    **imported,
                }
            )
        )
        return 0
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs; medians of {rounds} alternating rounds\n")
    print("names and numbers                              us a call")
    for name, value in lookups.items():
        print(f"  {name:<42}{value:>10.1f}")
    for kind in ("numeric", "localhost"):
        ours = lookups[f"getaddrinfo {kind}, with route"]
        print(f"  time of rdmacm / socket, {kind:<17}{ours / lookups[f'socket.getaddrinfo {kind}']:>10.1f}x")
    print("\ncreate, resolve_addr, resolve_route, destroy, one at a time")
    print(f"  {'a full resolution':<42}{serial:>10.1f}")
    print(f"  {'full resolutions per second':<42}{1e6 / serial:>10.0f}")
    print(f"  {'per second, 10,000 ids at a time':<42}{rate:>10.0f}")
    for name, value in medians.items():
        print(f"    {name:<40}{value:>10.1f}")
    print("\nimports over a bare interpreter                ms")
    for name, value in imported.items():
        print(f"  {IMPORTS[name]:<64}{value:>10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
