"""The wire of a host: UDP port 4791 of the network namespace it was opened in.

One socket for each address family receives what any peer sends to any local address. Bulk data goes out as *trains*:
one buffer with many packets that the system cuts up (UDP_SEGMENT), and comes in the same way (UDP_GRO); where the
system or a path cannot do that, packets go one by one.

On Linux the processes of one user share the port (:mod:`rdmacm.soft.wire.port_group`). The kernel gives each packet
to the process it is for, but for two cases. Systems that join packets to trains look at addresses and lengths only, so a train
may hold packets of several processes. And requests come to whoever looks first. What is another process's is handed
on through its mailbox (:mod:`rdmacm.soft.wire.forwarding`).

A process where nobody listens has nothing to look for there. Once it has handed on a request, it leaves them to those
where somebody does, until one has waited so long that these must be gone, or be busy.

Nothing that happens to a packet raises: a packet that could not be sent is a lost one, and is counted.
"""

from __future__ import annotations

import errno
import select
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from socket import AF_INET, AF_INET6
from typing import NamedTuple

from rdmacm.errors import cm_error, errno_name
from rdmacm.proto.roce.headers import MULTICAST_QPN, ROCE_PORT
from rdmacm.proto.roce.icrc import ICRC_LENGTH, Icrc
from rdmacm.proto.roce.opcodes import BTH_LENGTH
from rdmacm.proto.wire import Buffer
from rdmacm.provider import Tap
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.base import Received, WirePath, WireRoute
from rdmacm.soft.wire.forwarding import Delivery, Mailbox, Post, bound
from rdmacm.soft.wire.port_group import CannotShare, Membership
from rdmacm.soft.wire.slot_filter import SERVICE_ID, is_request, qpn_of, slot_of

__all__ = ["UdpRoute", "UdpWire"]

_LONGEST = 65507
#: How many datagrams one receive() takes, and how many trains: what is not taken in soon is not acknowledged soon.
_BATCH = 16
_TRAINS = 4
#: After how many that found something it takes more than one packet of a socket; more than one round trip has.
_STREAM = 4
#: One receive() of so many asks which descriptors are readable; the others try where the last packet came from.
_LOOK_ROUND = 16
#: The top byte of the destination QP number.
_SLOT = 5
_MULTICAST_SLOT = MULTICAST_QPN >> 16
_SHORTEST = BTH_LENGTH + ICRC_LENGTH
_UDP_GRO, _ANCILLARY_SPACE = sockets.UDP_GRO, sockets.ANCILLARY_SPACE
#: How long a full send queue may hold up the sender, milliseconds; it drains at the link's speed.
_PATIENCE_MS = 5

#: What a system says that cannot cut up a train: it never can, not to this packet size, or not on this path.
_NO_TRAIN = frozenset((errno.EINVAL, errno.EIO, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EMSGSIZE))


class UdpRoute:
    """A path prepared for sending; see :class:`rdmacm.soft.wire.base.WireRoute`."""

    __slots__ = ("_address", "_control", "_flow", "_is_ipv6", "_segment", "_singly", "_train", "path", "remote_host",
                 "source_port", "traffic_class")  # fmt: skip

    def __init__(self, path: WirePath, traffic_class: int, port: int) -> None:
        if len(path.local) != len(path.remote) or len(path.local) not in (4, 16):
            raise ValueError(f"a path has two addresses of 4 or 16 bytes, not {len(path.local)} and {len(path.remote)}")
        self.path = path
        self.traffic_class = traffic_class
        self.source_port = port
        self._is_ipv6 = len(path.remote) == 16
        self.remote_host = socket.inet_ntop(AF_INET6 if self._is_ipv6 else AF_INET, path.remote)
        host = self.remote_host
        self._address: tuple[str, int] | tuple[str, int, int, int] = (
            (host, port, 0, path.scope_id) if self._is_ipv6 else (host, port)
        )
        self._control = sockets.control(path.local, path.scope_id, traffic_class)
        self._segment = 0
        self._train = self._control
        self._singly = False
        self._flow: Icrc | None = None

    def _with_segment(self, segment: int) -> sockets.Control:
        """The ancillary data of a train; a flow's trains nearly all have one packet size."""
        if segment != self._segment:
            self._train = [*self._control, sockets.segment_control(segment)]
            self._segment = segment
        return self._train

    def _resealed(self, packet: memoryview, index: int) -> Sequence[Buffer]:
        """Packet ``index`` of a train as it has to be when it goes alone: IPv4 identification 0."""
        if self._is_ipv6 or not index or len(packet) < _SHORTEST:
            return (packet,)
        if self._flow is None:
            self._flow = Icrc(self.path.local, self.path.remote, self.source_port, self._address[1])
        body = packet[:-ICRC_LENGTH]
        return body, self._flow.seal((body,))


class _Source:
    """A socket to receive from, and where in its ancillary data the local address is."""

    __slots__ = ("end", "info", "is_gsi", "recent", "recvmsg_into", "start")

    def __init__(self, sock: socket.socket, is_gsi: bool) -> None:
        self.is_gsi = is_gsi
        #: This, where packets for queue pairs come.
        self.recent = None if is_gsi else self
        self.recvmsg_into = sock.recvmsg_into
        # of in_pktinfo the address in the packet's header, which the ICRC covers
        self.info, self.start, self.end = sockets.PACKET_INFO[AF_INET6 if sock.family == AF_INET6 else AF_INET]


class _Token:
    """One call of listen()."""

    __slots__ = ("key",)

    def __init__(self, key: tuple[int, bytes | None]) -> None:
        self.key = key


class _Listening(NamedTuple):
    """Who in this process listens on a service id and address, and what other processes hand on for it."""

    tokens: set[object]
    mailbox: Mailbox | None


class UdpWire:
    """UDP port 4791 of a network namespace; implements :class:`rdmacm.soft.wire.base.Wire`.

    The namespace is that of the thread that calls :meth:`open`, and all other calls have to come from there too: new
    requests and new listeners take new sockets. A process opens one wire of a namespace at a time, and calls
    :meth:`abandon` in a child after fork(2).

    ``trains`` False sends and takes packets one by one. ``port`` is another port, for tests.

    ``counters`` counts what was lost or done the long way: ``no_room`` (the send queue stayed full), the name of an
    errno for each packet or train the system refused, ``trains_cut`` (trains sent one by one), ``short`` (packets too
    short to be one), ``forwarded`` (handed to another process), ``forward_full`` (lost, for that one does not keep up),
    ``stray`` (for no process there is).

    ``tap``, where set, sees every datagram and train after it was sent, and as it is received.
    """

    def __init__(self, *, port: int = ROCE_PORT, trains: bool = True) -> None:
        self.slot = 0
        self.port = port
        self.tap: Tap | None = None
        self.counters: Counter[str] = Counter()
        self._trains = trains
        self._train_bytes = 0
        self._sockets: list[socket.socket | None] = [None, None]
        self._readers: dict[int, Callable[[list[Received]], None]] = {}
        self._poller: select.epoll | select.poll | None = None
        # Where requests come, whoever they are for: in the poller, or aside.
        self._gsi: list[int] = []
        self._aside: select.epoll | None = None
        self._is_aside = False
        self._buffers: list[tuple[list[memoryview], memoryview]] = []
        self._used = 0
        self._in_a_row = 0  # receive() that found something
        self._calls = 0  # of receive()
        self._recent: _Source | None = None  # where the last packet for a queue pair came from
        self._member: Membership | None = None
        self._mailbox: Mailbox | None = None
        self._listening: dict[tuple[int, bytes | None], _Listening] = {}
        self._post = Post()

    # -- opening and closing --------------------------------------------------------------------------

    def open(self) -> None:
        if self._poller is not None:
            return
        if not hasattr(socket.socket, "recvmsg_into"):
            raise cm_error(errno.ENOSYS, "this system does not tell where a datagram came to", "open_device")
        # One question for all descriptors, a quarter of what it costs to ask an empty socket.
        self._poller = select.epoll() if hasattr(select, "epoll") else select.poll()
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        try:
            member = self._member = Membership.join(self.port)
        except CannotShare:
            self._sockets = self._open_alone()
            self.slot = 1
        else:
            self._sockets = member.data
            self.slot = member.slot
            self._mailbox = Mailbox(member.mailbox, self._watch, self._unwatch)
            self._watch(member.door.fileno(), lambda _: member.admit())
            self._aside = select.epoll()
            for sock in member.gsi:
                if sock is not None:
                    self._gsi.append(sock.fileno())
                    self._watch(sock.fileno(), partial(self._read, _Source(sock, True)))
        for sock in self._sockets:
            if sock is not None:
                self._watch(sock.fileno(), partial(self._read, _Source(sock, False)))
                if sockets.set_trains(sock, self._trains):
                    self._train_bytes = _LONGEST

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

    def _watch(self, fd: int, reader: Callable[[list[Received]], None]) -> None:
        assert self._poller is not None
        self._readers[fd] = reader
        self._poller.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._poller is not None:
            del self._readers[fd]
            self._poller.unregister(fd)

    def close(self) -> None:
        if self._poller is None:
            return
        # First, and nothing is taken out of it: after fork(2) both processes have this one list of descriptors.
        if hasattr(self._poller, "close"):
            self._poller.close()
        self._poller = None
        self._recent = None
        if self._aside is not None:
            self._aside.close()
            self._aside = None
        self._is_aside = False
        self._gsi.clear()
        self._readers.clear()
        for listening in self._listening.values():
            if listening.mailbox is not None:
                listening.mailbox.close()
        self._listening.clear()
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
        self._post.close()
        if self._member is not None:
            self._member.close()
            self._member = None
        for sock in self._sockets:
            if sock is not None:
                sock.close()
        self._sockets = [None, None]

    def abandon(self) -> None:
        """Let go of a wire inherited by fork(2): the parent's goes on, and a new one may be opened here."""
        self.close()

    def filenos(self) -> Sequence[int]:
        if self._poller is None:
            return ()
        return (self._poller.fileno(),) if hasattr(self._poller, "fileno") else tuple(self._readers)

    # -- requests -------------------------------------------------------------------------------------

    def aside(self) -> Sequence[int]:
        return () if self._aside is None else (self._aside.fileno(),)

    def look_aside(self) -> bool:
        if not self._is_aside or self._aside is None or not self._aside.poll(0):
            return False
        self._leave_requests(False)
        return True

    def _leave_requests(self, to_others: bool) -> None:
        """Whether the processes where somebody listens have the requests to themselves."""
        if to_others is not self._is_aside and self._aside is not None:
            self._is_aside = to_others
            before, after = (self._poller, self._aside) if to_others else (self._aside, self._poller)
            assert before is not None and after is not None
            for fd in self._gsi:
                before.unregister(fd)
                after.register(fd, select.POLLIN)

    def listen(self, service_id: int, local: bytes | None) -> object:
        """See :meth:`Wire.listen`; an address of zeros is any of its family.

        EADDRINUSE where another process listens on the same service id and address.
        """
        if self._poller is None:
            raise cm_error(errno.EBADF, "the wire is not open", "listen")
        key = service_id, local
        if key not in self._listening:
            mailbox = None
            if self._member is not None:
                try:
                    name = bound(self._member.service_name(*key))
                except OSError as error:
                    raise cm_error(
                        error.errno or errno.EIO,
                        f"another process listens on service id {service_id:#x}"
                        if error.errno == errno.EADDRINUSE
                        else f"no mailbox for service id {service_id:#x} ({error.strerror})",
                        "listen",
                    ) from error
                mailbox = Mailbox(name, self._watch, self._unwatch)
            self._listening[key] = _Listening(set(), mailbox)
        token = _Token(key)
        self._listening[key].tokens.add(token)
        self._leave_requests(False)
        return token

    def unlisten(self, token: object) -> None:
        if not isinstance(token, _Token):
            return
        listening = self._listening.get(token.key)
        if listening is None or token not in listening.tokens:
            return
        listening.tokens.discard(token)
        if not listening.tokens:
            del self._listening[token.key]
            if listening.mailbox is not None:
                listening.mailbox.close()

    # -- receiving ------------------------------------------------------------------------------------

    def receive(self, glance: bool = False) -> Sequence[Received]:
        if self._poller is None:
            return ()
        found: list[Received] = []
        self._used = 0
        self._calls += 1
        if self._recent is not None and self._calls % _LOOK_ROUND:
            # Packets keep coming where the last one came from: to try there is quicker than to ask first.
            self._read(self._recent, found)
            if not self._used:
                self._in_a_row = 0
                if glance:
                    return ()
                self._recent = None
        if not self._used:
            ready = self._poller.poll(0)
            if not ready:
                self._in_a_row = 0
                return ()
            for fd, _ in ready:
                # A reader may close what another one of the list reads.
                reader = self._readers.get(fd)
                if reader is not None:
                    reader(found)
        self._in_a_row += 1
        if self.tap is not None:
            for received in found:
                self._tap_incoming(*received)
        return found

    def _read(self, source: _Source, found: list[Received]) -> None:
        # To ask again costs as much as a packet does, so a socket is asked twice only where packets keep coming: a
        # lone message is answered sooner.
        begin, alone = self._used, True
        limit = begin + (_BATCH if self._in_a_row > _STREAM else 1)
        recvmsg_into, info = source.recvmsg_into, source.info
        while self._used < limit:
            if self._used == len(self._buffers):
                view = memoryview(bytearray(65536))
                self._buffers.append(([view], view))
            buffers, view = self._buffers[self._used]
            try:
                size, control, _, remote = recvmsg_into(buffers, _ANCILLARY_SPACE)
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    self.counters[errno_name(error.errno or 0)] += 1
                elif alone and self._used == begin + 1:
                    self._in_a_row = 0  # it was asked again for nothing
                return
            self._used += 1
            self._recent = source.recent
            local = b""
            segment = 0
            for _, kind, value in control:
                if kind == info:
                    local = value[source.start : source.end]
                elif kind == _UDP_GRO:
                    segment = int.from_bytes(value[:4], sys.byteorder)
                    if alone:  # where one train is, there are more
                        alone, limit = False, begin + _TRAINS
                        self._in_a_row = _STREAM + 1
            if size < _SHORTEST or not local:
                self.counters["short"] += 1
                continue
            if segment >= size:
                segment = 0
            data = view[:size]
            received = data, segment, remote, local
            if self._member is None:
                found.append(received)
            elif segment:
                slots = bytes(data[_SLOT::segment])
                if slots.count(self.slot) == len(slots):
                    found.append(received)
                else:
                    self._sort_train(source.is_gsi, received, found)
            elif data[_SLOT] == self.slot or self._is_ours(source.is_gsi, received):
                found.append(received)

    def _sort_train(self, is_gsi: bool, train: Received, found: list[Received]) -> None:
        """Keep our packets of a train, each by itself, and hand on the others."""
        data, segment, remote, local = train
        for start in range(0, len(data), segment):
            packet = data[start : start + segment]
            if len(packet) < _SHORTEST:
                self.counters["short"] += 1
            elif self._is_ours(is_gsi, (packet, 0, remote, local)):
                found.append((packet, 0, remote, local))

    def _is_ours(self, is_gsi: bool, received: Received) -> bool:
        """Whether a single packet is for this process; one that is not is handed on."""
        assert self._member is not None
        packet = received[0]
        slot = slot_of(packet)
        if slot == self.slot and slot != _MULTICAST_SLOT:
            return True
        qpn = qpn_of(packet)
        if qpn == MULTICAST_QPN:
            return not is_gsi  # which come to every socket there is
        if slot == self.slot:
            return True
        if slot:
            if not self._forward((self._member.mailbox_name(slot),), received):
                self.counters["stray"] += 1
            return False
        if qpn != 1:
            self.counters["stray"] += 1
            return False
        if not is_request(packet):
            return True
        service_id = int.from_bytes(packet[SERVICE_ID : SERVICE_ID + 8], "big")
        local = received[3]
        names = []
        for where in (local, bytes(len(local)), None):
            if (service_id, where) in self._listening:
                break
            names.append(self._member.service_name(service_id, where))
        if self._forward(names, received):
            if not self._listening:
                self._leave_requests(True)
            return False
        return True  # nobody listens: then this is as good a process as any to say so

    def _forward(self, names: Sequence[str], received: Received) -> bool:
        """Hand a packet to the first of some mailboxes there is; False where there is none."""
        for name in names:
            delivery = self._post.send(name, received)
            if delivery is not Delivery.NOBODY:
                self.counters["forwarded" if delivery is Delivery.SENT else "forward_full"] += 1
                return True
        return False

    def _tap_incoming(self, data: memoryview, segment: int, remote: tuple[str | int, ...], local: bytes) -> None:
        host, port = remote[:2]
        assert self.tap is not None and isinstance(host, str) and isinstance(port, int)
        family = AF_INET if len(local) == 4 else AF_INET6
        self.tap(False, local, socket.inet_pton(family, host), port, self.port, (data,), segment)

    # -- sending --------------------------------------------------------------------------------------

    def route(self, path: WirePath, traffic_class: int = 0) -> UdpRoute:
        """ValueError where the addresses are of two families."""
        return UdpRoute(path, traffic_class, self.port)

    def can_segment(self) -> int:
        """See :meth:`Wire.can_segment`; a train also has at most 64 packets (``sockets.MAX_SEGMENTS``)."""
        return self._train_bytes

    def send(self, route: WireRoute, buffers: Sequence[Buffer], segment: int = 0) -> bool:
        assert isinstance(route, UdpRoute)
        sock = self._sockets[route._is_ipv6]
        if sock is None:
            self.counters["EAFNOSUPPORT"] += 1
            return False
        if segment:
            if route._singly or not self._train_bytes:
                return self._send_singly(sock, route, buffers, segment)
            control = route._with_segment(segment)
        else:
            control = route._control
        try:
            sock.sendmsg(buffers, control, 0, route._address)
        except OSError as error:
            code = error.errno or 0
            if code == errno.EAGAIN:
                if not self._send_later(sock, route, buffers, control):
                    return False
            elif segment and code in _NO_TRAIN:
                return self._send_cut(code, sock, route, buffers, segment)
            else:
                return self._lost(code)
        if self.tap is not None:
            path = route.path
            self.tap(True, path.local, path.remote, route.source_port, self.port, buffers, segment)
        return True

    def _lost(self, code: int) -> bool:
        self.counters["no_room" if code in (errno.EAGAIN, errno.ENOBUFS) else errno_name(code)] += 1
        return False

    def _send_later(
        self, sock: socket.socket, route: UdpRoute, buffers: Sequence[Buffer], control: sockets.Control
    ) -> bool:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLOUT)
        poll.poll(_PATIENCE_MS)
        try:
            sock.sendmsg(buffers, control, 0, route._address)
        except OSError as error:
            return self._lost(error.errno or 0)
        return True

    def _send_cut(
        self, code: int, sock: socket.socket, route: UdpRoute, buffers: Sequence[Buffer], segment: int
    ) -> bool:
        """Send a train the system refused, and remember that where the path was the reason."""
        sent = self._send_singly(sock, route, buffers, segment)
        # Neither too long a train nor packets too long for the path say anything about the next one.
        too_much = sum(map(len, buffers)) > min(_LONGEST, sockets.MAX_SEGMENTS * segment)
        if sent and code != errno.EMSGSIZE and not too_much:
            route._singly = True
        return sent

    def _send_singly(self, sock: socket.socket, route: UdpRoute, buffers: Sequence[Buffer], segment: int) -> bool:
        self.counters["trains_cut"] += 1
        train = memoryview(b"".join(buffers))
        sent = True
        for index, start in enumerate(range(0, len(train), segment)):
            sent &= self._send_alone(sock, route, route._resealed(train[start : start + segment], index))
        return sent

    def _send_alone(self, sock: socket.socket, route: UdpRoute, buffers: Sequence[Buffer]) -> bool:
        try:
            sock.sendmsg(buffers, route._control, 0, route._address)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return self._lost(error.errno or 0)
            if not self._send_later(sock, route, buffers, route._control):
                return False
        if self.tap is not None:
            path = route.path
            self.tap(True, path.local, path.remote, route.source_port, self.port, buffers, 0)
        return True
