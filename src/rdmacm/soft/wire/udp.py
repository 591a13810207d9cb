"""The wire of a host: UDP port 4791 of the network namespace it was opened in.

One socket for each address family receives what peers send to any local address. Bulk data is sent as *trains*: one
buffer with many packets, which the system cuts up (UDP_SEGMENT); it is received in the same way (UDP_GRO). If the
system or a path cannot do that, packets go one by one.

On Linux the processes of one user share the port (:mod:`rdmacm.soft.wire.port_group`). The kernel gives each packet to
the process it is for, with two exceptions. Joining packets to trains looks at addresses and lengths only, so a train
may hold packets of several processes. And any process may read a connection request. Packets of another process are
forwarded to it (:mod:`rdmacm.soft.wire.forwarding`).

A process that does not listen has no use for requests. Once it has forwarded one, it leaves requests to the processes
that listen, until one has waited so long that these must be gone or busy.

No packet makes a call raise an exception: a packet that cannot be sent is lost, and counted.

Linux keeps the ICMP errors that quote packets of a socket in a queue of that socket (IP_RECVERR), and fails the
socket's next call, for which packet it may be. So a call that fails is repeated, and the queue is read when poll(2)
reports POLLERR. Only reports about connection requests are of use. The kernel chooses the socket of a port group by a
hash, without the program, so the process that reads a report forwards it to the process that has sent the request.
"""

from __future__ import annotations

import errno
import secrets
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING, cast

from rdmacm.errors import cm_error, errno_name
from rdmacm.proto.constants import (
    BATCH,
    GSI_QPN,
    LONGEST_TRAIN,
    MAX_SLOT,
    MULTICAST_QPN,
    QPN_BITS,
    READ_AGAIN,
    ROCE_PORT,
    SHORTEST_PACKET,
    STREAM,
    TRAINS,
)
from rdmacm.provider import Tap
from rdmacm.soft.interpreter import check_main_interpreter
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.announcer import Announcer
from rdmacm.soft.wire.arrivals import arrivals
from rdmacm.soft.wire.base import PacketBuffer, Received, SocketAddress, Undelivered, WirePath, group_of
from rdmacm.soft.wire.forwarding import Delivery, ForwardReceiver, ForwardSender
from rdmacm.soft.wire.groups import GroupSockets, GroupSource
from rdmacm.soft.wire.heirs import Inheritance
from rdmacm.soft.wire.held_reads import ReadMessage
from rdmacm.soft.wire.listeners import Listeners
from rdmacm.soft.wire.pollers import Pollers
from rdmacm.soft.wire.port_group import CannotShare, OwnedSlot, PortGroup
from rdmacm.soft.wire.slot_filter import SERVICE_ID, is_request, names_no_connection, qpn_of, slot_of, slot_of_sender
from rdmacm.soft.wire.source import RequestRate, Source
from rdmacm.soft.wire.udp_route import UdpRoute
from rdmacm.soft.wire.udp_sender import UNREACHABLE, UdpSender

if TYPE_CHECKING:
    from rdmacm.proto._core import Wire as CoreWire

#: Seconds for a datagram, at a stream, that say that another thread had the interpreter meanwhile; then so many calls
#: of receive() keep it, and read so many datagrams at once.
_GIVEN_UP, _HELD_CALLS, _HELD_BATCH = 0.001, 256, 64
#: One receive() in so many asks which descriptors are readable; the others try the socket that was busy last.
_POLL_INTERVAL = 16
#: Management datagrams that are read at once, while too many arrive.
_REQUEST_BATCH = 64
#: The first byte of the destination QP number.
_QPN = 5
_MULTICAST_SLOT = MULTICAST_QPN >> QPN_BITS
_UDP_GRO, _ANCILLARY_SPACE = sockets.UDP_GRO, sockets.ANCILLARY_SPACE

#: How many reports of undelivered packets one receive() reads from a socket, so that a flood of them delays nothing.
_REPORTS = 32


class UdpWire:
    """UDP port 4791 of a network namespace; implements :class:`rdmacm.soft.wire.base.Wire`.

    The namespace is that of the thread that calls :meth:`open`. All other calls have to come from threads in it too,
    because requests and listeners take new sockets. A process opens one wire of a namespace at a time, and calls
    :meth:`abandon` in a child after fork(2).

    With ``trains`` False packets are sent and received one by one. ``port`` is another port, for tests.

    ``counters`` counts packets that were lost or took the slow way: ``no_room`` (the send queue stayed full), the name
    of an errno for each packet or train that the system refused, ``trains_cut`` (trains whose packets were sent one by
    one), ``short`` (shorter than any packet), ``forwarded`` (to another process), ``forward_full`` (lost, because that
    process does not keep up), ``backlog_full`` (lost, because as many packets as may wait for Python already do),
    ``stray`` (for no existing process; multicast by its address or by its QP number alone).
    Of the reports of undelivered packets it counts all (``undelivered``), and those about anything but a connection
    request of these processes (``undelivered_ignored``).

    ``tap`` sees every datagram and train after it was sent, and as it is received.
    """

    def __init__(self, *, port: int = ROCE_PORT, trains: bool = True) -> None:
        self.port = port
        #: Reads the sockets of queue pairs, with the compiled core; set before :meth:`open`.
        self.core_wire: CoreWire | None = None
        self.counters: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self._pollers = Pollers()
        self._out = UdpSender(port, self.counters, self.traffic, self._report)
        #: See :class:`rdmacm.soft.wire.base.Wire`; the sender's own, because a call more would be felt.
        self.send: Callable[..., bool] = self._out.send
        #: See :class:`rdmacm.soft.wire.base.Wire`; 0 and empty before the wire is open.
        self.slot: int = 0
        self.slots: Sequence[int] = ()
        #: Those of ``slots`` all of whose packets are for queue pairs of this process.
        self._own: frozenset[int] = frozenset()
        #: See :class:`rdmacm.soft.wire.base.Wire`.
        self.leaves_peers = False
        #: See :class:`rdmacm.soft.wire.base.Wire`.
        self.on_undelivered: Callable[[Undelivered], None] | None = None
        #: See :class:`rdmacm.soft.wire.base.Wire`.
        self.hold_request: Callable[[memoryview, SocketAddress, bytes], bool] | None = None
        #: Whether trains are wanted.
        self._trains = trains
        #: The UDP sockets among the descriptors of the poller.
        self._watched_sockets: dict[int, socket.socket] = {}
        #: Descriptors of slot 0's sockets, where all requests arrive. They are in the poller, and also in the other one
        #: while requests are left to other processes: then the poller reports their errors only.
        self._gsi: list[int] = []
        self._request_poller: select.epoll | None = None
        self._leaves_requests = False
        self._request_rate = RequestRate()
        #: Receive buffers: as ``recvmsg_into`` takes them, as bytes, as words; how many the last receive() used.
        self._buffers: list[tuple[list[memoryview], memoryview, memoryview]] = []
        #: See :meth:`report_ip_fields`.
        self._reports_ip_fields = False
        self._used = 0
        #: Datagrams that the compiled core has read in it.
        self._core_read = 0
        #: Calls of receive(), and how many of the latest in a row found something.
        self._calls = 0
        self._busy_calls = 0
        #: How many further calls keep the interpreter as they read.
        self._held_calls = 0
        #: The socket where the last packet for a queue pair arrived.
        self._recent: Source | None = None
        #: The processes that share the port, and what they forward to this one; None if it is not shared.
        self._group: PortGroup | None = None
        self._receivers: list[ForwardReceiver] = []
        self._sender = ForwardSender()
        self._announcer = Announcer()
        #: The slots of processes that have ended, for which this one answers.
        self._inheritance = Inheritance(self._pollers.watch, self._pollers.unwatch, self.counters, self._read_reports)
        #: The service ids that this process listens on.
        self._listeners = Listeners()
        #: The multicast groups of this process.
        self._groups = GroupSockets()

    @property
    def tap(self) -> Tap | None:
        """See :class:`rdmacm.soft.wire.base.Wire`. It sees everything, so the compiled core does nothing meanwhile."""
        return self._out.tap

    @tap.setter
    def tap(self, tap: Tap | None) -> None:
        self._out.tap = tap
        if self.core_wire is not None:
            self.core_wire.is_enabled = tap is None

    # -- opening and closing --------------------------------------------------------------------------

    def open(self) -> None:
        if self._pollers.poller is not None:
            return
        check_main_interpreter("open_device")
        if not hasattr(socket.socket, "recvmsg_into"):
            raise cm_error(
                errno.ENOSYS, "this system does not report the destination address of a datagram", "open_device"
            )
        try:
            core_wire = self.core_wire if hasattr(select, "epoll") else None
            self._pollers.open(with_core=core_wire is not None)
            if core_wire is not None:
                self._pollers.watch(core_wire.open(*self._pollers.filenos()), self._core_signals)
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        try:
            group = self._group = PortGroup.join(self.port)
        except CannotShare:
            self._out.sockets = self._open_alone()
            self._add_slot(1 + secrets.randbelow(MAX_SLOT))
            for sock in self._out.sockets:
                self._add_data_socket(sock)
            return
        self._out.sockets = group.slots[0].data
        for admission in group.admission:
            self._pollers.watch(admission.fileno(), lambda _, sock=admission: group.admit(sock))  # type: ignore[misc]
        self._request_poller = select.epoll()
        for sock in group.gsi:
            if sock is not None:
                self._gsi.append(sock.fileno())
                self._watch_socket(sock, Source(sock, True))
        self._receive_slot(group.slots[0])

    def claim_slot(self) -> None:
        """See :meth:`Wire.claim_slot`."""
        if self._pollers.poller is None:
            raise cm_error(errno.EBADF, "the wire is not open", "create_qp")
        if self._group is not None:
            self._receive_slot(self._group.claim())
        elif len(self.slots) < MAX_SLOT:  # packets for all slots arrive here
            slot = self.slot
            while slot in self.slots:
                slot = 1 + secrets.randbelow(MAX_SLOT)
            self._add_slot(slot)
        else:
            raise cm_error(errno.EUSERS, f"this process owns all {MAX_SLOT} slots", "create_qp")

    def lend_slot(self) -> OwnedSlot:
        """Claim a slot for another program, which gets copies of its sockets: this process reads nothing there.

        ENOTSUP where processes cannot share the port; also the errors of :meth:`claim_slot`.
        """
        if self._group is None:
            text = "this system does not let several processes share the port"
            raise cm_error(errno.ENOTSUP, text, "create_qp", f"UDP port {self.port}")
        return self._group.claim()

    def take_back_slot(self, owned: OwnedSlot) -> None:
        """Leave a slot of :meth:`lend_slot` to other processes. It may be of a wire that was closed meanwhile."""
        if self._group is not None and owned in self._group.slots:
            self._group.slots.remove(owned)
        owned.close()

    def _receive_slot(self, owned: OwnedSlot) -> None:
        """Receive the packets for a slot of this process, and what others forward to it."""
        self._receivers.append(self._forward_receiver(owned.name))
        for sock in owned.data:
            self._add_data_socket(sock)
        self._add_slot(owned.slot)

    def _add_slot(self, slot: int) -> None:
        self.slots = (*self.slots, slot)
        self.slot = self.slots[0]
        self._own = frozenset(self.slots) - {_MULTICAST_SLOT}
        if self.core_wire is not None:
            self.core_wire.set_slots(tuple(self.slots) if self._group is not None else None)

    def _add_data_socket(self, sock: socket.socket | None) -> None:
        if sock is not None:
            self._watch_socket(sock, Source(sock, False))
            if self.core_wire is not None:
                self.core_wire.add_source(sock.fileno())
            if sockets.set_trains(sock, self._trains):
                self._out.train_bytes = LONGEST_TRAIN

    def _open_alone(self) -> list[socket.socket | None]:
        opened: list[socket.socket | None] = [None, None]
        try:
            for index, family in enumerate(sockets.FAMILIES):
                opened[index] = sockets.open_socket(family, self.port)
        except OSError as error:
            if opened[0] is not None:
                opened[0].close()
            raise sockets.bind_error(error.errno or errno.EIO, self.port) from error
        return opened

    def _watch_socket(self, sock: socket.socket, source: Source) -> None:
        self._watched_sockets[sock.fileno()] = sock
        self._pollers.watch(sock.fileno(), partial(self._read, source), not source.is_gsi)
        if self._reports_ip_fields:
            sockets.report_ip_fields(sock)

    def report_ip_fields(self) -> None:
        """See :meth:`rdmacm.soft.wire.base.Wire.report_ip_fields`. A packet that is forwarded has none."""
        if not self._reports_ip_fields:
            self._reports_ip_fields = True
            for sock in self._watched_sockets.values():
                sockets.report_ip_fields(sock)

    def close(self) -> None:
        if self._group is not None and self.leaves_peers:
            self._group.give_slots()
        self._close()

    def _close(self) -> None:
        if self._pollers.poller is None:
            return
        self._pollers.close()
        if self.core_wire is not None:
            self.core_wire.close()
        self._recent = None
        if self._request_poller is not None:
            self._request_poller.close()
            self._request_poller = None
        self._leaves_requests = False
        self._gsi.clear()
        self._watched_sockets.clear()
        self._listeners.close()
        self._groups.close()
        self._inheritance.close()
        for receiver in self._receivers:
            receiver.close()
        self._receivers.clear()
        self.slots, self._own = (), frozenset()
        self._sender.close()
        if self._group is not None:
            self._group.close()
            self._group = None
        for sock in self._out.sockets:
            if sock is not None:
                sock.close()
        self._out.sockets = [None, None]

    def abandon(self) -> None:
        """See :meth:`Wire.abandon`. A new wire may be opened in the child."""
        self._close()

    def filenos(self) -> Sequence[int]:
        return self._pollers.filenos()

    def background_filenos(self) -> Sequence[int]:
        """The same without what a thread of the compiled core serves, while there is one."""
        return self._pollers.filenos(without_data=self.core_wire is not None and self.core_wire.is_served)

    # -- sending --------------------------------------------------------------------------------------

    def route(self, path: WirePath, traffic_class: int = 0, hop_limit: int = 0) -> UdpRoute:
        """See :meth:`Wire.route`."""
        return UdpRoute(path, traffic_class, self.port, hop_limit)

    def fileno_for(self, route: UdpRoute) -> int:
        """The descriptor of the socket that packets along a route leave from, -1 if there is none."""
        return self.own_filenos()[route.is_ipv6]

    def own_filenos(self) -> tuple[int, int]:
        """The descriptors of the sockets that IPv4 and IPv6 packets leave from, -1 where there is none."""
        first, second = (-1 if sock is None else sock.fileno() for sock in self._out.sockets)
        return first, second

    def can_segment(self) -> int:
        """See :meth:`Wire.can_segment`; a train also has at most 64 packets (``MOST_IN_TRAIN``)."""
        return self._out.train_bytes

    # -- requests -------------------------------------------------------------------------------------

    def unread_request_fds(self) -> Sequence[int]:
        return () if self._request_poller is None else (self._request_poller.fileno(),)

    def resume_requests(self) -> bool:
        if not self._leaves_requests or self._request_poller is None:
            return False
        ready = self._request_poller.poll(0)
        for fd, events in ready:
            if events & select.POLLERR:
                self._read_reports(self._watched_sockets[fd])
        if all(events == select.POLLERR for _, events in ready):
            return False
        self._leave_requests(False)
        self._request_rate.left = 0.0
        return True

    def _leave_requests(self, leave: bool) -> None:
        """Leave requests to the processes that listen, or read them again."""
        if leave is not self._leaves_requests and self._request_poller is not None:
            self._leaves_requests = leave
            for fd in self._gsi:
                self._pollers.pause(fd, leave)
                if leave:
                    self._request_poller.register(fd, select.POLLIN)
                else:
                    self._request_poller.unregister(fd)

    def listen(self, service_id: int, local: bytes | None) -> object:
        """See :meth:`Wire.listen`. An address of zeros is any address of its family.

        EADDRINUSE if another process listens on the same service id and address.
        """
        if self._pollers.poller is None:
            raise cm_error(errno.EBADF, "the wire is not open", "listen")
        token = self._listeners.add((service_id, local), self._group, self._forward_receiver)
        self._leave_requests(False)
        return token

    def unlisten(self, token: object) -> None:
        self._listeners.remove(token)

    # -- multicast ------------------------------------------------------------------------------------

    def join_group(self, group: bytes, ifindex: int) -> None:
        """See :meth:`Wire.join_group`. EOPNOTSUPP if this system cannot share the port among sockets."""
        if self._pollers.poller is None:
            raise cm_error(errno.EBADF, "the wire is not open", "join_multicast")
        if self._group is None:
            raise cm_error(errno.EOPNOTSUPP, "this system does not let several sockets share a port", "join_multicast")
        sock, source = self._groups.join(group, ifindex, self.port)
        self._watched_sockets[sock.fileno()] = sock
        self._pollers.watch(sock.fileno(), partial(self._read_group, source), True)
        sockets.report_ip_fields(sock)
        if self.core_wire is not None:
            self.core_wire.add_group(sock.fileno(), source.key)

    def leave_group(self, group: bytes, ifindex: int) -> None:
        sock = self._groups.take(group, ifindex)
        if sock is not None:
            with sock:
                if self.core_wire is not None:
                    self.core_wire.remove_group(sock.fileno())
                del self._watched_sockets[sock.fileno()]
                self._pollers.unwatch(sock.fileno())

    def _read_group(self, source: GroupSource, found: list[Received]) -> None:
        """Read packets of a multicast group. Others than those for QP 0xFFFFFF are not wanted there."""
        if self.core_wire is not None and self.core_wire.is_active:
            count = self.core_wire.receive(source.fd)
            if count:
                self._core_read += count
                self._take_arrivals(found)
            return
        limit = self._used + BATCH
        while self._used < limit:
            if self._used == len(self._buffers):
                self._add_buffer()
            buffers, view, _ = self._buffers[self._used]
            try:
                size, control, _, remote = source.recvmsg_into(buffers, _ANCILLARY_SPACE)
            except OSError:
                return
            self._used += 1
            self.traffic["rcvd_pkts"] += 1
            self.traffic["rcvd_bytes"] += size
            self.traffic["multicast_rcv_packets"] += 1
            data = view[:size]
            if size < SHORTEST_PACKET:
                self.counters["short"] += 1
            elif qpn_of(data) != MULTICAST_QPN or not source.has_arrived(control):
                self.counters["stray"] += 1
            else:
                cast("PacketBuffer", view.obj).ip_fields = sockets.ip_fields(control)
                found.append((data, 0, remote, source.key))

    def _forward_receiver(self, sock: socket.socket) -> ForwardReceiver:
        return ForwardReceiver(
            sock, self._pollers.watch, self._pollers.unwatch, self._forwarded_report, self._inheritance.add
        )

    # -- receiving ------------------------------------------------------------------------------------

    def receive(self, skip_poll: bool = False) -> Sequence[Received]:
        if self._pollers.poller is None:
            return ()
        found: list[Received] = []
        self._used = self._core_read = 0
        self._calls += 1
        if self.core_wire is not None and self.core_wire.has_arrivals:
            self._take_arrivals(found)
            return found
        if self._recent is not None and self._calls % _POLL_INTERVAL:
            # The next packet probably arrives where the last one did: reading there is faster than a poll.
            self._read(self._recent, found)
            if not self._used and not self._core_read:
                self._busy_calls = 0
                if skip_poll:
                    return ()
                self._recent = None
        if not self._used and not self._core_read:
            ready = self._pollers.poller.poll(0)
            if not ready:
                self._busy_calls = 0
                return ()
            if len(ready) > 1:  # connections that are established come before strangers
                ready.sort(key=self._is_gsi)
            for fd, events in ready:
                if events & select.POLLERR and fd in self._watched_sockets:
                    self._read_reports(self._watched_sockets[fd])
                    if events == select.POLLERR:
                        continue
                # A reader may have closed a later descriptor of the list.
                reader = self._pollers.readers.get(fd)
                if reader is not None:
                    before = self._used
                    reader(found)
                    if fd in self._gsi and not self._request_rate.permits(self._used - before):
                        self._leave_requests(True)
        self._busy_calls += 1
        if self._out.tap is not None:
            for received in found:
                self._tap_incoming(*received)
        return found

    def _tap_incoming(self, data: memoryview, segment: int, remote: tuple[str | int, ...], local: bytes) -> None:
        host, port = remote[:2]
        assert self._out.tap is not None and isinstance(host, str) and isinstance(port, int)
        local = group_of(local)
        family = AF_INET if len(local) == 4 else AF_INET6
        self._out.tap(False, local, socket.inet_pton(family, host), port, self.port, (data,), segment)

    def _core_signals(self, found: list[Received]) -> None:
        assert self.core_wire is not None
        self.core_wire.clear_signal()
        self._take_arrivals(found)

    def _take_arrivals(self, found: list[Received]) -> None:
        """Take what the compiled core has read and not processed."""
        assert self.core_wire is not None
        for received in arrivals(self.core_wire):
            data = received[0]
            if len(data) < SHORTEST_PACKET or not received[3]:
                self.counters["short"] += 1
            elif len(received[3]) not in (4, 16):  # the key of a group
                found.append(received)
            else:
                self._sort(received, data[: len(data) & ~3].cast("I"), found)

    def _is_gsi(self, one: tuple[int, int]) -> bool:
        return one[0] in self._gsi

    def _read(self, source: Source, found: list[Received]) -> None:
        if self.core_wire is not None and self.core_wire.is_active and not source.is_gsi:
            count = self.core_wire.receive(source.fd)
            if count:
                self._core_read += count
                self._recent = source.recent
                self._take_arrivals(found)
            return
        # Reading an empty socket takes as long as reading a packet, so a second packet is read only while packets keep
        # coming: a lone message is answered sooner.
        begin, alone, errors = self._used, True, 0
        limit = begin + (BATCH if self._busy_calls > STREAM else 1)
        hold = self.hold_request if source.is_gsi else None
        if hold is not None:
            limit = begin + _REQUEST_BATCH
        recvmsg_into: ReadMessage = source.recvmsg_into
        info = source.info
        began = time.monotonic() if limit > begin + 1 else 0.0
        if began and self._held_calls and source.held_recvmsg_into is not None:
            self._held_calls -= 1
            recvmsg_into, limit, began = source.held_recvmsg_into, begin + _HELD_BATCH, 0.0
        while self._used < limit:
            if self._used == len(self._buffers):
                self._add_buffer()
            buffers, view, words = self._buffers[self._used]
            try:
                size, control, _, remote = recvmsg_into(buffers, _ANCILLARY_SPACE)
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    # An ICMP error of an earlier packet; retry. poll(2) announces the report.
                    errors += 1
                    if errors < READ_AGAIN:
                        continue
                    self.counters[errno_name(error.errno or 0)] += 1
                elif alone and self._used == begin + 1:
                    self._busy_calls = 0  # the second read was in vain
                return
            self._used += 1
            self._recent = source.recent
            if began and time.monotonic() - began > _GIVEN_UP * (self._used - begin):
                recvmsg_into, self._held_calls, began = source.hold_interpreter() or recvmsg_into, _HELD_CALLS, 0.0
            local = b""
            segment = 0
            for _, kind, value in control:
                if kind == info:
                    local = value[source.start : source.end]
                elif kind == _UDP_GRO:
                    segment = int.from_bytes(value[:4], sys.byteorder)
                    if alone:  # a train is rarely the only one
                        alone, limit = False, begin + TRAINS
                        self._busy_calls = STREAM + 1
            if size < SHORTEST_PACKET or not local:
                self.counters["short"] += 1
                continue
            if segment >= size:
                segment = 0
            self.traffic["rcvd_pkts"] += -(-size // segment) if segment else 1
            self.traffic["rcvd_bytes"] += size
            if self._reports_ip_fields:
                cast("PacketBuffer", view.obj).ip_fields = sockets.ip_fields(control)
            data = view[:size]
            if hold is not None and hold(data, remote, local):
                continue
            if not segment and data[_QPN] << 4 | data[_QPN + 1] >> 4 in self._own:
                found.append((data, 0, remote, local))
            else:
                self._sort((data, segment, remote, local), words, found)

    def _sort(self, received: Received, words: memoryview, found: list[Received]) -> None:
        """Keep what is for this process, and forward the rest. ``words`` are the data and perhaps more."""
        data, segment = received[:2]
        if self._group is None:
            found.append(received)
        elif segment:
            # Nearly all trains are for one queue pair: the word with its number is the same in all packets.
            column = words[1 : len(data) >> 2 : segment >> 2].tobytes()
            if (
                not segment & 3
                and column == column[:4] * (len(column) >> 2)
                and column[1] << 4 | column[2] >> 4 in self._own
            ):
                found.append(received)
            else:
                self._sort_train(received, found)
        elif data[_QPN] << 4 | data[_QPN + 1] >> 4 in self._own:
            found.append(received)
        elif (slot := slot_of(data)) in self._own or self._takes(slot, received):
            found.append(received)
            self._recent = None  # of a management datagram: what follows may arrive at any socket

    def _add_buffer(self) -> None:
        view = memoryview(PacketBuffer(65536))
        self._buffers.append(([view], view, view.cast("I")))

    def _sort_train(self, train: Received, found: list[Received]) -> None:
        """Keep this process's packets of a train, and forward the others."""
        data, segment, remote, local = train
        columns = bytes(data[_QPN::segment]), bytes(data[_QPN + 1 :: segment])
        if {first << 4 | second >> 4 for first, second in set(zip(*columns, strict=False))} <= self._own:
            found.append(train)
            return
        for start in range(0, len(data), segment):
            packet = data[start : start + segment]
            if len(packet) < SHORTEST_PACKET:
                self.counters["short"] += 1
            elif (slot := slot_of(packet)) in self._own or self._takes(slot, (packet, 0, remote, local), True):
                found.append((packet, 0, remote, local))

    def _takes(self, slot: int, received: Received, is_of_train: bool = False) -> bool:
        """Whether a single packet for a slot that is not in ``_own`` is for this process all the same.

        If not, it is forwarded where another process may want it.
        """
        assert self._group is not None
        packet = received[0]
        qpn = qpn_of(packet)
        if qpn == MULTICAST_QPN or not (slot or qpn == GSI_QPN):  # a group's, but sent to this host alone; or nobody's
            self.counters["stray"] += 1
            return False
        if slot in self.slots:
            return True
        if slot:
            # The system gives a packet of another process to this one only in a train.
            is_lone = not (is_of_train or qpn == GSI_QPN)
            if is_lone or not self._forward((self._group.slot_name(slot),), received):
                self.counters["stray"] += 1
            return False
        if not is_request(packet):
            if names_no_connection(packet):
                self._announcer.send(self._group, self.slots, received, self._forward)
            return True
        service_id = int.from_bytes(packet[SERVICE_ID : SERVICE_ID + 8], "big")
        local = received[3]
        names = []
        for where in (local, bytes(len(local)), None):
            if (service_id, where) in self._listeners.by_key:
                break
            names.append(self._group.service_name(service_id, where))
        if self._forward(names, received):
            if not self._listeners.by_key:
                self._leave_requests(True)
            return False
        return True  # no process listens, so this one may reject the request

    def _forward(self, names: Sequence[str], received: Received | Undelivered) -> bool:
        """Forward a packet or report to the first of these names that has a receiver; False if none has."""
        for name in names:
            delivery = self._sender.send(name, received)
            if delivery is not Delivery.NO_RECEIVER:
                self.counters["forwarded" if delivery is Delivery.SENT else "forward_full"] += 1
                return True
        return False

    # -- packets that were not delivered --------------------------------------------------------------

    def _read_reports(self, sock: socket.socket) -> None:
        """Read reports of undelivered packets. While there is one, poll(2) reports POLLERR."""
        for count in range(_REPORTS):
            try:
                report = sockets.read_error(sock)
            except OSError:
                if not count:  # another process has read it, or there was no room for it
                    sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                return
            self.counters["undelivered"] += 1
            if report is not None:
                self._report(report)

    def _report(self, report: Undelivered) -> None:
        """Give a report to the process that has sent the packet, if the packet is a connection request."""
        if report.errno not in UNREACHABLE or not is_request(report.quote):
            self.counters["undelivered_ignored"] += 1
        elif self._group is None or slot_of_sender(report.quote) == self.slot:
            if self.on_undelivered is not None:
                self.on_undelivered(report)
        elif not self._forward((self._group.slot_name(slot_of_sender(report.quote)),), report):
            self.counters["stray"] += 1

    def _forwarded_report(self, report: Undelivered) -> None:
        if is_request(report.quote) and slot_of_sender(report.quote) == self.slot:
            self._report(report)
        else:
            self.counters["stray"] += 1
