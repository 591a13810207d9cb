"""``rdmacm explain``: a resolution with its reasons."""

from __future__ import annotations

import argparse

from rdmacm.address import InetAddr, format_address
from rdmacm.errors import GaiError, RdmaError, cm_error, printable
from rdmacm.explain import explain
from rdmacm.explanation import Explanation
from rdmacm.tools.getaddrinfo import add_name_arguments, hints_of, node_of
from rdmacm.tools.output import Page, Parser, bold, dim, write, write_json

PAGE = Page(
    command="explain",
    summary="resolve a destination, and say why it came out so",
    description="""
        Resolves a name, its address and the route to it as rdma_getaddrinfo(3), rdma_resolve_addr(3) and
        rdma_resolve_route(3) do one after the other, and writes what each was decided by: the addresses of the name,
        the kernel's route, the next hop's neighbour entry, and every candidate (a GID of a port of a device) with
        the rule that chose or dropped it; then the path, and how long each step took.

        Of several addresses of a name the first that can be resolved is used, and what was wrong with those before
        it is noted. Where the next hop's link-layer address is not known, the kernel is made to ask for it (ARP or
        neighbour discovery); nothing else is sent.

        A resolution that fails is explained as far as it came, and its last step is named with the errno, or the EAI
        code, librdmacm would give.

        With --json, one object: node, service, provider, names, candidates, chosen, route, neighbour, path, steps,
        notes, ok, error, errno, errno_name, message and hint.
    """,
    examples=(
        ("rdmacm explain localhost 7471", "Explain the way to this host itself."),
        ("rdmacm explain -s 10.0.0.1 10.0.0.2 7471", "Explain the way to 10.0.0.2 from one of several addresses."),
        ("rdmacm explain --json 10.0.0.2 | jq .candidates", "The candidates, for a program."),
    ),
    see_also="rdmacm resolve, rdmacm devices, rdma_resolve_addr(3), ip-route(8), ip-neighbour(8)",
)


def milliseconds(text: str) -> int:
    """The type of ``--timeout``."""
    if not (text.isascii() and text.isdigit() and 0 < int(text[:11]) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds from 1 to {(1 << 31) - 1}")
    return int(text)


def add_timeout(parser: Parser) -> None:
    """How long a neighbour may take."""
    parser.add_argument(
        "-t",
        "--timeout",
        type=milliseconds,
        default=2000,
        metavar="MS",
        help="How long the next hop may take to answer, in milliseconds (default: %(default)s).",
    )


def add_arguments(parser: Parser) -> None:
    """The arguments of ``rdmacm explain``."""
    add_name_arguments(parser)
    add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="Write one object.")


def run(args: argparse.Namespace) -> int:
    """Resolve and explain."""
    found = explain(node_of(args), args.service, hints_of(args), timeout_ms=args.timeout, provider=args.provider)
    if args.json:
        write_json(found.as_dict())
    else:
        write(_styled(found.text()))
    if not found.ok:
        raise error_of(found, args.source)
    return 0


def _styled(text: str) -> str:
    """The text with its headings bold and the dropped candidates dim, where that can be shown."""
    lines = []
    dropped = False
    for line in map(printable, text.split("\n")):
        dropped = line.startswith("  no ") or (dropped and line.startswith("     "))
        lines.append(bold(line) if line[:1].strip() else dim(line) if dropped else line)
    return "\n".join(lines) + "\n"


def error_of(explanation: Explanation, source: InetAddr | None) -> RdmaError:
    """The error of a resolution that failed; ``source`` is the one that was asked for."""
    node, service = explanation.node, explanation.service
    if explanation.error == "bind_addr" and source is not None:
        address = str(source)
    elif explanation.names:
        address = explanation.names[0]
    else:
        address = f":{service}" if node is None else node if service is None else format_address((node, service))  # type: ignore[arg-type]
    step = "getaddrinfo" if explanation.error == "name" else str(explanation.error)
    facts = (explanation.errno, explanation.message, step, address, explanation.hint, explanation)
    # EAI codes are negative, errnos positive.
    return GaiError(*facts) if explanation.errno < 0 else cm_error(*facts)
