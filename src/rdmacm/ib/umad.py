"""Ports of real InfiniBand devices, through Linux's ib_umad: ``/dev/infiniband/umadN``.

The kernel reassembles segmented responses (RMPP) and acknowledges their segments. Class 7 belongs to the kernel's own
connection manager, so this transport carries subnet administration only. See ``Documentation/infiniband/user_mad.rst``
and ``include/uapi/rdma/ib_user_mad.h`` of Linux.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter
from collections.abc import Sequence

from rdmacm.address import Gid
from rdmacm.errors import RdmaError, cm_error
from rdmacm.ib.transport import IbPort, ReceivedMad, without_empty_end
from rdmacm.proto.constants import GSI_QPN
from rdmacm.proto.mad import GSI_Q_KEY, HEADER_SIZE, MAD_SIZE, RESPONSE, MadAddress, MgmtClass
from rdmacm.proto.sa import mad as sa_mad
from rdmacm.proto.sa import rmpp
from rdmacm.proto.sa.records import RATE_GBPS
from rdmacm.proto.wire import Buffer
from rdmacm.verbs.enums import PortState

_ABI_VERSION = 5
_ENABLE_PKEY = 0x00001B03
_REGISTER_AGENT = 0xC01C1B01
#: ``struct ib_user_mad_reg_req``: agent id (out), methods of unsolicited MADs, QPN, class and its version, OUI, RMPP.
_REGISTRATION = struct.Struct("=I16sBBB3sBx")
#: ``struct ib_user_mad_hdr`` in three parts: agent, status, timeout, retries, length in native byte order; QPN, Q_Key,
#: LID, SL, path bits, GRH present, GID index, hop limit, traffic class, GID, flow label in network order; P_Key index.
_HEADER_HOST = struct.Struct("=5I")
_HEADER_WIRE = struct.Struct("!IIHBBBBBB16sI")
_PKEY_INDEX = struct.Struct("=H6x")
_USER_MAD_HEADER_SIZE = 64
_METHOD = 3
_TRANSACTION_ID = slice(8, 16)

#: The most MADs that one call of receive() returns.
_BATCH = 64
#: The longest response that is read, in bytes: about a million path records.
_MAX_SIZE = 64 << 20
#: The most requests without a response.
_MAX_OUTSTANDING = 4096
#: How long the kernel waits for a response, in milliseconds; longer than queries wait.
_RESPONSE_TIMEOUT = 8000

#: The Gb/s in sysfs to ``ibv_rate``.
_RATES = {f"{gigabits:g}": code for code, gigabits in RATE_GBPS.items()}


class UmadTransport:
    """A port of a real device: a :class:`rdmacm.ib.transport.MadTransport` for the subnet administration class.

    ``sys`` and ``dev`` are the directories of sysfs and of the device files.

    The kernel delivers a response only while it waits for it, and refuses a request with a transaction id that it
    already waits for. So a caller's second copy of a request would be refused, or a late response to the first copy
    would be lost. Therefore each MAD sent gets a transaction id of its own, and the kernel waits long for its response;
    the response gets the caller's transaction id back. Repeating requests is left to the caller.
    """

    reassembles = True
    carries_cm = False

    def __init__(self, device: str, port: int = 1, *, sys: str = "/sys", dev: str = "/dev") -> None:
        self._device = device
        self._port_num = port
        self._sys = sys
        self._dev = dev
        self.name: str = f"umad:{device}/{port}"
        self.dropped: dict[str, int] = Counter()
        #: The descriptor of the device file; -1 while the port is not open.
        self._fd = -1
        #: The id of the registered agent.
        self._agent = 0
        #: Transaction ids of this transport (32 bits) to those of the caller (8 bytes).
        self._outstanding: dict[int, bytes] = {}
        #: The last transaction id.
        self._last_tid = 0

    def open(self) -> None:
        """Start to receive; OSError: ENODEV no such port or file, EOPNOTSUPP no InfiniBand, EACCES no permission."""
        if self._fd >= 0:
            return
        if self._port_file("link_layer", "InfiniBand") != "InfiniBand":
            raise self._error(
                errno.EOPNOTSUPP, "the port is Ethernet, which has no subnet administrator", "an InfiniBand port"
            )
        path = os.path.join(self._dev, "infiniband", self._umad_name())
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._agent = _register_agent(fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            hint = _HINTS.get(error.errno or 0)
            raise self._error(error.errno or errno.EIO, f"{path}: {error.strerror}", hint) from None
        self._fd = fd

    def port(self) -> IbPort:
        """The attributes of the port in sysfs; OSError ENODEV if it is gone. (Sysfs has no MTU; 2048 is assumed.)"""
        try:
            gids = without_empty_end([Gid(text) for text in self._table("gids")], lambda gid: not gid.interface_id)
            pkeys = without_empty_end([int(text, 0) for text in self._table("pkeys")], lambda pkey: not pkey)
            return IbPort(
                device=self._device,
                port_num=self._port_num,
                node_guid=int(self._file("node_guid").replace(":", ""), 16),
                port_guid=gids[0].interface_id,
                gids=gids,
                pkeys=pkeys,
                state=PortState(int(self._port_file("state").partition(":")[0])),
                lid=int(self._port_file("lid"), 0),
                lmc=int(self._port_file("lid_mask_count"), 0),
                sm_lid=int(self._port_file("sm_lid"), 0),
                sm_sl=int(self._port_file("sm_sl"), 0),
                rate=_RATES.get(self._port_file("rate", "").partition(" ")[0], 0),
            )
        except (ValueError, IndexError) as problem:
            raise self._error(errno.EIO, f"sysfs holds an invalid value: {problem}", None) from None

    def fileno(self) -> int:
        """The descriptor of the device file; -1 before open()."""
        return self._fd

    def send(self, address: MadAddress, mad: Buffer) -> None:
        """Send a MAD of 256 bytes of the subnet administration class."""
        if len(mad) != MAD_SIZE:
            raise ValueError(f"a MAD has {MAD_SIZE} bytes, not {len(mad)}")
        if self._fd < 0:
            self.dropped["closed"] += 1
            return
        if mad[1] != MgmtClass.SUBN_ADM:
            self.dropped["class"] += 1
            return
        body = bytearray(mad)
        is_request = not body[_METHOD] & RESPONSE
        tid = 0
        if is_request:
            if len(self._outstanding) >= _MAX_OUTSTANDING:
                self.dropped["too many outstanding"] += 1
                return
            tid = self._next_tid()
            self._outstanding[tid] = bytes(body[_TRANSACTION_ID])
            body[_TRANSACTION_ID] = tid.to_bytes(8, "big")
        header = _header(self._agent, _RESPONSE_TIMEOUT if is_request else 0, address)
        try:
            os.write(self._fd, header + body)
        except OSError:
            self._outstanding.pop(tid, None)
            self.dropped["send"] += 1

    def receive(self) -> Sequence[ReceivedMad]:
        """Up to 64 responses. A request without a response comes back from the kernel and is counted."""
        received: list[ReceivedMad] = []
        for _ in range(_BATCH):
            packet = self._read()
            if packet is None:
                break
            one = self._unpack(packet)
            if one is not None:
                received.append(one)
        return received

    def close(self) -> None:
        """Close the device file. The kernel drops the outstanding requests."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._outstanding.clear()

    #: Closing the descriptor in a child does not close the parent's.
    abandon = close

    # -- MADs -------------------------------------------------------------------------------------------------

    def _next_tid(self) -> int:
        while True:
            self._last_tid = self._last_tid % 0xFFFFFFFF + 1
            if self._last_tid not in self._outstanding:
                return self._last_tid

    def _read(self) -> bytes | None:
        """The next header with its MAD; None if there is none."""
        size = _USER_MAD_HEADER_SIZE + MAD_SIZE
        while self._fd >= 0:
            try:
                return os.read(self._fd, size)
            except OSError as error:
                if error.errno == errno.ENOSPC and size < _MAX_SIZE:
                    size *= 4  # the MAD stays at the head of the kernel's queue until it is read whole
                elif error.errno == errno.ENOSPC:
                    # The MAD blocks the queue: those behind it cannot be read.
                    self.dropped["too long"] += 1
                    self.close()
                elif error.errno in (errno.EIO, errno.ENODEV):
                    # The device is gone, and its file would always poll readable.
                    self.close()
                else:
                    if error.errno not in (errno.EAGAIN, errno.EINTR):
                        self.dropped["receive"] += 1
                    return None
        return None

    def _unpack(self, packet: bytes) -> ReceivedMad | None:
        if len(packet) < _USER_MAD_HEADER_SIZE + HEADER_SIZE:
            self.dropped["malformed"] += 1
            return None
        mad = packet[_USER_MAD_HEADER_SIZE:]
        status = _HEADER_HOST.unpack_from(packet)[1]
        # The kernel has replaced the upper half.
        callers_tid = self._outstanding.pop(int.from_bytes(mad[_TRANSACTION_ID][4:], "big"), None)
        if status:
            self.dropped["unanswered" if status == errno.ETIMEDOUT else "undeliverable"] += 1
            return None
        if callers_tid is None:
            self.dropped["unsolicited"] += 1
            return None
        qpn, _, lid, sl, _, has_grh, gid_index, hops, traffic_class, gid, flow = _HEADER_WIRE.unpack_from(packet, 20)
        address = MadAddress(lid, qpn, sl, _PKEY_INDEX.unpack_from(packet, 56)[0])
        if has_grh:
            address = address._replace(
                gid=Gid(gid), gid_index=gid_index, flow_label=flow, traffic_class=traffic_class, hop_limit=hops
            )
        return address, mad[:8] + callers_tid + mad[16:]

    # -- sysfs ------------------------------------------------------------------------------------------------

    def _umad_name(self) -> str:
        """``umad0``."""
        classes = os.path.join(self._sys, "class", "infiniband_mad")
        version = _read(os.path.join(classes, "abi_version"))
        if version is None:
            raise self._error(errno.ENODEV, "the kernel has no ib_umad", "'modprobe ib_umad'")
        if version != str(_ABI_VERSION):
            raise self._error(errno.EPROTONOSUPPORT, f"ABI {version} of ib_umad is not {_ABI_VERSION}", None)
        for name in sorted(os.listdir(classes)):
            of = [_read(os.path.join(classes, name, file)) for file in ("ibdev", "port")]
            if name.startswith("umad") and of == [self._device, str(self._port_num)]:
                return name
        raise self._absent()

    def _file(self, name: str, default: str | None = None) -> str:
        text = _read(os.path.join(self._sys, "class", "infiniband", self._device, name))
        if text is None and default is None:
            raise self._absent()
        return text or default or ""

    def _port_file(self, name: str, default: str | None = None) -> str:
        return self._file(f"ports/{self._port_num}/{name}", default)

    def _table(self, name: str) -> list[str]:
        """The entries of ``gids`` or ``pkeys``, by their indices."""
        directory = os.path.join(self._sys, "class", "infiniband", self._device, "ports", str(self._port_num), name)
        try:
            indices = sorted(int(entry) for entry in os.listdir(directory))
        except OSError:
            raise self._absent() from None
        return [self._port_file(f"{name}/{index}") for index in indices]

    def _absent(self) -> RdmaError:
        return self._error(
            errno.ENODEV,
            f"there is no device {self._device!r} with an InfiniBand port {self._port_num}",
            "'ls /sys/class/infiniband', or 'rdma link'",
        )

    def _error(self, number: int, text: str, hint: str | None) -> RdmaError:
        return cm_error(number, text, "open_device", self.name, hint)


_HINTS = {
    errno.EACCES: "running as root, or as a member of the file's group, which a udev rule sets: "
    'KERNEL=="umad*", GROUP="rdma", MODE="0660"',
    errno.ENOENT: "checking that udev has created it, and that a container has it",
}


def _register_agent(fd: int) -> int:
    """Register an agent for subnet administration; returns its id."""
    from fcntl import ioctl

    ioctl(fd, _ENABLE_PKEY)
    # No methods: the agent receives responses only.
    request = bytearray(
        _REGISTRATION.pack(0, bytes(16), GSI_QPN, MgmtClass.SUBN_ADM, sa_mad.CLASS_VERSION, bytes(3), rmpp.VERSION)
    )
    ioctl(fd, _REGISTER_AGENT, request, True)
    agent: int = _REGISTRATION.unpack(request)[0]
    return agent


def _header(agent: int, timeout: int, address: MadAddress) -> bytes:
    """The 64 bytes before a MAD that is sent. The kernel waits ``timeout`` milliseconds for a response; 0: for none."""
    return b"".join(
        (
            _HEADER_HOST.pack(agent, 0, timeout, 0, _USER_MAD_HEADER_SIZE + MAD_SIZE),
            _HEADER_WIRE.pack(
                address.qpn,
                GSI_Q_KEY,
                address.lid,
                address.sl,
                0,
                address.gid is not None,
                address.gid_index,
                address.hop_limit,
                address.traffic_class,
                address.gid or bytes(16),
                address.flow_label,
            ),
            _PKEY_INDEX.pack(address.pkey_index),
        )
    )


def _read(path: str) -> str | None:
    """The content of a file of one line; None if it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None
