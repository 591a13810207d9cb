"""rdmacm beside the kernel's device and the C library, in the same emulated or virtual machine, in turn.

    python3 dev.py bench guest [--rounds 3] [--connections 100] [--readme]

Each device talks to itself: rdma_rxe with librdmacm's cmtime and perftest's ib_send_lat and ib_write_bw, our software
device with ``rdmacm cmtime`` and ``rdmacm perf``, both with a path MTU of 4096.  Of each figure the median of the
rounds is printed, and how many times better ours is.  ``--readme`` writes the table into README.md as well.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT / "tests"))

from interop.machine.packages import Unavailable, image  # noqa: E402

from interop.machine.run import Machine  # noqa: E402
from interop.table import inserted  # noqa: E402

MTU = 4200
#: What librdmacm's cmtime calls its steps, and ours, which does three steps where it does one.
STEPS = {
    "create id": ("create id",),
    "resolve addr": ("resolve addr",),
    "resolve route": ("resolve route",),
    "create qp": ("create qp",),
    "connect": ("connect", "modify qp", "establish"),
    "disconnect": ("disconnect",),
    "destroy": ("destroy",),
}
BANDWIDTH_MESSAGES, LATENCY_MESSAGES = 50, 1000
BEGIN, END = "<!-- bench: made by python3 dev.py bench guest --readme -->", "<!-- bench: end -->"

ATTEMPTS = 5

Figures = dict[str, float]


class Failed(Exception):
    """What was said by a script that failed."""


def connections_of_c(run: Callable[[str], str], count: int) -> Figures:
    said = run(
        f"serve_rxe cmtime -b $RXE4 -c {count}\n"
        # Its server does not end by itself.
        f"rxe cmtime -s $RXE4 -c {count} && kill $SERVER"
    )
    totals = {name.strip(): float(total) for name, total in re.findall(r"^([\w ]+):\s+([\d.]+)", said, re.MULTILINE)}
    return per_connection({step: totals[step] / 1e3 for step in STEPS}, count)


def connections_of_ours(run: Callable[[str], str], count: int) -> Figures:
    said = run(
        "serve_soft python3 -m rdmacm cmtime -s -b $SOFT4\n"
        f"soft python3 -m rdmacm cmtime -c $SOFT4 -n {count} --concurrent --json && kill $SERVER"
    )
    totals = {step["name"]: step["total_us"] / 1e6 for step in json.loads(said)["steps"]}
    return per_connection({step: sum(totals[name] for name in names) for step, names in STEPS.items()}, count)


def per_connection(seconds: Figures, count: int) -> Figures:
    """Of the seconds that ``count`` connections took for each step: microseconds each, and connections a second."""
    figures = {f"{step}, µs a connection": total / count * 1e6 for step, total in seconds.items()}
    return {"connections a second": count / sum(seconds.values())} | figures


def perftest(run: Callable[[str], str], command: str, column: int) -> float:
    """A column of the line of figures.

    Where the processor is emulated, perftest now and then fails, or cannot tell the processor's frequency and takes it
    for 0: then it is asked again.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            figure = _perftest(run, command, column)
        except Failed:
            continue
        if math.isfinite(figure) and figure > 0:
            return figure
    return _perftest(run, command, column)


def _perftest(run: Callable[[str], str], command: str, column: int) -> float:
    said = run(f"serve_rxe {command}\nrxe {command} $RXE4 && finish >/dev/null")
    lines = re.findall(r"^ \d+ .*", said, re.MULTILINE)
    if not lines:
        raise Failed(said)
    return float(lines[-1].split()[column])


def transfers_of_c(run: Callable[[str], str]) -> Figures:
    latency = perftest(run, f"ib_send_lat -R -n {LATENCY_MESSAGES} -s 64", 4)
    bandwidth = perftest(run, f"ib_write_bw -R -n {BANDWIDTH_MESSAGES} -s 1048576", 3)
    return {LATENCY: latency, BANDWIDTH: bandwidth * 1.048576}


def transfers_of_ours(run: Callable[[str], str]) -> Figures:
    client = "soft python3 -m rdmacm perf -c $SOFT4 --json"
    latency, bandwidth = (
        json.loads(run(f"serve_soft python3 -m rdmacm perf -s -b $SOFT4\n{client} {what} && kill $SERVER"))[0]
        for what in (
            f"--op send --size 64 --latency --count {LATENCY_MESSAGES}",
            f"--op write --size 1048576 --depth {BANDWIDTH_MESSAGES} --count {BANDWIDTH_MESSAGES}",
        )
    )
    return {LATENCY: latency["latency_us"]["p50"], BANDWIDTH: bandwidth["bytes_per_second"] / 1e6}


RATE, LATENCY, BANDWIDTH = "connections a second", "SEND of 64 bytes, half a round trip, µs", "WRITE of 1 MiB, MB/s"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    theirs: float
    ours: float

    @property
    def better(self) -> float:
        """How many times."""
        return self.ours / self.theirs if self.name in (RATE, BANDWIDTH) else self.theirs / self.ours


def measure(machine: Machine, rounds: int, connections: int) -> list[Row]:
    def run(script: str) -> str:
        result = machine.insist(f"network {MTU} || exit\n{script}", timeout=300)
        if result.status:
            raise Failed(result.output)
        return result.output

    theirs: list[Figures] = []
    ours: list[Figures] = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        theirs.append(connections_of_c(run, connections) | transfers_of_c(run))
        ours.append(connections_of_ours(run, connections) | transfers_of_ours(run))
    return [
        Row(name, statistics.median(one[name] for one in theirs), statistics.median(one[name] for one in ours))
        for name in theirs[0]
    ]


def table(rows: list[Row]) -> str:
    lines = ["| | rdma_rxe, C | rdmacm | times better |", "|---|---|---|---|"]
    lines += [f"| {row.name} | {row.theirs:,.1f} | {row.ours:,.1f} | {row.better:.2f} |" for row in rows]
    return "\n".join(lines)


def processor() -> str:
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return re.sub(r"\s+", " ", model[1]) if model else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(prog="dev.py bench guest", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as share:
        try:
            machine = Machine(image(), Path(share))
        except Unavailable as reason:
            raise SystemExit(str(reason)) from None
        with machine:
            try:
                rows = measure(machine, options.rounds, options.connections)
            except Failed as error:
                raise SystemExit(f"failed: {error}") from None
            where = f"Linux {machine.kernel}, two processors"
            if machine.accelerator == "tcg":
                where += (
                    f" emulated on {processor()}: emulation makes an interpreter 18 to 20 times slower and a kernel"
                    " rather less, so it flatters rdma_rxe"
                )
    made = f"{table(rows)}\n\nMedians of {options.rounds} rounds on {time.strftime('%-d %B %Y')}; {where}."
    print(made)
    if options.readme:
        readme = PROJECT / "README.md"
        readme.write_text(inserted(readme.read_text(), made, (BEGIN, END)))


if __name__ == "__main__":
    main()
