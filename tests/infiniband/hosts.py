"""Hosts of an InfiniBand fabric, for tests of their ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rdmacm import CmId, EventChannel, PortSpace
from rdmacm.address import Gid, SockAddrIB, service_id
from rdmacm.cmid import CmEvent
from rdmacm.provider.connparam import ConnParam
from rdmacm.soft.provider import SoftProvider

PORT = 7471
SID = service_id(PortSpace.IB, PORT)
ALL_BITS = (1 << 64) - 1
QPN = 0x1234
PATIENCE = 10.0


class IbHost:
    """A host with one InfiniBand port, and functions that create ids on it."""

    def __init__(self, provider: SoftProvider) -> None:
        self.provider = provider

    @property
    def gid(self) -> Gid:
        return next(d for d in self.provider.devices() if d.name == self.device).ports[0].gids[0].gid

    @property
    def device(self) -> str:
        (device,) = (d.name for d in self.provider.devices() if not d.name.startswith("soft_"))
        return device

    def at(self, sid: int = SID, **fields: int) -> SockAddrIB:
        """An address of this host's port."""
        return SockAddrIB(self.gid, sid, ALL_BITS, **fields)

    @property
    def source(self) -> SockAddrIB:
        """This host's port with any service id."""
        return SockAddrIB(self.gid)

    def id(self, channel: EventChannel | None = None, space: PortSpace = PortSpace.IB) -> CmId:
        return CmId(channel, space) if channel is not None else CmId(None, space, provider=self.provider)

    @contextmanager
    def listening(self, sid: int = SID, space: PortSpace = PortSpace.IB) -> Iterator[CmId]:
        """A listener with a channel."""
        with EventChannel(self.provider) as channel, self.id(channel, space) as listener:
            listener.bind_addr(self.at(sid))
            listener.listen()
            yield listener

    def resolved(self, peer: SockAddrIB) -> CmId:
        """A synchronous id with a route."""
        cmid = self.id()
        cmid.resolve_addr(peer)
        cmid.resolve_route()
        return cmid


def event(channel: EventChannel) -> CmEvent:
    return channel.get_event(PATIENCE)


def param(private_data: bytes = b"", **values: int) -> ConnParam:
    """Parameters for an id whose queue pair the application owns."""
    return ConnParam(private_data, **{"qp_num": QPN, "responder_resources": 1, "initiator_depth": 1} | values)
