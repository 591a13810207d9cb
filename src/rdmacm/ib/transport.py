"""The seam below InfiniBand: a port, and the management datagrams that pass it.

A transport is one port of one device. It carries datagrams whole and knows nothing of what is in them but the class,
by which the other end of a shared device is told whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from rdmacm.address import Gid
from rdmacm.proto.mad import MadAddress
from rdmacm.proto.wire import Buffer
from rdmacm.verbs.enums import PortState

__all__ = ["Arrived", "IbPort", "MadTransport", "without_empty_end"]

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class IbPort:
    """An InfiniBand port as it is at one moment (``struct ibv_port_attr`` and its tables).

    GUIDs are 64 bits in host order. ``gids[0]`` is the subnet prefix and the port's GUID. ``active_mtu`` is a code,
    1 to 5 for 256 to 4096 bytes; ``rate`` a code of ``ibv_rate``, 0 where unknown. ``pkeys`` is the table without its
    empty end.
    LIDs are 0 until a subnet manager has been by.
    """

    device: str
    port_num: int
    node_guid: int
    port_guid: int
    gids: tuple[Gid, ...]
    pkeys: tuple[int, ...]
    state: PortState
    lid: int
    lmc: int = 0
    sm_lid: int = 0
    sm_sl: int = 0
    active_mtu: int = 4
    rate: int = 0

    def pkey_index(self, pkey: int) -> int | None:
        """Where the table has a P_Key of a partition, one of a full member's first; None where it has none."""
        found = [index for index, own in enumerate(self.pkeys) if (own ^ pkey) & 0x7FFF == 0]
        return max(found, key=lambda index: self.pkeys[index] & 0x8000, default=None)

    @property
    def administrator(self) -> MadAddress:
        """Where the subnet administrator is; limited members of the default partition may ask, too."""
        return MadAddress(self.sm_lid, sl=self.sm_sl, pkey_index=self.pkey_index(0xFFFF) or 0)


#: A datagram that has arrived and where from. Of 256 bytes, or fewer where whoever sent it says that those behind are
#: nothing; more than 256 where the transport puts answers of several datagrams together
#: (:attr:`MadTransport.reassembles`).
Arrived: TypeAlias = "tuple[MadAddress, bytes]"


class MadTransport(Protocol):
    """One port. Nothing here waits; nothing but :meth:`open` and :meth:`port` raises OSError."""

    #: The name users choose it by, such as ``ibsim:HostA`` or ``umad:mlx5_0/1``.
    name: str
    #: Whether answers of several datagrams (RMPP) arrive as one, their segments acknowledged by the system.
    reassembles: bool
    #: Whether messages of connection managers (class 7) may be sent and arrive here. Where the system or another
    #: process has the port's connection manager, they do not. Known once opened.
    carries_cm: bool
    #: Datagrams that were not sent or not handed on, by reason.
    dropped: dict[str, int]

    def open(self) -> None:
        """Begin to receive; OSError where there is no such port."""

    def port(self) -> IbPort:
        """The port as it is now; OSError once it is gone."""

    def fileno(self) -> int:
        """A descriptor that polls readable when :meth:`receive` has something; -1 before :meth:`open`."""

    def send(self, address: MadAddress, mad: Buffer) -> None:
        """Send 256 bytes from QP 1. What cannot be sent is lost, and counted.

        The upper half of a transaction id belongs to the system: it may be changed on the way, and comes back so.
        """

    def receive(self) -> Sequence[Arrived]:
        """What has arrived, a bounded number at a time. What came back as undeliverable is counted, not returned."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """In a child of fork(2): let go of what is the parent's, without harm to it."""


def without_empty_end(table: Sequence[Entry], is_empty: Callable[[Entry], bool]) -> tuple[Entry, ...]:
    """A port's table without the empty entries at its end: those between others hold an index."""
    size = len(table)
    while size and is_empty(table[size - 1]):
        size -= 1
    return tuple(table[:size])
