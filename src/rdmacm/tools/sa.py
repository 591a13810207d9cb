"""``rdmacm sa``: query the subnet administrator of an InfiniBand fabric, register services, join groups."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TypeAlias, TypeVar

from rdmacm.address import ALL_BITS_64, Gid
from rdmacm.errors import cm_error, printable
from rdmacm.ib import port_names_in, transport_of
from rdmacm.ib.access import Records, SaAccess
from rdmacm.ib.transport import IbPort
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.records import RATE_GBPS
from rdmacm.proto.sa.subnet import (
    LEASE_FOREVER,
    ClassPortInfo,
    MCMemberRecord,
    NodeInfoType,
    NodeRecord,
    ServiceRecord,
    service_name_bytes,
)
from rdmacm.tools.arguments import integer_between
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import Page, Parser, labelled_lines, path_record_json, table, write, write_json
from rdmacm.tools.waiting import notice

PAGE = Page(
    command="sa",
    summary=COMMANDS["sa"],
    description="""
        Queries the subnet administrator through one port. Needs neither an RDMA connection nor an IP address. WHAT is
        one of:

          paths [GID]          list the paths from the port to a GID or to all
          services [NAME]      list the services, of a name or all
          register ID [NAME]   register a service at the port, for --lease seconds
          withdraw ID          withdraw a service
          join MGID            join the port to a multicast group
          leave MGID           leave a multicast group
          nodes                list the ports of the fabric and their nodes
          info                 show the port and the administrator's capabilities

        A port is umad:DEVICE/PORT on a real device, or ibsim:NODE on a fabric simulated by ibsim (ibsim:NODE@BASE if
        its IBSIM_SOCKNAME is BASE). Services and memberships belong to the port and remain after this command ends.

        Without RMPP segmentation, as with OpenSM over ibsim, an answer has only the records that fit into one
        datagram: three paths, one service, one node. A last line reports that records are missing.

        With --json, paths, services and nodes write an object with a list, records, and is_cut, which is true if
        records are missing; info writes port and administrator, and the others write the record. Fields are named as
        in the classes of the records; GIDs are text, keys and data of services are hexadecimal.
    """,
    examples=(
        ("rdmacm sa paths fe80::2:c903:a1:b2c2", "Show the path from the first port in RDMACM_IB to a GID."),
        ("rdmacm sa nodes --port umad:mlx5_0/1", "List the nodes of the fabric."),
        ("rdmacm sa register 0x1000 demo.service --lease 3600", "Register a service for an hour."),
        ("rdmacm sa services demo.service --json | jq '.records[].service_gid'", "Print the GIDs that provide it."),
    ),
    see_also="rdmacm devices, rdma_resolve_route(3), saquery(8), opensm(8)",
    environment=("NO_COLOR",),
    own_environment=(
        ("RDMACM_IB", "InfiniBand ports, separated by commas; the first is used without --port."),
        ("IBSIM_SOCKNAME", "The name of ibsim's sockets, for ports ibsim:NODE (default: sim)."),
    ),
)

_NODE_TYPES: dict[int, str] = {
    NodeInfoType.CHANNEL_ADAPTER: "CA",
    NodeInfoType.SWITCH: "switch",
    NodeInfoType.ROUTER: "router",
}
#: Bits of CapabilityMask and CapabilityMask2 in ClassPortInfo (InfiniBand Architecture 15.2.4).
_CAPABILITIES = {9: "multicast", 10: "multipath"}
_CAPABILITIES2 = {1: "QoS class", 12: "send-only full members"}

Record: TypeAlias = "PathRecord | ServiceRecord | MCMemberRecord | NodeRecord | ClassPortInfo"
R = TypeVar("R", PathRecord, ServiceRecord, NodeRecord)
#: The columns of a table of records, by title: the text of each in a record.
_Columns: TypeAlias = "dict[str, Callable[[R], str]]"


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm sa``."""
    parser.add_argument("what", metavar="WHAT", choices=list(_ACTIONS), help="The query, as listed above.")
    parser.add_argument("operands", metavar="OPERAND", nargs="*", help="Its operands: a GID, an ID, a NAME.")
    parser.add_argument("--port", metavar="NAME", help="The port to use (default: the first in RDMACM_IB).")
    parser.add_argument(
        "--lease",
        metavar="SECONDS",
        type=integer_between(1, LEASE_FOREVER - 1, "number of seconds"),
        help="Lease of the service (default: for ever).",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_timeout, default=2.0, help="Time to wait for an answer (default: 2)."
    )
    parser.add_argument("--json", action="store_true", help="Write one JSON object.")


def run(args: argparse.Namespace) -> int:
    """Send the query and write the answer."""
    action, least, most = _ACTIONS[args.what]
    operands: list[str] = args.operands
    if not least <= len(operands) <= most:
        wanted = str(most) if most == least else f"{least} or {most}"
        args.parser.error(f"{args.what} takes {wanted} operand{'' if wanted == '1' else 's'}, not {len(operands)}")
    if args.lease is not None and args.what != "register":
        args.parser.error(f"{args.what} takes no --lease")
    query = action(args, *operands)
    with SaAccess(transport_of(args.port or _first_port()), timeout=args.timeout) as sa:
        with notice("the subnet administrator"):
            query(sa)
    return 0


def _first_port() -> str:
    names = port_names_in(os.environ)
    if not names:
        raise cm_error(
            errno.ENODEV,
            "no InfiniBand port is given",
            "open_device",
            hint="--port umad:mlx5_0/1 or --port ibsim:HostA, or one of these in RDMACM_IB",
        )
    return names[0]


# -- queries: each function checks the operands and returns the query -----------------------------------------

_Query: TypeAlias = Callable[[SaAccess], None]


def _paths(args: argparse.Namespace, gid: str | None = None) -> _Query:
    to = {} if gid is None else {"dgid": _gid(args, gid)}

    def query(sa: SaAccess) -> None:
        # One path to each destination.
        found = sa.paths(sgid=sa.port.gids[0], reversible=True, numb_path=1, **to)
        if to and not found:
            sa.path(**to)  # raises an error with the reason
        columns: _Columns[PathRecord] = {
            "DGID": lambda path: str(path.dgid),
            "DLID": lambda path: str(path.dlid),
            "SLID": lambda path: str(path.slid),
            "P_KEY": lambda path: f"0x{path.pkey:04x}",
            "SL": lambda path: str(path.sl),
            "MTU": lambda path: str(path.mtu_bytes or ""),
            "GB/S": lambda path: f"{RATE_GBPS[path.rate]:g}" if path.rate in RATE_GBPS else "",
        }
        _write_records(args, found, columns, right=("DLID", "SLID", "SL", "MTU", "GB/S"))

    return query


def _services(args: argparse.Namespace, name: str | None = None) -> _Query:
    columns: _Columns[ServiceRecord] = {
        "ID": lambda service: f"0x{service.service_id:x}",
        "GID": lambda service: str(service.service_gid),
        "P_KEY": lambda service: f"0x{service.service_pkey:04x}",
        "LEASE": lambda service: _lease_text(service.service_lease),
        "NAME": lambda service: printable(service.name),
    }
    return lambda sa: _write_records(args, sa.services(name), columns, right=("LEASE",))


def _register(args: argparse.Namespace, service_id: str, name: str | None = None) -> _Query:
    number = _service_id(args, service_id)
    size = 0 if name is None else len(service_name_bytes(name))
    if size > 64:
        args.parser.error(f"the name of a service has at most 64 bytes, not {size}")
    lease = LEASE_FOREVER if args.lease is None else args.lease
    return lambda sa: _write_record(args, sa.register(number, name, lease=lease))


def _withdraw(args: argparse.Namespace, service_id: str) -> _Query:
    number = _service_id(args, service_id)
    return lambda sa: _write_record(args, sa.withdraw(number))


def _join(args: argparse.Namespace, mgid: str) -> _Query:
    group = _gid(args, mgid)
    return lambda sa: _write_record(args, sa.join(group))


def _leave(args: argparse.Namespace, mgid: str) -> _Query:
    group = _gid(args, mgid)

    def query(sa: SaAccess) -> None:
        sa.leave(group)
        if args.json:
            write_json({"mgid": str(group), "port_gid": str(sa.port.gids[0])})

    return query


def _nodes(args: argparse.Namespace) -> _Query:
    columns: _Columns[NodeRecord] = {
        "LID": lambda node: str(node.lid),
        "TYPE": lambda node: _NODE_TYPES.get(node.node_type, str(node.node_type)),
        "PORT GUID": lambda node: f"{node.port_guid:016x}",
        "PORTS": lambda node: str(node.num_ports),
        "DESCRIPTION": lambda node: printable(node.description),
    }
    return lambda sa: _write_records(args, sa.nodes(), columns, right=("LID", "PORTS"))


def _info(args: argparse.Namespace) -> _Query:
    def query(sa: SaAccess) -> None:
        info = sa.class_port_info()
        port = sa.port
        if args.json:
            write_json({"port": _port_json(port), "administrator": record_json(info)})
            return
        capabilities = [text for bit, text in _CAPABILITIES.items() if info.capability_mask >> bit & 1]
        capabilities += [text for bit, text in _CAPABILITIES2.items() if info.capability_mask2 >> bit & 1]
        write(
            labelled_lines(
                [
                    ("port", f"{sa.transport.name}, {port.state.name}, LID {port.lid}"),
                    ("GID", str(port.gids[0])),
                    ("P_Keys", ", ".join(f"0x{pkey:04x}" for pkey in port.pkeys)),
                    ("subnet manager", f"LID {port.sm_lid}, SL {port.sm_sl}"),
                    ("class version", f"{info.base_version}.{info.class_version}"),
                    ("capabilities", ", ".join(capabilities) or "nothing optional"),
                    ("answers within", f"{4.096e-3 * 2**info.resp_time_value:.0f} ms"),
                ]
            )
        )

    return query


#: WHAT: (function, least and greatest number of operands).
_ACTIONS: dict[str, tuple[Callable[..., _Query], int, int]] = {
    "paths": (_paths, 0, 1),
    "services": (_services, 0, 1),
    "register": (_register, 1, 2),
    "withdraw": (_withdraw, 1, 1),
    "join": (_join, 1, 1),
    "leave": (_leave, 1, 1),
    "nodes": (_nodes, 0, 0),
    "info": (_info, 0, 0),
}


# -- writing --------------------------------------------------------------------------------------------------


def _write_records(args: argparse.Namespace, found: Records[R], columns: _Columns[R], right: Sequence[str]) -> None:
    if args.json:
        write_json({"records": [record_json(record) for record in found], "is_cut": found.is_cut})
        return
    if not found:
        write("none\n")
        return
    more = "more records exist, but did not fit into the answer\n" if found.is_cut else ""
    rows = [[text_of(record) for text_of in columns.values()] for record in found]
    write(table(tuple(columns), rows, right=right) + more)


def _write_record(args: argparse.Namespace, record: ServiceRecord | MCMemberRecord) -> None:
    if args.json:
        write_json(record_json(record))
        return
    if isinstance(record, ServiceRecord):
        values = [
            ("service", f"0x{record.service_id:x} {record.name}".rstrip()),
            ("GID", str(record.service_gid)),
            ("P_Key", f"0x{record.service_pkey:04x}"),
            ("lease", _lease_text(record.service_lease)),
        ]
    else:
        values = [
            ("group", str(record.mgid)),
            ("MLID", f"0x{record.mlid:04x}"),
            ("Q_Key", f"0x{record.q_key:08x}"),
            ("P_Key", f"0x{record.pkey:04x}"),
            ("MTU", str(128 << record.mtu)),
        ]
    write(labelled_lines(values))


def record_json(record: Record) -> dict[str, object]:
    """Return the fields of a record as JSON data, by their names."""
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
        args.parser.error(f"not a service id: {text!r} (expected a number of up to 64 bits, such as 0x1000)")
    return number


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and below 1000000")
    return seconds
