"""The address of a peer's InfiniBand port, for messages of connection managers."""

from __future__ import annotations

__all__ = ["IbPath"]


class IbPath:
    """A port of a peer's, as the connection manager's paths have to be: equal where the port is the same.

    ``pkey_index``: where the table of our port has the partition that they share.
    """

    __slots__ = ("lid", "pkey_index", "sl")

    def __init__(self, lid: int, sl: int = 0, pkey_index: int = 0) -> None:
        self.lid = lid
        self.sl = sl
        self.pkey_index = pkey_index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IbPath) and other.lid == self.lid

    def __hash__(self) -> int:
        return hash(self.lid)
