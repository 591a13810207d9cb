"""What the parts of one id share: its number in the kernel, its state, its addresses and device."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable
from time import perf_counter_ns

from rdmacm.address import DEFAULT_PKEY, Address, Gid, InetAddr, SockAddrIB
from rdmacm.constants import PortSpace
from rdmacm.errors import RdmaError, cm_error
from rdmacm.explanation import Step
from rdmacm.kernel import abi
from rdmacm.kernel.abi import Command, Query, Response
from rdmacm.kernel.differences import Rules, rules_of
from rdmacm.kernel.event_queue import KernelQueue
from rdmacm.kernel.host import KernelHost
from rdmacm.kernel.reasons import no_device, reason_of
from rdmacm.proto.sa import PathRecord
from rdmacm.provider import Owner, log
from rdmacm.provider.cmstate import TRANSITIONS, State, Trigger
from rdmacm.provider.connparam import Ece
from rdmacm.provider.idstate import CommonIdState, no_owner
from rdmacm.provider.multicast import GroupJoin
from rdmacm.verbs.device import Context, GidEntry
from rdmacm.verbs.enums import GidType
from rdmacm.verbs.qp import QP


class IdState(CommonIdState):
    """See the module. Used with the runtime's lock held. ``number`` is the id's in the kernel.

    The state is as far as the events that were fetched tell; the kernel's own may be ahead.
    """

    local_ece: Ece
    peer_ece: Ece

    def __init__(
        self, host: KernelHost, queue: KernelQueue, owner: Owner | None, port_space: int, qp_type: int, number: int
    ) -> None:
        super().__init__(
            host.runtime, no_owner if owner is None else weakref.ref(owner), PortSpace(port_space), qp_type
        )
        self.host = host
        #: Where its events come from.
        self.queue = queue
        #: The kernel's number of the id.
        self.number = number
        #: What is done by its type.
        self.rules: Rules = rules_of(qp_type)
        #: Whether a request has made it.
        self.is_passive = False
        #: The joins of multicast groups: the kernel's number and the cookie of each.
        self._joins: dict[GroupJoin, tuple[int, int]] = {}
        #: The number by which its events name it.
        self.cookie: int = next(host.cookies)
        #: The row of ``sgid``; None until it is looked for.
        self._gid_index: int | None = None
        #: The source that was asked for before resolving, and where it came from: "given" or "bound".
        self.bound_at: Address | None = None
        self.origin = "bound"
        #: Returns the attached queue pair. The API's object of the id keeps it: this one is known to the provider, and
        #: an id that the program has forgotten would never be collected.
        self._qp: Callable[[], QP | None] = _no_qp
        #: False from the request that made this id until the application accepts it.
        self.is_answered = True
        #: Whether the connection was established, and whether DISCONNECTED was fetched.
        self.is_established = False
        self.is_disconnected = False
        #: The ECE options to send, and those of the peer.
        self.local_ece = self.peer_ece = abi.NO_ECE
        #: How many requests may be posted; None for all. Up to ``most_held`` others are kept, as events.
        self.requests_allowed: int | None = None
        self.held_requests: list[object] = []
        self.most_held = 0
        #: When the step in progress began, in nanoseconds.
        self.started = 0

    @property
    def qp(self) -> QP | None:
        """The attached queue pair."""
        return self._qp()

    @qp.setter
    def qp(self, qp: QP | None) -> None:
        self._qp = _no_qp if qp is None else weakref.ref(qp)

    # -- state ----------------------------------------------------------------------------------------

    def move(self, trigger: Trigger) -> None:
        """Change the state, if the table has the transition; an outcome that is not in the table is ignored."""
        after = TRANSITIONS[self.state].get(trigger)
        if after is not None and after is not self.state:
            if log.enabled:
                log.ID.debug("%s: %s -> %s (%s)", str(self), self.state.name, after.name, trigger.value)
            self.state = after

    def enter(self, state: State) -> None:
        """The kernel has accepted a call that leads to a state; it may have been ahead of the events fetched here."""
        if log.enabled:
            log.ID.debug("%s: %s -> %s", str(self), self.state.name, state.name)
        self.state: State = state

    def __str__(self) -> str:
        return f"{self.port_space.name} id {self.number} {self.local_addr or '-'} -> {self.peer_addr or '-'}"

    # -- the kernel -----------------------------------------------------------------------------------

    def begin(self, call: str) -> None:
        """Raise EBADF in a child of fork(2), and ENXIO for an id that is destroyed."""
        if self.runtime.abandoned:
            self.runtime.check_fork(call)
        if self.state is State.DESTROYING:
            raise self.refuse(call)

    def tell(self, command: Command, payload: bytes, call: str, trigger: Trigger | None = None) -> None:
        """Execute a command without response; ``trigger`` is the call in the table of states."""
        try:
            self.queue.ucma.tell(command, payload)
        except OSError as error:
            raise self.refused(error, call, trigger) from None

    def ask(self, command: Command, payload: Callable[[int], bytes], size: int, call: str) -> bytes:
        """Execute a command with a response."""
        try:
            return self.queue.ucma.ask(command, payload, size)
        except OSError as error:
            raise self.refused(error, call, None) from None

    def refused(self, error: OSError, call: str, trigger: Trigger | None) -> RdmaError:
        """The error for the API of a command that the kernel has refused."""
        code = error.errno or errno.EIO
        if self.state is State.DEVICE_REMOVAL and code in (errno.EIO, errno.ENXIO, errno.EINVAL):
            return self.refuse(call)
        if code == errno.EINVAL and trigger is not None and not self.may(trigger):
            return self.refuse(call)
        if code == errno.EBADF:
            return cm_error(code, "the channel is closed", call)
        text, hint = (code == errno.ENODEV and no_device(self.host)) or reason_of(call, code)
        return cm_error(code, text, call, str(self.peer_addr or self.local_addr or "-"), hint)

    def no_services(self, error: RdmaError) -> RdmaError:
        """The error of a RESOLVE_IB_SERVICE that the kernel has refused: an older one does not know the command."""
        if error.errno != errno.EINVAL or self.verbs is None or self.state is not State.ADDR_BOUND:
            return error
        if self.is_ethernet:
            text, hint = reason_of("resolve_addrinfo", errno.EOPNOTSUPP)
        else:
            text, hint = "this kernel resolves no services", "Linux 6.17 or newer, or the provider soft with RDMACM_IB"
        return cm_error(errno.EOPNOTSUPP, text, "resolve_addrinfo", str(self.local_addr), hint)

    def step_done(self, name: str, result: object) -> None:
        """Record a step that :attr:`started`."""
        self.taken_steps.append((name, perf_counter_ns() - self.started, result))

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(Step(name, ns / 1000, str(result)) for name, ns, result in self.taken_steps)

    @property
    def is_put_off(self) -> bool:
        return False  # the kernel does not tell

    # -- what the kernel knows of the id --------------------------------------------------------------

    def refresh(self, call: str) -> None:
        """Read the addresses, the device and the GIDs of the id."""
        known = self._query(Query.ADDR, call)
        if known.source is not None:
            self.local_addr: Address | None = known.source
        if known.destination is not None and known.destination != _unset(known.destination):
            self.peer_addr: Address | None = known.destination
        if not known.node_guid:
            return
        if self.verbs is None:
            name = self.host.name_of(known.node_guid, known.device_index)
            if name is None:  # it is being removed
                return
            self.verbs: Context | None = self.host.context_of(name)
        self.port_num: int = known.port_num
        self.pkey: int = known.pkey or DEFAULT_PKEY  # Ethernet: packets and path records have this one
        gids = self._query(Query.GID, call)
        if isinstance(gids.source, SockAddrIB):
            if gids.source.addr != self.sgid:
                self._gid_index = None
            self.sgid: Gid = gids.source.addr
        if isinstance(gids.destination, SockAddrIB):
            self.dgid: Gid = gids.destination.addr

    def _query(self, option: Query, call: str) -> abi.Addresses:
        self.queue.ucma.preset(abi.DEVICE_INDEX_OFFSET, abi.UNKNOWN_DEVICE)
        return abi.unpack_addresses(self.query(option, Response.ADDR, call))

    def query(self, option: Query, size: int, call: str) -> bytes:
        """The kernel's answer to a QUERY, of up to ``size`` bytes."""
        return self.ask(Command.QUERY, lambda address: abi.query(address, self.number, option), size, call)

    def read_paths(self, call: str) -> None:
        """Read the path records."""
        paths = [each.path for each in abi.unpack_paths(self.query(Query.PATH, Response.PATH, call))]
        if self.is_ethernet:  # the kernel keeps hardware addresses in the place of LIDs
            paths = [path.replace(dlid=0, slid=0) for path in paths]
        if not paths and self.verbs is not None:  # iWARP has none
            paths = [PathRecord(dgid=self.dgid, sgid=self.sgid, mtu=self._mtu_code())]
        self.paths: tuple[PathRecord, ...] = tuple(paths)

    def _mtu_code(self) -> int:
        """The code of the port's path MTU; 0 if unknown."""
        device = self.host.device(self.verbs.name) if self.verbs is not None else None
        port = next((p for p in device.ports if p.port_num == self.port_num), None) if device is not None else None
        return int(port.active_mtu or 0) if port is not None else 0

    @property
    def is_ethernet(self) -> bool:
        """Whether the id is bound to a port that is not of InfiniBand."""
        return self.verbs is not None and not self.host.is_infiniband(self.verbs.name, self.port_num)

    @property
    def gid_index(self) -> int:
        """The row of :attr:`sgid` in the port's GID table, which is looked up when it is first asked for."""
        if self._gid_index is None:
            with self.runtime.lock:
                self._gid_index = self._find_gid_index()
        return self._gid_index

    def _find_gid_index(self) -> int:
        if self.verbs is None:
            return 0
        device = self.host.device(self.verbs.name)
        ports = [port for port in device.ports if port.port_num == self.port_num] if device is not None else []
        rows = [row for port in ports for row in port.gids if row.gid == self.sgid]
        wanted = self.host.sysfs.default_gid_type(self.verbs.name, self.port_num)
        link = self.local_addr.link if isinstance(self.local_addr, InetAddr) else 0
        return preferred_index(rows, wanted, link)


def preferred_index(rows: list[GidEntry], gid_type: GidType, ifindex: int) -> int:
    """The index of the row that an id uses, of those with its GID; 0 where there is none.

    The same GID may have a row for each type, and for each interface that has the address. ``ifindex``: the interface
    of a link-local address; 0 for any.
    """
    best = min(
        rows,
        key=lambda row: (row.gid_type is not gid_type, ifindex not in (0, row.ndev_ifindex), row.gid_index),
        default=None,
    )
    return 0 if best is None else best.gid_index


def _unset(address: Address) -> Address:
    """What the kernel shows as the destination of an id that has none."""
    return InetAddr.any(address.family) if isinstance(address, InetAddr) else SockAddrIB(pkey=address.pkey)


def _no_qp() -> None:
    """The queue pair of an id that has none."""
