"""The kernel's connection manager without a kernel: its files, for connections between ids of one process."""

from __future__ import annotations

import errno
import os
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from socket import AF_INET, inet_pton

from rdmacm.address import Address, Gid, InetAddr, SockAddrIB, unpack_address
from rdmacm.constants import CmEventType
from rdmacm.kernel import abi
from rdmacm.kernel.abi import Command, Query
from rdmacm.proto import user_cm
from rdmacm.proto.sa import PATH_FLAGS, PathData, PathRecord
from rdmacm.verbs.enums import QPAttrMask, QPState

__all__ = ["FakeRdmaCm"]

_GUID = 0x0002C9030000AB00
_MASKS = {
    QPState.INIT: QPAttrMask.STATE | QPAttrMask.PKEY_INDEX | QPAttrMask.PORT | QPAttrMask.ACCESS_FLAGS,
    QPState.RTR: QPAttrMask.STATE
    | QPAttrMask.AV
    | QPAttrMask.PATH_MTU
    | QPAttrMask.DEST_QPN
    | QPAttrMask.RQ_PSN
    | QPAttrMask.MAX_DEST_RD_ATOMIC
    | QPAttrMask.MIN_RNR_TIMER,
    QPState.RTS: QPAttrMask.STATE
    | QPAttrMask.TIMEOUT
    | QPAttrMask.RETRY_CNT
    | QPAttrMask.RNR_RETRY
    | QPAttrMask.SQ_PSN
    | QPAttrMask.MAX_QP_RD_ATOMIC,
}


@dataclass(eq=False)
class _Id:
    """One id of the kernel."""

    file: _File
    uid: int
    number: int
    local: InetAddr | None = None
    remote: InetAddr | None = None
    peer: _Id | None = None
    #: CONNECT_REQUEST: the parameters, until the user has accepted.
    param: bytes = b""
    reported: int = 0
    is_disconnected: bool = False


class FakeRdmaCm:
    """What all files share. ``open`` stands in for :class:`rdmacm.kernel.ucma.Ucma`.

    ``device_index``: the kernel's index of the device that all ids are bound to. Its only port has the address
    ``host``.
    """

    def __init__(self, host: str, device_index: int = 0) -> None:
        self.host = InetAddr(AF_INET, inet_pton(AF_INET, host))
        self.device_index = device_index
        self.ids: dict[int, _Id] = {}
        self.numbers = count(1)
        self.ports = count(40000)
        self.listeners: dict[int, _Id] = {}

    def open(self) -> _File:
        """Open the device file."""
        return _File(self)


class _File:
    """An open file."""

    def __init__(self, kernel: FakeRdmaCm) -> None:
        self._kernel = kernel
        self._events: deque[bytes] = deque()
        self.fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def preset(self, offset: int, value: int) -> None:
        """See :meth:`rdmacm.kernel.ucma.Ucma.preset`: this kernel sets every field."""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def add(self, to: _Id, kind: CmEventType, param: bytes = b"", number: int | None = None, status: int = 0) -> None:
        """Add an event."""
        to.reported += 1
        made = user_cm.EVENT_RESP.pack(to.uid, to.number if number is None else number, kind, status, param, 0, 0)
        self._events.append(made)
        os.eventfd_write(self.fd, 1)

    def tell(self, command: Command, payload: bytes) -> None:
        kernel = self._kernel
        match command:
            case Command.BIND:
                number, size, address = user_cm.BIND.unpack(payload)
                self._bind(kernel.ids[number], unpack_address(address[:size]))
            case Command.RESOLVE_ADDR:
                number, _, _, size, _, address = user_cm.RESOLVE_ADDR.unpack(payload)
                found = kernel.ids[number]
                if found.local is None:
                    self._bind(found, None)
                remote = unpack_address(address[:size])
                assert isinstance(remote, InetAddr)
                found.remote = remote
                self.add(found, CmEventType.ADDR_RESOLVED)
            case Command.RESOLVE_ROUTE:
                self.add(kernel.ids[user_cm.LISTEN.unpack(payload)[0]], CmEventType.ROUTE_RESOLVED)
            case Command.LISTEN:
                listener = kernel.ids[user_cm.LISTEN.unpack(payload)[0]]
                assert listener.local is not None
                kernel.listeners[listener.local.port] = listener
            case Command.CONNECT:
                param, number, _, _ = user_cm.CONNECT.unpack(payload)
                self._connect(kernel.ids[number], param)
            case Command.ACCEPT:
                uid, param, number, _, _ = user_cm.ACCEPT.unpack(payload)
                found = kernel.ids[number]
                found.uid = uid
                peer = found.peer
                assert peer is not None
                if user_cm.CONN_PARAM.unpack(param)[-1]:
                    peer.file.add(peer, CmEventType.CONNECT_RESPONSE, param)
                else:
                    peer.file.add(peer, CmEventType.ESTABLISHED)
            case Command.DISCONNECT:
                (number,) = user_cm.DISCONNECT.unpack(payload)
                found = kernel.ids[number]
                if found.peer is None:
                    raise OSError(errno.EINVAL, "not connected")
                if not found.is_disconnected:
                    found.is_disconnected = True
                    found.peer.file.add(found.peer, CmEventType.DISCONNECTED)
            case _:
                raise OSError(errno.ENOSYS, command.name)

    def _bind(self, found: _Id, address: Address | None) -> None:
        port = address.port if isinstance(address, InetAddr) else 0
        found.local = self._kernel.host._replace(port=port or next(self._kernel.ports))

    def _connect(self, found: _Id, param: bytes) -> None:
        kernel = self._kernel
        assert found.remote is not None
        listener = kernel.listeners[found.remote.port]
        child = _Id(listener.file, listener.uid, next(kernel.numbers), found.remote, found.local, found, param)
        kernel.ids[child.number] = found.peer = child
        found.peer = child
        listener.file.add(listener, CmEventType.CONNECT_REQUEST, param, child.number)

    def ask(self, command: Command, payload: Callable[[int], bytes], size: int) -> bytes:
        kernel, data = self._kernel, payload(0)
        match command:
            case Command.CREATE_ID:
                made = _Id(self, user_cm.CREATE_ID.unpack(data)[0], next(kernel.numbers))
                kernel.ids[made.number] = made
                return user_cm.CREATE_ID_RESP.pack(made.number)
            case Command.DESTROY_ID:
                found = kernel.ids.pop(user_cm.DESTROY_ID.unpack(data)[1])
                return user_cm.CREATE_ID_RESP.pack(found.reported)
            case Command.GET_EVENT:
                if not self._events:
                    raise BlockingIOError(errno.EAGAIN, "no event")
                os.eventfd_read(self.fd)
                return self._events.popleft()
            case Command.QUERY:
                _, number, option = user_cm.QUERY.unpack(data)
                return self._query(kernel.ids[number], Query(option))
            case Command.INIT_QP_ATTR:
                _, _, state = user_cm.INIT_QP_ATTR.unpack(data)
                gid = Gid.from_ip(kernel.host.ip)
                vector = user_cm.AH_ATTR.pack(gid, 0, 0, 64, 0, 0, 0, 0, 0, 1, 1)
                numbers = [0] * (len(abi._QP_ATTR_FIELDS))
                named = dict(zip(abi._QP_ATTR_FIELDS, numbers, strict=True)) | {"qp_state": state, "path_mtu": 3}
                named |= {"cur_qp_state": state, "ah_attr": vector, "alt_ah_attr": bytes(32), "port_num": 1}
                return user_cm.QP_ATTR.pack(int(_MASKS[QPState(state)]), *named.values())
        raise OSError(errno.ENOSYS, command.name)

    def _query(self, found: _Id, option: Query) -> bytes:
        kernel = self._kernel
        if option is Query.PATH:
            gid = Gid.from_ip(kernel.host.ip)
            path = PathData(PathRecord(dgid=gid, sgid=gid, mtu=3), PATH_FLAGS)
            return user_cm.QUERY_PATH_RESP.pack(1) + path.pack() + bytes(abi.Response.PATH - 8 - PathData.SIZE)
        addresses: list[bytes] = []
        for address in (found.local, found.remote):
            if address is None:
                addresses.append(b"" if option is Query.GID else InetAddr.any(kernel.host.family).pack())
            elif option is Query.GID:
                addresses.append(SockAddrIB(Gid.from_ip(address.ip)).pack())
            else:
                addresses.append(address.pack())
        guid = struct.unpack("=Q", _GUID.to_bytes(8, "big"))[0] if found.local is not None else 0
        sizes = [len(each) for each in addresses]
        return user_cm.QUERY_ADDR_RESP.pack(guid, 1 if guid else 0, 0xFFFF, *sizes, *addresses, kernel.device_index)
