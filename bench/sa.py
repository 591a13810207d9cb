"""Path records of a simulated InfiniBand fabric: paths per second, compared with saquery.

    python3 dev.py bench sa [--hosts N] [--paths N] [--json]

ibsim simulates the fabric and OpenSM administers it; both share the machine with the benchmark. Paths between the same
random pairs of hosts are queried by

- one SaAccess, one query after the other
- one SaAccess with 32 outstanding queries
- saquery --sgid-to-dgid, the C tool of infiniband-diags: one process for each path, since it cannot query several given
  pairs at once. Its startup is measured too, by saquery -c, which queries the administrator's capabilities
- rdmacm sa paths, also one process for each path

saquery accesses ibsim through the preloaded library umad2sim, and SaAccess by ibsim's own datagrams. The difference is
tens of microseconds per query, and milliseconds per process start. A list of all paths (saquery -p) is not compared:
over ibsim OpenSM's answers are not segmented, so it ends after three paths.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rdmacm.address import Gid
from rdmacm.errors import RdmaError
from rdmacm.ib.access import SaAccess, SaQuery
from rdmacm.ib.ibsim import IbsimTransport
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.mad import SaMethod
from rdmacm.proto.sa.subnet import NodeInfoType, NodeRecord

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from infiniband.fabric import SimulatedFabric, command, missing, tree

OUTSTANDING = 32
HOSTS_A_LEAF = 32
SPINES = 16

Pair = tuple[Gid, Gid]


def ports_of(sa: SaAccess) -> list[Gid]:
    """Return the GIDs of the hosts, by querying one LID after the other until one does not exist."""
    found = []
    prefix = sa.port.gids[0][:8]
    lid = 1
    while True:
        try:
            (node,) = sa.result(sa.query(SaMethod.GET, NodeRecord, f"LID {lid}", lid=lid))
        except RdmaError:
            return found
        if node.node_type == NodeInfoType.CHANNEL_ADAPTER:
            found.append(Gid(prefix + node.port_guid.to_bytes(8, "big")))
        lid += 1


def in_turn(sa: SaAccess, pairs: Sequence[Pair]) -> float:
    """Return the paths per second, one query after the other."""
    started = time.perf_counter()
    for sgid, dgid in pairs:
        check(sa.path(dgid, sgid=sgid), sgid, dgid)
    return len(pairs) / (time.perf_counter() - started)


def at_once(sa: SaAccess, pairs: Sequence[Pair]) -> float:
    """Return the paths per second with several outstanding queries."""
    waiting: deque[tuple[SaQuery[PathRecord], Pair]] = deque()
    started = time.perf_counter()
    for pair in pairs:
        if len(waiting) == OUTSTANDING:
            answer(sa, waiting)
        waiting.append((sa.query_path(pair[1], sgid=pair[0]), pair))
    while waiting:
        answer(sa, waiting)
    return len(pairs) / (time.perf_counter() - started)


def answer(sa: SaAccess, waiting: deque[tuple[SaQuery[PathRecord], Pair]]) -> None:
    """Wait for the answer to the oldest query."""
    question, (sgid, dgid) = waiting.popleft()
    check(sa.result(question)[0], sgid, dgid)


def check(path: PathRecord, sgid: Gid, dgid: Gid) -> None:
    """Exit when an answer does not match the query."""
    if (path.sgid, path.dgid) != (sgid, dgid) or not path.dlid:
        sys.exit(f"queried {sgid} -> {dgid}, got {path}")


def milliseconds(run: Callable[[Pair], None], pairs: Sequence[Pair]) -> float:
    """Return the median time of one run in milliseconds."""
    times = []
    for pair in pairs:
        started = time.perf_counter()
        run(pair)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def process(arguments: Sequence[str], environ: dict[str, str], directory: Path, wanted: str = "") -> None:
    """Run a process to its end; exit when it fails or its output lacks ``wanted``."""
    done = subprocess.run(arguments, env=environ, cwd=directory, stdout=subprocess.PIPE, text=True, check=True)
    if wanted not in done.stdout:
        sys.exit(f"the output of {' '.join(arguments)} lacks {wanted}")


def measure(fabric: SimulatedFabric, count: int, processes: int) -> dict[str, float]:
    """Return the paths per second in one process, and the milliseconds of one process per path."""
    host, other = fabric.hosts[1], fabric.hosts[-1]
    with SaAccess(IbsimTransport(host, fabric.base), timeout=10.0, tries=20) as sa:
        gids = ports_of(sa)
        draw = random.Random(1)
        pairs = [(draw.choice(gids), draw.choice(gids)) for _ in range(count)]
        at_once(sa, pairs[: count // 10])  # OpenSM is slow in its first seconds
        found = {"hosts": float(len(gids)), "in_turn": in_turn(sa, pairs), "at_once": at_once(sa, pairs)}
        dropped = {**sa.transport.dropped}
    if dropped:
        print(f"dropped: {dropped}", file=sys.stderr)
    saquery, few = command("saquery"), pairs[:processes]
    through_umad = fabric.environ(other)
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "IBSIM_SOCKNAME": fabric.base}
    tool = [sys.executable, "-m", "rdmacm", "sa", "--port", f"ibsim:{host}"]

    def query(pair: Pair) -> None:
        wanted = f"dgid....................{pair[1]}"
        process([saquery, "--sgid-to-dgid", f"{pair[0]}-{pair[1]}"], through_umad, fabric.directory, wanted)

    def start(_: Pair) -> None:
        process([saquery, "-c"], through_umad, fabric.directory)

    def paths(pair: Pair) -> None:
        process([*tool, "paths", str(pair[1])], ours, fabric.directory, str(pair[1]))

    found["saquery_ms"] = milliseconds(query, few)
    found["saquery_start_ms"] = milliseconds(start, few)
    found["rdmacm_sa_ms"] = milliseconds(paths, few)
    return found


def main() -> int:
    """Start the fabric, measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--hosts", type=int, default=1024, help=f"hosts, in steps of {HOSTS_A_LEAF} (1024)")
    parser.add_argument("--paths", type=int, default=10_000, help="paths queried by each method in one process (10000)")
    parser.add_argument("--processes", type=int, default=50, help="paths queried by one process each (50)")
    options = parser.parse_args()
    if reason := missing("ibsim", "opensm", "saquery"):
        print(f"bench sa: {reason}", file=sys.stderr)
        return 1
    leaves = max(1, options.hosts // HOSTS_A_LEAF)
    started = time.perf_counter()
    with SimulatedFabric(tree(leaves, HOSTS_A_LEAF, SPINES)) as fabric:
        up = time.perf_counter() - started
        found = {"subnet_up_s": up, **measure(fabric, max(10, options.paths), max(1, options.processes))}
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, shared with ibsim and OpenSM")
    print(f"{found['hosts']:,.0f} hosts, {leaves + SPINES} switches; the subnet was up after {up:.1f} s\n")
    print(f"{options.paths:,} random paths by one process       paths a second")
    print(f"  SaAccess, one after the other       {found['in_turn']:>14,.0f}")
    print(f"  SaAccess, {OUTSTANDING} outstanding            {found['at_once']:>14,.0f}")
    print("\na process for each path (median)       ms a path  paths a second")
    for name, key in (("saquery --sgid-to-dgid", "saquery_ms"), ("rdmacm sa paths", "rdmacm_sa_ms")):
        print(f"  {name:<34}{found[key]:>12.1f}{1000 / found[key]:>16,.0f}")
    print(f"  {'(saquery -c: its startup)':<34}{found['saquery_start_ms']:>12.1f}")
    print(f"  {'time of rdmacm sa paths / saquery':<34}{found['rdmacm_sa_ms'] / found['saquery_ms']:>12.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
