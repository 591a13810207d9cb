"""The state of a datagram socket: its UDP socket, its queue pairs, and the address handles of its peers.

There is a queue pair for each local address that datagrams leave from: the bound one, or of a socket that is bound to
the wildcard those that routes choose. Nothing in here waits. Methods are called with the provider's lock held, unless
they say otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import socket as _socket
from collections import deque
from mmap import mmap
from typing import Any

from rdmacm.address import InetAddr, lookup_address
from rdmacm.cmid import CmEvent, CmId
from rdmacm.constants import CmEventType, IdOption, OptionLevel, PortSpace
from rdmacm.endpoint.dispatcher import Dispatcher, Observable
from rdmacm.endpoint.failures import status_text
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.constants import GRH_LENGTH
from rdmacm.proto.rsocket.headers import (
    MAX_LENGTH,
    QKEY,
    ServiceHeader,
    ServiceOperation,
    SourceHeader,
)
from rdmacm.proto.rsocket.peers import PeerAction, PeerKey, PeerTable
from rdmacm.provider.udp import UdpSocket
from rdmacm.rsocket.options import StreamOptions
from rdmacm.verbs.ah import AH
from rdmacm.verbs.attr import AHAttr, GlobalRoute, QPCap
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import WC, AccessFlag, LinkLayer, QPType, WCStatus, WROpcode
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.qp import QPInitAttr
from rdmacm.verbs.wr import RecvWR, SendWR

#: The wr_id of sends; those of receives are smaller.
_SEND_WR_ID = 1 << 32
_POLL_BATCH = 64
#: Datagrams of the UDP socket that are read at once.
_SERVICE_BATCH = 64
#: Bytes of a receive, and of the longest datagram on the UDP socket.
_RECEIVE_LENGTH = GRH_LENGTH + MAX_LENGTH
_UDP_LENGTH = 1 << 16
_RESOLVE_TIMEOUT_MS = 2000
_HOP_LIMIT = 64
#: How many free UDP ports are tried until one is free as a port of rdma_cm, too.
_PORT_TRIES = 16


def key_of(address: InetAddr) -> PeerKey:
    """The key of a peer in the table."""
    return address.ip, address.port, address.link


def destination_of(address: InetAddr, step: str) -> InetAddr:
    """Where datagrams to an address go: the wildcard is this host. EOPNOTSUPP: it is a group."""
    if address.is_multicast:
        raise cm_error(errno.EOPNOTSUPP, "rsockets have no multicast", step, str(address), "rdmacm.CmId")
    return InetAddr.loopback(address.family, address.port) if address.is_any else address


class LocalEnd:
    """The queue pair of a local address."""

    def __init__(self, owner: DatagramState, address: InetAddr) -> None:
        self._owner = owner
        self.address = address
        #: Whether the dispatcher is going to call :meth:`poll`.
        self.is_scheduled = False
        #: What precedes each datagram, and its longest payload in bytes.
        self._header = SourceHeader(address.ip, address.port, address.flowinfo).pack()
        self._cq: CQ | None = None
        self._region: MR | None = None
        self._free: list[int] = []
        #: The protection domain of the queue pair.
        self.pd: PD | None = None
        options = owner.options
        self.cmid: CmId = CmId(owner.dispatcher.channel, PortSpace.UDP, context=self)
        try:
            if options.reuse_address:
                self.cmid.set_option(OptionLevel.ID, IdOption.REUSEADDR, 1)
            self.cmid.bind_addr(address.sockaddr)
            self._open(options)
        except BaseException:
            self.close()
            raise

    def _open(self, options: StreamOptions) -> None:
        context = self.cmid.verbs
        fitted = options.fitted(context.backend.attr)
        self._receives = max(min(fitted.receive_queue, options.receive_buffer // MAX_LENGTH), 1)
        self._sends = max(min(fitted.send_queue, options.send_buffer // MAX_LENGTH), 1)
        mtu = context.query_port(self.cmid.port_num).active_mtu
        self.longest: int = min(MAX_LENGTH, 128 << mtu if mtu else 0) - len(self._header)
        self._cq = CQ(context, self._receives + self._sends)
        self._cq.backend.notify = self._reported
        self.pd = PD(context)
        cap = QPCap(self._sends, self._receives, 1, 1)
        self._qp = self.cmid.create_qp(QPInitAttr(QPType.UD, scq=self._cq, rcq=self._cq, cap=cap), self.pd)
        #: The slots of receives, then those of sends.
        self._memory = memoryview(mmap(-1, (self._receives + self._sends) * _RECEIVE_LENGTH))
        self._region = MR(self.pd, self._memory, AccessFlag.LOCAL_WRITE)
        self._free = list(range(self._receives, self._receives + self._sends))
        self._post_receives(list(range(self._receives)))

    @property
    def qpn(self) -> int:
        """The number of the queue pair."""
        return self._qp.qp_num

    @property
    def can_send(self) -> bool:
        """Whether there is a slot for a datagram."""
        return bool(self._free)

    @property
    def is_idle(self) -> bool:
        """Whether all datagrams have left."""
        return len(self._free) == self._sends

    def _post_receives(self, slots: list[int]) -> None:
        region = self._region
        assert region is not None
        if slots:
            self._qp.post_recv([RecvWR(slot, [region.sge(slot * _RECEIVE_LENGTH, _RECEIVE_LENGTH)]) for slot in slots])

    def send(self, views: list[memoryview], handle: AH, qpn: int) -> bool:
        """Send a datagram, which is not longer than :attr:`longest`; return False if there is no slot."""
        if not self._free:
            self.poll()
        region = self._region
        if not self._free or region is None:
            return False
        slot = self._free.pop()
        start = at = slot * _RECEIVE_LENGTH
        for part in (memoryview(self._header), *views):
            self._memory[at : at + len(part)] = part
            at += len(part)
        sge = region.sge(start, at - start)
        request = SendWR(_SEND_WR_ID + slot, WROpcode.SEND, [sge], ah=handle, remote_qpn=qpn, remote_qkey=QKEY)
        try:
            self._qp.post_send(request)
        except BaseException:
            self._free.append(slot)
            raise
        return True

    # -- progress -------------------------------------------------------------------------------------

    def handle(self, event: CmEvent) -> None:
        """Process an event of the id."""
        if event.type is CmEventType.DEVICE_REMOVAL:
            self.end(event.message or "the device was removed")

    def _reported(self) -> None:
        self._owner.dispatcher.schedule(self)

    def poll(self) -> bool:
        """Process completions; see :class:`rdmacm.endpoint.dispatcher.CompletionSource`."""
        if self._cq is None:
            return False
        try:
            found = self._cq.poll(_POLL_BATCH)
            self._post_receives([wc.wr_id for wc in found if self._take(wc)])
        except RdmaError as error:
            self.end(str(error.strerror))
            return False
        if found:
            self._owner.changed()
        return len(found) >= _POLL_BATCH

    def _take(self, wc: WC) -> bool:
        """Process a completion; return whether it is one of a receive, which is to be posted again."""
        if wc.wr_id >= _SEND_WR_ID:
            self._free.append(wc.wr_id - _SEND_WR_ID)
        if wc.status is not WCStatus.SUCCESS:
            raise cm_error(errno.EIO, f"the queue pair failed: {status_text(wc.status)}", "poll")
        if wc.wr_id >= _SEND_WR_ID:
            return False
        start = wc.wr_id * _RECEIVE_LENGTH
        self._owner.message_arrived(self, self._memory[start + GRH_LENGTH : start + wc.byte_len])
        return True

    def end(self, reason: str) -> None:
        """The queue pair is of no use any more; the next datagram gets a new one."""
        self._owner.end_failed(self, cm_error(errno.EIO, reason, "poll", str(self.address)))

    def close(self) -> None:
        """Destroy everything."""
        cq, self._cq = self._cq, None
        if cq is not None:
            cq.backend.notify = None
        self.cmid.context = None
        self.cmid.destroy()
        for part in (cq, self._region, self.pd):
            if part is not None:
                with contextlib.suppress(RdmaError):
                    part.close()


class _Resolution:
    """The way to a peer, while it is being resolved."""

    def __init__(self, owner: DatagramState, key: PeerKey, end: LocalEnd) -> None:
        self._owner = owner
        self._key = key
        self._end = end
        self._cmid = CmId(owner.dispatcher.channel, PortSpace.UDP, context=self)
        try:
            source = end.address._replace(port=0)
            self._cmid.resolve_addr(owner.address_of(key).sockaddr, source.sockaddr, _RESOLVE_TIMEOUT_MS)
        except BaseException:
            self.close()
            raise

    def handle(self, event: CmEvent) -> None:
        try:
            if event.type is CmEventType.ADDR_RESOLVED:
                self._cmid.resolve_route(_RESOLVE_TIMEOUT_MS)
                return
            made = self._make() if event.type is CmEventType.ROUTE_RESOLVED else None
        except RdmaError:
            made = None
        self.close()
        self._owner.resolution_ended(self._key, self._end, made)

    def _make(self) -> AH | None:
        cmid, pd = self._cmid, self._end.pd
        path = next(iter(cmid.route.path_rec), None)
        if path is None or pd is None:
            return None
        port = cmid.verbs.query_port(cmid.port_num)
        is_global = path.hop_limit > 1 or port.link_layer is LinkLayer.ETHERNET
        route = GlobalRoute(
            path.dgid, cmid.gid_index, path.flow_label, path.hop_limit or _HOP_LIMIT, path.traffic_class
        )
        bits = path.slid & (1 << port.lmc) - 1
        gr = route if is_global else GlobalRoute()
        return AH(pd, AHAttr(path.dlid, path.sl, bits, path.rate, is_global, cmid.port_num, gr))

    def end(self, reason: str) -> None:  # noqa: ARG002
        """An internal error has ended it; the dispatcher calls this."""
        self.close()
        self._owner.resolution_ended(self._key, self._end, None)

    def close(self) -> None:
        self._cmid.context = None
        self._cmid.destroy()


class DatagramState(Observable):
    """A bound datagram socket. Changes when a datagram has arrived or left, and when it fails.

    ``bound``: its address, perhaps the wildcard; port 0 is any free one.
    """

    def __init__(self, dispatcher: Dispatcher, bound: InetAddr, options: StreamOptions) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.options = options
        #: Datagrams that the application has not read, each with its source; and their size in bytes.
        self.inbox: deque[tuple[bytes, Any]] = deque()
        self._unread = 0
        #: The peer of connect(); others' datagrams are dropped then.
        self.peer: PeerKey | None = None
        #: What the next call raises.
        self.error: OSError | None = None
        self.is_closed: bool = False
        self._table = PeerTable(4 if bound.family == _socket.AF_INET else 6)
        #: The queue pairs by local address, and by peer those that send to it, with the handle.
        self._ends: dict[bytes, LocalEnd] = {}
        self._handles: dict[PeerKey, tuple[LocalEnd, AH]] = {}
        self._resolutions: dict[PeerKey, _Resolution] = {}
        self._buffer = memoryview(bytearray(_UDP_LENGTH))
        for remaining in reversed(range(1 if bound.port else _PORT_TRIES)):
            self.udp: UdpSocket = self._open_udp(bound)
            self.bound: InetAddr = bound._replace(port=self.udp.getsockname()[1])
            try:
                if not bound.is_any:
                    self._local_end(self.bound)
                break
            except BaseException as error:
                self.udp.close()
                if not remaining or not isinstance(error, RdmaError) or error.errno != errno.EADDRINUSE:
                    raise
        dispatcher.retain()

    def _open_udp(self, bound: InetAddr) -> UdpSocket:
        udp = self.dispatcher.provider.open_udp(bound.family, self._arrived)
        try:
            if self.options.reuse_address:
                udp.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            if bound.family == _socket.AF_INET6:
                udp.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 1)
            udp.bind(bound.sockaddr)
        except OSError as error:
            udp.close()
            raise cm_error(error.errno or errno.EIO, str(error.strerror), "bind", str(bound)) from error
        except BaseException:
            udp.close()
            raise
        return udp

    # -- addresses ------------------------------------------------------------------------------------

    @property
    def cmid(self) -> CmId | None:
        """The id of the first queue pair."""
        return next((end.cmid for end in self._ends.values()), None)

    def address_of(self, key: PeerKey) -> InetAddr:
        """The address of a peer."""
        ip, port, scope = key
        return InetAddr(self.bound.family, ip, port, 0, scope)

    def source_for(self, key: PeerKey) -> InetAddr:
        """The local address from which datagrams to a peer leave. OSError: there is no route."""
        if not self.bound.is_any:
            return self.bound
        destination = self.address_of(key)
        try:
            with contextlib.closing(self.dispatcher.provider.open_udp(self.bound.family, self._arrived)) as probe:
                probe.connect(destination.sockaddr)
                local = lookup_address(probe.getsockname())
        except OSError as error:
            raise cm_error(error.errno or errno.EIO, str(error.strerror), "send", str(destination)) from error
        assert isinstance(local, InetAddr)
        return local._replace(port=self.bound.port)

    def _end_for(self, key: PeerKey) -> LocalEnd:
        """The queue pair from which datagrams to a peer leave."""
        found = self._handles.get(key)
        return found[0] if found is not None else self._local_end(self.source_for(key))

    def _local_end(self, address: InetAddr) -> LocalEnd:
        found = self._ends.get(address.ip)
        if found is None:
            found = self._ends[address.ip] = LocalEnd(self, address)
        return found

    # -- sending --------------------------------------------------------------------------------------

    def send(self, views: list[memoryview], key: PeerKey) -> bool:
        """Send a datagram; return False if it has to wait. EMSGSIZE: it is too long for the way there."""
        end = self._end_for(key)
        size = sum(map(len, views))
        if size > end.longest:
            text = f"a datagram of {size} bytes; {end.longest} is the most"
            raise cm_error(errno.EMSGSIZE, text, "send", str(self.address_of(key)))
        qpn = self._table.send(key, self.dispatcher.clock())
        self._work()  # the table may have forgotten another peer
        found = self._handles.get(key)
        if qpn is None or found is None:
            return self._send_service(end, ServiceOperation.DATA, views, key)
        return found[0].send(views, found[1], qpn)

    def _send_service(self, end: LocalEnd, operation: ServiceOperation, views: list[memoryview], key: PeerKey) -> bool:
        header = ServiceHeader(operation, end.qpn, end.address.ip).pack()
        destination = self.address_of(key)
        try:
            self.udp.sendmsg([header, *views], [], 0, destination.sockaddr)
        except BlockingIOError:
            return False
        except OSError as error:
            raise cm_error(error.errno or errno.EIO, str(error.strerror), "send", str(destination)) from error
        return True

    @property
    def is_writable(self) -> bool:
        """Whether a datagram may be sent at once."""
        return all(end.can_send for end in self._ends.values())

    @property
    def is_idle(self) -> bool:
        """Whether all datagrams have left."""
        return all(end.is_idle for end in self._ends.values())

    # -- receiving ------------------------------------------------------------------------------------

    def _arrived(self) -> None:
        """A datagram is in the UDP socket, which has no descriptor."""
        self.dispatcher.drive_once(self.serve)

    def serve(self) -> None:
        """Read the UDP socket: datagrams of new peers, and answers."""
        for _ in range(_SERVICE_BATCH):
            if self.is_closed:
                return
            try:
                length, source = self.udp.recvfrom_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:  # of an earlier datagram, which had no receiver
                continue
            found = lookup_address(source)
            if not isinstance(found, InetAddr):
                continue
            key = key_of(found)
            data = self._table.service_received(self._buffer[:length], key, self.dispatcher.clock())
            if data is not None:
                self._deliver(data, key, found)
            self._work()

    def message_arrived(self, end: LocalEnd, message: memoryview) -> None:
        """A message has arrived on a queue pair."""
        found = self._table.message_received(message, end.address.link, self.dispatcher.clock())
        if found is not None:
            key, flow, data = found
            if not InetAddr(self.bound.family, key[0]).is_link_local:
                key = (*key[:2], 0)
            self._deliver(data, key, self.address_of(key)._replace(flowinfo=flow))

    def _deliver(self, data: memoryview, key: PeerKey, source: InetAddr) -> None:
        if self.peer is not None and key != self.peer:
            return
        # As a queue of receives of the longest datagram has room.
        if (len(self.inbox) + 1) * MAX_LENGTH > max(self.options.receive_buffer, MAX_LENGTH):
            return
        self.inbox.append((bytes(data), source.sockaddr))
        self.changed()

    # -- peers ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Do what the table wants."""
        while self._table.work:
            action, key = self._table.work.popleft()
            if action is PeerAction.FORGET:
                self._drop_handle(key)
                continue
            try:
                if action is PeerAction.ANSWER:
                    self._send_service(self._end_for(key), ServiceOperation.CONTROL, [], key)
                elif action is PeerAction.RESOLVE:
                    self._resolutions[key] = _Resolution(self, key, self._local_end(self.source_for(key)))
            except RdmaError:  # nobody has asked for it; a datagram of the application raises
                if action is PeerAction.RESOLVE:
                    self._table.unreachable(key)

    def resolution_ended(self, key: PeerKey, end: LocalEnd, handle: AH | None) -> None:
        """The way to a peer is known, or cannot be found."""
        self._resolutions.pop(key, None)
        if handle is None or self._ends.get(end.address.ip) is not end:
            self._table.unreachable(key)
            return
        self._drop_handle(key)
        self._handles[key] = end, handle
        self._table.resolved(key)
        self.changed()

    def _drop_handle(self, key: PeerKey) -> None:
        found = self._handles.pop(key, None)
        if found is not None:
            with contextlib.suppress(RdmaError):
                found[1].close()

    def end_failed(self, end: LocalEnd, error: OSError) -> None:
        """A queue pair is of no use any more."""
        if self._ends.get(end.address.ip) is not end:
            return
        self.error = error
        for key in [key for key, (used, _) in self._handles.items() if used is end]:
            self._drop_handle(key)
            self._table.unreachable(key)
        del self._ends[end.address.ip]
        end.close()
        self.changed()

    # -- the end --------------------------------------------------------------------------------------

    def release(self) -> None:
        """Destroy everything. The lock is not held."""
        if self.dispatcher.drive_once(self._begin_release):
            for resolution in self._resolutions.values():
                resolution.close()
            for key in list(self._handles):
                self._drop_handle(key)
            for end in self._ends.values():
                end.close()
            self._ends.clear()
            self.udp.close()
            self.wakers.clear()
            self.dispatcher.release()

    def _begin_release(self) -> bool:
        was_closed, self.is_closed = self.is_closed, True
        return not was_closed
