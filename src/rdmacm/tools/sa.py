"""``rdmacm sa``: what the subnet administrator of an InfiniBand fabric knows, and telling it of services."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from rdmacm.address import ALL_BITS_64, Gid
from rdmacm.errors import cm_error, printable
from rdmacm.ib import ports_wanted, transport_of
from rdmacm.ib.access import Records, SaAccess
from rdmacm.ib.transport import IbPort
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.records import GIGABITS
from rdmacm.proto.sa.subnet import LEASE_FOREVER, ClassPortInfo, MCMemberRecord, NodeRecord, NodeType, ServiceRecord
from rdmacm.tools.output import Page, Parser, facts, path_record_json, table, write, write_json

PAGE = Page(
    command="sa",
    summary="ask the subnet administrator of an InfiniBand fabric",
    description="""
        Asks the subnet administrator by way of one port, which needs no RDMA connection and no IP address. WHAT is:

          paths [GID]          paths from the port, to that GID or to all
          services [NAME]      services, of that name or all
          register ID [NAME]   tell of a service at the port, for --lease seconds
          withdraw ID          the end of it
          join MGID            make the port a member of a multicast group
          leave MGID           and no longer
          nodes                the fabric's ports and whose they are
          info                 the port, and what the administrator can do

        A port is umad:DEVICE/PORT, of a real device, or ibsim:NODE, of a fabric that ibsim simulates (ibsim:NODE@BASE
        where its IBSIM_SOCKNAME is BASE). A service and a membership belong to the port: they outlive this command.

        A subnet administrator whose answers nobody cuts up, as OpenSM's over ibsim, ends a table where one datagram
        is full: three paths, one service, one node. Where there would be more, the last line says so.

        With --json, paths, services and nodes write an object with records, a list, and is_cut, whether there would
        be more; the others write the record, and info port and administrator. Fields have the names of the records'
        classes, GIDs are text, keys and data of services hexadecimal.
    """,
    examples=(
        ("rdmacm sa paths fe80::2:c903:a1:b2c2", "How to get to that port from the first one in RDMACM_IB."),
        ("rdmacm sa nodes --port umad:mlx5_0/1", "Who is on the fabric."),
        ("rdmacm sa register 0x1000 demo.service --lease 3600", "Tell of a service for an hour."),
        ("rdmacm sa services demo.service --json | jq '.records[].service_gid'", "Where it is."),
    ),
    see_also="rdmacm devices, rdma_resolve_route(3), saquery(8), opensm(8)",
)

#: Bits of the administrator's capability mask and of its second one (InfiniBand Architecture 15.2.4).
_CAPABILITIES = {9: "multicast", 10: "multipath"}
_CAPABILITIES2 = {1: "QoS class", 12: "send-only full members"}

Record: TypeAlias = "PathRecord | ServiceRecord | MCMemberRecord | NodeRecord | ClassPortInfo"


def add_arguments(parser: Parser) -> None:
    """The arguments of ``rdmacm sa``."""
    parser.add_argument("what", metavar="WHAT", choices=list(_ACTIONS), help="What to do, see above.")
    parser.add_argument("operands", metavar="OPERAND", nargs="*", help="What it is about: a GID, an ID, a NAME.")
    parser.add_argument("--port", metavar="NAME", help="The port to ask by; by default the first in RDMACM_IB.")
    parser.add_argument(
        "--lease", metavar="SECONDS", type=_lease, help="How long a service is there (default: for ever)."
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, default=2.0, help="Wait so long for an answer (default: 2)."
    )
    parser.add_argument("--json", action="store_true", help="Write an object.")


def run(args: argparse.Namespace) -> int:
    """Ask, and write what was answered."""
    action, most, least = _ACTIONS[args.what]
    operands: list[str] = args.operands
    if not least <= len(operands) <= most:
        wanted = str(most) if most == least else f"{least} or {most}"
        args.parser.error(f"{args.what} takes {wanted} operand{'' if wanted == '1' else 's'}, not {len(operands)}")
    if args.lease is not None and args.what != "register":
        args.parser.error(f"{args.what} takes no --lease")
    question = action(args, *operands)
    with SaAccess(transport_of(args.port or _first_port()), timeout=args.timeout) as sa:
        question(sa)
    return 0


def _first_port() -> str:
    wanted = ports_wanted(os.environ)
    if not wanted:
        raise cm_error(
            errno.ENODEV,
            "no InfiniBand port is chosen",
            "open_device",
            hint="--port umad:mlx5_0/1 or --port ibsim:HostA, or one of these in RDMACM_IB",
        )
    return wanted[0]


# -- what there is to do: operands are looked at first, then the question asked -------------------------------

_Asking: TypeAlias = Callable[[SaAccess], None]


def _paths(args: argparse.Namespace, gid: str | None = None) -> _Asking:
    to = {} if gid is None else {"dgid": _gid(args, gid)}

    def ask(sa: SaAccess) -> None:
        # One to each.
        found = sa.paths(sgid=sa.port.gids[0], reversible=True, numb_path=1, **to)
        if to and not found:
            sa.path(**to)  # says why
        head = ("DGID", "DLID", "SLID", "P_KEY", "SL", "MTU", "GB/S")
        rows = [
            (
                str(path.dgid),
                str(path.dlid),
                str(path.slid),
                f"0x{path.pkey:04x}",
                str(path.sl),
                str(path.mtu_bytes or ""),
                f"{GIGABITS[path.rate]:g}" if path.rate in GIGABITS else "",
            )
            for path in found
        ]
        _write_records(args, found, head, rows, right=("DLID", "SLID", "SL", "MTU", "GB/S"))

    return ask


def _services(args: argparse.Namespace, name: str | None = None) -> _Asking:
    def ask(sa: SaAccess) -> None:
        found = sa.services(name)
        head = ("ID", "GID", "P_KEY", "LEASE", "NAME")
        rows = [
            (
                f"0x{service.service_id:x}",
                str(service.service_gid),
                f"0x{service.service_pkey:04x}",
                _lease_text(service.service_lease),
                printable(service.name),
            )
            for service in found
        ]
        _write_records(args, found, head, rows, right=("LEASE",))

    return ask


def _register(args: argparse.Namespace, service_id: str, name: str | None = None) -> _Asking:
    number = _service_id(args, service_id)
    if name is not None and len(name.encode()) > 64:
        args.parser.error(f"the name of a service has up to 64 bytes, not {len(name.encode())}")
    lease = LEASE_FOREVER if args.lease is None else args.lease
    return lambda sa: _write_service(args, sa.register(number, name, lease=lease))


def _withdraw(args: argparse.Namespace, service_id: str) -> _Asking:
    number = _service_id(args, service_id)
    return lambda sa: _write_service(args, sa.withdraw(number))


def _join(args: argparse.Namespace, mgid: str) -> _Asking:
    group = _gid(args, mgid)
    return lambda sa: _write_member(args, sa.join(group))


def _leave(args: argparse.Namespace, mgid: str) -> _Asking:
    group = _gid(args, mgid)

    def ask(sa: SaAccess) -> None:
        sa.leave(group)
        if args.json:
            write_json({"mgid": str(group), "port_gid": str(sa.port.gids[0])})

    return ask


def _nodes(args: argparse.Namespace) -> _Asking:
    def ask(sa: SaAccess) -> None:
        found = sa.nodes()
        head = ("LID", "TYPE", "PORT GUID", "PORTS", "DESCRIPTION")
        rows = [
            (
                str(node.lid),
                _node_type(node.node_type),
                f"{node.port_guid:016x}",
                str(node.num_ports),
                printable(node.description),
            )
            for node in found
        ]
        _write_records(args, found, head, rows, right=("LID", "PORTS"))

    return ask


def _info(args: argparse.Namespace) -> _Asking:
    def ask(sa: SaAccess) -> None:
        info = sa.class_port_info()
        port = sa.port
        if args.json:
            write_json({"port": _port_json(port), "administrator": record_json(info)})
            return
        can = [words for bit, words in _CAPABILITIES.items() if info.capability_mask >> bit & 1]
        can += [words for bit, words in _CAPABILITIES2.items() if info.capability_mask2 >> bit & 1]
        write(
            facts(
                [
                    ("port", f"{sa.transport.name}, {port.state.name}, LID {port.lid}"),
                    ("GID", str(port.gids[0])),
                    ("P_Keys", ", ".join(f"0x{pkey:04x}" for pkey in port.pkeys)),
                    ("subnet manager", f"LID {port.sm_lid}, SL {port.sm_sl}"),
                    ("class version", f"{info.base_version}.{info.class_version}"),
                    ("can", ", ".join(can) or "nothing optional"),
                    ("answers within", f"{4.096e-3 * 2**info.resp_time_value:.0f} ms"),
                ]
            )
        )

    return ask


#: What to do: the function, the most operands and the least.
_ACTIONS: dict[str, tuple[Callable[..., _Asking], int, int]] = {
    "paths": (_paths, 1, 0),
    "services": (_services, 1, 0),
    "register": (_register, 2, 1),
    "withdraw": (_withdraw, 1, 1),
    "join": (_join, 1, 1),
    "leave": (_leave, 1, 1),
    "nodes": (_nodes, 0, 0),
    "info": (_info, 0, 0),
}


# -- writing --------------------------------------------------------------------------------------------------


def _write_records(
    args: argparse.Namespace,
    found: Records[Any],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str],
) -> None:
    if args.json:
        write_json({"records": [record_json(record) for record in found], "is_cut": found.is_cut})
        return
    if not found:
        write("none\n")
        return
    more = "there are more, which did not fit into the answer\n" if found.is_cut else ""
    write(table(head, rows, right=right) + more)


def _write_service(args: argparse.Namespace, service: ServiceRecord) -> None:
    if args.json:
        write_json(record_json(service))
        return
    write(
        facts(
            [
                ("service", f"0x{service.service_id:x} {service.name}".rstrip()),
                ("GID", str(service.service_gid)),
                ("P_Key", f"0x{service.service_pkey:04x}"),
                ("lease", _lease_text(service.service_lease)),
            ]
        )
    )


def _write_member(args: argparse.Namespace, member: MCMemberRecord) -> None:
    if args.json:
        write_json(record_json(member))
        return
    write(
        facts(
            [
                ("group", str(member.mgid)),
                ("MLID", f"0x{member.mlid:04x}"),
                ("Q_Key", f"0x{member.q_key:08x}"),
                ("P_Key", f"0x{member.pkey:04x}"),
                ("MTU", str(128 << member.mtu)),
            ]
        )
    )


def record_json(record: Record) -> dict[str, object]:
    """The fields of a record, by their names."""
    if isinstance(record, PathRecord):
        return path_record_json(record)
    found = {field.name: _value_json(getattr(record, field.name)) for field in fields(record)}
    if isinstance(record, ServiceRecord):
        found["service_name"] = record.name
    elif isinstance(record, NodeRecord):
        found["node_description"] = record.description
    return found


def _value_json(value: object) -> object:
    if isinstance(value, Gid):
        return str(value)
    return value.hex() if isinstance(value, bytes) else value


def _port_json(port: IbPort) -> dict[str, object]:
    found = {field.name: getattr(port, field.name) for field in fields(port)}
    return {**found, "gids": [str(gid) for gid in port.gids], "state": port.state.name}


def _lease_text(lease: int) -> str:
    return "for ever" if lease == LEASE_FOREVER else f"{lease} s"


def _node_type(code: int) -> str:
    try:
        return {NodeType.CHANNEL_ADAPTER: "CA", NodeType.SWITCH: "switch", NodeType.ROUTER: "router"}[NodeType(code)]
    except ValueError:
        return str(code)


# -- operands -------------------------------------------------------------------------------------------------


def _gid(args: argparse.Namespace, text: str) -> Gid:
    parser: Parser = args.parser
    try:
        return Gid(text)
    except ValueError as problem:
        parser.error(str(problem))


def _service_id(args: argparse.Namespace, text: str) -> int:
    try:
        number = int(text, 0)
    except ValueError:
        number = -1
    if not 0 <= number <= ALL_BITS_64:
        args.parser.error(f"not a service id: {text!r} (want a number of up to 64 bits, such as 0x1000)")
    return number


def _lease(text: str) -> int:
    seconds = int(text)
    if not 0 < seconds < LEASE_FOREVER:
        raise ValueError
    return seconds


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise ValueError
    return seconds
