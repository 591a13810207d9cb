"""Records of the subnet administrator besides paths: services, multicast groups, nodes, and ClassPortInfo.

Fields are integers in host order, except for GIDs, keys and names. Unknown values are kept.
"""

import struct
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from typing import Annotated, Any, ClassVar, Self

from rdmacm.address import ALL_BITS_64, DEFAULT_PKEY, Gid
from rdmacm.proto.layout import bits, laid_out, whole
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.records import Record, unpadded
from rdmacm.proto.wire import Buffer

#: ``service_lease`` of a service that does not expire.
LEASE_FOREVER = 0xFFFFFFFF

_NAME_SIZE = 64

_SERVICE = struct.Struct("!Q16sHxxI16s64s16s8H4I2Q")


class NodeInfoType(IntEnum):
    """``node_type`` of a :class:`NodeRecord`."""

    CHANNEL_ADAPTER = 1
    SWITCH = 2
    ROUTER = 3


class JoinState(IntFlag):
    """The membership of a port in a multicast group: ``join_state`` of a :class:`MCMemberRecord`."""

    FULL_MEMBER = 1
    NON_MEMBER = 2
    SEND_ONLY_NON_MEMBER = 4
    SEND_ONLY_FULL_MEMBER = 8


def service_number(text: str) -> int | None:
    """The number that strtoull(3) with base 0 reads in all of ``text``; None if it is not one."""
    digits = text.strip().lower().removeprefix("+")
    sign = digits.startswith("-")
    digits = digits[sign:]
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10
    if not digits[:1].isdigit() or "_" in digits or not digits.isascii():
        return None
    try:
        value = int(digits, base)
    except ValueError:
        return None
    return None if value > ALL_BITS_64 else -value & ALL_BITS_64 if sign else value


def service_name_bytes(name: str | bytes) -> bytes:
    """A service name as a :class:`ServiceRecord` has it: text in UTF-8.

    Surrogates that stand for bytes of a command line become these bytes (PEP 383); UnicodeEncodeError for others.
    """
    return name.encode(errors="surrogateescape") if isinstance(name, str) else name


def _name(data: bytes) -> bytes:
    return data.rstrip(b"\0")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """A service and the port that offers it: 176 bytes (InfiniBand Architecture 15.2.5.14).

    ``service_id`` has 64 bits. ``service_gid`` and ``service_pkey`` are the port's GID and P_Key. ``service_key`` must
    be repeated to change the record. ``service_lease`` is in seconds. ``service_name`` has up to 64 bytes, without the
    zeros that pad it, and is compared byte by byte. The service may use the data as it likes: ``service_data8`` has 16
    bytes, ``service_data16``, ``service_data32`` and ``service_data64`` have 8, 4 and 2 numbers of that many bits.
    """

    #: The attribute's number.
    ATTRIBUTE: ClassVar = Attribute.SERVICE_RECORD
    #: The length in bytes.
    SIZE: ClassVar = _SERVICE.size

    service_id: int = 0
    service_gid: Gid = Gid()  # noqa: RUF009 (immutable)
    service_pkey: int = DEFAULT_PKEY
    service_lease: int = LEASE_FOREVER
    service_key: bytes = bytes(16)
    service_name: bytes = b""
    service_data8: bytes = bytes(16)
    service_data16: tuple[int, ...] = (0,) * 8
    service_data32: tuple[int, ...] = (0,) * 4
    service_data64: tuple[int, ...] = (0,) * 2

    @property
    def name(self) -> str:
        """The service name as text; bytes that are not UTF-8 become backslash escapes."""
        return _text(self.service_name)

    def pack(self) -> bytes:
        """The 176 bytes on the wire; ValueError for a field out of range."""
        for name, value in (("service_key", self.service_key), ("service_data8", self.service_data8)):
            if len(value) != 16:
                raise ValueError(f"{name} has 16 bytes, not {len(value)}")
        if len(self.service_name) > _NAME_SIZE:
            raise ValueError(f"a service name has up to {_NAME_SIZE} bytes, not {len(self.service_name)}")
        try:
            return _SERVICE.pack(
                self.service_id,
                self.service_gid,
                self.service_pkey,
                self.service_lease,
                self.service_key,
                self.service_name,
                self.service_data8,
                *self.service_data16,
                *self.service_data32,
                *self.service_data64,
            )
        except struct.error as problem:
            raise ValueError(f"a field of the service record does not fit: {problem}") from None

    @classmethod
    def unpack(cls, data: Buffer) -> Self:
        """The record in 176 bytes; WireError for another length."""
        data = unpadded(data, cls.SIZE, cls.__name__)
        service_id, address, pkey, lease, key, name, data8, *rest = _SERVICE.unpack(data)
        return cls(
            service_id,
            Gid(address),
            pkey,
            lease,
            key,
            _name(name),
            data8,
            tuple(rest[:8]),
            tuple(rest[8:12]),
            tuple(rest[12:]),
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
@laid_out(52)
class MCMemberRecord(Record):
    """A multicast group, or a port's membership in one: 52 bytes, 56 in a table (InfiniBand Architecture 15.2.5.17).

    ``mgid`` is the GID of the group, ``port_gid`` that of the member, the zero GID in the record of a group. ``q_key``
    has 32 bits. ``mtu``, ``mtu_selector``, ``rate``, ``rate_selector``, ``packet_life_time``,
    ``packet_life_time_selector``, ``pkey``, ``sl``, ``flow_label``, ``traffic_class`` and ``hop_limit`` are those of a
    :class:`~rdmacm.PathRecord`.
    ``scope`` is 2 link-local, 5 site-local, 8 organization-local, 0xE global; ``join_state`` is :class:`JoinState`.
    ``mlid`` is the multicast LID of the group; a port may join for another one (``proxy_join``).
    """

    #: The attribute's number.
    ATTRIBUTE: ClassVar = Attribute.MC_MEMBER_RECORD
    #: The length in bytes.
    SIZE: ClassVar[int] = 52

    mgid: Annotated[Gid, whole(0, 16)] = Gid()  # noqa: RUF009 (immutable)
    port_gid: Annotated[Gid, whole(16, 16)] = Gid()  # noqa: RUF009 (immutable)
    q_key: Annotated[int, bits(32, 32)] = 0
    mlid: Annotated[int, bits(36, 16)] = 0
    mtu_selector: Annotated[int, bits(38, 2)] = 0
    mtu: Annotated[int, bits(38, 6, before=2)] = 0
    traffic_class: Annotated[int, bits(39, 8)] = 0
    pkey: Annotated[int, bits(40, 16)] = 0
    rate_selector: Annotated[int, bits(42, 2)] = 0
    rate: Annotated[int, bits(42, 6, before=2)] = 0
    packet_life_time_selector: Annotated[int, bits(43, 2)] = 0
    packet_life_time: Annotated[int, bits(43, 6, before=2)] = 0
    sl: Annotated[int, bits(44, 4)] = 0
    flow_label: Annotated[int, bits(44, 20, before=4)] = 0
    hop_limit: Annotated[int, bits(47, 8)] = 0
    scope: Annotated[int, bits(48, 4)] = 0
    join_state: Annotated[int, bits(48, 4, before=4)] = 0
    proxy_join: Annotated[bool, bits(49, 1)] = False


@dataclass(frozen=True, slots=True)
@laid_out(108)
class NodeRecord(Record):
    """A port and its node: 108 bytes, 112 in a table (InfiniBand Architecture 15.2.5.2).

    ``lid`` is the port's LID, ``port_guid`` its GUID, ``local_port_num`` its number. ``node_type`` is 1 for a channel
    adapter, 2 for a switch, 3 for a router; ``num_ports`` the number of the node's ports; ``node_guid`` and
    ``system_image_guid`` the GUIDs of the node and of the system it is part of; ``partition_cap`` the size of its P_Key
    tables. ``device_id``, ``revision`` and ``vendor_id`` (an IEEE OUI) are the vendor's. ``base_version`` and
    ``class_version`` are those of its management datagrams. ``node_description`` has up to 64 bytes, without the zeros
    that pad it.
    """

    #: The attribute's number.
    ATTRIBUTE: ClassVar = Attribute.NODE_RECORD
    #: The length in bytes.
    SIZE: ClassVar[int] = 108

    lid: Annotated[int, bits(0, 16)] = 0
    base_version: Annotated[int, bits(4, 8)] = 1
    class_version: Annotated[int, bits(5, 8)] = 1
    node_type: Annotated[int, bits(6, 8)] = NodeInfoType.CHANNEL_ADAPTER
    num_ports: Annotated[int, bits(7, 8)] = 1
    system_image_guid: Annotated[int, bits(8, 64)] = 0
    node_guid: Annotated[int, bits(16, 64)] = 0
    port_guid: Annotated[int, bits(24, 64)] = 0
    partition_cap: Annotated[int, bits(32, 16)] = 0
    device_id: Annotated[int, bits(34, 16)] = 0
    revision: Annotated[int, bits(36, 32)] = 0
    local_port_num: Annotated[int, bits(40, 8)] = 1
    vendor_id: Annotated[int, bits(41, 24)] = 0
    node_description: Annotated[bytes, whole(44, _NAME_SIZE, pads=True)] = b""

    def __post_init__(self) -> None:
        object.__setattr__(self, "node_description", _name(self.node_description))

    @property
    def description(self) -> str:
        """The node description as text; bytes that are not UTF-8 become backslash escapes."""
        return _text(self.node_description)


@dataclass(frozen=True, slots=True)
@laid_out(72)
class ClassPortInfo(Record):
    """The capabilities of the manager of a class, and where it redirects to (InfiniBand Architecture 13.4.8.1).

    72 bytes. ``base_version`` and ``class_version`` are those of its management datagrams. ``resp_time_value`` is an
    exponent, 4.096 µs · 2^n. ``capability_mask`` and ``capability_mask2`` are specific to the class. Requests go to
    ``redirect_gid``, ``redirect_lid``, ``redirect_qp`` with ``redirect_pkey``, ``redirect_q_key``, ``redirect_sl``,
    ``redirect_tc``, ``redirect_fl``, if these are not 0; traps go to ``trap_gid``, ``trap_lid``, ``trap_qp`` with
    ``trap_pkey``, ``trap_q_key``, ``trap_sl``, ``trap_tc``, ``trap_fl``, ``trap_hl``. In the names, ``tc`` is a traffic
    class, ``fl`` a flow label, ``hl`` a hop limit, ``qp`` a queue pair number.
    """

    #: The attribute's number.
    ATTRIBUTE: ClassVar = Attribute.CLASS_PORT_INFO
    #: The length in bytes.
    SIZE: ClassVar[int] = 72

    base_version: Annotated[int, bits(0, 8)] = 1
    class_version: Annotated[int, bits(1, 8)] = 2
    capability_mask: Annotated[int, bits(2, 16)] = 0
    capability_mask2: Annotated[int, bits(4, 27)] = 0
    resp_time_value: Annotated[int, bits(7, 5, before=3)] = 0
    redirect_gid: Annotated[Gid, whole(8, 16)] = Gid()  # noqa: RUF009 (immutable)
    redirect_tc: Annotated[int, bits(24, 8)] = 0
    redirect_sl: Annotated[int, bits(25, 4)] = 0
    redirect_fl: Annotated[int, bits(25, 20, before=4)] = 0
    redirect_lid: Annotated[int, bits(28, 16)] = 0
    redirect_pkey: Annotated[int, bits(30, 16)] = 0
    redirect_qp: Annotated[int, bits(33, 24)] = 0
    redirect_q_key: Annotated[int, bits(36, 32)] = 0
    trap_gid: Annotated[Gid, whole(40, 16)] = Gid()  # noqa: RUF009 (immutable)
    trap_tc: Annotated[int, bits(56, 8)] = 0
    trap_sl: Annotated[int, bits(57, 4)] = 0
    trap_fl: Annotated[int, bits(57, 20, before=4)] = 0
    trap_lid: Annotated[int, bits(60, 16)] = 0
    trap_pkey: Annotated[int, bits(62, 16)] = 0
    trap_hl: Annotated[int, bits(64, 8)] = 0
    trap_qp: Annotated[int, bits(65, 24)] = 0
    trap_q_key: Annotated[int, bits(68, 32)] = 0
