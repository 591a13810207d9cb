"""``rdmacm explain``: a resolution with the reasons for its result."""

from __future__ import annotations

import argparse

from rdmacm.address import InetAddr, format_address
from rdmacm.diagnosis.explain import explain
from rdmacm.errors import GaiError, RdmaError, cm_error, printable
from rdmacm.explanation import Explanation
from rdmacm.tools.arguments import add_resolution_timeout
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.getaddrinfo import add_name_arguments, hints_of, node_of
from rdmacm.tools.output import Page, Parser, ReportedError, bold, dim, wrapped_line, write, write_json

PAGE = Page(
    command="explain",
    summary=COMMANDS["explain"],
    description="""
        Resolves a name, its address and the route to it, as rdma_getaddrinfo(3), rdma_resolve_addr(3) and
        rdma_resolve_route(3) do, and shows the basis of each decision: the addresses of the name, the kernel's
        route, the neighbour entry of the next hop, and every candidate (a GID of a port of a device) with the rule
        that chose or dropped it; then the path, and the time that each step took.

        When a name has several addresses, the first one that can be resolved is used, and a note tells why earlier
        ones could not. When the link-layer address of the next hop is unknown, the kernel asks for it (ARP or
        neighbour discovery); nothing else is sent.

        A resolution that fails is explained up to the failed step, with the errno or EAI code that librdmacm would
        return.

        With --json, writes one object: node, service, provider, provider_reason, names, candidates, chosen, route,
        neighbour, path, steps, notes, ok, error, errno, errno_name, message and hint.
    """,
    examples=(
        ("rdmacm explain localhost 7471", "Explain the resolution of this host."),
        ("rdmacm explain -s 10.0.0.1 10.0.0.2 7471", "Explain the resolution of 10.0.0.2 from a given source."),
        ("rdmacm explain --json 10.0.0.2 | jq .candidates", "Print the candidates as JSON."),
    ),
    see_also="rdmacm resolve, rdmacm devices, rdma_resolve_addr(3), ip-route(8), ip-neighbour(8)",
    environment=("RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_ACM_RUNDIR", "NO_COLOR"),
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm explain``."""
    add_name_arguments(parser)
    add_resolution_timeout(parser)
    parser.add_argument("--json", action="store_true", help="Write one JSON object.")


def run(args: argparse.Namespace) -> int:
    """Resolve and explain."""
    found = explain(node_of(args), args.service, hints_of(args), timeout_ms=args.timeout_ms, provider=args.provider)
    if args.json:
        write_json(found.as_dict())
    else:
        write(_styled(found.text()))
    if not found.ok:
        raise ReportedError(error_of(found, args.source))
    return 0


def _styled(text: str) -> str:
    """Return the text with bold headings and dim dropped candidates, if the terminal supports that."""
    lines = []
    dropped = False
    for line in map(printable, text.split("\n")):
        dropped = line.startswith("  no ") or (dropped and line.startswith("     "))
        is_heading = bool(line[:1].strip())
        lines += [bold(part) if is_heading else dim(part) if dropped else part for part in wrapped_line(line)]
    return "\n".join(lines) + "\n"


def error_of(explanation: Explanation, source: InetAddr | None) -> RdmaError:
    """Return the error of a failed resolution. ``source`` is the address given by ``--source``."""
    node, service = explanation.node, explanation.service
    if explanation.error == "bind_addr" and source is not None:
        address = str(source)
    elif explanation.names:
        address = explanation.names[0]
    else:
        address = f":{service}" if node is None else node if service is None else format_address((node, service))  # type: ignore[arg-type]
    step = "getaddrinfo" if explanation.error == "name" else str(explanation.error)
    fields = (explanation.errno, explanation.message, step, address, explanation.hint, explanation)
    # EAI codes are negative, errnos are positive.
    return GaiError(*fields) if explanation.errno < 0 else cm_error(*fields)
