"""One InfiniBand port of ours on its subnet: who is asked there, and the datagrams of connections.

Questions to the subnet administrator are those of the connection manager: paths to a GID, services of a name.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rdmacm.address import ALL_BITS_64, Gid, SockAddrIB
from rdmacm.errors import RdmaError, cm_error
from rdmacm.ib.transport import IbPort, MadTransport
from rdmacm.progress.timers import Timer
from rdmacm.proto.mad import MAD_SIZE, MadAddress, MgmtClass
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.client import SaClient, SaResponse
from rdmacm.proto.sa.mad import SaMethod, SaStatus, describe_status
from rdmacm.proto.sa.query import query_for
from rdmacm.proto.sa.subnet import ServiceRecord
from rdmacm.proto.wire import Buffer, WireError
from rdmacm.resolution.lookup import Failure
from rdmacm.soft.cm.manager import ConnectionManager
from rdmacm.soft.ib.ports import IbPath, IbView
from rdmacm.soft.ib.services import Registration
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, TransportType

if TYPE_CHECKING:
    from rdmacm.soft.provider import SoftProvider

__all__ = ["Subnet"]

R = TypeVar("R", PathRecord, ServiceRecord)
#: Called with what was found, and with what went wrong where something did.
Found: TypeAlias = "Callable[[tuple[R, ...], Failure | None], None]"

#: Seconds that a search for services takes at most, as in the kernel.
_SERVICE_TIMEOUT = 2.0
#: What the path that a caller has in mind says about those wanted, where it is not 0.
_RESTRICTIONS = (
    *("slid", "dlid", "flow_label", "hop_limit", "traffic_class", "qos_class", "sl"),
    *("mtu", "rate", "packet_life_time"),
)


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
        self._asked: dict[int, Callable[[SaResponse], None]] = {}
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
                if error.errno == errno.ETIMEDOUT:  # it is slow
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
            done(SaResponse(query, 0, error="the port was closed"))
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
        """Begin to take messages of connection managers; EOPNOTSUPP where somebody else has them."""
        if not self.transport.carries_cm:
            raise cm_error(
                errno.EOPNOTSUPP,
                f"another connection manager has {self.transport.name}: the kernel's, or another process's",
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
        done: Callable[[SaResponse], None],
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
        now = self._provider.clock()
        query = self.sa.query(method, attribute, mask, record, port.administrator, now, timeout=timeout)
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

    # -- what there is to ask -------------------------------------------------------------------------

    def ask_paths(
        self,
        view: IbView,
        sgid: Gid,
        destination: SockAddrIB,
        timeout: float,
        done: Found[PathRecord],
        *,
        tos: int = 0,
        count: int = 1,
        like: PathRecord | None = None,
    ) -> int:
        """Ask for paths as rdma_cm does: by both GIDs, P_Key, service id and traffic class, usable in both directions.

        ``like``: a path whose fields the paths have to have, where they are not 0. :meth:`ask` says what is raised.
        """
        fields: dict[str, Any] = {
            "sgid": sgid,
            "dgid": destination.addr,
            "pkey": destination.pkey,
            "service_id": destination.sid,
            "traffic_class": tos or destination.flowinfo >> 20 & 0xFF,
            "reversible": True,
            "numb_path": count,
        }
        if like is not None:
            for name in _RESTRICTIONS:
                if value := getattr(like, name):
                    fields[name] = value
                    if hasattr(like, f"{name}_selector"):
                        fields[f"{name}_selector"] = getattr(like, f"{name}_selector")
        mask, record = query_for(PathRecord, **fields)
        method = SaMethod.GET if count == 1 else SaMethod.GET_TABLE

        def answered(answer: SaResponse) -> None:
            failure = self._failure(answer, view, "path")
            paths = _unpacked(PathRecord, answer)
            if failure is None and not paths:
                who, hint = self.administrator(view), "whether it is up ('rdmacm sa nodes')"
                failure = Failure(errno.EINVAL, "path", f"{who} knows no path to {destination.addr}", hint)
            done(paths, failure)

        return self.ask(view, method, record.ATTRIBUTE, mask, record.pack(), timeout, answered)

    def ask_services(self, view: IbView, service: str, done: Found[ServiceRecord]) -> int:
        """Ask for the services of a name, or of an id where ``service`` is a number in C's notation."""
        number = _number(service)
        if number is None:
            mask, record = query_for(ServiceRecord, service_name=service.encode()[:63])
        else:
            mask, record = query_for(ServiceRecord, service_id=number)

        def answered(answer: SaResponse) -> None:
            failure = self._failure(answer, view, "service")
            found = _unpacked(ServiceRecord, answer)
            if failure is None and not found:
                hint = "'rdmacm sa services' for those there are"
                failure = Failure(errno.ENODATA, "service", f"nobody has registered {service!r}", hint)
            done(found, failure)

        method, attribute = SaMethod.GET_TABLE, record.ATTRIBUTE
        return self.ask(view, method, attribute, mask, record.pack(), _SERVICE_TIMEOUT, answered)

    def register(
        self,
        local: SockAddrIB,
        lease: int,
        name: bytes,
        data: bytes,
        done: Callable[[RdmaError | None], None],
    ) -> Registration:
        """Tell of a service at a port and service id of ours."""
        record = ServiceRecord(
            local.sid, local.addr, local.pkey, lease, service_name=name, service_data8=data.ljust(16, b"\0")
        )
        return Registration(self._provider, self, record, done)

    @staticmethod
    def administrator(view: IbView) -> str:
        """Who is asked, in words."""
        return f"the subnet administrator of {view.device.name} port {view.port_num}"

    def _failure(self, answer: SaResponse, view: IbView, step: str) -> Failure | None:
        """What is wrong with an answer: ETIMEDOUT where there was none, EINVAL for a status, as Linux has it."""
        who = self.administrator(view)
        if answer.error == "timeout":
            hint = "whether a subnet manager runs ('rdmacm sa info')"
            return Failure(errno.ETIMEDOUT, step, f"{who}, at LID {view.port.sm_lid}, did not answer in time", hint)
        if answer.error is not None:
            return Failure(errno.EIO, step, f"{who} answered wrongly: {answer.error}")
        if answer.status not in (SaStatus.OK, SaStatus.NO_RECORDS):
            return Failure(errno.EINVAL, step, f"{who} says: {describe_status(answer.status)}", "'rdmacm sa'")
        return None


_MTUS = {int(mtu): mtu for mtu in Mtu}


def _device(port: IbPort, index: int) -> Device:
    rows = tuple(GidEntry(gid, i, port.port_num, GidType.IB, "", 0) for i, gid in enumerate(port.gids) if any(gid))
    picture = Port(
        port.port_num, port.state, LinkLayer.INFINIBAND, Mtu.MTU_4096, _MTUS.get(port.active_mtu), rows, port.pkeys
    )
    return Device(port.device, index, "soft", NodeType.CA, TransportType.IB, port.node_guid, (picture,))


def _number(text: str) -> int | None:
    """A whole string that strtoull(3) reads with base 0."""
    digits = text.strip().lower().removeprefix("+")
    sign = digits.startswith("-")
    digits = digits[sign:]
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10
    if not digits[:1].isdigit() or "_" in digits or not digits.isascii():
        return None
    try:
        value = int(digits, base)
    except ValueError:
        return None
    return None if value > ALL_BITS_64 else -value & ALL_BITS_64 if sign else value


def _unpacked(kind: type[R], answer: SaResponse) -> tuple[R, ...]:
    """The records of an answer; what is none is left out."""
    found: list[R] = []
    for data in answer.records:
        with suppress(WireError):
            found.append(kind.unpack(data))
    return tuple(found)
