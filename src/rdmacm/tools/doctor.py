"""``rdmacm doctor``: what keeps connections from working on this host."""

from __future__ import annotations

import argparse
import json
import socket
import time
from dataclasses import replace
from pathlib import Path

from rdmacm.diagnosis.explain import devices
from rdmacm.doctor import BY_ID, RULES, Examination, collect, examine
from rdmacm.doctor.ask import TIMEOUT_MS, ask
from rdmacm.doctor.matrix import Matrix, parse
from rdmacm.doctor.pages import as_json, explanation, rule_json, text
from rdmacm.errors import cm_error
from rdmacm.tools.arguments import add_provider, integer_between
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import Page, Parser, UsageError, bold, wrapped_line, write, write_json

PAGE = Page(
    command="doctor",
    summary=COMMANDS["doctor"],
    description="""
        Measures this host and judges it by a table of rules: devices, modules and permissions, the limit of locked
        memory, network namespaces, interfaces and addresses, GIDs, routes, neighbours, MTU, UDP port 4791 and its
        firewalls, ports, and traffic classes; for the kernel's devices as well as for the software devices. Each
        finding has the measurement that shows it, and a command that mends it. Nothing is changed, and without --to
        and --port nothing is sent.

        The questions have an order, and the first one with a finding is to be mended first. What comes after it is
        listed as not reached; findings there may be its consequences. A note is worth knowing, and no fault.

        With RULE, such as C1, explains that rule: its symptoms, its test, what it means and what mends it. Error
        messages of rdmacm name the rule that fits. docs/doctor.md lists the rules, with an index of symptoms.

        With --to, the destination is resolved and the rules of routes and neighbours judge the result; with --port as
        well, it is connected to, and disconnected at once. With --port alone, that port is bound here, and freed.

        --report writes findings, devices, GIDs and routes as a page of HTML that needs no other file.

        With --json, writes one object: ok, provider, provider_reason, devices, interfaces, questions (question, and
        state: ok, finding or not reached), findings and notes (rule, title, evidence, likely, question, finding,
        command), and rules (rule, state, saw). With RULE: rule, title, evidence, question, symptoms, test, finding,
        mend and sources.

        The exit status is 1 if there is a finding.
    """,
    examples=(
        ("rdmacm doctor", "Look for faults."),
        ("rdmacm doctor --to 10.0.0.2 --port 7471", "Also resolve that address, and connect to the port."),
        ("rdmacm doctor C1", "Explain the rule C1."),
        ("rdmacm doctor --report doctor.html", "Write a page for the browser."),
    ),
    see_also="rdmacm explain, rdmacm devices, rdma(8), ip-route(8), nft(8)",
    environment=("RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_CORE", "NO_COLOR"),
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm doctor``."""
    parser.add_argument("rule", nargs="?", metavar="RULE", help="A rule to explain, such as C1.")
    parser.add_argument("--to", default="", metavar="ADDRESS", help="A destination to resolve.")
    parser.add_argument("--from", dest="source", default="", metavar="ADDRESS", help="The source address to use.")
    parser.add_argument(
        "--port",
        type=integer_between(1, 65535),
        default=0,
        metavar="N",
        help="With --to, the port to connect to; without, a port of this host to bind.",
    )
    parser.add_argument("--unit", default="", metavar="NAME", help="The unit of systemd whose settings to judge.")
    parser.add_argument("-v", "--verbose", action="store_true", help="Also list each rule and what it saw.")
    parser.add_argument("--report", metavar="FILE", help="Write a page of HTML to this file.")
    parser.add_argument(
        "--matrix", metavar="FILE", help="A JSON matrix of all pairs of hosts, which the report shows as a heat map."
    )
    add_provider(parser)
    parser.add_argument("--json", action="store_true", help="Write one JSON object.")


def run(args: argparse.Namespace) -> int:
    """Examine the host, or explain a rule."""
    if args.rule is not None:
        return _explain(args)
    if args.source and not (args.to or args.port):
        args.parser.error("--from is for --to, or for --port")
    if args.matrix is not None and args.report is None:
        args.parser.error("--matrix is for --report")
    host = collect(provider=args.provider, unit=args.unit)
    if args.to or args.port:
        host = replace(host, target=ask(args.to, args.source, args.port, args.provider, TIMEOUT_MS))
    found = examine(host)
    if args.report is not None:
        _write_report(args.report, found, args.matrix)
    if args.json:
        write_json(as_json(found))
    else:
        lines = text(found, verbose=args.verbose)
        write("".join(f"{part}\n" for line in lines for part in _styled(line)))
    return 1 if found.findings else 0


def _styled(line: str) -> list[str]:
    parts = wrapped_line(line)
    return [bold(part) for part in parts] if line[:1].strip() else parts


def _explain(args: argparse.Namespace) -> int:
    rule = BY_ID.get(args.rule.upper())
    if rule is None:
        known = " ".join(each.id for each in RULES)
        raise UsageError(f"doctor: no rule {args.rule!r}, there are {known}; try: rdmacm doctor --help")
    if args.json:
        write_json(rule_json(rule))
    else:
        write("".join(f"{part}\n" for line in explanation(rule) for part in _styled(line)))
    return 0


def _write_report(path: str, found: Examination, matrix: str | None) -> None:
    """Write the page of HTML."""
    from rdmacm.doctor.report import page

    when = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    content = page(found, _matrix(matrix), devices("soft"), name=socket.gethostname(), when=when)
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise cm_error(error.errno or 0, error.strerror or str(error), "write", path) from error


def _matrix(path: str | None) -> Matrix | None:
    """The matrix of all pairs in a file; None without a file."""
    if path is None:
        return None
    try:
        return parse(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise cm_error(error.errno or 0, error.strerror or str(error), "read", path) from error
    except ValueError as error:
        raise UsageError(f"doctor: {path} is no matrix: {error}; try: rdmacm doctor --help") from error
