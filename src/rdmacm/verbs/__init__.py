"""Provider-neutral verbs objects. Names are pyverbs' and the InfiniBand Architecture's."""

from rdmacm.verbs.device import Context, Device, GidEntry, Port
from rdmacm.verbs.enums import (
    AccessFlag,
    GidType,
    LinkLayer,
    Mtu,
    NodeType,
    PortState,
    QPAttrMask,
    QPState,
    QPType,
    SendFlag,
    TransportType,
    WCFlag,
    WCOpcode,
    WCStatus,
    WROpcode,
)

__all__ = [
    "AccessFlag",
    "Context",
    "Device",
    "GidEntry",
    "GidType",
    "LinkLayer",
    "Mtu",
    "NodeType",
    "Port",
    "PortState",
    "QPAttrMask",
    "QPState",
    "QPType",
    "SendFlag",
    "TransportType",
    "WCFlag",
    "WCOpcode",
    "WCStatus",
    "WROpcode",
]
