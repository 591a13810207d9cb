"""``rdmacm resolve``: resolve the address and the route of a destination."""

from __future__ import annotations

import argparse

from rdmacm.address import format_address
from rdmacm.cmid import CmId
from rdmacm.diagnosis.explain import resolve
from rdmacm.explanation import Explanation
from rdmacm.tools.arguments import add_resolution_timeout
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.explain import error_of
from rdmacm.tools.getaddrinfo import ADDRESS_FORMS, add_name_arguments, hints_of, node_of
from rdmacm.tools.output import Page, Parser, address_json, labelled_lines, path_record_json, write, write_json

PAGE = Page(
    command="resolve",
    summary=COMMANDS["resolve"],
    description=f"""
        Resolves a name, its address and the route to it, as a program does before rdma_connect(3), and shows the
        state of the identifier after that. When a name has several addresses, the first one that can be resolved is
        used. When the link-layer address of the next hop is unknown, the kernel asks for it (ARP or neighbour
        discovery); nothing else is sent.

        With --json, writes one object: node, service, dst_addr, src_addr, provider, port_space, qp_type, device,
        port_num, gid_index, sgid, dgid, pkey, route (the fields of the path record; null with --passive) and steps,
        a list of objects with name and microseconds.
{ADDRESS_FORMS}""",
    examples=(
        ("rdmacm resolve localhost", "Resolve this host, without a port."),
        ("rdmacm resolve storage-7 7471", "Resolve another host and its port 7471."),
        ("rdmacm resolve -t 500 10.0.0.2 7471", "Wait at most half a second for the next hop."),
        ("rdmacm resolve --json 10.0.0.2 7471 | jq -r .device", "Print only the device."),
    ),
    see_also="rdmacm explain, rdmacm getaddrinfo, rdma_resolve_addr(3), rdma_resolve_route(3)",
    environment=("RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_ACM_RUNDIR", "NO_COLOR"),
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm resolve``."""
    add_name_arguments(parser)
    add_resolution_timeout(parser)
    parser.add_argument("--json", action="store_true", help="Write one JSON object.")


def run(args: argparse.Namespace) -> int:
    """Resolve and write the result."""
    cmid, explanation = resolve(
        node_of(args), args.service, hints_of(args), timeout_ms=args.timeout_ms, provider=args.provider
    )
    if cmid is None:
        raise error_of(explanation, args.source)
    with cmid:
        if args.json:
            write_json(resolution_json(cmid, explanation))
        else:
            write(labelled_lines(_labelled_values(cmid, explanation)))
    return 0


def _labelled_values(cmid: CmId, explanation: Explanation) -> list[tuple[str, str]]:
    route = cmid.route
    out = []
    if route.dst_addr is not None:
        out.append(("destination", format_address(route.dst_addr)))
    out.append(("source", format_address(route.src_addr)))
    if cmid.is_bound:
        out += [
            ("device", f"{cmid.verbs.name} (provider {explanation.provider})"),
            ("port", str(cmid.port_num)),
            ("GID index", str(cmid.gid_index)),
            ("source GID", str(route.sgid)),
        ]
    if route.dst_addr is not None:
        out.append(("destination GID", str(route.dgid)))
    if cmid.is_bound:
        out.append(("P_Key", f"0x{route.pkey:04x}"))
    out += [("QP type", cmid.qp_type.name), ("port space", cmid.ps.name)]
    if (way := explanation.route) is not None:
        hop = f"via gateway {way.gateway}" if way.gateway else "on link" if way.kind == "unicast" else way.kind
        out.append(("route", f"{hop}, interface {way.interface}"))
    if (hop_entry := explanation.neighbour) is not None:
        at = f" at {hop_entry.link_layer_address}" if hop_entry.link_layer_address else ""
        out.append(("next hop", f"{hop_entry.address}{at} ({hop_entry.state})"))
    for path in route.path_rec:
        if path.dlid:
            out.append(("LIDs", f"{path.slid} -> {path.dlid}, SL {path.sl}"))
        out += [
            ("path MTU", f"{path.mtu_bytes} bytes"),
            ("hop limit", str(path.hop_limit)),
            ("traffic class", str(path.traffic_class)),
            ("flow label", f"0x{path.flow_label:05x}"),
        ]
        if path.service_id:  # subnet administrators leave it 0
            out.append(("service ID", f"0x{path.service_id:016x}"))
        out.append(("packet lifetime", f"{4.096e-3 * 2**path.packet_life_time:.4g} ms"))
    out += [("note", note) for note in explanation.notes]
    for step in explanation.steps:
        out.append((f"step {step.name}", f"{step.microseconds:8.1f} us  {step.detail}".rstrip()))
    return out


def resolution_json(cmid: CmId, explanation: Explanation) -> dict[str, object]:
    """Return the state of the identifier, and the time that each step took, as JSON data."""
    route = cmid.route
    return {
        "node": explanation.node,
        "service": explanation.service,
        "dst_addr": address_json(route.dst_addr),
        "src_addr": address_json(route.src_addr),
        "provider": explanation.provider,
        "port_space": int(cmid.ps),
        "qp_type": int(cmid.qp_type),
        "device": cmid.verbs.name if cmid.is_bound else None,
        "port_num": cmid.port_num,
        "gid_index": cmid.gid_index,
        "sgid": str(route.sgid),
        "dgid": str(route.dgid),
        "pkey": route.pkey,
        "route": path_record_json(route.path_rec[0]) if route.path_rec else None,
        "steps": [{"name": step.name, "microseconds": step.microseconds} for step in explanation.steps],
    }
