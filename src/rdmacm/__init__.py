"""The RDMA connection manager, in Python.

>>> import rdmacm
>>> for info in rdmacm.getaddrinfo("127.0.0.1", "7471", port_space=rdmacm.PortSpace.TCP):
...     print(info.dst_addr)
('127.0.0.1', 7471)
"""

from rdmacm.address import Gid, SockAddr, SockAddrIB
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.channel import CmEvent, EventChannel, event_str
from rdmacm.cmid import CmId, Route
from rdmacm.cmstate import State
from rdmacm.constants import (
    EAI,
    AddressFamily,
    CmEventType,
    IbOption,
    IdOption,
    OptionLevel,
    PathFlag,
    PortSpace,
    RaiFlag,
)
from rdmacm.errors import (
    CmPermissionError,
    CmStateError,
    CmTimeoutError,
    CmWouldBlockError,
    GaiError,
    RdmaError,
)
from rdmacm.explain import devices, explain
from rdmacm.explanation import Explanation
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.verbs import Context, Device, GidEntry, Port, QPType

__all__ = [
    "EAI",
    "AddrInfo",
    "AddressFamily",
    "CmEvent",
    "CmEventType",
    "CmId",
    "CmPermissionError",
    "CmStateError",
    "CmTimeoutError",
    "CmWouldBlockError",
    "Context",
    "Device",
    "EventChannel",
    "Explanation",
    "GaiError",
    "Gid",
    "GidEntry",
    "IbOption",
    "IdOption",
    "OptionLevel",
    "PathData",
    "PathFlag",
    "PathRecord",
    "Port",
    "PortSpace",
    "QPType",
    "RaiFlag",
    "RdmaError",
    "Route",
    "SockAddr",
    "SockAddrIB",
    "State",
    "devices",
    "event_str",
    "explain",
    "getaddrinfo",
]

__version__ = "0.1.0"
