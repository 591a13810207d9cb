"""Latency, bandwidth and connection rate between two processes on loopback: rdmacm and its peers in the same run.

    python3 dev.py bench peers [--json] [--rounds N] [--effort X] [--against PEER] [--write] [PEER...]

The peers run in alternating rounds, and the table has their medians. "rdmacm" is this library. "sockets" is plain UDP
and TCP in Python, the limit of what any library in Python reaches on the machine. The figures are microseconds of half
a round trip of 64 bytes, GB/s (10^9 bytes per second) by size of a message, and connections opened and closed one after
the other. "ping-pong" is the bandwidth with one outstanding message, the only mode of fi_pingpong; "send", "write" and
"read" keep many messages outstanding. In brackets: how many times as good as the peer of --against, 0.5x is half as
good.

"messages/s" is the rate of messages of 64 bytes in one direction, each posted by a call of its own, or 16 by one call.
Connections of libfabric and UCX need gcc and their headers, as programs in C open them: a connection ends once it is
established (libfabric), or with the first byte from the server (UCX, sockets).
--write puts the table into docs/performance.md.

Nothing is installed: for a missing peer, the command that installs it is reported.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import re
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
OURS = "rdmacm"
HOST = "127.0.0.1"
SMALL = 64
SIZES = (4096, 65536, 1 << 20)
#: Connections under way at once, where they are not opened one after the other.
AT_ONCE = 64
OPERATIONS = ("send", "write", "read", "ping-pong")
#: Maximum run time of a process, in seconds.
TIMEOUT = 60.0
#: Maximum time until a server accepts clients, in seconds.
START = 10.0


BEGIN, END = "<!-- peers: made by python3 dev.py bench peers --write -->", "<!-- peers: end -->"


class PeerError(RuntimeError):
    """A peer failed, or its output could not be parsed."""


@dataclass(frozen=True)
class Connections:
    """Connections opened and closed one after the other."""

    per_second: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True)
class Figures:
    """The figures of a peer."""

    #: Half a round trip of 64 bytes in microseconds.
    half_round_trip_us: float | None = None
    #: GB/s by operation and size of a message in bytes.
    bandwidth: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    connections: Connections | None = None
    #: Half a round trip in microseconds, with both ends sleeping while they wait.
    half_round_trip_asleep_us: float | None = None
    #: Messages of 64 bytes a second in one direction, many outstanding: "one by one", and "in lists".
    messages: Mapping[str, float] = field(default_factory=dict)
    #: Connections opened and closed a second, AT_ONCE under way.
    connections_at_once: float | None = None
    #: Times of the steps of a connection, by name: "p50_us" and "p99_us".
    steps: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    #: What could not be measured, and why.
    lacking: str | None = None

    @classmethod
    def from_json(cls, text: str) -> Figures:
        """Parse the figures that a script of this directory printed; raises PeerError for anything else."""
        try:
            found = json.loads(text)
            bandwidth = found.get("bandwidth", {})
            return cls(
                found.get("half_round_trip_us"),
                {name: {int(size): value for size, value in sizes.items()} for name, sizes in bandwidth.items()},
                Connections(**found["connections"]) if found.get("connections") else None,
                found.get("half_round_trip_asleep_us"),
                found.get("messages", {}),
                found.get("connections_at_once"),
                found.get("steps", {}),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise PeerError(f"no figures ({error}) in {text[:200]!r}") from error


@dataclass(frozen=True)
class Missing:
    """A peer that could not be measured."""

    reason: str
    #: The command that installs it, if it is not installed.
    install: str | None = None

    def __str__(self) -> str:
        return self.reason + (f"; to install it: {self.install}" if self.install else "")


#: Measures a peer. The argument is the effort: the share of the usual number of iterations.
Measure: TypeAlias = Callable[[float], Figures]


@dataclass(frozen=True)
class Peer:
    """One contestant. ``program`` must be on the PATH, if it is not None; Debian's ``package`` has it."""

    name: str
    measure: Measure
    program: str | None = None
    package: str | None = None
    #: A command that prints the version.
    version: Sequence[str] = ()

    def missing(self) -> Missing | None:
        if self.program is None or shutil.which(self.program):
            return None
        install = f"apt-get install -y --no-install-recommends {self.package}" if self.package else None
        return Missing(f"{self.program} is not installed", install)


# --- processes ----------------------------------------------------------------------------------------------


@contextmanager
def serving(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a server for the duration of the block."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def serving_port(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a server for the duration of the block; yield the port that it prints."""
    with serving(command, environ) as server:
        assert server.stdout is not None
        if not select.select([server.stdout], [], [], START)[0]:
            raise PeerError(f"{' '.join(command)}: the server has not printed its port within {START:.0f} s")
        port = server.stdout.readline().strip()
        if not port.isdigit():
            raise PeerError(f"{' '.join(command)}: the server ended without its port: {port}")
        yield port


def client(command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Run a client to its end and return its output."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{command[0]}: still running after {TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise PeerError(f"{command[0]}: exit {done.returncode}: {lines[-1]}")
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def await_listener(process: subprocess.Popen[str], port: int) -> None:
    """Wait until a process listens on a TCP port.

    This reads the kernel's table: a test connection would take the place of the only client that the server expects.
    """
    listening = re.compile(rf":{port:04X} \w+:0000 0A ")
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
    limit = time.monotonic() + START
    while not any(listening.search(table.read_text()) for table in tables):
        if process.poll() is not None:
            lines = process.communicate()[0].strip().splitlines() or ["no message"]
            raise PeerError(f"the server ended with {process.returncode}: {lines[-1]}")
        if time.monotonic() > limit:
            raise PeerError(f"the server does not listen on port {port}")
        time.sleep(0.005)


def times(count: int, effort: float) -> int:
    return max(10, round(count * effort))


# --- connections of libraries in C ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program in C beside this one. ``serve`` prints its port; ``measure PORT COUNT`` prints figures as JSON."""

    source: str
    libraries: Sequence[str]
    #: Debian's package of the headers.
    package: str
    environ: Mapping[str, str] = field(default_factory=dict)


@cache
def _directory() -> str:
    made = tempfile.mkdtemp(prefix="rdmacm-bench-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@cache
def built(source: str, *libraries: str) -> str | None:
    """Build a program; return its path, or None if that fails."""
    path = os.path.join(_directory(), source.removesuffix(".c"))
    command = ["gcc", "-std=gnu11", "-O2", "-o", path, str(HERE / source), *libraries]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return None
    return None if done.returncode else path


def with_connections(figures: Figures, program: Program, effort: float) -> Figures:
    """Add the figures for connections, if the program can be built."""
    path = built(program.source, *program.libraries)
    if path is None:
        install = f"apt-get install -y --no-install-recommends gcc libc6-dev {program.package}"
        return replace(figures, lacking=f"no connections: {program.source} cannot be built; to build it: {install}")
    with serving_port([path, "serve"], program.environ) as port:
        count = str(times(LIBRARY_CONNECTIONS, effort))
        found = Figures.from_json(client([path, "measure", port, count], program.environ))
    return replace(figures, connections=found.connections, connections_at_once=found.connections_at_once)


#: Connections one after the other, and as many with several at once.
LIBRARY_CONNECTIONS = 2000
UCX_ENVIRON = {"UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error"}
LIBFABRIC = Program("libfabric_connections.c", ("-lfabric",), "libfabric-dev")
UCX = Program("ucx_connections.c", ("-lucp", "-lucs"), "libucx-dev", {**UCX_ENVIRON, "UCX_TLS": "tcp"})


# --- fi_pingpong --------------------------------------------------------------------------------------------

#: Iterations by size in bytes; the smallest size is for the round trip.
FABRIC_ITERATIONS = {SMALL: 10_000, 4096: 5000, 65536: 1000, 1 << 20: 100}


def parse_fi_pingpong(output: str) -> float:
    """Return half the round-trip time in microseconds."""
    # bytes #sent #ack total time MB/sec usec/xfer Mxfers/sec
    rows = [line.split() for line in output.splitlines() if line[:1].isdigit()]
    if len(rows) != 1 or len(rows[0]) != 8:
        raise PeerError(f"fi_pingpong printed {output!r}")
    return float(rows[0][6])


def fi_transfer(provider: str, endpoint: str, size: int, iterations: int) -> float:
    """Return half the round-trip time of fi_pingpong in microseconds."""
    port = str(free_port())
    options = ["-p", provider, "-e", endpoint, "-I", str(iterations), "-S", str(size)]
    with serving(["fi_pingpong", "-B", port, *options]) as server:
        await_listener(server, int(port))
        return parse_fi_pingpong(client(["fi_pingpong", "-P", port, *options, HOST]))


def fi_pingpong(provider: str, endpoint: str, program: Program | None = None) -> Measure:
    def transfer(size: int, effort: float) -> float:
        return fi_transfer(provider, endpoint, size, times(FABRIC_ITERATIONS[size], effort))

    def measure(effort: float) -> Figures:
        latency = transfer(SMALL, effort)
        found = Figures(latency, {"ping-pong": {size: size / transfer(size, effort) / 1e3 for size in SIZES}})
        return found if program is None else with_connections(found, program, effort)

    return measure


# --- ucx_perftest -------------------------------------------------------------------------------------------

#: The test for each operation, and the number of outstanding operations (0: no limit). A side that only waits makes
#: progress once a millisecond; with too few outstanding reads, or too many writes, only that delay would be measured.
UCX_TESTS = {"send": ("tag_bw", 0), "write": ("ucp_put_bw", 16), "read": ("ucp_get", 64)}
UCX_ITERATIONS = {SMALL: 20_000, 4096: 20_000, 65536: 2000, 1 << 20: 200}


def parse_ucx_perftest(output: str) -> tuple[float, float]:
    """Return the microseconds per message, and the bandwidth in GB/s."""
    # iterations,percentile,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr; bandwidth in MiB/s
    rows = [line.split(",") for line in output.splitlines() if re.match(r" *\d+,", line)]
    if len(rows) != 1 or len(rows[0]) != 8:
        raise PeerError(f"ucx_perftest printed {output!r}")
    return float(rows[0][3]), float(rows[0][5]) * (1 << 20) / 1e9


def ucx_transfer(transports: str, test: str, iterations: int, under_way: int, *options: str) -> tuple[float, float]:
    """Run a test of ucx_perftest; return what parse_ucx_perftest() finds."""
    environ = {**UCX_ENVIRON, "UCX_TLS": transports}
    port = str(free_port())
    numbers = ["-n", str(iterations), "-w", str(max(1, iterations // 10)), "-O", str(under_way)]
    with serving(["ucx_perftest", "-p", port], environ) as server:
        await_listener(server, int(port))
        return parse_ucx_perftest(
            client(["ucx_perftest", HOST, "-p", port, "-t", test, *numbers, *options, "-f", "-v"], environ)
        )


def ucx_perftest(transports: str, program: Program) -> Measure:
    def run(test: str, under_way: int, size: int, effort: float) -> tuple[float, float]:
        return ucx_transfer(transports, test, times(UCX_ITERATIONS[size], effort), under_way, "-s", str(size))

    def measure(effort: float) -> Figures:
        found = Figures(
            run("tag_lat", 0, SMALL, effort)[0],
            {name: {size: run(*test, size, effort)[1] for size in SIZES} for name, test in UCX_TESTS.items()},
            messages={"one by one": 1e6 / run("tag_bw", 0, SMALL, 5 * effort)[0]},
        )
        return with_connections(found, program, effort)

    return measure


# --- scripts beside this one --------------------------------------------------------------------------------


@contextmanager
def serving_script(name: str, *arguments: str) -> Iterator[str]:
    """Run a script beside this one as a server, for the duration of the block; yield the port that it prints."""
    with serving_port([sys.executable, str(HERE / name), *arguments]) as port:
        yield port


def script(name: str) -> Measure:
    """A peer that is a script: ``NAME serve`` prints its port, ``NAME measure PORT EFFORT`` the figures as JSON."""
    command = [sys.executable, str(HERE / name)]

    def measure(effort: float) -> Figures:
        with serving_script(name, "serve") as port:
            return Figures.from_json(client([*command, "measure", port, str(effort)]))

    return measure


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and 99th percentile in microseconds."""
    ordered = sorted(seconds)
    return {"p50_us": ordered[len(ordered) // 2] * 1e6, "p99_us": ordered[len(ordered) * 99 // 100] * 1e6}


def in_turn(seconds: Sequence[float]) -> dict[str, float]:
    """Return the fields of :class:`Connections` from the time of each connection."""
    return {"per_second": len(seconds) / sum(seconds), **quantiles(seconds)}


def run_script(serve: Callable[[], None], measure: Callable[[int, float], Mapping[str, object]]) -> None:
    """Run such a script. ``measure`` gets the server's port and the effort, and returns the figures."""
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(measure(int(sys.argv[2]), float(sys.argv[3]))))


UCX_TCP = Peer("ucx-tcp", ucx_perftest("tcp", UCX), "ucx_perftest", "ucx-utils", ("ucx_info", "-v"))
PEERS = (
    Peer(OURS, script("ours.py")),
    Peer("sockets", script("sockets.py")),
    Peer("asyncio", script("asyncio_streams.py")),
    Peer("rsocket", script("rsockets.py")),
    Peer("fi-udp-rxd", fi_pingpong("udp;ofi_rxd", "rdm"), "fi_pingpong", "libfabric-bin", ("fi_info", "--version")),
    Peer("fi-tcp", fi_pingpong("tcp", "msg", LIBFABRIC), "fi_pingpong", "libfabric-bin", ("fi_info", "--version")),
    UCX_TCP,
)


# --- rounds -------------------------------------------------------------------------------------------------


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over all rounds."""
    first = rounds[0]
    latencies = [one.half_round_trip_us for one in rounds if one.half_round_trip_us is not None]
    asleep = [one.half_round_trip_asleep_us for one in rounds if one.half_round_trip_asleep_us is not None]
    connections = [one.connections for one in rounds if one.connections is not None]
    at_once = [one.connections_at_once for one in rounds if one.connections_at_once is not None]
    return Figures(
        statistics.median(latencies) if latencies else None,
        {
            name: {size: statistics.median(one.bandwidth[name][size] for one in rounds) for size in sizes}
            for name, sizes in first.bandwidth.items()
        },
        Connections(
            statistics.median(one.per_second for one in connections),
            statistics.median(one.p50_us for one in connections),
            statistics.median(one.p99_us for one in connections),
        )
        if connections
        else None,
        statistics.median(asleep) if asleep else None,
        {name: statistics.median(one.messages[name] for one in rounds) for name in first.messages},
        statistics.median(at_once) if at_once else None,
        {
            name: {key: statistics.median(one.steps[name][key] for one in rounds) for key in values}
            for name, values in first.steps.items()
        },
        first.lacking,
    )


def contest(peers: Sequence[Peer], rounds: int, effort: float) -> dict[str, Figures | Missing]:
    """Measure all peers in alternating rounds. A peer that fails is skipped from then on."""
    outcome: dict[str, Figures | Missing] = {}
    measured: dict[str, list[Figures]] = {}
    for peer in peers:
        if missing := peer.missing():
            outcome[peer.name] = missing
        else:
            measured[peer.name] = []
    for number in range(rounds):
        for peer in peers:
            if peer.name in outcome:
                continue
            print(f"round {number + 1} of {rounds}: {peer.name}", file=sys.stderr)
            try:
                measured[peer.name].append(peer.measure(effort))
            except PeerError as error:
                outcome[peer.name] = Missing(str(error))
    return {peer.name: outcome.get(peer.name) or medians(measured[peer.name]) for peer in peers}


def version_of(peer: Peer) -> str | None:
    if not peer.version or not shutil.which(peer.version[0]):
        return None
    try:
        found = re.search(r"\d+(\.\d+)+", client(peer.version))
    except PeerError:
        return None
    return found[0] if found else None


# --- output -------------------------------------------------------------------------------------------------


def size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def rows() -> Iterator[tuple[str, Callable[[Figures], float | None], bool]]:
    """The rows of the table: title, a function that returns the number, and whether larger is better."""
    yield f"{SMALL} B half round trip, us", lambda figures: figures.half_round_trip_us, False
    yield "the same, sleeping, us", lambda figures: figures.half_round_trip_asleep_us, False
    for name in OPERATIONS:
        for size in SIZES:

            def value(figures: Figures, name: str = name, size: int = size) -> float | None:
                return figures.bandwidth.get(name, {}).get(size)

            yield f"{name} {size_text(size)}, GB/s", value, True
    for name in ("one by one", "in lists"):

        def rate(figures: Figures, name: str = name) -> float | None:
            return figures.messages.get(name)

        yield f"{SMALL} B messages/s {name}", rate, True
    yield "connections per second", lambda f: f.connections.per_second if f.connections else None, True
    yield "connection p50, us", lambda f: f.connections.p50_us if f.connections else None, False
    yield "connection p99, us", lambda f: f.connections.p99_us if f.connections else None, False
    yield f"the same, {AT_ONCE} at once", lambda f: f.connections_at_once, True


def number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def table(outcome: Mapping[str, Figures | Missing], against: str | None = None) -> str:
    """Format the peers side by side. In brackets: how many times as good as the peer ``against`` each one is."""
    found = {name: figures for name, figures in outcome.items() if isinstance(figures, Figures)}
    base = found.get(against or "")
    lines = []
    if found:
        if base is not None and len(found) > 1:
            lines.append(f"In brackets: the speed as a multiple of that of {against}; larger is better.")
        lines.append(" " * 26 + "".join(f"{name:>18}" for name in found))
    for title, value, more_is_better in rows():
        cells = []
        for figures in found.values():
            number, other = value(figures), base and value(base)
            text = "-" if number is None else number_text(number)
            if number and other and figures is not base:
                text += f" ({number / other if more_is_better else other / number:.2f}x)"
            cells.append(text)
        if any(cell != "-" for cell in cells):
            lines.append(f"{title:<26}" + "".join(f"{cell:>18}" for cell in cells))
    for name, figures in found.items():
        for step, values in figures.steps.items():
            lines.append(f"{name} {step}: p50 {values['p50_us']:.1f} us, p99 {values['p99_us']:.1f} us")
    lines += [f"{name}: {figures.lacking}" for name, figures in found.items() if figures.lacking]
    for name, missing in outcome.items():
        if isinstance(missing, Missing):
            lines.append(f"{name}: {missing}")
    return "\n".join(lines)


def compared(outcome: Mapping[str, Figures | Missing]) -> Iterator[tuple[str, str, Mapping[str, tuple[float, float]]]]:
    """For each row that we have: its title, our figure, and each peer's figure and our speed as a multiple of its."""
    found = {name: figures for name, figures in outcome.items() if isinstance(figures, Figures)}
    for title, value, more_is_better in rows():
        ours = value(found[OURS])
        if ours:
            ratios = {}
            for name, figures in found.items():
                theirs = value(figures)
                if theirs and name != OURS:
                    ratios[name] = theirs, ours / theirs if more_is_better else theirs / ours
            yield title, number_text(ours), ratios


def markdown(outcome: Mapping[str, Figures | Missing], rounds: int) -> str:
    """The table for docs/performance.md."""
    from rdmacm.proto import core_choice

    names = [name for name, figures in outcome.items() if isinstance(figures, Figures) and name != OURS]
    lines = [
        f"On {time.strftime('%-d %B %Y')}, Python {platform.python_version()}, {os.cpu_count()} processors,",
        f"{core_choice.description()}; medians of {rounds} rounds in turn. In brackets: our speed as a",
        "multiple of the peer's.",
        "",
        f"| | {OURS} | " + " | ".join(names) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for title, ours, ratios in compared(outcome):
        cells = [f"{number_text(ratios[name][0])} ({ratios[name][1]:.2f})" if name in ratios else "" for name in names]
        lines.append(f"| {title} | {ours} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def written(outcome: Mapping[str, Figures | Missing], rounds: int) -> None:
    """Put the table into its page."""
    sys.path.insert(0, str(PROJECT / "tests"))
    from interop.table import inserted

    page = PROJECT / "docs" / "performance.md"
    page.write_text(inserted(page.read_text(), markdown(outcome, rounds), (BEGIN, END)))


def reference(outcome: Mapping[str, Figures | Missing]) -> str | None:
    """Return the peer to compare the others with: "sockets" if it was measured, otherwise the first that was."""
    measured = [name for name, figures in outcome.items() if isinstance(figures, Figures)]
    return "sockets" if "sockets" in measured else next(iter(measured), None)


def as_json(peers: Sequence[Peer], outcome: Mapping[str, Figures | Missing], rounds: int, effort: float) -> str:
    found: dict[str, Any] = {}
    for peer in peers:
        figures = outcome[peer.name]
        found[peer.name] = asdict(figures)
        if isinstance(figures, Figures) and (version := version_of(peer)):
            found[peer.name]["version"] = version
    return json.dumps({"machine": machine(), "rounds": rounds, "effort": effort, "peers": found})


def machine() -> dict[str, object]:
    return {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS]
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"only these: {', '.join(names)}")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    parser.add_argument("--effort", type=float, default=1.0, help="share of the usual iterations (1.0)")
    parser.add_argument("--write", action="store_true", help="write the table into the documents")
    parser.add_argument("--against", choices=names, help="compare the others with this peer (sockets)")
    options = parser.parse_args()
    if unknown := set(options.peers) - set(names):
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; known are {', '.join(names)}")
    if options.rounds < 1 or options.effort <= 0:
        parser.error("rounds and effort must be greater than 0")
    peers = [peer for peer in PEERS if not options.peers or peer.name in options.peers]
    outcome = contest(peers, options.rounds, options.effort)
    if options.write:
        if not isinstance(outcome.get(OURS), Figures):
            parser.error(f"--write needs {OURS}")
        written(outcome, options.rounds)
    if options.json:
        print(as_json(peers, outcome, options.rounds, options.effort))
    else:
        print(
            f"Python {platform.python_version()}, {os.cpu_count()} CPUs; medians of {options.rounds} rounds in turn\n"
        )
        print(table(outcome, options.against or reference(outcome)))
    return 0 if any(isinstance(figures, Figures) for figures in outcome.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
