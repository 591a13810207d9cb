"""An InfiniBand subnet in memory: ports, a subnet administrator, and management datagrams between them.

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
import math
import os
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeAlias

from rdmacm.address import Gid
from rdmacm.ib.transport import IbPort, ReceivedMad
from rdmacm.progress.timers import TimerDescriptor
from rdmacm.progress.wake import Wake
from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.mad import MAD_SIZE, RESPONSE, MadAddress, MgmtClass
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.mad import SaMethod
from rdmacm.proto.wire import Buffer
from rdmacm.testing.clock import VirtualClock
from rdmacm.testing.faults import Verdict, corrupted
from rdmacm.testing.sa import SubnetAdministrator, Tables
from rdmacm.verbs.enums import PortState

__all__ = ["MemoryPort", "MemorySubnet", "SubnetMad"]

#: Datagrams that wait for :meth:`MemoryPort.receive`, that one call of it returns, that are under way; more are lost.
_INBOX = 4096
_BATCH = 64
_MOST_IN_FLIGHT = 1 << 16

_HIGHEST_LID = 0xBFFF
_LINK_LOCAL = 0xFE80 << 48
_FIRST_GUID = 0x0002C903_00000000

_METHODS = {int(method): method.name for method in SaMethod}
_ATTRIBUTES = {int(attribute): attribute.name for attribute in Attribute}
_MESSAGES = {int(attribute): attribute.name for attribute in AttributeId}


@dataclass(frozen=True, slots=True)
class SubnetMad:
    """A datagram as it was sent.

    ``number`` counts the datagrams of a subnet from 1, ``time`` is in seconds of its clock. ``source`` and
    ``destination`` are names of ports, ``"sa"`` for the subnet administrator.
    """

    number: int
    time: float
    source: str
    destination: str
    data: bytes

    @property
    def kind(self) -> str:
        """``REQ``, ``REP`` ... for the connection manager's; ``GET PATH_RECORD`` ... for subnet administration's."""
        data = self.data
        if len(data) < 18:
            return "?"
        attribute = int.from_bytes(data[16:18], "big")
        if data[1] == MgmtClass.COM_MGT:
            return _MESSAGES.get(attribute, "?")
        if data[1] == MgmtClass.SUBN_ADM and data[3] in _METHODS and attribute in _ATTRIBUTES:
            return f"{_METHODS[data[3]]} {_ATTRIBUTES[attribute]}"
        return "?"


#: A script of faults: a verdict on a datagram that is being sent, or None to leave it to chance.
SubnetFaults: TypeAlias = "Callable[[SubnetMad], Verdict | None]"


class MemoryPort:
    """A port of a subnet; see :class:`rdmacm.ib.transport.MadTransport`. Made by :meth:`MemorySubnet.add_port`.

    In virtual time there is no descriptor: whoever drives the clock asks :meth:`MemorySubnet.next_deadline`.
    """

    def __init__(self, subnet: MemorySubnet, name: str, number: int, carries_cm: bool) -> None:
        self.name = name
        self.carries_cm = carries_cm
        self.reassembles = subnet.sa.tables is Tables.WHOLE
        self.dropped: dict[str, int] = Counter()
        self.subnet = subnet
        self.is_open = False
        #: What the system makes of the upper half of a transaction id.
        self.stamp = number
        self._inbox: deque[ReceivedMad] = deque()
        self._wake: Wake | None = None
        self._timer: TimerDescriptor | None = None
        self._epoll: select.epoll | None = None

    def open(self) -> None:
        with self.subnet.lock:
            self.subnet.port_of(self)
            if self.is_open:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            self.is_open = True
            if self.subnet.is_real_time:
                self._wake = Wake()
                if sys.platform == "linux":  # elsewhere a wake-up has to say it all
                    self._timer, self._epoll = TimerDescriptor(), select.epoll()
                    for fd in (self._wake.fd, self._timer.fd):
                        self._epoll.register(fd, select.EPOLLIN)
            self.subnet.settle()

    def port(self) -> IbPort:
        with self.subnet.lock:
            return self.subnet.port_of(self)

    def fileno(self) -> int:
        if self._epoll is not None:
            return self._epoll.fileno()
        return self._wake.fd if self._wake is not None else -1

    def send(self, address: MadAddress, mad: Buffer) -> None:
        with self.subnet.lock:
            self.subnet.transmit(self, address, bytes(mad))
            self.subnet.settle()

    def receive(self) -> Sequence[ReceivedMad]:
        with self.subnet.lock:
            self.subnet.settle()
            arrived = [self._inbox.popleft() for _ in range(min(_BATCH, len(self._inbox)))]
            if self._wake is not None and not self._inbox:
                self._wake.clear()
            return arrived

    @property
    def waiting(self) -> int:
        """Datagrams that :meth:`receive` has not returned yet."""
        return len(self._inbox)

    def close(self) -> None:
        with self.subnet.lock:
            self.is_open = False
            self._inbox.clear()
            for part in (self._epoll, self._timer, self._wake):
                if part is not None:
                    part.close()
            self._epoll = self._timer = self._wake = None

    def abandon(self) -> None:
        self.close()

    def arrive(self, source: MadAddress, mad: bytes) -> None:
        """Take in a datagram from the subnet (its lock is held)."""
        if not self.is_open:
            self.dropped["not open"] += 1
        elif mad[1:2] == bytes((MgmtClass.COM_MGT,)) and not self.carries_cm:
            self.dropped["connection management"] += 1
        elif len(self._inbox) >= _INBOX:
            self.dropped["overrun"] += 1
        else:
            self._inbox.append((source, mad))
            if self._wake is not None:
                self._wake.set()

    def rearm(self, deadline: float | None, now: float) -> None:
        """Something happens on the subnet at ``deadline`` (its lock is held)."""
        if self._timer is not None:
            self._timer.set(deadline, now)

    def __repr__(self) -> str:
        return f"<MemoryPort {self.name}>"


class MemorySubnet:
    """A simulated InfiniBand subnet with one subnet administrator, ``sa``, at LID 1.

    ``clock`` reads seconds: a :class:`VirtualClock`, by default one of its own, or ``time.monotonic``. Nothing happens
    but in a call of a port's or of :meth:`settle`, so in virtual time a run is a function of ``seed``, which decides
    everything that is random here and in ``sa``.

    Of the datagrams, these parts (0..1) are lost, come twice and are held back: ``loss``, ``duplicate``, ``reorder``. A
    datagram takes ``latency`` seconds and one that is held back up to ``reorder_delay`` more. ``faults`` is a script
    that is asked first. All of these may be changed at any time.

    As with the real ones, the upper half of a request's transaction id is the system's (it has the sender's number
    there on arrival), and what arrives of the administrator's may be shorter than 256 bytes.
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
        for name, part in {"loss": loss, "duplicate": duplicate, "reorder": reorder}.items():
            if not 0 <= part <= 1:
                raise ValueError(f"{name} is a part, 0 to 1, not {part}")
        for name, seconds in {"latency": latency, "reorder_delay": reorder_delay}.items():
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name} is in seconds, 0 or more, not {seconds}")
        self.clock = clock or VirtualClock()
        self.is_real_time = self.clock is time.monotonic
        self.latency, self.reorder_delay = latency, reorder_delay
        self.loss, self.duplicate, self.reorder = loss, duplicate, reorder
        self.subnet_prefix = subnet_prefix
        self.faults: SubnetFaults | None = None
        self.sa = SubnetAdministrator(Random(f"{seed}/sa"))
        self.ports: dict[str, MemoryPort] = {}
        self.lock = threading.RLock()
        self._facts: dict[str, IbPort] = {}
        self._names: dict[int, str] = {}
        self._random = Random(f"{seed}/subnet")
        self._flying: list[tuple[float, int, SubnetMad, MadAddress, bytes]] = []
        self._mads = self._copies = self._numbers = 0

    # -- ports ------------------------------------------------------------------------------------------------

    def add_port(self, name: str, *, carries_cm: bool = True, **facts: Any) -> MemoryPort:
        """A new port, known to the administrator, active; it reassembles where ``sa.tables`` says so by now.

        ``facts`` are fields of :class:`~rdmacm.ib.transport.IbPort` that are to be other than usual: a LID from 2 on, a
        GUID of its own, one GID, the P_Key 0xFFFF, an MTU of 2048 bytes (4), 10 Gb/s (3). ValueError for a name, a
        LID or a GID that is taken.
        """
        with self.lock:
            if name in self.ports or name == "sa":
                raise ValueError(f"there is a port {name}")
            self._numbers += 1
            guid = facts.pop("port_guid", _FIRST_GUID + 2 * self._numbers + 1)
            lid = next(lid for lid in range(2, _HIGHEST_LID) if lid not in self._names and lid != self.sa.lid)
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
            self._set(name, IbPort(port_guid=guid, **usual | facts))
            port = MemoryPort(self, name, self._numbers, carries_cm)
            self.ports[name] = port
            return port

    def change_port(self, name: str, **facts: Any) -> None:
        """Let a port be otherwise: fields of :class:`~rdmacm.ib.transport.IbPort`.

        The administrator knows it as long as it is active and has a LID.
        """
        with self.lock:
            before = self._unset(name)
            try:
                self._set(name, replace(before, **facts))
            except ValueError:
                self._set(name, before)
                raise

    def remove_port(self, name: str) -> None:
        """A port is gone: nothing is sent from it, delivered to it or known of it."""
        with self.lock:
            self._unset(name)
            del self.ports[name]

    def _set(self, name: str, port: IbPort) -> None:
        lids = range(port.lid, port.lid + (1 << port.lmc)) if port.lid else ()
        if any(lid in self._names or lid == self.sa.lid for lid in lids):
            raise ValueError(f"LID {port.lid} is taken")
        if any(set(port.gids) & set(other.gids) for other in self._facts.values()):
            raise ValueError("a GID is taken")
        self._facts[name] = port
        self._names |= dict.fromkeys(lids, name)
        if port.state == PortState.ACTIVE and port.lid:
            self.sa.add_port(port, name)

    def _unset(self, name: str) -> IbPort:
        port = self._facts.pop(name)
        self._names = {lid: other for lid, other in self._names.items() if other != name}
        self.sa.remove_port(port.gids[0])
        return port

    def port_of(self, transport: MemoryPort) -> IbPort:
        """What a transport's port is now; ENODEV where it is gone (the lock is held)."""
        if self.ports.get(transport.name) is not transport:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return self._facts[transport.name]

    # -- time -------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When something happens next, on ``clock``; None where nothing is under way."""
        with self.lock:
            deadlines = [self.sa.next_deadline(), self._flying[0][0] if self._flying else None]
            return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def settle(self) -> None:
        """Let happen what is due by now, in order."""
        with self.lock:
            now = self.clock()
            while (at := self.next_deadline()) is not None and at <= now:
                while self._flying and self._flying[0][0] <= at:
                    _, _, sent, source, data = heapq.heappop(self._flying)
                    self._deliver(sent, source, data, at)
                self.sa.timer(at)
                self._collect(at)
            for port in self.ports.values():
                port.rearm(at, now)

    def _collect(self, now: float) -> None:
        """What the administrator sends."""
        for address, data in self.sa.mads_to_send():
            name = self._names.get(address.lid)
            if name is None:
                self.sa.dropped["undeliverable"] += 1
            else:
                self._fly("sa", name, MadAddress(self.sa.lid, sl=address.sl, pkey_index=0), data, now)

    # -- datagrams --------------------------------------------------------------------------------------------

    def transmit(self, transport: MemoryPort, address: MadAddress, data: bytes) -> None:
        """A port sends a datagram (the lock is held)."""
        facts = self._facts.get(transport.name)
        reason = self._refusal(transport, facts, address, data)
        if reason or facts is None:
            transport.dropped[reason or "no such port"] += 1
            return
        if not data[3] & RESPONSE:
            data = data[:8] + (transport.stamp << 16).to_bytes(4, "big") + data[12:]
        destination = "sa" if address.lid == self.sa.lid else self._names.get(address.lid)
        if destination is None:
            transport.dropped["undeliverable"] += 1
            return
        has_grh = address.gid is not None
        source = MadAddress(
            facts.lid,
            sl=address.sl,
            pkey_index=self._pkey_index(destination, facts.pkeys[address.pkey_index]),
            gid=facts.gids[min(address.gid_index, len(facts.gids) - 1)] if has_grh else None,
            flow_label=address.flow_label if has_grh else 0,
            traffic_class=address.traffic_class if has_grh else 0,
            hop_limit=address.hop_limit if has_grh else 0,
        )
        if source.pkey_index < 0:
            transport.dropped["undeliverable"] += 1
            return
        self._fly(transport.name, destination, source, data, self.clock())

    def _refusal(self, transport: MemoryPort, facts: IbPort | None, address: MadAddress, data: bytes) -> str | None:
        """Why a datagram does not leave its port."""
        if not transport.is_open:
            return "not open"
        if facts is None or self.ports.get(transport.name) is not transport:
            return "no such port"
        if len(data) != MAD_SIZE:
            return "length"
        if facts.state != PortState.ACTIVE or not facts.lid:
            return "port not active"
        if data[1] == MgmtClass.COM_MGT and not transport.carries_cm:
            return "connection management"
        return None if 0 <= address.pkey_index < len(facts.pkeys) else "pkey index"

    def _pkey_index(self, destination: str, pkey: int) -> int:
        """Where a port has a P_Key that lets it talk to who has ``pkey``; -1 for nowhere."""
        if destination == "sa":
            return 0
        for index, own in enumerate(self._facts[destination].pkeys):
            if (own ^ pkey) & 0x7FFF == 0 and (own | pkey) & 0x8000:
                return index
        return -1

    def _fly(self, source: str, destination: str, address: MadAddress, data: bytes, now: float) -> None:
        self._mads += 1
        sent = SubnetMad(self._mads, now, source, destination, data)
        verdict = self.faults(sent) if self.faults is not None else None
        random = self._random
        if verdict is None:
            chances = [random.random() for _ in range(4)]
            delay = chances[3] * self.reorder_delay if chances[2] < self.reorder else 0.0
            verdict = Verdict(0 if chances[0] < self.loss else 2 if chances[1] < self.duplicate else 1, delay)
        if verdict.data is not None:
            data = verdict.data
        for copy in range(verdict.copies):
            if len(self._flying) >= _MOST_IN_FLIGHT:
                return
            self._copies += 1
            arriving = corrupted(data, verdict.flips, random) if verdict.flips and not copy else data
            heapq.heappush(self._flying, (now + self.latency + verdict.delay, self._copies, sent, address, arriving))

    def _deliver(self, sent: SubnetMad, source: MadAddress, data: bytes, now: float) -> None:
        if sent.destination == "sa":
            self.sa.mad_received(source, data, now)
            return
        facts = self._facts.get(sent.destination)
        if facts is not None and facts.state == PortState.ACTIVE:
            self.ports[sent.destination].arrive(source, data)

    def __repr__(self) -> str:
        return f"<MemorySubnet at {self.clock():.9f} s, {len(self.ports)} ports>"
