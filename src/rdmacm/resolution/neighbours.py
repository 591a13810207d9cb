"""Resolutions that wait for the link-layer address of their next hop.

Ids that wait for the same next hop share one probe and end together when it answers. The kernel gives up on a neighbour
after three tries, one a second. This module probes once a second until each id's own timeout, as the kernel's
connection manager does.
"""

from __future__ import annotations

import errno
from socket import AF_INET, AF_INET6, inet_ntop
from typing import Protocol, TypeAlias

from rdmacm.errors import Failure
from rdmacm.net.types import Neighbour, Network
from rdmacm.progress.runtime import Runtime
from rdmacm.progress.timers import Timer
from rdmacm.resolution.lookup import Lookup

#: Seconds between two probes of one neighbour.
PROBE_INTERVAL = 1.0

#: Family, interface index and packed address of a next hop.
_Hop: TypeAlias = tuple[int, int, bytes]


class NeighbourWaiter(Protocol):
    """An id that waits for a neighbour. Every method is called with the runtime's lock held."""

    def address_found(self, lookup: Lookup) -> None:
        """The neighbour has answered: ``lookup.neighbour`` is its entry."""

    def address_failed(self, lookup: Lookup, failure: Failure) -> None:
        """The neighbour has not answered in time."""

    def network_changed(self, lookup: Lookup, deadline: float) -> None:
        """Interfaces, addresses or routes have changed: resolve again, and wait until ``deadline`` at the latest.

        ``deadline`` is in seconds of the runtime's clock.
        """


class PendingNeighbours:
    """The waiting ids of one provider. Used with the runtime's lock held."""

    def __init__(self, runtime: Runtime, network: Network) -> None:
        self._runtime = runtime
        self._network = network
        #: By next hop: each waiting id with its lookup and the timer of its timeout.
        self.waiting: dict[_Hop, dict[NeighbourWaiter, tuple[Lookup, Timer]]] = {}
        #: The timer of each next hop's next probe.
        self._probes: dict[_Hop, Timer] = {}

    def __len__(self) -> int:
        """How many ids wait."""
        return sum(len(ids) for ids in self.waiting.values())

    def add(self, waiter: NeighbourWaiter, lookup: Lookup, deadline: float) -> bool:
        """Wait for the lookup's next hop until ``deadline``, in seconds of the runtime's clock.

        False if there is nothing to wait for: no next hop, a known neighbour, or a system that does not show its
        neighbour table.
        """
        hop = lookup.next_hop
        network = self._network
        if hop is None or not network.sees_neighbours:
            return False
        group = self.waiting.get(hop)
        if group is None:
            lookup.neighbour = network.neighbour(*hop)
            if lookup.neighbour is not None and lookup.neighbour.state.is_valid:
                return False
            network.watch(True)  # before the probe, so that the notification of its answer is not missed
            group = self.waiting[hop] = {}
            network.probe(*hop, self._destination_behind(lookup))
            self._set_probe_timer(hop)
        group[waiter] = lookup, self._runtime.call_at(deadline, lambda _: self._expire(waiter, hop, lookup))
        return True

    @staticmethod
    def _destination_behind(lookup: Lookup) -> bytes | None:
        """The destination, if the next hop is the gateway to it."""
        return lookup.destination.ip if lookup.route is not None and lookup.route.gateway else None

    def remove(self, waiter: NeighbourWaiter, lookup: Lookup) -> None:
        """Stop waiting."""
        hop = lookup.next_hop
        group = self.waiting.get(hop) if hop is not None else None
        if hop is not None and group and waiter in group and group[waiter][0] is lookup:
            group.pop(waiter)[1].cancel()
            if not group:
                self._close(hop)

    def _close(self, hop: _Hop) -> None:
        """Stop all waits for a next hop."""
        for _, timer in self.waiting.pop(hop).values():
            timer.cancel()
        self._probes.pop(hop).cancel()
        if not self.waiting:
            self._network.watch(False)

    def _expire(self, waiter: NeighbourWaiter, hop: _Hop, lookup: Lookup) -> None:
        # The answer may be in the table although its notification was lost.
        lookup.neighbour = self._network.neighbour(*hop)
        if lookup.neighbour is not None and lookup.neighbour.state.is_valid:
            self.neighbour_changed(lookup.neighbour)
            return
        self.remove(waiter, lookup)
        address, interface = inet_ntop(hop[0], hop[2]), lookup.host.interface_name(hop[1])
        subject = "the gateway" if self._destination_behind(lookup) else "it"
        waiter.address_failed(
            lookup,
            Failure(
                errno.ETIMEDOUT,
                "neighbour",
                f"{address} did not answer on {interface} in time",
                f"checking that {subject} is up and on the network of {interface} ('ip neigh', rdmacm doctor A10), or "
                "a longer timeout",
            ),
        )

    def _set_probe_timer(self, hop: _Hop) -> None:
        when = self._runtime.clock() + PROBE_INTERVAL
        self._probes[hop] = self._runtime.call_at(when, lambda _: self._probe(hop))

    def _probe(self, hop: _Hop) -> None:
        network = self._network
        entry = network.neighbour(*hop)
        if entry is not None and entry.state.is_valid:
            self.neighbour_changed(entry)
            return
        lookup, _ = next(iter(self.waiting[hop].values()))
        network.probe(*hop, self._destination_behind(lookup))
        self._set_probe_timer(hop)

    def neighbour_changed(self, neighbour: Neighbour) -> None:
        """An entry of the neighbour table has changed: if it is valid, end the waits for that neighbour."""
        if not neighbour.state.is_valid:
            return
        family = AF_INET if len(neighbour.ip) == 4 else AF_INET6
        hop = (family, neighbour.ifindex, neighbour.ip)
        group = self.waiting.get(hop)
        if group is None:
            return
        self._close(hop)
        for waiter, (lookup, _) in group.items():
            lookup.neighbour = neighbour
            waiter.address_found(lookup)

    def network_changed(self) -> None:
        """Interfaces, addresses or routes have changed: every wait starts over, or fails at once."""
        waits = [(waiter, *wait) for group in self.waiting.values() for waiter, wait in group.items()]
        for waiter, lookup, timer in waits:
            waiter.network_changed(lookup, timer.when)
