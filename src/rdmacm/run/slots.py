"""The sockets that programs send and receive packets with: those of a slot of the port, and of multicast groups.

A slot is a range of queue pair numbers (:mod:`rdmacm.soft.wire.port_group`). The server owns it, since it has bound
the slot's name, and the program reads the sockets: the server has copies, and never reads them.
"""

from __future__ import annotations

import errno
import socket

from rdmacm.address import Gid, is_multicast
from rdmacm.errors import cm_error
from rdmacm.proto.constants import MAX_SLOT, QPN_BITS, ROCE_PORT
from rdmacm.run import protocol
from rdmacm.soft.provider import SoftProvider
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.port_group import OwnedSlot
from rdmacm.soft.wire.udp import UdpWire

#: Slots of one program: each has 4,096 numbers of queue pairs.
_MOST_SLOTS = 64


class Slots:
    """The slots of one program."""

    def __init__(self, provider: SoftProvider) -> None:
        self._provider = provider
        self._owned: list[OwnedSlot] = []

    def claim(self) -> tuple[bytes, list[int]]:
        """Claim one more slot. Returns ``struct run_slot`` and the descriptors of the sockets, IPv4 first.

        ENOMEM if the program has too many; ENOTSUP where processes cannot share the port; also the errors of opening
        the wire.
        """
        if len(self._owned) >= _MOST_SLOTS:
            raise cm_error(errno.ENOMEM, f"the program has {_MOST_SLOTS} slots", "create_qp")
        self._provider.host.mux.open()
        wire = self._wire
        if wire is None:
            raise cm_error(errno.ENOTSUP, "the wire of the devices is not a UDP port", "create_qp")
        with self._provider.runtime.lock:
            owned = wire.lend_slot()
        self._owned.append(owned)
        families, fds = 0, []
        for index, sock in enumerate(owned.data):
            if sock is not None:
                sockets.set_trains(sock, True)
                families |= 1 << index
                fds.append(sock.fileno())
        # The last number of all is that of multicast packets.
        count = (1 << QPN_BITS) - (owned.slot == MAX_SLOT)
        return protocol.SLOT.pack(owned.slot << QPN_BITS, count, wire.port, families), fds

    @property
    def _wire(self) -> UdpWire | None:
        wire = self._provider.host.mux.wire
        return wire if isinstance(wire, UdpWire) else None

    def close(self) -> None:
        """Leave the slots to other processes."""
        wire = self._wire
        with self._provider.runtime.lock:
            for owned in self._owned:
                if wire is not None:
                    wire.take_back_slot(owned)
        self._owned.clear()


def open_group(gid: bytes, ifindex: int) -> socket.socket:
    """A socket that has joined a multicast group at an interface; EINVAL if the GID is not a group's."""
    ip = Gid(gid).ip
    if not is_multicast(ip):
        raise cm_error(errno.EINVAL, "not the GID of a multicast group", "attach_mcast")
    sock = sockets.open_group_socket(ip, ifindex, ROCE_PORT)
    sockets.set_trains(sock, True)
    return sock
