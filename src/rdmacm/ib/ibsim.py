"""Ports of a fabric simulated by ibsim(1), which carries MADs between processes and a subnet manager.

ibsim (versions 0.9 to 0.12 have the same protocol) is a datagram server on abstract Unix sockets, with names such as
``BASE:ctl`` that end with a NUL. A client binds two sockets: one for control requests (:data:`_CONTROL`) and one for
MADs, each in a packet with its source and destination (:data:`_PACKET`). Integers of control messages are in native
byte order, those of packets in network order.

A simulated node accepts several clients, but delivers requests, which includes all CM messages, to one of them only:
the first client that asks for them at CONNECT.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

from rdmacm.address import Gid
from rdmacm.errors import RdmaError, cm_error
from rdmacm.ib.transport import IbPort, ReceivedMad, without_empty_end
from rdmacm.proto.constants import GSI_QPN
from rdmacm.proto.mad import DATA_SIZE, HEADER_SIZE, MAD_SIZE, Mad, MadAddress, Method, MgmtClass
from rdmacm.proto.wire import Buffer
from rdmacm.verbs.enums import PortState

#: ibsim's default for IBSIM_SOCKNAME.
DEFAULT_BASE = "sim"

_MAGIC = 0xDEADBEEF
#: Magic, client, kind of request (0 in a reply: refused), length, data.
_CONTROL = struct.Struct("=4I64s")
#: Data of CONNECT: the number in the names of the client's sockets (in the reply: the client), queue pair, whether the
#: client takes requests, the node's name.
_CONNECT = struct.Struct("=3I32s")
#: Destination LID, source LID (0: ibsim fills it in), destination QPN, source QPN, status, length of the MAD, the MAD.
_PACKET = struct.Struct("!HxxHxxIII4xQ256s")
#: Prefix, LID, the subnet manager's LID, LocalPortNum, LinkWidthActive, state, LMC, LinkSpeedActive, MTU and SL.
_PORT_INFO = struct.Struct("!8x8sHH8xB2xBBxBBB27x")
#: Node type, node GUID.
_NODE_INFO = struct.Struct("!2xB9xQ44x")
_CHANNEL_ADAPTER = 1

#: The most MADs that one call of receive() returns.
_BATCH = 64
#: Seconds that all control requests of one call may take. A running ibsim replies within microseconds.
_CONTROL_TIMEOUT = 2.0
#: Seconds that closing waits until ibsim has taken the MADs sent before.
_FLUSH_TIMEOUT = 0.2
#: A LID that no port has.
_NO_LID = 0
#: Seconds without a reply after which ibsim may be blocked because this client's queue of MADs is full.
_BLOCKED_AFTER = 0.02
#: How many random socket names are tried. All users of a network namespace share the abstract names.
_BIND_ATTEMPTS = 16

_WIDTHS = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
#: LinkSpeedActive and LinkWidthActive to ``ibv_rate``: 2.5, 5 and 10 Gb/s a lane.
_RATES = {
    (1, 1): 2, (1, 2): 5, (1, 4): 3, (1, 8): 6, (1, 12): 4,
    (2, 1): 5, (2, 2): 3, (2, 4): 6, (2, 8): 7, (2, 12): 8,
    (4, 1): 3, (4, 2): 6, (4, 4): 7, (4, 8): 9, (4, 12): 10,
}  # fmt: skip


class _Control(IntEnum):
    """The kinds of control requests."""

    CONNECT = 1
    DISCONNECT = 2
    NODE_INFO = 7
    PORT_INFO = 8
    P_KEYS = 10


class _RefusedError(Exception):
    """ibsim has refused a request; it gives no reason."""


class IbsimTransport:
    """The first port of a simulated node, a :class:`rdmacm.ib.transport.MadTransport`.

    ``base`` is ibsim's IBSIM_SOCKNAME; None for that of this process.

    It must be closed: a client that disappears occupies its node until ibsim fails to send to it. And it must be read:
    ibsim has one thread, which blocks while a client's queue is full.
    """

    reassembles = False

    def __init__(self, node: str, base: str | None = None) -> None:
        self._node = node
        self._base = base or os.environ.get("IBSIM_SOCKNAME") or DEFAULT_BASE
        self.name: str = f"ibsim:{node}" if base is None else f"ibsim:{node}@{base}"
        #: False if another client takes the node's requests, so that this one receives only responses.
        self.carries_cm: bool = True
        self.dropped: dict[str, int] = Counter()
        #: The sockets for control requests and for MADs; None while the port is not open.
        self._control: socket.socket | None = None
        self._datagrams: socket.socket | None = None
        #: The number that ibsim has given this client.
        self._client = 0

    def open(self) -> None:
        """Become a client of the node; of its requests too, if no other client takes them.

        OSError: ECONNREFUSED no such fabric, ENODEV no such node, EUSERS the fabric is full, ETIMEDOUT no reply.
        """
        if self._control is not None:
            return
        node = os.fsencode(self._node)
        if not 0 < len(node) < 32 or b"\0" in node:
            raise self._error(errno.ENODEV, "the name of a simulated node has 1 to 31 bytes", None)
        try:
            number = self._create_sockets()
            try:
                self._client = self._connect(number, node, requests=True)
                self.carries_cm = True
            except _RefusedError:
                self._client = self._connect(number, node, requests=False)
                self.carries_cm = False
            self._connect_datagrams()
        except _RefusedError:
            error = self._refusal(number)
            self.abandon()
            raise error from None
        except BaseException:
            self.abandon()
            raise

    def port(self) -> IbPort:
        """The current attributes of the port; OSError ECONNREFUSED or ETIMEDOUT if ibsim has ended or is stopped."""
        deadline = time.monotonic() + _CONTROL_TIMEOUT
        try:
            node_type, node_guid = _NODE_INFO.unpack(self._request(_Control.NODE_INFO, b"", deadline))
            prefix, lid, sm_lid, number, width, state, lmc, speed, mtu_sl = _PORT_INFO.unpack(
                self._request(_Control.PORT_INFO, b"\0", deadline)
            )
            pkeys = struct.unpack("!32H", self._request(_Control.P_KEYS, b"", deadline))
        except _RefusedError:
            gone = self._error(errno.ENODEV, "ibsim has dropped this client", "opening the port again")
            raise gone from None
        # ibsim does not report the port GUID. On an adapter it is the node GUID plus the port number, on a switch the
        # node GUID.
        port_guid = node_guid + number if node_type == _CHANNEL_ADAPTER else node_guid
        return IbPort(
            device=self._node,
            port_num=number,
            node_guid=node_guid,
            port_guid=port_guid,
            gids=(Gid(prefix + port_guid.to_bytes(8, "big")),),
            pkeys=without_empty_end(pkeys, lambda pkey: not pkey),
            state=_state(state & 0xF),
            lid=lid,
            lmc=lmc & 0x7,
            sm_lid=sm_lid,
            sm_sl=mtu_sl & 0xF,
            active_mtu=mtu_sl >> 4,
            rate=_RATES.get((speed >> 4, _WIDTHS.get(width, 0)), 0),
        )

    def fileno(self) -> int:
        """The descriptor of the socket for MADs; -1 before open()."""
        return -1 if self._datagrams is None else self._datagrams.fileno()

    def send(self, address: MadAddress, mad: Buffer) -> None:
        """Send a MAD of 256 bytes. ibsim replaces the upper 16 bits of a request's transaction id with the client."""
        if len(mad) != MAD_SIZE:
            raise ValueError(f"a MAD has {MAD_SIZE} bytes, not {len(mad)}")
        if self._datagrams is None:
            self.dropped["closed"] += 1
            return
        packet = _PACKET.pack(address.lid, 0, address.qpn, GSI_QPN, 0, MAD_SIZE, bytes(mad))
        try:
            self._datagrams.send(packet)
        except BlockingIOError:
            self.dropped["send queue full"] += 1
        except OSError:
            self.dropped["send"] += 1

    def receive(self) -> Sequence[ReceivedMad]:
        """Up to 64 MADs. A MAD sent that could not be delivered comes back and is counted as ``undeliverable``."""
        received: list[ReceivedMad] = []
        if self._datagrams is None:
            return received
        for _ in range(_BATCH):
            try:
                packet = self._datagrams.recv(_PACKET.size + 1)
            except OSError:  # nothing more, or ibsim has ended, which port() and send() report
                break
            one = self._unpack(packet)
            if one is not None:
                received.append(one)
        return received

    def close(self) -> None:
        """Leave the node, once ibsim has taken the MADs sent before."""
        if self._control is not None:
            self._flush()
            # If ibsim has ended, there is no node to leave.
            with suppress(OSError, _RefusedError):
                self._request(_Control.DISCONNECT, b"", time.monotonic() + _CONTROL_TIMEOUT)
        self.abandon()

    def abandon(self) -> None:
        """Close the sockets. The node stays occupied, by the parent process or until ibsim notices."""
        for one in (self._control, self._datagrams):
            if one is not None:
                one.close()
        self._control = self._datagrams = None

    # -- MADs -------------------------------------------------------------------------------------------------

    def _unpack(self, packet: bytes) -> ReceivedMad | None:
        if len(packet) != _PACKET.size:
            self.dropped["malformed"] += 1
            return None
        _, source_lid, qpn, source_qpn, status, length, mad = _PACKET.unpack(packet)
        if status:
            self.dropped["undeliverable"] += 1
        elif not HEADER_SIZE <= length <= MAD_SIZE:
            self.dropped["malformed"] += 1
        elif qpn != GSI_QPN:
            self.dropped["queue pair"] += 1
        else:
            # Bytes after the length are uninitialised memory of the sender.
            return MadAddress(source_lid, qpn=source_qpn), mad[:length]
        return None

    def _flush(self) -> None:
        """Wait until ibsim has taken the MADs sent before, because it would read DISCONNECT first.

        A MAD to a LID that no port has comes back once those before it have been delivered.
        """
        datagrams = self._datagrams
        if datagrams is None:
            return
        probe = Mad(MgmtClass.COM_MGT, 2, Method.SEND, 0, 0, data=os.urandom(DATA_SIZE)).pack()
        poll = select.poll()
        poll.register(datagrams, select.POLLIN)
        deadline = time.monotonic() + _FLUSH_TIMEOUT
        with suppress(OSError):
            datagrams.send(_PACKET.pack(_NO_LID, 0, GSI_QPN, GSI_QPN, 0, MAD_SIZE, probe))
            while (left := deadline - time.monotonic()) > 0 and poll.poll(1000 * left):
                if datagrams.recv(_PACKET.size).endswith(probe[HEADER_SIZE:]):
                    return

    # -- control ----------------------------------------------------------------------------------------------

    def _address(self, name: str) -> bytes:
        """The address of a socket of this fabric in the abstract namespace."""
        return b"\0" + os.fsencode(f"{self._base}:{name}") + b"\0"

    def _create_sockets(self) -> int:
        """Create both sockets; returns the number in their names."""
        for _ in range(_BIND_ATTEMPTS):
            # Random, since a counter or process id would repeat in children of fork() and other PID namespaces.
            number = int.from_bytes(os.urandom(4), "big") >> 1
            try:
                self._control = self._bind_socket(f"ctl{number}")
                self._datagrams = self._bind_socket(f"in{number}")
            except OSError as error:
                self.abandon()
                if error.errno is None:  # the name is too long for an address
                    raise self._error(
                        errno.EINVAL,
                        f"IBSIM_SOCKNAME {self._base!r} is too long for a socket",
                        "a shorter name",
                    ) from None
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return number
        raise self._error(errno.EADDRINUSE, "no free name was found for the sockets", None)

    def _bind_socket(self, name: str) -> socket.socket:
        """A datagram socket with a name."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            made.bind(self._address(name))
        except BaseException:
            made.close()
            raise
        return made

    def _connect(self, number: int, node: bytes, *, requests: bool) -> int:
        """Become a client of the node (an empty name: of any node); returns the client's number."""
        assert self._control is not None
        try:
            self._control.connect(self._address("ctl"))
        except ConnectionRefusedError:
            raise self._no_fabric() from None
        self._client = 0
        data = _CONNECT.pack(number, 0, requests, node)
        reply = self._request(_Control.CONNECT, data, time.monotonic() + _CONTROL_TIMEOUT)
        client: int = _CONNECT.unpack_from(reply)[0]
        return client

    def _connect_datagrams(self) -> None:
        """Connect the socket for MADs to ibsim's socket for this client."""
        assert self._datagrams is not None
        try:
            self._datagrams.connect(self._address(f"out{self._client}"))
        except ConnectionRefusedError:
            raise self._no_fabric() from None
        self._datagrams.setblocking(False)

    def _refusal(self, number: int) -> RdmaError:
        """The error for a refused CONNECT. If any other node is free, the node does not exist."""
        if not self._has_room(number):
            return self._error(errno.EUSERS, "this fabric has as many clients as ibsim allows (10)", "closing one")
        return self._error(
            errno.ENODEV,
            f"there is no node {self._node!r} in this fabric",
            "a name from ibsim's file, such as HostA; upper and lower case differ",
        )

    def _has_room(self, number: int) -> bool:
        """Whether the fabric accepts a client at any node."""
        try:
            self._client = self._connect(number, b"", requests=False)
            self._request(_Control.DISCONNECT, b"", time.monotonic() + _CONTROL_TIMEOUT)
        except (_RefusedError, OSError):
            return False
        return True

    def _request(self, kind: _Control, data: bytes, deadline: float) -> bytes:
        """Send a control request; returns the 64 bytes of data in the reply."""
        control = self._control
        if control is None:
            raise self._error(errno.ENOTCONN, "the port is not open", None)
        control.setblocking(False)
        _drain(control)  # the replies to requests that were given up
        control.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            control.send(_CONTROL.pack(_MAGIC, self._client, kind, len(data), data))
        except TimeoutError:
            raise self._no_reply() from None
        except OSError:  # ECONNREFUSED at first, then ENOTCONN
            raise self._no_fabric() from None
        while True:
            self._await_reply(control, deadline)
            reply = control.recv(_CONTROL.size + 1)
            if len(reply) != _CONTROL.size:
                continue
            magic, _, reply_kind, _, reply_data = _CONTROL.unpack(reply)
            if magic == _MAGIC and reply_kind == kind:
                return bytes(reply_data)
            if magic == _MAGIC and reply_kind == 0:
                raise _RefusedError

    def _await_reply(self, control: socket.socket, deadline: float) -> None:
        """Wait until the control socket is readable; ETIMEDOUT at ``deadline`` (seconds of time.monotonic())."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        while not poll.poll(1000 * max(0.0, min(_BLOCKED_AFTER, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise self._no_reply()
            # ibsim may be blocked on the full queue of MADs that were not read.
            if self._datagrams is not None and (count := _drain(self._datagrams)):
                self.dropped["not read"] += count

    # -- errors -----------------------------------------------------------------------------------------------

    def _error(self, number: int, text: str, hint: str | None) -> RdmaError:
        return cm_error(number, text, "open_device", self.name, hint)

    def _no_fabric(self) -> RdmaError:
        return self._error(
            errno.ECONNREFUSED,
            f"no ibsim serves {self._base!r}",
            f"checking that ibsim runs in this network namespace, with IBSIM_SOCKNAME={self._base}",
        )

    def _no_reply(self) -> RdmaError:
        return self._error(
            errno.ETIMEDOUT, f"ibsim does not reply within {_CONTROL_TIMEOUT:g} s", "checking that it is not stopped"
        )


def _drain(one: socket.socket) -> int:
    """Drop what has arrived at a socket, up to 64 datagrams; returns their number."""
    for count in range(_BATCH):
        try:
            one.recv(_PACKET.size, socket.MSG_DONTWAIT)
        except OSError:
            return count
    return _BATCH


def _state(code: int) -> PortState:
    try:
        return PortState(code)
    except ValueError:
        return PortState.NOP
