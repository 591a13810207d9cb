"""Provider-neutral verbs objects. Names are pyverbs' and the InfiniBand Architecture's."""

from rdmacm.verbs.ah import AH
from rdmacm.verbs.attr import (
    AHAttr,
    DeviceAttr,
    GlobalRoute,
    QPAttr,
    QPCap,
    SrqAttr,
    SrqInitAttr,
)
from rdmacm.verbs.cq import CQ, CompChannel
from rdmacm.verbs.device import Context, Device, GidEntry, Port
from rdmacm.verbs.enums import (
    WC,
    AccessFlag,
    GidType,
    LinkLayer,
    MigState,
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
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.qp import QP, QPInitAttr
from rdmacm.verbs.srq import SRQ
from rdmacm.verbs.wr import SGE, RecvWR, SendWR

__all__ = [
    "AH",
    "CQ",
    "MR",
    "PD",
    "QP",
    "SGE",
    "SRQ",
    "WC",
    "AHAttr",
    "AccessFlag",
    "CompChannel",
    "Context",
    "Device",
    "DeviceAttr",
    "GidEntry",
    "GlobalRoute",
    "GidType",
    "LinkLayer",
    "MigState",
    "Mtu",
    "NodeType",
    "Port",
    "PortState",
    "QPAttr",
    "QPAttrMask",
    "QPCap",
    "QPInitAttr",
    "QPState",
    "QPType",
    "RecvWR",
    "SendFlag",
    "SendWR",
    "SrqAttr",
    "SrqInitAttr",
    "TransportType",
    "WCFlag",
    "WCOpcode",
    "WCStatus",
    "WROpcode",
]
