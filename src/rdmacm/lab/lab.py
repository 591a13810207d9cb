"""Hosts in network namespaces, as the process sees them that makes them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from rdmacm.errors import cm_error
from rdmacm.lab.wiring import Wiring, addresses_of, check_names

_CREDENTIALS = struct.Struct("=iII")  # ucred: process, user, group
_SO_PASSCRED = getattr(socket, "SO_PASSCRED", 16)
_SCM_CREDENTIALS = getattr(socket, "SCM_CREDENTIALS", 2)

_MAKE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rdmacm.lab import inside; "
_MAKE += "inside.main(int(sys.argv[2]), *json.loads(sys.argv[3]))"
_ENTER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rdmacm.lab import inside; "
_ENTER += "sys.exit(inside.enter(int(sys.argv[2]), True, sys.argv[3:]))"

#: What to try where the system refuses namespaces.
_HINTS = {
    errno.EPERM: "sysctl kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0 as root;"
    " in a container, an engine that permits user namespaces",
    errno.EACCES: "sysctl kernel.apparmor_restrict_unprivileged_userns=0 as root",
    errno.ENOSPC: "sysctl user.max_user_namespaces=10000 as root",
    errno.EINVAL: "a kernel with user namespaces (CONFIG_USER_NS)",
}


#: How the errors of the namespaces themselves begin.
_REFUSED = ("unshare", "mount", "sethostname", "/proc/self/")
_TUN_HINT = "modprobe sch_netem as root, or access to /dev/net/tun: one of them is needed for loss and delay"


class LabHost:
    """A host of a lab, made by :class:`Lab`. Its programs are root in it, and outside the user who has made the lab.

    Attributes:

    - ``name``: its name, which leads to its addresses on all hosts.
    - ``addresses``: its IPv4 and IPv6 address.
    - ``pid``: a process that is in it, for nsenter(1).
    """

    def __init__(self, name: str, number: int, pid: int) -> None:
        self.name = name
        self.addresses: tuple[str, str] = addresses_of(number)
        self.pid = pid
        self._children: list[subprocess.Popen[Any]] = []

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """:class:`subprocess.Popen` of a program in the host; ``options`` are its. Signals are passed on.

        The program has a session of its own. A signal N that ends it is status 128 + N.
        """
        command = [sys.executable, "-S", "-E", "-c", _ENTER, json.dumps(sys.path), str(self.pid), *argv]
        child = subprocess.Popen(command, **{"start_new_session": True, **options})
        self._children.append(child)
        return child

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """:func:`subprocess.run` of a program in the host; its output is text, captured and checked, unless told."""
        options = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        check, timeout = options.pop("check", True), options.pop("timeout", None)
        given = options.pop("input", None)
        if given is not None:
            options["stdin"] = subprocess.PIPE
        with self.popen(argv, **options) as child:
            try:
                output, errors = child.communicate(given, timeout=timeout)
            except BaseException:
                child.kill()
                raise
        done = subprocess.CompletedProcess(list(argv), child.returncode, output, errors)
        if check and child.returncode:
            failure = subprocess.CalledProcessError(child.returncode, list(argv), output, errors)
            if errors:
                failure.add_note(str(errors).rstrip())
            raise failure
        return done

    def __repr__(self) -> str:
        return f"<LabHost {self.name} {self.addresses[0]}>"


class Lab:
    """Hosts on one network, in namespaces that any user may make. They are there until :meth:`close`.

    They end with the process that has made them, too, however it ends, and so does what runs in them. Raises RdmaError
    where the system refuses namespaces, and ValueError for names that hosts cannot have.

    Attributes:

    - ``hosts``: the hosts by name.
    - ``wiring``: the network between them.
    """

    def __init__(self, names: Sequence[str], wiring: Wiring | None = None) -> None:
        check_names(names)
        if not sys.platform.startswith("linux"):
            raise cm_error(errno.EOPNOTSUPP, "network namespaces are Linux's", "lab")
        self.wiring: Wiring = wiring or Wiring()
        self.hosts: dict[str, LabHost] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (self._socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, _SO_PASSCRED, 1)
            plan = json.dumps([list(names), asdict(self.wiring)])
            command = [sys.executable, "-S", "-E", "-c", _MAKE, json.dumps(sys.path), str(theirs.fileno()), plan]
            # In a session of its own: Ctrl-C is for the process that has made it.
            self._maker = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
            )
        try:
            pids = self._await_hosts()
        except BaseException:
            self.close()
            raise
        self.hosts = {name: LabHost(name, number, pids[name]) for number, name in enumerate(names, 1)}

    def _await_hosts(self) -> dict[str, int]:
        pids: dict[str, int] = {}
        while True:
            text, more, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
            if text == b"ready":
                return pids
            if not text or text[:1].isdigit():
                number, _, why = (text.decode() or f"{errno.EIO} the process that makes it has ended").partition(" ")
                code, is_refused = int(number), why.startswith(_REFUSED)
                what = "namespaces are refused here" if is_refused else "the network cannot be made"
                raise cm_error(code, f"{what}: {why}", "lab", hint=_HINTS.get(code) if is_refused else _TUN_HINT)
            for level, kind, data in more:
                if (level, kind) == (socket.SOL_SOCKET, _SCM_CREDENTIALS):
                    pids[text.decode()] = _CREDENTIALS.unpack(data)[0]

    def close(self) -> None:
        """End everything that runs in the hosts, and remove them. May be called again."""
        self._socket.close()
        self._maker.wait()
        for host in self.hosts.values():
            for child in host._children:
                child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Lab {', '.join(self.hosts)}>"


def shell() -> str:
    """The user's shell."""
    return os.environ.get("SHELL") or shutil.which("bash") or "/bin/sh"
