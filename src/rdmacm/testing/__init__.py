"""Tools for testing code that uses RDMA, and for the project's own tests.

:class:`MemoryNetwork` is a host's network as a script: interfaces, addresses, routes and neighbours are what the
test says, and change when it says so. :class:`VirtualClock` is time that passes only when told. Together they make
a provider that needs no network, no privilege and no waiting:

>>> from rdmacm import CmId
>>> from rdmacm.testing import MemoryNetwork, VirtualClock, memory_provider
>>> network = MemoryNetwork()
>>> eth0 = network.add_interface("eth0", "10.0.0.1/24")
>>> network.add_neighbour(eth0, "10.0.0.2")
>>> with CmId(provider=memory_provider(network)) as cmid:
...     cmid.resolve_addr(("10.0.0.2", 7471))
...     cmid.verbs.name
'soft_eth0'

:class:`Fabric` is several such hosts with a network between them, which loses, doubles, delays and damages packets as
it is told, in virtual time. The same seed gives the same run.

:class:`MemorySubnet` is an InfiniBand subnet: ports that send each other management datagrams, and a
:class:`SubnetAdministrator` that knows what the test says and errs when it is told to.
"""

from __future__ import annotations

from rdmacm.testing.clock import VirtualClock
from rdmacm.testing.fabric import Fabric, SimulationError
from rdmacm.testing.faults import CORRUPT, DELIVER, DUPLICATE, LOSE, Fate, Packet, Verdict, nth
from rdmacm.testing.host import FabricWire, Host, SimProvider
from rdmacm.testing.log import FabricLog, LogEntry
from rdmacm.testing.network import MemoryNetwork, memory_provider
from rdmacm.testing.sa import Misdeed, SubnetAdministrator, Tables
from rdmacm.testing.subnet import MemoryPort, MemorySubnet, SubnetMad

__all__ = [
    "Fabric",
    "Host",
    "FabricWire",
    "SimProvider",
    "SimulationError",
    "Packet",
    "Verdict",
    "DELIVER",
    "LOSE",
    "DUPLICATE",
    "CORRUPT",
    "nth",
    "Fate",
    "FabricLog",
    "LogEntry",
    "MemoryNetwork",
    "MemorySubnet",
    "MemoryPort",
    "SubnetAdministrator",
    "SubnetMad",
    "Misdeed",
    "Tables",
    "VirtualClock",
    "memory_provider",
]
