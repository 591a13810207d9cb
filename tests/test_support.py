"""The helpers of other tests: hosts, networks between them, and the scripted name server."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import dns
from support.dns import Answer, DnsServer, Rcode, resolve
from support.netns import CommandError, Host, Topology, needs_netns, three_hosts, two_hosts

pytestmark = needs_netns


def _here() -> int:
    """The identity of the calling thread's namespace."""
    return Path("/proc/thread-self/ns/net").stat().st_ino


def _exchange(sender: Host, receiver: Host, family: int, address: str) -> str:
    """Send a datagram to an address of the receiver; return where it came from."""
    with contextlib.ExitStack() as stack:
        with receiver.enter():
            there = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        with sender.enter():
            here = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        there.bind((address, 0))
        there.settimeout(5)
        here.sendto(b"hello", there.getsockname())
        data, source = there.recvfrom(64)
        assert data == b"hello"
        return str(source[0])


class TestHost:
    def test_enter_moves_one_thread_and_restores_it(self) -> None:
        outside = _here()
        others: list[int] = []
        stay, seen = threading.Event(), threading.Event()

        def other() -> None:
            seen.set()
            assert stay.wait(5)
            others.append(_here())

        thread = threading.Thread(target=other)
        thread.start()
        assert seen.wait(5)
        with Host() as host:
            with host.enter():
                inside = _here()
                stay.set()
                thread.join()
                assert socket.if_nameindex() == [(1, "lo")]
            with pytest.raises(ZeroDivisionError), host.enter():
                1 / 0  # noqa: B018
            assert _here() == outside
            assert int(host.python("import os; print(os.stat('/proc/self/ns/net').st_ino)").stdout) == inside
        assert inside != outside
        assert others == [outside]

    def test_nested_enter_restores_each_namespace(self) -> None:
        with Host() as first, Host() as second, first.enter():
            inside = _here()
            with second.enter():
                assert _here() != inside
            assert _here() == inside

    def test_loopback_is_up_by_default(self) -> None:
        with Host() as up, Host(loopback=False) as down:
            assert "UP" in json.loads(up.ip("-j", "link", "show", "lo"))[0]["flags"]
            assert "UP" not in json.loads(down.ip("-j", "link", "show", "lo"))[0]["flags"]

    def test_failing_command_reports_its_output(self) -> None:
        with Host() as host:
            with pytest.raises(CommandError, match="nosuch"):
                host.ip("link", "set", "nosuch", "up")
            with pytest.raises(CommandError, match="nosuch"):
                host.ip_batch("link set lo up", "link set nosuch up")

    def test_sysctl_is_the_namespaces_own(self) -> None:
        here = Path("/proc/sys/net/ipv4/ip_default_ttl").read_text().strip()
        with Host() as host:
            host.ip("link", "add", "name", "v.0", "type", "veth", "peer", "name", "w.0")
            host.sysctl("net.ipv4.ip_default_ttl", int(here) - 1)
            host.sysctl("net/ipv4/conf/v.0/forwarding", 1)
            assert host.read_sysctl("net.ipv4.ip_default_ttl") == str(int(here) - 1)
            assert host.read_sysctl("net.ipv4.conf.v/0.forwarding") == "1"
        assert Path("/proc/sys/net/ipv4/ip_default_ttl").read_text().strip() == here

    def test_close_ends_processes_and_removes_the_namespace(self) -> None:
        host = Host()
        child = host.popen_python("print('up', flush=True); input()", stdin=-1, stdout=-1)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert Path("/run/netns", host.name).exists()
        host.close()
        host.close()
        assert child.returncode == -9
        assert not Path("/run/netns", host.name).exists()

    def test_failing_test_leaves_no_namespace(self) -> None:
        names = []
        with pytest.raises(ZeroDivisionError), two_hosts() as net:
            names += [net.a.name, net.b.name]
            1 / 0  # noqa: B018
        assert [name for name in names if Path("/run/netns", name).exists()] == []

    def test_settle_times_out(self) -> None:
        with Host() as host:
            host.ip_batch("link add name v type veth peer name w", "link set dev v up")  # the peer w stays down
            with pytest.raises(TimeoutError, match="no carrier"):
                host.settle("v", timeout=0.05)


class TestTopology:
    def test_two_hosts_exchange_datagrams(self) -> None:
        with two_hosts(mtu=4000) as net:
            assert _exchange(net.a, net.b, socket.AF_INET, "10.7.0.2") == net.va.ipv4 == "10.7.0.1"
            assert _exchange(net.b, net.a, socket.AF_INET6, "fd07::1") == net.vb.ipv6 == "fd07::2"
            assert net.va.link_local.startswith("fe80::")
            assert (net.va.mtu, net.vb.mtu) == (4000, 4000)
            assert net.va.index != net.vb.index
            assert net.va.mac != net.vb.mac
            with net.a.enter():
                assert socket.if_nametoindex("va") == net.va.index

    def test_three_hosts_exchange_datagrams_through_the_router(self) -> None:
        with three_hosts() as net:
            assert _exchange(net.a, net.c, socket.AF_INET, net.vc.ipv4) == "10.7.1.1"
            assert _exchange(net.c, net.a, socket.AF_INET6, net.va.ipv6) == "fd07:2::1"
            net.r.sysctl("net.ipv4.ip_forward", 0)
            with pytest.raises(TimeoutError), net.c.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
                there.bind((net.vc.ipv4, 0))
                there.settimeout(0.1)
                with net.a.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
                    here.sendto(b"lost", there.getsockname())
                there.recv(64)

    def test_link_with_an_mtu_too_small_for_ipv6_carries_ipv4(self) -> None:
        with Topology() as net:
            a, b = net.host(), net.host()
            net.link(a, "va", b, "vb", 576, addresses_a=["10.7.9.1/24"], addresses_b=["10.7.9.2/24"])
            assert _exchange(a, b, socket.AF_INET, "10.7.9.2") == "10.7.9.1"


_LOOKUPS = """
import json, socket, sys
codes = {getattr(socket, name): name for name in dir(socket) if name.startswith("EAI_")}
def look(name, family):
    try:
        found = socket.getaddrinfo(name, 1, getattr(socket, family), socket.SOCK_STREAM)
    except socket.gaierror as error:
        return codes[error.errno]
    return sorted(address[0] for *_, address in found)
print(json.dumps([look(*each.split(",")) for each in sys.argv[1:]]))
"""

_SCRIPT: dict[str | tuple[str, str], Answer] = {
    "both.test": Answer(a=["10.7.0.9"], aaaa=["fd07::9"]),
    "four.test": Answer(a=["10.7.0.9"]),
    "six.test": Answer(aaaa=["fd07::9"]),
    "alias.test": Answer(cname="four.test", a=["10.7.0.9"]),
    "empty.test": Answer(),
    "slow.test": Answer(a=["10.7.0.9"], delay=0.1),
    "half.test": Answer(a=["10.7.0.9"]),
    ("half.test", "AAAA"): Answer(rcode=Rcode.SERVFAIL),
    "formerr.test": Answer(rcode=Rcode.FORMERR),
    "servfail.test": Answer(rcode=Rcode.SERVFAIL),
    "nxdomain.test": Answer(rcode=Rcode.NXDOMAIN),
    "notimp.test": Answer(rcode=Rcode.NOTIMP),
    "refused.test": Answer(rcode=Rcode.REFUSED),
    "notauth.test": Answer(rcode=Rcode.NOTAUTH),
    "silent.test": Answer(silent=True),
}

_EXPECTED: dict[str, list[str] | str] = {
    "both.test,AF_UNSPEC": ["10.7.0.9", "fd07::9"],
    "both.test,AF_INET": ["10.7.0.9"],
    "four.test,AF_UNSPEC": ["10.7.0.9"],
    "four.test,AF_INET6": "EAI_NODATA",
    "six.test,AF_INET": "EAI_NODATA",
    "alias.test,AF_UNSPEC": ["10.7.0.9"],
    "alias.test,AF_INET6": "EAI_NONAME",
    "empty.test,AF_UNSPEC": "EAI_NODATA",
    "empty.test,AF_INET": "EAI_NODATA",
    "slow.test,AF_INET": ["10.7.0.9"],
    "half.test,AF_UNSPEC": ["10.7.0.9"],
    "half.test,AF_INET6": "EAI_AGAIN",
    "formerr.test,AF_UNSPEC": "EAI_NONAME",
    "servfail.test,AF_UNSPEC": "EAI_AGAIN",
    "nxdomain.test,AF_UNSPEC": "EAI_NONAME",
    "unheard-of.test,AF_UNSPEC": "EAI_NONAME",
    "notimp.test,AF_UNSPEC": "EAI_AGAIN",
    "refused.test,AF_UNSPEC": "EAI_AGAIN",
    "notauth.test,AF_UNSPEC": "EAI_NONAME",
    # Last: after a timeout the resolver changes how it asks, for the rest of the process.
    "silent.test,AF_INET": "EAI_AGAIN",
}


@pytest.mark.skipif(dns.requirement() is not None, reason=dns.requirement() or "the resolver can be covered")
class TestDns:
    @pytest.fixture
    def host(self) -> Iterator[Host]:
        with Host() as host:
            yield host

    def test_glibc_gives_the_documented_result_for_each_answer(self, host: Host) -> None:
        with DnsServer(host, _SCRIPT) as server:
            found = resolve(host, _LOOKUPS, *_EXPECTED)
        assert dict(zip(_EXPECTED, found, strict=True)) == _EXPECTED
        assert {("both.test", "A"), ("both.test", "AAAA")} <= set(server.queries)

    def test_unreachable_server_gives_eai_again(self, host: Host) -> None:
        assert resolve(host, _LOOKUPS, "both.test,AF_UNSPEC") == ["EAI_AGAIN"]

    def test_resolver_configuration_is_private_to_the_child(self, host: Host) -> None:
        paths = ["/etc/resolv.conf", "/etc/nsswitch.conf"]
        before = [Path(path).read_bytes() for path in paths]
        code = "import json, sys; print(json.dumps([open(path).read() for path in sys.argv[1:]]))"
        seen = resolve(host, code, *paths, options="timeout:2")
        assert seen == ["nameserver 127.0.0.1\noptions timeout:2\n", "hosts: files dns\n"]
        assert [Path(path).read_bytes() for path in paths] == before
