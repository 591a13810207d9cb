"""The attributes of an id's queue pair, attached or the application's own (rdma_init_qp_attr(3))."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import QPAttrMask, QPState, QPType

if TYPE_CHECKING:
    from rdmacm.provider.connparam import ConnParam
    from rdmacm.soft.ids.connector import Connector
    from rdmacm.soft.ids.id_state import IdState
    from rdmacm.soft.ids.link import Link

_M = QPAttrMask
_TO_INIT = _M.STATE | _M.ACCESS_FLAGS | _M.PKEY_INDEX | _M.PORT
_UC_TO_RTR = _M.STATE | _M.AV | _M.PATH_MTU | _M.DEST_QPN | _M.RQ_PSN
_UC_TO_RTS = _M.STATE | _M.SQ_PSN
_TO_RTR = _UC_TO_RTR | _M.MAX_DEST_RD_ATOMIC | _M.MIN_RNR_TIMER
_TO_RTS = _UC_TO_RTS | _M.TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC
_XRC_TARGET_TO_RTS = _UC_TO_RTS | _M.TIMEOUT
_DATAGRAM_TO_INIT = _M.STATE | _M.PKEY_INDEX | _M.PORT | _M.QKEY
_DATAGRAM_TO_RTS = _M.STATE | _M.SQ_PSN
#: By type: the masks of RTR and RTS of types that differ from RC.
_CONNECTED = {
    int(QPType.UC): (_UC_TO_RTR, _UC_TO_RTS),
    int(QPType.XRC_SEND): (_UC_TO_RTR, _TO_RTS),
    int(QPType.XRC_RECV): (_TO_RTR, _XRC_TARGET_TO_RTS),
}


def attributes_of(core: IdState, link: Link, connector: Connector, state: QPState) -> tuple[QPAttr, QPAttrMask]:
    """What a queue pair of the application's own needs to get to a state, and the mask.

    EINVAL: the id is unbound, the state is unknown, or the peer has not sent its part yet.
    """
    if core.port_view is None:
        raise cm_error(errno.EINVAL, "the id is not bound to a device", "init_qp_attr", hint="resolve_addr()")
    try:
        attr = QPAttr(qp_state=QPState(state), port_num=core.port_num)
    except ValueError:
        raise cm_error(errno.EINVAL, f"unknown state {state}", "init_qp_attr") from None
    is_datagram = core.qp_type == QPType.UD
    if attr.qp_state is QPState.INIT:
        fill_initial(core, link, connector, attr)
        return attr, _DATAGRAM_TO_INIT if is_datagram else _TO_INIT
    if attr.qp_state not in (QPState.RTR, QPState.RTS):
        return attr, _M.STATE
    if is_datagram:
        return attr, _DATAGRAM_TO_RTS if attr.qp_state is QPState.RTS else _M.STATE
    connector.connected_attributes(attr)
    attr.ah_attr = link.address_vector(core.paths[0])
    to_rtr, to_rts = _CONNECTED.get(core.qp_type, (_TO_RTR, _TO_RTS))
    if attr.alt_port_num:
        to_rtr, to_rts = to_rtr | _M.ALT_PATH, to_rts | _M.ALT_PATH | _M.PATH_MIG_STATE
    return attr, to_rtr if attr.qp_state is QPState.RTR else to_rts


def fill_initial(core: IdState, link: Link, connector: Connector, attr: QPAttr) -> None:
    """Fill in what a queue pair needs to get to INIT. A datagram id has a Q_Key from now on."""
    attr.port_num = core.port_num
    attr.pkey_index = link.pkey_index
    if core.qp_type == QPType.UD:
        attr.qkey = core.qkey = core.qkey or link.default_qkey()
    elif connector.connection is not None:
        attr.qp_access_flags = connector.access()


def accepted_qkey(core: IdState, link: Link, own: int, param: ConnParam) -> int:
    """The Q_Key of a reply; ``own`` is that of the attached queue pair, 0 without one.

    EINVAL: ``param`` has another one than the queue pair, or the id, has already.
    """
    known = own or core.qkey
    if known and param.qkey and param.qkey != known:
        raise cm_error(
            errno.EINVAL,
            f"the Q_Key is 0x{known:08x} since the queue pair was made, not 0x{param.qkey:08x}",
            "accept",
            str(core.peer_addr),
            "no qkey, or modify() of the queue pair first",
        )
    return known or param.qkey or link.default_qkey()
