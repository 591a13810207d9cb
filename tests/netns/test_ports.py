"""The processes and users of a network namespace share one table of port numbers."""

from __future__ import annotations

import errno
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import pytest

from rdmacm import CmId, EventChannel, IdOption, OptionLevel, PortSpace, RdmaError
from support.netns import Host, needs_netns, two_hosts

pytestmark = needs_netns

NOBODY = 65534

#: A process that makes calls: each input line is a call in JSON, each output line its result.
CHILD = """
import json, os, sys
import rdmacm, rdmacm.soft.provider, rdmacm.net.netlink
if len(sys.argv) > 1:
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
channel = rdmacm.EventChannel()
ids = {}
def bind(name, host, port, ps, reuse, afonly):
    ids[name] = cmid = rdmacm.CmId(channel, rdmacm.PortSpace[ps])
    if reuse is not None:
        cmid.set_option(0, rdmacm.IdOption.REUSEADDR, int(reuse))
    if afonly is not None:
        cmid.set_option(0, rdmacm.IdOption.AFONLY, int(afonly))
    cmid.bind_addr((host, port))
    return cmid.src_port
def option(name, which, value):
    ids[name].set_option(0, rdmacm.IdOption[which], value)
def listen(name):
    ids[name].listen()
def destroy(name):
    ids.pop(name).destroy()
print(json.dumps({"ok": os.getpid()}), flush=True)
for line in sys.stdin:
    call, *args = json.loads(line)
    try:
        answer = {"ok": globals()[call](*args)}
    except OSError as error:
        answer = {"errno": error.errno, "text": str(error)}
        if call == "bind":
            ids.pop(args[0]).destroy()
    print(json.dumps(answer), flush=True)
for cmid in ids.values():
    cmid.destroy()
channel.close()
"""


class Failed(Exception):
    """The error of a call in a child."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.errno = number
        self.text = text


class Process:
    """Another process of the host."""

    def __init__(self, host: Host, *args: str) -> None:
        self._child = host.popen_python(
            ["-W", "error", "-c", CHILD, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid: int = self._answer()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, f"the child died: {self._child.wait(5)}"
        answer = json.loads(line)
        if "errno" in answer:
            raise Failed(answer["errno"], answer["text"])
        return answer["ok"]

    def __call__(self, *call: object) -> Any:
        assert self._child.stdin is not None
        print(json.dumps(call), file=self._child.stdin, flush=True)
        return self._answer()

    def bind(
        self,
        host: str,
        port: int = 0,
        *,
        ps: str = "TCP",
        reuse: bool | None = None,
        afonly: bool | None = None,
        name: str = "id",
    ) -> int:
        """Bind an id; returns its port. Raises :class:`Failed`."""
        found: int = self("bind", name, host, port, ps, reuse, afonly)
        return found

    def end(self) -> int:
        assert self._child.stdin is not None
        self._child.stdin.close()
        return self._child.wait(5)

    def kill(self) -> None:
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(5)


class Here:
    """The same calls in this process."""

    def __init__(self) -> None:
        self._channel = EventChannel()
        self._ids: list[CmId] = []

    def bind(
        self,
        host: str,
        port: int = 0,
        *,
        ps: str = "TCP",
        reuse: bool | None = None,
        afonly: bool | None = None,
        name: str = "id",
    ) -> int:
        cmid = CmId(self._channel, PortSpace[ps])
        self._ids.append(cmid)
        try:
            if reuse is not None:
                cmid.set_option(OptionLevel.ID, IdOption.REUSEADDR, int(reuse))
            if afonly is not None:
                cmid.set_option(OptionLevel.ID, IdOption.AFONLY, int(afonly))
            cmid.bind_addr((host, port))
        except RdmaError as error:
            raise Failed(error.errno or 0, str(error)) from error
        return cmid.src_port

    def close(self) -> None:
        for cmid in self._ids:
            cmid.destroy()
        self._channel.close()


@pytest.fixture
def host() -> Iterator[Host]:
    """A host with two addresses of each family; the test runs in its namespace."""
    with two_hosts() as net:
        net.a.ip_batch("address add 10.7.0.11/24 dev va", "address add fd07::11/64 dev va nodad")
        net.a.settle("va")
        with net.a.enter():
            yield net.a


@pytest.fixture
def here(host: Host) -> Iterator[Here]:
    here = Here()
    yield here
    here.close()


def refused(call: Callable[[], object]) -> Failed:
    with pytest.raises(Failed) as caught:
        call()
    return caught.value


ONE, OTHER, ONE6, OTHER6, ANY, ANY6 = "10.7.0.1", "10.7.0.11", "fd07::1", "fd07::11", "0.0.0.0", "::"

Ask: TypeAlias = dict[str, Any]
REUSE: Ask = {"reuse": True}
V6ONLY: Ask = {"afonly": True}
BOTH: Ask = {"afonly": False}

#: First binding, second binding, and the errno of the second; the other order must give the same.
PAIRS: list[tuple[tuple[str, Ask], tuple[str, Ask], int]] = [
    ((ONE, {}), (ONE, {}), errno.EADDRINUSE),
    ((ONE6, {}), (ONE6, {}), errno.EADDRINUSE),
    ((ONE, {}), (OTHER, {}), 0),
    ((ONE6, {}), (OTHER6, {}), 0),
    ((ONE, {}), (ONE6, {}), 0),
    ((ONE, {}), ("127.0.0.1", {}), 0),
    ((ANY, {}), (ONE, {}), errno.EADDRNOTAVAIL),
    ((ANY, {}), ("127.0.0.1", {}), errno.EADDRNOTAVAIL),
    ((ANY, {}), (ANY, {}), errno.EADDRNOTAVAIL),
    ((ANY6, {}), (ONE6, {}), errno.EADDRNOTAVAIL),
    ((ANY6, {}), (ANY6, {}), errno.EADDRNOTAVAIL),
    # The IPv6 wildcard includes IPv4, except with AFONLY.
    ((ANY6, {}), (ANY, {}), errno.EADDRNOTAVAIL),
    ((ANY6, {}), (ONE, {}), errno.EADDRNOTAVAIL),
    ((ANY6, V6ONLY), (ANY, {}), 0),
    ((ANY6, V6ONLY), (ONE, {}), 0),
    ((ANY6, V6ONLY), (ANY, BOTH), errno.EADDRNOTAVAIL),
    ((ANY6, V6ONLY), (ONE6, {}), errno.EADDRNOTAVAIL),
    ((ONE6, V6ONLY), (ANY, {}), 0),
    ((ONE6, {}), (ANY, {}), errno.EADDRNOTAVAIL),
    # Ids share a port only if both have REUSEADDR.
    ((ONE, REUSE), (ONE, REUSE), 0),
    ((ONE, REUSE), (ONE, {}), errno.EADDRINUSE),
    ((ANY, REUSE), (ANY, REUSE), 0),
    ((ANY, REUSE), (ONE, REUSE), 0),
    ((ANY6, REUSE), (ONE, REUSE), 0),
    ((ANY, REUSE), (ONE, {}), errno.EADDRNOTAVAIL),
    ((ANY6, REUSE), (ANY, {}), errno.EADDRNOTAVAIL),
]


class TestTwoProcesses:
    def test_conflicts_between_processes_equal_those_within_one(self, host: Host, here: Here) -> None:
        """The result is also the same in either order."""
        one, two = Process(host), Process(host)
        port = 20000
        for first, second, wanted in PAIRS:
            for left, right in ((first, second), (second, first)):
                for taker, asker in ((one.bind, two.bind), (here.bind, here.bind)):
                    port += 1
                    name = str(port)
                    assert taker(left[0], port, name=name, **left[1]) == port
                    try:
                        assert asker(right[0], port, name=name + "b", **right[1]) == port
                        found = 0
                    except Failed as error:
                        found = error.errno
                    who = "within a process" if taker == here.bind else "between processes"
                    what = f"{left}, then {right}, {who}"
                    assert errno.errorcode.get(found) == errno.errorcode.get(wanted), what
        assert (one.end(), two.end()) == (0, 0)

    @pytest.mark.parametrize(("first", "second"), [(ONE, ONE), (ONE6, ONE6), (ANY, ONE), (ONE, ANY)])
    def test_conflict_names_the_other_process(self, host: Host, here: Here, first: str, second: str) -> None:
        other = Process(host)
        port = other.bind(first)
        error = refused(lambda: here.bind(second, port))
        assert f"process {other.pid}" in error.text
        assert str(port) in error.text
        assert "TCP" in error.text

    def test_conflict_names_this_process(self, here: Here) -> None:
        port = here.bind(ONE)
        assert "this process" in refused(lambda: here.bind(ONE, port)).text

    def test_port_spaces_are_independent(self, host: Host, here: Here) -> None:
        other = Process(host)
        for space in ("TCP", "UDP", "IB"):
            other.bind(ONE, 7471, ps=space, name=space)
            assert refused(partial(here.bind, ONE, 7471, ps=space)).errno == errno.EADDRINUSE
            assert other.bind(ANY, 7472, ps=space, name=space + "any") == 7472

    def test_namespaces_are_independent(self, host: Host, here: Here) -> None:
        with Host() as elsewhere:
            there = Process(elsewhere)
            assert there.bind(ANY, 7471) == 7471
            assert here.bind(ANY, 7471) == 7471
            with elsewhere.enter():
                inside = Here()
                try:
                    error = refused(lambda: inside.bind(ANY, 7471))
                    assert f"process {there.pid}" in error.text
                finally:
                    inside.close()

    def test_sockets_are_independent(self, host: Host, here: Here) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp:
            tcp.bind((ONE, 7471))
            assert here.bind(ONE, 7471) == 7471

    @pytest.mark.parametrize("address", [ONE, ANY, ANY6])
    def test_killed_process_frees_its_port(self, host: Host, here: Here, address: str) -> None:
        other = Process(host)
        port = other.bind(address)
        refused(lambda: here.bind(address, port))
        other.kill()
        assert here.bind(address, port) == port

    def test_destroy_frees_the_port(self, host: Host, here: Here) -> None:
        other = Process(host)
        port = other.bind(ONE)
        refused(lambda: here.bind(ONE, port))
        other("destroy", "id")
        assert here.bind(ONE, port) == port
        assert refused(lambda: other.bind(ONE, port)).errno == errno.EADDRINUSE

    def test_destroy_keeps_ports_of_other_ids(self, host: Host, here: Here) -> None:
        other = Process(host)
        port = other.bind(ONE, name="first", reuse=True)
        other.bind(ONE, port, name="second", reuse=True)
        other.bind(ANY, port, name="third", reuse=True)
        other("destroy", "first")
        assert refused(lambda: here.bind(ONE, port)).errno == errno.EADDRNOTAVAIL
        other("destroy", "third")
        assert refused(lambda: here.bind(ONE, port)).errno == errno.EADDRINUSE
        assert here.bind(OTHER, port) == port
        other("destroy", "second")
        assert here.bind(ONE, port) == port

    def test_reuseaddr_set_after_bind_allows_sharing(self, host: Host, here: Here) -> None:
        other = Process(host)
        port = other.bind(ONE)
        assert refused(lambda: here.bind(ONE, port, reuse=True)).errno == errno.EADDRINUSE
        other("option", "id", "REUSEADDR", 1)
        assert here.bind(ONE, port, reuse=True) == port
        assert refused(lambda: here.bind(ONE, port)).errno == errno.EADDRINUSE

    @pytest.mark.parametrize("address", [ONE, ANY])
    def test_listening_ends_sharing(self, host: Host, here: Here, address: str) -> None:
        one, other = Process(host), Process(host)
        port = one.bind(address, reuse=True)
        other.bind(address, port, reuse=True)
        with pytest.raises(Failed, match=str(other.pid)) as failed:
            one("listen", "id")
        assert failed.value.errno == (errno.EADDRINUSE if address == ONE else errno.EADDRNOTAVAIL)
        assert here.bind(address, port, reuse=True) == port, "the id whose listen failed still shares its port"
        here.close()
        other("destroy", "id")
        one("listen", "id")
        with pytest.raises(Failed):
            other.bind(address, port, reuse=True)

    def test_afonly_set_after_bind_frees_ipv4(self, host: Host, here: Here) -> None:
        other = Process(host)
        port = other.bind(ANY6)
        assert refused(lambda: here.bind(ANY, port)).errno == errno.EADDRNOTAVAIL
        other("option", "id", "AFONLY", 1)
        assert here.bind(ANY, port) == port
        # Another id has the IPv4 port now, so AFONLY cannot be turned off again.
        assert refused(lambda: other("option", "id", "AFONLY", 0)).errno == errno.EADDRNOTAVAIL
        assert refused(lambda: here.bind(ONE6, port)).errno == errno.EADDRNOTAVAIL

    def test_bindv6only_of_the_host_is_the_default_of_afonly(self, host: Host) -> None:
        host.sysctl("net.ipv6.bindv6only", 1)
        one, two = Process(host), Process(host)
        port = one.bind(ANY6)
        assert two.bind(ANY, port) == port
        assert refused(lambda: two.bind(ANY6, port, name="again")).errno == errno.EADDRNOTAVAIL

    def test_link_local_address_has_its_ports_per_interface(self, host: Host, here: Here) -> None:
        host.ip_batch(
            "link add name br0 type bridge",
            "link set dev br0 up",
            "address add fe80::7/64 dev va nodad",
            "address add fe80::7/64 dev br0 nodad",
        )
        other = Process(host)
        port = other.bind("fe80::7%va")
        assert here.bind("fe80::7%br0", port) == port
        assert refused(lambda: here.bind("fe80::7%va", port)).errno == errno.EADDRINUSE

    def test_resolve_addr_takes_a_port(self, host: Host, here: Here) -> None:
        with CmId() as cmid:
            cmid.resolve_addr(("10.7.0.2", 7471))
            assert cmid.src_port
            other = Process(host)
            assert refused(lambda: other.bind(ANY, cmid.src_port)).errno == errno.EADDRNOTAVAIL


class TestEphemeralPorts:
    def test_each_id_gets_its_own_port(self, host: Host, here: Here) -> None:
        host.sysctl("net.ipv4.ip_local_port_range", "40000 40199")
        one, two = Process(host), Process(host)
        taken = [p.bind(ANY, name=str(i)) for i in range(50) for p in (one, two)]
        assert len(set(taken)) == 100
        assert set(taken) <= set(range(40000, 40200))

    def test_exhausted_range_is_eaddrnotavail(self, host: Host) -> None:
        host.sysctl("net.ipv4.ip_local_port_range", "40000 40003")
        one, two = Process(host), Process(host)
        taken = [p.bind(ANY, name=str(i)) for i in range(2) for p in (one, two)]
        assert sorted(taken) == [40000, 40001, 40002, 40003]
        error = refused(lambda: one.bind(ANY, name="more"))
        assert error.errno == errno.EADDRNOTAVAIL
        assert "40000..40003" in error.text
        assert one.bind(ANY, ps="UDP", name="another space") in taken
        two.kill()
        assert one.bind(ANY, name="more") in taken

    def test_ports_come_from_the_range_of_the_host(self, host: Host, here: Here) -> None:
        host.sysctl("net.ipv4.ip_local_port_range", "41000 41009")
        assert here.bind(ANY) in range(41000, 41010)

    def test_freed_port_is_not_reused_at_once(self, host: Host) -> None:
        one = Process(host)
        before = 0
        for _ in range(20):
            port = one.bind(ANY)
            assert port != before
            before = port
            one("destroy", "id")


class TestUsers:
    def test_privileged_ports_need_the_capability(self, host: Host, here: Here) -> None:
        user = Process(host, str(NOBODY))
        for port in (1, 1023):
            error = refused(partial(user.bind, ANY, port))
            assert error.errno == errno.EACCES
            assert str(port) in error.text
            assert "CAP_NET_BIND_SERVICE" in error.text
        assert user.bind(ANY, 1024) == 1024
        assert here.bind(ANY, 1023) == 1023
        assert here.bind(ANY, 1) == 1

    @pytest.mark.parametrize("root_first", [pytest.param(True, marks=pytest.mark.slow), False])
    def test_users_share_the_port_table(self, host: Host, root_first: bool) -> None:
        first = Process(host) if root_first else Process(host, str(NOBODY))
        port = first.bind(ONE)
        second = Process(host, str(NOBODY)) if root_first else Process(host)
        error = refused(lambda: second.bind(ONE, port))
        assert error.errno == errno.EADDRINUSE
        assert f"process {first.pid}" in error.text
        assert second.bind(OTHER, port) == port
        assert refused(lambda: first.bind(OTHER, port, name="more")).errno == errno.EADDRINUSE
        first.kill()
        assert second.bind(ONE, port, name="more") == port

    def test_unprivileged_user_resolves(self, host: Host) -> None:
        code = """
import os, rdmacm, rdmacm.soft.provider, rdmacm.net.netlink
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for dst in ("10.7.0.2", "fd07::2"):
    with rdmacm.CmId() as cmid:
        cmid.resolve_addr((dst, 7471))
        cmid.resolve_route()
        print(cmid.verbs.name, cmid.route.dgid)
"""
        assert host.python(["-W", "error", "-c", code]).stdout.splitlines() == [
            "soft_va ::ffff:10.7.0.2",
            "soft_va fd07::2",
        ]


FORKING = """
import os, signal, sys
import rdmacm
channel = rdmacm.EventChannel()
cmid = rdmacm.CmId(channel)
cmid.bind_addr(("10.7.0.1", 7471))
if os.fork():
    signal.pause()
try:
    channel.get_event(5)
    print("an event", flush=True)
except OSError as error:
    print(error.errno, flush=True)
try:
    cmid.resolve_addr(("10.7.0.2", 7471))
    print("resolving", flush=True)
except OSError as error:
    print(error.errno, flush=True)
try:
    with rdmacm.CmId(channel) as more:
        more.bind_addr(("10.7.0.1", 0))
        print("bound", flush=True)
except OSError as error:
    print(error.errno, flush=True)
with rdmacm.CmId() as own:
    own.resolve_addr(("10.7.0.2", 7471))
    print(own.verbs.name, flush=True)
try:
    with rdmacm.CmId() as own:
        own.bind_addr(("10.7.0.1", 7471))
        print("bound", flush=True)
except OSError as error:
    print(error.errno, flush=True)
cmid.destroy()
channel.close()
print("destroyed", flush=True)
sys.stdin.readline()
with rdmacm.CmId() as own:
    own.bind_addr(("10.7.0.1", 7472))
print("end", flush=True)
"""


class TestFork:
    def test_forked_child_holds_no_ports(self, host: Host, here: Here) -> None:
        parent = host.popen_python(FORKING, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert parent.stdout is not None
        assert parent.stdin is not None

        def line() -> str:
            assert parent.stdout is not None
            return parent.stdout.readline().rstrip()

        assert line() == str(errno.EBADF)  # events of the parent's channel never reach the child
        assert line() == str(errno.EBADF)  # nor do those of the parent's id
        assert line() == str(errno.EBADF)
        assert line() == "soft_va"
        assert line() == str(errno.EADDRINUSE)
        assert line() == "destroyed"
        # Destroying the child's copies does not free the parent's port.
        error = refused(lambda: here.bind(ONE, 7471))
        assert error.errno == errno.EADDRINUSE
        assert f"process {parent.pid}" in error.text
        parent.kill()
        parent.wait(5)
        # The child still runs with the parent's descriptors, but does not hold its port.
        assert here.bind(ONE, 7471) == 7471
        print(file=parent.stdin, flush=True)
        assert line() == "end"
