"""``rdmacm stat``: the counters of the software devices of all processes, and of the kernel's devices."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict

from rdmacm.diagnosis.explain import query_counters
from rdmacm.provider.choice import AUTO, ENVIRONMENT
from rdmacm.provider.counters import Counters
from rdmacm.provider.statistics import kernel_counters, process_counters
from rdmacm.tools.arguments import add_provider, seconds_between
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import Page, Parser, bold, labelled_lines, table, write, write_json

PAGE = Page(
    command="stat",
    summary=COMMANDS["stat"],
    description="""
        Shows the counters of each process of this network namespace that has a software device open, as they are now:
        by device, of its connection manager (cm), and of UDP port 4791: losses (udp), packets and bytes (traffic). A
        software device lives in its process, and so do its counters. Programs of rdmacm run are shown by themselves;
        their connection manager is that of the command. Processes of other users are shown to root only. The counters
        of the kernel's devices follow, if there are any: those of the driver and of the ports, the ports of a device
        added up. These count for all processes together.

        Counters that are 0 are left out, unless --all is given. docs/debugging.md describes each. A process answers at
        once, whatever it does; asking costs it less than a millisecond.

        With --watch, shows every second what has changed since, until Ctrl-C. With --json, writes one object, with
        --watch one each time: processes (a list of pid, command, devices, cm, udp, errors and traffic, an object of
        numbers each but devices, which has one for each device) and kernel (devices and so on; null without).
        --openmetrics writes them as text for Prometheus: rdmacm_device_NAME_total, rdmacm_cm_NAME_total,
        rdmacm_udp_NAME_total and rdmacm_traffic_NAME_total, with the labels pid, command and device.
    """,
    examples=(
        ("rdmacm stat", "Show what has been counted."),
        ("rdmacm stat --watch", "Show each second what has changed."),
        ("rdmacm stat --openmetrics", "Write the counters for Prometheus."),
    ),
    see_also="rdmacm devices, rdma-statistic(8)",
    environment=("RDMACM_PROVIDER", "NO_COLOR"),
)

#: A counter: process (0: the kernel) and its command, part (device, cm, udp, errors), device, name.
_Key = tuple[int, str, str, str, str]


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm stat``."""
    parser.add_argument(
        "--watch",
        nargs="?",
        type=seconds_between(0.1, 86400),
        const=1.0,
        metavar="SECONDS",
        help="Show what has changed, every second or so many seconds, until Ctrl-C.",
    )
    parser.add_argument("--all", action="store_true", help="Show counters that are 0, too.")
    parser.add_argument("--openmetrics", action="store_true", help="Write the text format of OpenMetrics.")
    parser.add_argument("--json", action="store_true", help="Write JSON objects.")
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Show the counters."""
    if args.openmetrics and (args.json or args.watch):
        args.parser.error("--openmetrics excludes --json and --watch")
    before: dict[_Key, int] | None = None
    while True:
        found = _Found(args.provider)
        if args.json:
            write_json(found.as_dict())
        elif args.openmetrics:
            write(_openmetrics(found))
        elif before is None:
            write(found.text(zeros=args.all))
        now = dict(found.counts())
        if before is not None and not args.json:
            write(_changes(before, now))
        if not args.watch:
            return 0
        before = now
        time.sleep(args.watch)


class _Found:
    """The counters at one moment."""

    def __init__(self, provider: str | None) -> None:
        chosen = provider or os.environ.get(ENVIRONMENT) or AUTO
        self.processes = [] if provider == "kernel" else process_counters()
        self.kernel = None
        if chosen == "kernel":  # an error says what it lacks
            self.kernel = query_counters("kernel")
        elif chosen == AUTO:
            self.kernel = kernel_counters()

    def as_dict(self) -> dict[str, object]:
        """JSON data."""
        processes = [{"pid": each.pid, "command": each.command, **asdict(each.counters)} for each in self.processes]
        return {"processes": processes, "kernel": None if self.kernel is None else asdict(self.kernel)}

    def counts(self) -> Iterator[tuple[_Key, int]]:
        """Each counter with its value."""
        sources = [(each.pid, each.command, each.counters) for each in self.processes]
        if self.kernel is not None:
            sources.append((0, "", self.kernel))
        for pid, command, counters in sources:
            for device, of_device in counters.devices.items():
                yield from (((pid, command, "device", device, name), n) for name, n in of_device.items())
            for part in ("cm", "udp", "errors", "traffic"):
                yield from (((pid, command, part, "", name), n) for name, n in getattr(counters, part).items())

    def text(self, *, zeros: bool) -> str:
        """For people."""
        parts = [
            f"{bold(f'process {each.pid} ({each.command})')}\n{_block(each.counters, zeros=zeros)}"
            for each in self.processes
        ]
        if self.kernel is not None:
            parts.append(f"{bold('kernel')}\n{_block(self.kernel, zeros=zeros)}")
        return "\n".join(parts) or "no process has a software device open\n"


def _block(counters: Counters, *, zeros: bool) -> str:
    rows = [*counters.devices.items(), ("cm", counters.cm), ("udp", counters.udp), ("errors", counters.errors)]
    rows.append(("traffic", counters.traffic))
    texts = [(name, ", ".join(f"{each} {n}" for each, n in part.items() if n or zeros)) for name, part in rows]
    shown = [(name, text or "all 0") for name, text in texts if text or name in counters.devices]
    return labelled_lines(shown, 2) if shown else "  no device\n"


def _changes(before: dict[_Key, int], now: dict[_Key, int]) -> str:
    """The counters that have changed; a process that has come counts from 0."""
    rows = [
        (str(key[0] or "kernel"), key[3] or key[2], key[4], str(n), f"+{n - before.get(key, 0)}")
        for key, n in now.items()
        if n != before.get(key, 0)
    ]
    stamp = time.strftime("%H:%M:%S")
    if not rows:
        return f"{stamp}  no change\n"
    return f"{stamp}\n" + table(
        ("PROCESS", "PART", "COUNTER", "TOTAL", "CHANGE"), rows, right=("PROCESS", "TOTAL", "CHANGE")
    )


def _openmetrics(found: _Found) -> str:
    """https://prometheus.io/docs/specs/om/open_metrics_spec: all samples of a name stand together."""
    families: dict[str, list[str]] = {}
    for (pid, command, part, device, name), n in found.counts():
        family = f"rdmacm_{part}_{re.sub(r'[^a-z0-9_]', '_', name.lower())}"
        labels = {"pid": str(pid), "command": command} if pid else {}
        if device:
            labels["device"] = device
        shown = ",".join(f'{label}="{_label(value)}"' for label, value in labels.items())
        families.setdefault(family, []).append(f"{family}_total{f'{{{shown}}}' if shown else ''} {n}\n")
    text = "".join(f"# TYPE {family} counter\n{''.join(lines)}" for family, lines in families.items())
    return f"{text}# EOF\n"


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
