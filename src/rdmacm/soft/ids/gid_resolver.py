"""The resolver of an id with AF_IB addresses, which are GIDs: they need no route and no neighbour."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

from rdmacm.address import AF_IB, ALL_BITS_64, Address, SockAddrIB, service_id
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import Failure, cm_error
from rdmacm.provider.cmstate import Trigger
from rdmacm.resolution.infiniband import IbLookup, IbPortView
from rdmacm.soft.ids.id_state import IdState, explain_failure
from rdmacm.verbs.device import GidEntry

if TYPE_CHECKING:
    from rdmacm.net.types import Neighbour
    from rdmacm.soft.connection_manager import ConnectionManager
    from rdmacm.soft.ib.subnet import Subnet

#: The port spaces in which an AF_IB address may be bound, by that of the id, in the order in which they are tried.
_IB_SPACES = {
    PortSpace.IB: (PortSpace.IB, PortSpace.TCP, PortSpace.UDP),
    PortSpace.TCP: (PortSpace.TCP,),
    PortSpace.UDP: (PortSpace.UDP,),
    PortSpace.IPOIB: (PortSpace.IPOIB,),
}


class GidResolver:
    """See :class:`rdmacm.soft.ids.link.Resolver`."""

    __slots__ = ("_id",)

    def __init__(self, core: IdState) -> None:
        self._id = core

    # -- binding --------------------------------------------------------------------------------------

    def bind(self, address: Address) -> SockAddrIB:
        assert isinstance(address, SockAddrIB)
        core = self._id
        if any(address.addr):
            self._bind_gid(address)
        for space in _IB_SPACES[core.port_space]:
            if (address.sid ^ service_id(space, 0)) & address.sid_mask & ~0xFFFF == 0:
                break
        else:
            raise Failure(
                errno.EPROTONOSUPPORT,
                "bind",
                f"service id 0x{address.sid:x} is of another port space than the id's, {core.port_space.name}",
                f"service ids from 0x{service_id(core.port_space, 0):x}",
            )
        port = core.take_port(space, address.port, AF_IB, bytes(address.addr), 0, True, bool(core.options.afonly))
        return SockAddrIB(
            address.addr, service_id(space, port), ALL_BITS_64, address.pkey, address.flowinfo, address.scope_id
        )

    def _bind_gid(self, address: SockAddrIB) -> None:
        host, gid = self._id.host, address.addr
        found = host.ib.row_of(gid)
        if found is not None:
            view, row = found
            if not view.has_pkey(address.pkey):
                raise Failure(
                    errno.EINVAL,
                    "bind",
                    f"P_Key 0x{address.pkey:04x} is not in the table of {view.device.name} port {row.port_num}",
                    f"one of {view.pkeys_text}",
                )
            self._id.attach(view, row, address.pkey)
            return
        for roce in host.view().ports:
            if roce.row_of(gid) is not None:
                raise Failure(
                    errno.ENODEV,
                    "bind",
                    f"GID {gid} is on {roce.device.name}, which is RoCE; AF_IB is for InfiniBand ports",
                    "the IP address that the GID stands for",
                )
        raise Failure(errno.ENODEV, "bind", f"no InfiniBand port has the GID {gid}; {host.ib.why_none()}")

    # -- resolving an address -------------------------------------------------------------------------

    def resolve_addr(self, destination: Address, origin: str, timeout_ms: int) -> None:
        """There is no neighbour to wait for, so the event is posted at once."""
        assert isinstance(destination, SockAddrIB)
        core, local = self._id, self._id.local_addr
        assert isinstance(local, SockAddrIB)
        core.move(Trigger.RESOLVE_ADDR)
        core.lookup = lookup = IbLookup(destination, core.host.provider_name)
        core.peer_addr = destination
        try:
            ports = core.host.ib
            view, row = lookup.choose(ports.views(), self._bound_row(), ports.why_none)
        except Failure as failure:
            core.move(Trigger.ADDR_FAILED)
            explanation = explain_failure(core, lookup, failure)
            call, address = "resolve_addr", str(destination)
            raise cm_error(failure.errno, failure.message, call, address, failure.hint, explanation) from None
        core.attach(view, row, destination.pkey)
        if not any(destination.addr):  # "this host", as for sockets
            core.peer_addr = destination = replace(destination, addr=core.sgid)
        core.dgid = destination.addr
        core.local_addr = replace(local, addr=core.sgid, pkey=destination.pkey)
        core.move(Trigger.ADDR_DONE)
        core.post(CmEventType.ADDR_RESOLVED)

    @property
    def _subnet(self) -> Subnet | None:
        """The subnet of the port that the id is bound to."""
        view = self._id.port_view
        if view is None:
            return None
        assert isinstance(view, IbPortView)  # an id with AF_IB addresses is bound to no other
        return self._id.host.ib.subnet_of(view)

    def _bound_row(self) -> tuple[IbPortView, GidEntry] | None:
        """The port and GID that the id is bound to, as they are now; Failure when one of them is gone."""
        core, subnet = self._id, self._subnet
        if subnet is None:
            return None
        view = subnet.view()
        if view is None:
            raise Failure(errno.ENODEV, "select", f"the port is gone: {subnet.why()}", "'rdmacm devices'")
        row = view.row_of(core.sgid)
        if row is None:
            message = f"{view.device.name} port {view.port_num} no longer has the GID {core.sgid}"
            raise Failure(errno.ENODEV, "select", message, "a new id")
        return view, row

    def stop(self) -> None:
        """Nothing to do: no resolution waits."""

    # -- listening ------------------------------------------------------------------------------------

    def neighbour_changed(self, neighbour: Neighbour) -> None:
        """A GID has no neighbour."""

    def managers(self) -> list[ConnectionManager]:
        """A wildcard GID listens on RoCE too: a REQ there may come from an AF_IB address."""
        subnet, host = self._subnet, self._id.host
        if subnet is not None:
            return [subnet.cm]
        subnets = (host.ib.subnet_of(view) for view in host.ib.views())
        return [host.cm, *(subnet.cm for subnet in subnets if subnet.transport.carries_cm)]
