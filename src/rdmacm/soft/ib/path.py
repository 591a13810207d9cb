"""The address of a peer's connection manager on InfiniBand."""

from __future__ import annotations


class IbPath:
    """Where messages to a peer's connection manager go; equal to every other path to the same LID."""

    __slots__ = ("lid", "pkey_index", "sl")

    def __init__(self, lid: int, sl: int = 0, pkey_index: int = 0) -> None:
        #: The peer's LID.
        self.lid: int = lid
        #: The service level.
        self.sl: int = sl
        #: The index of the common partition in the local port's P_Key table.
        self.pkey_index: int = pkey_index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IbPath) and other.lid == self.lid

    def __hash__(self) -> int:
        return hash(self.lid)
