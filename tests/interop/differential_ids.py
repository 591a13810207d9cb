"""Asks librdmacm.so.1 and rdmacm to bind an id and to resolve its address and route, without connecting.

The commands are those of ``differential``. A question is ``{"space", "tos", "bind", "src", "dst"}``: a port space, a
type of service or 0, and addresses or None; a step without its address is left out. An answer has the outcome of each
step ("ok", the name of an errno, or -errno of an event), and the attributes that the id then has: the interface of its
device, its addresses (a port that the library chose is "free"), GIDs and path.
"""

from __future__ import annotations

import ctypes
import errno
import random
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import AF_INET6
from typing import Any

from interop.differential import IB, IPOIB, TCP, UDP, Json, Ours, command, pack, unpack

#: Limits in milliseconds: of the resolution of a neighbour, and of an event.
TIMEOUT, AT_MOST = 300, 10_000

LOCAL: list[list[Any]] = [
    ["10.0.0.1", 0],
    ["10.0.0.1", 7471],
    ["10.0.0.1", 40000],
    ["10.0.0.9", 0],
    ["10.1.0.1", 0],
    ["10.1.0.1", 1],
    ["127.0.0.1", 0],
    ["127.0.0.1", 7471],
    ["127.1.2.3", 0],
    ["0.0.0.0", 0],
    ["0.0.0.0", 65535],
    ["fd00:0:0:1::1", 0, 0, 0],
    ["fd00:0:0:1::1", 7471, 0x12345, 0],
    ["fd00:0:0:1::9", 0, 0, 0],
    ["fd01::1", 0, 0, 0],
    ["::1", 0, 0, 0],
    ["::", 0, 0, 0],
    ["::", 7471, 0, 0],
    ["fe80::1", 0, 0, "va"],
    ["fe80::1", 0, 0, 0],
]
ODD_LOCAL: list[list[Any]] = [
    ["192.0.2.7", 0],
    ["10.0.0.2", 0],
    ["10.0.0.255", 0],
    ["224.0.0.1", 0],
    ["255.255.255.255", 0],
    ["10.7.0.1", 0],
    ["2001:db8::7", 0, 0, 0],
    ["fd00:0:0:1::1", 0, 0, "wa"],
    ["fd00:0:0:1::1", 0, 0, "va"],
    ["fe80::1", 0, 0, "wa"],
    ["fe80::1", 0, 0, "lo"],
    ["fe80::1", 0, 0, 9999],
    ["fe80::1", 0, 0, 0xFFFFFFFF],
    ["fd07::1", 0, 0, 0],
    ["ff02::1", 0, 0, "va"],
    ["::ffff:10.0.0.1", 0, 0, 0],
    ["ib", "::ffff:10.0.0.1", 0, 0, 0xFFFF, 0, 0],
    ["ib", "::", 0x13F0000, 0xFFFFFFFFFFFF0000, 0xFFFF, 0, 0],
    ["ib", "fe80::2:c903:1:2", 0x13F0000, 0xFFFFFFFFFFFF0000, 0xFFFF, 0, 0],
]
REMOTE: list[list[Any]] = [
    ["10.0.0.2", 7471],
    ["10.0.0.2", 0],
    ["10.0.0.77", 7471],
    ["10.1.0.2", 7471],
    ["10.9.9.9", 7471],
    ["10.8.8.8", 7471],
    ["10.0.0.1", 7471],
    ["10.0.0.9", 7471],
    ["10.1.0.1", 7471],
    ["127.0.0.1", 7471],
    ["127.1.2.3", 7471],
    ["0.0.0.0", 7471],
    ["fd00:0:0:1::2", 7471, 0, 0],
    ["fd00:0:0:1::2", 7471, 0x12345, 0],
    ["fd01::2", 7471, 0, 0],
    ["fd09::9", 7471, 0, 0],
    ["fd08::8", 7471, 0, 0],
    ["fd00:0:0:1::1", 7471, 0, 0],
    ["fd00:0:0:1::9", 7471, 0, 0],
    ["fe80::2", 7471, 0, "va"],
    ["fe80::1", 7471, 0, "va"],
    ["::1", 7471, 0, 0],
    ["::", 7471, 0, 0],
]
ODD_REMOTE: list[list[Any]] = [
    ["10.0.0.200", 7471],
    ["10.66.0.1", 7471],
    ["10.67.0.1", 7471],
    ["10.68.0.1", 7471],
    ["192.0.2.1", 7471],
    ["10.7.0.2", 7471],
    ["10.7.0.1", 7471],
    ["10.0.0.255", 7471],
    ["224.0.0.1", 7471],
    ["255.255.255.255", 7471],
    ["fd66::1", 7471, 0, 0],
    ["fd67::1", 7471, 0, 0],
    ["fd68::1", 7471, 0, 0],
    ["2001:db8::1", 7471, 0, 0],
    ["fd07::2", 7471, 0, 0],
    ["fe80::2", 7471, 0, 0],
    ["fe80::2", 7471, 0, "lo"],
    ["fe80::2", 7471, 0, 9999],
    ["fe80::2", 7471, 0, 0xFFFFFFFF],
    ["fd00:0:0:1::2", 7471, 0, "va"],
    ["fd00:0:0:1::2", 7471, 0, "wa"],
    ["ff02::1", 7471, 0, "va"],
    ["::ffff:10.0.0.2", 7471, 0, 0],
    ["ib", "::ffff:10.0.0.2", 0x13F1D2F, 0xFFFFFFFFFFFFFFFF, 0xFFFF, 0, 0],
    ["ib", "::ffff:10.0.0.1", 0x13F1D2F, 0xFFFFFFFFFFFFFFFF, 0xFFFF, 0, 0],
]


class Questions:
    """Random questions without end, repeatable by the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[Json]:
        while True:
            yield self.question()

    def question(self) -> Json:
        return {
            "space": self.random.choice([TCP, TCP, UDP, IB, IPOIB]),
            "tos": self.random.choice([0, 0, 0, 32, 255]),
            "bind": self._address(0.4, LOCAL, ODD_LOCAL),
            "src": self._address(0.4, LOCAL, ODD_LOCAL),
            "dst": self._address(0.9, REMOTE, ODD_REMOTE),
        }

    def _address(self, chance: float, usual: list[list[Any]], odd: list[list[Any]]) -> list[Any] | None:
        if self.random.random() > chance:
            return None
        return self.random.choice(odd if self.random.random() < 0.25 else usual)


def without_port(address: list[Any] | None, chosen: bool) -> list[Any] | None:
    """A source address without its port if the library ``chosen`` it: the two libraries choose different ones."""
    if address is None or not chosen or address[0] == "bytes":
        return address
    if address[0] == "ib":
        return [*address[:2], address[2] >> 16, *address[3:]]
    return [address[0], "free" if address[1] >= 32768 else address[1], *address[2:]]


def _port_is_chosen(question: Json) -> bool:
    """Whether the library chooses the port of the source."""
    given = question["bind"] or question["src"]
    return given is None or given[0] == "ib" or given[1] == 0


def _flow_label(label: int, question: Json) -> int | str:
    """A flow label, or "free" where it follows from a port that the library chose."""
    given = len(question["dst"]) == 4 and question["dst"][2]
    return "free" if _port_is_chosen(question) and not given else label


def _interface_of(device: str) -> str:
    """The network interface of a device of the kernel or of ours."""
    if device.startswith("soft_"):
        return device.removeprefix("soft_")
    return Path(f"/sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs/0").read_text(encoding="ascii").strip()


# -- the C library --------------------------------------------------------------------------------------


class _Route(ctypes.Structure):
    _fields_ = [
        ("src", ctypes.c_char * 128),
        ("dst", ctypes.c_char * 128),
        ("sgid", ctypes.c_uint8 * 16),
        ("dgid", ctypes.c_uint8 * 16),
        ("pkey", ctypes.c_uint64),
        ("path_rec", ctypes.c_void_p),
        ("num_paths", ctypes.c_int),
    ]


class _Id(ctypes.Structure):
    _fields_ = [
        ("verbs", ctypes.POINTER(ctypes.c_void_p)),
        ("channel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("qp", ctypes.c_void_p),
        ("route", _Route),
        ("ps", ctypes.c_int),
        ("port_num", ctypes.c_uint8),
    ]


class _Event(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_void_p),
        ("listen_id", ctypes.c_void_p),
        ("event", ctypes.c_int),
        ("status", ctypes.c_int),
    ]


class _Path(ctypes.Structure):
    """``struct ibv_sa_path_rec``."""

    _fields_ = [
        ("dgid", ctypes.c_uint8 * 16),
        ("sgid", ctypes.c_uint8 * 16),
        ("dlid", ctypes.c_uint16),
        ("slid", ctypes.c_uint16),
        ("raw_traffic", ctypes.c_int),
        ("flow_label", ctypes.c_uint32),
        ("hop_limit", ctypes.c_uint8),
        ("traffic_class", ctypes.c_uint8),
        ("reversible", ctypes.c_int),
        ("numb_path", ctypes.c_uint8),
        ("pkey", ctypes.c_uint16),
        ("sl", ctypes.c_uint8),
        ("mtu_selector", ctypes.c_uint8),
        ("mtu", ctypes.c_uint8),
        ("rate_selector", ctypes.c_uint8),
        ("rate", ctypes.c_uint8),
        ("packet_life_time_selector", ctypes.c_uint8),
        ("packet_life_time", ctypes.c_uint8),
        ("preference", ctypes.c_uint8),
    ]


_PATH_FIELDS = ("hop_limit", "traffic_class", "sl", "mtu", "rate", "packet_life_time")


def _sockaddr(data: bytes) -> list[Any] | None:
    size = {socket.AF_INET: 16, AF_INET6: 28, 27: 48}.get(int.from_bytes(data[:2], sys.byteorder))
    return None if size is None else unpack(data[:size])


def _number(code: int) -> str:
    return errno.errorcode.get(code, str(code))


class CLibrary:
    """librdmacm.so.1."""

    def __init__(self) -> None:
        self.rdmacm = ctypes.CDLL("librdmacm.so.1", use_errno=True)
        self.verbs = ctypes.CDLL("libibverbs.so.1")
        self.verbs.ibv_get_device_name.restype = ctypes.c_char_p
        self.verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
        self.rdmacm.rdma_create_event_channel.restype = ctypes.POINTER(ctypes.c_int)
        self.channel: Any = None

    def _call(self, name: str, *arguments: Any) -> str:
        ctypes.set_errno(0)
        return "ok" if getattr(self.rdmacm, name)(*arguments) == 0 else _number(ctypes.get_errno())

    def _wait(self, channel: Any, done: int) -> str:
        """The outcome of a step: "ok" for the event of success, else -errno."""
        poller = select.poll()
        poller.register(channel.contents.value, select.POLLIN)
        if not poller.poll(AT_MOST):
            return "nothing"
        event = ctypes.POINTER(_Event)()
        outcome = self._call("rdma_get_cm_event", channel, ctypes.byref(event))
        if outcome != "ok":
            return outcome
        number, status = event.contents.event, event.contents.status
        self._call("rdma_ack_cm_event", event)
        return "ok" if number == done and status == 0 else f"-{_number(-status)}"

    def ask(self, question: Json) -> Json:
        """The answer: the steps of one id."""
        self.channel = self.channel or self.rdmacm.rdma_create_event_channel()
        channel, cmid = self.channel, ctypes.POINTER(_Id)()
        answer: Json = {"create": self._call("rdma_create_id", channel, ctypes.byref(cmid), None, question["space"])}
        if answer["create"] != "ok":
            return answer
        if question["tos"]:
            self._call("rdma_set_option", cmid, 0, 0, ctypes.byref(ctypes.c_uint8(question["tos"])), 1)
        packed = {name: _buffer(question[name]) for name in ("bind", "src", "dst")}
        if packed["bind"]:
            answer["bind"] = self._call("rdma_bind_addr", cmid, packed["bind"])
            if answer["bind"] == "ok":
                answer["bound"] = self._known(cmid.contents, question)
        if packed["dst"] and answer.get("bind", "ok") == "ok":
            outcome = self._call("rdma_resolve_addr", cmid, packed["src"], packed["dst"], TIMEOUT)
            answer["resolve"] = self._wait(channel, 0) if outcome == "ok" else outcome
            if answer["resolve"] == "ok":
                answer["resolved"] = self._known(cmid.contents, question, resolved=True)
                answer["route"] = self._call("rdma_resolve_route", cmid, TIMEOUT)
                if answer["route"] == "ok":
                    answer["route"] = self._wait(channel, 2)
                    answer["path"] = self._path(cmid.contents.route, question)
        self._call("rdma_destroy_id", cmid)
        return answer

    def _known(self, cmid: _Id, question: Json, resolved: bool = False) -> Json:
        def gid(data: Any) -> str:
            return socket.inet_ntop(AF_INET6, bytes(data))

        route = cmid.route
        raw = ctypes.string_at(ctypes.addressof(route), 256)
        return {
            "interface": self._interface(cmid.verbs) if cmid.verbs else None,
            "port_num": cmid.port_num,
            "local": without_port(_sockaddr(raw[:128]), _port_is_chosen(question)),
            "sgid": gid(route.sgid),
            **({"peer": _sockaddr(raw[128:]), "dgid": gid(route.dgid)} if resolved else {}),
        }

    def _interface(self, context: Any) -> str:
        return _interface_of(self.verbs.ibv_get_device_name(context[0]).decode())

    @staticmethod
    def _path(route: _Route, question: Json) -> Json | None:
        if not route.num_paths:
            return None
        path = _Path.from_address(route.path_rec)
        found = {name: getattr(path, name) for name in _PATH_FIELDS}
        return found | {"flow_label": _flow_label(socket.ntohl(path.flow_label), question)}


def _buffer(address: list[Any] | None) -> Any:
    if address is None:
        return None
    data = pack(address)
    return ctypes.create_string_buffer(data, len(data))


# -- ours -----------------------------------------------------------------------------------------------


class OurIds(Ours):
    """rdmacm."""

    def __init__(self) -> None:
        super().__init__()
        self.channel = self.rdmacm.EventChannel()

    def ask(self, question: Json) -> Json:
        """The answer: the steps of one id."""
        try:
            with self.rdmacm.CmId(self.channel, question["space"]) as cmid:
                return self._ask(question, cmid)
        except Exception as error:
            return {"raises": repr(error)}

    def _call(self, call: Any, *arguments: Any) -> str:
        try:
            call(*arguments)
        except self.rdmacm.RdmaError as error:
            return _number(error.errno or 0)
        return "ok"

    def _wait(self, done: str) -> str:
        with self.channel.get_event(AT_MOST / 1000) as event:
            return "ok" if event.type.name == done and event.status == 0 else f"-{_number(-event.status)}"

    def _ask(self, question: Json, cmid: Any) -> Json:
        answer: Json = {"create": "ok"}
        given = {name: question[name] and self.address(question[name]) for name in ("bind", "src", "dst")}
        if question["tos"]:
            cmid.set_option(0, 0, question["tos"])
        if given["bind"]:
            answer["bind"] = self._call(cmid.bind_addr, given["bind"])
            if answer["bind"] == "ok":
                answer["bound"] = self._known(cmid, question)
        if given["dst"] and answer.get("bind", "ok") == "ok":
            outcome = self._call(cmid.resolve_addr, given["dst"], given["src"], TIMEOUT)
            answer["resolve"] = self._wait("ADDR_RESOLVED") if outcome == "ok" else outcome
            if answer["resolve"] == "ok":
                answer["resolved"] = self._known(cmid, question, resolved=True)
                answer["route"] = self._call(cmid.resolve_route, TIMEOUT)
                if answer["route"] == "ok":
                    answer["route"] = self._wait("ROUTE_RESOLVED")
                    path = cmid.route.path_rec[0]
                    answer["path"] = {name: int(getattr(path, name)) for name in _PATH_FIELDS}
                    answer["path"]["flow_label"] = _flow_label(path.flow_label, question)
        return answer

    def _known(self, cmid: Any, question: Json, resolved: bool = False) -> Json:
        route = cmid.route
        return {
            "interface": _interface_of(cmid.verbs.device.name) if cmid.is_bound else None,
            "port_num": cmid.port_num,
            "local": without_port(self.plain(route.src_addr), _port_is_chosen(question)),
            "sgid": str(route.sgid),
            **({"peer": self.plain(route.dst_addr), "dgid": str(route.dgid)} if resolved else {}),
        }


if __name__ == "__main__":
    command(sys.argv[1:], Questions, CLibrary, OurIds)
