"""``rdmacm check``: the way to a peer, step by step, with the cause of the first step that fails."""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import shlex
import sys
import threading
import time
from typing import NoReturn

from rdmacm.check.findings import Finding, Sign, Step
from rdmacm.check.measured import Target
from rdmacm.check.measuring import SPACES, Measurer
from rdmacm.check.pairs import (
    Launcher,
    Node,
    Pair,
    check_all,
    default_launcher,
    hosts_of,
    matrix,
    parse_hosts,
    worst_first,
)
from rdmacm.check.pairs import as_json as pairs_json
from rdmacm.check.ranks import check_ranks, world
from rdmacm.check.running import run_check
from rdmacm.check.sequence import Sequence
from rdmacm.check.serving import CheckServer
from rdmacm.errors import cm_error, printable
from rdmacm.tools.arguments import add_number, add_provider, host_and_port, integer_between, seconds_between
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import Page, Parser, bold, wrapped_line, write, write_error, write_json

#: The TCP port of ``--serve``.
CONTROL_PORT = 4792

PAGE = Page(
    command="check",
    summary=COMMANDS["check"],
    description="""
        Checks the way to a host step by step: name, route, neighbour, UDP port 4791, connection manager, path MTU, loss
        and round trip, traffic class. Each step is a line with a sign: good, failed, unknown, or not reached. The first
        step that fails has what it means and the command that mends it; the steps after it are not reached.

        The peer may be any RoCEv2 host, with an adapter or software, and needs to run nothing for this. With PORT, a
        connection is requested and ended there, and its longest packet sent. What one side alone cannot prove is
        marked as likely.

        With 'rdmacm check --serve' at the peer, which is found by itself, both sides send each other datagrams through
        their devices and say what arrived. That tells apart a firewall on one side, a link with a smaller MTU, a host
        that answers ARP for the wrong interface, a traffic class that is changed, and a missing route back. The server
        executes no commands, and sends datagrams to nobody but the host that asks.

        With --json, writes one object: host, port, ok, status, failed (the step, or null) and steps, a list of objects
        with step, result (good, bad, unknown, not reached), figure, meaning, likely, command, rule (of rdmacm doctor),
        and the figures as numbers. With --watch, a line with one object for each round.

        With --all-pairs, every host of a file checks all others, and a matrix has the round trips in microseconds, or
        the step that failed. A line of the file is a host, and perhaps the address of its adapter. With --json: hosts,
        and pairs, a list of objects with from, to, ok, rtt_us, step and meaning, the worst first. With --launch mpi,
        mpirun starts this command at all hosts, in the order of the file, and mpi4py joins them.

        The exit status says which step failed: 10 name, 11 route, 12 neighbour, 13 UDP port 4791, 14 connection
        manager, 15 path MTU, 16 loss, 17 traffic class.
    """,
    examples=(
        ("rdmacm check storage-7", "Check the way to a host."),
        ("rdmacm check storage-7 4420", "Check that a server listens on port 4420 there, too."),
        ("rdmacm check --serve", "Help the checks of other hosts."),
        ("rdmacm check --watch storage-7", "Check again and again on one screen."),
        ("rdmacm check --all-pairs hosts", "Check every pair of the hosts in a file."),
    ),
    see_also="rdmacm explain, rdmacm perf, ping(8), mtr(8), ip-route(8)",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE", "NO_COLOR"),
)

_SIGNS = {Sign.GOOD: "\u2713", Sign.BAD: "\u2717", Sign.UNKNOWN: "?", Sign.NOT_REACHED: "\u2013"}
_ASCII_SIGNS = {Sign.GOOD: "+", Sign.BAD: "x", Sign.UNKNOWN: "?", Sign.NOT_REACHED: "-"}
_LABEL_WIDTH = 11
#: The launcher that has started this process already.
_MPI = "mpi"
#: Pairs that are listed below the matrix.
_SLOWEST = 3


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm check``."""
    add = parser.add_argument
    add("host", nargs="?", metavar="HOST", help="The peer, which may be HOST:PORT or [IPV6]:PORT.")
    add("port", nargs="?", metavar="PORT", help="A port on which a server should listen there.")
    add("-b", "--bind", metavar="ADDR", help="The local address to check from, or with --serve to listen on.")
    add(
        "-P",
        "--port-space",
        choices=tuple(SPACES),
        default="tcp",
        help="The port space of PORT (default: %(default)s).",
    )
    add_number(parser, ("-t", "--tos"), integer_between(0, 255), 0, "N", "The traffic class of datagrams")
    add_number(parser, ("-n", "--count"), integer_between(1, 10_000), 500, "N", "How many packets loss is measured by")
    add("--serve", action="store_true", help="Help the checks of other hosts, until interrupted.")
    add_number(
        parser,
        ("--control-port",),
        integer_between(0, 65535),
        CONTROL_PORT,
        "PORT",
        "The TCP port of --serve at the peer; 0 not to look for it",
    )
    add("--via", metavar="HOST", help="Another address of the peer, by which its --serve is reached.")
    add("--all-pairs", metavar="FILE", help="Check every pair of the hosts in this file, and write a matrix.")
    add(
        "--launch",
        metavar="COMMAND",
        help="With --all-pairs: what starts a command at {host}; 'ssh {host}', and 'srun -w {host}' in a job of Slurm. "
        "'mpi': mpirun has started this command at each host.",
    )
    add("--remote", metavar="COMMAND", default="rdmacm", help="With --all-pairs: rdmacm there (default: %(default)s).")
    add("--each", action="store_true", help="Check the hosts on standard input, with a JSON object in a line for each.")
    add("--while-stdin", action="store_true", help="With --serve: end with standard input.")
    add("--watch", action="store_true", help="Check again and again, until interrupted.")
    add_number(parser, ("-i", "--interval"), seconds_between(0.1, 3600), 1, "SECONDS", "The time between rounds")
    add_number(
        parser, ("--timeout",), seconds_between(0.1, 1e6), 2, "SECONDS", "How long to wait for each answer, in seconds"
    )
    add("--json", action="store_true", help="Write one JSON object.")
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Check a host, or help others to."""
    if args.serve:
        return _serve(args)
    if args.all_pairs is not None:
        return _all_pairs(args)
    if args.each:
        return _each(args)
    if args.host is None:
        args.parser.error("HOST is missing, or --serve")
    host, given = host_and_port(args.host)
    target = Target(host, _port(args, args.port or given or "0"), args.port_space, args.tos)
    measurer = Measurer(target, args.provider, args.bind, args.timeout, args.count)
    if args.watch:
        _watch(args, target, measurer)
    sequence = _check(args, target, measurer, show=not args.json)
    if args.json:
        write_json(as_json(sequence))
    return sequence.status


def _serve(args: argparse.Namespace) -> int:
    try:
        server = CheckServer(args.bind, args.control_port, args.provider, write_error)
    except OSError as error:
        hint = "another --control-port; 'ss -ltnp' shows its process" if error.errno == errno.EADDRINUSE else None
        raise cm_error(
            error.errno or 0, error.strerror or str(error), "listen", f"TCP {args.control_port}", hint
        ) from None
    write_error(f"helping checks at TCP port {server.where[1]}")
    try:
        if args.while_stdin:
            threading.Thread(target=server.run, name="rdmacm-check", daemon=True).start()
            sys.stdin.read()
        else:
            server.run()
    finally:
        server.close()
    return 0


def _each(args: argparse.Namespace) -> int:
    """Check the hosts of standard input, for :mod:`rdmacm.check.pairs`."""
    for host in hosts_of(None):
        target = Target(host, 0, args.port_space, args.tos)
        measurer = Measurer(target, args.provider, args.bind, args.timeout, args.count)
        write(json.dumps(as_json(_check(args, target, measurer, show=False))) + "\n")
    return 0


def _all_pairs(args: argparse.Namespace) -> int:
    try:
        with open(args.all_pairs, encoding="utf-8") as file:
            nodes = parse_hosts(file.read())
    except OSError as error:
        raise cm_error(error.errno or 0, error.strerror or str(error), "read", args.all_pairs) from None
    if len(nodes) < 2:
        args.parser.error(f"{args.all_pairs} has fewer than two hosts")
    if args.launch == _MPI:
        return _all_ranks(args, nodes)
    launcher = Launcher(args.launch or default_launcher(), shlex.split(args.remote))
    options = ["--count", str(args.count), "--timeout", f"{args.timeout:g}", "--tos", str(args.tos)]
    options += ["--control-port", str(args.control_port)]
    if args.provider is not None:
        options += ["--provider", args.provider]

    def shown(pair: Pair) -> None:
        if not args.json and not pair.ok:
            write(f"{_signs()[Sign.BAD]} {pair.source} -> {pair.destination}: {pair.step}: {pair.meaning}\n")

    return _told(args, nodes, check_all(nodes, launcher, options, shown))


def _all_ranks(args: argparse.Namespace, nodes: list[Node]) -> int:
    """The part of this process, which mpirun has started with others."""
    comm = world()
    servers: list[CheckServer] = []

    def serve() -> int:
        for port in (args.control_port, 0):  # two ranks of one host
            try:
                servers.append(CheckServer(None, port, args.provider))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    break
            else:
                threading.Thread(target=servers[0].run, name="rdmacm-check", daemon=True).start()
                return servers[0].where[1]
        return 0

    def check(node: Node, port: int) -> dict[str, object]:
        target = Target(node.address, 0, args.port_space, args.tos)
        measurer = Measurer(target, args.provider, args.bind, args.timeout, args.count)
        return as_json(run_check(target, measurer, control=("", port) if port else None, count=args.count))

    try:
        pairs = check_ranks(comm, nodes, serve, check)
    finally:
        for server in servers:
            server.close()
    return 0 if pairs is None else _told(args, nodes, pairs)


def _told(args: argparse.Namespace, nodes: list[Node], pairs: list[Pair]) -> int:
    """Write all pairs; the exit status."""
    if args.json:
        write_json(pairs_json(nodes, pairs))
    else:
        write(_matrix_text(nodes, pairs))
    failed = [pair.step for pair in worst_first(pairs) if not pair.ok]
    return min((int(step) for step in Step if step.label in failed), default=1) if failed else 0


def _matrix_text(nodes: list[Node], pairs: list[Pair]) -> str:
    """The matrix with the round trips in microseconds, and the worst pairs."""
    head = ["from \\ to", *(node.name for node in nodes)]
    rows = [head, *matrix(nodes, pairs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    good = [pair for pair in worst_first(pairs) if pair.ok and pair.rtt_us is not None]
    lines += [f"slowest: {pair.source} -> {pair.destination}, {pair.rtt_us:.0f} us" for pair in good[:_SLOWEST]]
    return "\n".join([bold(lines[0]), *lines[1:]]) + "\n"


def _port(args: argparse.Namespace, text: str) -> int:
    try:
        return int(integer_between(0, 65535, "port")(text))
    except argparse.ArgumentTypeError as problem:
        args.parser.error(str(problem))
        raise


def _check(args: argparse.Namespace, target: Target, measurer: Measurer, *, show: bool) -> Sequence:
    control = (args.via or "", args.control_port) if args.control_port else None
    shown = (lambda finding: write(_lines(finding))) if show else (lambda _: None)
    sequence = run_check(target, measurer, control=control, count=args.count, shown=shown)
    if show:
        write("".join(_lines(found) for found in sequence.all_findings() if found.sign is Sign.NOT_REACHED))
    return sequence


def _watch(args: argparse.Namespace, target: Target, measurer: Measurer) -> NoReturn:
    """Check again and again, until interrupted. On a terminal, each round replaces the one before."""
    is_screen = not args.json and sys.stdout is not None and sys.stdout.isatty()
    for number in itertools.count(1):
        sequence = _check(args, target, measurer, show=False)
        if args.json:
            write(json.dumps(as_json(sequence)) + "\n")
        else:
            head = bold(f"{printable(target.host)}, round {number}") + "\n"
            text = head + "".join(map(_lines, sequence.all_findings()))
            write(f"\x1b[H\x1b[J{text}" if is_screen else text)
        time.sleep(args.interval)
    raise AssertionError


def as_json(sequence: Sequence) -> dict[str, object]:
    """A check as JSON data."""
    failure = sequence.failure
    return {
        "host": sequence.target.host,
        "port": sequence.target.port or None,
        "ok": failure is None,
        "status": sequence.status,
        "failed": None if failure is None else failure.step.label,
        "steps": [finding.as_dict() for finding in sequence.all_findings()],
    }


def _signs() -> dict[Sign, str]:
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "".join(_SIGNS.values()).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return _ASCII_SIGNS
    return _SIGNS


def _lines(finding: Finding) -> str:
    """The line of a step, and below it what it means and what to try."""
    indent = " " * (_LABEL_WIDTH + 2)
    likely = "likely: " if finding.likely and finding.meaning else ""
    lines = [f"{_signs()[finding.sign]} {finding.step.label:<{_LABEL_WIDTH}}{printable(finding.figure)}"]
    if finding.meaning:
        lines.append(f"{indent}{likely}{printable(finding.meaning)}")
    if finding.command:
        named = f"rdmacm doctor {finding.rule}"
        rule = f" ({named})" if finding.rule and named not in finding.command else ""
        lines.append(f"{indent}try: {printable(finding.command)}{rule}")
    return "".join(f"{part}\n" for line in lines for part in wrapped_line(line))
