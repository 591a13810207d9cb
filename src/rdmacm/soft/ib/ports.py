"""InfiniBand ports beside the software devices: who they are, and which of them reaches whom.

A port is a transport of management datagrams (:mod:`rdmacm.ib.transport`), so here is all of InfiniBand that takes no
more than those: addresses, path records, services, and connections up to ESTABLISHED. What a connection is for, data,
takes an adapter and its driver; :class:`IbDevice` says so where it is tried.

Transports are opened when a port is first asked for, and closed with the provider's last channel.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from rdmacm.address import Gid
from rdmacm.errors import cm_error
from rdmacm.resolution.infiniband import IbView
from rdmacm.soft.device.device import SOFT_DEVICE_ATTR
from rdmacm.verbs.device import GidEntry

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from rdmacm.ib.transport import MadTransport
    from rdmacm.progress.runtime import Runtime
    from rdmacm.soft.ib.subnet import Subnet

__all__ = ["IbDevice", "IbHost"]


class IbHost:
    """The InfiniBand ports of a host, in the order they were named."""

    def __init__(
        self, runtime: Runtime, random: Random, transports: Sequence[MadTransport], opened: Callable[[], None]
    ) -> None:
        self._runtime = runtime
        self.subnets: tuple[Subnet, ...] = ()
        if transports:
            from rdmacm.soft.ib.subnet import Subnet  # and all that it is made of

            self.subnets = tuple(
                Subnet(runtime, random, transport, index, opened) for index, transport in enumerate(transports)
            )

    def views(self) -> list[IbView]:
        """The ports as they are now, but for those that are not there."""
        found = [view for subnet in self.subnets if (view := subnet.view()) is not None]
        if not self._runtime.in_use:
            self.close()
        return found

    def subnet_of(self, view: IbView) -> Subnet:
        """The subnet side of a port."""
        return self.subnets[view.index]

    def view_at(self, ifindex: int) -> IbView | None:
        """The port that has this :attr:`IbView.ifindex`."""
        if not -len(self.subnets) <= ifindex < 0:
            return None
        subnet = self.subnets[-1 - ifindex]
        view = subnet.view()
        if not self._runtime.in_use:
            subnet.close()
        return view

    def filenos(self) -> tuple[int, ...]:
        return tuple(
            subnet.transport.fileno() for subnet in self.subnets if subnet.is_open and subnet.transport.fileno() >= 0
        )

    def progress(self) -> None:
        for subnet in self.subnets:
            if subnet.is_open:
                subnet.progress()

    def close(self) -> None:
        for subnet in self.subnets:
            subnet.close()

    def abandon(self) -> None:
        """In a child of fork(2)."""
        for subnet in self.subnets:
            subnet.abandon()

    def owner_of(self, gid: Gid) -> tuple[IbView, GidEntry] | None:
        """The port that has a GID."""
        return next(((view, row) for view in self.views() for row in view.rows if row.gid == gid), None)

    def why_not(self) -> str:
        """Why a port that is wanted is not among :meth:`views`, in words."""
        if not self.subnets:
            return "AF_IB addresses name ports of an InfiniBand device, and this host has none"
        missing = [f"{s.transport.name}: {s.why()}" for s in self.subnets if s.problem]
        return "; ".join(missing) or f"there is {', '.join(s.transport.name for s in self.subnets)}"


class IbDevice:
    """An InfiniBand device as the verbs objects open it: its limits, which connecting needs, and otherwise why not.

    See :class:`rdmacm.verbs.backend.DeviceBackend`.
    """

    attr = SOFT_DEVICE_ATTR

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise cm_error(
            errno.EOPNOTSUPP,
            "moving data over InfiniBand takes the adapter's driver; here are addresses, services and connections",
            "create_qp",
            self.name,
            "a queue pair of your own, named by ConnParam(qp_num=...)",
        )

    reg_mr = create_channel = create_cq = create_srq = create_qp = _refuse
