"""Ports of a fabric simulated by ibsim(1), which carries management datagrams between processes and a subnet manager.

ibsim (0.9 to 0.12 speak alike) is a server of datagrams over abstract Unix sockets, named ``BASE:ctl`` with a NUL at
the end. A client binds two sockets of its own: with one it asks (:data:`_CONTROL`), through the other come and go
datagrams, each in a packet that says from where to where (:data:`_PACKET`). Integers before the datagram are the
machine's, addresses are in network order.

A simulated node takes several clients, but gives requests, which all of a connection manager's messages are, to
one of them alone, the first that asks for them at CONNECT.
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
from rdmacm.ib.transport import Arrived, IbPort, without_empty_end
from rdmacm.proto.mad import DATA_SIZE, MAD_SIZE, Mad, MadAddress, Method, MgmtClass
from rdmacm.proto.wire import Buffer
from rdmacm.verbs.enums import PortState

__all__ = ["DEFAULT_BASE", "IbsimTransport"]

#: What ibsim itself takes where IBSIM_SOCKNAME is not set.
DEFAULT_BASE = "sim"

_MAGIC = 0xDEADBEEF
#: Magic, client, what is asked (0 in an answer: refused), length, data.
_CONTROL = struct.Struct("=4I64s")
#: Data of CONNECT: the number in the names of the client's sockets (in the answer: the client), queue pair, whether
#: requests are wanted, the node's name.
_CONNECT = struct.Struct("=3I32s")
#: Destination LID, source LID (0: ibsim fills it in), their queue pairs, status, the datagram's length, the datagram.
_PACKET = struct.Struct("!HxxHxxIII4xQ256s")
#: Prefix, LID, the subnet manager's LID, LocalPortNum, LinkWidthActive, state, LMC, LinkSpeedActive, MTU and SL.
_PORT_INFO = struct.Struct("!8x8sHH8xB2xBBxBBB27x")
#: Node type, node GUID.
_NODE_INFO = struct.Struct("!2xB9xQ44x")
_CHANNEL_ADAPTER = 1

_GSI_QPN = 1
_HEADER_SIZE = 24
#: Datagrams that one call of receive() takes in.
_BATCH = 64
#: Seconds for all questions of one call together: an ibsim that runs answers in microseconds.
_PATIENCE = 2.0
#: Seconds that closing waits for what was sent to be delivered.
_FLUSHING = 0.2
#: No port has this LID.
_NOWHERE = 0
#: Seconds after which an answer is so late that ibsim may be waiting for us.
_SUSPICION = 0.02
#: Abstract names are one space for all users of a network namespace, so a number drawn may be taken.
_DRAWS = 16

_WIDTHS = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
#: LinkSpeedActive and LinkWidthActive to ``ibv_rate``: 2.5, 5 and 10 Gb/s a lane.
_RATES = {
    (1, 1): 2, (1, 2): 5, (1, 4): 3, (1, 8): 6, (1, 12): 4,
    (2, 1): 5, (2, 2): 3, (2, 4): 6, (2, 8): 7, (2, 12): 8,
    (4, 1): 3, (4, 2): 6, (4, 4): 7, (4, 8): 9, (4, 12): 10,
}  # fmt: skip


class _Control(IntEnum):
    """What a client asks."""

    CONNECT = 1
    DISCONNECT = 2
    NODE_INFO = 7
    PORT_INFO = 8
    P_KEYS = 10


class _RefusedError(Exception):
    """ibsim says no, and not why."""


class IbsimTransport:
    """The first port of a simulated node, a :class:`rdmacm.ib.transport.MadTransport`.

    ``base`` is what ibsim's IBSIM_SOCKNAME is; None: this process's.
    Always close it: a client that only goes away keeps its place and its node until somebody sends it something.
    And read it: ibsim, which has one thread, waits for a client with a full queue before it serves anybody else.
    """

    reassembles = False

    def __init__(self, node: str, base: str | None = None) -> None:
        self._node = node
        self._base = base or os.environ.get("IBSIM_SOCKNAME") or DEFAULT_BASE
        self.name = f"ibsim:{node}" if base is None else f"ibsim:{node}@{base}"
        #: False where another process has the node's requests: then there are answers only.
        self.carries_cm = True
        self.dropped: dict[str, int] = Counter()
        self._control: socket.socket | None = None
        self._datagrams: socket.socket | None = None
        self._client = 0

    def open(self) -> None:
        """Join the node.

        OSError: ECONNREFUSED no such fabric, ENODEV no such node, EUSERS the fabric is full, ETIMEDOUT no answer.
        """
        if self._control is not None:
            return
        node = self._node.encode()
        if not 0 < len(node) < 32 or b"\0" in node:
            raise self._error(errno.ENODEV, "the name of a simulated node has 1 to 31 bytes", None)
        try:
            number = self._bind()
            try:
                self._client = self._connect(number, node, requests=True)
                self.carries_cm = True
            except _RefusedError:
                self._client = self._connect(number, node, requests=False)
                self.carries_cm = False
            self._join()
        except _RefusedError:
            error = self._refusal(number)
            self.abandon()
            raise error from None
        except BaseException:
            self.abandon()
            raise

    def port(self) -> IbPort:
        """The port as ibsim has it now; OSError: ECONNREFUSED or ETIMEDOUT once ibsim is gone or stands still."""
        deadline = time.monotonic() + _PATIENCE
        try:
            node_type, node_guid = _NODE_INFO.unpack(self._ask(_Control.NODE_INFO, b"", deadline))
            prefix, lid, sm_lid, number, width, state, lmc, speed, mtu_sl = _PORT_INFO.unpack(
                self._ask(_Control.PORT_INFO, b"\0", deadline)
            )
            pkeys = struct.unpack("!32H", self._ask(_Control.P_KEYS, b"", deadline))
        except _RefusedError:
            gone = self._error(errno.ENODEV, "ibsim does not know this client any more", "to open the port again")
            raise gone from None
        # ibsim tells a port's GUID nowhere: an adapter's are its own and the port's number, a switch has its own.
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
        """The socket datagrams come through; -1 before open()."""
        return -1 if self._datagrams is None else self._datagrams.fileno()

    def send(self, address: MadAddress, mad: Buffer) -> None:
        """Send 256 bytes. Of the transaction id of a request, ibsim replaces the upper 16 bits with the client."""
        if len(mad) != MAD_SIZE:
            raise ValueError(f"a MAD has {MAD_SIZE} bytes, not {len(mad)}")
        if self._datagrams is None:
            self.dropped["closed"] += 1
            return
        packet = _PACKET.pack(address.lid, 0, address.qpn, _GSI_QPN, 0, MAD_SIZE, bytes(mad))
        try:
            self._datagrams.send(packet)
        except BlockingIOError:
            self.dropped["send queue full"] += 1
        except OSError:
            self.dropped["send"] += 1

    def receive(self) -> Sequence[Arrived]:
        """Up to 64 datagrams. One of our own that could not be delivered is counted as ``undeliverable``."""
        arrived: list[Arrived] = []
        if self._datagrams is None:
            return arrived
        for _ in range(_BATCH):
            try:
                packet = self._datagrams.recv(_PACKET.size + 1)
            except OSError:  # nothing more, or ibsim is gone, which port() and send() tell
                break
            one = self._arrived(packet)
            if one is not None:
                arrived.append(one)
        return arrived

    def close(self) -> None:
        """Give the node back, once ibsim has taken what was sent."""
        if self._control is not None:
            self._flush()
            # Where there is nobody to give it back to, it is nobody's.
            with suppress(OSError, _RefusedError):
                self._ask(_Control.DISCONNECT, b"", time.monotonic() + _PATIENCE)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the sockets; the node stays taken, by the parent process or until ibsim finds nobody there."""
        for one in (self._control, self._datagrams):
            if one is not None:
                one.close()
        self._control = self._datagrams = None

    # -- datagrams --------------------------------------------------------------------------------------------

    def _arrived(self, packet: bytes) -> Arrived | None:
        if len(packet) != _PACKET.size:
            self.dropped["malformed"] += 1
            return None
        _, source_lid, qpn, source_qpn, status, length, mad = _PACKET.unpack(packet)
        if status:
            self.dropped["undeliverable"] += 1
        elif not _HEADER_SIZE <= length <= MAD_SIZE:
            self.dropped["malformed"] += 1
        elif qpn != _GSI_QPN:
            self.dropped["queue pair"] += 1
        else:
            # Beyond the length is what happened to lie in the sender's memory.
            return MadAddress(source_lid, qpn=source_qpn), mad[:length]
        return None

    def _flush(self) -> None:
        """Wait until ibsim has taken what was sent: DISCONNECT, which it reads first, would overtake it.

        A datagram to nowhere comes back when those before it have been delivered.
        """
        datagrams = self._datagrams
        if datagrams is None:
            return
        probe = Mad(MgmtClass.COM_MGT, 2, Method.SEND, 0, 0, data=os.urandom(DATA_SIZE)).pack()
        poll = select.poll()
        poll.register(datagrams, select.POLLIN)
        deadline = time.monotonic() + _FLUSHING
        with suppress(OSError):
            datagrams.send(_PACKET.pack(_NOWHERE, 0, _GSI_QPN, _GSI_QPN, 0, MAD_SIZE, probe))
            while (left := deadline - time.monotonic()) > 0 and poll.poll(1000 * left):
                if datagrams.recv(_PACKET.size).endswith(probe[_HEADER_SIZE:]):
                    return

    # -- control ----------------------------------------------------------------------------------------------

    def _address(self, name: str) -> bytes:
        return b"\0" + f"{self._base}:{name}".encode() + b"\0"

    def _bind(self) -> int:
        """Make both sockets; the number in their names."""
        for _ in range(_DRAWS):
            # Not a count or a process id: children of fork() and other PID namespaces would draw the same.
            number = int.from_bytes(os.urandom(4), "big") >> 1
            try:
                self._control = self._bound(f"ctl{number}")
                self._datagrams = self._bound(f"in{number}")
            except OSError as error:
                self.abandon()
                if error.errno is None:  # the name does not fit into an address
                    raise self._error(errno.EINVAL, f"the name {self._base!r} is too long", "a shorter one") from None
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return number
        raise self._error(errno.EADDRINUSE, "every name drawn for the sockets is taken", None)

    def _bound(self, name: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            made.bind(self._address(name))
        except BaseException:
            made.close()
            raise
        return made

    def _connect(self, number: int, node: bytes, *, requests: bool) -> int:
        """Become a client on the node (an empty name: on any); which."""
        assert self._control is not None
        try:
            self._control.connect(self._address("ctl"))
        except ConnectionRefusedError:
            raise self._no_fabric() from None
        self._client = 0
        wanted = _CONNECT.pack(number, 0, requests, node)
        answer = self._ask(_Control.CONNECT, wanted, time.monotonic() + _PATIENCE)
        client: int = _CONNECT.unpack_from(answer)[0]
        return client

    def _join(self) -> None:
        """Receive from ibsim's socket for this client, and from no other."""
        assert self._datagrams is not None
        try:
            self._datagrams.connect(self._address(f"out{self._client}"))
        except ConnectionRefusedError:
            raise self._no_fabric() from None
        self._datagrams.setblocking(False)

    def _refusal(self, number: int) -> RdmaError:
        """Why the node was refused: found out by asking for any."""
        if not self._has_room(number):
            return self._error(errno.EUSERS, "this fabric has as many clients as ibsim takes (10)", "to close one")
        return self._error(
            errno.ENODEV,
            f"there is no node {self._node!r} in this fabric",
            "a name from ibsim's file, such as HostA; upper and lower case differ",
        )

    def _has_room(self, number: int) -> bool:
        try:
            self._client = self._connect(number, b"", requests=False)
            self._ask(_Control.DISCONNECT, b"", time.monotonic() + _PATIENCE)
        except (_RefusedError, OSError):
            return False
        return True

    def _ask(self, kind: _Control, data: bytes, deadline: float) -> bytes:
        """The 64 bytes of the answer."""
        control = self._control
        if control is None:
            raise self._error(errno.ENOTCONN, "the port is not open", None)
        self._forget_answers(control)
        control.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            control.send(_CONTROL.pack(_MAGIC, self._client, kind, len(data), data))
        except TimeoutError:
            raise self._silence() from None
        except OSError:  # ECONNREFUSED at first, then ENOTCONN
            raise self._no_fabric() from None
        while True:
            self._await_answer(control, deadline)
            answer = control.recv(_CONTROL.size + 1)
            if len(answer) != _CONTROL.size:
                continue
            magic, _, answered, _, found = _CONTROL.unpack(answer)
            if magic == _MAGIC and answered == kind:
                return bytes(found)
            if magic == _MAGIC and answered == 0:
                raise _RefusedError

    @staticmethod
    def _forget_answers(control: socket.socket) -> None:
        """Of questions that were given up."""
        control.setblocking(False)
        for _ in range(_BATCH):
            try:
                control.recv(_CONTROL.size)
            except OSError:
                return

    def _await_answer(self, control: socket.socket, deadline: float) -> None:
        poll = select.poll()
        poll.register(control, select.POLLIN)
        while not poll.poll(1000 * max(0.0, min(_SUSPICION, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise self._silence()
            self._make_room()

    def _make_room(self) -> None:
        """Drop datagrams nobody has fetched: ibsim may be waiting to add to them, and serves nobody so long."""
        if self._datagrams is None:
            return
        for _ in range(_BATCH):
            try:
                self._datagrams.recv(_PACKET.size, socket.MSG_DONTWAIT)
            except OSError:
                return
            self.dropped["not fetched"] += 1

    # -- errors -----------------------------------------------------------------------------------------------

    def _error(self, number: int, text: str, hint: str | None) -> RdmaError:
        return cm_error(number, text, "open_device", self.name, hint)

    def _no_fabric(self) -> RdmaError:
        return self._error(
            errno.ECONNREFUSED,
            f"no ibsim serves {self._base!r}",
            f"whether ibsim runs in this network namespace, with IBSIM_SOCKNAME={self._base}",
        )

    def _silence(self) -> RdmaError:
        return self._error(errno.ETIMEDOUT, f"ibsim does not answer within {_PATIENCE:g} s", "whether it is stopped")


def _state(code: int) -> PortState:
    try:
        return PortState(code)
    except ValueError:
        return PortState.NOP
