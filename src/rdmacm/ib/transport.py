"""The interface to an InfiniBand port that sends and receives management datagrams (MADs).

A transport is one port of one device. It interprets nothing in a MAD but the management class, which decides what the
port may send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.proto.mad import MadAddress
from rdmacm.proto.wire import Buffer
from rdmacm.verbs.enums import PortState

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class IbPort:
    """A snapshot of an InfiniBand port (``struct ibv_port_attr`` and its GID and P_Key tables).

    ``device`` is the name of the device, ``port_num`` the number of the port, from 1. ``node_guid`` and ``port_guid``
    are integers of 64 bits. ``state`` is ACTIVE if the port can send and receive. ``gids[0]`` consists of the subnet
    prefix and the port GUID. ``pkeys`` is the P_Key table without the empty entries at its end. ``lid`` and ``sm_lid``
    are the LIDs of the port and of its subnet manager, 0 until that has configured the port; ``sm_sl`` is the service
    level to it. The port has 2^``lmc`` LIDs. ``active_mtu`` is a code, 1..5 for 256..4096 bytes; ``rate`` a code of
    ``ibv_rate``, 0 if unknown.
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
        """The index of a P_Key of the same partition, with full membership if there is one; None if there is none."""
        found = [index for index, own in enumerate(self.pkeys) if (own ^ pkey) & 0x7FFF == 0]
        return max(found, key=lambda index: self.pkeys[index] & 0x8000, default=None)

    @property
    def lids(self) -> range:
        """The port's LIDs; empty until the subnet manager has given it any."""
        return range(self.lid, self.lid + (1 << self.lmc)) if self.lid else range(0)

    @property
    def sa_address(self) -> MadAddress:
        """The address of the subnet administrator (SA). Limited members of the default partition may query it too."""
        return MadAddress(self.sm_lid, sl=self.sm_sl, pkey_index=self.pkey_index(DEFAULT_PKEY) or 0)


#: (source, MAD). The MAD has 256 bytes, or fewer if its sender marked the rest as unused, or more if the transport has
#: reassembled a segmented response (:attr:`MadTransport.reassembles`).
ReceivedMad: TypeAlias = "tuple[MadAddress, bytes]"


class MadTransport(Protocol):
    """One port. No method waits, and only :meth:`open` and :meth:`port` raise OSError."""

    #: The name of the port, such as ``ibsim:HostA`` or ``umad:mlx5_0/1``.
    name: str
    #: Whether the system reassembles segmented responses (RMPP) and acknowledges their segments.
    reassembles: bool
    #: Whether the port can send and receive CM messages (class 7). It cannot if the system or another process has the
    #: port's connection manager. Known once the port is open.
    carries_cm: bool
    #: MADs that could not be sent, or were dropped on receipt, by reason.
    dropped: dict[str, int]

    def open(self) -> None:
        """Start to receive; OSError if there is no such port."""

    def port(self) -> IbPort:
        """The current attributes of the port; OSError if it is gone."""

    def fileno(self) -> int:
        """A descriptor that polls readable when :meth:`receive` has MADs; -1 before :meth:`open`."""

    def send(self, address: MadAddress, mad: Buffer) -> None:
        """Send a MAD of 256 bytes from QP 1. One that cannot be sent is counted in :attr:`dropped`.

        The upper half of the transaction id belongs to the system, which may change it; a response has the changed id.
        """

    def receive(self) -> Sequence[ReceivedMad]:
        """The received MADs, a bounded number at a time. MADs that came back as undeliverable are only counted."""

    def close(self) -> None:
        """Stop to receive and release the descriptors. :meth:`open` opens the port again."""

    def abandon(self) -> None:
        """In a child of fork(2): close the parent's descriptors without effect on the parent."""


def without_empty_end(table: Sequence[Entry], is_empty: Callable[[Entry], bool]) -> tuple[Entry, ...]:
    """A table without the empty entries at its end. Those between other entries keep the indices in place."""
    size = len(table)
    while size and is_empty(table[size - 1]):
        size -= 1
    return tuple(table[:size])
