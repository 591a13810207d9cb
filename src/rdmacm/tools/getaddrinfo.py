"""``rdmacm getaddrinfo``: resolve a name. ``resolve`` and ``explain`` share its arguments."""

from __future__ import annotations

import argparse

from rdmacm.address import (
    Gid,
    InetAddr,
    SockAddr,
    SockAddrIB,
    format_address,
    parse_address,
    service_id,
    service_id_mask,
)
from rdmacm.addrinfo import AddrInfo, getaddrinfo, make_hints
from rdmacm.constants import AddressFamily, PortSpace, RaiFlag
from rdmacm.errors import printable
from rdmacm.proto.sa import PathRecord
from rdmacm.tools.arguments import add_provider
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import Page, Parser, address_json, bold, labelled_lines, path_record_json, write, write_json
from rdmacm.verbs.enums import QPType

ADDRESS_FORMS = """
        An address is an object such as {"family": "inet", "host": "10.0.0.1", "port": 7471}. "inet6" also has
        flowinfo and scope_id; "ib" has gid, sid, sid_mask, pkey, flowinfo and scope_id. A missing address is null.
"""

PAGE = Page(
    command="getaddrinfo",
    summary=COMMANDS["getaddrinfo"],
    description=f"""
        Calls rdma_getaddrinfo(3) with hints from the options, and writes all addresses, in order of preference.
        Without --noroute and --passive, each address has the source address, the device and the path that this host
        would use, as far as they are known without sending anything; an unreachable address has none.

        With --json, writes a list of objects with the fields of struct rdma_addrinfo, without the prefix "ai_":
        flags, family, qp_type, port_space, src_len, dst_len, src_addr, dst_addr, src_canonname, dst_canonname,
        route_len, route, connect_len and connect (hexadecimal, or null); and device (or null), port_num and
        gid_index. Families, types and flags are C's numbers; each member of route has flags and the fields of a path
        record.
{ADDRESS_FORMS}""",
    examples=(
        ("rdmacm getaddrinfo localhost 7471", "Resolve a name, for the default QP type (RC) and port space (TCP)."),
        ("rdmacm getaddrinfo -P udp -f inet6 ::1 7471", "Resolve an IPv6 address for datagrams."),
        ("rdmacm getaddrinfo --passive - 7471", "Show the address that a server would listen on."),
        ("rdmacm getaddrinfo -f ib -P ib fe80::10:5 7471", "Resolve a GID, with its path in the subnet."),
        ("rdmacm getaddrinfo --sa - storage", "Find a service of that name in an InfiniBand subnet."),
    ),
    see_also="rdmacm resolve, rdmacm explain, rdma_getaddrinfo(3), getaddrinfo(3), services(5)",
    environment=("RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_ACM_RUNDIR", "NO_COLOR"),
)

_PORT_SPACES = {"tcp": PortSpace.TCP, "udp": PortSpace.UDP, "ib": PortSpace.IB, "ipoib": PortSpace.IPOIB}
_QP_TYPES = {qp.name.lower().replace("_", "-"): qp for qp in QPType}
_FAMILIES = {"inet": AddressFamily.INET, "inet6": AddressFamily.INET6, "ib": AddressFamily.IB}
_FAMILY_NAMES = {AddressFamily.INET: "IPv4", AddressFamily.INET6: "IPv6", AddressFamily.IB: "InfiniBand"}
_FLAGS = {
    "passive": RaiFlag.PASSIVE,
    "numeric": RaiFlag.NUMERICHOST,
    "noroute": RaiFlag.NOROUTE,
    "sa": RaiFlag.SA,
    "dns": RaiFlag.DNS,
}


def _choice(text: str) -> str:
    """The spelling of a choice: lower case, with hyphens."""
    return text.lower().replace("_", "-")


def _parse_source(text: str) -> InetAddr:
    """Parse ``10.0.0.1``, ``10.0.0.1:5000``, ``fe80::1%eth0`` or ``[fe80::1%eth0]:5000``."""
    host, port = text, "0"
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise argparse.ArgumentTypeError(f"{text!r} is not [ADDRESS]:PORT")
        port = rest[1:] or "0"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not (port.isascii() and port.isdigit()):
        raise argparse.ArgumentTypeError(f"{port!r} is not a port number")
    if not host:
        raise argparse.ArgumentTypeError(f"{text!r} has no address")
    try:
        address = parse_address((host, int(port[:9])))
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    assert isinstance(address, InetAddr)
    return address


def add_name_arguments(parser: Parser) -> None:
    """Add NODE, SERVICE and the options for the hints."""
    parser.add_argument(
        "node", metavar="NODE", help="A host name, an IPv4 or IPv6 address (%%INTERFACE allowed), a GID, or - for none."
    )
    parser.add_argument(
        "service",
        metavar="SERVICE",
        nargs="?",
        help="A port number or a name from services(5); with --sa the name or id of a registered service.",
    )
    parser.add_argument(
        "-P",
        "--port-space",
        type=_choice,
        choices=_PORT_SPACES,
        help="The port space of the service (default: udp for QP type ud, otherwise tcp).",
    )
    parser.add_argument(
        "--qp-type", type=_choice, choices=_QP_TYPES, metavar="TYPE", help=f"The QP type: {', '.join(_QP_TYPES)}."
    )
    parser.add_argument(
        "-f",
        "--family",
        type=_choice,
        choices=_FAMILIES,
        help="Use only addresses of this family; with ib, NODE is a GID (RAI_FAMILY).",
    )
    parser.add_argument(
        "-s",
        "--source",
        type=_parse_source,
        metavar="ADDRESS",
        help="The source: a numeric address, or ADDRESS:PORT with [ ] around an IPv6 address.",
    )
    parser.add_argument("--passive", action="store_true", help="Return addresses to listen on (RAI_PASSIVE).")
    parser.add_argument(
        "--numeric", action="store_true", help="NODE is a numeric address; look up no names (RAI_NUMERICHOST)."
    )
    parser.add_argument(
        "--noroute",
        action="store_true",
        help="Omit source address, device and path (RAI_NOROUTE). Has no effect on resolve and explain.",
    )
    parser.add_argument(
        "--sa", action="store_true", help="Look up the service at the subnet administrator; NODE must be - (RAI_SA)."
    )
    parser.add_argument("--dns", action="store_true", help="Look up names by DNS (RAI_DNS).")
    add_provider(parser)


def node_of(args: argparse.Namespace) -> str | None:
    """Return NODE, or None for ``-``."""
    return None if args.node == "-" else str(args.node)


def hints_of(args: argparse.Namespace) -> AddrInfo | None:
    """Return the hints from the options, or None without any."""
    flags = RaiFlag(0)
    for option, flag in _FLAGS.items():
        if getattr(args, option):
            flags |= flag
    if args.family == "ib":
        flags |= RaiFlag.FAMILY
    port_space = _PORT_SPACES.get(args.port_space)
    return make_hints(
        flags=flags or None,
        family=_FAMILIES.get(args.family),
        qp_type=_QP_TYPES.get(args.qp_type),
        port_space=port_space,
        src_addr=_source_address(args, port_space or 0),
    )


def _source_address(args: argparse.Namespace, port_space: int) -> SockAddr | None:
    source: InetAddr | None = args.source
    if source is None or args.family != "ib":
        return None if source is None else source.sockaddr
    if len(source.ip) != 16:
        args.parser.error(f"with --family ib the source is a GID, not {source.host}")
    port = source.port
    return SockAddrIB(Gid(source.ip), service_id(port_space, port), service_id_mask(port_space, port))


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm getaddrinfo``."""
    add_name_arguments(parser)
    parser.add_argument("--json", action="store_true", help="Write a list of JSON objects.")


def run(args: argparse.Namespace) -> int:
    """Resolve and write the addresses."""
    found = getaddrinfo(node_of(args), args.service, hints_of(args), provider=args.provider)
    if args.json:
        write_json([addrinfo_json(info) for info in found])
    else:
        write("\n".join(_text(info) for info in found))
    return 0


def _text(info: AddrInfo) -> str:
    lines = []
    names = [name for name in (info.src_canonname, info.dst_canonname) if name]
    if names:
        lines.append(("name", ", ".join(names)))
    # The service record of a subnet administrator has no QP type.
    qp_type = f"QP type {QPType(info.qp_type).name}" if info.qp_type else "any QP type"
    lines.append(
        (
            "kind",
            f"{_FAMILY_NAMES[AddressFamily(info.family)]}, {qp_type}, port space {PortSpace(info.port_space).name}",
        )
    )
    if info.dst_addr is not None and info.src_addr is not None:
        lines.append(("source", format_address(info.src_addr)))
    if info.device is not None:
        where = f"{info.device} port {info.port_num}"
        lines.append(("device", where if info.dst_addr is None else f"{where}, GID index {info.gid_index}"))
    lines += [("route", path_text(data.path)) for data in info.route]
    if info.connect:
        lines.append(("connect", info.connect.hex()))
    title = format_address(info.dst_addr) if info.dst_addr is not None else f"listen on {format_address(info.src_addr)}"
    return f"{bold(printable(title))}\n{labelled_lines(lines, 2)}"


def path_text(path: PathRecord) -> str:
    """Format a path record as one line: both GIDs, MTU, LIDs or hop limit, and P_Key."""
    way = f"LID {path.slid} -> {path.dlid}, SL {path.sl}" if path.dlid else f"hop limit {path.hop_limit}"
    return f"{path.sgid} -> {path.dgid}, MTU {path.mtu_bytes}, {way}, P_Key 0x{path.pkey:04x}"


def addrinfo_json(info: AddrInfo) -> dict[str, object]:
    """Return the fields of struct rdma_addrinfo, and device, port and GID index, as JSON data."""
    return {
        "flags": int(info.flags),
        "family": int(info.family),
        "qp_type": int(info.qp_type),
        "port_space": int(info.port_space),
        "src_len": info.src_len,
        "dst_len": info.dst_len,
        "src_addr": address_json(info.src_addr),
        "dst_addr": address_json(info.dst_addr),
        "src_canonname": info.src_canonname,
        "dst_canonname": info.dst_canonname,
        "route_len": info.route_len,
        "route": [{"flags": int(data.flags), **path_record_json(data.path)} for data in info.route],
        "connect_len": info.connect_len,
        "connect": info.connect.hex() or None,
        "device": info.device,
        "port_num": info.port_num,
        "gid_index": info.gid_index,
    }
