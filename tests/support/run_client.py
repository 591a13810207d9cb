"""A program's side of the protocol of ``rdmacm run``, for tests: what the library in C does, in Python."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from socket import AF_INET
from typing import Any, NamedTuple, Self

from rdmacm.address import InetAddr
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.kernel import abi
from rdmacm.proto.user_cm import Command, Query
from rdmacm.provider.connparam import ConnParam, Ece
from rdmacm.run import protocol
from rdmacm.run.protocol import Request
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import QPAttrMask, QPState

SECONDS = 10.0
NO_ECE = Ece(0)


class Client:
    """One connection of a program to the server."""

    def __init__(self, path: str, *, hello: bool = True) -> None:
        #: Closed with this one.
        self.others: list[socket.socket] = []
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(SECONDS)
        self.sock.connect(path)
        if hello:
            answer = self.ask(Request.HELLO, protocol.HELLO.pack(protocol.VERSION, os.getpid()))
            assert protocol.WELCOME.unpack(answer)[0] == protocol.VERSION

    def ask_all(
        self, kind: int, body: bytes = b"", channel: int = 0, fds: tuple[int, ...] = ()
    ) -> tuple[int, bytes, list[int]]:
        """Make a request: the error, the body and the descriptors of the reply."""
        self.sock.sendmsg(
            [protocol.REQUEST.pack(kind, channel), body],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [],
        )
        data, control, _, _ = self.sock.recvmsg(protocol.MOST, socket.CMSG_SPACE(16))
        assert len(data) >= protocol.REPLY.size, "the server has closed the connection"
        got = array.array("i")
        for _, _, value in control:
            got.frombytes(value)
        return protocol.REPLY.unpack_from(data)[0], data[protocol.REPLY.size :], list(got)

    def ask(self, kind: int, body: bytes = b"", channel: int = 0) -> bytes:
        """Make a request that succeeds; OSError with the errno of one that does not."""
        error, answer, fds = self.ask_all(kind, body, channel)
        for fd in fds:
            os.close(fd)
        if error:
            raise OSError(error, os.strerror(error) if error > 0 else "getaddrinfo")
        return answer

    def devices(self) -> dict[str, tuple[int, list[bytes]]]:
        """Index and GIDs of the devices, by name."""
        body = self.ask(Request.DEVICES)
        (count,) = protocol.DEVICES.unpack_from(body)
        at, found = protocol.DEVICES.size, {}
        for _ in range(count):
            name, _, _, index, _, _, _, _, _, gids, _ = protocol.DEVICE.unpack_from(body, at)
            at += protocol.DEVICE.size
            rows = [protocol.GID.unpack_from(body, at + row * protocol.GID.size)[0] for row in range(gids)]
            at += gids * protocol.GID.size
            found[name.rstrip(b"\0").decode()] = index, rows
        assert at == len(body)
        return found

    def slot(self) -> tuple[tuple[int, int, int, int], list[socket.socket]]:
        """The fields of a slot, and its sockets."""
        error, body, fds = self.ask_all(Request.SLOT)
        if error:
            raise OSError(error, os.strerror(error))
        first, count, port, families = protocol.SLOT.unpack(body)
        found = [socket.socket(fileno=fd) for fd in fds]
        self.others.extend(found)
        return (first, count, port, families), found

    def close(self) -> None:
        """Close the connection."""
        for sock in (*self.others, self.sock):
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Event(NamedTuple):
    """An event as a channel has it."""

    uid: int
    id: int
    type: CmEventType
    status: int
    param: bytes
    ece: Ece


class Channel:
    """An event channel."""

    def __init__(self, client: Client) -> None:
        self.client = client
        error, body, fds = client.ask_all(Request.CHANNEL_OPEN)
        assert not error
        self.sock = socket.socket(fileno=fds[0])
        (self.number,) = protocol.NUMBER.unpack(body)
        assert self.sock.getblocking()
        client.others.append(self.sock)
        self.sock.settimeout(SECONDS)

    def command(self, command: Command, body: bytes) -> bytes:
        """Execute a command of rdma_cm."""
        return self.client.ask(command, body, self.number)

    def get_event(self) -> Event:
        """The next event."""
        event = abi.unpack_event(self.sock.recv(1024))
        return Event(event.uid, event.id, CmEventType(event.type), event.status, event.param, event.ece)

    def expect(self, kind: CmEventType, status: int = 0) -> Event:
        """The next event, which is of this kind."""
        event = self.get_event()
        assert (event.type, event.status) == (kind, status)
        return event

    def is_readable(self, seconds: float = 0.0) -> bool:
        """Whether there is an event within a time."""
        return bool(select.select([self.sock], [], [], seconds)[0])

    def close(self) -> None:
        """Close the channel, with its ids."""
        self.client.ask(Request.CHANNEL_CLOSE, channel=self.number)
        self.sock.close()


class Id:
    """An id of a program."""

    def __init__(self, channel: Channel, uid: int, space: int = PortSpace.TCP, *, number: int | None = None) -> None:
        self.channel = channel
        self.uid = uid
        if number is None:
            number = abi.unpack_number(channel.command(Command.CREATE_ID, abi.create_id(0, uid, space, 0)))
        self.number = number

    def bind(self, host: str, port: int = 0) -> None:
        """BIND to an IPv4 address."""
        self.channel.command(Command.BIND, abi.bind(self.number, inet(host, port)))

    def resolve_addr(self, host: str, port: int, timeout_ms: int = 2000) -> None:
        """RESOLVE_ADDR without a source."""
        body = abi.resolve_addr(self.number, None, inet(host, port), timeout_ms)
        self.channel.command(Command.RESOLVE_ADDR, body)

    def resolve_route(self, timeout_ms: int = 2000) -> None:
        """RESOLVE_ROUTE."""
        self.channel.command(Command.RESOLVE_ROUTE, abi.pair(self.number, timeout_ms))

    def resolve(self, host: str, port: int) -> None:
        """Resolve address and route."""
        self.resolve_addr(host, port)
        self.channel.expect(CmEventType.ADDR_RESOLVED)
        self.resolve_route()
        self.channel.expect(CmEventType.ROUTE_RESOLVED)

    def listen(self, host: str, backlog: int = 0) -> int:
        """BIND and LISTEN; returns the port."""
        self.bind(host)
        self.channel.command(Command.LISTEN, abi.pair(self.number, backlog))
        source = self.addresses().source
        assert isinstance(source, InetAddr)
        return source.port

    def connect(self, param: ConnParam, ece: Ece = NO_ECE) -> None:
        """CONNECT."""
        self.channel.command(Command.CONNECT, abi.connect(self.number, param, ece))

    def accept(self, param: ConnParam | None, uid: int = 0, ece: Ece = NO_ECE) -> None:
        """ACCEPT; without parameters it confirms the peer's reply."""
        self.channel.command(Command.ACCEPT, abi.accept(self.number, uid, param, ece))
        if param is not None:
            self.uid = uid

    def disconnect(self) -> None:
        """DISCONNECT."""
        self.channel.command(Command.DISCONNECT, abi.only_id(self.number))

    def destroy(self) -> int:
        """DESTROY_ID; returns how many events were read."""
        return abi.unpack_number(self.channel.command(Command.DESTROY_ID, abi.destroy_id(0, self.number)))

    def addresses(self, option: Query = Query.ADDR) -> abi.Addresses:
        """QUERY of addresses, or GIDs."""
        return abi.unpack_addresses(self.channel.command(Command.QUERY, abi.query(0, self.number, option)))

    def init_qp_attr(self, state: QPState) -> tuple[QPAttr, QPAttrMask]:
        """INIT_QP_ATTR."""
        attr, payload = QPAttr(), abi.init_qp_attr(0, self.number, state)
        return attr, abi.unpack_qp_attr(self.channel.command(Command.INIT_QP_ATTR, payload), attr)

    def set_option(self, level: int, name: int, value: bytes) -> None:
        """SET_OPTION."""
        body = abi.set_option(0, len(value), self.number, level, name) + value
        self.channel.command(Command.SET_OPTION, body)


def inet(host: str, port: int) -> InetAddr:
    """An IPv4 address."""
    return InetAddr(AF_INET, socket.inet_aton(host), port)


def fields(layout: struct.Struct, data: bytes) -> tuple[Any, ...]:
    """The fields of a structure."""
    assert len(data) == layout.size
    return layout.unpack(data)
