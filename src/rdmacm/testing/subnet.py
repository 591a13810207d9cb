"""A simulated InfiniBand subnet: ports, a subnet administrator, and management datagrams between them.

>>> from rdmacm.proto.mad import MadAddress
>>> from rdmacm.testing import MemorySubnet, VirtualClock
>>> clock = VirtualClock()
>>> subnet = MemorySubnet(clock=clock, latency=1e-6)
>>> a, b = subnet.add_port("a"), subnet.add_port("b")
>>> a.open(), b.open()
(None, None)
>>> a.send(MadAddress(b.port().lid), b"\\1\\7\\2\\3" + bytes(252))
>>> clock.advance(1e-6)
>>> [(source.lid, len(mad)) for source, mad in b.receive()]
[(2, 256)]
"""

from __future__ import annotations

import errno
import heapq
import os
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from rdmacm.address import Gid
from rdmacm.ib.transport import IbPort, MadTransport, ReceivedMad
from rdmacm.progress.timers import TimerDescriptor
from rdmacm.progress.wake import Wake
from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.mad import MAD_SIZE, RESPONSE, MadAddress, MgmtClass
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.mad import SaMethod
from rdmacm.proto.wire import Buffer
from rdmacm.testing.clock import VirtualClock
from rdmacm.testing.faults import Verdict, check_durations, check_probabilities, corrupted
from rdmacm.testing.sa import SubnetAdministrator, TableMode
from rdmacm.verbs.enums import PortState

#: Maximum number of datagrams that wait for :meth:`MemoryPort.receive`; more are dropped.
_MAX_INBOX = 4096
#: Maximum number of datagrams that one call of :meth:`MemoryPort.receive` returns.
_MAX_BATCH = 64
#: Maximum number of datagrams in flight; more are dropped.
_MAX_IN_FLIGHT = 1 << 16

_HIGHEST_LID = 0xBFFF
_LINK_LOCAL = 0xFE80 << 48
_FIRST_GUID = 0x0002C903_00000000

_METHODS = {int(method): method.name for method in SaMethod}
_ATTRIBUTES = {int(attribute): attribute.name for attribute in Attribute}
_MESSAGES = {int(attribute): attribute.name for attribute in AttributeId}


@dataclass(frozen=True, slots=True)
class SubnetMad:
    """A management datagram as it was sent.

    - ``number``: counts the datagrams of a subnet, from 1.
    - ``time``: when it was sent, in seconds of the subnet's clock.
    - ``source``: name of the sending port, or ``"sa"`` for the subnet administrator.
    - ``destination``: name of the receiving port, or ``"sa"``.
    - ``data``: the MAD.
    """

    number: int
    time: float
    source: str
    destination: str
    data: bytes

    @property
    def kind(self) -> str:
        """``REQ``, ``REP`` and so on for connection management, ``GET PATH_RECORD`` and so on for the SA, or ``?``."""
        data = self.data
        if len(data) < 18:
            return "?"
        attribute = int.from_bytes(data[16:18], "big")
        if data[1] == MgmtClass.COM_MGT:
            return _MESSAGES.get(attribute, "?")
        if data[1] == MgmtClass.SUBN_ADM and data[3] in _METHODS and attribute in _ATTRIBUTES:
            return f"{_METHODS[data[3]]} {_ATTRIBUTES[attribute]}"
        return "?"


class MemoryPort(MadTransport):
    """A port of a subnet, created by :meth:`MemorySubnet.add_port`; see :class:`rdmacm.ib.MadTransport`.

    In virtual time it has no file descriptor; the driver of the clock calls :meth:`MemorySubnet.next_deadline` instead.

    Attributes:

    - ``name``: the name of the port, unique on the subnet.
    - ``carries_cm``: whether it carries connection management (GSI class 7).
    - ``reassembles``: whether it delivers segmented answers as a whole.
    - ``dropped``: counts dropped datagrams by reason.
    - ``subnet``: the subnet that the port is on.
    - ``is_open``: whether datagrams arrive; others are dropped.
    - ``tid_high``: upper half of the transaction ids of requests, as the kernel's umad layer sets it.
    """

    def __init__(self, subnet: MemorySubnet, name: str, number: int, carries_cm: bool) -> None:
        self.name = name
        self.carries_cm = carries_cm
        self.reassembles: bool = subnet.sa.table_mode is TableMode.WHOLE
        self.dropped: dict[str, int] = Counter()
        self.subnet = subnet
        self.is_open: bool = False
        self.tid_high = number
        #: Datagrams that :meth:`receive` has not returned yet.
        self._inbox: deque[ReceivedMad] = deque()
        #: Readable while datagrams wait. Like ``_timer`` and ``_epoll``, it exists only in real time.
        self._wake: Wake | None = None
        #: Readable when the subnet has a deadline.
        self._timer: TimerDescriptor | None = None
        #: Readable when ``_wake`` or ``_timer`` is.
        self._epoll: select.epoll | None = None

    def open(self) -> None:
        with self.subnet.lock:
            self.subnet._port_of(self)
            if self.is_open:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            self.is_open = True
            if self.subnet.is_real_time:
                self._wake = Wake()
                if sys.platform == "linux":  # other systems have no timer descriptor
                    self._timer, self._epoll = TimerDescriptor(), select.epoll()
                    for fd in (self._wake.fd, self._timer.fd):
                        self._epoll.register(fd, select.EPOLLIN)
            self.subnet.settle()

    def port(self) -> IbPort:
        with self.subnet.lock:
            return self.subnet._port_of(self)

    def fileno(self) -> int:
        if self._epoll is not None:
            return self._epoll.fileno()
        return self._wake.fd if self._wake is not None else -1

    def send(self, address: MadAddress, mad: Buffer) -> None:
        with self.subnet.lock:
            self.subnet._transmit(self, address, bytes(mad))
            self.subnet.settle()

    def receive(self) -> Sequence[ReceivedMad]:
        with self.subnet.lock:
            self.subnet.settle()
            arrived = [self._inbox.popleft() for _ in range(min(_MAX_BATCH, len(self._inbox)))]
            if self._wake is not None and not self._inbox:
                self._wake.clear()
            return arrived

    @property
    def waiting(self) -> int:
        """Number of datagrams that :meth:`receive` has not returned yet."""
        return len(self._inbox)

    def close(self) -> None:
        with self.subnet.lock:
            self.is_open = False
            self._inbox.clear()
            for part in (self._epoll, self._timer, self._wake):
                if part is not None:
                    part.close()
            self._epoll = self._timer = self._wake = None

    abandon = close

    def _arrive(self, source: MadAddress, mad: bytes) -> None:
        """Queue a datagram from the subnet. The caller holds the subnet's lock."""
        if not self.is_open:
            self.dropped["not open"] += 1
        elif mad[1:2] == bytes((MgmtClass.COM_MGT,)) and not self.carries_cm:
            self.dropped["connection management"] += 1
        elif len(self._inbox) >= _MAX_INBOX:
            self.dropped["overrun"] += 1
        else:
            self._inbox.append((source, mad))
            if self._wake is not None:
                self._wake.set()

    def __repr__(self) -> str:
        return f"<MemoryPort {self.name}>"


class MemorySubnet:
    """A simulated InfiniBand subnet with one subnet administrator, ``sa``, at LID 1.

    ``clock`` returns seconds: a :class:`VirtualClock` (by default a new one) or ``time.monotonic``. Datagrams and
    timers are processed only in calls of a port and of :meth:`settle`. So in virtual time a run depends on nothing but
    its calls and ``seed``, which seeds every random number here and in ``sa``.

    The other arguments are attributes, described below, and may be changed at any time. Raises ValueError for a
    probability outside 0 to 1, and for a time that is negative or not finite.

    As on a real port, the system sets the upper half of a request's transaction id (here to the number of the port),
    and datagrams from the administrator may be shorter than 256 bytes.

    Attributes:

    - ``clock``: returns the time in seconds.
    - ``is_real_time``: whether ``clock`` is ``time.monotonic``; otherwise time is virtual.
    - ``latency``: time from sender to receiver, in seconds.
    - ``reorder_delay``: maximum of the random additional delay of datagrams held back, in seconds.
    - ``loss``: probability (0 to 1) that a datagram is lost.
    - ``duplicate``: probability that a datagram arrives twice.
    - ``reorder``: probability that a datagram is held back, so that later ones may overtake it.
    - ``subnet_prefix``: upper 64 bits of new ports' GIDs.
    - ``faults``: a script of faults, such as that of :func:`nth`: called with each datagram sent, it returns a verdict,
      or None to leave the datagram to chance.
    - ``sa``: the subnet administrator.
    - ``ports``: ports by name.
    - ``lock``: protects the state of the subnet and of its ports.
    """

    def __init__(
        self,
        seed: int | str = 0,
        *,
        clock: Callable[[], float] | None = None,
        latency: float = 0.0,
        loss: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        reorder_delay: float = 200e-6,
        subnet_prefix: int = _LINK_LOCAL,
    ) -> None:
        check_probabilities(loss=loss, duplicate=duplicate, reorder=reorder)
        check_durations(latency=latency, reorder_delay=reorder_delay)
        self.clock: Callable[[], float] = clock or VirtualClock()
        self.is_real_time: bool = self.clock is time.monotonic
        self.latency = latency
        self.reorder_delay = reorder_delay
        self.loss = loss
        self.duplicate = duplicate
        self.reorder = reorder
        self.subnet_prefix = subnet_prefix
        self.faults: Callable[[SubnetMad], Verdict | None] | None = None
        self.sa: SubnetAdministrator = SubnetAdministrator(Random(f"{seed}/sa"))
        self.ports: dict[str, MemoryPort] = {}
        self.lock: threading.RLock = threading.RLock()
        #: The attributes of each port, by name.
        self._attributes: dict[str, IbPort] = {}
        #: Names of ports, by each of their LIDs.
        self._names_by_lid: dict[int, str] = {}
        #: Source of the random faults.
        self._random = Random(f"{seed}/subnet")
        #: Heap of (arrival time, number of the copy, datagram, source address, its bytes).
        self._in_flight: list[tuple[float, int, SubnetMad, MadAddress, bytes]] = []
        #: Numbers of datagrams sent, of copies scheduled, and of ports added.
        self._mads_sent = self._copies_sent = self._ports_added = 0

    # -- ports ------------------------------------------------------------------------------------------------

    def add_port(self, name: str, *, carries_cm: bool = True, **attributes: Any) -> MemoryPort:
        """Add an active port, which the administrator knows.

        ``attributes`` replace defaults of :class:`~rdmacm.ib.IbPort`: the next free LID from 2 on, a unique
        GUID, one GID, the P_Key 0xFFFF, an active MTU of 2048 bytes (code 4), a rate of 10 Gb/s (code 3). The port
        delivers segmented answers as a whole if ``sa.table_mode`` is ``WHOLE`` now. Raises ValueError for a name, a LID
        or a GID in use.
        """
        with self.lock:
            if name in self.ports or name == "sa":
                raise ValueError(f"port {name} already exists")
            self._ports_added += 1
            guid = attributes.pop("port_guid", _FIRST_GUID + 2 * self._ports_added + 1)
            lid = next(lid for lid in range(2, _HIGHEST_LID) if lid not in self._names_by_lid and lid != self.sa.lid)
            usual: dict[str, Any] = {
                "device": name,
                "port_num": 1,
                "node_guid": guid - 1,
                "gids": (Gid(self.subnet_prefix.to_bytes(8, "big") + guid.to_bytes(8, "big")),),
                "pkeys": (0xFFFF,),
                "state": PortState.ACTIVE,
                "lid": lid,
                "sm_lid": self.sa.lid,
                "active_mtu": 4,
                "rate": 3,
            }
            self._add_attributes(name, IbPort(port_guid=guid, **usual | attributes))
            port = MemoryPort(self, name, self._ports_added, carries_cm)
            self.ports[name] = port
            return port

    def change_port(self, name: str, **attributes: Any) -> None:
        """Change fields of a port's :class:`~rdmacm.ib.IbPort`.

        The administrator knows the port only while it is active and has a LID. Raises ValueError for a LID or a GID in
        use; the port then does not change.
        """
        with self.lock:
            before = self._remove_attributes(name)
            try:
                self._add_attributes(name, replace(before, **attributes))
            except ValueError:
                self._add_attributes(name, before)
                raise

    def remove_port(self, name: str) -> None:
        """Remove a port; its transport then neither sends nor receives."""
        with self.lock:
            self._remove_attributes(name)
            del self.ports[name]

    def _add_attributes(self, name: str, port: IbPort) -> None:
        lids = port.lids
        if any(lid in self._names_by_lid or lid == self.sa.lid for lid in lids):
            raise ValueError(f"LID {port.lid} is in use")
        if any(set(port.gids) & set(other.gids) for other in self._attributes.values()):
            raise ValueError("a GID is in use")
        self._attributes[name] = port
        self._names_by_lid |= dict.fromkeys(lids, name)
        if port.state == PortState.ACTIVE and port.lid:
            self.sa.add_port(port, name)

    def _remove_attributes(self, name: str) -> IbPort:
        port = self._attributes.pop(name)
        self._names_by_lid = {lid: other for lid, other in self._names_by_lid.items() if other != name}
        self.sa.remove_port(port.gids[0])
        return port

    def _port_of(self, transport: MemoryPort) -> IbPort:
        """Return the state of a transport's port; raises ENODEV after its removal. The caller holds the lock."""
        if self.ports.get(transport.name) is not transport:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return self._attributes[transport.name]

    # -- time -------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the time of the next arrival or timer, in seconds of ``clock``; None without any."""
        with self.lock:
            deadlines = [self.sa.next_deadline(), self._in_flight[0][0] if self._in_flight else None]
            return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def settle(self) -> None:
        """Process everything that is due now, in order of time."""
        with self.lock:
            now = self.clock()
            while (at := self.next_deadline()) is not None and at <= now:
                while self._in_flight and self._in_flight[0][0] <= at:
                    _, _, sent, source, data = heapq.heappop(self._in_flight)
                    self._deliver(sent, source, data, at)
                self.sa.timer(at)
                self._send_answers(at)
            for port in self.ports.values():
                if port._timer is not None:
                    port._timer.set(at, now)

    def _send_answers(self, now: float) -> None:
        """Schedule the arrival of the administrator's datagrams."""
        for address, data in self.sa.mads_to_send():
            name = self._names_by_lid.get(address.lid)
            if name is None:
                self.sa.dropped["undeliverable"] += 1
            else:
                self._schedule("sa", name, MadAddress(self.sa.lid, sl=address.sl, pkey_index=0), data, now)

    # -- datagrams --------------------------------------------------------------------------------------------

    def _transmit(self, transport: MemoryPort, address: MadAddress, data: bytes) -> None:
        """Send a datagram from a port. The caller holds the lock."""
        attributes = self._attributes.get(transport.name)
        reason = self._drop_reason(transport, attributes, address, data)
        if reason or attributes is None:
            transport.dropped[reason or "no such port"] += 1
            return
        if not data[3] & RESPONSE:
            data = data[:8] + (transport.tid_high << 16).to_bytes(4, "big") + data[12:]
        destination = "sa" if address.lid == self.sa.lid else self._names_by_lid.get(address.lid)
        if destination is None:
            transport.dropped["undeliverable"] += 1
            return
        pkey_index = self._pkey_index(destination, attributes.pkeys[address.pkey_index])
        if pkey_index < 0:
            transport.dropped["undeliverable"] += 1
            return
        source = MadAddress(attributes.lid, sl=address.sl, pkey_index=pkey_index)
        if address.gid is not None:
            source = source._replace(
                gid=attributes.gids[min(address.gid_index, len(attributes.gids) - 1)],
                flow_label=address.flow_label,
                traffic_class=address.traffic_class,
                hop_limit=address.hop_limit,
            )
        self._schedule(transport.name, destination, source, data, self.clock())

    def _drop_reason(
        self, transport: MemoryPort, attributes: IbPort | None, address: MadAddress, data: bytes
    ) -> str | None:
        """Return why a datagram does not leave its port, or None."""
        if not transport.is_open:
            return "not open"
        if attributes is None or self.ports.get(transport.name) is not transport:
            return "no such port"
        if len(data) != MAD_SIZE:
            return "length"
        if attributes.state != PortState.ACTIVE or not attributes.lid:
            return "port not active"
        if data[1] == MgmtClass.COM_MGT and not transport.carries_cm:
            return "connection management"
        return None if 0 <= address.pkey_index < len(attributes.pkeys) else "pkey index"

    def _pkey_index(self, destination: str, pkey: int) -> int:
        """Return the index of the destination's P_Key that accepts datagrams with ``pkey``, or -1."""
        if destination == "sa":
            return 0
        for index, own in enumerate(self._attributes[destination].pkeys):
            if (own ^ pkey) & 0x7FFF == 0 and (own | pkey) & 0x8000:
                return index
        return -1

    def _schedule(self, source: str, destination: str, address: MadAddress, data: bytes, now: float) -> None:
        self._mads_sent += 1
        sent = SubnetMad(self._mads_sent, now, source, destination, data)
        verdict = self.faults(sent) if self.faults is not None else None
        random = self._random
        if verdict is None:
            chances = [random.random() for _ in range(4)]
            delay = chances[3] * self.reorder_delay if chances[2] < self.reorder else 0.0
            verdict = Verdict(0 if chances[0] < self.loss else 2 if chances[1] < self.duplicate else 1, delay)
        if verdict.data is not None:
            data = verdict.data
        for copy in range(verdict.copies):
            if len(self._in_flight) >= _MAX_IN_FLIGHT:
                return
            self._copies_sent += 1
            arriving = corrupted(data, verdict.flips, random) if verdict.flips and not copy else data
            heapq.heappush(
                self._in_flight, (now + self.latency + verdict.delay, self._copies_sent, sent, address, arriving)
            )

    def _deliver(self, sent: SubnetMad, source: MadAddress, data: bytes, now: float) -> None:
        if sent.destination == "sa":
            self.sa.mad_received(source, data, now)
            return
        attributes = self._attributes.get(sent.destination)
        if attributes is not None and attributes.state == PortState.ACTIVE:
            self.ports[sent.destination]._arrive(source, data)

    def __repr__(self) -> str:
        return f"<MemorySubnet at {self.clock():.9f} s, {len(self.ports)} ports>"
