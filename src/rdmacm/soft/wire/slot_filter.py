"""Which process a packet is for, if several share UDP port 4791 of a host.

Each process has a slot, 1 to 4095, or several of them. The slot is the upper 12 bits of its queue pair numbers and
communication ids. So a packet names its process: most packets by the destination QP number of the BTH, management
datagrams, which all go to QP 1, by the communication id they answer. Slot 0 gets the others: requests for a service id,
and datagrams without a communication id.

The kernel knows a slot by its *position*, the index of its sockets in the order in which they were bound. Position 0 is
that of slot 0. The others are shifted by a random number of the group (:func:`position_of`). So a stranger who has got
no packet of a process has to guess all 24 bits of a queue pair number and all 32 of a communication id, although the
first process is always at position 1.

The rule is here twice: as functions, and as the program that the kernel runs on every datagram.
"""

from __future__ import annotations

import ctypes
import socket
import struct

from rdmacm.proto.constants import GSI_QPN, MAX_SLOT, QPN_BITS, QPN_MASK
from rdmacm.proto.mad import MgmtClass
from rdmacm.proto.wire import Buffer

#: How many lower bits of a communication id do not belong to the slot.
COMM_ID_BITS = 20

_QPN = 4
_MAD = 20  # after BTH and DETH
_CLASS = _MAD + 1
_ATTRIBUTE = _MAD + 16
_LOCAL_ID = _MAD + 24
_REMOTE_ID = _LOCAL_ID + 4

#: Offset of the service id of a request, eight bytes.
SERVICE_ID = _LOCAL_ID + 8

_COM_MGT = int(MgmtClass.COM_MGT)
_REQ, _REJ, _DREQ, _SIDR_REQ, _SIDR_REP = 0x10, 0x12, 0x15, 0x17, 0x18
_LAST_ATTRIBUTE = 0x1A
_REQUESTS = (_REQ, _SIDR_REQ)
#: Where the communication id of its receiver begins, by attribute id. Of a SIDR_REP it is the request id, which
#: the requester chose.
_RECEIVER_ID = {
    attribute: (_LOCAL_ID if attribute == _SIDR_REP else _REMOTE_ID)
    for attribute in range(_REQ + 1, _LAST_ATTRIBUTE + 1)
    if attribute != _SIDR_REQ
}

_SO_ATTACH_REUSEPORT_CBPF = 51


def qpn_of(packet: Buffer) -> int:
    """The destination QP number of a packet. The packet has a BTH."""
    return packet[_QPN + 1] << 16 | packet[_QPN + 2] << 8 | packet[_QPN + 3]


def slot_of(packet: Buffer) -> int:
    """The slot of the process that a packet is for. The packet has a BTH."""
    if packet[_QPN + 3] != GSI_QPN or packet[_QPN + 2] or packet[_QPN + 1]:
        return packet[_QPN + 1] << 4 | packet[_QPN + 2] >> 4
    if len(packet) <= SERVICE_ID or packet[_CLASS] != _COM_MGT:
        return 0
    at = _RECEIVER_ID.get(packet[_ATTRIBUTE] << 8 | packet[_ATTRIBUTE + 1])
    return 0 if at is None else packet[at] << 4 | packet[at + 1] >> 4


def slot_of_mad(mad: Buffer) -> int:
    """The slot of the process that a MAD is for."""
    at = _RECEIVER_ID.get(mad[_ATTRIBUTE - _MAD] << 8 | mad[_ATTRIBUTE - _MAD + 1])
    if at is None or mad[_CLASS - _MAD] != _COM_MGT:
        return 0
    return mad[at - _MAD] << 4 | mad[at - _MAD + 1] >> 4


def is_request(packet: Buffer) -> bool:
    """Whether a packet is a request for a service id: a REQ or SIDR_REQ."""
    return (
        len(packet) >= SERVICE_ID + 8
        and packet[_ATTRIBUTE + 1] in _REQUESTS
        and not packet[_ATTRIBUTE]
        and packet[_CLASS] == _COM_MGT
        and packet[_QPN + 3] == GSI_QPN
        and not (packet[_QPN + 1] or packet[_QPN + 2])
    )


def names_no_connection(packet: Buffer) -> bool:
    """Whether a packet is a REJ without the communication id of its receiver: its sender gave up before the REP."""
    return (
        len(packet) >= SERVICE_ID and _has_attribute(packet, (_REJ,)) and not any(packet[_REMOTE_ID : _REMOTE_ID + 4])
    )


def is_disconnect_request(packet: Buffer) -> bool:
    """Whether a packet is a DREQ."""
    return len(packet) > SERVICE_ID and _has_attribute(packet, (_DREQ,))


def _has_attribute(packet: Buffer, attributes: tuple[int, ...]) -> bool:
    """Whether a packet, which has a communication id, is a message of the connection manager with an attribute."""
    return (
        packet[_CLASS] == _COM_MGT
        and packet[_ATTRIBUTE + 1] in attributes
        and not packet[_ATTRIBUTE]
        and qpn_of(packet) == GSI_QPN
    )


def slot_of_sender(request: Buffer) -> int:
    """The slot of the process that has sent a request (:func:`is_request`)."""
    return request[_LOCAL_ID] << 4 | request[_LOCAL_ID + 1] >> 4


def shift_of(group: bytes) -> int:
    """The shift of a group with this random name."""
    return int.from_bytes(group, "big") % MAX_SLOT


def position_of(slot: int, shift: int) -> int:
    """The position of the sockets of a slot, in a group with this ``shift``, 0 to 4094."""
    return (slot + shift) % MAX_SLOT + 1 if slot else 0


def slot_at(position: int, shift: int) -> int:
    """The slot at a position: the inverse of :func:`position_of`."""
    return (position - 1 - shift) % MAX_SLOT or MAX_SLOT if position else 0


# Instructions of classic BPF (linux/bpf_common.h): load a word, half word or byte of the packet into the accumulator,
# calculate, compare, return. A load beyond the end of the packet ends the program with 0.
_LOAD4, _LOAD2, _LOAD1 = 0x20, 0x28, 0x30
_ADD, _AND, _SHIFT, _REMAINDER = 0x04, 0x54, 0x74, 0x94
_SKIP, _IF_EQUAL, _IF_ABOVE, _RETURN, _RETURN_0 = 0x05, 0x15, 0x25, 0x16, 0x06


def _program(shift: int) -> tuple[tuple[int, int, int, int], ...]:
    """The instructions: (code, instructions to skip if true, if false, operand)."""
    return (
        (_LOAD4, 0, 0, _QPN),
        (_AND, 0, 0, QPN_MASK),
        (_IF_EQUAL, 2, 0, GSI_QPN),
        (_SHIFT, 0, 0, QPN_BITS),
        (_SKIP, 0, 0, 12),
        (_LOAD1, 0, 0, SERVICE_ID),  # ends the program if the packet is shorter
        (_LOAD1, 0, 0, _CLASS),
        (_IF_EQUAL, 0, 14, MgmtClass.COM_MGT),
        (_LOAD2, 0, 0, _ATTRIBUTE),
        (_IF_EQUAL, 5, 0, _SIDR_REP),
        (_IF_EQUAL, 11, 0, _SIDR_REQ),
        (_IF_ABOVE, 0, 10, _REQ),
        (_IF_ABOVE, 9, 0, _LAST_ATTRIBUTE),
        (_LOAD4, 0, 0, _REMOTE_ID),
        (_SKIP, 0, 0, 1),
        (_LOAD4, 0, 0, _LOCAL_ID),
        (_SHIFT, 0, 0, COMM_ID_BITS),
        (_IF_EQUAL, 4, 0, 0),  # the slot; what follows is position_of()
        (_ADD, 0, 0, shift),
        (_REMAINDER, 0, 0, MAX_SLOT),
        (_ADD, 0, 0, 1),
        (_RETURN, 0, 0, 0),
        (_RETURN_0, 0, 0, 0),
    )


_INSTRUCTION = struct.Struct("=HBBI")


def attach(sock: socket.socket, shift: int) -> None:
    """Have the kernel run the program for all sockets that share a port with this one. OSError if it cannot."""
    instructions = _program(shift)
    code = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*line) for line in instructions))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
