"""One InfiniBand port of ours: its transport, its connection manager, and questions to its subnet administrator."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from rdmacm.address import SockAddrIB
from rdmacm.errors import RdmaError, cm_error
from rdmacm.ib.registration import Registration
from rdmacm.ib.session import SaSession
from rdmacm.ib.transport import IbPort, MadTransport
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.mad import MAD_SIZE, MadAddress, MgmtClass
from rdmacm.proto.sa.subnet import ServiceRecord
from rdmacm.proto.wire import Buffer
from rdmacm.resolution.infiniband import IbView
from rdmacm.soft.connection_manager import ConnectionManager
from rdmacm.soft.ib.path import IbPath
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, TransportType

__all__ = ["Subnet"]


class Subnet:
    """See the module; it is the connection manager's :class:`rdmacm.soft.connection_manager.Gsi`.

    Used with the runtime's lock held. ``index`` is its position among the host's InfiniBand ports. ``opened()`` is
    called when the transport has been opened.
    """

    id_prefix = None

    def __init__(
        self,
        runtime: Runtime,
        random: Random,
        transport: MadTransport,
        index: int,
        opened: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._opened = opened
        self.transport = transport
        self.index = index
        self.is_open = False
        #: Why the port is not there; None while it is.
        self.problem: OSError | None = None
        #: The connection manager's, once it has an agent (:attr:`rdmacm.soft.connection_manager.Gsi.on_mad`).
        self.on_mad: Callable[[memoryview, Any, float], None] | None = None
        #: Datagrams that belong to no class spoken here, by reason.
        self.dropped: Counter[str] = Counter()
        self.cm = ConnectionManager(runtime, random, self, index)
        self.sa = SaSession(runtime, random, transport)

    # -- the port -------------------------------------------------------------------------------------

    def view(self) -> IbView | None:
        """The port as it is now; None when it is not there, and :attr:`problem` says why."""
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
        return IbView(_device(port, self.index), port, self.index)

    def view_now(self, step: str, subject: str = "") -> IbView:
        """The port as it is now; ENODEV when it is gone."""
        view = self.view()
        if view is None:
            raise cm_error(errno.ENODEV, f"the port is gone: {self.why()}", step, subject)
        return view

    def why(self) -> str:
        """Why there is no :meth:`view`, in words."""
        problem = self.problem
        return "" if problem is None else problem.strerror or str(problem)

    def _port(self) -> IbPort:
        self._runtime.check_fork("open_device")
        if self.is_open:
            try:
                return self.transport.port()
            except OSError as error:
                if error.errno == errno.ETIMEDOUT:  # slow, not gone
                    raise
                self._lost()  # another port of this name may be there instead
        self.transport.open()
        self.is_open = True
        self._opened()
        return self.transport.port()

    def _lost(self) -> None:
        """The port has gone away while it was open."""
        self.is_open = False
        self._runtime.descriptors_changed()
        self.transport.close()

    def close(self) -> None:
        """Close the transport; open queries end with an error."""
        if self.is_open:
            self.is_open = False
            self.transport.close()
        self.cm.close()
        self.on_mad = None
        self.sa.close()
        self._runtime.waiters.wake()

    def abandon(self) -> None:
        """In a child of fork(2)."""
        self.transport.abandon()
        self.is_open = False
        self.cm.close()
        self.on_mad = None
        self.sa.forget()

    def register(
        self, local: SockAddrIB, lease: int, name: bytes, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> Registration:
        """Register a service at a port and service id of ours, for ``lease`` seconds at a time."""
        record = ServiceRecord(
            local.sid, local.addr, local.pkey, lease, service_name=name, service_data8=data.ljust(16, b"\0")
        )
        return Registration(
            self._runtime, self.sa, lambda: self.view_now("register_service", record.name).port, record, done
        )

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

    def send_mad(self, path: IbPath, mad: Buffer) -> None:
        self.transport.send(MadAddress(path.lid, sl=path.sl, pkey_index=path.pkey_index), mad)

    def open(self) -> None:
        """Begin to take messages of connection managers; EOPNOTSUPP when another connection manager has them."""
        if not self.transport.carries_cm:
            raise cm_error(
                errno.EOPNOTSUPP,
                f"another connection manager has {self.transport.name}: the kernel's, or another process's",
                "connect",
            )

    def listen(self, _service_id: int, _local: bytes | None) -> object:
        """Nothing to do: a port belongs to one process, so every request comes here."""

    def unlisten(self, token: object) -> None: ...

    def hold_qpn(self, qpn: int, until: float) -> None:
        """Nothing to do: there are no queue pairs here."""


_MTUS = {int(mtu): mtu for mtu in Mtu}


def _device(port: IbPort, index: int) -> Device:
    rows = tuple(GidEntry(gid, i, port.port_num, GidType.IB, "", 0) for i, gid in enumerate(port.gids) if any(gid))
    picture = Port(
        port.port_num, port.state, LinkLayer.INFINIBAND, Mtu.MTU_4096, _MTUS.get(port.active_mtu), rows, port.pkeys
    )
    return Device(port.device, index, "soft", NodeType.CA, TransportType.IB, port.node_guid, (picture,))
