"""rdmacm beside the kernel's device and the C tools, in the machine of the interop tests, in turn.

    python3 dev.py bench guest [--machine uml|qemu] [--rounds 3] [--connections 100] [--write]

Each device talks to itself, with a path MTU of 4096 and programs that sleep until something completes: rdma_rxe with
librdmacm's cmtime and rstream, ibv_rc_pingpong and perftest's ib_send_bw and ib_write_bw, our software device with
``rdmacm cmtime``, ``rdmacm rstream`` and ``rdmacm perf``, and rdma_rxe with these three. The table has the median of
the rounds for each figure, and our speed as a multiple of C's. ``--write`` writes it into docs/performance.md as well.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT / "tests"))

from interop.machine.cache import Unavailable  # noqa: E402
from interop.machine.choice import MACHINES  # noqa: E402
from interop.machine.run import Machine, MachineError  # noqa: E402
from interop.table import inserted, wrapped  # noqa: E402

#: Of the link, for a path MTU of 4096.
MTU = 4200
#: Seconds that a script may take.
TIMEOUT = 300
#: What librdmacm's cmtime calls its steps, and the steps of ours that do the same.
STEPS = {
    "create id": ("create id",),
    "resolve addr": ("resolve addr",),
    "resolve route": ("resolve route",),
    "create qp": ("create qp",),
    "connect": ("connect", "modify qp", "establish"),
    "disconnect": ("disconnect",),
    "destroy": ("destroy",),
}
RATE, LATENCY = "connections a second", "SEND of 64 bytes, half a round trip, µs"
#: Operation → the figure of its bandwidth.
BANDWIDTHS = {"send": "SEND of 1 MiB, MB/s", "write": "WRITE of 1 MiB, MB/s"}
STREAM = "rsocket, both ways in turn, MB/s"
#: Figures of which more is better.
RATES = (RATE, STREAM, *BANDWIDTHS.values())
#: 20 transfers of 1 MiB to the server and as many back, three times, in calls that block.
STREAMED = "-S 1048576 -C 20 -I 3 -T b"
#: Messages. ib_send_bw runs with each of two counts, see bandwidth_of_c().
LATENCY_MESSAGES, BANDWIDTH_MESSAGES = 2000, (20, 420)
MEBIBYTE = 1 << 20
BEGIN, END = "<!-- bench: made by python3 dev.py bench guest --write -->", "<!-- bench: end -->"

#: The time of a system call in µs, less the time of the loop.
SYSTEM_CALL = """
import os, time
def seconds(call, count=20_000):
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count
print(1e6 * (min(seconds(os.getppid) for _ in range(5)) - min(seconds(os.getpid.__hash__) for _ in range(5))))
"""

Figures = dict[str, float]
#: Runs a script in the machine; returns its output.
Run = Callable[[str], str]


class Failed(Exception):
    """A script failed. The message is its output."""


def connections_of_c(run: Run, count: int) -> Figures:
    output = run(
        f"serve_rxe cmtime -b $RXE4 -c {count}\n"
        # Its server does not end by itself.
        f"rxe cmtime -s $RXE4 -c {count} && kill $SERVER"
    )
    totals = {name.strip(): float(total) for name, total in re.findall(r"^([\w ]+):\s+([\d.]+)", output, re.MULTILINE)}
    return per_connection({step: totals[step] / 1e3 for step in STEPS}, count)


@dataclass(frozen=True, slots=True)
class Ours:
    """A device that our tools measure: ``host`` is where it is in the machine, ``address`` its address.

    ``python``: the command that starts Python. With "env" it is a program like C's. A fork of the process that has
    imported everything does not see RDMACM_PROVIDER, and a shell looks every 10 ms whether it has ended.
    """

    provider: str
    host: str
    address: str
    python: str = "python3"

    def run(self, run: Run, server: str, client: str, end: str = "kill $SERVER") -> str:
        """The client's output. ``end`` is what ends its server."""
        return run(
            f"export RDMACM_PROVIDER={self.provider}\n"
            f"serve_{self.host} {self.python} -m rdmacm {server} -b {self.address}\n"
            f"{self.host} {self.python} -m rdmacm {client} && {end}"
        )


SOFT, KERNEL = Ours("soft", "soft", "$SOFT4"), Ours("kernel", "rxe", "$RXE4", "env python3")


def connections_of_ours(run: Run, device: Ours, count: int) -> Figures:
    output = device.run(run, "cmtime", f"cmtime -s {device.address} -c {count} --concurrent --json")
    totals = {step["name"]: step["total_us"] / 1e6 for step in from_json(output)["steps"]}
    return per_connection({step: sum(totals[name] for name in names) for step, names in STEPS.items()}, count)


def from_json(output: str) -> Any:
    """The document in a program's output, without lines on standard error that say that it waits."""
    return json.loads(re.sub(r"^rdmacm: waiting for .*\n", "", output, flags=re.MULTILINE))


def per_connection(seconds: Figures, count: int) -> Figures:
    """Microseconds of each step, and connections a second, from the seconds that each step took of all connections."""
    figures = {f"{step}, µs a connection": total / count * 1e6 for step, total in seconds.items()}
    return {RATE: count / sum(seconds.values())} | figures


def latency_of_c(run: Run) -> float:
    pingpong = f"ibv_rc_pingpong --events --ib-dev rxe0 --gid-idx $gid --mtu 4096 --size 64 --iters {LATENCY_MESSAGES}"
    output = run(
        "cd /sys/class/infiniband/rxe0/ports/1/gids\n"
        "gid=$(grep -ls ffff:0a00:0001 *)\n"
        f"{pingpong} >/tmp/server.out 2>&1 & SERVER=$!\n"
        # Until it listens (0A) on port 18515.
        r"until [[ $(</proc/net/tcp)$(</proc/net/tcp6) =~ :4853\ [0-9A-F]+:0000\ 0A ]]; do nap 0.01; done"
        "\n"
        f"{pingpong} $RXE4 && finish >/dev/null"
    )
    return float(re.findall(r"([\d.]+) usec/iter", output)[-1]) / 2


def bandwidth_of_c(run: Run, op: str) -> float:
    """MB/s, from the difference between the times of two runs.

    perftest's own figures are useless here: it divides by the processor's MHz, and /proc/cpuinfo has none in a machine
    in user mode. Where it cannot estimate them it fails at its end, after the transfer.
    """
    times = []
    for count in BANDWIDTH_MESSAGES:
        events = "-e" if op == "send" else ""  # that of WRITE has no such option
        command = f"ib_{op}_bw {events} -R -n {count} -s {MEBIBYTE}"
        output = run(
            f"serve_rxe {command}\nbegin=$EPOCHREALTIME\nrxe {command} $RXE4 >/tmp/client.out 2>&1\n"
            "end=$EPOCHREALTIME\nfinish >/dev/null\n"
            "grep -q 'BW average' /tmp/client.out && echo $((${end/./} - ${begin/./}))"
        )
        times.append(int(output.splitlines()[-1]))
    few, many = BANDWIDTH_MESSAGES
    return (many - few) * MEBIBYTE / (times[1] - times[0])


def bandwidth_of_stream(output: str) -> float:
    """MB/s, from the client's line of rstream, which has the bytes of both directions in Gbit/s."""
    return float(re.findall(r"^custom +\S+ +\d+ +\d+ +\S+ +\S+s +([\d.]+)", output, re.MULTILINE)[0]) / 8 * 1000


def stream_of_c(run: Run) -> float:
    return bandwidth_of_stream(run(f"serve_rxe rstream -b $RXE4 {STREAMED}\nrxe rstream -s $RXE4 {STREAMED} && finish"))


def stream_of_ours(run: Run, device: Ours) -> float:
    rstream = f"rstream {STREAMED}"
    return bandwidth_of_stream(device.run(run, rstream, f"{rstream} {device.address}", "finish"))


def transfers_of_c(run: Run) -> Figures:
    figures = {LATENCY: latency_of_c(run)} | {name: bandwidth_of_c(run, op) for op, name in BANDWIDTHS.items()}
    return figures | {STREAM: stream_of_c(run)}


def transfers_of_ours(run: Run, device: Ours) -> Figures:
    def measured(options: str) -> Any:
        return from_json(device.run(run, "perf -s", f"perf -c {device.address} --json {options}"))[0]

    latency = measured(f"--op send --size 64 --latency --blocking --count {LATENCY_MESSAGES}")
    figures = {LATENCY: latency["latency_us"]["mean"]}  # as ibv_rc_pingpong prints it
    for op, name in BANDWIDTHS.items():
        found = measured(f"--op {op} --size {MEBIBYTE} --depth 50 --count {BANDWIDTH_MESSAGES[1]}")
        figures[name] = found["bytes_per_second"] / 1e6
    return figures | {STREAM: stream_of_ours(run, device)}


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of C on the kernel's device, and of ours on both."""

    name: str
    theirs: float
    soft: float
    kernel: float

    def speed(self, ours: float) -> float:
        """Our speed as a multiple of C's."""
        return ours / self.theirs if self.name in RATES else self.theirs / ours


def measure(run: Run, rounds: int, connections: int) -> list[Row]:
    theirs: list[Figures] = []
    ours: dict[Ours, list[Figures]] = {SOFT: [], KERNEL: []}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        theirs.append(connections_of_c(run, connections) | transfers_of_c(run))
        for device, figures in ours.items():
            figures.append(connections_of_ours(run, device, connections) | transfers_of_ours(run, device))
    return [
        Row(name, *(statistics.median(one[name] for one in figures) for figures in (theirs, *ours.values())))
        for name in theirs[0]
    ]


def table(rows: list[Row]) -> str:
    lines = ["| | C on rdma_rxe | rdmacm on rdma_rxe | speed, C = 1 | rdmacm's device | speed, C = 1 |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        found = " | ".join(f"{ours:,.1f} | {row.speed(ours):.2f}" for ours in (row.kernel, row.soft))
        lines.append(f"| {row.name} | {row.theirs:,.1f} | {found} |")
    return "\n".join(lines)


def circumstances(machine: Machine, rounds: int, system_call: float) -> str:
    """Where and when the figures were measured, and what that does to them."""
    text = f"Medians of {rounds} rounds on {time.strftime('%-d %B %Y')}; Linux {machine.kernel} {machine.description}"
    text += f", on {processor()}. A system call takes {system_call:.1f} µs there"
    if system_call > 1:
        text += (
            ", many times what it takes on plain Linux, whichever device makes it: where both make as many, the ratio"
            " is closer to 1 than it would be, and where one makes more, that one looks slower"
        )
    if machine.flaky:
        text += ". Emulation makes an interpreter 18 to 20 times slower and a kernel less, so it favours rdma_rxe"
    return text + "."


def processor() -> str:
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return re.sub(r"\s+", " ", model[1]) if model else "an unknown processor"


def main() -> None:
    parser = argparse.ArgumentParser(prog="dev.py bench guest", description=__doc__.split("\n\n")[0])
    parser.add_argument("--machine", choices=MACHINES, default=next(iter(MACHINES)), help="which (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--write", action="store_true", help="write the table into docs/performance.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as share:
        try:
            with MACHINES[options.machine](Path(share)) as machine:

                def run(script: str) -> str:
                    result = machine.insist(f"network {MTU} || exit\n{script}", TIMEOUT)
                    if result.status:
                        raise Failed(result.output)
                    return result.output

                system_call = float(run(f"python3 -c '{SYSTEM_CALL}'"))
                rows = measure(run, options.rounds, options.connections)
        except (Unavailable, MachineError) as reason:
            raise SystemExit(str(reason)) from None
        except Failed as error:
            raise SystemExit(f"failed: {error}") from None
    made = f"{table(rows)}\n\n{wrapped(circumstances(machine, options.rounds, system_call))}"
    print(made)
    if options.write:
        page = PROJECT / "docs" / "performance.md"
        page.write_text(inserted(page.read_text(), made, (BEGIN, END)))


if __name__ == "__main__":
    main()
