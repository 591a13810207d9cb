"""A kernel's device as it is at one moment: :class:`rdmacm.verbs.Device`, with its ports and their tables."""

from __future__ import annotations

import errno
import socket
from ctypes import addressof, byref, c_uint16, sizeof, string_at
from pathlib import Path
from typing import TYPE_CHECKING

from rdmacm.address import Gid
from rdmacm.errors import cm_error
from rdmacm.kernel.sysfs import PROVIDER
from rdmacm.kernel.verbs.attributes import known
from rdmacm.kernel.verbs.layouts import ibv_gid_entry, ibv_port_attr
from rdmacm.kernel.verbs.library import code_of
from rdmacm.kernel.verbs.refusals import check
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import (
    GidType,
    LinkLayer,
    Mtu,
    PortCapFlag,
    PortCapFlag2,
    PortFlag,
    PortState,
)

if TYPE_CHECKING:
    from rdmacm.kernel.verbs.device import KernelDevice

_SYSFS = Path("/sys/class/infiniband")
#: The P_Key of the default partition, with full membership.
_DEFAULT_PKEY = 0xFFFF
_GID_TYPES = {"IB/RoCE v1": GidType.ROCE_V1, "RoCE v2": GidType.ROCE_V2}


def snapshot(device: KernelDevice) -> Device:
    """The device as it is now. ENODEV: it has been removed."""
    numbers = range(1, device.phys_port_cnt + 1)
    lengths = {number: device.query_port(number) for number in numbers}
    rows = _gid_rows(device, sum(found.gid_tbl_len for found in lengths.values()))
    ports = []
    for number, found in lengths.items():
        active = found.active_mtu
        ports.append(
            Port(
                number,
                known(PortState, found.state, PortState.NOP),
                known(LinkLayer, found.link_layer, LinkLayer.UNSPECIFIED),
                known(Mtu, found.max_mtu, Mtu.MTU_4096),
                Mtu(active) if Mtu.MTU_256 <= active <= Mtu.MTU_4096 else None,
                tuple(row for row in rows if row.port_num == number),
                _pkeys(device, number, found),
                gid_tbl_len=found.gid_tbl_len,
                pkey_tbl_len=found.pkey_tbl_len,
                port_cap_flags=PortCapFlag(found.port_cap_flags),
                port_cap_flags2=PortCapFlag2(found.port_cap_flags2),
                flags=PortFlag(found.flags),
                **{name: getattr(found, name) for name in _SAME},
            )
        )
    return Device(
        device.name,
        device.index,
        PROVIDER,
        device.node_type,
        device.transport_type,
        device.node_guid,
        tuple(ports),
    )


#: Fields of Port that have C's name and are numbers.
_SAME = (
    *("max_msg_sz", "bad_pkey_cntr", "qkey_viol_cntr", "lid", "lmc", "sm_lid", "sm_sl", "max_vl_num"),
    *("subnet_timeout", "init_type_reply", "active_width", "active_speed", "phys_state", "active_speed_ex"),
)


def _pkeys(device: KernelDevice, port_num: int, port: ibv_port_attr) -> tuple[int, ...]:
    """The P_Key table of a port. Each row takes a system call, and a change is an event (PKEY_CHANGE)."""
    known_tables = device.opened.pkeys
    found, length = known_tables.get(port_num), port.pkey_tbl_len
    if found is None or len(found) != length:
        has_default = port.link_layer == LinkLayer.ETHERNET
        rows = (_pkey(device, port_num, index, has_default) for index in range(length))
        found = known_tables[port_num] = tuple(rows)
    return found


def _pkey(device: KernelDevice, port_num: int, index: int, has_default: bool) -> int:
    """A row of the table, which libibverbs reads from sysfs.

    ``has_default``: where sysfs is not mounted, the table is that of RoCE, with the default P_Key in row 0. ENOENT:
    sysfs is not mounted, and the port is InfiniBand.
    """
    opened, found = device.opened, c_uint16()
    with opened.call("query_pkey"):
        code = code_of(opened.library.ibv_query_pkey(opened.context, port_num, index, byref(found)))
        if code == errno.ENOENT and not _SYSFS.is_dir():
            if has_default:
                return _DEFAULT_PKEY if index == 0 else 0
            text = f"the P_Keys of the port cannot be read, as {_SYSFS} is not there"
            raise cm_error(code, text, "query_pkey", device.name, "'mount -t sysfs sysfs /sys'")
        check(code, "query_pkey", device.name)
    return socket.ntohs(found.value)


def _gid_rows(device: KernelDevice, most: int) -> list[GidEntry]:
    """The rows of all ports' tables that are in use."""
    opened = device.opened
    query = opened.library._ibv_query_gid_table
    if query is None:
        return _sysfs_rows(device)
    table = (ibv_gid_entry * max(most, 1))()
    with opened.call("query_gid_table"):
        count = query(opened.context, table, len(table), 0, sizeof(ibv_gid_entry))
    if count < 0:
        check(int(count), "query_gid_table", device.name)
    return [
        GidEntry(
            Gid(string_at(addressof(row), 16)),
            row.gid_index,
            row.port_num,
            known(GidType, row.gid_type, GidType.IB),
            _interface_name(row.ndev_ifindex),
            row.ndev_ifindex,
        )
        for row in table[:count]
    ]


def _interface_name(index: int) -> str:
    """The name of an interface; empty for 0, and for one of another network namespace."""
    if index:
        try:
            return socket.if_indextoname(index)
        except OSError:
            pass
    return ""


def _sysfs_rows(device: KernelDevice) -> list[GidEntry]:
    """The same from sysfs, for libraries before rdma-core 32."""
    rows = []
    for port in sorted((_SYSFS / device.name / "ports").iterdir()):
        for path in (port / "gids").iterdir():
            gid = Gid(path.read_text().strip())
            if gid == Gid():
                continue
            try:
                kind = (port / "gid_attrs/types" / path.name).read_text().strip()
                name = (port / "gid_attrs/ndevs" / path.name).read_text().strip()
                index = socket.if_nametoindex(name)
            except OSError:  # InfiniBand has neither, and a row may vanish
                kind, name, index = "", "", 0
            rows.append(GidEntry(gid, int(path.name), int(port.name), _GID_TYPES.get(kind, GidType.IB), name, index))
    return sorted(rows, key=lambda row: (row.port_num, row.gid_index))
