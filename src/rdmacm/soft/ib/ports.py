"""InfiniBand ports beside the software devices: who they are, and which of them reaches whom.

A port is a transport of management datagrams (:mod:`rdmacm.ib.transport`), so here is all of InfiniBand that takes no
more than those: addresses, path records, services, and connections up to ESTABLISHED. What a connection is for, data,
takes an adapter and its driver; :class:`IbDevice` says so where it is tried.

Transports are opened when a port is first asked for, and closed with the provider's last channel.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, NoReturn

from rdmacm.address import Gid, SockAddrIB
from rdmacm.errors import cm_error
from rdmacm.explanation import Candidate, Explanation, Step
from rdmacm.resolution.lookup import Failure
from rdmacm.soft.device.device import SOFT_DEVICE_ATTR
from rdmacm.verbs.device import Device, GidEntry
from rdmacm.verbs.enums import PortState

if TYPE_CHECKING:
    from rdmacm.ib.transport import IbPort, MadTransport
    from rdmacm.soft.ib.subnet import Subnet
    from rdmacm.soft.provider import SoftProvider

__all__ = ["IbDevice", "IbHost", "IbLookup", "IbPath", "IbView"]

#: Of a P_Key, what two ports must have in common; the bit above says full member.
_PARTITION = 0x7FFF
_FULL_MEMBER = 0x8000


class IbPath:
    """A port of a peer's, as the connection manager's paths have to be: equal where the port is the same.

    ``pkey_index``: where the table of our port has the partition that they share.
    """

    __slots__ = ("lid", "pkey_index", "sl")

    def __init__(self, lid: int, sl: int = 0, pkey_index: int = 0) -> None:
        self.lid = lid
        self.sl = sl
        self.pkey_index = pkey_index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IbPath) and other.lid == self.lid

    def __hash__(self) -> int:
        return hash(self.lid)


@dataclass(frozen=True, slots=True)
class IbView:
    """An InfiniBand port and its device at one moment: what a :class:`DeviceView` is for RoCE."""

    device: Device
    port: IbPort
    subnet: Subnet

    @property
    def ifindex(self) -> int:
        """What tells devices apart; no interface has a negative one."""
        return -1 - self.subnet.index

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


class IbHost:
    """The InfiniBand ports of a host, in the order they were named."""

    def __init__(self, provider: SoftProvider, transports: Sequence[MadTransport]) -> None:
        self._provider = provider
        self.subnets: tuple[Subnet, ...] = ()
        if transports:
            from rdmacm.soft.ib.subnet import Subnet  # and all that it is made of

            self.subnets = tuple(Subnet(provider, transport, index) for index, transport in enumerate(transports))

    def views(self) -> list[IbView]:
        """The ports as they are now, but for those that are not there."""
        found = [view for subnet in self.subnets if (view := subnet.view()) is not None]
        if not self._provider.in_use:
            self.close()
        return found

    def view_at(self, ifindex: int) -> IbView | None:
        """The port that has this :attr:`IbView.ifindex`."""
        if not -len(self.subnets) <= ifindex < 0:
            return None
        subnet = self.subnets[-1 - ifindex]
        view = subnet.view()
        if not self._provider.in_use:
            subnet.close()
        return view

    def filenos(self) -> tuple[int, ...]:
        return tuple(
            subnet.transport.fileno() for subnet in self.subnets if subnet.is_open and subnet.transport.fileno() >= 0
        )

    def progress(self) -> None:
        for subnet in self.subnets:
            if subnet.is_open:
                subnet.progress()

    def close(self) -> None:
        for subnet in self.subnets:
            subnet.close()

    def abandon(self) -> None:
        """In a child of fork(2)."""
        for subnet in self.subnets:
            subnet.transport.abandon()
            subnet.is_open = False
            subnet.forget()

    def owner_of(self, gid: Gid) -> tuple[IbView, GidEntry] | None:
        """The port that has a GID."""
        return next(((view, row) for view in self.views() for row in view.rows if row.gid == gid), None)

    def why_not(self) -> str:
        """Why a port that is wanted is not among :meth:`views`, in words."""
        if not self.subnets:
            return "AF_IB addresses name ports of an InfiniBand device, and this host has none"
        missing = [f"{s.transport.name}: {s.why()}" for s in self.subnets if s.problem]
        return "; ".join(missing) or f"there is {', '.join(s.transport.name for s in self.subnets)}"


class IbLookup:
    """A resolution of a GID: what was asked and found (:class:`rdmacm.resolution.lookup.Lookup` for IP)."""

    __slots__ = ("candidates", "destination", "row", "steps", "view")

    #: There is no neighbour to wait for: what stands for it, a LID, is in the path record.
    next_hop = None

    def __init__(self, destination: SockAddrIB) -> None:
        self.destination = destination
        self.view: IbView | None = None
        self.row: GidEntry | None = None
        self.candidates: list[Candidate] = []
        self.steps: list[tuple[str, int, str]] = []

    def choose(self, host: IbHost, bound: tuple[IbView, GidEntry] | None) -> None:
        """Take the port that rdma_resolve_addr(3) leaves by: the one the id is bound to; else the one that has the GID
        itself, else the first active one of the GID's subnet that is in the partition. Failure (ENODEV) where none is.
        """
        started = perf_counter_ns()
        rows = [bound] if bound else [(view, row) for view in host.views() for row in view.rows]
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
            why = "; ".join(f"{v[3].device.name}: {v[2]}" for v in judged) or host.why_not()
            raise Failure(
                errno.ENODEV, "select", f"no InfiniBand port reaches {self.destination.addr}: {why}", "'rdmacm devices'"
            )
        self.view, self.row = best[3], best[4]

    def explain(self, node: str | None, failure: Failure | None, extra: tuple[Step, ...] = ()) -> Explanation:
        """Everything that is known, as data."""
        explanation = Explanation(
            node=node or str(self.destination.addr),
            service=f"0x{self.destination.sid:x}",
            provider="soft",
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


class IbDevice:
    """An InfiniBand device as the verbs objects open it: its limits, which connecting needs, and otherwise why not.

    See :class:`rdmacm.verbs.backend.DeviceBackend`.
    """

    attr = SOFT_DEVICE_ATTR

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise cm_error(
            errno.EOPNOTSUPP,
            "moving data over InfiniBand takes the adapter's driver; here are addresses, services and connections",
            "create_qp",
            self.name,
            "a queue pair of your own, named by ConnParam(qp_num=...)",
        )

    reg_mr = create_channel = create_cq = create_srq = create_qp = _refuse
