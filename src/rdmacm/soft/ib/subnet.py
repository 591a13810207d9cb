"""One local InfiniBand port: its transport, its connection manager, and queries to its subnet administrator."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from rdmacm.address import Gid, SockAddrIB
from rdmacm.errors import Failure, RdmaError, cm_error
from rdmacm.ib.registration import Registration
from rdmacm.ib.session import SaSession
from rdmacm.ib.transport import IbPort, MadTransport
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.mad import MAD_SIZE, MadAddress, MgmtClass
from rdmacm.proto.sa.subnet import MCMemberRecord, ServiceRecord
from rdmacm.proto.wire import Buffer
from rdmacm.resolution.infiniband import IbPortView
from rdmacm.soft.connection_manager import ConnectionManager, OnUndelivered, Triage
from rdmacm.soft.devices import PROVIDER
from rdmacm.soft.ib.groups import PortGroups
from rdmacm.soft.ib.path import IbPath
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, PortState, TransportType

#: Seconds. The timeout of a query for the Q_Key of a multicast group.
_GROUP_TIMEOUT = 2.0


class Subnet:
    """See the module; it is the connection manager's :class:`rdmacm.soft.connection_manager.Gsi`.

    Used with the runtime's lock held. ``opened()`` is called when the transport has been opened.
    """

    #: One process has the port, so communication ids need no prefix.
    id_prefix = None
    #: The switches and adapters of the subnet vouch for sources.
    trusts_sources = True

    def __init__(
        self,
        runtime: Runtime,
        random: Random,
        transport: MadTransport,
        device_index: int,
        opened: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._opened = opened
        #: Carries the port's management datagrams.
        self.transport = transport
        #: :attr:`rdmacm.verbs.device.Device.index` of the port's device.
        self._device_index = device_index
        #: Whether the transport is open.
        self.is_open: bool = False
        #: Why the last :meth:`view` failed; None if it did not.
        self.problem: OSError | None = None
        #: Set by the connection manager once it has an agent (:attr:`rdmacm.soft.connection_manager.Gsi.on_mad`).
        self.on_mad: Callable[[memoryview, Any, float], None] | None = None
        #: Never called: an InfiniBand network does not report which MADs it has lost.
        self.on_undelivered: OnUndelivered | None = None
        #: Never called: no request waits.
        self.on_shortage: Callable[[], None] | None = None
        #: Never called: hosts of a subnet do not send MADs of strangers.
        self.triage: Callable[[memoryview], Triage] | None = None
        #: Datagrams of management classes that nothing here takes, by reason.
        self.dropped: Counter[str] = Counter()
        #: The port's connection manager.
        self.cm: ConnectionManager = ConnectionManager(runtime, random, self)
        #: Queries to the subnet administrator.
        self.sa: SaSession = SaSession(runtime, random, transport)
        #: The multicast groups that the port has joined.
        self.groups: PortGroups = PortGroups(runtime, self.sa, self._port)
        #: The Q_Keys of multicast groups, as far as they were asked for and are known.
        self._qkeys: dict[Gid, int] = {}
        #: The groups whose Q_Keys are being asked for.
        self._asking: set[Gid] = set()
        #: Why the last query for a group's Q_Key has failed.
        self._qkey_problems: dict[Gid, str] = {}

    # -- the port -------------------------------------------------------------------------------------

    def view(self) -> IbPortView | None:
        """The port as it is now; None when it is gone, and :attr:`problem` says why. Opens the transport."""
        try:
            port = self._port()
        except OSError as error:
            if self.problem is None:
                import logging

                name, reason = self.transport.name, error.strerror or error
                logging.getLogger("rdmacm").warning("InfiniBand port %s is not there: %s", name, reason)
            self.problem = error
            return None
        self.problem = None
        device = _device(port, self._device_index)
        return IbPortView(device, device.ports[0], port)

    def view_now(self, step: str, subject: str = "") -> IbPortView:
        """The port as it is now; ENODEV when it is gone."""
        view = self.view()
        if view is None:
            raise cm_error(errno.ENODEV, f"the port is gone: {self.why()}", step, subject)
        return view

    def why(self) -> str:
        """Why :meth:`view` returned None, in words."""
        problem = self.problem
        return "" if problem is None else problem.strerror or str(problem)

    def _port(self) -> IbPort:
        self._runtime.check_fork("open_device")
        if self.is_open:
            try:
                return self.transport.port()
            except OSError as error:
                if error.errno == errno.ETIMEDOUT:  # the port is slow, not gone
                    raise
                self._lost()  # and open it again: a new port may have its name
        self.transport.open()
        self.is_open = True
        self._opened()
        return self.transport.port()

    def _lost(self) -> None:
        """The port went away while it was open."""
        self.is_open = False
        self._runtime.descriptors_changed()
        self.transport.close()

    def close(self) -> None:
        """Close the transport; open queries end with an error."""
        if self.is_open:
            self.is_open = False
            self.transport.close()
        self.cm.close()
        self.groups.close()
        self.on_mad = self.on_undelivered = None
        self.sa.close()
        self._qkeys.clear()
        self._asking.clear()
        self._qkey_problems.clear()
        self._runtime.waiters.wake()

    def abandon(self) -> None:
        """In a child of fork(2)."""
        self.transport.abandon()
        self.is_open = False
        self.cm.close()
        self.groups.close()
        self.on_mad = self.on_undelivered = None
        self.sa.forget()
        self._qkeys.clear()
        self._asking.clear()
        self._qkey_problems.clear()

    def register(
        self, local: SockAddrIB, lease: int, name: bytes, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> Registration:
        """Register a service at a local GID and service id, for ``lease`` seconds at a time."""
        record = ServiceRecord(
            local.sid, local.addr, local.pkey, lease, service_name=name, service_data8=data.ljust(16, b"\0")
        )
        return Registration(
            self._runtime, self.sa, lambda: self.view_now("register_service", record.name).ib_port, record, done
        )

    def learn_qkey(self, group: Gid) -> int | None:
        """The Q_Key of a multicast group; None if it is not known, and then the administrator is asked."""
        qkey = self._qkeys.get(group)
        if qkey is None and group not in self._asking:
            try:
                port = self.view_now("qkey").ib_port
                self.sa.query_group(port, group, _GROUP_TIMEOUT, partial(self._group_answered, group))
            except RdmaError as error:
                self._qkey_problems[group] = str(error.strerror)
            else:
                self._asking.add(group)
        return qkey

    def _group_answered(self, group: Gid, found: tuple[MCMemberRecord, ...], failure: Failure | None) -> None:
        self._asking.discard(group)
        if failure is not None:
            self._qkey_problems[group] = failure.message
        else:
            self._qkeys[group] = found[0].q_key

    def why_no_qkey(self, group: Gid) -> str:
        """Why :meth:`learn_qkey` has returned None, in words."""
        return self._qkey_problems.get(group) or "the subnet administrator has not answered yet"

    # -- datagrams ------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Receive what has arrived."""
        now = self._runtime.clock()
        for source, mad in self.transport.receive():
            management_class = mad[1] if len(mad) > 1 else 0
            if management_class == MgmtClass.SUBN_ADM:
                self.sa.mad_received(source, mad, now)
            elif management_class == MgmtClass.COM_MGT and self.on_mad is not None and len(mad) == MAD_SIZE:
                self.on_mad(memoryview(mad), IbPath(source.lid, source.sl, source.pkey_index), now)
            else:
                self.dropped["class"] += 1
        self.sa.dispatch()
        if self.transport.fileno() < 0 and self._runtime.is_real_time:
            self._lost()

    def source_of(self, path: IbPath) -> int:
        """The LID."""
        return path.lid

    def peer_answered(self) -> None:
        """Nothing to do: a subnet has no strangers."""

    def send_mad(self, path: IbPath, mad: Buffer) -> None:
        self.transport.send(MadAddress(path.lid, sl=path.sl, pkey_index=path.pkey_index), mad)

    def open(self) -> None:
        """Begin to receive connection management; EOPNOTSUPP when another connection manager has the port's."""
        if not self.transport.carries_cm:
            raise cm_error(
                errno.EOPNOTSUPP,
                f"another connection manager has {self.transport.name}: the kernel's, or another process's",
                "connect",
            )

    def listen(self, _service_id: int, _local: bytes | None) -> object:
        """Nothing to do: the port belongs to this process, which gets every request."""

    def unlisten(self, token: object) -> None: ...

    def hold_qpn(self, qpn: int, until: float) -> None:
        """Nothing to do: no device without a driver has queue pairs."""

    def ask_peer(self, qpn: int) -> None:
        """There is no queue pair to ask with."""


_MTUS = {int(mtu): mtu for mtu in Mtu}
#: PortPhysicalState; the transport does not say more than whether the link is up.
_LINK_UP = 5


def _device(port: IbPort, index: int) -> Device:
    """The device of one port. Another port of the same adapter is another device of that name."""
    rows = tuple(GidEntry(gid, i, port.port_num, GidType.IB, "", 0) for i, gid in enumerate(port.gids) if any(gid))
    active_mtu = _MTUS.get(port.active_mtu)
    view = Port(
        port.port_num,
        port.state,
        LinkLayer.INFINIBAND,
        Mtu.MTU_4096,
        active_mtu,
        rows,
        port.pkeys,
        gid_tbl_len=len(port.gids),
        pkey_tbl_len=len(port.pkeys),
        lid=port.lid,
        lmc=port.lmc,
        sm_lid=port.sm_lid,
        sm_sl=port.sm_sl,
        phys_state=_LINK_UP if PortState.INIT <= port.state <= PortState.ACTIVE else 0,
    )
    return Device(port.device, index, PROVIDER, NodeType.CA, TransportType.IB, port.node_guid, (view,))
