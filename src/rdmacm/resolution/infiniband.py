"""From a GID to an InfiniBand port, on any list of ports.

A GID has no route and no neighbour to find: the port is chosen here, and the path to the GID is the subnet
administrator's to give.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from rdmacm.address import SockAddrIB
from rdmacm.explanation import Candidate, Explanation, Step
from rdmacm.failure import Failure
from rdmacm.ib.transport import IbPort
from rdmacm.verbs.device import Device, GidEntry
from rdmacm.verbs.enums import PortState

__all__ = ["IbLookup", "IbView"]

#: The partition number of a P_Key; the bit above it is set for a full member.
_PARTITION = 0x7FFF
_FULL_MEMBER = 0x8000


@dataclass(frozen=True, slots=True)
class IbView:
    """An InfiniBand port and its device at one moment: what a :class:`DeviceView` is for RoCE."""

    device: Device
    port: IbPort
    #: Position among the host's InfiniBand ports (:attr:`rdmacm.soft.ib.ports.IbHost.subnets`).
    index: int

    @property
    def ifindex(self) -> int:
        """Tells devices apart, as an interface index does for RoCE; a real one is never negative."""
        return -1 - self.index

    @property
    def port_num(self) -> int:
        return self.port.port_num

    @property
    def rows(self) -> tuple[GidEntry, ...]:
        return self.device.ports[0].gids

    @property
    def is_active(self) -> bool:
        return self.port.state is PortState.ACTIVE

    def has_pkey(self, pkey: int) -> bool:
        """Whether the port is in a partition; of two limited members neither reaches the other."""
        return any(
            (own ^ pkey) & _PARTITION == 0 and (own | pkey) & _FULL_MEMBER
            for own in self.port.pkeys
            if own & _PARTITION
        )


class IbLookup:
    """A resolution of a GID: what was asked and found (:class:`rdmacm.resolution.lookup.Lookup` for IP)."""

    __slots__ = ("candidates", "destination", "provider", "row", "steps", "view")

    #: There is no neighbour to wait for: what stands for it, a LID, is in the path record.
    next_hop = None

    def __init__(self, destination: SockAddrIB, provider: str) -> None:
        self.destination = destination
        #: The provider's name, for the explanation.
        self.provider = provider
        self.view: IbView | None = None
        self.row: GidEntry | None = None
        self.candidates: list[Candidate] = []
        self.steps: list[tuple[str, int, str]] = []

    def choose(
        self, views: Sequence[IbView], bound: tuple[IbView, GidEntry] | None, why_none: Callable[[], str]
    ) -> None:
        """Choose the port that rdma_resolve_addr(3) leaves by.

        It is the port the id is ``bound`` to; else the one that has the GID itself; else the first active one of the
        GID's subnet that is in the partition. Failure (ENODEV) when there is none; ``why_none()`` says why ``views`` is
        empty.
        """
        started = perf_counter_ns()
        rows = [bound] if bound else [(view, row) for view in views for row in view.rows]
        judged = [(*_judge(view, row, self.destination), view, row) for view, row in rows]
        best = min((verdict for verdict in judged if verdict[0] < _UNFIT), key=lambda v: v[0], default=None)
        for verdict in judged:
            rank, rule, reason, view, row = verdict
            chosen = verdict is best
            if best is not None and not chosen and rank < _UNFIT:
                reason = f"passes, but another comes first ({reason})"
            self.candidates.append(
                Candidate(
                    str(self.destination),
                    str(row.gid),
                    view.device.name,
                    row.port_num,
                    row.gid_index,
                    str(row.gid),
                    rank < _UNFIT,
                    chosen,
                    rule,
                    reason,
                )
            )
        found = f"{best[3].device.name} port {best[3].port_num}" if best else "no port passed"
        self.steps.append(("select", perf_counter_ns() - started, found))
        if best is None:
            why = "; ".join(f"{v[3].device.name}: {v[2]}" for v in judged) or why_none()
            raise Failure(
                errno.ENODEV, "select", f"no InfiniBand port reaches {self.destination.addr}: {why}", "'rdmacm devices'"
            )
        self.view, self.row = best[3], best[4]

    def explain(self, node: str | None, failure: Failure | None, extra: tuple[Step, ...] = ()) -> Explanation:
        """Everything that is known, as data."""
        explanation = Explanation(
            node=node or str(self.destination.addr),
            service=f"0x{self.destination.sid:x}",
            provider=self.provider,
            candidates=tuple(self.candidates),
            steps=extra + tuple(Step(name, ns / 1000, detail) for name, ns, detail in self.steps),
        )
        return explanation if failure is None else failure.explained(explanation)


#: Ranks from here on are objections.
_UNFIT = 10


def _judge(view: IbView, row: GidEntry, destination: SockAddrIB) -> tuple[int, str, str]:
    """Rank, rule and reason of a port and GID for a destination; the lowest rank wins, the first among equals."""
    gid = destination.addr
    if row.gid == gid:
        return 0, "own", "the GID is its own"
    if not view.is_active:
        return _UNFIT, "state", f"the port is {view.port.state.name}, not ACTIVE"
    if not view.has_pkey(destination.pkey):
        return _UNFIT, "pkey", f"P_Key 0x{destination.pkey:04x} is not in its table"
    if any(gid) and row.gid.subnet_prefix != gid.subnet_prefix:
        return _UNFIT, "subnet", f"its subnet is {row.gid.subnet_prefix:016x}, the GID's {gid.subnet_prefix:016x}"
    return 1, "subnet", "the first active port of the GID's subnet"
