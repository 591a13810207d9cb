"""Component masks, which select the fields that a query compares (InfiniBand Architecture 15.2.5).

The members of a mask have the names of the record's fields, in capitals.
"""

from __future__ import annotations

import dataclasses
from enum import IntFlag
from typing import Any, TypeAlias, TypeVar

from rdmacm.proto.sa.attributes import Selector
from rdmacm.proto.sa.records import PathRecord
from rdmacm.proto.sa.subnet import MCMemberRecord, NodeRecord, ServiceRecord

Record: TypeAlias = "PathRecord | ServiceRecord | MCMemberRecord | NodeRecord"

R = TypeVar("R", PathRecord, ServiceRecord, MCMemberRecord, NodeRecord)


class PathMask(IntFlag):
    """Components of a :class:`~rdmacm.proto.sa.PathRecord`."""

    SERVICE_ID = 0x3
    DGID = 1 << 2
    SGID = 1 << 3
    DLID = 1 << 4
    SLID = 1 << 5
    RAW_TRAFFIC = 1 << 6
    FLOW_LABEL = 1 << 8
    HOP_LIMIT = 1 << 9
    TRAFFIC_CLASS = 1 << 10
    REVERSIBLE = 1 << 11
    NUMB_PATH = 1 << 12
    PKEY = 1 << 13
    QOS_CLASS = 1 << 14
    SL = 1 << 15
    MTU_SELECTOR = 1 << 16
    MTU = 1 << 17
    RATE_SELECTOR = 1 << 18
    RATE = 1 << 19
    PACKET_LIFE_TIME_SELECTOR = 1 << 20
    PACKET_LIFE_TIME = 1 << 21
    PREFERENCE = 1 << 22


class ServiceMask(IntFlag):
    """Components of a :class:`~rdmacm.proto.sa.subnet.ServiceRecord`.

    Each number of the service data has a bit of its own. The lowest bit of a member is that of the first number.
    """

    SERVICE_ID = 1 << 0
    SERVICE_GID = 1 << 1
    SERVICE_PKEY = 1 << 2
    SERVICE_LEASE = 1 << 4
    SERVICE_KEY = 1 << 5
    SERVICE_NAME = 1 << 6
    SERVICE_DATA8 = 0xFFFF << 7
    SERVICE_DATA16 = 0xFF << 23
    SERVICE_DATA32 = 0xF << 31
    SERVICE_DATA64 = 0x3 << 35


class MemberMask(IntFlag):
    """Components of a :class:`~rdmacm.proto.sa.subnet.MCMemberRecord`."""

    MGID = 1 << 0
    PORT_GID = 1 << 1
    Q_KEY = 1 << 2
    MLID = 1 << 3
    MTU_SELECTOR = 1 << 4
    MTU = 1 << 5
    TRAFFIC_CLASS = 1 << 6
    PKEY = 1 << 7
    RATE_SELECTOR = 1 << 8
    RATE = 1 << 9
    PACKET_LIFE_TIME_SELECTOR = 1 << 10
    PACKET_LIFE_TIME = 1 << 11
    SL = 1 << 12
    FLOW_LABEL = 1 << 13
    HOP_LIMIT = 1 << 14
    SCOPE = 1 << 15
    JOIN_STATE = 1 << 16
    PROXY_JOIN = 1 << 17


class NodeMask(IntFlag):
    """Components of a :class:`~rdmacm.proto.sa.subnet.NodeRecord`."""

    LID = 1 << 0
    BASE_VERSION = 1 << 2
    CLASS_VERSION = 1 << 3
    NODE_TYPE = 1 << 4
    NUM_PORTS = 1 << 5
    SYSTEM_IMAGE_GUID = 1 << 6
    NODE_GUID = 1 << 7
    PORT_GUID = 1 << 8
    PARTITION_CAP = 1 << 9
    DEVICE_ID = 1 << 10
    REVISION = 1 << 11
    LOCAL_PORT_NUM = 1 << 12
    VENDOR_ID = 1 << 13
    NODE_DESCRIPTION = 1 << 14


#: The mask of each kind of record.
MASKS: dict[type[Record], type[IntFlag]] = {
    PathRecord: PathMask,
    ServiceRecord: ServiceMask,
    MCMemberRecord: MemberMask,
    NodeRecord: NodeMask,
}


def query_for(kind: type[R], **fields: Any) -> tuple[IntFlag, R]:
    """The component mask and the record for a query: these fields, and zero in all others.

    A field with a selector is compared for equality, unless its selector is given too. TypeError for a name that is
    not a component of such a record.

    >>> from rdmacm.proto.sa.records import PathRecord
    >>> mask, record = query_for(PathRecord, dlid=5, slid=4, numb_path=1)
    >>> mask == PathMask.DLID | PathMask.SLID | PathMask.NUMB_PATH
    True
    """
    masks = MASKS[kind]
    for name in ("mtu", "rate", "packet_life_time"):
        if name in fields:
            fields.setdefault(f"{name}_selector", Selector.EXACTLY)
    names = {field.name for field in dataclasses.fields(kind)}
    mask = masks(0)
    for name in fields:
        component = masks.__members__.get(name.upper())
        if component is None or name not in names:
            raise TypeError(f"a {kind.__name__} has no component {name!r}")
        mask |= component
    return mask, kind.unpack(bytes(kind.SIZE)).replace(**fields)
