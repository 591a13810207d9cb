"""Tools for testing code that uses RDMA, and for the project's own tests.

:class:`MemoryNetwork` is a host's network in memory, whose interfaces, addresses, routes and neighbours the test sets
and changes. :class:`VirtualClock` is a clock that the test advances, as do calls that wait. With both, a provider needs
no real network, no privileges and no waiting:

>>> from rdmacm import CmId
>>> from rdmacm.testing import MemoryNetwork, VirtualClock, memory_provider
>>> network, clock = MemoryNetwork(), VirtualClock(0)
>>> eth0 = network.add_interface("eth0", "10.0.0.1/24")
>>> network.add_neighbour(eth0, "10.0.0.2")
>>> with CmId(provider=memory_provider(network, clock)) as cmid:
...     cmid.resolve_addr(("10.0.0.2", 7471))
...     cmid.verbs.name
'soft_eth0'
>>> with CmId(provider=memory_provider(network, clock)) as cmid:
...     cmid.resolve_addr(("10.0.0.3", 7471), timeout_ms=5000)  # doctest: +ELLIPSIS
Traceback (most recent call last):
rdmacm.errors.CmTimeoutError: resolve_addr 10.0.0.3:7471: 10.0.0.3 did not answer on eth0 in time [ETIMEDOUT]; try: ...
>>> clock.now
5.0

:class:`Fabric` connects several such hosts by a simulated network that loses, duplicates, reorders, delays and corrupts
packets, in virtual time. Faults are random, with given probabilities, or come from a script (:class:`Verdict`,
:func:`nth`). The same seed and the same calls give the same run, packet by packet.

:class:`MemorySubnet` is an InfiniBand subnet: ports that exchange management datagrams, and a
:class:`SubnetAdministrator` whose records and faults (:class:`SaFault`) the test sets.
"""

from __future__ import annotations

from rdmacm.testing.clock import SimulationError, VirtualClock
from rdmacm.testing.fabric import Fabric
from rdmacm.testing.faults import CORRUPT, DELIVER, DUPLICATE, LOSE, FabricPacket, Outcome, Verdict, nth
from rdmacm.testing.host import FabricWire, Host, SimProvider
from rdmacm.testing.log import FabricLog, LogEntry
from rdmacm.testing.network import MemoryNetwork, memory_provider
from rdmacm.testing.sa import SaFault, SubnetAdministrator, TableMode
from rdmacm.testing.subnet import MemoryPort, MemorySubnet, SubnetMad

__all__ = [
    "Fabric",
    "Host",
    "FabricWire",
    "SimProvider",
    "SimulationError",
    "FabricPacket",
    "Verdict",
    "DELIVER",
    "LOSE",
    "DUPLICATE",
    "CORRUPT",
    "nth",
    "Outcome",
    "FabricLog",
    "LogEntry",
    "MemoryNetwork",
    "MemorySubnet",
    "MemoryPort",
    "SubnetAdministrator",
    "SubnetMad",
    "SaFault",
    "TableMode",
    "VirtualClock",
    "memory_provider",
]
