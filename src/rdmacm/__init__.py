"""The RDMA connection manager, in Python: librdmacm's semantics, with or without RDMA hardware.

>>> import rdmacm
>>> for info in rdmacm.getaddrinfo("127.0.0.1", "7471", port_space=rdmacm.PortSpace.TCP):
...     print(info.dst_addr)
('127.0.0.1', 7471)

This page lists the public names; ``pydoc rdmacm.CmId`` or ``help(rdmacm.CmId)`` describes one.

Connections without queue pairs
    connect, listen          connect to a listener; listen for connections
    Connection, Listener     what they return
    Request                  a request for a connection, to accept or to reject
    Message                  a received message
    Region, RemoteRegion     registered memory: one's own, and what the peer needs to access it

Address translation
    getaddrinfo, AddrInfo    rdma_getaddrinfo(3): addresses, routes and devices of a name and a service
    HintFields, Resolver     its keyword arguments; a function to use in place of the system's resolver
    explain, Explanation     why a resolution chose this device and this GID, or why it failed
    SockAddr, SockAddrIB     a socket address: a tuple as in the module socket; an AF_IB address
    Gid                      128 bits, from an IP address or from a subnet prefix and a GUID
    service_id               the service id of a port space and a port number, for SockAddrIB
    PathRecord, PathData     a path, InfiniBand Architecture 15.2.5.16; the same with ibv_path_data's flags
    ServiceRecord            a service of the subnet administrator, InfiniBand Architecture 15.2.5.14

Ids and events, as in rdma/rdma_cma.h
    CmId                     rdma_cm_id: bind, resolve, listen, connect, accept, queue pairs, transfers
    EventChannel, CmEvent    where the events of ids arrive; an event
    ConnParam, UdParam, Ece  what connect() and accept() take, and what the peer has sent
    Route, State             what an id has resolved; the state of an id
    Service                  a service record that CmId.register_service() keeps registered
    create_ep, event_str     rdma_create_ep(3), rdma_event_str(3)

Devices
    devices, open_device     the devices of this host; open one by its name
    Device, Port, GidEntry   a device, its ports and their GIDs, as they were at one moment
    Context                  an open device

Constants
    PortSpace, AddressFamily, QPType        arguments of ids and lookups
    RaiFlag, EAI             flags of getaddrinfo(), and the errors of GaiError
    CmEventType              types of events
    OptionLevel, IdOption, IbOption         arguments of CmId.set_option()
    McJoinFlag               how CmId.join_multicast_ex() joins a group
    PathFlag, ApStatus       flags of PathData; answers to an alternate path that a peer offers

Errors: each is an RdmaError, and also the built-in OSError subclass that fits
    RdmaError                the base: errno, address, reason, hint, and often an Explanation
    GaiError                 the error of a lookup, also a socket.gaierror
    CmStateError             the call does not fit the state of the id (EINVAL)
    CmTimeoutError           no answer, or no event, in time, also a TimeoutError
    CmRejectedError          the peer's application or host rejected the request, also a ConnectionRefusedError
    CmRefusedError           the UDP port 4791 of the peer is closed, also a ConnectionRefusedError
    CmDisconnectedError      the connection has ended, also a ConnectionResetError
    CmPermissionError        EACCES or EPERM, also a PermissionError
    CmWouldBlockError        there is nothing to fetch now, also a BlockingIOError

Captures and counters
    capture, Capture         the packets of the software devices, as a file for Wireshark
    query_counters, Counters  drops, errors, connection messages and packets of this process
    process_counters, ProcessCounters       those of all processes of this user; one of them

Public modules
    rdmacm.aio               connections and listeners for asyncio
    rdmacm.verbs             queue pairs, completion queues, memory regions, work requests
    rdmacm.cma               the functions, structures and constants of librdmacm and libibverbs, under C's names
    rdmacm.testing           simulated hosts, networks, faults and clocks, to test programs without a network
    rdmacm.ib                InfiniBand ports, and queries to the subnet administrator
    rdmacm.explanation       the parts of an Explanation

Interfaces to implement
    rdmacm.provider, rdmacm.verbs.backend   another provider
    rdmacm.soft.wire.base                   another wire of the software device
    rdmacm.net                              another source of routes, addresses and neighbours

All other modules, and names that begin with an underscore, are internal. The guides are in docs/ of the source.
"""

from rdmacm.interrupts.command import exit_when_interrupted, is_command

if is_command():  # before the other imports, which take long
    exit_when_interrupted()

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

# "X as X" exports a name to type checkers. Without __all__, help() shows the list above instead of every class.
from rdmacm.address import Gid as Gid
from rdmacm.address import SockAddr as SockAddr
from rdmacm.address import SockAddrIB as SockAddrIB
from rdmacm.address import service_id as service_id
from rdmacm.addrinfo import AddrInfo as AddrInfo
from rdmacm.addrinfo import HintFields as HintFields
from rdmacm.addrinfo import Resolver as Resolver
from rdmacm.addrinfo import getaddrinfo as getaddrinfo
from rdmacm.cmid import CmEvent as CmEvent
from rdmacm.cmid import CmId as CmId
from rdmacm.cmid import EventChannel as EventChannel
from rdmacm.cmid import Route as Route
from rdmacm.cmid import Service as Service
from rdmacm.cmid import create_ep as create_ep
from rdmacm.cmid import event_str as event_str
from rdmacm.constants import EAI as EAI
from rdmacm.constants import AddressFamily as AddressFamily
from rdmacm.constants import CmEventType as CmEventType
from rdmacm.constants import IbOption as IbOption
from rdmacm.constants import IdOption as IdOption
from rdmacm.constants import McJoinFlag as McJoinFlag
from rdmacm.constants import OptionLevel as OptionLevel
from rdmacm.constants import PathFlag as PathFlag
from rdmacm.constants import PortSpace as PortSpace
from rdmacm.constants import RaiFlag as RaiFlag
from rdmacm.diagnosis.explain import devices as devices
from rdmacm.diagnosis.explain import explain as explain
from rdmacm.diagnosis.explain import query_counters as query_counters
from rdmacm.errors import CmDisconnectedError as CmDisconnectedError
from rdmacm.errors import CmPermissionError as CmPermissionError
from rdmacm.errors import CmRefusedError as CmRefusedError
from rdmacm.errors import CmRejectedError as CmRejectedError
from rdmacm.errors import CmStateError as CmStateError
from rdmacm.errors import CmTimeoutError as CmTimeoutError
from rdmacm.errors import CmWouldBlockError as CmWouldBlockError
from rdmacm.errors import GaiError as GaiError
from rdmacm.errors import RdmaError as RdmaError
from rdmacm.explanation import Explanation as Explanation
from rdmacm.proto.cm.codes import ApStatus as ApStatus
from rdmacm.proto.sa import PathData as PathData
from rdmacm.proto.sa import PathRecord as PathRecord
from rdmacm.provider import open_device as open_device
from rdmacm.provider.cmstate import State as State
from rdmacm.provider.connparam import ConnParam as ConnParam
from rdmacm.provider.connparam import Ece as Ece
from rdmacm.provider.connparam import UdParam as UdParam
from rdmacm.provider.counters import Counters as Counters
from rdmacm.verbs import Context as Context
from rdmacm.verbs import Device as Device
from rdmacm.verbs import GidEntry as GidEntry
from rdmacm.verbs import Port as Port
from rdmacm.verbs import QPType as QPType

if TYPE_CHECKING:
    from rdmacm import aio as aio
    from rdmacm import cma as cma
    from rdmacm import explanation as explanation
    from rdmacm import ib as ib
    from rdmacm import testing as testing
    from rdmacm import verbs as verbs
    from rdmacm.diagnosis.captures import Capture as Capture
    from rdmacm.diagnosis.captures import capture as capture
    from rdmacm.endpoint import Connection as Connection
    from rdmacm.endpoint import Listener as Listener
    from rdmacm.endpoint import Message as Message
    from rdmacm.endpoint import Region as Region
    from rdmacm.endpoint import RemoteRegion as RemoteRegion
    from rdmacm.endpoint import Request as Request
    from rdmacm.endpoint import connect as connect
    from rdmacm.endpoint import listen as listen
    from rdmacm.proto.sa.subnet import ServiceRecord as ServiceRecord
    from rdmacm.provider.statistics import ProcessCounters as ProcessCounters
    from rdmacm.provider.statistics import process_counters as process_counters

__version__ = "0.1.0"

#: Name → module, imported at the first use: not every program needs them.
_LAZY = {
    "Capture": "diagnosis.captures",
    "Connection": "endpoint",
    "Listener": "endpoint",
    "Message": "endpoint",
    "ProcessCounters": "provider.statistics",
    "Region": "endpoint",
    "RemoteRegion": "endpoint",
    "Request": "endpoint",
    "ServiceRecord": "proto.sa.subnet",
    "capture": "diagnosis.captures",
    "connect": "endpoint",
    "listen": "endpoint",
    "process_counters": "provider.statistics",
}

#: Modules that are attributes of the package without an import; asyncio takes longest to import.
_MODULES = {"aio", "cma", "explanation", "ib", "testing", "verbs"}

#: What the code above uses.
_IMPORTED = {"TYPE_CHECKING", "ModuleType", "exit_when_interrupted", "importlib", "is_command"}

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept any name

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f"rdmacm.{name}")
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(f"rdmacm.{_LAZY[name]}"), name)
        return found


def __dir__() -> list[str]:
    """The public names, those that are not imported yet included, and the public modules."""
    public = {name for name, value in globals().items() if name[0] != "_" and not isinstance(value, ModuleType)}
    return sorted((public | {*_LAZY} | _MODULES) - _IMPORTED)
