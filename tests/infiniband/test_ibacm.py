"""Our client and the real ibacm, which asks the real OpenSM."""

from __future__ import annotations

import errno
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from infiniband.fabric import SimulatedFabric, missing
from infiniband.hosts import ALL_BITS, SID
from infiniband.ibacm import built_stub, ibacm, lacking, port_of
from infiniband.sites import OpenSM
from rdmacm import RdmaError
from rdmacm.address import AF_IB, Gid, InetAddr, SockAddrIB, parse_address
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.constants import PortSpace, RaiFlag
from rdmacm.ib.transport import IbPort
from rdmacm.proto.acm import AcmStatus
from rdmacm.proto.sa import PATH_FLAGS, PathData
from rdmacm.resolution import acm
from rdmacm.resolution.acm import AcmClient, Paths, paths_from_acm, paths_in_background
from support.acm import WithInfiniBand, infiniband_device

pytestmark = pytest.mark.infiniband

OWN, KNOWN, KNOWN_IP6, UNKNOWN = "192.168.7.1", "192.168.7.2", "fd00::2", "192.168.7.9"
#: Seconds that an answer may take on a busy machine.
PATIENCE = 20


def ip(text: str) -> InetAddr:
    address = parse_address((text, 0))
    assert isinstance(address, InetAddr)
    return address


class Lab:
    """HostA, on which the daemon runs, and HostB, whose IP addresses it knows."""

    def __init__(self, fabric: SimulatedFabric, stub: Path) -> None:
        self.fabric = fabric
        self.stub = stub
        self.here, self.there = port_of(fabric, "HostA"), port_of(fabric, "HostB")
        self.known: dict[str, Gid] = {KNOWN: self.there.gids[0], KNOWN_IP6: self.there.gids[0]}

    def is_route(self, route: Paths | None) -> bool:
        """Whether this is the subnet administrator's path from HostA to HostB."""
        assert route is not None
        (data,) = route
        path, here, there = data.path, self.here, self.there
        ends = (path.sgid, path.slid, path.dgid, path.dlid)
        assert ends == (here.gids[0], here.lid, there.gids[0], there.lid)
        assert (path.pkey, path.mtu, path.rate, path.reversible) == (0xFFFF, 4, 3, True)
        return data.flags == PATH_FLAGS


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := lacking():
        pytest.skip(reason)
    stub = built_stub(tmp_path_factory.mktemp("stub"))
    with SimulatedFabric() as fabric:
        yield Lab(fabric, stub)


@pytest.fixture(scope="module")
def rundir(lab: Lab) -> Iterator[Path]:
    with ibacm(lab.fabric, lab.stub, "HostA", own=OWN, known=lab.known) as rundir:
        yield rundir


@pytest.fixture
def client(rundir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AcmClient]:
    client = AcmClient(str(rundir))
    monkeypatch.setattr(acm, "CLIENT", client)
    monkeypatch.setattr(acm, "DEADLINE", PATIENCE)
    yield client
    client.close()


def gids(lab: Lab) -> tuple[SockAddrIB, SockAddrIB]:
    return SockAddrIB(lab.here.gids[0]), SockAddrIB(lab.there.gids[0])


@pytest.mark.parametrize("destination", [KNOWN, KNOWN_IP6])
def test_daemon_knows_the_path_to_an_ip_address(lab: Lab, client: AcmClient, destination: str) -> None:
    reply = client.resolve(source=ip(OWN), destination=ip(destination), timeout=PATIENCE)
    assert reply is not None
    assert lab.is_route(reply.paths)


def test_daemon_knows_the_path_between_gids(lab: Lab, client: AcmClient) -> None:
    assert lab.is_route(paths_from_acm(*gids(lab), timeout=PATIENCE))


def test_path_is_delivered_in_the_background(lab: Lab, client: AcmClient) -> None:
    outcomes: queue.SimpleQueue[Paths | None] = queue.SimpleQueue()
    for _ in range(10):
        assert paths_in_background(*gids(lab), outcomes.put, timeout=PATIENCE)
    for _ in range(10):
        assert lab.is_route(outcomes.get(timeout=PATIENCE))


def test_unknown_gid_has_no_path(lab: Lab, client: AcmClient) -> None:
    source, _ = gids(lab)
    assert paths_from_acm(source, SockAddrIB(Gid("fe80::99")), timeout=PATIENCE) is None
    assert client.is_there(), "the daemon has answered"


def test_uncached_address_with_the_nowait_flag_is_enodata(client: AcmClient) -> None:
    reply = client.resolve(source=ip(OWN), destination=ip(UNKNOWN), nodelay=True, timeout=PATIENCE)
    assert reply is not None
    assert (reply.status, reply.paths) == (AcmStatus.ENODATA, ())


def test_unknown_address_times_out(client: AcmClient) -> None:
    assert client.resolve(source=ip(OWN), destination=ip(UNKNOWN), timeout=0.2) is None
    assert not client.is_there()


def test_unknown_source_address_is_esrcaddr(client: AcmClient) -> None:
    reply = client.resolve(source=ip("192.168.9.1"), destination=ip(KNOWN), timeout=PATIENCE)
    assert reply is not None
    assert reply.status == AcmStatus.ESRCADDR


def test_threads_get_their_own_paths(lab: Lab, client: AcmClient) -> None:
    routes: queue.SimpleQueue[Paths | None] = queue.SimpleQueue()

    def ask() -> None:
        for _ in range(50):
            routes.put(paths_from_acm(ip(OWN), ip(KNOWN), timeout=PATIENCE))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(lab.is_route(routes.get_nowait()) for _ in range(200))


def provider_of(port: IbPort) -> WithInfiniBand:
    return WithInfiniBand(infiniband_device(gid=port.gids[0]))


@pytest.mark.parametrize("flags", [RaiFlag(0), RaiFlag.NUMERICHOST])
def test_getaddrinfo_returns_the_daemons_path(lab: Lab, client: AcmClient, flags: RaiFlag) -> None:
    hints = AddrInfo(flags, port_space=PortSpace.TCP, src_addr=(OWN, 0))
    paths_from_acm(ip(OWN), ip(KNOWN), timeout=PATIENCE)  # the daemon then has the answer in its cache
    infiniband, inet = getaddrinfo(KNOWN, 7471, hints, provider=provider_of(lab.here))
    assert lab.is_route(infiniband.route)
    assert infiniband.route == inet.route
    assert infiniband.family == AF_IB
    source, destination = infiniband.src_addr, infiniband.dst_addr
    assert isinstance(source, SockAddrIB)
    assert isinstance(destination, SockAddrIB)
    assert (source.addr, destination.addr) == (lab.here.gids[0], lab.there.gids[0])
    assert destination.sid == (PortSpace.TCP << 16) + 7471
    assert (inet.src_addr, inet.dst_addr) == ((OWN, 0), (KNOWN, 7471))
    assert infiniband.connect == b"\0\x40" + bytes(14) + ip(OWN).ip + bytes(12) + ip(KNOWN).ip


def test_getaddrinfo_of_a_gid_returns_the_daemons_path(lab: Lab, client: AcmClient) -> None:
    hints = AddrInfo(RaiFlag.FAMILY, AF_IB, port_space=PortSpace.TCP)
    (info,) = getaddrinfo(str(lab.there.gids[0]), 7471, hints, provider=provider_of(lab.here))
    assert lab.is_route(info.route)
    assert info.connect == b""


def test_getaddrinfo_uses_the_daemons_source(lab: Lab) -> None:
    if reason := missing("ip"):
        pytest.skip(reason)
    network = (
        "ip link set lo up && ip link add ib0 type veth peer name ib1 && ip link set ib0 up && ip link set ib1 up && "
        'ip address add 192.168.7.1/24 dev ib0 && exec "$@"'
    )
    here = Path(__file__).parent
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", network, "sh", sys.executable, here / "own_network.py", lab.stub],
        env=dict(os.environ, PYTHONPATH=f"{here.parents[1] / 'src'}:{here.parent}"),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    infiniband, inet = json.loads(done.stdout)
    assert inet == [socket.AF_INET, [OWN, 0], ""]
    assert infiniband[0] == AF_IB
    assert infiniband[2] == (b"\0\x40" + bytes(14) + ip(OWN).ip + bytes(12) + ip(KNOWN).ip).hex()


def test_resolve_route_uses_the_daemons_path(lab: Lab, client: AcmClient) -> None:
    """The daemon and the id are both on HostA."""
    with OpenSM(lab.fabric).host("HostA") as a, a.id() as cmid:
        cmid.resolve_addr(SockAddrIB(lab.there.gids[0], SID, ALL_BITS))
        cmid.resolve_route(2000 * PATIENCE)
        assert lab.is_route((PathData(cmid.route.path_rec[0]),))
        assert "ibacm" in cmid.steps[-1].detail


def test_resolve_route_to_an_unknown_gid_raises(lab: Lab, client: AcmClient) -> None:
    with OpenSM(lab.fabric).host("HostA") as a, a.id() as cmid:
        cmid.resolve_addr(SockAddrIB(Gid("fe80::99"), SID, ALL_BITS))
        with pytest.raises(RdmaError, match="subnet administrator") as none:
            cmid.resolve_route(2000 * PATIENCE)
        assert none.value.errno == errno.EINVAL
        assert client.is_there()


def test_client_reaches_a_daemon_on_tcp_and_after_a_restart(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    host = {"own": "192.168.7.3", "known": {"192.168.7.1": lab.here.gids[0]}}
    source, destination = (SockAddrIB(port_of(lab.fabric, name).gids[0]) for name in ("HostC", "HostB"))
    with ibacm(lab.fabric, lab.stub, "HostC", tcp_port=port, **host) as rundir:  # type: ignore[arg-type]
        client = AcmClient(str(rundir), look=0, rest=0)
        assert paths_from_acm(source, destination, timeout=PATIENCE, client=client)
    assert paths_from_acm(source, destination, timeout=PATIENCE, client=client) is None
    with ibacm(lab.fabric, lab.stub, "HostC", **host) as again:  # type: ignore[arg-type]
        assert again == rundir
        assert paths_from_acm(source, destination, timeout=PATIENCE, client=client)
    client.close()
