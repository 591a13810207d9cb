"""The kernel's RDMA devices as sysfs shows them: ports, tables of GIDs and P_Keys, counters."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rdmacm.address import Gid
from rdmacm.kernel.nldev import device_indices, port_states
from rdmacm.net.types import Interface
from rdmacm.proto.constants import LONGEST_MESSAGE
from rdmacm.resolution.hosts import mtu_code
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import (
    GidType,
    LinkLayer,
    Mtu,
    NodeType,
    PortCapFlag,
    PortFlag,
    PortState,
    TransportType,
)

#: The name of the provider.
PROVIDER = "kernel"
#: Sysfs does not show the longest message; this is the architecture's limit, in bytes.
#: Speeds of one lane in Gb/s to the codes of ``active_speed``.
_LANE_SPEEDS = ((3, 1), (6, 2), (12, 8), (15, 16), (27, 32), (54, 64), (107, 128), (214, 256))
#: The greatest code that ``active_speed`` has room for (NDR).
_LARGEST_SPEED = 128
#: The type of an IPoIB interface (ARPHRD_INFINIBAND).
_IPOIB_TYPE = "32"
#: Lanes to the codes of ``active_width``.
_WIDTHS = {"1X": 1, "2X": 16, "4X": 2, "8X": 4, "12X": 8}
#: Devices whose reasons are told.
_MOST_REASONS = 3
#: The drivers of devices that are on no bus, by their description.
_SOFTWARE_DRIVERS = {"rxe": "rdma_rxe", "Software iWARP stack": "siw"}


class Sysfs:
    """The devices below ``root`` (``/sys``). Everything is read anew by each call."""

    def __init__(self, root: str = "/sys") -> None:
        self._root = Path(root) / "class" / "infiniband"
        self._interfaces = Path(root) / "class" / "net"
        self._modes = Path(root) / "kernel" / "config" / "rdma_cm"

    def names(self) -> list[str]:
        """The names of the devices."""
        return self._names()

    def why_unusable(self, names: Sequence[str], dev: str = "/dev") -> str | None:
        """Why none of these devices can move data for this process; None where one can.

        It can where a port sends and receives, has its network interface in the calling thread's namespace (sysfs shows
        the devices of all namespaces where they share them), and the device's file below ``dev`` may be opened. Without
        IPoIB, a port of InfiniBand has no address to connect to.
        """
        indices, reasons = device_indices(), []
        for name in names:
            reason = self._why_inactive(name, indices.get(name)) or self._why_closed(name, dev)
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons[:_MOST_REASONS])

    def _why_inactive(self, name: str, index: int | None) -> str | None:
        """Why a device has no port that can be used here; None where it has one."""
        try:
            ports = port_states(index) if index is not None else []
        except OSError:
            ports = []
        if not ports:
            return f"{name} is not in this network namespace"
        active = [port for port in ports if port.state == PortState.ACTIVE]
        if any(port.ifindex or self._has_ipoib(name, port.port_num) for port in active):
            return None
        if any(self.is_infiniband(name, port.port_num) for port in active):
            return f"{name} has no IPoIB interface in this network namespace"
        if active:
            return f"the network interface of {name} is in another network namespace"
        return f"port {ports[0].port_num} of {name} is {PortState(ports[0].state).name}"

    def _why_closed(self, name: str, dev: str) -> str | None:
        """Why the device's file may not be opened; None where it may, or where sysfs does not name it."""
        for node in self._names("..", "infiniband_verbs"):
            path = os.path.join(dev, "infiniband", node)
            if self._text("..", "infiniband_verbs", node, "ibdev") == name and not os.access(path, os.R_OK | os.W_OK):
                return f"{path}, the file of {name}, may not be opened, or is not there"
        return None

    def _has_ipoib(self, name: str, port_num: int) -> bool:
        """Whether a port is InfiniBand's, and an IPoIB interface of this network namespace is on its device."""
        if not self.is_infiniband(name, port_num):
            return False
        try:
            adapter = os.path.realpath(self._root / name / "device")
            return any(
                self._text("..", "net", path.name, "type") == _IPOIB_TYPE
                and os.path.realpath(path / "device") == adapter
                for path in self._interfaces.iterdir()
            )
        except OSError:
            return False

    def default_gid_type(self, name: str, port_num: int) -> GidType:
        """The type of the GIDs that ids on a RoCE port use: configfs tells another one than RoCE v2."""
        try:
            mode = (self._modes / name / "ports" / str(port_num) / "default_roce_mode").read_text().strip()
        except OSError:
            mode = ""
        return GidType.ROCE_V1 if mode == "IB/RoCE v1" else GidType.ROCE_V2

    def node_guid(self, name: str) -> int:
        """The GUID of a device, 64 bits; 0 if unknown."""
        try:
            return int(self._text(name, "node_guid").replace(":", ""), 16)
        except ValueError:
            return 0

    def is_infiniband(self, name: str, port_num: int) -> bool:
        """Whether the link layer of a port is InfiniBand."""
        return self._text(name, "ports", str(port_num), "link_layer") == "InfiniBand"

    def inactive_state(self, name: str, port_num: int) -> str:
        """The state of a port that is not ACTIVE, such as DOWN; empty for one that is, or whose state is unknown."""
        number, _, state = self._text(name, "ports", str(port_num), "state").partition(": ")
        return "" if number == str(int(PortState.ACTIVE)) else state

    def is_iwarp(self, name: str) -> bool:
        """Whether a device has the transport iWARP."""
        return self._text(name, "node_type").startswith("4:")

    def driver(self, name: str) -> str:
        """The name of the driver's module; empty if unknown."""
        try:
            return os.path.basename(os.readlink(self._root / name / "device" / "driver"))
        except OSError:
            return _SOFTWARE_DRIVERS.get(self._text(name, "node_desc"), "")

    def firmware(self, name: str) -> str:
        """The version of a device's firmware; empty if it has none."""
        return self._text(name, "fw_ver")

    def device(self, name: str, index: int | None, interfaces: Mapping[str, Interface]) -> Device | None:
        """A device as it is now; None if it is not there. ``index`` is the kernel's, None where it tells none."""
        kind = self._text(name, "node_type").partition(":")[0]
        if not kind:
            return None
        node_type = NodeType(int(kind)) if kind in ("1", "2", "3", "4", "7") else NodeType.CA
        transports = {NodeType.RNIC: TransportType.IWARP, NodeType.UNSPECIFIED: TransportType.UNSPECIFIED}
        ports = tuple(self._port(name, port, interfaces) for port in self._numbers(name, "ports"))
        return Device(
            name,
            index if index is not None else zlib.crc32(name.encode()),
            PROVIDER,
            node_type,
            transports.get(node_type, TransportType.IB),
            self.node_guid(name),
            ports,
            self.driver(name),
            self.firmware(name),
        )

    def _port(self, device: str, number: str, interfaces: Mapping[str, Interface]) -> Port:
        here = device, "ports", number
        is_infiniband = self.is_infiniband(device, int(number))
        gid_numbers = self._numbers(*here, "gids")
        is_ethernet = self._text(*here, "link_layer") == "Ethernet"
        link_layer = LinkLayer.ETHERNET if is_ethernet else LinkLayer.UNSPECIFIED
        if is_infiniband:
            link_layer = LinkLayer.INFINIBAND
        is_roce = is_ethernet and self._text(device, "node_type").startswith("1:")
        gids = self.gids(device, number, is_roce, interfaces, gid_numbers)
        pkeys = [self._number(*here, "pkeys", each) for each in self._numbers(*here, "pkeys")]
        width, speed = _link_codes(self._text(*here, "rate"))
        state = self._number(*here, "state")
        active_mtu: Mtu | None = Mtu.MTU_2048  # sysfs has none of InfiniBand ports; the least that all adapters have
        if not is_infiniband:
            interface = interfaces.get(gids[0].ndev_name if gids else self._text(device, "parent"))
            active_mtu = mtu_code(interface.mtu) if interface else None
        return Port(
            int(number),
            PortState(state) if 0 <= state <= 5 else PortState.NOP,
            link_layer,
            Mtu.MTU_4096,
            active_mtu,
            gids,
            tuple(pkey for pkey in pkeys if pkey),
            gid_tbl_len=len(gid_numbers),
            pkey_tbl_len=len(pkeys),
            port_cap_flags=PortCapFlag(self._number(*here, "cap_mask")),
            flags=PortFlag.GRH_REQUIRED if is_ethernet else PortFlag(0),
            max_msg_sz=LONGEST_MESSAGE,
            lid=self._number(*here, "lid"),
            lmc=self._number(*here, "lid_mask_count"),
            sm_lid=self._number(*here, "sm_lid"),
            sm_sl=self._number(*here, "sm_sl"),
            active_width=width,
            active_speed=min(speed, _LARGEST_SPEED),
            active_speed_ex=speed if speed > _LARGEST_SPEED else 0,
            phys_state=self._number(*here, "phys_state"),
        )

    def gids(
        self,
        device: str,
        port: str,
        is_roce: bool,
        interfaces: Mapping[str, Interface],
        numbers: list[str],
    ) -> tuple[GidEntry, ...]:
        """The rows of a port's GID table that are in use."""
        here = device, "ports", port
        found = []
        for number in numbers:
            try:
                gid = Gid(self._text(*here, "gids", number))
            except ValueError:
                continue
            if not any(gid):
                continue
            kind = self._text(*here, "gid_attrs", "types", number)
            gid_type = GidType.ROCE_V2 if kind == "RoCE v2" else GidType.ROCE_V1 if is_roce else GidType.IB
            name = self._text(*here, "gid_attrs", "ndevs", number)
            interface = interfaces.get(name)
            found.append(GidEntry(gid, int(number), int(port), gid_type, name, interface.index if interface else 0))
        return tuple(found)

    def counters(self, device: str) -> dict[str, int]:
        """The counters of a device: its driver's, and of each port the driver's and the standard ones, added up.

        Units are the kernel's: ``port_rcv_data`` and ``port_xmit_data`` are in 4 bytes.
        """
        found: dict[str, int] = {}
        folders: list[tuple[str, ...]] = [(device, "hw_counters")]
        for port in self._numbers(device, "ports"):
            folders += [(device, "ports", port, kind) for kind in ("counters", "hw_counters")]
        for folder in folders:
            for name in self._names(*folder):
                text = self._text(*folder, name)
                if name != "lifespan" and text.isdigit():
                    found[name] = found.get(name, 0) + int(text)
        return found

    def cm_counters(self) -> dict[str, int]:
        """The messages of the connection managers of all ports, by direction and type: ``tx_req``, ``rx_rep`` ..."""
        found: dict[str, int] = {}
        for device in self.names():
            for port in self._numbers(device, "ports"):
                for key, count in self.cm_counters_of(device, port).items():
                    found[key] = found.get(key, 0) + count
        return found

    def cm_counters_of(self, device: str, port: str) -> dict[str, int]:
        """As :meth:`cm_counters`, of one port."""
        found: dict[str, int] = {}
        for folder, prefix in _CM_FOLDERS.items():
            here = device, "ports", port, folder
            for name in self._names(*here):
                text = self._text(*here, name)
                if text.isdigit():
                    found[f"{prefix}_{name}"] = int(text)
        return found

    # -- files ----------------------------------------------------------------------------------------

    def _text(self, *path: str) -> str:
        """The line of a file; empty if it cannot be read."""
        try:
            # Strings and bytes: pathlib and the decoder of a text file take longer than the kernel.
            with open("/".join((str(self._root), *path)), "rb") as file:
                return file.read().decode().strip()
        except (OSError, UnicodeError):
            return ""

    def _number(self, *path: str) -> int:
        """The number at the beginning of a file; 0 if there is none."""
        try:
            return int(self._text(*path).partition(":")[0], 0)
        except ValueError:
            return 0

    def _numbers(self, *path: str) -> list[str]:
        """The files of a folder that have numbers as names, in order."""
        return sorted((name for name in self._names(*path) if name.isdigit()), key=int)

    def _names(self, *path: str) -> list[str]:
        """The names in a folder, in order; none if it cannot be read."""
        try:
            return sorted(os.listdir(self._root.joinpath(*path)))
        except OSError:
            return []


#: The folders of the connection manager's counters, and how their counters' names begin.
_CM_FOLDERS = {
    "cm_tx_msgs": "tx",
    "cm_rx_msgs": "rx",
    "cm_tx_retries": "tx_retries",
    "cm_rx_duplicates": "rx_duplicates",
}


def _link_codes(rate: str) -> tuple[int, int]:
    """The codes of width and speed for a rate as sysfs writes it: ``100 Gb/sec (4X EDR)``; 0 if unknown."""
    words = rate.replace("(", " ").replace(")", " ").split()
    width = next((word for word in words if word in _WIDTHS), "")
    try:
        lane = float(words[0]) / int(width[:-1])
    except (IndexError, ValueError):
        return 0, 0
    return _WIDTHS[width], next((code for limit, code in _LANE_SPEEDS if lane < limit), 0)
