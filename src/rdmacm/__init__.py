"""The RDMA connection manager, in Python.

>>> import rdmacm
>>> for info in rdmacm.getaddrinfo("127.0.0.1", "7471", port_space=rdmacm.PortSpace.TCP):
...     print(info.dst_addr)
('127.0.0.1', 7471)
"""

from rdmacm.interrupt import exit_when_interrupted, is_command

if is_command():  # before the other imports, which take long
    exit_when_interrupted()

import importlib
from typing import TYPE_CHECKING

from rdmacm.address import Gid, SockAddr, SockAddrIB
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.cmid import CmEvent, CmId, EventChannel, Route, create_ep, event_str
from rdmacm.cmstate import State
from rdmacm.connparam import ConnParam, Ece, UdParam
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
    CmDisconnectedError,
    CmPermissionError,
    CmRefusedError,
    CmRejectedError,
    CmStateError,
    CmTimeoutError,
    CmWouldBlockError,
    GaiError,
    RdmaError,
)
from rdmacm.explain import devices, explain
from rdmacm.explanation import Explanation
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.provider import open_device
from rdmacm.verbs import Context, Device, GidEntry, Port, QPType

if TYPE_CHECKING:
    from rdmacm import aio as aio
    from rdmacm.captures import Capture, capture
    from rdmacm.endpoint import Connection, Listener, Message, Region, RemoteRegion, Request, connect, listen

#: Name → module, imported at the first use: not every program needs them.
_LAZY = {
    "Capture": "captures",
    "Connection": "endpoint",
    "Listener": "endpoint",
    "Message": "endpoint",
    "Region": "endpoint",
    "RemoteRegion": "endpoint",
    "Request": "endpoint",
    "capture": "captures",
    "connect": "endpoint",
    "listen": "endpoint",
}

__all__ = [
    "EAI",
    "AddrInfo",
    "AddressFamily",
    "Capture",
    "CmDisconnectedError",
    "CmEvent",
    "CmEventType",
    "CmId",
    "CmPermissionError",
    "CmRefusedError",
    "CmRejectedError",
    "CmStateError",
    "CmTimeoutError",
    "CmWouldBlockError",
    "ConnParam",
    "Connection",
    "Context",
    "Device",
    "Ece",
    "EventChannel",
    "Explanation",
    "GaiError",
    "Gid",
    "GidEntry",
    "IbOption",
    "IdOption",
    "Listener",
    "Message",
    "OptionLevel",
    "PathData",
    "PathFlag",
    "PathRecord",
    "Port",
    "PortSpace",
    "QPType",
    "RaiFlag",
    "RdmaError",
    "Region",
    "RemoteRegion",
    "Request",
    "Route",
    "SockAddr",
    "SockAddrIB",
    "State",
    "UdParam",
    "capture",
    "connect",
    "create_ep",
    "devices",
    "event_str",
    "explain",
    "getaddrinfo",
    "listen",
    "open_device",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "aio":  # asyncio takes longest to import
        return importlib.import_module("rdmacm.aio")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"rdmacm.{_LAZY[name]}"), name)
    return found
