"""The calls of ``infiniband/verbs.h``.

A call that C makes with a pointer to a structure to fill in returns the structure. A work request is refused with an
error whose ``bad_wr`` is the request. What other calls take in network order (immediate data, GUIDs, P_Keys) is a
number in host order.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from rdmacm.address import Gid
from rdmacm.cma.names import is_c_name
from rdmacm.cma.structures import (
    fill,
    ibv_ah_attr,
    ibv_qp_attr,
    ibv_qp_init_attr,
    ibv_recv_wr,
    ibv_send_wr,
    ibv_srq_attr,
)
from rdmacm.cma.verbs import leading_bytes
from rdmacm.diagnosis.explain import devices
from rdmacm.errors import cm_error
from rdmacm.proto.roce.grh import GRH
from rdmacm.provider import get_provider, open_device
from rdmacm.verbs.ah import AH, init_ah_from_wc
from rdmacm.verbs.async_event import AsyncEvent
from rdmacm.verbs.attr import AHAttr, DeviceAttr, QPAttr, SrqAttr, SrqInitAttr
from rdmacm.verbs.buffers import Buffer
from rdmacm.verbs.cq import CQ, CompChannel
from rdmacm.verbs.device import Context, Device, GidEntry, Port
from rdmacm.verbs.enums import WC, MWType
from rdmacm.verbs.mw import MW
from rdmacm.verbs.pd import MR, PD, DmaBufMR
from rdmacm.verbs.qp import QP, QPInitAttr
from rdmacm.verbs.srq import SRQ
from rdmacm.verbs.wr import MWBind, RecvWR, SendWR, inc_rkey

S = TypeVar("S", SendWR, RecvWR)
_T = TypeVar("_T")


def _made(thing: _T | None, what: str) -> _T:
    """What an id has once it is bound or has a queue pair; in C a program that passes its NULL crashes."""
    if thing is None:
        raise cm_error(errno.EINVAL, f"there is no {what}: the id has none yet", "verbs")
    return thing


# -- devices --------------------------------------------------------------------------------------------


def ibv_get_device_list() -> list[Device]:
    """ibv_get_device_list(3)."""
    return devices()


def ibv_free_device_list(list: list[Device]) -> None:
    """ibv_free_device_list(3); empties the list, so that a use after it shows."""
    list.clear()


def ibv_get_device_name(device: Device) -> str:
    """ibv_get_device_name(3)."""
    return device.name


def ibv_get_device_index(device: Device) -> int:
    """ibv_get_device_index(3)."""
    return device.index


def ibv_get_device_guid(device: Device) -> int:
    """ibv_get_device_guid(3), in host order."""
    return device.node_guid


def ibv_open_device(device: Device) -> Context:
    """ibv_open_device(3)."""
    return open_device(device.name)


def ibv_close_device(context: Context) -> None:
    """ibv_close_device(3)."""
    context.close()


def ibv_query_device(context: Context | None) -> DeviceAttr:
    """ibv_query_device(3)."""
    return _made(context, "device").query_device()


def ibv_query_port(context: Context | None, port_num: int) -> Port:
    """ibv_query_port(3)."""
    return _made(context, "device").query_port(port_num)


def ibv_query_gid(context: Context, port_num: int, index: int) -> Gid:
    """ibv_query_gid(3)."""
    return context.query_gid(port_num, index)


def ibv_query_gid_ex(context: Context, port_num: int, gid_index: int, flags: int = 0) -> GidEntry:
    """ibv_query_gid_ex(3)."""
    return context.query_gid_ex(port_num, gid_index, flags)


def ibv_query_gid_table(context: Context, max_entries: int, flags: int = 0) -> list[GidEntry]:
    """ibv_query_gid_table(3)."""
    return context.query_gid_table(max_entries, flags)


def ibv_query_pkey(context: Context, port_num: int, index: int) -> int:
    """ibv_query_pkey(3), in host order."""
    return context.query_pkey(port_num, index)


def ibv_get_pkey_index(context: Context, port_num: int, pkey: int) -> int:
    """ibv_get_pkey_index(3); ``pkey`` is in host order."""
    return context.get_pkey_index(port_num, pkey)


def ibv_get_async_event(context: Context) -> AsyncEvent:
    """ibv_get_async_event(3)."""
    return context.get_async_event()


def ibv_ack_async_event(event: AsyncEvent) -> None:
    """ibv_ack_async_event(3)."""
    event.ack()


def ibv_fork_init() -> None:
    """ibv_fork_init(3). EINVAL: memory is registered already.

    On the software devices it does nothing: registered memory is ordinary memory, and a child has none of its objects.
    On the kernel's devices it is libibverbs', which also does nothing where Linux is 5.12 or newer.
    """
    get_provider().fork_init()


def ibv_is_fork_initialized() -> int:
    """ibv_is_fork_initialized(3): one of IBV_FORK_DISABLED, IBV_FORK_ENABLED, IBV_FORK_UNNEEDED."""
    return get_provider().fork_status()


# -- protection domains, memory, address handles --------------------------------------------------------


def ibv_alloc_pd(context: Context | None) -> PD:
    """ibv_alloc_pd(3)."""
    return PD(_made(context, "device"))


def ibv_dealloc_pd(pd: PD) -> None:
    """ibv_dealloc_pd(3)."""
    pd.close()


def ibv_reg_mr(pd: PD, addr: Buffer, length: int | None, access: int) -> MR:
    """ibv_reg_mr(3); with None for ``length`` the whole buffer."""
    return MR(pd, leading_bytes(addr, length), access)


def ibv_reg_dmabuf_mr(pd: PD, offset: int, length: int, iova: int, fd: int, access: int) -> DmaBufMR:
    """ibv_reg_dmabuf_mr(3); EOPNOTSUPP where the device registers memory of the process only."""
    return DmaBufMR(pd, length, access, fd, offset, iova)


def ibv_dereg_mr(mr: MR) -> None:
    """ibv_dereg_mr(3)."""
    mr.close()


def ibv_rereg_mr(
    mr: MR, flags: int, pd: PD | None = None, addr: Buffer | None = None, length: int | None = None, access: int = 0
) -> None:
    """ibv_rereg_mr(3); ``addr`` is the new buffer, with None for ``length`` all of it.

    After an error the region is as it was.
    """
    mr.rereg(flags, pd, addr, length, access)


def ibv_alloc_mw(pd: PD, type: MWType) -> MW:
    """ibv_alloc_mw(3)."""
    return MW(pd, type)


def ibv_dealloc_mw(mw: MW) -> None:
    """ibv_alloc_mw(3)."""
    mw.close()


def ibv_bind_mw(qp: QP, mw: MW, mw_bind: MWBind) -> None:
    """ibv_bind_mw(3)."""
    qp.bind_mw(mw, mw_bind)


def ibv_inc_rkey(rkey: int) -> int:
    """ibv_inc_rkey(3)."""
    return inc_rkey(rkey)


def ibv_create_ah(pd: PD, attr: AHAttr) -> AH:
    """ibv_create_ah(3)."""
    return AH(pd, attr)


def ibv_init_ah_from_wc(context: Context, port_num: int, wc: WC, grh: GRH | Buffer) -> ibv_ah_attr:
    """ibv_init_ah_from_wc(3); ``grh`` may be the first 40 bytes of the receive's memory."""
    return fill(ibv_ah_attr(), init_ah_from_wc(context, port_num, wc, grh))


def ibv_create_ah_from_wc(pd: PD, wc: WC, grh: GRH | Buffer, port_num: int) -> AH:
    """ibv_create_ah_from_wc(3); ``grh`` as for ibv_init_ah_from_wc()."""
    return AH(pd, wc=wc, grh=grh, port_num=port_num)


def ibv_destroy_ah(ah: AH) -> None:
    """ibv_destroy_ah(3)."""
    ah.close()


def ibv_attach_mcast(qp: QP, gid: Gid, lid: int) -> None:
    """ibv_attach_mcast(3)."""
    qp.attach_mcast(gid, lid)


def ibv_detach_mcast(qp: QP, gid: Gid, lid: int) -> None:
    """ibv_detach_mcast(3)."""
    qp.detach_mcast(gid, lid)


# -- completions ----------------------------------------------------------------------------------------


def ibv_create_comp_channel(context: Context | None) -> CompChannel:
    """ibv_create_comp_channel(3)."""
    return CompChannel(_made(context, "device"))


def ibv_destroy_comp_channel(channel: CompChannel) -> None:
    """ibv_destroy_comp_channel(3)."""
    channel.close()


def ibv_create_cq(
    context: Context | None,
    cqe: int,
    cq_context: object = None,
    channel: CompChannel | None = None,
    comp_vector: int = 0,
) -> CQ:
    """ibv_create_cq(3)."""
    return CQ(_made(context, "device"), cqe, channel, cq_context, comp_vector)


def ibv_destroy_cq(cq: CQ) -> None:
    """ibv_destroy_cq(3)."""
    cq.close()


def ibv_resize_cq(cq: CQ, cqe: int) -> None:
    """ibv_resize_cq(3)."""
    cq.resize(cqe)


def ibv_req_notify_cq(cq: CQ, solicited_only: int) -> None:
    """ibv_req_notify_cq(3)."""
    cq.req_notify(solicited_only)


def ibv_get_cq_event(channel: CompChannel) -> tuple[CQ, object]:
    """ibv_get_cq_event(3); returns the queue and its ``cq_context``."""
    cq = channel.get_cq_event()
    return cq, cq.cq_context


def ibv_ack_cq_events(cq: CQ, nevents: int) -> None:
    """ibv_ack_cq_events(3)."""
    cq.ack_events(nevents)


def ibv_poll_cq(cq: CQ, num_entries: int) -> list[WC]:
    """ibv_poll_cq(3); returns the completions, whose number C returns."""
    return cq.poll(num_entries)


# -- queue pairs and shared receive queues --------------------------------------------------------------


def ibv_create_qp(pd: PD, qp_init_attr: QPInitAttr) -> QP:
    """ibv_create_qp(3)."""
    return QP(pd, qp_init_attr)


def ibv_destroy_qp(qp: QP) -> None:
    """ibv_destroy_qp(3)."""
    qp.close()


def ibv_modify_qp(qp: QP | None, attr: QPAttr, attr_mask: int) -> None:
    """ibv_modify_qp(3)."""
    _made(qp, "queue pair").modify(attr, attr_mask)


def ibv_query_qp(qp: QP | None, attr_mask: int) -> tuple[ibv_qp_attr, ibv_qp_init_attr]:  # noqa: ARG001 (C's)
    """ibv_query_qp(3); returns all attributes, as the mask is only a hint."""
    attr, init_attr = _made(qp, "queue pair").query()
    return fill(ibv_qp_attr(), attr), fill(ibv_qp_init_attr(), init_attr)


def ibv_post_send(qp: QP | None, wr: SendWR | Sequence[SendWR]) -> None:
    """ibv_post_send(3); a request with those that follow by ``next``, or a sequence of requests."""
    _made(qp, "queue pair").post_send(_chain(wr))


def ibv_post_recv(qp: QP | None, wr: RecvWR | Sequence[RecvWR]) -> None:
    """ibv_post_recv(3); a request with those that follow by ``next``, or a sequence of requests."""
    _made(qp, "queue pair").post_recv(_chain(wr))


def ibv_create_srq(pd: PD, srq_init_attr: SrqInitAttr) -> SRQ:
    """ibv_create_srq(3)."""
    return SRQ(pd, srq_init_attr)


def ibv_destroy_srq(srq: SRQ) -> None:
    """ibv_destroy_srq(3)."""
    srq.close()


def ibv_modify_srq(srq: SRQ, srq_attr: SrqAttr, srq_attr_mask: int) -> None:
    """ibv_modify_srq(3)."""
    srq.modify(srq_attr, srq_attr_mask)


def ibv_query_srq(srq: SRQ) -> ibv_srq_attr:
    """ibv_query_srq(3)."""
    return fill(ibv_srq_attr(), srq.query())


def ibv_post_srq_recv(srq: SRQ, recv_wr: RecvWR | Sequence[RecvWR]) -> None:
    """ibv_post_srq_recv(3); a request with those that follow by ``next``, or a sequence of requests."""
    srq.post_recv(_chain(recv_wr))


def _chain(wr: S | Sequence[S]) -> S | Sequence[S]:
    if not isinstance(wr, ibv_send_wr | ibv_recv_wr) or wr.next is None:
        return wr
    chain: list[S] = []
    following: S | None = wr
    while following is not None:
        chain.append(following)
        following = getattr(following, "next", None)
    return chain


# -- texts and rates ------------------------------------------------------------------------------------

# The texts of libibverbs, which programs print; the index is the code.
_STATUS_TEXTS = (
    "success",
    "local length error",
    "local QP operation error",
    "local EE context operation error",
    "local protection error",
    "Work Request Flushed Error",
    "memory management operation error",
    "bad response error",
    "local access error",
    "remote invalid request error",
    "remote access error",
    "remote operation error",
    "transport retry counter exceeded",
    "RNR retry counter exceeded",
    "local RDD violation error",
    "remote invalid RD request",
    "aborted error",
    "invalid EE context number",
    "invalid EE context state",
    "fatal error",
    "response timeout error",
    "general error",
    "TM error",
    "TM software rendezvous",
)
_NODE_TEXTS = (
    *("unknown", "InfiniBand channel adapter", "InfiniBand switch", "InfiniBand router", "iWARP NIC"),
    *("usNIC", "usNIC UDP", "unspecified"),
)
_PORT_TEXTS = ("no state change (NOP)", "down", "init", "armed", "active", "active defer")
_EVENT_TEXTS = (
    "CQ error",
    "local work queue catastrophic error",
    "invalid request local work queue error",
    "local access violation work queue error",
    "communication established",
    "send queue drained",
    "path migrated",
    "path migration request error",
    "local catastrophic error",
    "port active",
    "port error",
    "LID change",
    "P_Key change",
    "SM change",
    "SRQ catastrophic error",
    "SRQ limit reached",
    "last WQE reached",
    "client reregistration",
    "GID table change",
    "WQ fatal",
    "device speed change",
)
# Code of enum ibv_rate: multiple of 2.5 Gb/s, or -1 for a rate that is none; Mb/s.
_RATES = {
    2: (1, 2500),
    3: (4, 10000),
    4: (12, 30000),
    5: (2, 5000),
    6: (8, 20000),
    7: (16, 40000),
    8: (24, 60000),
    9: (32, 80000),
    10: (48, 120000),
    11: (-1, 14062),
    12: (-1, 56250),
    13: (-1, 112500),
    14: (-1, 168750),
    15: (-1, 25781),
    16: (-1, 103125),
    17: (-1, 206250),
    18: (-1, 309375),
    19: (11, 28125),
    20: (20, 53125),
    21: (160, 425000),
    22: (240, 637500),
    23: (320, 850000),
    24: (480, 1275000),
}


def ibv_wc_status_str(status: int) -> str:
    """The text of a completion's status; ``unknown`` for another number."""
    return _text(_STATUS_TEXTS, status)


def ibv_node_type_str(node_type: int) -> str:
    """The text of a device's type; ``unknown`` for another number."""
    return _text(_NODE_TEXTS, node_type)


def ibv_port_state_str(port_state: int) -> str:
    """The text of a port's state; ``unknown`` for another number."""
    return _text(_PORT_TEXTS, port_state)


def ibv_event_type_str(event: int) -> str:
    """ibv_event_type_str(3); ``unknown`` for another number."""
    return _text(_EVENT_TEXTS, event)


def _text(texts: tuple[str, ...], code: int) -> str:
    return texts[code] if 0 <= code < len(texts) else "unknown"


def ibv_rate_to_mult(rate: int) -> int:
    """ibv_rate_to_mult(3): the multiple of 2.5 Gb/s; -1 if the rate is none."""
    return _RATES.get(rate, (-1, -1))[0]


def mult_to_ibv_rate(mult: int) -> int:
    """mult_to_ibv_rate(3); ``IBV_RATE_MAX`` if there is no such rate."""
    return next((rate for rate, (multiple, _) in _RATES.items() if multiple == mult > 0), 0)


def ibv_rate_to_mbps(rate: int) -> int:
    """ibv_rate_to_mbps(3); -1 for another number."""
    return _RATES.get(rate, (-1, -1))[1]


def mbps_to_ibv_rate(mbps: int) -> int:
    """mbps_to_ibv_rate(3); ``IBV_RATE_MAX`` if there is no such rate."""
    return next((rate for rate, (_, speed) in _RATES.items() if speed == mbps), 0)


def ibv_flow_label_to_udp_sport(fl: int) -> int:
    """ibv_flow_label_to_udp_sport(3): the UDP source port of RoCEv2 for a flow label of 20 bits."""
    return (fl & 0x3FFF) ^ (fl >> 14 & 0x3F) | 0xC000


if not TYPE_CHECKING:
    __all__ = [name for name, value in sorted(globals().items()) if is_c_name(name, value, __name__)]
