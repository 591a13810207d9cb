"""InfiniBand ports beside the software devices: who they are, their subnet administrator, their connections.

A port is a transport of management datagrams (:mod:`rdmacm.ib.transport`), so here is all of InfiniBand that takes no
more than those: addresses, path records, services, and connections up to ESTABLISHED. What a connection is for, data,
takes an adapter and its driver; :class:`IbDevice` says so where it is tried.

Transports are opened when a port is first asked for, and closed with the provider's last channel.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn

from rdmacm.address import Gid, SockAddrIB
from rdmacm.errors import cm_error, errno_name
from rdmacm.explanation import Candidate, Explanation, Step
from rdmacm.ib.transport import IbPort, MadTransport
from rdmacm.proto.mad import MAD_SIZE, MadAddress, MgmtClass
from rdmacm.proto.sa.client import Answer, SaClient
from rdmacm.proto.wire import Buffer
from rdmacm.soft.cm import ConnectionManager
from rdmacm.soft.resolver import Failure
from rdmacm.soft.timer import Timer
from rdmacm.soft.verbs import SOFT_DEVICE_ATTR
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, PortState, TransportType

if TYPE_CHECKING:
    from rdmacm.soft.provider import SoftProvider

__all__ = ["IbDevice", "IbHost", "IbLookup", "IbPath", "IbView", "Subnet"]

#: Of a P_Key, what two ports must have in common; the bit above says full member.
_PARTITION = 0x7FFF
_FULL_MEMBER = 0x8000
_DEFAULT_PARTITION = 0xFFFF


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

    def pkey_index(self, pkey: int) -> int | None:
        """Where the port has a P_Key of a partition, one of a full member's first; None where it has none."""
        found = [index for index, own in enumerate(self.port.pkeys) if (own ^ pkey) & _PARTITION == 0]
        return max(found, key=lambda index: self.port.pkeys[index] & _FULL_MEMBER, default=None)


class Subnet:
    """One port of ours on its subnet: a transport, queries to the administrator, connections (:class:`Gsi`).

    Used with the provider's lock held.
    """

    id_prefix = None

    def __init__(self, provider: SoftProvider, transport: MadTransport, index: int) -> None:
        self._provider = provider
        self.transport = transport
        self.index = index
        self.is_open = False
        #: Why the port is not there.
        self.problem: OSError | None = None
        self.on_mad: Callable[[memoryview, Any, float], None] | None = None
        #: What has come for nobody, by reason.
        self.dropped: Counter[str] = Counter()
        self.cm = ConnectionManager(provider, self, self)
        self.sa = SaClient(provider.random, reassembles=transport.reassembles)
        self._asked: dict[int, Callable[[Answer], None]] = {}
        self._timer: Timer | None = None
        self._is_pumping = False

    # -- the port -------------------------------------------------------------------------------------

    def view(self) -> IbView | None:
        """The port as it is now; None, and :attr:`problem` says why, where it is not there."""
        try:
            port = self._port()
        except OSError as error:
            if self.problem is None:
                import logging

                name, why = self.transport.name, error.strerror or error
                logging.getLogger("rdmacm").warning("InfiniBand port %s is not there: %s", name, why)
            self.problem = error
            return None
        self.problem = None
        return IbView(_device(port, self.index), port, self)

    def why(self) -> str:
        """Why there is no :meth:`view`, in words."""
        problem = self.problem
        return "" if problem is None else problem.strerror or str(problem)

    def _port(self) -> IbPort:
        self._provider.check_fork("open_device")
        if self.is_open:
            try:
                return self.transport.port()
            except OSError as error:
                if error.errno != errno.ENODEV:
                    raise
                self._lost()  # another one of this name may have come in its place
        self.transport.open()
        self.is_open = True
        self._provider.ib_opened()
        return self.transport.port()

    def _lost(self) -> None:
        """The port has gone away while it was open."""
        self.is_open = False
        self._provider.descriptors_changed()
        self.transport.close()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.transport.close()
        asked = self._asked
        self.forget()
        for query, done in asked.items():  # somebody may be waiting
            done(Answer(query, 0, error="the port was closed"))
        self._provider.waiters.wake()

    def forget(self) -> None:
        """Let go of everything that is under way."""
        self.cm.close()
        self.on_mad = None
        for query in self._asked:
            self.sa.cancel(query)
        self._asked = {}
        self.sa.mads_to_send()
        self.sa.events()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- datagrams ------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Take in what has arrived."""
        now = self._provider.clock()
        for source, mad in self.transport.receive():
            management_class = mad[1] if len(mad) > 1 else 0
            if management_class == MgmtClass.SUBN_ADM:
                self.sa.mad_received(source, mad, now)
            elif management_class == MgmtClass.COM_MGT and self.on_mad is not None and len(mad) == MAD_SIZE:
                self.on_mad(memoryview(mad), IbPath(source.lid, source.sl, source.pkey_index), now)
            else:
                self.dropped["class"] += 1
        self._pump()
        if self.transport.fileno() < 0 and self._provider.clock is time.monotonic:
            self._lost()

    def send_mad(self, path: IbPath, mad: Buffer) -> None:
        self.transport.send(MadAddress(path.lid, sl=path.sl, pkey_index=path.pkey_index), mad)

    def open(self) -> None:
        """Begin to take messages of connection managers; EOPNOTSUPP where the system keeps them to itself."""
        if not self.transport.carries_cm:
            raise cm_error(
                errno.EOPNOTSUPP,
                f"connections over {self.transport.name} are the kernel's: its connection manager has that queue pair",
                "connect",
            )

    def listen(self, _service_id: int, _local: bytes | None) -> object:
        """Requests come here anyway: a port is one process's."""

    def unlisten(self, token: object) -> None: ...

    def hold_qpn(self, qpn: int, until: float) -> None:
        """There are no queue pairs here."""

    # -- the subnet administrator ---------------------------------------------------------------------

    def ask(
        self,
        view: IbView,
        method: int,
        attribute: int,
        mask: int,
        record: bytes,
        timeout: float,
        done: Callable[[Answer], None],
    ) -> int:
        """Ask the administrator; within ``timeout`` seconds ``done(answer)`` is called, with the lock held.

        It is not called before this returns. ENETUNREACH where the port knows no administrator, ENOBUFS where too many
        questions are open.
        """
        port = view.port
        if not port.sm_lid:
            raise cm_error(
                errno.ENETUNREACH,
                f"no subnet manager has been at {port.device} port {port.port_num}",
                "sa_query",
                hint="whether its link is up, and a subnet manager runs",
            )
        # Limited members of the default partition may ask, too.
        administrator = MadAddress(port.sm_lid, sl=port.sm_sl, pkey_index=view.pkey_index(_DEFAULT_PARTITION) or 0)
        now = self._provider.clock()
        query = self.sa.ask(method, attribute, mask, record, administrator, now, timeout=timeout)
        self._asked[query] = done
        self._pump()
        return query

    def cancel(self, query: int) -> None:
        if self._asked.pop(query, None) is not None:
            self.sa.cancel(query)
            self._pump()

    def _pump(self) -> None:
        """Send what is to be sent and hand out answers. What those who get them ask and cancel is seen to here, too."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            more = True
            while more:
                mads, answers = self.sa.mads_to_send(), self.sa.events()
                for address, mad in mads:
                    self.transport.send(address, mad)
                for answer in answers:
                    done = self._asked.pop(answer.query, None)
                    if done is not None:
                        done(answer)
                if answers:  # of which another thread may be waiting for one
                    self._provider.waiters.wake()
                more = bool(mads or answers)
        finally:
            self._is_pumping = False
        deadline = self.sa.next_deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer.when):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._provider.call_at(deadline, self._time)

    def _time(self, now: float) -> None:
        self._timer = None
        self.sa.timer(now)
        self._pump()


_MTUS = {int(mtu): mtu for mtu in Mtu}


def _device(port: IbPort, index: int) -> Device:
    rows = tuple(GidEntry(gid, i, port.port_num, GidType.IB, "", 0) for i, gid in enumerate(port.gids) if any(gid))
    picture = Port(
        port.port_num, port.state, LinkLayer.INFINIBAND, Mtu.MTU_4096, _MTUS.get(port.active_mtu), rows, port.pkeys
    )
    return Device(port.device, index, "soft", NodeType.CA, TransportType.IB, port.node_guid, (picture,))


class IbHost:
    """The InfiniBand ports of a host, in the order they were named."""

    def __init__(self, provider: SoftProvider, transports: Sequence[MadTransport]) -> None:
        self._provider = provider
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
    """A resolution of a GID: what was asked, and what has been found (:class:`rdmacm.soft.resolver.Lookup` for IP)."""

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
        if failure is None:
            return explanation
        return explanation.replace(
            candidates=tuple(replace(c, chosen=False) for c in self.candidates),
            error=failure.step,
            errno=failure.errno,
            errno_name=errno_name(failure.errno),
            message=failure.message,
            hint=failure.hint,
        )


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
