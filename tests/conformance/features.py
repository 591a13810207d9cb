"""What a scenario needs of a device, by what the device reports of itself."""

from __future__ import annotations

import errno
from collections.abc import Callable

from rdmacm import PortSpace, RdmaError
from rdmacm.kernel.verbs.device import KernelDevice
from rdmacm.verbs import AtomicCap, DeviceCapFlag, TransportType
from rdmacm.verbs.backend import DeviceBackend
from support.scenario import Side

__all__ = ["NEEDS", "features_active", "features_of", "features_passive", "group_of"]

F = DeviceCapFlag


def _flags(needed: DeviceCapFlag) -> Callable[[DeviceBackend], bool]:
    return lambda device: needed & ~device.attr.device_cap_flags_ex == 0


def _every_pair_posts(needed: DeviceCapFlag) -> Callable[[DeviceBackend], bool]:
    # The kernel's devices take these operations on a QPEx only; tests/kernel/verbs_guest has it.
    return lambda device: not isinstance(device, KernelDevice) and _flags(needed)(device)


def _is_infiniband(device: DeviceBackend) -> bool:
    return device.transport_type is TransportType.IB


_HAS: dict[str, Callable[[DeviceBackend], bool]] = {
    "atomics": lambda device: device.attr.atomic_cap is not AtomicCap.NONE,
    "ATOMIC WRITE": _every_pair_posts(F.ATOMIC_WRITE),
    "datagrams": lambda device: device.attr.max_ah > 0,
    "FLUSH": _every_pair_posts(F.FLUSH_GLOBAL),
    # iWARP's operations have no such field (RFC 5040), and its connections are all reliable.
    "immediate data": _is_infiniband,
    "multicast": lambda device: device.attr.max_mcast_grp > 0,
    "RNR NAKs": _flags(F.RC_RNR_NAK_GEN),
    "shared receive queues": lambda device: device.attr.max_srq > 0,
    "shared receive queues of another size": _flags(F.SRQ_RESIZE),
    "unreliable connections": _is_infiniband,
    "windows": _flags(F.MEM_WINDOW | F.MEM_WINDOW_TYPE_2B),
    "XRC": _flags(F.XRC),
}

#: What both devices must have for a scenario, by its name; one that is not here runs on every device.
NEEDS = {
    "datagrams": {"datagrams", "immediate data"},
    "extended": {"atomics", "immediate data"},
    "extended_reliable": {"XRC"},
    "flushed": {"FLUSH", "ATOMIC WRITE", "atomics"},
    "late": {"RNR NAKs"},
    "multicast": {"datagrams", "multicast"},
    "resized": {"shared receive queues of another size"},
    "shared": {"shared receive queues"},
    "unreliable": {"unreliable connections"},
    "windows": {"windows", "atomics"},
}


def features_of(device: DeviceBackend) -> set[str]:
    """The features that a device has."""
    return {name for name, has in _HAS.items() if has(device)}


def _has_groups(side: Side) -> bool:
    """Whether an id can join a group of the family of the ends' addresses."""
    cmid = side.make_id(PortSpace.UDP)
    cmid.bind_addr((side.address, 0))
    try:
        cmid.join_multicast(group_of(side))
    except RdmaError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
    finally:
        cmid.destroy()
    return True


def group_of(side: Side) -> tuple[str, int]:
    """A group of the family of the ends' addresses."""
    return ("ff1e::77" if ":" in side.address else "239.7.7.7"), side.port


async def features_passive(side: Side) -> set[str]:
    """The features of this end's device."""
    found = features_of(side.device)
    if "multicast" in found and not _has_groups(side):
        found.remove("multicast")
    return found


features_active = features_passive
