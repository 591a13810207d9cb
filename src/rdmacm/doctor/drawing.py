"""Routes, interfaces, devices and GIDs as inline SVG: four columns, with lines between what belongs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from rdmacm.doctor.view import Host, ip_text
from rdmacm.net.types import Interface
from rdmacm.verbs.device import Device, Port
from rdmacm.verbs.enums import GidType, LinkLayer, PortState, TransportType

#: Pixels: the width of a character at the size of the text, of a line, between boxes, and of the room for lines.
_CHAR, _LINE, _GAP, _MARGIN, _BETWEEN = 7.3, 17, 10, 8, 32
#: Characters in a line of each column: routes, interfaces, devices, GIDs.
_WIDTHS = (26, 29, 20, 46)
_TITLES = ("routes", "interfaces", "devices", "GIDs")
#: Rows of one port, and routes, that are drawn.
_MOST_GIDS, _MOST_ROUTES = 24, 40
_TYPES = {GidType.IB: "IB", GidType.ROCE_V1: "v1", GidType.ROCE_V2: "v2"}


@dataclass
class Box:
    """A box: lines of text, the first of them bold; ``style`` is a class of the page, ``after`` its neighbours."""

    key: str
    lines: list[str]
    style: str = ""
    after: list[str] = field(default_factory=list)
    x: float = 0
    y: float = 0

    @property
    def height(self) -> float:
        return _LINE * len(self.lines) + 2 * _MARGIN


def drawing(host: Host, soft: Sequence[Device]) -> str:
    """The SVG of a host; ``soft``: the software devices."""
    columns = [_routes(host), _interfaces(host, soft), *_devices(host, soft)]
    used = {box.key for column in columns for box in column}
    x, height = 1.0, 0.0
    for column, width in zip(columns, _WIDTHS, strict=True):
        y = _LINE + 2.0 * _MARGIN
        for box in column:
            box.x, box.y = x, y
            box.after = [key for key in box.after if key in used]
            y += box.height + _GAP
        height = max(height, y)
        x += width * _CHAR + 2 * _MARGIN + _BETWEEN
    width_of_all = x - _BETWEEN + 1
    wide = [(box, width) for column, width in zip(columns, _WIDTHS, strict=True) for box in column]
    by_key = {box.key: box for box, _ in wide}
    size = f'width="{width_of_all:.0f}" height="{height:.0f}" viewBox="0 0 {width_of_all:.0f} {height:.0f}"'
    parts = [f'<svg role="img" aria-label="routes, interfaces, devices and GIDs" {size}>']
    parts += [_line(box, width, by_key[key]) for box, width in wide for key in box.after]
    for at, (column, width) in enumerate(zip(columns, _WIDTHS, strict=True)):
        x = column[0].x if column else _column_x(at)
        parts.append(f'<text class="head" x="{x + _MARGIN:.1f}" y="{_LINE}">{_TITLES[at]}</text>')
        parts += [_shape(box, width) for box in column]
    return "".join([*parts, "</svg>"])


def _column_x(at: int) -> float:
    return 1 + sum(width * _CHAR + 2 * _MARGIN + _BETWEEN for width in _WIDTHS[:at])


def _line(box: Box, width: int, other: Box) -> str:
    x1, y1 = box.x + width * _CHAR + 2 * _MARGIN, box.y + box.height / 2
    x2, y2 = other.x, other.y + other.height / 2
    middle = (x1 + x2) / 2
    return f'<path class="edge" d="M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"/>'


def _shape(box: Box, width: int) -> str:
    size = f'width="{width * _CHAR + 2 * _MARGIN:.1f}" height="{box.height:.1f}"'
    parts = [f'<g class="box {box.style}"><title>{escape(chr(10).join(box.lines))}</title>']
    parts.append(f'<rect x="{box.x:.1f}" y="{box.y:.1f}" rx="5" {size}/>')
    for at, line in enumerate(box.lines):
        shown = line if len(line) <= width else f"{line[: width - 1]}…"
        kind = ' class="name"' if at == 0 else ""
        y = box.y + _MARGIN + _LINE * (at + 0.75)
        parts.append(f'<text{kind} x="{box.x + _MARGIN:.1f}" y="{y:.1f}">{escape(shown)}</text>')
    return "".join([*parts, "</g>"])


def _routes(host: Host) -> list[Box]:
    found = []
    for at, route in enumerate(host.routes[:_MOST_ROUTES]):
        lines = [route.destination]
        if route.gateway:
            lines.append(f"via {ip_text(route.gateway)}")
        if route.kind != "unicast":
            lines.append(route.kind)
        if route.table != 254:
            lines.append(f"table {route.table}")
        found.append(Box(f"route {at}", lines, "", [f"interface {host.name_of(route.ifindex)}"]))
    rest = len(host.routes) - len(found)
    return [*found, Box("more", [f"and {rest} more"], "muted")] if rest > 0 else found


def _interfaces(host: Host, soft: Sequence[Device]) -> list[Box]:
    devices = joined(host, soft)
    return [_interface(host, face, sorted(devices.get(face.name, ()))) for face in host.interfaces]


def _interface(host: Host, face: Interface, devices: Sequence[str]) -> Box:
    state = "up" if face.is_running else "no carrier" if face.is_up else "down"
    lines = [face.name, f"{state}, MTU {face.mtu}"]
    lines += [f"{ip_text(each.ip)}/{each.prefix_length}" for each in host.addresses_of(face.index)]
    after = [f"device {name}" for name in devices]
    return Box(f"interface {face.name}", lines, "" if face.is_running or face.is_loopback else "down", after)


def _devices(host: Host, soft: Sequence[Device]) -> tuple[list[Box], list[Box]]:
    """The boxes of devices, to which those of interfaces lead, and of GIDs."""
    boxes: list[Box] = []
    gids: list[Box] = []
    for device in host.devices:
        kind = "iWARP" if device.is_iwarp else ""
        for port in device.ports:
            _add(boxes, gids, device.name, port.port, device.driver or "kernel", kind)
    for each in soft:
        kind = "iWARP" if each.transport_type is TransportType.IWARP else ""
        for soft_port in each.ports:
            _add(boxes, gids, each.name, soft_port, "rdmacm", kind)
    return boxes, gids


def _add(boxes: list[Box], gids: list[Box], name: str, port: Port, driver: str, kind: str) -> None:
    layer = kind or ("InfiniBand" if port.link_layer is LinkLayer.INFINIBAND else "RoCE")
    is_active = port.state is PortState.ACTIVE
    key = f"device {name}/{port.port_num}"
    box = Box(key, [f"{name}/{port.port_num}", f"{layer}, {driver}", port.state.name], "" if is_active else "down")
    boxes.append(box)
    if port.gids:
        lines = [f"{name}/{port.port_num}"]
        lines += [f"{row.gid_index:>3} {_TYPES[row.gid_type]:<2} {row.gid}" for row in port.gids[:_MOST_GIDS]]
        if len(port.gids) > _MOST_GIDS:
            lines.append(f"and {len(port.gids) - _MOST_GIDS} more")
        box.after.append(f"gids {name}/{port.port_num}")
        gids.append(Box(f"gids {name}/{port.port_num}", lines))


def joined(host: Host, soft: Sequence[Device]) -> dict[str, set[str]]:
    """The devices (``name/port``) of each interface."""
    found: dict[str, set[str]] = {}
    ports = [(device.name, device.parent, port.port) for device in host.devices for port in device.ports]
    ports += [(device.name, "", port) for device in soft for port in device.ports]
    for name, parent, port in ports:
        for face in {row.ndev_name for row in port.gids} | {parent}:
            if face:
                found.setdefault(face, set()).add(f"{name}/{port.port_num}")
    return found
