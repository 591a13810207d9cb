"""From a GID to an InfiniBand port, on any list of ports.

A GID has no route and no neighbour: this module chooses the port, and the subnet administrator gives the path.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from rdmacm.address import SockAddrIB
from rdmacm.errors import Failure
from rdmacm.explanation import Candidate, Explanation, Step
from rdmacm.ib.transport import IbPort
from rdmacm.resolution.hosts import PortView
from rdmacm.verbs.device import GidEntry

#: The partition number of a P_Key; the bit above it is set for a full member.
_PARTITION = 0x7FFF
_FULL_MEMBER = 0x8000


@dataclass(frozen=True, slots=True)
class IbPortView(PortView):
    """An InfiniBand port."""

    #: The same port as its transport describes it, with its LIDs and its subnet manager.
    ib_port: IbPort

    @property
    def pkeys_text(self) -> str:
        """The P_Key table in words."""
        return ", ".join(f"0x{pkey:04x}" for pkey in self.port.pkeys)

    def has_pkey(self, pkey: int) -> bool:
        """Whether the port can talk in a partition; two limited members of one cannot talk to each other."""
        return any(
            (own ^ pkey) & _PARTITION == 0 and (own | pkey) & _FULL_MEMBER
            for own in self.port.pkeys
            if own & _PARTITION
        )


class _Judgement(NamedTuple):
    """A port and GID, judged for a destination."""

    passed: bool
    #: The rule that decided, and why.
    rule: str
    reason: str
    view: IbPortView
    row: GidEntry


class IbLookup:
    """The question and the results of one resolution of a GID (:class:`rdmacm.resolution.lookup.Lookup`: of IP)."""

    __slots__ = ("candidates", "destination", "provider", "steps")

    def __init__(self, destination: SockAddrIB, provider: str) -> None:
        self.destination: SockAddrIB = destination
        #: The provider's name, for the explanation.
        self.provider: str = provider
        self.candidates: list[Candidate] = []
        #: Name, nanoseconds and result of each step taken.
        self.steps: list[tuple[str, int, str]] = []

    def choose(
        self, views: Sequence[IbPortView], bound: tuple[IbPortView, GidEntry] | None, why_none: Callable[[], str]
    ) -> tuple[IbPortView, GidEntry]:
        """Choose the port and GID through which rdma_resolve_addr(3) reaches the destination.

        It is the port and GID that the id is ``bound`` to, if any; else the port that has the destination GID itself;
        else the first active port in the GID's subnet and partition. Failure (ENODEV) when there is none;
        ``why_none()`` says why ``views`` is empty.
        """
        started = perf_counter_ns()
        pairs = [bound] if bound else [(view, row) for view in views for row in view.rows]
        judged = [_judge(view, row, self.destination) for view, row in pairs]
        # False sorts first: the port that has the GID itself, then the others in their order.
        best = min((one for one in judged if one.passed), key=lambda one: one.rule != "own", default=None)
        self.candidates += [self._candidate(one, one is best) for one in judged]
        found = f"{best.view.device.name} port {best.row.port_num}" if best else "no port passed"
        self.steps.append(("select", perf_counter_ns() - started, found))
        if best is None:
            why = "; ".join(f"{one.view.device.name}: {one.reason}" for one in judged) or why_none()
            message = f"no InfiniBand port reaches {self.destination.addr}: {why}"
            raise Failure(errno.ENODEV, "select", message, "'rdmacm devices'")
        return best.view, best.row

    def _candidate(self, one: _Judgement, chosen: bool) -> Candidate:
        reason = f"passes, but another comes first ({one.reason})" if one.passed and not chosen else one.reason
        return Candidate(
            str(self.destination),
            str(one.row.gid),
            one.view.device.name,
            one.row.port_num,
            one.row.gid_index,
            str(one.row.gid),
            one.passed,
            chosen,
            one.rule,
            reason,
        )

    def explain(self, node: str | None, failure: Failure | None, extra: tuple[Step, ...] = ()) -> Explanation:
        """Everything that is known, ending in ``failure`` if there is one; ``extra`` steps come first."""
        explanation = Explanation(
            node=node or str(self.destination.addr),
            service=f"0x{self.destination.sid:x}",
            provider=self.provider,
            candidates=tuple(self.candidates),
            steps=extra + tuple(Step(name, ns / 1000, detail) for name, ns, detail in self.steps),
        )
        return explanation if failure is None else failure.explained(explanation)


def _judge(view: IbPortView, row: GidEntry, destination: SockAddrIB) -> _Judgement:
    gid = destination.addr
    if row.gid == gid:
        return _Judgement(True, "own", "the GID is its own", view, row)
    if not view.is_active:
        return _Judgement(False, "state", f"the port is {view.port.state.name}, not ACTIVE", view, row)
    if not view.has_pkey(destination.pkey):
        return _Judgement(False, "pkey", f"P_Key 0x{destination.pkey:04x} is not in its table", view, row)
    if any(gid) and row.gid.subnet_prefix != gid.subnet_prefix:
        reason = f"its subnet is {row.gid.subnet_prefix:016x}, the GID's {gid.subnet_prefix:016x}"
        return _Judgement(False, "subnet", reason, view, row)
    return _Judgement(True, "subnet", "the first active port of the GID's subnet", view, row)
