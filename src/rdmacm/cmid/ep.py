"""Ids from resolved addresses: rdma_create_ep(3)."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TypeVar

from rdmacm.addrinfo import AddrInfo
from rdmacm.cmid.identifier import CmId
from rdmacm.constants import CmEventType, IbOption, OptionLevel, RaiFlag
from rdmacm.errors import cm_error
from rdmacm.provider import Provider, get_provider
from rdmacm.verbs.enums import QPType
from rdmacm.verbs.pd import PD
from rdmacm.verbs.qp import QPInitAttr

#: How long the address and the route may take each.
_TIMEOUT_MS = 2000
T = TypeVar("T", bound=CmId)


def create_ep(
    info: AddrInfo,
    pd: PD | None = None,
    qp_init_attr: QPInitAttr | None = None,
    *,
    provider: str | Provider | None = None,
) -> CmId:
    """A synchronous id from a resolved address, rdma_create_ep(3).

    Passive (``RAI_PASSIVE``): the id is bound to ``info.src_addr``. Call ``listen()`` and ``get_request()`` next; each
    accepted id gets a queue pair with ``qp_init_attr``. Active: address and route are resolved, within 2 s each (a
    route in ``info`` is used as it is), and with ``qp_init_attr`` a queue pair is created. Call ``connect()`` next; it
    sends ``info.connect`` ahead of the caller's private data.

    Raises what the failing step raises, and leaves nothing behind. EINVAL: a passive address without source, or an
    active one without destination.
    """
    return make_ep(CmId, info, pd, qp_init_attr, provider)


def make_ep(
    kind: type[T],
    info: AddrInfo,
    pd: PD | None = None,
    qp_init_attr: QPInitAttr | None = None,
    provider: str | Provider | None = None,
) -> T:
    """As :func:`create_ep`, of a subclass of CmId."""
    end = info.src_addr if info.flags & RaiFlag.PASSIVE else info.dst_addr
    hosts = (str(end[0]),) if isinstance(end, tuple) else ()
    cmid = kind(None, info.port_space, qp_type=info.qp_type, provider=get_provider(provider, hosts))
    try:
        if info.flags & RaiFlag.PASSIVE:
            if info.src_addr is None:
                raise cm_error(errno.EINVAL, "a passive address without source", "create_ep")
            cmid.bind_addr(info.src_addr)
            cmid._qp_template = _of_type(qp_init_attr, cmid.qp_type)
            cmid._pd = pd
            return cmid
        if info.dst_addr is None:
            raise cm_error(errno.EINVAL, "an active address without destination", "create_ep")
        cmid.resolve_addr(info.dst_addr, info.src_addr, _TIMEOUT_MS)
        if info.route:
            cmid.set_option(OptionLevel.IB, IbOption.PATH, b"".join(path.pack() for path in info.route))
            cmid._await(CmEventType.ROUTE_RESOLVED, CmEventType.ROUTE_ERROR)
        else:
            cmid.resolve_route(_TIMEOUT_MS)
        template = _of_type(qp_init_attr, cmid.qp_type)
        if template is not None:
            cmid.create_qp(template, pd)
        cmid._connect_prefix = info.connect
        return cmid
    except BaseException:
        cmid.destroy()
        raise


def _of_type(attr: QPInitAttr | None, qp_type: QPType) -> QPInitAttr | None:
    return None if attr is None else replace(attr.copy(), qp_type=qp_type)
