"""``rdma dev`` and ``rdma link`` for programs: the devices of a server, in the form of iproute2's rdma(8).

That command asks the kernel, which does not know these devices. :mod:`rdmacm.run.command` puts this one in front of it.
"""

from __future__ import annotations

import getopt
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rdmacm.run import protocol
from rdmacm.run.protocol import Request

_USAGE = """\
Usage: rdma [ -j | --json ] [ -p | --pretty ] [ -d | --details ] { dev | link } [ show [ DEV[/PORT] ] ]
Shows the devices of rdmacm run. They cannot be changed, and have no resources and statistics."""
_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_PHYS_STATES = {1: "SLEEP", 2: "POLLING", 3: "DISABLED", 5: "LINK_UP"}
_OPTIONS = {"h": "help", "V": "version", "j": "json", "p": "pretty", "d": "details", "r": "raw"}
#: Of a device, its only one.
_PORT = "1"
_OBJECTS = ("dev", "link", "resource", "system", "statistic", "monitor")

#: What is shown of a device or a port, by name, in iproute2's order.
Shown = dict[str, int | str]


class Refused(Exception):
    """What was asked for is not there; the message says why."""


class _Device(NamedTuple):
    name: str
    number: int
    guid: str
    state: str
    phys_state: str
    netdev_index: int


def main(path: str, arguments: Sequence[str]) -> int:
    """Run the command, for the server whose socket has a path; the status."""
    try:
        given, words = getopt.gnu_getopt(list(arguments), "".join(_OPTIONS), list(_OPTIONS.values()))
        options = {_OPTIONS.get(option[1:], option[2:]) for option, _ in given}
        if "version" in options:
            print("rdma of rdmacm run")
        elif "help" in options or not words or words[0] == "help":
            print(_USAGE)
        else:
            _show(path, words, options)
    except (Refused, getopt.GetoptError) as error:
        print(f"rdma: {error}", file=sys.stderr)
        return 1
    return 0


def _show(path: str, words: Sequence[str], options: set[str]) -> None:
    kind, names = _parse(words)
    shape = _of_link if kind == "link" else _of_device
    found = [shape(device) for device in devices(path) if not names or names[0] in _names(device, kind)]
    if names and not found:
        raise Refused(f"Wrong device name - {names[0]}")
    if "json" in options:
        print(json.dumps(found, indent=4 if "pretty" in options else None))
    else:
        for shown in found:
            print(_line(kind, shown, "details" in options))


def _names(device: _Device, kind: str) -> set[str]:
    return {device.name, f"{device.name}/{_PORT}"} if kind == "link" else {device.name}


def _parse(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """``dev`` or ``link``, and the name that was given, if any. Words may be cut short."""
    kind = next((each for each in _OBJECTS if each.startswith(words[0])), "")
    verb = words[1] if len(words) > 1 else "show"
    if kind in ("dev", "link") and ("show".startswith(verb) or "list".startswith(verb)) and len(words) <= 3:
        return kind, words[2:]
    raise Refused(f"'{' '.join(words)}' is not supported: these are devices of rdmacm run, not of the kernel\n{_USAGE}")


def _of_device(device: _Device) -> Shown:
    return {
        "ifindex": device.number,
        "ifname": device.name,
        "node_type": "ca",
        "node_guid": device.guid,
        "sys_image_guid": device.guid,
    }


def _of_link(device: _Device) -> Shown:
    shown: Shown = {
        "ifindex": device.number,
        "ifname": device.name,
        "port": int(_PORT),
        "state": device.state,
        "physical_state": device.phys_state,
    }
    try:
        return {**shown, "netdev": socket.if_indextoname(device.netdev_index), "netdev_index": device.netdev_index}
    except OSError:  # the interface has gone
        return shown


def _line(kind: str, shown: Shown, has_details: bool) -> str:
    fields = dict(shown)
    index, name = fields.pop("ifindex"), fields.pop("ifname")
    head = f"{index}: {name}:" if kind == "dev" else f"link {name}/{fields.pop('port')}"
    if not has_details:
        fields.pop("netdev_index", None)
    return " ".join([head, *(f"{key} {value}" for key, value in fields.items()), ""])


# -- the server -----------------------------------------------------------------------------------------------


def devices(path: str) -> list[_Device]:
    """The devices as a server knows them now."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(path)
            _ask(sock, Request.HELLO, protocol.HELLO.pack(protocol.VERSION, os.getpid()))
            body = _ask(sock, Request.DEVICES)
    except OSError as error:
        raise Refused(f"rdmacm run does not answer ({error.strerror})") from error
    (count,) = protocol.DEVICES.unpack_from(body)
    at, found = protocol.DEVICES.size, []
    for _ in range(count):
        name, guid, _, index, netdev, state, phys, _, _, gids, _ = protocol.DEVICE.unpack_from(body, at)
        at += protocol.DEVICE.size + gids * protocol.GID.size
        digits = guid.hex(":", 2)
        found.append(
            _Device(
                os.fsdecode(name.rstrip(b"\0")),
                index,
                digits,
                _STATES[state] if state < len(_STATES) else "UNKNOWN",
                _PHYS_STATES.get(phys, "UNKNOWN"),
                netdev,
            )
        )
    return found


def _ask(sock: socket.socket, kind: int, body: bytes = b"") -> bytes:
    sock.send(protocol.REQUEST.pack(kind, 0) + body)
    answer = sock.recv(protocol.MOST)
    if len(answer) < protocol.REPLY.size:
        raise ConnectionResetError(0, "it has gone")
    (code,) = protocol.REPLY.unpack_from(answer)
    if code:
        raise OSError(code, os.strerror(code))
    return answer[protocol.REPLY.size :]
