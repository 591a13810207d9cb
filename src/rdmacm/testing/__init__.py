"""Tools for testing code that uses RDMA: no real network, no privilege and no waiting is needed.

:class:`MemoryNetwork` is a host's network in memory, whose interfaces, addresses, routes and neighbours the test sets
and changes. :class:`VirtualClock` is a clock that the test advances, as do calls that wait:

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

This page lists the public names; ``pydoc rdmacm.testing.Fabric`` or ``help(rdmacm.testing.Fabric)`` describes one.
docs/simulation.md is the guide. In virtual time, the same seed and the same calls give the same run, packet by packet.

One host
    MemoryNetwork            interfaces, addresses, routes and neighbours of a host
    VirtualClock             time that the test advances
    memory_provider          a provider on both, for CmId(provider=...)
    SimulationError          a wait that nothing can end, or a run without an end

Several hosts
    Fabric, Host             a simulated network with faults; a host on it
    FabricLink               the faults of one direction between two hosts
    FabricWire               how the packets of a host leave and arrive
    FabricPacket             a packet on the fabric
    Verdict                  what a script of faults decides on a packet
    DELIVER, LOSE, DUPLICATE, CORRUPT       usual verdicts
    nth, HasKind             a script: a verdict on the n-th packet of a kind; what has a kind
    FaultScript, FaultRule   rules: what happens to packet n of a kind of a connection, as text or in Python
    FaultAction              what a rule does
    Scenario, ScenarioEvent  what happens when: crashes, partitions, slow hosts, clocks, loss
    Program                  a function or script that runs on a host
    HostClock                the clock of a host
    FabricLog, LogEntry, Outcome            what happened to each packet

InfiniBand
    MemorySubnet             a subnet: ports that exchange management datagrams
    MemoryPort               a port of a subnet, which a host may have
    SubnetMad                a management datagram on a subnet
    SubnetAdministrator      answers queries as OpenSM does
    SaMad, RmppHeader        a request to it; the header of a segment
    SaFault                  a fault of its answer
    TableMode                how it sends answers with many records

rdmacm.ib has the records and addresses of InfiniBand. The other modules of this package are internal.
"""

# "X as X" exports a name to type checkers. Without __all__, help() shows the list above instead of every class.
from rdmacm.proto.sa.mad import SaMad as SaMad
from rdmacm.proto.sa.rmpp import RmppHeader as RmppHeader
from rdmacm.testing.clock import HostClock as HostClock
from rdmacm.testing.clock import SimulationError as SimulationError
from rdmacm.testing.clock import VirtualClock as VirtualClock
from rdmacm.testing.fabric import Fabric as Fabric
from rdmacm.testing.fabric import FabricLink as FabricLink
from rdmacm.testing.faults import CORRUPT as CORRUPT
from rdmacm.testing.faults import DELIVER as DELIVER
from rdmacm.testing.faults import DUPLICATE as DUPLICATE
from rdmacm.testing.faults import LOSE as LOSE
from rdmacm.testing.faults import FabricPacket as FabricPacket
from rdmacm.testing.faults import HasKind as HasKind
from rdmacm.testing.faults import Outcome as Outcome
from rdmacm.testing.faults import Verdict as Verdict
from rdmacm.testing.faults import nth as nth
from rdmacm.testing.host import FabricWire as FabricWire
from rdmacm.testing.host import Host as Host
from rdmacm.testing.log import FabricLog as FabricLog
from rdmacm.testing.log import LogEntry as LogEntry
from rdmacm.testing.network import MemoryNetwork as MemoryNetwork
from rdmacm.testing.network import memory_provider as memory_provider
from rdmacm.testing.programs import Program as Program
from rdmacm.testing.sa import SaFault as SaFault
from rdmacm.testing.sa import SubnetAdministrator as SubnetAdministrator
from rdmacm.testing.sa import TableMode as TableMode
from rdmacm.testing.scenario import Scenario as Scenario
from rdmacm.testing.scenario import ScenarioEvent as ScenarioEvent
from rdmacm.testing.script import FaultAction as FaultAction
from rdmacm.testing.script import FaultRule as FaultRule
from rdmacm.testing.script import FaultScript as FaultScript
from rdmacm.testing.subnet import MemoryPort as MemoryPort
from rdmacm.testing.subnet import MemorySubnet as MemorySubnet
from rdmacm.testing.subnet import SubnetMad as SubnetMad
