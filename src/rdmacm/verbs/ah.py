"""Address handles: ibv_create_ah(3), ibv_create_ah_from_wc(3)."""

from __future__ import annotations

import errno
from dataclasses import replace

from rdmacm.errors import cm_error
from rdmacm.proto.roce.grh import GRH, NEXT_HEADER_UDP
from rdmacm.proto.wire import WireError
from rdmacm.verbs.attr import AHAttr, GlobalRoute
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.checks import check_av
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import WC, GidType, LinkLayer
from rdmacm.verbs.pd import PD, InDomain

_MULTICAST = 0xFF


class AH(InDomain):
    """An address handle (``struct ibv_ah``): the destination of a datagram.

    ``attr``: a copy of the address vector; ``pd``: the protection domain of the queue pairs that may use it. Or
    instead of ``attr`` a completion ``wc`` of a receive, the first 40 bytes ``grh`` of its memory, and ``port_num``:
    an address handle for the answer, ibv_create_ah_from_wc(3).

    EINVAL: the device cannot send to that address vector; or as :func:`init_ah_from_wc`. ENODATA: the row of
    ``sgid_index`` is empty. EOPNOTSUPP: the device has no datagrams, as one of iWARP; ENETUNREACH, ETIMEDOUT: the
    kernel finds no way there.
    """

    __slots__ = {
        "attr": "A copy of the address vector.",
        "core_route": "What a compiled core of the device sends with; None before the first datagram.",
    }

    _warns = False

    def __init__(
        self,
        pd: PD,
        attr: AHAttr | None = None,
        *,
        wc: WC | None = None,
        port_num: int = 1,
        grh: GRH | Buffer | None = None,
    ) -> None:
        self._closed = True
        if attr is None:
            if wc is None:
                raise cm_error(errno.EINVAL, "an address handle needs attr, or wc and grh", "create_ah")
            attr = init_ah_from_wc(pd.context, port_num, wc, grh)
        check_av(pd.context, attr, "create_ah")
        self.pd = pd
        self.attr: AHAttr = replace(attr, gr=replace(attr.gr))
        self.core_route: object = None
        self._make("create_ah", (pd,), lambda: pd.context.backend.create_ah(pd, self))

    def __repr__(self) -> str:
        return f"<AH {self.attr.gr.dgid}{' closed' if self._closed else ''}>"


def init_ah_from_wc(context: Context, port_num: int, wc: WC, grh: GRH | Buffer | None = None) -> AHAttr:
    """The address vector of a datagram's sender, ibv_init_ah_from_wc(3).

    ``wc``: the completion of the receive, on the port ``port_num``. ``grh``: the first 40 bytes of the receive's
    memory, or what :meth:`rdmacm.verbs.GRH.unpack` made of them; not used unless ``wc`` has the flag GRH. EINVAL: the
    bytes are no GRH, a multicast group was the destination, or its GID is not in the port's table.
    """
    port = context.query_port(port_num)
    attr = AHAttr(dlid=wc.slid, sl=wc.sl, src_path_bits=wc.dlid_path_bits, port_num=port_num)
    if not wc.has_grh:
        return attr
    if grh is None:
        raise cm_error(errno.EINVAL, "the completion has a GRH", "init_ah_from_wc", hint="grh, the first 40 bytes")
    if not isinstance(grh, GRH):
        try:
            grh = GRH.unpack(byte_view(grh))
        except WireError as error:
            raise cm_error(errno.EINVAL, str(error), "init_ah_from_wc") from None
    own = grh.dgid
    if (own.ip[0] & 0xF0 == 0xE0) if grh.version == 4 else own[0] == _MULTICAST:
        text = "the datagram was sent to a multicast group"
        raise cm_error(errno.EINVAL, text, "init_ah_from_wc", str(own), "the GRH's sgid, and a row of the GID table")
    kind = GidType.ROCE_V2 if grh.next_hdr == NEXT_HEADER_UDP else GidType.ROCE_V1
    if port.link_layer is not LinkLayer.ETHERNET:
        kind = GidType.IB
    for row in port.gids:
        if row.gid == own and row.gid_type is kind:
            route = GlobalRoute(grh.sgid, row.gid_index, grh.flow_label, grh.hop_limit, grh.traffic_class)
            return replace(attr, is_global=True, gr=route)
    raise cm_error(errno.EINVAL, f"port {port_num} has no GID {own}", "init_ah_from_wc", hint="the port of the receive")
