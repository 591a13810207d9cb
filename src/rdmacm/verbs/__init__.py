"""Provider-neutral verbs objects. Names are pyverbs' and the InfiniBand Architecture's."""

from rdmacm.verbs.device import Context, Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, PortState, QPType, TransportType

__all__ = [
    "Context",
    "Device",
    "GidEntry",
    "GidType",
    "LinkLayer",
    "Mtu",
    "NodeType",
    "Port",
    "PortState",
    "QPType",
    "TransportType",
]
