"""Asks rdma_getaddrinfo(3) of librdmacm.so.1 and rdmacm.getaddrinfo the same questions.

Runs in a machine that has an RDMA device, as a program::

    differential.py generate SEED COUNT > questions      one JSON object a line
    differential.py c < questions > answers              the answers of the C library, one a line
    differential.py soft < questions > answers           the answers of rdmacm with the provider soft
    differential.py kernel < questions > answers         the answers of rdmacm with the provider kernel
    differential.py both PROVIDER QUESTION               both answers to one question
    differential.py files FOLDER                         the files that the host must have in /etc

A question is ``{"node", "service", "hints"}``, hints those fields of ``struct rdma_addrinfo`` that are not zero. An
answer is ``{"entries": [...]}``, ``{"eai": code}``, ``{"errno": name}``, or a bug: ``{"crash": signal}`` (C),
``{"raises": text}`` (ours). Addresses are lists: host, port, and for IPv6 flow information and scope; for AF_IB
"ib", GID, service id, its mask, P_Key, flow information, scope. A scope may be an interface's name.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import random
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any, Protocol, TextIO

Json = dict[str, Any]

AF_IB = 27
PASSIVE, NUMERICHOST, NOROUTE, FAMILY, SA, DNS = (1 << bit for bit in range(6))
RC, UC, UD, RAW_PACKET, XRC_SEND, XRC_RECV = 2, 3, 4, 8, 9, 10
IPOIB, TCP, UDP, IB = 0x0002, 0x0106, 0x0111, 0x013F

# -- the host -------------------------------------------------------------------------------------------

LONG_LABEL = "l" * 70

#: /etc/hosts of the host that is asked. Both libraries must agree on the order of a name's addresses.
HOSTS = f"""\
127.0.0.1 localhost
::1 localhost ip6-localhost
10.0.0.1 here.example here
fd00:0:0:1::1 here.example
10.0.0.2 peer.example peer four.example
fd00:0:0:1::2 peer.example peer six.example
fd00:0:0:1::2 first.example
10.0.0.2 first.example
10.0.0.2 several.example
10.0.0.3 several.example
10.1.0.2 several.example
10.0.0.2 twice.example
10.0.0.2 twice.example
fe80::2%va link.example
::ffff:10.0.0.2 mapped.example
10.0.0.77 77name.example under_score.example Upper.Example
10.0.0.78 bücher.example
10.0.0.79 xn--bcher-kva.example
10.0.0.80 {LONG_LABEL}.example
10.0.0.81 dotted.example.
10.66.0.1 nowhere.example
0.0.0.0 any.example
10.0.0.82 10
"""

#: /etc/services: by both protocols, by one alone, with two numbers, an alias, and names that look like numbers.
SERVICES = """\
both 7001/tcp other-name
both 7001/udp other-name
stream 7002/tcp
datagram 7003/udp
differs 7004/tcp
differs 7005/udp
sctp-only 7006/sctp
UpperCase 7007/tcp
7008x 7008/tcp
-1 7009/tcp
top 65535/tcp
zero 0/tcp
beyond 70000/tcp
"""

FILES = {"hosts": HOSTS, "services": SERVICES, "nsswitch.conf": "hosts: files\nservices: files\n"}

# -- questions ------------------------------------------------------------------------------------------

IPV4 = ["127.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.9", "10.1.0.2", "10.9.9.9", "10.66.0.1", "0.0.0.0", "224.0.0.1"]
IPV4 += ["255.255.255.255", "192.0.2.1"]
IPV4_FORMS = ["127.1", "10.2", "0x7f000001", "0x7F.1", "017700000001", "10.0.2", "167772162", "0", "10", "4294967295"]
IPV4_FORMS += ["010.0.0.2", "0xa.0x0.0x0.0x2"]
NOT_IPV4 = [
    "256.1.1.1",
    "4294967296",
    "1.2.3.4.5",
    "10.0.0.2 ",
    " 10.0.0.2",
    "10.0.0.2 x",
    "0x",
    "1..2",
    "10.0.0.",
    ".",
]
NOT_IPV4 += ["10.0.0.2/24", "10.0.0.2:80", "-1", "0x100000000", "08.0.0.1", "10.0.0.2%va"]
IPV6 = ["::1", "::", "fd00:0:0:1::1", "fd00:0:0:1::2", "FD00:0:0:1:0:0:0:2", "2001:db8::1", "::ffff:10.0.0.2"]
IPV6 += ["::10.0.0.2", "::ffff:0:0", "ff02::1", "fe80::2", "::ffff:127.0.0.1", "64:ff9b::10.0.0.2"]
IPV6_SCOPED = ["fe80::2%va", "fe80::2%lo", "fe80::2%2", "ff02::1%va", "fe80::2%7", "fe80::2%99999", "::1%lo", "::1%1"]
IPV6_SCOPED += ["fd00:0:0:1::2%3", "fd00:0:0:1::2%va", "fe80::2%0", "fe80::2%4294967295", "fe80::2%02"]
NOT_IPV6 = ["fe80::2%nodev", "fe80::2%", "fe80::2%4294967296", "fe80::2%-1", "[::1]", "1::2::3", ":", ":::", "12345::"]
NOT_IPV6 += ["::1/64", "fe80::2% 2", "fe80::2%va%va", "::1.2.3", "g::1"]
GIDS = ["fe80::2:c903:1:2", "fe80:0000:0000:0000:0002:c903:0001:0002", "::ffff:10.0.0.1", "fec0::1"]
NAMES = ["localhost", "ip6-localhost", "here", "here.example", "peer", "peer.example", "four.example", "six.example"]
NAMES += ["first.example", "several.example", "twice.example", "link.example", "mapped.example", "77name.example"]
NAMES += ["under_score.example", "Upper.Example", "upper.example", "PEER", "nowhere.example", "any.example"]
NAMES += ["xn--bcher-kva.example", "dotted.example", "dotted.example."]
UNKNOWN = [
    "no.such.host.invalid",
    "nosuch",
    "localhost.",
    "peer..example",
    ".peer",
    "..",
    "-",
    "_",
    "a b",
    "peer\t",
    "%va",
]
UNKNOWN += [
    "peer\n",
    "bücher.example",
    "ß",
    "\u2460",
    "\u3002",
    "\udc80",
    LONG_LABEL,
    f"{LONG_LABEL}.example",
    "é" * 40,
]
UNKNOWN += [
    "a" * 63,
    "a" * 254,
    "a" * 256,
    "a." * 127 + "a",
    "a" * 1025,
    "9" * 300,
    "1." * 200,
    ":" * 2000,
    "x" * 70000,
]
NODES_AS_NULL = ["", "*"]

PORTS = ["7471", "0", "1", "80", "65535", "4791"]
PORT_FORMS = ["+7", " 7", "007471", "\t7", "+0", "-0", "  +7", "00000000000000000000007", "\n7"]
NOT_PORTS = [
    "65536",
    "70000",
    "-1",
    "4294967296",
    "99999999999999999999",
    "18446744073709551616",
    "0x10",
    "7 ",
    "7x",
    "+",
]
NOT_PORTS += ["1e3", "+ 7", "--7", "-65535", "-4294967295", "4294967297", "\u0667", "7.0", "-18446744073709551615"]
SERVICE_NAMES = ["both", "other-name", "stream", "datagram", "differs", "top", "zero"]
ODD_SERVICES = [
    "sctp-only",
    "UpperCase",
    "uppercase",
    "7008x",
    "beyond",
    "Both",
    "no-such-service",
    " both",
    "both ",
    "*",
]
ODD_SERVICES += ["both/tcp", "\udc80", "é", "s" * 100, "s" * 5000, "#", "\x01"]

QP_TYPES = [0, RC, UD]
ODD_QP_TYPES = [UC, RAW_PACKET, XRC_SEND, XRC_RECV, 0xFF, 1, 5, 77, -1, 0x7FFFFFFF]
SPACES = [0, TCP, UDP, IB]
ODD_SPACES = [IPOIB, 1, 0x0107, 0x1234, -1, 0x7FFFFFFF]
UNKNOWN_FLAGS = [0x40, 0x400, 0x1000000, 0x40000000, -0x80000000, 0xF000]
ODD_FAMILIES = [1, 99, -1, 16, 0x10002]

SOURCES: list[list[Any]] = [
    ["10.0.0.1", 0],
    ["10.0.0.1", 7000],
    ["10.0.0.9", 0],
    ["10.1.0.1", 0],
    ["0.0.0.0", 0],
    ["127.0.0.1", 0],
    ["192.0.2.7", 0],
    ["fd00:0:0:1::1", 0, 0, 0],
    ["fd00:0:0:1::9", 9, 0, 0],
    ["::", 0, 0, 0],
    ["::1", 0, 0, 0],
    ["fe80::1", 0, 0, "va"],
    ["fd00:0:0:1::1", 0, 0x12345, 0],
]
DESTINATIONS: list[list[Any]] = [
    ["10.0.0.2", 7471],
    ["10.0.0.1", 1],
    ["10.9.9.9", 0],
    ["127.0.0.1", 7471],
    ["0.0.0.0", 7471],
    ["10.66.0.1", 7471],
    ["fd00:0:0:1::2", 7471, 0, 0],
    ["fe80::2", 7471, 0, "va"],
    ["fe80::2", 7471, 0, 0],
    ["::", 7471, 0, 0],
    ["::ffff:10.0.0.2", 7471, 0, 0],
]
IB_ADDRESSES: list[list[Any]] = [
    ["ib", "fe80::2:c903:1:2", 0x1061D2F, 0xFFFFFFFFFFFFFFFF, 0xFFFF, 0, 0],
    ["ib", "::ffff:10.0.0.2", 0x13F0000, 0xFFFFFFFFFFFF0000, 0xFFFF, 0x12345, 2],
    ["ib", "::", 0, 0, 0, 0, 0],
]


class Questions:
    """Random questions without end, repeatable by the seed. Few have more than one unusual field."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[Json]:
        while True:
            yield self.question()

    def _happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def question(self) -> Json:
        node, service = self._node(), self._service()
        if self._happens(0.1):  # from the hints alone
            node = service = None
        hints = None if self._happens(0.12) else self._hints(node is None and service is None)
        return {"node": node, "service": service, "hints": hints}

    def _node(self) -> str | None:
        pick = self.random.choice
        if self._happens(0.15):
            return None
        if self._happens(0.2):
            return pick(pick([NOT_IPV4, NOT_IPV6, UNKNOWN, NODES_AS_NULL, [self._garbage()]]))
        return pick(pick([IPV4, IPV4_FORMS, IPV6, IPV6_SCOPED, GIDS, NAMES, NAMES]))

    def _service(self) -> str | None:
        pick = self.random.choice
        if self._happens(0.2):
            return pick([None, ""])
        if self._happens(0.2):
            return pick(pick([NOT_PORTS, ODD_SERVICES, [self._garbage()]]))
        return pick(pick([PORTS, PORT_FORMS, SERVICE_NAMES]))

    def _garbage(self) -> str:
        letters = "0123456789abcfx.:%-+ va*é/"
        return "".join(self.random.choice(letters) for _ in range(self.random.randrange(1, 12)))

    def _hints(self, alone: bool) -> Json:
        pick = self.random.choice
        flags = sum(flag for flag in (PASSIVE, NUMERICHOST, NOROUTE, FAMILY) if self._happens(0.3))
        if self._happens(0.08):
            flags |= pick([*UNKNOWN_FLAGS, SA, DNS, SA | DNS])
        hints: Json = {
            "flags": flags,
            "family": pick(ODD_FAMILIES) if self._happens(0.05) else pick([0, 0, int(AF_INET), int(AF_INET6), AF_IB]),
            "qp_type": pick(ODD_QP_TYPES) if self._happens(0.2) else pick(QP_TYPES),
            "port_space": pick(ODD_SPACES) if self._happens(0.15) else pick(SPACES),
        }
        if self._happens(0.6 if alone else 0.2):
            hints["src_addr"] = pick(IB_ADDRESSES) if self._happens(0.1) else pick(SOURCES)
        if self._happens(0.6 if alone else 0.1):
            hints["dst_addr"] = pick(IB_ADDRESSES) if self._happens(0.1) else pick(DESTINATIONS)
        if self._happens(0.1):
            hints["route"] = self._route().hex()
        if self._happens(0.1):
            hints["connect"] = pick(["00", "ab" * 36, "ff" * 300])
        if self._happens(0.1):
            hints["src_canonname" if self._happens(0.3) else "dst_canonname"] = "canon.example"
        return {name: value for name, value in hints.items() if value}

    def _route(self) -> bytes:
        dgid, sgid = (socket.inet_pton(AF_INET6, f"::ffff:10.0.0.{host}") for host in (2, 1))
        record = struct.pack("!Q16s16s2HI2B2H6s", 0, dgid, sgid, 0, 0, 64, 0, 0x81, 0xFFFF, 0, bytes(6))
        record = record[:58].ljust(64, b"\0")
        path = struct.pack("=II", 43, 0) + record
        return self.random.choice([record, path, path * 2])


# -- addresses ------------------------------------------------------------------------------------------


def _index(scope: int | str) -> int:
    return scope if isinstance(scope, int) else socket.if_nametoindex(scope)


def pack(address: list[Any]) -> bytes:
    """The address of a question as a C sockaddr."""
    if address[0] == "ib":
        _, gid, sid, mask, pkey, flow, scope = address
        packed = socket.inet_pton(AF_INET6, gid)
        return (
            struct.pack("=H", AF_IB) + struct.pack("!HI16sQQ", pkey, flow, packed, sid, mask) + struct.pack("=Q", scope)
        )
    if len(address) == 2:
        host, port = address
        return struct.pack("=H", AF_INET) + struct.pack("!H4s8x", port, socket.inet_pton(AF_INET, host))
    host, port, flow, scope = address
    packed = socket.inet_pton(AF_INET6, host)
    return struct.pack("=H", AF_INET6) + struct.pack("!HI16s", port, flow, packed) + struct.pack("=I", _index(scope))


def unpack(data: bytes) -> list[Any]:
    """The address in a C sockaddr, or its bytes where the family is unknown."""
    family = int.from_bytes(data[:2], sys.byteorder)
    if (family, len(data)) == (AF_INET, 16):
        port, ip = struct.unpack_from("!H4s", data, 2)
        return [socket.inet_ntop(AF_INET, ip), port]
    if (family, len(data)) == (AF_INET6, 28):
        port, flow, ip = struct.unpack_from("!HI16s", data, 2)
        return [socket.inet_ntop(AF_INET6, ip), port, flow, struct.unpack_from("=I", data, 24)[0]]
    if (family, len(data)) == (AF_IB, 48):
        pkey, flow, gid, sid, mask = struct.unpack_from("!HI16sQQ", data, 2)
        scope = struct.unpack_from("=Q", data, 40)[0]
        return ["ib", socket.inet_ntop(AF_INET6, gid), sid, mask, pkey, flow, scope]
    return ["bytes", data.hex()]


# -- the C library --------------------------------------------------------------------------------------


class RdmaAddrinfo(ctypes.Structure):
    """``struct rdma_addrinfo``."""


RdmaAddrinfo._fields_ = [
    ("flags", ctypes.c_int),
    ("family", ctypes.c_int),
    ("qp_type", ctypes.c_int),
    ("port_space", ctypes.c_int),
    ("src_len", ctypes.c_uint32),
    ("dst_len", ctypes.c_uint32),
    ("src_addr", ctypes.c_void_p),
    ("dst_addr", ctypes.c_void_p),
    ("src_canonname", ctypes.c_char_p),
    ("dst_canonname", ctypes.c_char_p),
    ("route_len", ctypes.c_size_t),
    ("route", ctypes.c_void_p),
    ("connect_len", ctypes.c_size_t),
    ("connect", ctypes.c_void_p),
    ("next", ctypes.POINTER(RdmaAddrinfo)),
]


def _text(value: str | None) -> bytes | None:
    return None if value is None else value.encode("utf-8", "surrogateescape")


class CLibrary:
    """librdmacm.so.1."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("librdmacm.so.1", use_errno=True)
        pointer = ctypes.POINTER(RdmaAddrinfo)
        self.library.rdma_getaddrinfo.argtypes = [ctypes.c_char_p, ctypes.c_char_p, pointer, ctypes.POINTER(pointer)]
        self.library.rdma_freeaddrinfo.argtypes = [pointer]
        self.library.rdma_freeaddrinfo.restype = None

    def ask(self, question: Json) -> Json:
        """The answer of rdma_getaddrinfo."""
        kept: list[Any] = []
        hints = None if question["hints"] is None else ctypes.byref(self._hints(question["hints"], kept))
        found = ctypes.POINTER(RdmaAddrinfo)()
        ctypes.set_errno(0)
        code = self.library.rdma_getaddrinfo(
            _text(question["node"]), _text(question["service"]), hints, ctypes.byref(found)
        )
        if code == -1:
            return {"errno": errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno()))}
        if code:
            return {"eai": code}
        entries = []
        entry = found
        while entry:
            entries.append(self._entry(entry.contents))
            entry = entry.contents.next
        self.library.rdma_freeaddrinfo(found)
        return {"entries": entries}

    @staticmethod
    def _hints(hints: Json, kept: list[Any]) -> RdmaAddrinfo:
        result = RdmaAddrinfo(
            hints.get("flags", 0), hints.get("family", 0), hints.get("qp_type", 0), hints.get("port_space", 0)
        )
        result.src_canonname = _text(hints.get("src_canonname"))
        result.dst_canonname = _text(hints.get("dst_canonname"))
        for name in ("src", "dst", "route", "connect"):
            member = name if name in ("route", "connect") else f"{name}_addr"
            if member in hints:
                value = hints[member]
                data = bytes.fromhex(value) if isinstance(value, str) else pack(value)
                kept.append(buffer := ctypes.create_string_buffer(data, len(data)))
                setattr(result, member, ctypes.addressof(buffer))
                setattr(result, f"{name}_len", len(data))
        return result

    @staticmethod
    def _entry(entry: RdmaAddrinfo) -> Json:
        def name(text: bytes | None) -> str | None:
            return None if text is None else text.decode("utf-8", "surrogateescape")

        return {
            "flags": entry.flags,
            "family": entry.family,
            "qp_type": entry.qp_type,
            "port_space": entry.port_space,
            "src_addr": unpack(ctypes.string_at(entry.src_addr, entry.src_len)) if entry.src_len else None,
            "dst_addr": unpack(ctypes.string_at(entry.dst_addr, entry.dst_len)) if entry.dst_len else None,
            "src_canonname": name(entry.src_canonname),
            "dst_canonname": name(entry.dst_canonname),
            "route": entry.route_len,
            "connect": ctypes.string_at(entry.connect, entry.connect_len).hex() if entry.connect_len else "",
        }


def ask_in_child(questions: list[str], ask: Callable[[Json], Json], out: TextIO) -> None:
    """Ask in a child process. If a question kills it, the signal is the answer, and a new child asks the next."""
    done = 0
    while done < len(questions):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                for line in questions[done:]:
                    print(json.dumps(ask(json.loads(line))), file=pipe, flush=True)
                pipe.flush()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            for answer in pipe:
                print(answer, end="", file=out)
                done += 1
        _, status = os.waitpid(child, 0)
        if done < len(questions):
            ended = os.waitstatus_to_exitcode(status)
            print(json.dumps({"crash": signal.Signals(-ended).name if ended < 0 else f"exit {ended}"}), file=out)
            done += 1
    out.flush()


# -- ours -----------------------------------------------------------------------------------------------


class Ours:
    """rdmacm."""

    def __init__(self) -> None:
        import rdmacm
        from rdmacm.address import Gid, SockAddrIB

        self.rdmacm = rdmacm
        self.gid: Callable[[str], Any] = Gid
        self.sockaddr_ib: Callable[..., Any] = SockAddrIB

    def ask(self, question: Json) -> Json:
        """The answer of rdmacm.getaddrinfo."""
        try:
            hints = None if question["hints"] is None else self._hints(question["hints"])
            found = self.rdmacm.getaddrinfo(question["node"], question["service"], hints)
        except self.rdmacm.GaiError as error:
            return {"eai": error.errno}
        except self.rdmacm.RdmaError as error:
            return {"errno": errno.errorcode.get(error.errno or 0, str(error.errno))}
        except Exception as error:
            return {"raises": repr(error)}
        return {"entries": [self._entry(entry) for entry in found]}

    def address(self, address: list[Any]) -> Any:
        """The address of a question as an argument for rdmacm."""
        if address[0] == "ib":
            _, gid, sid, mask, pkey, flow, scope = address
            return self.sockaddr_ib(self.gid(gid), sid, mask, pkey, flow, scope)
        return tuple(address) if len(address) == 2 else (*address[:3], _index(address[3]))

    def _hints(self, hints: Json) -> Any:
        fields: Json = {name: value for name, value in hints.items() if name not in ("route", "connect")}
        for side in ("src_addr", "dst_addr"):
            if side in fields:
                fields[side] = self.address(fields[side])
        if "connect" in hints:
            fields["connect"] = bytes.fromhex(hints["connect"])
        given: Any = self.rdmacm.AddrInfo(**fields)
        if "route" in hints:
            given = self.rdmacm.addrinfo.make_hints(given, route=bytes.fromhex(hints["route"]))
        return given

    def plain(self, address: Any) -> list[Any] | None:
        """An address that rdmacm returned, in the form of an answer."""
        if address is None:
            return None
        if isinstance(address, tuple):
            return list(address)
        return [
            "ib",
            str(address.addr),
            address.sid,
            address.sid_mask,
            address.pkey,
            address.flowinfo,
            address.scope_id,
        ]

    def _entry(self, entry: Any) -> Json:
        return {
            "flags": int(entry.flags),
            "family": int(entry.family),
            "qp_type": int(entry.qp_type),
            "port_space": int(entry.port_space),
            "src_addr": self.plain(entry.src_addr),
            "dst_addr": self.plain(entry.dst_addr),
            "src_canonname": entry.src_canonname,
            "dst_canonname": entry.dst_canonname,
            "route": entry.route_len,
            "connect": entry.connect.hex(),
        }


def ask_all(questions: Iterable[str], ask: Callable[[Json], Json], out: TextIO) -> None:
    """Ask the questions one after the other in this process."""
    for line in questions:
        print(json.dumps(ask(json.loads(line))), file=out)
    out.flush()


class _Askable(Protocol):
    def ask(self, question: Json) -> Json: ...


def command(
    arguments: list[str],
    questions: Callable[[int], Iterable[Json]],
    c: Callable[[], _Askable],
    ours: Callable[[], _Askable],
) -> None:
    """The command line."""
    match arguments:
        case ["generate", seed, count]:
            for question in itertools.islice(questions(int(seed)), int(count)):
                print(json.dumps(question))
        case ["files", folder]:
            for name, text in FILES.items():
                Path(folder, name).write_text(text, encoding="utf-8")
        case ["c"]:
            ask_in_child(sys.stdin.readlines(), c().ask, sys.stdout)
        case ["soft" | "kernel" as provider]:
            os.environ["RDMACM_PROVIDER"] = provider
            ask_all(sys.stdin, ours().ask, sys.stdout)
        case ["both", "soft" | "kernel" as provider, question]:
            os.environ["RDMACM_PROVIDER"] = provider
            print("C   ", end=" ", flush=True)
            ask_in_child([question], c().ask, sys.stdout)
            print("ours", end=" ", flush=True)
            ask_all([question], ours().ask, sys.stdout)
        case _:
            sys.exit("generate SEED COUNT | files FOLDER | c | soft | kernel | both PROVIDER QUESTION")


if __name__ == "__main__":
    command(sys.argv[1:], Questions, CLibrary, Ours)
