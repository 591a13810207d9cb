"""InfiniBand ports, and queries to the subnet administrator (SA) without ids.

>>> from rdmacm.ib import SaAccess, transport_of
>>> with SaAccess(transport_of("umad:mlx5_0/1")) as sa:  # doctest: +SKIP
...     print([service.name for service in sa.services()])

This page lists the public names; ``pydoc rdmacm.ib.SaAccess`` or ``help(rdmacm.ib.SaAccess)`` describes one.
docs/infiniband.md is the guide.

Ports
    transport_of             the port with a name, such as ``umad:mlx5_0/1`` or ``ibsim:HostA``
    port_names_in            the names in the environment variable RDMACM_IB
    MadTransport, IbPort     how a port sends and receives management datagrams; its attributes
    MadAddress, ReceivedMad  the address of a management datagram; one that was received
    Buffer                   bytes, a bytearray or a memoryview
    IpoibAddress             the hardware address of an IPoIB interface

Queries
    SaAccess                 queries from a port, which wait for their responses
    SaQuery, Records         a query that has been sent; the records of a response
    NodeRecord               a port and its node, InfiniBand Architecture 15.2.5.2
    MCMemberRecord, JoinState               a multicast group, 15.2.5.17; how a port is a member of it
    ClassPortInfo            the capabilities of the administrator, 13.4.8.1

rdmacm has PathRecord and ServiceRecord, and rdmacm.testing a simulated subnet. The other modules of this package are
internal. Another way to send management datagrams is a class with the methods of MadTransport.
"""

import importlib
from typing import TYPE_CHECKING

# "X as X" exports a name to type checkers. Without __all__, help() shows the list above instead of every class.
from rdmacm.ib.names import port_names_in as port_names_in
from rdmacm.ib.names import transport_of as transport_of

if TYPE_CHECKING:
    from rdmacm.ib.access import Records as Records
    from rdmacm.ib.access import SaAccess as SaAccess
    from rdmacm.ib.access import SaQuery as SaQuery
    from rdmacm.ib.transport import IbPort as IbPort
    from rdmacm.ib.transport import MadTransport as MadTransport
    from rdmacm.ib.transport import ReceivedMad as ReceivedMad
    from rdmacm.proto.ipoib import IpoibAddress as IpoibAddress
    from rdmacm.proto.mad import MadAddress as MadAddress
    from rdmacm.proto.sa.subnet import ClassPortInfo as ClassPortInfo
    from rdmacm.proto.sa.subnet import JoinState as JoinState
    from rdmacm.proto.sa.subnet import MCMemberRecord as MCMemberRecord
    from rdmacm.proto.sa.subnet import NodeRecord as NodeRecord
    from rdmacm.proto.wire import Buffer as Buffer

#: Name → module, imported at the first use: resolving needs none of them.
_LAZY = {
    "Buffer": "proto.wire",
    "ClassPortInfo": "proto.sa.subnet",
    "IbPort": "ib.transport",
    "IpoibAddress": "proto.ipoib",
    "JoinState": "proto.sa.subnet",
    "MCMemberRecord": "proto.sa.subnet",
    "MadAddress": "proto.mad",
    "MadTransport": "ib.transport",
    "NodeRecord": "proto.sa.subnet",
    "ReceivedMad": "ib.transport",
    "Records": "ib.access",
    "SaAccess": "ib.access",
    "SaQuery": "ib.access",
}

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept any name

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(f"rdmacm.{_LAZY[name]}"), name)
        return found


def __dir__() -> list[str]:
    """The public names, those that are not imported yet included."""
    return sorted({"port_names_in", "transport_of", *_LAZY})
