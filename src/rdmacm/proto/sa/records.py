"""The path record of the subnet administrator (InfiniBand Architecture 15.2.5.16).

rdma_resolve_route(3) produces path records, and ``ai_route`` of rdma_getaddrinfo(3) carries them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import ClassVar

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.constants import PathFlag
from rdmacm.proto.sa.attributes import Attribute, Selector
from rdmacm.proto.wire import WireError

__all__ = ["PATH_FLAGS", "PathData", "PathRecord"]

_RECORD = struct.Struct("!Q16s16sHHIBBHHBBBB6x")
_FLAGS = struct.Struct("=II")

#: The flags a path must have for rdma_set_option(3), RDMA_OPTION_IB_PATH.
PATH_FLAGS = PathFlag.GMP | PathFlag.PRIMARY | PathFlag.BIDIRECTIONAL

#: Rate codes (``ibv_rate``) to Gb/s (InfiniBand Architecture 15.2.5.16).
RATE_GBPS = {
    2: 2.5, 3: 10, 4: 30, 5: 5, 6: 20, 7: 40, 8: 60, 9: 80, 10: 120, 11: 14, 12: 56, 13: 112, 14: 168, 15: 25, 16: 100,
    17: 200, 18: 300, 19: 28, 20: 50, 21: 400, 22: 600, 23: 800,
}  # fmt: skip

# A plain int, for the reason given in rdmacm.proto.plainints.
_EXACTLY = int(Selector.EXACTLY)


@dataclass(frozen=True, slots=True)
class PathRecord:
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
    SIZE: ClassVar = _RECORD.size

    dgid: Gid
    sgid: Gid
    service_id: int = 0
    dlid: int = 0
    slid: int = 0
    flow_label: int = 0
    hop_limit: int = 0
    traffic_class: int = 0
    reversible: bool = True
    numb_path: int = 1
    pkey: int = DEFAULT_PKEY
    qos_class: int = 0
    sl: int = 0
    mtu_selector: int = _EXACTLY
    mtu: int = 0
    rate_selector: int = _EXACTLY
    rate: int = 0
    packet_life_time_selector: int = _EXACTLY
    packet_life_time: int = 0
    preference: int = 0

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

    def pack(self) -> bytes:
        """The 64 bytes on the wire."""
        return _RECORD.pack(
            self.service_id,
            self.dgid,
            self.sgid,
            self.dlid,
            self.slid,
            self.flowlabel_hoplimit,
            self.tclass,
            self.reversible_numpath,
            self.pkey,
            self.qosclass_sl,
            self.mtu_selector << 6 | self.mtu,
            self.rate_selector << 6 | self.rate,
            self.packetlifetime,
            self.preference,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> PathRecord:
        """The record in 64 bytes; WireError for another length."""
        if len(data) != _RECORD.size:
            raise WireError(f"a path record has {_RECORD.size} bytes, not {len(data)}")
        sid, dgid, sgid, dlid, slid, flow_hop, tclass, rev, pkey, qos, mtu, rate, life, preference = _RECORD.unpack(
            data
        )
        return cls(
            dgid=Gid(dgid),
            sgid=Gid(sgid),
            service_id=sid,
            dlid=dlid,
            slid=slid,
            flow_label=flow_hop >> 8 & 0xFFFFF,
            hop_limit=flow_hop & 0xFF,
            traffic_class=tclass,
            reversible=bool(rev & 0x80),
            numb_path=rev & 0x7F,
            pkey=pkey,
            qos_class=qos >> 4,
            sl=qos & 0xF,
            mtu_selector=mtu >> 6,
            mtu=mtu & 0x3F,
            rate_selector=rate >> 6,
            rate=rate & 0x3F,
            packet_life_time_selector=life >> 6,
            packet_life_time=life & 0x3F,
            preference=preference,
        )

    def replace(self, **changes: object) -> PathRecord:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class PathData:
    """``struct ibv_path_data``, 72 bytes: a path record and its flags. ``ai_route`` is an array of these.

    ``path`` is the record, ``flags`` a :class:`~rdmacm.PathFlag`.
    """

    #: The length in bytes.
    SIZE: ClassVar = _FLAGS.size + _RECORD.size

    path: PathRecord
    flags: PathFlag = PATH_FLAGS

    def pack(self) -> bytes:
        """The 72 bytes of the C structure."""
        return _FLAGS.pack(self.flags, 0) + self.path.pack()

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> PathData:
        """The structure in 72 bytes; WireError for another length."""
        if len(data) != cls.SIZE:
            raise WireError(f"path data has {cls.SIZE} bytes, not {len(data)}")
        return cls(PathRecord.unpack(data[_FLAGS.size :]), PathFlag(_FLAGS.unpack_from(data)[0]))
