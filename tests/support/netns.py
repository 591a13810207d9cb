"""Network namespaces as hosts, each with its own addresses, routes and neighbours in the real kernel.

A :class:`Host` is one namespace.  :func:`link` joins two with a veth pair; :class:`Topology` owns several
and removes them together.  :func:`two_hosts` and :func:`three_hosts` build what most tests want::

    with two_hosts() as net:
        with net.a.enter():
            ...                     # this thread is in a: sockets made here stay there

Tests using these carry :data:`needs_netns`, which skips them where namespaces cannot be made.

Nothing here sleeps.  The kernel announces each change of a link or an address on an rtnetlink socket, and
:meth:`Host.settle` waits on that.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import itertools
import json
import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest

from support.clock import LONGEST
from support.own_network import in_network

__all__ = [
    "CommandError",
    "Host",
    "Interface",
    "ThreeHosts",
    "Topology",
    "TwoHosts",
    "link",
    "needs_netns",
    "python_environment",
    "requirement",
    "three_hosts",
    "two_hosts",
]

PREFIX = "rdmacm-"

_RUN = Path("/run/netns")
_NETLINK_ROUTE = 0
_RTMGRP_LINK = 0x1
_RTMGRP_IPV6_IFADDR = 0x100
_SIOCGIFFLAGS = 0x8913
_IFF_RUNNING = 0x40
_IFA_F_TENTATIVE = 0x40
_IPV6_SCOPE_LINK = 0x20

# Namespaces number their interfaces independently, so both ends of the first link would be 2.  The kernel
# treats an interface whose peer has the same number as one without a peer, and announces its carrier up to
# a second later.  Unique numbers also show when a test confuses two interfaces.
_indices = itertools.count(101)

_TestT = TypeVar("_TestT", bound=Callable[..., Any] | type)


class CommandError(RuntimeError):
    """An ``ip`` command failed; the message is what it said."""


def _ip(args: Sequence[str], script: str | None = None) -> str:
    done = subprocess.run(
        ["ip", *args],
        input=script,
        stdin=subprocess.DEVNULL if script is None else None,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode != 0:
        message = f"ip {' '.join(args)}: exit {done.returncode}: {done.stderr.strip()}"
        raise CommandError(message if script is None else f"{message}\n{script}")
    return done.stdout


def python_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which a child interpreter imports what this one does."""
    # pytest's `pythonpath` setting reaches sys.path only, which children do not inherit.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, **(extra or {})}


@dataclass(frozen=True)
class Interface:
    """One interface of a host, as it was when asked for."""

    host: Host
    name: str
    index: int
    mac: str
    mtu: int
    addresses: tuple[ipaddress.IPv4Interface | ipaddress.IPv6Interface, ...]

    def _first(self, version: int, link_local: bool) -> str:
        for address in self.addresses:
            if address.version == version and address.ip.is_link_local == link_local:
                return str(address.ip)
        raise LookupError(f"{self.name} in {self.host.name} has no such IPv{version} address")

    @property
    def ipv4(self) -> str:
        """The first IPv4 address."""
        return self._first(4, False)

    @property
    def ipv6(self) -> str:
        """The first IPv6 address that is not link-local."""
        return self._first(6, False)

    @property
    def link_local(self) -> str:
        """The IPv6 link-local address, without its scope."""
        return self._first(6, True)


def _dispose(name: str, children: list[subprocess.Popen[str]], owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not remove its parent's network
        return
    try:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    # Closing a stdin with buffered data fails.
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        children.clear()
    finally:
        _ip(["netns", "delete", name])


class Host:
    """One network namespace with a random name, removed by :meth:`close`.

    ``loopback`` brings ``lo`` up.  ``dad`` leaves IPv6 duplicate address detection on, which makes every
    new address unusable for a second or more.
    """

    def __init__(self, *, loopback: bool = True, dad: bool = False) -> None:
        self.name = PREFIX + secrets.token_hex(4)
        self._children: list[subprocess.Popen[str]] = []
        _ip(["netns", "add", self.name])
        # Also runs at interpreter exit, for a host that is still open.
        self._finalizer = weakref.finalize(self, _dispose, self.name, self._children, os.getpid())
        try:
            self._settings(dad)
            if loopback:
                self.ip("link", "set", "dev", "lo", "up")
        except BaseException:
            self.close()
            raise

    def _settings(self, dad: bool) -> None:
        # A new namespace copies its IPv4 settings from the machine's, which may forward packets or filter
        # sources; tests must not depend on that.
        settings = {"net.ipv4.ip_forward": 0, "net.ipv4.conf.all.rp_filter": 0, "net.ipv4.conf.default.rp_filter": 0}
        if not dad:
            # The kernel skips detection only where both `all` and the interface's own value are off;
            # `default` is what each interface made later starts with.
            settings["net.ipv6.conf.all.accept_dad"] = 0
            settings["net.ipv6.conf.default.accept_dad"] = 0
        with self.enter():
            for key, value in settings.items():
                if (path := self._sysctl_path(key)).parent.exists():
                    path.write_text(f"{value}\n")

    def __repr__(self) -> str:
        return f"<Host {self.name}{'' if self._finalizer.alive else ' (closed)'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what :meth:`popen` started and remove the namespace; a second call does nothing.

        Sockets still open keep an unnamed remainder of it alive until they are closed.
        """
        self._finalizer()

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Move the calling thread, and only that, into the namespace for the length of a block.

        Sockets belong to the namespace they were made in and keep working after the block.  Threads and
        processes started inside begin there too.  Do not await inside: the event loop's other tasks would
        run in the wrong place.
        """
        inside = os.open(_RUN / self.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with in_network(inside):
                yield
        finally:
            os.close(inside)

    def open_socket(self, family: int, kind: int, proto: int = 0) -> socket.socket:
        """A socket of this namespace."""
        with self.enter():
            return socket.socket(family, kind, proto)

    def ip(self, *args: str) -> str:
        """Run ``ip ARGS`` in the namespace and return its output; :class:`CommandError` if it fails."""
        return _ip(["-n", self.name, *args])

    def ip_batch(self, *lines: str) -> None:
        """Run several ``ip`` commands, each without the leading ``ip``, in a single process."""
        _ip(["-n", self.name, "-batch", "-"], "".join(f"{line}\n" for line in lines))

    @staticmethod
    def _sysctl_path(key: str) -> Path:
        # As in sysctl(8), the separator that comes first is used, so that keys with slashes can name interfaces
        # that have a dot in their name.
        slash, dot = key.find("/"), key.find(".")
        dotted = dot >= 0 and (slash < 0 or dot < slash)
        return Path("/proc/sys") / (key.translate(str.maketrans("./", "/.")) if dotted else key)

    def sysctl(self, key: str, value: str | int) -> None:
        """Set ``net.…`` in the namespace."""
        # What /proc/sys/net shows follows the thread that opens it, so no process is needed.
        with self.enter():
            self._sysctl_path(key).write_text(f"{value}\n")

    def read_sysctl(self, key: str) -> str:
        """The value of ``net.…`` in the namespace."""
        with self.enter():
            return self._sysctl_path(key).read_text().strip()

    def _inside(self, argv: Sequence[str]) -> list[str]:
        # `ip netns exec` execs, so the process has the pid of what it runs; and it remounts /sys, so that
        # /sys/class/net is the namespace's own.
        return ["ip", "netns", "exec", self.name, *argv]

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """``subprocess.run`` in the namespace: text, captured and checked, 30 s, unless told otherwise."""
        options = {"capture_output": True, "text": True, "check": True, "timeout": 30, **options}
        if not options.keys().isdisjoint({"stdout", "stderr"}):
            del options["capture_output"]
        try:
            done: subprocess.CompletedProcess[str] = subprocess.run(self._inside(argv), **options)  # noqa: PLW1510
        except subprocess.CalledProcessError as error:
            if error.stderr:  # the exception has it, but its text does not
                error.add_note(str(error.stderr).rstrip())
            raise
        return done

    @staticmethod
    def python_argv(code: str | Sequence[str]) -> list[str]:
        """The command that runs this interpreter on a program text, or on a list of arguments."""
        return [sys.executable, *(["-c", code] if isinstance(code, str) else code)]

    def python(self, code: str | Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """:meth:`run` this interpreter on a program text, or on a list of arguments."""
        return self.run(self.python_argv(code), **{"env": python_environment(), **options})

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """``subprocess.Popen`` in the namespace, in text; closing the host ends the process."""
        child: subprocess.Popen[str] = subprocess.Popen(self._inside(argv), **{"text": True, **options})
        self._children.append(child)
        return child

    def popen_python(self, code: str | Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """:meth:`popen` for this interpreter, as :meth:`python`."""
        return self.popen(self.python_argv(code), **{"env": python_environment(), **options})

    def interface(self, name: str) -> Interface:
        """The present state of one interface."""
        (found,) = (entry for entry in json.loads(self.ip("-j", "address", "show", "dev", name)) if entry)
        return Interface(
            self,
            name,
            found["ifindex"],
            found["address"],
            found["mtu"],
            tuple(ipaddress.ip_interface(f"{a['local']}/{a['prefixlen']}") for a in found["addr_info"]),
        )

    def _unsettled(self, probe: socket.socket, name: str, link_local: bool) -> str | None:
        """What an interface still lacks.  Called in the namespace."""
        if not _has_carrier(probe, name):
            return "carrier"
        has_link_local = False
        table = Path("/proc/thread-self/net/if_inet6")  # /proc/net would be that of the main thread
        for line in table.read_text().splitlines() if table.exists() else ():
            address, _, _, scope, state, device = line.split()
            if device == name:
                if int(state, 16) & _IFA_F_TENTATIVE:
                    return f"address {address}"
                has_link_local |= int(scope, 16) == _IPV6_SCOPE_LINK
        return "link-local address" if link_local and not has_link_local else None

    def settle(self, name: str, timeout: float = LONGEST) -> None:
        """Wait until an interface has carrier and all its IPv6 addresses, link-local included, can be used.

        Carrier is announced from a work queue, and the kernel takes addresses out of the tentative state
        from another even when it detects no duplicates: ``ip`` returns before either is done.  TimeoutError
        if nothing changes for ``timeout`` seconds before that.
        """
        conf = Path("/proc/sys/net/ipv6/conf", name)

        def lacks(probe: socket.socket) -> str | None:
            # The kernel gives no link-local address where IPv6 is off or mode 1 (none) was asked for.
            link_local = (
                conf.exists()
                and (conf / "disable_ipv6").read_text().strip() == "0"
                and (conf / "addr_gen_mode").read_text().strip() != "1"
            )
            return self._unsettled(probe, name, link_local)

        self._wait(name, lacks, timeout)

    def settle_without_carrier(self, name: str, timeout: float = LONGEST) -> None:
        """Wait until an interface whose peer was set down has lost its carrier."""
        self._wait(name, lambda probe: "loss of carrier" if _has_carrier(probe, name) else None, timeout)

    def _wait(self, name: str, lacks: Callable[[socket.socket], str | None], timeout: float) -> None:
        """Wait for changes of an interface until it lacks nothing. ``lacks`` is called in the namespace."""
        with self.enter(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            news = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_ROUTE)
            with news:
                # Subscribed before the first probe, so that no change is missed between a probe and the wait.
                news.bind((0, _RTMGRP_LINK | _RTMGRP_IPV6_IFADDR))
                while (lack := lacks(probe)) is not None:
                    if not select.select([news], [], [], timeout)[0]:
                        raise TimeoutError(f"{name} in {self.name}: no {lack} within {timeout} s")
                    # Only the fact of a change matters, and ENOBUFS (changes lost) is one too.
                    with contextlib.suppress(OSError):
                        while True:
                            news.recv(65536)


def _has_carrier(probe: socket.socket, name: str) -> bool:
    request = struct.pack("16s16x", name.encode())
    (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
    return bool(flags & _IFF_RUNNING)


def link(
    host_a: Host,
    name_a: str,
    host_b: Host,
    name_b: str,
    mtu: int = 1500,
    *,
    addresses_a: Sequence[str] = (),
    addresses_b: Sequence[str] = (),
) -> None:
    """Join two hosts with a veth pair, both ends up, addressed as given and usable on return."""
    ends = ((host_a, name_a, addresses_a), (host_b, name_b, addresses_b))
    for host, name, addresses in ends:
        lines = [f"address add {address} dev {name}" for address in addresses]
        if host is host_a:
            # Both ends are created in their hosts' namespaces, never in the machine's.
            lines.insert(
                0,
                f"link add name {name_a} index {next(_indices)} mtu {mtu} type veth"
                f" peer name {name_b} index {next(_indices)} mtu {mtu} netns {host_b.name}",
            )
        host.ip_batch(*lines, f"link set dev {name} up")
    for host, name, _ in ends:
        host.settle(name)


class Topology:
    """Several hosts, removed together even after a failure."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def host(self, *, loopback: bool = True, dad: bool = False) -> Host:
        """A new :class:`Host`."""
        return self._stack.enter_context(Host(loopback=loopback, dad=dad))

    def link(
        self,
        host_a: Host,
        name_a: str,
        host_b: Host,
        name_b: str,
        mtu: int = 1500,
        *,
        addresses_a: Sequence[str] = (),
        addresses_b: Sequence[str] = (),
    ) -> tuple[Interface, Interface]:
        """:func:`link`, and both its ends."""
        link(host_a, name_a, host_b, name_b, mtu, addresses_a=addresses_a, addresses_b=addresses_b)
        return host_a.interface(name_a), host_b.interface(name_b)

    def close(self) -> None:
        """Remove every host."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class TwoHosts:
    """``a`` (``va``: 10.7.0.1/24, fd07::1/64) joined to ``b`` (``vb``: 10.7.0.2/24, fd07::2/64)."""

    topology: Topology
    a: Host
    b: Host
    va: Interface
    vb: Interface


@contextlib.contextmanager
def two_hosts(mtu: int = 1500) -> Iterator[TwoHosts]:
    """Two hosts on one link."""
    with Topology() as topology:
        a, b = topology.host(), topology.host()
        va, vb = topology.link(
            a,
            "va",
            b,
            "vb",
            mtu,
            addresses_a=("10.7.0.1/24", "fd07::1/64"),
            addresses_b=("10.7.0.2/24", "fd07::2/64"),
        )
        yield TwoHosts(topology, a, b, va, vb)


@contextlib.contextmanager
def jumbo_hosts() -> Iterator[TwoHosts]:
    """:func:`two_hosts` with an MTU of 9000, whose firewalls see packets, not trains, and reject as many as come."""
    with two_hosts(9000) as net:
        for end in (net.va, net.vb):
            end.host.sysctl("net.ipv4.icmp_ratelimit", 0)
            end.host.ip("link", "set", "dev", end.name, "gso_max_segs", "1")
        yield net


@dataclass(frozen=True)
class ThreeHosts:
    """``a`` and ``c`` with the router ``r`` between them, default routes through it, no other way.

    =====  ======  ==============  ================
    host   device  IPv4            IPv6
    =====  ======  ==============  ================
    ``a``  ``va``  10.7.1.1/24     fd07:1::1/64
    ``r``  ``ra``  10.7.1.254/24   fd07:1::fe/64
    ``r``  ``rc``  10.7.2.254/24   fd07:2::fe/64
    ``c``  ``vc``  10.7.2.1/24     fd07:2::1/64
    =====  ======  ==============  ================
    """

    topology: Topology
    a: Host
    r: Host
    c: Host
    va: Interface
    ra: Interface
    rc: Interface
    vc: Interface


@contextlib.contextmanager
def three_hosts(mtu: int = 1500) -> Iterator[ThreeHosts]:
    """Two hosts on different links with a router between them."""
    with Topology() as topology:
        a, r, c = topology.host(), topology.host(), topology.host()
        r.sysctl("net.ipv4.ip_forward", 1)
        r.sysctl("net.ipv6.conf.all.forwarding", 1)
        va, ra = topology.link(
            a,
            "va",
            r,
            "ra",
            mtu,
            addresses_a=("10.7.1.1/24", "fd07:1::1/64"),
            addresses_b=("10.7.1.254/24", "fd07:1::fe/64"),
        )
        rc, vc = topology.link(
            r,
            "rc",
            c,
            "vc",
            mtu,
            addresses_a=("10.7.2.254/24", "fd07:2::fe/64"),
            addresses_b=("10.7.2.1/24", "fd07:2::1/64"),
        )
        for end, gateway in ((va, ra), (vc, rc)):
            end.host.ip_batch(*(f"route add default via {hop}" for hop in (gateway.ipv4, gateway.ipv6)))
        yield ThreeHosts(topology, a, r, c, va, ra, rc, vc)


@functools.cache
def requirement() -> str | None:
    """Why namespaces cannot be used here, or None where they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip, of iproute2"
    try:
        # Containers may allow only a part of this, so try all of it once.
        with Topology() as topology:
            a, b = topology.host(), topology.host()
            topology.link(a, "va", b, "vb")
    except (CommandError, OSError) as error:
        return f"network namespaces cannot be made here: {error}"
    return None


class _Marks(list[pytest.MarkDecorator]):
    """Several marks in one: a list, as ``pytestmark`` takes, and a decorator of a single test or class."""

    def __call__(self, test: _TestT) -> _TestT:
        for mark in self:
            test = mark(test)
        return test


#: ``pytestmark = needs_netns``, or ``@needs_netns``.
needs_netns = _Marks(
    [
        pytest.mark.netns,
        pytest.mark.skipif(requirement() is not None, reason=requirement() or "namespaces can be made"),
    ]
)
