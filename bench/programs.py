"""The C tools on the kernel's device, and by ``rdmacm run`` on ours, in the machine of the interop tests, in turn.

    python3 dev.py bench programs [--machine uml|qemu] [--rounds 3] [--only NAME] [--write]

Each device talks to itself, with a path MTU of 4096. A figure is the difference between the times of two runs of the
client that differ in the number of messages, for each message; the time that a program takes to start is not in it.
perftest's own figures are useless here: it divides by the processor's MHz, which /proc/cpuinfo does not have in a
machine in user mode. A machine in user mode has one processor, where two programs that poll wait for each other's turn.
``--write`` writes the table into docs/run.md as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path[:0] = [str(PROJECT / "tests"), str(PROJECT / "bench")]

from guest import MTU, SYSTEM_CALL, circumstances  # noqa: E402

from interop.machine.cache import Unavailable  # noqa: E402
from interop.machine.choice import MACHINES  # noqa: E402
from interop.machine.run import Machine, MachineError  # noqa: E402
from interop.table import inserted, wrapped  # noqa: E402

#: Seconds that a tool may take on a device.
TIMEOUT = 600
#: By the heading of a column: the device, its address, and what starts a program beside it.
DEVICES = {
    "rdma_rxe": ("rxe0", "$RXE4", ""),
    "rdmacm run": ("soft_vb", "$SOFT4", "ip netns exec soft python3 -m rdmacm run --"),
}
BEGIN, END = "<!-- programs: made by python3 dev.py bench programs --write -->", "<!-- programs: end -->"


@dataclass(frozen=True, slots=True)
class Tool:
    """A program with a server and a client.

    ``{n}`` in their commands is the number of messages, ``{dev}`` the device, ``{address}`` its IPv4 address, ``{gid}``
    the index of that in the GID table. ``mark`` is what a client prints that has come through; without one it succeeds.
    """

    name: str
    server: str
    client: str
    mark: str = ""
    counts: tuple[int, int] = (100, 5100)


def _perftest(program: str, options: str, what: str, counts: tuple[int, int] = (100, 5100)) -> Tool:
    command = f"{program} -d {{dev}} -x {{gid}} -m 4096 -n {{n}} {options}"
    mark = "BW average" if program.endswith("_bw") else "t_avg"
    return Tool(f"{program}: {what}", command, command + " {address}", mark, counts)


def _pingpong(kind: str, what: str, options: str = "-m 4096") -> Tool:
    command = f"ibv_{kind}_pingpong -e -d {{dev}} -g {{gid}} -n {{n}} {options}"
    return Tool(f"ibv_{kind}_pingpong: {what}", command, command + " {address}", "usec/iter")


TOOLS = (
    _perftest("ib_send_lat", "-e -s 64", "64 bytes there and back"),
    _perftest("ib_send_lat", "-e -s 64 -c UD", "the same, datagrams"),
    _perftest("ib_write_lat", "-s 64", "the same by WRITE, polling", (10, 1010)),
    _perftest("ib_read_lat", "-e -s 64", "READ of 64 bytes"),
    _perftest("ib_atomic_lat", "-e", "FETCH_AND_ADD"),
    _perftest("ib_send_bw", "-e -s 65536", "SEND of 64 KiB", (20, 2020)),
    _perftest("ib_write_bw", "-s 65536", "WRITE of 64 KiB", (20, 2020)),
    _perftest("ib_read_bw", "-e -s 65536", "READ of 64 KiB", (20, 2020)),
    _perftest("ib_atomic_bw", "-e", "FETCH_AND_ADD, many at once"),
    _pingpong("rc", "4 KiB there and back"),
    _pingpong("uc", "the same, unreliable"),
    _pingpong("ud", "1 KiB in datagrams", "-s 1024"),
    _pingpong("srq", "16 queue pairs, a shared receive queue"),
    Tool("rping: WRITE, READ and four SENDs", "rping -s -a {address} -C {n}", "rping -c -a {address} -C {n}"),
)

#: Runs a tool with two counts of messages, and prints the microseconds of each client.
#: Arguments: what the client prints at its end, server and client with @ in the place of the count, and the counts.
SCRIPT = r"""
mark=$1 server=$2 client=$3; shift 3
# perftest fails where it does not find the processor's MHz, after all is done.
is_done() { if [ -n "$mark" ]; then grep -q "$mark" /tmp/client.out; else [ $status = 0 ]; fi; }
for count; do
    timeout 60 ${server//@/$count} >/tmp/server.out 2>&1 & serving=$!
    for ((i = 0; i < 300; i++)); do  # until the server listens
        begin=$EPOCHREALTIME
        timeout 60 ${client//@/$count} >/tmp/client.out 2>&1
        status=$? end=$EPOCHREALTIME
        is_done && break
        kill -0 $serving 2>/dev/null || break
        sleep 0.05
    done
    kill $serving 2>/dev/null
    wait $serving
    is_done || { tail -n 3 /tmp/*.out; exit 1; }
    echo $((${end/./} - ${begin/./}))
done
"""


def measure(machine: Machine, tool: Tool, device: str) -> float | None:
    """Microseconds for each message; None if the tool fails on the device."""
    name, address, run = DEVICES[device]
    server, client = (
        command.format(dev=name, gid="$gid", n="@", address=address) for command in (tool.server, tool.client)
    )
    find = f"grep -ls ffff:0a00:000 /sys/class/infiniband/{name}/ports/1/gids/*"
    counts = " ".join(map(str, tool.counts))
    result = machine.insist(
        f"network {MTU} || exit\ncat >/tmp/measure.sh <<'EOF'\n{SCRIPT}\nEOF\n"
        f"export RXE4 SOFT4\n{run} bash -c 'gid=$({find}); gid=${{gid##*/}}\n"
        f"""exec bash /tmp/measure.sh "{tool.mark}" "{server}" "{client}" {counts}'""",
        TIMEOUT,
    )
    if result.status:
        print(f"{device}, {tool.name} fails: {result.output[-2000:]}", file=sys.stderr)
        return None
    few, many = (int(line) for line in result.output.split()[-2:])
    return (many - few) / (tool.counts[1] - tool.counts[0])


def table(found: dict[tuple[str, str], list[float | None]]) -> str:
    """Medians, and our speed as a multiple of the kernel's."""
    lines = [f"| µs | {' | '.join(DEVICES)} | speed, rdma_rxe = 1 |", "|---" * (len(DEVICES) + 2) + "|"]
    for name in dict.fromkeys(name for name, _ in found):
        medians = []
        for device in DEVICES:
            figures = [figure for figure in found[name, device] if figure is not None]
            medians.append(statistics.median(figures) if figures else None)
        shown = ["no figure" if figure is None or figure <= 0 else f"{figure:,.1f}" for figure in medians]
        theirs, ours = medians
        ratio = f"{theirs / ours:.2f}" if theirs and ours and min(theirs, ours) > 0 else ""
        lines.append(f"| {name} | {' | '.join(shown)} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="dev.py bench programs", description=__doc__.split("\n\n")[0])
    parser.add_argument("--machine", choices=MACHINES, default=next(iter(MACHINES)), help="which (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="NAME", help="the tools whose line has this text")
    parser.add_argument("--write", action="store_true", help="write the table into docs/run.md")
    options = parser.parse_args()
    found: dict[tuple[str, str], list[float | None]] = {}
    with tempfile.TemporaryDirectory() as share:
        try:
            with MACHINES[options.machine](Path(share)) as machine:
                system_call = float(machine.insist(f"python3 -c '{SYSTEM_CALL}'").output)
                for number in range(options.rounds):
                    print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
                    for tool in TOOLS:
                        if options.only in tool.name:
                            for device in DEVICES:
                                found.setdefault((tool.name, device), []).append(measure(machine, tool, device))
        except (Unavailable, MachineError) as reason:
            raise SystemExit(str(reason)) from None
    made = f"{table(found)}\n\n{wrapped(circumstances(machine, options.rounds, system_call))}"
    print(made)
    if options.write:
        page = PROJECT / "docs" / "run.md"
        page.write_text(inserted(page.read_text(), made, (BEGIN, END)))


if __name__ == "__main__":
    main()
