"""Ports of real devices: their attributes in sysfs, and the MADs written to and read from the device file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infiniband.datagrams import PATH_RECORD, message, question
from infiniband.fabric import SimulatedFabric, umad2sim
from rdmacm.address import Gid
from rdmacm.ib.umad import UmadTransport
from rdmacm.proto.mad import Mad, MadAddress, MgmtClass
from rdmacm.verbs.enums import PortState

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
SUBNET = "fe80:0000:0000:0000"
ENABLE_PKEY = 0x1B03
REGISTER_AGENT = 0xC01C1B01
#: The kernel's number for the agent, which it puts into the upper half of transaction ids.
AGENT = 3


class Tree:
    """The files in /sys and /dev of a host with one device of two ports."""

    def __init__(self, root: Path) -> None:
        self.sys, self.dev = root / "sys", root / "dev"
        self.write("infiniband_mad/abi_version", "5")
        for number, (device, port) in enumerate((("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_0", 2))):
            self.write(f"infiniband_mad/umad{number}/ibdev", device)
            self.write(f"infiniband_mad/umad{number}/port", str(port))
            self.write(f"infiniband_mad/issm{number}/ibdev", device)
            self.write(f"infiniband_mad/issm{number}/port", str(port))
        self.write("infiniband/mlx5_0/node_guid", "0002:c903:00a1:b2c0")
        for name, value in {
            "lid": "0x2a",
            "sm_lid": "0x7",
            "sm_sl": "2",
            "lid_mask_count": "1",
            "state": "4: ACTIVE",
            "rate": "100 Gb/sec (4X EDR)",
            "link_layer": "InfiniBand",
            "gids/0": f"{SUBNET}:0002:c903:00a1:b2c2",
            "gids/1": f"{SUBNET}:0000:0000:0000:0000",
            "gids/2": f"{SUBNET}:0014:0500:0000:0001",
            "gids/3": f"{SUBNET}:0000:0000:0000:0000",
            "gids/10": f"{SUBNET}:0000:0000:0000:0000",
            "pkeys/0": "0xffff",
            "pkeys/1": "0x0000",
            "pkeys/2": "0x8001",
            "pkeys/3": "0x0000",
        }.items():
            self.write(f"infiniband/mlx5_0/ports/2/{name}", value)
        (self.dev / "infiniband").mkdir(parents=True)
        os.mkfifo(self.file)

    @property
    def file(self) -> Path:
        return self.dev / "infiniband/umad2"

    def write(self, name: str, text: str) -> None:
        path = self.sys / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def port(self, device: str = "mlx5_0", port: int = 2) -> UmadTransport:
        return UmadTransport(device, port, sys=str(self.sys), dev=str(self.dev))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# -- finding the port -----------------------------------------------------------------------------------------


def test_port_attributes_come_from_sysfs(tree: Tree) -> None:
    port = tree.port().port()
    assert (port.device, port.port_num) == ("mlx5_0", 2)
    assert (port.lid, port.lmc, port.sm_lid, port.sm_sl) == (0x2A, 1, 7, 2)
    assert (port.node_guid, port.port_guid) == (0x0002C90300A1B2C0, 0x0002C90300A1B2C2)
    assert port.state is PortState.ACTIVE
    assert port.rate == 16
    # Empty entries keep their index.
    assert port.gids == (Gid("fe80::2:c903:a1:b2c2"), Gid("fe80::"), Gid("fe80::14:500:0:1"))
    assert port.pkeys == (0xFFFF, 0, 0x8001)


def refused(transport: UmadTransport) -> OSError:
    with pytest.raises(OSError) as raised:
        transport.open()
    assert transport.fileno() == -1
    return raised.value


def test_opening_without_infiniband_raises(tmp_path: Path) -> None:
    transport = UmadTransport("mlx5_0", 1, sys=str(tmp_path), dev=str(tmp_path))
    assert refused(transport).errno == errno.ENODEV
    with pytest.raises(OSError) as raised:
        transport.port()
    assert raised.value.errno == errno.ENODEV


def test_opening_without_ib_umad_raises(tree: Tree) -> None:
    shutil.rmtree(tree.sys / "class/infiniband_mad")
    error = refused(tree.port())
    assert error.errno == errno.ENODEV
    assert "modprobe ib_umad" in str(error)


def test_opening_with_an_unsupported_abi_version_raises(tree: Tree) -> None:
    tree.write("infiniband_mad/abi_version", "6")
    assert refused(tree.port()).errno == errno.EPROTONOSUPPORT


@pytest.mark.parametrize(("device", "port"), [("mlx5_0", 3), ("mlx5_2", 1)])
def test_opening_an_unknown_port_raises(tree: Tree, device: str, port: int) -> None:
    assert refused(tree.port(device, port)).errno == errno.ENODEV


def test_opening_without_the_device_file_raises(tree: Tree) -> None:
    tree.file.unlink()
    error = refused(tree.port())
    assert error.errno == errno.ENOENT
    assert "udev" in str(error)


def test_opening_without_permission_raises(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str, flags: int) -> int:  # root is never denied
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "open", denied)
    error = refused(tree.port())
    assert isinstance(error, PermissionError)
    assert "udev rule" in str(error)


def test_opening_an_ethernet_port_raises(tree: Tree) -> None:
    tree.write("infiniband/mlx5_0/ports/2/link_layer", "Ethernet")
    assert refused(tree.port()).errno == errno.EOPNOTSUPP


def test_opening_a_regular_file_raises(tree: Tree) -> None:
    assert refused(tree.port()).errno == errno.ENOTTY


@pytest.mark.parametrize("text", ["", "x", "ACTIVE", "99: NEW"])
def test_malformed_sysfs_raises(tree: Tree, text: str) -> None:
    tree.write("infiniband/mlx5_0/ports/2/state", text)
    with pytest.raises(OSError) as raised:
        tree.port().port()
    assert raised.value.errno == errno.EIO


# -- the device file ------------------------------------------------------------------------------------------


class Kernel:
    """The kernel's side of the device file, which is a FIFO: it reads what the transport has written."""

    def __init__(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ioctls: list[tuple[int, bytes]] = []
        self._patched = monkeypatch
        monkeypatch.setattr(fcntl, "ioctl", self._ioctl)
        self.transport = tree.port()
        self.transport.open()
        self.fd = self.transport.fileno()

    def _ioctl(self, fd: int, request: int, argument: bytearray | int = 0, mutate: bool = True) -> int:
        self.ioctls.append((request, b"" if isinstance(argument, int) else bytes(argument)))
        if isinstance(argument, bytearray):
            argument[:4] = AGENT.to_bytes(4, sys.byteorder)
        return 0

    def written(self) -> bytes:
        return os.read(self.fd, 1000)

    def answers(self, written: bytes, status: int = 0, more: bytes = b"") -> None:
        """Send the MAD back as the kernel does, with the agent in the transaction id."""
        packet = bytearray(written + more)
        packet[4:8] = status.to_bytes(4, sys.byteorder)
        packet[72:76] = AGENT.to_bytes(4, "big")
        os.write(self.fd, packet)

    def refuses_small_buffers(self, needed: int) -> None:
        read = os.read

        def read_or_enospc(fd: int, size: int) -> bytes:
            if fd == self.fd and size < needed and select.select([fd], [], [], 0)[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return read(fd, size)

        self._patched.setattr(os, "read", read_or_enospc)

    def fails(self, number: int) -> None:
        read = os.read

        def read_or_fail(fd: int, size: int) -> bytes:
            if fd == self.fd:
                raise OSError(number, os.strerror(number))
            return read(fd, size)

        self._patched.setattr(os, "read", read_or_fail)


@pytest.fixture
def kernel(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel(tree, monkeypatch)
    yield kernel
    kernel.transport.close()


def asking(number: int = 0x1122334455667788) -> bytes:
    return question(PATH_RECORD, 0x180C, bytes(range(64)), number)


def test_port_registers_an_agent_for_sa_responses(kernel: Kernel) -> None:
    registration = struct.pack("=I16sBBB3sBx", 0, bytes(16), 1, 3, 2, bytes(3), 1)
    assert len(registration) == 28
    assert kernel.ioctls == [(ENABLE_PKEY, b""), (REGISTER_AGENT, registration)]


def test_sent_mad_has_the_address_in_its_header(kernel: Kernel) -> None:
    gid = Gid("fd00::1:2")
    kernel.transport.send(MadAddress(0x1234, 1, 5, 6, gid, 7, 0xABCDE, 8, 9), asking())
    packet = kernel.written()
    assert len(packet) == 320
    agent, status, timeout, retries, length = struct.unpack_from("=5I", packet)
    assert (agent, status, retries, length) == (AGENT, 0, 0, 320)
    assert timeout > 0
    assert packet[20:32] == bytes.fromhex("00000001 80010000 1234 05 00")
    assert packet[32:36] == bytes((1, 7, 9, 8))
    assert packet[36:52] == gid
    assert packet[52:56] == bytes.fromhex("000abcde")
    assert packet[56:64] == struct.pack("=H6x", 6)
    assert packet[64:72] + packet[80:] == asking()[:8] + asking()[16:]


def test_response_has_the_callers_transaction_id(kernel: Kernel) -> None:
    """Also if the same request is sent twice: the kernel takes these for two requests."""
    for number in (1, 0x1122334455667788, 1):
        kernel.transport.send(MadAddress(7), asking(number))
        kernel.answers(kernel.written())
        ((source, mad),) = kernel.transport.receive()
        assert source == MadAddress(7)
        assert mad == asking(number)
    both = []
    for _ in range(2):
        kernel.transport.send(MadAddress(7), asking(5))
        both.append(kernel.written())
    assert both[0] != both[1]
    kernel.answers(both[1])
    assert kernel.transport.receive() == [(MadAddress(7), asking(5))]
    kernel.answers(both[0])
    assert kernel.transport.receive() == [(MadAddress(7), asking(5))]
    kernel.answers(both[0])
    assert kernel.transport.receive() == []
    assert kernel.transport.dropped == {"unsolicited": 1}


def test_response_with_grh_has_the_source_gid(kernel: Kernel) -> None:
    address = MadAddress(0x1234, 1, 5, 6, Gid("fd00::1:2"), 7, 0xABCDE, 8, 9)
    kernel.transport.send(address, asking())
    kernel.answers(kernel.written())
    ((source, _),) = kernel.transport.receive()
    assert source == address


def test_timed_out_requests_are_counted(kernel: Kernel) -> None:
    for status in (errno.ETIMEDOUT, errno.EIO):
        kernel.transport.send(MadAddress(7), asking())
        kernel.answers(kernel.written(), status)
        assert kernel.transport.receive() == []
    assert kernel.transport.dropped == {"unanswered": 1, "undeliverable": 1}


def test_long_response_is_read_completely(kernel: Kernel) -> None:
    kernel.transport.send(MadAddress(7), asking())
    kernel.answers(kernel.written(), more=bytes(3000))
    kernel.refuses_small_buffers(64 + 256 + 3000)
    ((_, mad),) = kernel.transport.receive()
    assert mad == asking() + bytes(3000)


def test_oversized_response_closes_the_port(kernel: Kernel) -> None:
    kernel.transport.send(MadAddress(7), asking())
    kernel.answers(kernel.written())
    kernel.refuses_small_buffers(1 << 40)
    assert kernel.transport.receive() == []
    assert kernel.transport.dropped == {"too long": 1}
    assert kernel.transport.fileno() == -1


def test_device_removal_closes_the_port(kernel: Kernel) -> None:
    """The device file would poll readable for ever."""
    kernel.fails(errno.EIO)
    assert kernel.transport.receive() == []
    assert kernel.transport.fileno() == -1


def test_short_response_is_dropped(kernel: Kernel) -> None:
    for size in (1, 63, 64, 87):
        os.write(kernel.fd, bytes(size))
        assert kernel.transport.receive() == []
    assert kernel.transport.dropped == {"malformed": 4}


def test_outstanding_requests_are_limited(kernel: Kernel) -> None:
    for number in range(5000):
        kernel.transport.send(MadAddress(7), asking(number))
        if kernel.transport.dropped:
            break
        assert len(kernel.written()) == 320
    assert number == 4096
    assert kernel.transport.dropped == {"too many outstanding": 1}


def test_cm_mads_belong_to_the_kernel(kernel: Kernel) -> None:
    assert not kernel.transport.carries_cm
    kernel.transport.send(MadAddress(7), message(1))
    assert kernel.transport.dropped == {"class": 1}


def test_response_expects_no_reply(kernel: Kernel) -> None:
    response = Mad(MgmtClass.SUBN_ADM, 2, 0x86, 2, 99).pack()
    kernel.transport.send(MadAddress(7), response)
    packet = kernel.written()
    assert struct.unpack_from("=5I", packet)[2] == 0
    assert packet[64:] == response


def test_closed_port_drops_mads(kernel: Kernel) -> None:
    kernel.transport.close()
    kernel.transport.close()
    assert kernel.transport.receive() == []
    kernel.transport.send(MadAddress(1), asking())
    assert kernel.transport.dropped == {"closed": 1}


# -- a device file of umad2sim --------------------------------------------------------------------------------


def test_path_record_query_through_the_device_file_is_answered(fabric: SimulatedFabric, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: on Debian and Ubuntu, apt install gcc libc6-dev")
    library = tmp_path / "open64.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "open64.c"], check=True)
    environ = dict(fabric.environ("HostB"), PYTHONPATH=str(SOURCES), LD_PRELOAD=f"{library} {umad2sim()}")
    done = subprocess.run(
        [sys.executable, HERE / "on_umad2sim.py"],
        env=environ,
        cwd=fabric.directory,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    lid = seen["lid"]
    assert seen == {
        "lid": lid,
        "sm_lid": 1,
        "gid": "fe80::10:5",
        "node_guid": 0x100004,
        "pkeys": [0xFFFF],
        "state": "ACTIVE",
        "rate": 3,
        "from": [1, 1],
        "tid": 0x1122334455667788,
        "path": [lid, lid, "fe80::10:5"],
        "unanswered": 1,
    }
