"""What a change of an interface means to an id that is bound to it: the status and the text of its ADDR_CHANGE."""

from __future__ import annotations

import errno

from rdmacm.address import InetAddr
from rdmacm.resolution.hosts import IpoibInterface, RocePortView
from rdmacm.soft.ids.id_state import IdState


def roce_change(core: IdState, before: RocePortView, after: RocePortView) -> tuple[int, str] | None:
    """Errno and text of the change that matters most to the id; None if no change does."""
    name = after.interface.name
    if before.interface.is_running and not after.interface.is_running:
        return errno.ENETDOWN, f"interface {name} went down"
    had = any(row.gid == core.sgid for row in before.rows)
    if had and not any(row.gid == core.sgid for row in after.rows):
        return errno.EADDRNOTAVAIL, f"{core.sgid} was removed from interface {name}"
    if before.interface.address != after.interface.address:
        return 0, f"interface {name} has another hardware address"
    return None


def ipoib_change(core: IdState, before: IpoibInterface, after: IpoibInterface | None) -> tuple[int, str] | None:
    """The same for an id with an address of an IPoIB interface. ``after`` is None if the interface is gone."""
    local = core.local_addr
    if not isinstance(local, InetAddr) or local.ip not in before.ips or core.sgid != before.address.gid:
        return None
    name = before.interface.name
    if local.scope_id not in (0, before.interface.index):
        return None
    if after is None:
        return errno.EADDRNOTAVAIL, f"interface {name} is gone, and with it {local.host}"
    if before.interface.is_running and not after.interface.is_running:
        return errno.ENETDOWN, f"interface {name} went down"
    if local.ip not in after.ips:
        return errno.EADDRNOTAVAIL, f"{local.host} was removed from interface {name}"
    if before.interface.address != after.interface.address:
        return 0, f"interface {name} has another hardware address"
    return None
