"""The path record of the subnet administrator (InfiniBand Architecture 15.2.5.16).

rdma_resolve_route(3) produces path records, and ``ai_route`` of rdma_getaddrinfo(3) carries them.
"""

import struct
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.constants import PathFlag
from rdmacm.proto.layout import Packed, bits, laid_out, whole
from rdmacm.proto.sa.attributes import Attribute, Selector
from rdmacm.proto.wire import Buffer, WireError

_FLAGS = struct.Struct("=II")

#: The flags a path must have for rdma_set_option(3), RDMA_OPTION_IB_PATH.
PATH_FLAGS = PathFlag.GMP | PathFlag.PRIMARY | PathFlag.BIDIRECTIONAL

#: Rate codes (``ibv_rate``) to Gb/s (InfiniBand Architecture 15.2.5.16).
RATE_GBPS: dict[int, float] = {
    2: 2.5, 3: 10, 4: 30, 5: 5, 6: 20, 7: 40, 8: 60, 9: 80, 10: 120, 11: 14, 12: 56, 13: 112, 14: 168, 15: 25, 16: 100,
    17: 200, 18: 300, 19: 28, 20: 50, 21: 400, 22: 600, 23: 800,
}  # fmt: skip

# A plain int, for the reason given in rdmacm.proto.plainints.
_EXACTLY = int(Selector.EXACTLY)


def unpadded(data: Buffer, size: int, kind: str) -> Buffer:
    """The record without its padding to a multiple of 8 bytes in a table."""
    if not size <= len(data) <= -(-size // 8) * 8:
        raise WireError(f"a {kind} has {size} bytes, not {len(data)}")
    return data[:size]


class Record(Packed):
    """A record of the subnet administrator."""

    __slots__ = ()

    SIZE: ClassVar[int]

    @classmethod
    def unpack(cls, data: Buffer) -> Self:
        """The record in these bytes, with or without its padding in a table; WireError for another length."""
        return cls(**cls._LAYOUT.unpack(unpadded(data, cls.SIZE, cls.__name__)))

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
@laid_out(64)
class PathRecord(Record):
    """A path record, 64 bytes (InfiniBand Architecture 15.2.5.16; ``struct ibv_path_record``).

    ``sgid`` and ``dgid`` are the GIDs of both ends, ``slid`` and ``dlid`` their LIDs, 0 on RoCE. ``mtu`` is a code,
    1..5 for 256..4096 bytes; ``rate`` a code of ``ibv_rate``, 0 for the port's own rate; ``packet_life_time`` an
    exponent, 4.096 µs · 2^n. ``mtu_selector``, ``rate_selector`` and ``packet_life_time_selector`` are 0 for greater
    than, 1 for less than, 2 for exactly that value, 3 for the largest available (of
    the life time the smallest). ``pkey`` is the P_Key, 16 bits;
    ``sl`` the service level, 4 bits; ``qos_class`` the quality of service, 12 bits. ``flow_label`` (20 bits),
    ``traffic_class`` and ``hop_limit`` (8 bits each) are those of the GRH. ``service_id`` is 0, or the service that
    alone may use the path, 64 bits. ``reversible``: whether the path back has the same values. ``numb_path`` is the
    most paths that a query asks for. ``preference`` orders paths, 0 first.
    """

    #: The attribute's number.
    ATTRIBUTE: ClassVar = Attribute.PATH_RECORD
    #: The length in bytes.
    SIZE: ClassVar[int] = 64

    dgid: Annotated[Gid, whole(8, 16)]
    sgid: Annotated[Gid, whole(24, 16)]
    service_id: Annotated[int, bits(0, 64)] = 0
    dlid: Annotated[int, bits(40, 16)] = 0
    slid: Annotated[int, bits(42, 16)] = 0
    flow_label: Annotated[int, bits(44, 20, before=4)] = 0
    hop_limit: Annotated[int, bits(47, 8)] = 0
    traffic_class: Annotated[int, bits(48, 8)] = 0
    reversible: Annotated[bool, bits(49, 1)] = True
    numb_path: Annotated[int, bits(49, 7, before=1)] = 1
    pkey: Annotated[int, bits(50, 16)] = DEFAULT_PKEY
    qos_class: Annotated[int, bits(52, 12)] = 0
    sl: Annotated[int, bits(53, 4, before=4)] = 0
    mtu_selector: Annotated[int, bits(54, 2)] = _EXACTLY
    mtu: Annotated[int, bits(54, 6, before=2)] = 0
    rate_selector: Annotated[int, bits(55, 2)] = _EXACTLY
    rate: Annotated[int, bits(55, 6, before=2)] = 0
    packet_life_time_selector: Annotated[int, bits(56, 2)] = _EXACTLY
    packet_life_time: Annotated[int, bits(56, 6, before=2)] = 0
    preference: Annotated[int, bits(57, 8)] = 0

    @property
    def mtu_bytes(self) -> int:
        """The path MTU in bytes, 0 for a code that the specification does not define."""
        return 128 << self.mtu if 1 <= self.mtu <= 5 else 0

    # The fields of ``struct ibv_path_record`` that are parts of the record, where ``struct ibv_sa_path_rec`` has the
    # fields above. ``mtu`` and ``rate`` are in both; here they are as in the latter, without their selectors.

    @property
    def flowlabel_hoplimit(self) -> int:
        """:attr:`flow_label` in bits 27 to 8, :attr:`hop_limit` below."""
        return self.flow_label << 8 | self.hop_limit

    @property
    def tclass(self) -> int:
        """:attr:`traffic_class`."""
        return self.traffic_class

    @property
    def reversible_numpath(self) -> int:
        """:attr:`reversible` in bit 7, :attr:`numb_path` below."""
        return self.reversible << 7 | self.numb_path

    @property
    def qosclass_sl(self) -> int:
        """:attr:`qos_class` in bits 15 to 4, :attr:`sl` below."""
        return self.qos_class << 4 | self.sl

    @property
    def packetlifetime(self) -> int:
        """:attr:`packet_life_time_selector` in bits 7 and 6, :attr:`packet_life_time` below."""
        return self.packet_life_time_selector << 6 | self.packet_life_time


@dataclass(frozen=True, slots=True)
class PathData:
    """``struct ibv_path_data``, 72 bytes: a path record and its flags. ``ai_route`` is an array of these.

    ``path`` is the record, ``flags`` a :class:`~rdmacm.PathFlag`.
    """

    #: The length in bytes.
    SIZE: ClassVar = _FLAGS.size + PathRecord.SIZE

    path: PathRecord
    flags: PathFlag = PATH_FLAGS

    def pack(self) -> bytes:
        """The 72 bytes of the C structure."""
        return _FLAGS.pack(self.flags, 0) + self.path.pack()

    @classmethod
    def unpack(cls, data: Buffer) -> Self:
        """The structure in 72 bytes; WireError for another length."""
        if len(data) != cls.SIZE:
            raise WireError(f"path data has {cls.SIZE} bytes, not {len(data)}")
        return cls(PathRecord.unpack(data[_FLAGS.size :]), PathFlag(_FLAGS.unpack_from(data)[0]))
