"""The processes of a lab: one that makes it and ends with it, one for each host that keeps its namespaces.

::

    Lab (outside) ── maker ── process 1 of the PID namespace ─┬─ keeper of h1
                                                              ├─ keeper of h2
                                                              └─ switch, where the network has faults

Process 1 reads the socket to the outside. That ends with the process outside, however it ends. Then process 1 ends, and
with it, by the kernel, everything in the PID namespace: no namespace is left that a process keeps.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from rdmacm.lab.links import Links
from rdmacm.lab.namespaces import (
    end_with_parent,
    enter_new_host,
    enter_new_user_namespace,
    join_host,
    keep_mounts_private,
    replace_file,
)
from rdmacm.lab.switch import forward, open_tap
from rdmacm.lab.wiring import Wiring, addresses_of, hosts_file

_SIOCGIFFLAGS, _IFF_RUNNING = 0x8913, 0x40
#: The interface of each host, as most virtual machines have it.
INTERFACE = "eth0"
_BRIDGE = "bridge0"
#: Packets that wait for the switch; one of more is lost, as in a switch.
_QUEUE = 10_000
#: Seconds that an interface may take to get its carrier.
_CARRIER = 5.0


def main(descriptor: int, names: Sequence[str], wiring: dict[str, Any]) -> NoReturn:
    """Make a lab, tell the socket of the descriptor about it, and keep it until the socket ends.

    The socket gets ``ready`` and the hosts' process ids, as credentials; or the number of an error, and its text.
    """
    outside = socket.socket(fileno=descriptor)
    try:
        before = _read("/etc/hosts")
        enter_new_user_namespace()
        pid = os.fork()
        if pid:
            outside.close()
            os.waitpid(pid, 0)
            os._exit(0)
        # What a user's program leaves behind is a child of this process now, and is to be forgotten.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        keep_mounts_private()
        if before is not None:
            replace_file("/etc/hosts", hosts_file(names, before))
        _Maker(outside, names, Wiring(**wiring)).make()
        outside.send(b"ready")
        _close_all_but(outside.fileno(), 2)
        while outside.recv(1):
            pass
    except OSError as error:
        with suppress(OSError):
            what = f"{error.filename}: " if error.filename else ""
            outside.send(f"{error.errno or errno.EIO} {what}{error.strerror or error}".encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class _Maker:
    """Makes the hosts, and the network between them."""

    def __init__(self, outside: socket.socket, names: Sequence[str], wiring: Wiring) -> None:
        self._outside = outside
        self._names = names
        self._wiring = wiring

    def make(self) -> None:
        """Make everything."""
        hosts = [_Keeper(self._outside, number, name, self._wiring) for number, name in enumerate(self._names, 1)]
        with Links() as links:
            links.set_up("lo")
            if not self._join_by_bridge(links, hosts):
                self._join_by_switch(hosts)
        for host in hosts:
            host.ask(b"address")
        for host in hosts:
            host.ask(b"carrier")

    def _join_by_bridge(self, links: Links, hosts: Sequence[_Keeper]) -> bool:
        """Join the hosts by a bridge of the kernel; False if it lacks what the wiring needs."""
        try:
            links.add_bridge(_BRIDGE)
            links.set_up(_BRIDGE)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOENT):
                raise
            return False
        for number, host in enumerate(hosts, 1):
            port = f"port{number}"
            links.add_veth(port, self._wiring.mtu, INTERFACE, host.pid)
            links.set_up(port, master=_BRIDGE)
            if self._wiring.has_faults and not links.add_netem(port, self._wiring.loss, self._wiring.delay):
                for made in hosts[:number]:
                    made.ask(b"remove")
                return False
        return True

    def _join_by_switch(self, hosts: Sequence[_Keeper]) -> None:
        descriptors = [host.make_tap() for host in hosts]
        if os.fork() == 0:
            try:
                _close_all_but(2, *descriptors)
                forward(descriptors, self._wiring)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


class _Keeper:
    """A process that keeps the namespaces of a host, and sets its interface when it is asked to."""

    def __init__(self, outside: socket.socket, number: int, name: str, wiring: Wiring) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _keep(theirs, outside, number, name, wiring)
            finally:
                os._exit(1)
        theirs.close()
        self._answer()

    def ask(self, what: bytes) -> None:
        """Let it do something. OSError if it cannot."""
        self._socket.send(what)
        self._answer()

    def make_tap(self) -> int:
        """The descriptor of the switch for a new interface."""
        self._socket.send(b"tap")
        return self._answer()[0]

    def _answer(self) -> list[int]:
        text, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 1)
        if text != b"done":
            number, _, rest = (text or b"5 it has ended").decode().partition(" ")
            raise OSError(int(number), rest)
        return descriptors


def _keep(maker: socket.socket, outside: socket.socket, number: int, name: str, wiring: Wiring) -> None:
    """The life of a keeper."""
    sent: list[int] = []
    try:
        enter_new_host(name)
        outside.send(name.encode())  # with credentials, as the socket has asked for: the process id as it is outside
        outside.close()
        with Links() as links:
            links.set_up("lo")
            socket.send_fds(maker, [b"done"], [])
            while what := maker.recv(4096):
                if what == b"tap":
                    sent = [open_tap(INTERFACE)]
                    links.set_up(INTERFACE, mtu=wiring.mtu, queue=_QUEUE)
                elif what == b"remove":
                    links.remove(INTERFACE)
                elif what == b"address":
                    _set_interface(links, number, wiring)
                elif what == b"carrier":
                    _await_carrier()
                    break
                _reply(maker, sent)
                sent = []
    except OSError as error:
        with suppress(OSError):
            what_failed = f"{error.filename}: " if error.filename else ""
            maker.send(f"{error.errno or errno.EIO} {what_failed}{error.strerror or error}".encode())
        return
    _reply(maker, [])
    _close_all_but(2)
    while True:
        signal.pause()


def _reply(maker: socket.socket, descriptors: list[int]) -> None:
    maker.sendmsg(
        [b"done"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] * bool(descriptors)
    )
    for descriptor in descriptors:
        os.close(descriptor)


def _set_interface(links: Links, number: int, wiring: Wiring) -> None:
    with suppress(OSError):
        # An address that the kernel checks first could not be used for a second.
        _write(f"/proc/sys/net/ipv6/conf/{INTERFACE}/accept_dad", "0")
    if wiring.has_faults:
        links.cut_trains(INTERFACE)
    links.set_up(INTERFACE)
    ipv4, ipv6 = addresses_of(number)
    links.add_address(INTERFACE, f"{ipv4}/24")
    if os.path.exists("/proc/sys/net/ipv6"):
        links.add_address(INTERFACE, f"{ipv6}/64")


def _await_carrier() -> None:
    """The kernel announces a carrier from a work queue."""
    end = time.monotonic() + _CARRIER
    while not _has_carrier():
        if time.monotonic() > end:
            raise OSError(errno.ETIMEDOUT, "no carrier", INTERFACE)
        time.sleep(0.002)


def _has_carrier() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16s16x", INTERFACE.encode()))
    return bool(struct.unpack_from("H", request, 16)[0] & _IFF_RUNNING)


def _close_all_but(*kept: int) -> None:
    """Close descriptors: the others' ends of a socket must not outlive them."""
    low = 0
    for descriptor in sorted(kept):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, min(1 << 16, os.sysconf("SC_OPEN_MAX")))


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return None


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def enter(pid: int, own_session: bool, argv: Sequence[str]) -> int:
    """Run a program in the host of a keeper; returns its exit status, or 128 and the number of its signal.

    Signals are passed on to its process group. Without a session of its own, it has the terminal meanwhile.
    """
    join_host(pid)
    terminal = None if own_session or not os.isatty(0) else 0
    passed = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed)
    child = os.fork()
    if child == 0:
        try:
            _become(argv, own_session, terminal)
        except OSError as error:
            print(f"rdmacm: run {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127 if error.errno == errno.ENOENT else 126)
        finally:
            os._exit(1)

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(child, number)

    for number in passed:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    while True:
        _, code = os.waitpid(child, 0 if terminal is None else os.WUNTRACED)
        if not os.WIFSTOPPED(code):
            break
        assert terminal is not None
        _take_terminal(terminal)
        os.kill(os.getpid(), signal.SIGSTOP)  # as the program, until the shell of the user goes on with both
        with suppress(OSError):
            os.tcsetpgrp(terminal, child)
        os.killpg(child, signal.SIGCONT)
    if terminal is not None:
        _take_terminal(terminal)
    status = os.waitstatus_to_exitcode(code)
    return status if status >= 0 else 128 - status


def _become(argv: Sequence[str], own_session: bool, terminal: int | None) -> NoReturn:
    """Become the program."""
    if own_session:
        os.setsid()
    else:
        # A group in the PID namespace: a shell gives the terminal back to the group that it was in.
        os.setpgid(0, 0)
        if terminal is not None:
            _take_terminal(terminal)
    for number in signal.Signals:
        if callable(signal.getsignal(number)) or number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvp(argv[0], list(argv))


def _take_terminal(terminal: int) -> None:
    """Be the group that reads the terminal."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with suppress(OSError):  # it has gone
        os.tcsetpgrp(terminal, os.getpgrp())
    signal.signal(signal.SIGTTOU, before)
