"""A libibverbs without hardware (``ibverbs.c``), as the tests describe its devices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from rdmacm.address import Gid
from rdmacm.kernel import verbs
from rdmacm.kernel.verbs import library
from rdmacm.kernel.verbs.layouts import ibv_gid_entry
from rdmacm.verbs import Context, GidType, LinkLayer, NodeType, PortState, TransportType

__all__ = ["FakeLibrary"]


class FakeDevice(ctypes.Structure):
    """``struct fake_device`` of the library."""

    _fields_ = [
        ("name", ctypes.c_char * 32),
        *(
            (name, ctypes.c_int)
            for name in (
                *("node_type", "transport_type", "ports", "link_layer", "state", "gid_tbl_len", "pkey_tbl_len"),
                *("active_speed", "active_speed_ex"),
            )
        ),
        ("cap_flags_ex", ctypes.c_uint64),
    ]


class Controls(ctypes.Structure):
    """``struct fake`` of the library."""

    _fields_ = [
        *(
            (name, ctypes.c_int)
            for name in (
                *("max_inline", "inline_errno", "granted_wr_step", "granted_inline", "ah_errno", "complete_errno"),
                *("send_ops", "refused_access", "access_errno", "fork_init", "fork_inits", "pkey_queries", "ahs"),
                *("access", "busy_cqs", "cq_ends", "contexts", "cqs", "channels"),
            )
        ),
        ("log", ctypes.c_char * 4096),
    ]


class FakeLibrary:
    """The library and its devices."""

    def __init__(self, path: str) -> None:
        self.library = library.Library(path)
        self._raw = ctypes.CDLL(path)
        #: What the library shall do; zeros at first.
        self.controls = Controls.in_dll(self._raw, "fake")
        self._devices = (FakeDevice * 4).in_dll(self._raw, "fake_devices")
        self._gids = (ibv_gid_entry * 256).in_dll(self._raw, "fake_gids")
        self._counts = [ctypes.c_int.in_dll(self._raw, f"fake_{name}_count") for name in ("devices", "gids")]

    def reset(self) -> None:
        for part in (self.controls, self._devices, self._gids, *self._counts):
            ctypes.memset(ctypes.byref(part), 0, ctypes.sizeof(part))
        self.controls.max_inline = 1 << 20
        ctypes.c_int.in_dll(self._raw, "fake_test").value += 1

    def add_device(
        self,
        name: str = "mlx5_0",
        *,
        node_type: int = NodeType.CA,
        transport_type: int = TransportType.IB,
        link_layer: int = LinkLayer.ETHERNET,
        **values: int,
    ) -> Context:
        """Add a device with one port, and open it. ``values``: other fields of ``struct fake_device``."""
        device = self._devices[self._counts[0].value]
        self._counts[0].value += 1
        device.name, device.node_type, device.transport_type = name.encode(), node_type, transport_type
        device.link_layer, device.ports, device.state = link_layer, 1, PortState.ACTIVE
        device.gid_tbl_len, device.pkey_tbl_len = 16, 1
        for field, value in values.items():
            setattr(device, field, value)
        return Context(name, lambda: verbs.read_device(name), lambda: verbs.open_device(name))

    def set_gids(self, rows: Sequence[tuple[int, Gid, GidType, int]]) -> None:
        """The GID table of every port 1: index, GID, type, index of the interface."""
        self._counts[1].value = len(rows)
        for entry, (index, gid, gid_type, ifindex) in zip(self._gids, rows, strict=False):
            ctypes.memmove(entry.gid, bytes(gid), 16)
            entry.gid_index, entry.port_num, entry.gid_type, entry.ndev_ifindex = index, 1, gid_type, ifindex

    def event(self, context: Context, number: int, port_num: int) -> None:
        """An asynchronous event of a device."""
        self._raw.fake_event(ctypes.c_void_p(verbs.open_device(context.name).opened.context), number, port_num)

    def log(self) -> list[str]:
        """The requests that were posted since the last call."""
        lines: list[str] = self.controls.log.decode().splitlines()
        self.controls.log = b""
        return lines
