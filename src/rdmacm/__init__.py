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
    rdmacm.lab               hosts in network namespaces of one machine, for any user
    rdmacm.rsocket           sockets over RDMA, as of the module socket
    rdmacm.ib                InfiniBand ports, and queries to the subnet administrator
    rdmacm.explanation       the parts of an Explanation

Interfaces to implement
    rdmacm.provider, rdmacm.verbs.backend   another provider
    rdmacm.soft.wire.base                   another wire of the software device
    rdmacm.net                              another source of routes, addresses and neighbours

All other modules, and names that begin with an underscore, are internal. The guides are in docs/ of the source.
"""

from rdmacm.interrupts.command import exit_when_interrupted, is_command

if is_command():  # before any other import: they take long
    exit_when_interrupted()

# False when the package runs, as typing.TYPE_CHECKING: importing "typing" takes longer than all else here.
TYPE_CHECKING = False

# "X as X" exports a name to type checkers. Without __all__, help() shows the list above instead of every class.
if TYPE_CHECKING:
    from rdmacm import aio as aio
    from rdmacm import cma as cma
    from rdmacm import explanation as explanation
    from rdmacm import ib as ib
    from rdmacm import lab as lab
    from rdmacm import rsocket as rsocket
    from rdmacm import testing as testing
    from rdmacm import verbs as verbs
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
    from rdmacm.diagnosis.captures import Capture as Capture
    from rdmacm.diagnosis.captures import capture as capture
    from rdmacm.diagnosis.explain import devices as devices
    from rdmacm.diagnosis.explain import explain as explain
    from rdmacm.diagnosis.explain import query_counters as query_counters
    from rdmacm.endpoint import Connection as Connection
    from rdmacm.endpoint import Listener as Listener
    from rdmacm.endpoint import Message as Message
    from rdmacm.endpoint import Region as Region
    from rdmacm.endpoint import RemoteRegion as RemoteRegion
    from rdmacm.endpoint import Request as Request
    from rdmacm.endpoint import connect as connect
    from rdmacm.endpoint import listen as listen
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
    from rdmacm.proto.sa.subnet import ServiceRecord as ServiceRecord
    from rdmacm.provider import open_device as open_device
    from rdmacm.provider.cmstate import State as State
    from rdmacm.provider.connparam import ConnParam as ConnParam
    from rdmacm.provider.connparam import Ece as Ece
    from rdmacm.provider.connparam import UdParam as UdParam
    from rdmacm.provider.counters import Counters as Counters
    from rdmacm.provider.statistics import ProcessCounters as ProcessCounters
    from rdmacm.provider.statistics import process_counters as process_counters
    from rdmacm.verbs import Context as Context
    from rdmacm.verbs import Device as Device
    from rdmacm.verbs import GidEntry as GidEntry
    from rdmacm.verbs import Port as Port
    from rdmacm.verbs import QPType as QPType

__version__ = "0.1.0"

#: Module → the names above that it has. It is imported when one of them is first used: few programs need them all.
_NAMES = {
    "address": ("Gid", "SockAddr", "SockAddrIB", "service_id"),
    "addrinfo": ("AddrInfo", "HintFields", "Resolver", "getaddrinfo"),
    "cmid": ("CmEvent", "CmId", "EventChannel", "Route", "Service", "create_ep", "event_str"),
    "constants": (
        "EAI",
        "AddressFamily",
        "CmEventType",
        "IbOption",
        "IdOption",
        "McJoinFlag",
        "OptionLevel",
        "PathFlag",
        "PortSpace",
        "RaiFlag",
    ),
    "diagnosis.captures": ("Capture", "capture"),
    "diagnosis.explain": ("devices", "explain", "query_counters"),
    "endpoint": ("Connection", "Listener", "Message", "Region", "RemoteRegion", "Request", "connect", "listen"),
    "errors": (
        "CmDisconnectedError",
        "CmPermissionError",
        "CmRefusedError",
        "CmRejectedError",
        "CmStateError",
        "CmTimeoutError",
        "CmWouldBlockError",
        "GaiError",
        "RdmaError",
    ),
    "explanation": ("Explanation",),
    "proto.cm.codes": ("ApStatus",),
    "proto.sa": ("PathData", "PathRecord"),
    "proto.sa.subnet": ("ServiceRecord",),
    "provider": ("open_device",),
    "provider.cmstate": ("State",),
    "provider.connparam": ("ConnParam", "Ece", "UdParam"),
    "provider.counters": ("Counters",),
    "provider.statistics": ("ProcessCounters", "process_counters"),
    "verbs": ("Context", "Device", "GidEntry", "Port", "QPType"),
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names}

#: The public modules, which are attributes of the package without an import; those of interfaces are for few.
_MODULES = {"aio", "cma", "explanation", "ib", "lab", "rsocket", "testing", "verbs"}
_INTERFACES = {"net", "provider"}

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept any name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _MODULES or name in _INTERFACES:
            return import_module(f"rdmacm.{name}")
        if name in _LAZY:
            found = globals()[name] = getattr(import_module(f"rdmacm.{_LAZY[name]}"), name)
            return found
        if name == "__all__":  # "import *" asks for it, and then takes what is here
            for each in _LAZY:
                __getattr__(each)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names and the public modules, imported or not."""
    return sorted({*_LAZY, *_MODULES})
