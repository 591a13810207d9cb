"""Runs the scenarios of tests/conformance between two processes, each with its provider and network namespace.

    python3 -m interop.conformance_run PASSIVE ACTIVE [SCENARIO...]

An end is PROVIDER,ADDRESS or PROVIDER,ADDRESS,NAMESPACE. Prints a line for each scenario: "ok NAME", "skipped NAME: the
device lacks what", or "FAILED NAME" and the traceback, indented.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import traceback
from contextlib import closing
from typing import Any, NamedTuple

from conformance import all_scenarios
from support.clock import Stopwatch
from support.scenario import Forker, Spawn, free_port, run_in_processes

#: What the ends import, by provider.
MODULES = {
    "soft": ("rdmacm.soft.provider", "conformance.all_scenarios"),
    "kernel": ("rdmacm.kernel.provider", "rdmacm.kernel.verbs", "conformance.all_scenarios"),
}


class End(NamedTuple):
    """One end of the scenarios."""

    provider: str
    address: str
    #: Empty for that of this process.
    namespace: str = ""

    @property
    def spawn(self) -> Spawn:
        enter = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        environment = {**os.environ, "RDMACM_PROVIDER": self.provider, "RDMACM_QUICK_END": "1"}

        def spawn(command: list[str], fds: tuple[int, ...]) -> subprocess.Popen[Any]:
            return subprocess.Popen([*enter, *command], pass_fds=fds, env=environment)

        return spawn

    def forker(self) -> Forker:
        return Forker(self.spawn, MODULES[self.provider])


def main(passive: str, active: str, *names: str) -> bool:
    """Run these scenarios, or all; whether none failed."""
    ends = End(*passive.split(",")), End(*active.split(","))
    addresses = ends[0].address, ends[1].address
    good = True
    with closing(ends[0].forker()) as one, closing(ends[1].forker()) as other:

        def run(name: str) -> tuple[Any, Any]:
            passive, active = (getattr(all_scenarios, f"{name}_{end}") for end in ("passive", "active"))
            return run_in_processes(addresses, passive, active, free_port(), (one, other))

        features = run("features")
        for name in names or all_scenarios.NAMES:
            lacking = [sorted(all_scenarios.NEEDS.get(name, set()) - has) for has in features]
            if any(lacking):
                print(f"skipped {name}: {'; '.join(', '.join(each) for each in lacking if each)}", flush=True)
                continue
            watch = Stopwatch()
            try:
                run(name)
            except Exception:
                good = False
                print(f"FAILED {name}\n{textwrap.indent(traceback.format_exc(), '    ')}", flush=True)
            else:
                print(f"ok {name}", flush=True)
            if os.environ.get("RDMACM_TIMES"):
                print(f"   {watch.seconds:.2f} s")
    return good


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
