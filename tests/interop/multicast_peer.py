"""A member of an IPv6 group on the kernel's device: librdmacm refuses to join one on RoCEv2, and verbs do not.

    python3 -m interop.multicast_peer send|receive GROUP ADDRESS INTERFACE COUNT SIZE

The queue pair is attached to the group, and a socket makes the host a member. The messages, with immediate data, and
the Q_Key are mckey's.
"""

from __future__ import annotations

import ctypes as c
import socket
import struct
import sys
from typing import Any

from interop.rdma_core import (
    CmId,
    QpAttr,
    QpCap,
    QpInitAttr,
    RecvWr,
    SendWr,
    Sge,
    SockAddrIn6,
    Wc,
    operation,
    rdma,
    verbs,
)
from support.clock import eventually

_PS_UDP, _QPT_UD, _QKEY, _MULTICAST_QPN = 0x0111, 4, 0x01234567, 0xFFFFFF
_SEND_WITH_IMM, _SIGNALED, _LOCAL_WRITE = 3, 2, 1
_GRH = 40


class _Gid(c.Union):
    _fields_ = (("raw", c.c_uint8 * 16), ("parts", c.c_uint64 * 2))


class _Datagram(c.Structure):
    """``wr.ud`` of ``struct ibv_send_wr``."""

    _fields_ = (("ah", c.c_void_p), ("remote_qpn", c.c_uint32), ("remote_qkey", c.c_uint32))


def _gid(address: str) -> _Gid:
    return _Gid((c.c_uint8 * 16)(*socket.inet_pton(socket.AF_INET6, address)))


class Member:
    """An id with a UD queue pair."""

    def __init__(self, address: str, count: int, size: int) -> None:
        self.count, self.size = count, size
        channel = rdma.rdma_create_event_channel()
        self.id = c.POINTER(CmId)()
        rdma.rdma_create_id(channel, c.byref(self.id), None, _PS_UDP)
        self.address = _gid(address)
        rdma.rdma_bind_addr(self.id, c.byref(SockAddrIn6(socket.AF_INET6, 0, 0, self.address.raw, 0)))
        self.context = self.id.contents.verbs
        self.pd = verbs.ibv_alloc_pd(self.context)
        self.cq = verbs.ibv_create_cq(self.context, 2 * count, None, None, 0)
        attr = QpInitAttr(send_cq=self.cq, recv_cq=self.cq, cap=QpCap(count, count, 1, 1, 0), qp_type=_QPT_UD)
        rdma.rdma_create_qp(self.id, self.pd, c.byref(attr))
        self.qp = self.id.contents.qp
        self.buffer = c.create_string_buffer(_GRH + size)
        self.mr = verbs.ibv_reg_mr(self.pd, c.addressof(self.buffer), len(self.buffer), _LOCAL_WRITE)

    def completions(self) -> list[Any]:
        """As many completions as there are messages."""
        poll = operation(self.context, "poll_cq")
        found: list[Any] = []

        def is_complete() -> bool:
            wcs = (Wc * 1)()
            if poll(self.cq, 1, wcs):
                assert not wcs[0].status, f"status {wcs[0].status}"
                found.append(wcs[0])
            return len(found) == self.count

        eventually(is_complete, found)
        return found

    def receive(self, group: str, interface: str) -> None:
        host = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        membership = struct.pack("@16sI", socket.inet_pton(socket.AF_INET6, group), socket.if_nametoindex(interface))
        host.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, membership)
        failed = verbs.ibv_attach_mcast(self.qp, c.byref(_gid(group)), 0)
        assert not failed, f"ibv_attach_mcast: {failed}"
        post = operation(self.context, "post_recv")
        sge = Sge(c.addressof(self.buffer), len(self.buffer), self.mr.contents.lkey)
        for number in range(self.count):
            wr = RecvWr(number, None, c.pointer(sge), 1)
            assert not post(self.qp, c.byref(wr), c.byref(c.c_void_p()))
        print("joined", flush=True)
        sizes = {wc.byte_len - _GRH for wc in self.completions()}
        print(f"received {self.count} of {sizes}", flush=True)

    def send(self, group: str) -> None:
        attr = QpAttr().ah_attr
        c.memmove(c.addressof(attr), c.addressof(_gid(group)), 16)
        attr.grh.hop_limit, attr.grh.sgid_index, attr.is_global, attr.port_num = 64, self._gid_index(), 1, 1
        verbs.ibv_create_ah.restype = c.c_void_p
        verbs.ibv_create_ah.argtypes = (c.c_void_p, c.c_void_p)
        ah = verbs.ibv_create_ah(self.pd, c.addressof(attr))
        assert ah, "ibv_create_ah"
        sge = Sge(c.addressof(self.buffer) + _GRH, self.size, self.mr.contents.lkey)
        post = operation(self.context, "post_send")
        for number in range(self.count):
            wr = SendWr(number, None, c.pointer(sge), 1, _SEND_WITH_IMM, _SIGNALED, self.qp.contents.qp_num)
            to = _Datagram.from_address(c.addressof(wr.wr))
            to.ah, to.remote_qpn, to.remote_qkey = ah, _MULTICAST_QPN, _QKEY
            failed = post(self.qp, c.byref(wr), c.byref(c.c_void_p()))
            assert not failed, f"ibv_post_send: {failed}"
        self.completions()
        print(f"sent {self.count} of {self.size}", flush=True)

    def _gid_index(self) -> int:
        found = _Gid()
        for index in range(32):
            if not verbs.ibv_query_gid(self.context, 1, index, c.byref(found)) and bytes(found.raw) == bytes(
                self.address.raw
            ):
                return index
        raise LookupError("the address is not in the GID table")


if __name__ == "__main__":
    what, group, address, interface, count, size = sys.argv[1:]
    member = Member(address, int(count), int(size))
    if what == "send":
        member.send(group)
    else:
        member.receive(group, interface)
