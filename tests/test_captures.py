"""Capture files: their content in other programs' readers, and captures that fail."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rdmacm
from rdmacm import CmId, CmRejectedError, Gid, RdmaError
from rdmacm.diagnosis.captures import Capture
from rdmacm.proto.cm.codes import ApStatus, AttributeId
from rdmacm.proto.cm.messages import APR, LAP, REQ, pack_message
from rdmacm.proto.cm.messages import Path as CmPath
from rdmacm.proto.frames import udp_frame
from rdmacm.proto.pcapng import enhanced_packet, interface_description, section_header
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.provider import Tap
from rdmacm.testing import Fabric
from support.netns import python_environment
from support.pcap import Datagram, datagram, frames, roce
from support.rc_packets import RC_PACKETS
from support.tshark import dissect, needs_tshark

CAPTURES = Path(__file__).parent / "data" / "captures"
#: Captures of single packets as they arrived, without segmentation offload.
RECEIVED = [path for path in sorted(CAPTURES.glob("*.pcap*")) if not path.stem.endswith("gso")]
V4 = bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2])
V6 = bytes.fromhex("20010db8000000000000000000000001"), bytes.fromhex("20010db8000000000000000000000002")
SPORT, DPORT = 50000, 4791

families = pytest.mark.parametrize("pair", [V4, V6], ids=["IPv4", "IPv6"])


def sealed(body: bytes, pair: tuple[bytes, bytes], identification: int = 0) -> bytes:
    return body + Icrc(*pair, SPORT).seal([body], identification)


def read(path: Path) -> list[Datagram]:
    found = [datagram(frame[14:]) for _, frame in frames(path)]
    assert None not in found
    return [one for one in found if one is not None]


def write_every_operation(path: Path, pair: tuple[bytes, bytes]) -> None:
    """Write each packet of RC_PACKETS as sent, then each as received with its own IPv4 identification."""
    local, remote = pair
    with Capture(path) as capture:
        for packet in RC_PACKETS:
            data = sealed(packet.pack(), pair)
            capture.tap(True, local, remote, SPORT, DPORT, [data[:12], data[12:-4], data[-4:]], 0)
        for number, packet in enumerate(RC_PACKETS):
            data = sealed(packet.pack(), (remote, local), 0x1230 + number)
            capture.tap(False, local, remote, SPORT, DPORT, memoryview(data), 0)


@families
def test_every_packet_is_written_in_order(tmp_path: Path, pair: tuple[bytes, bytes]) -> None:
    path = tmp_path / "all.pcapng"
    write_every_operation(path, pair)
    found = read(path)
    outgoing, incoming = found[: len(RC_PACKETS)], found[len(RC_PACKETS) :]
    for packet, one in zip(RC_PACKETS, outgoing, strict=True):
        assert (one.source, one.destination, one.sport, one.dport) == (*pair, SPORT, DPORT)
        assert one.identification == 0
        assert one.payload[:-4] == packet.pack()
    for number, one in enumerate(incoming):
        assert (one.destination, one.source) == pair
        assert one.identification == (0 if pair is V6 else 0x1230 + number)


@families
def test_sent_train_is_split_into_packets(tmp_path: Path, pair: tuple[bytes, bytes]) -> None:
    packets = [sealed(bytes([number]) * size, pair, number) for number, size in enumerate([60, 60, 60, 20])]
    whole = b"".join(packets)
    with Capture(tmp_path / "train.pcapng") as capture:
        # The buffers do not end at packet boundaries.
        capture.tap(True, *pair, SPORT, DPORT, [whole[:70], memoryview(whole)[70:75], whole[75:]], 64)
        assert capture.packets == 4
    found = read(tmp_path / "train.pcapng")
    assert [one.payload for one in found] == packets
    assert [one.identification for one in found] == ([0] * 4 if pair is V6 else [0, 1, 2, 3])


def test_identifications_of_a_received_train_are_recovered(tmp_path: Path) -> None:
    identifications = [0xFFFE, 0xFFFF, 0, 7, 40000]
    back = V4[1], V4[0]
    whole = b"".join(sealed(bytes(28), back, identification) for identification in identifications)
    with Capture(tmp_path / "train.pcapng") as capture:
        capture.tap(False, *V4, SPORT, DPORT, memoryview(whole), 32)
    assert [one.identification for one in read(tmp_path / "train.pcapng")] == identifications


@pytest.mark.parametrize("path", RECEIVED, ids=[path.name for path in RECEIVED])
def test_linux_captures_are_reproduced_byte_for_byte(tmp_path: Path, path: Path) -> None:
    wanted = list(roce(path))
    with Capture(tmp_path / "again.pcapng") as capture:
        for one in wanted:
            capture.tap(False, one.destination, one.source, one.sport, one.dport, memoryview(one.payload), 0)
    for theirs, ours in zip(wanted, read(tmp_path / "again.pcapng"), strict=True):
        assert ours.payload == theirs.payload
        assert (ours.source, ours.destination, ours.sport) == (theirs.source, theirs.destination, theirs.sport)
        assert ours.identification == theirs.identification


def test_timestamps_follow_the_clock(tmp_path: Path) -> None:
    ticks = itertools.count(1_700_000_000_000_000_001, 1000)
    with Capture(tmp_path / "time.pcapng", clock=lambda: next(ticks)) as capture:
        for _ in range(2):
            capture.tap(True, *V4, SPORT, DPORT, [sealed(bytes(12), V4)], 0)
    data = (tmp_path / "time.pcapng").read_bytes()
    for time in (1_700_000_000_000_000_001, 1_700_000_000_000_001_001):
        assert (time >> 32).to_bytes(4, "little") + (time & 0xFFFFFFFF).to_bytes(4, "little") in data


@pytest.mark.parametrize("size", [0, 1, 3, 11, 15, 16, 17, 65507])
def test_arbitrary_datagrams_are_written_and_marked(tmp_path: Path, size: int) -> None:
    with Capture(tmp_path / "odd.pcapng") as capture:
        capture.tap(False, *V4, 1, DPORT, memoryview(b"\xa5" * size), 0)
    assert [one.payload for one in read(tmp_path / "odd.pcapng")] == [b"\xa5" * size]
    assert b"the ICRC is wrong" in (tmp_path / "odd.pcapng").read_bytes()


def test_flush_of_rxe_is_captured_with_its_identification(tmp_path: Path) -> None:
    """Its ICRC is not that of the specification; a damaged one is marked as other packets are."""
    flow = Icrc(V4[1], V4[0], SPORT)
    flush = next(packet for packet in RC_PACKETS if packet.bth.opcode == Opcode.RC_FLUSH).pack()
    of_rxe = flush + flow.seal_twice(flush, 0x1234)
    path = tmp_path / "flush.pcapng"
    with Capture(path) as capture:
        for data in (of_rxe, flush + flow.seal([flush], 0x4321), of_rxe[:-1] + bytes([of_rxe[-1] ^ 1])):
            capture.tap(False, *V4, SPORT, DPORT, memoryview(data), 0)
    assert [one.identification for one in read(path)][:2] == [0x1234, 0x4321]
    assert path.read_bytes().count(b"the ICRC is wrong") == 1


class TestScapy:
    """Scapy as a reader."""

    @pytest.fixture
    def rdpcap(self) -> Any:
        reason = "scapy, which reads the captures, is not installed"
        pytest.importorskip("scapy.contrib.roce", reason=reason)
        pytest.importorskip("scapy.layers.inet6", reason=reason)
        return pytest.importorskip("scapy.utils", reason=reason).rdpcap

    @families
    def test_scapy_agrees_on_every_layer(self, tmp_path: Path, pair: tuple[bytes, bytes], rdpcap: Any) -> None:
        from scapy.contrib.roce import BTH
        from scapy.layers.inet import IP, UDP
        from scapy.layers.inet6 import IPv6
        from scapy.layers.l2 import Ether

        path = tmp_path / "all.pcapng"
        write_every_operation(path, pair)
        found = rdpcap(str(path))
        assert len(found) == 2 * len(RC_PACKETS)
        for number, theirs in enumerate(found):
            ours = RC_PACKETS[number % len(RC_PACKETS)].bth
            outgoing = number < len(RC_PACKETS)
            assert theirs.direction == (2 if outgoing else 1)
            assert theirs.sniffed_on == "rdmacm"
            assert isinstance(theirs, Ether)
            ip = theirs[IPv6 if pair is V6 else IP]
            assert (theirs[UDP].sport, theirs[UDP].dport) == (SPORT, DPORT)
            bth = theirs[BTH]
            assert (bth.opcode, bth.dqpn, bth.psn) == (ours.opcode, ours.dest_qpn, ours.psn)
            assert (bth.ackreq, bth.solicited, bth.padcount) == (ours.ack_req, ours.se, ours.pad_cnt)
            assert bth.icrc.to_bytes(4, "big") == bth.compute_icrc(bytes(bth))
            # Built again with the checksums and lengths that scapy computes.
            ip.len = ip.chksum = ip.plen = theirs[UDP].len = theirs[UDP].chksum = None
            assert bytes(theirs) == theirs.original

    def test_scapy_finds_the_damaged_packet(self, tmp_path: Path, rdpcap: Any) -> None:
        good = sealed(bytes(12), (V4[1], V4[0]), 77)
        with Capture(tmp_path / "damaged.pcapng") as capture:
            for data in (good, good[:-1] + bytes([good[-1] ^ 1])):
                capture.tap(False, *V4, SPORT, DPORT, memoryview(data), 0)
        assert [packet.comment for packet in rdpcap(str(tmp_path / "damaged.pcapng"))] == [None, b"the ICRC is wrong"]


@needs_tshark
class TestWireshark:
    """Wireshark's dissectors, through tshark."""

    #: Older versions of Wireshark do not know these opcodes and their headers.
    NEWER = Opcode.RC_FLUSH, Opcode.RC_ATOMIC_WRITE

    @families
    def test_every_operation_is_dissected_without_errors(self, tmp_path: Path, pair: tuple[bytes, bytes]) -> None:
        path = tmp_path / "all.pcapng"
        write_every_operation(path, pair)
        bth = [f"infiniband.bth.{name}" for name in ("opcode", "destqp", "psn", "padcnt", "a", "se", "p_key")]
        reth = [f"infiniband.reth.{name}" for name in ("va", "r_key", "dmalen")]
        atomic = ["infiniband.atomiceth.swapdt", "infiniband.atomiceth.cmpdt", "infiniband.atomicacketh.origremdt"]
        short = ["infiniband.aeth.syndrome", "infiniband.aeth.msn", "infiniband.immdt", "infiniband.ieth"]
        rest = ["data.data", "infiniband.invariant.crc", "frame.packet_flags_direction", "frame.interface_name"]
        found = dissect(path, [*bth, *reth, *atomic, *short, *rest])
        assert len(found) == 2 * len(RC_PACKETS)
        for number, theirs in enumerate(found):
            ours = RC_PACKETS[number % len(RC_PACKETS)]
            outgoing = number < len(RC_PACKETS)
            assert int(theirs["frame.packet_flags_direction"], 0) == (2 if outgoing else 1)
            assert theirs["frame.interface_name"] == "rdmacm"
            numbers = [int(theirs[name], 0) for name in bth]
            wanted = [ours.bth.opcode, ours.bth.dest_qpn, ours.bth.psn, ours.bth.pad_cnt, ours.bth.ack_req, ours.bth.se]
            assert numbers == [*wanted, 0xFFFF]
            if ours.bth.opcode in self.NEWER:
                continue
            seen = {name: theirs[name] for name in (*reth, *atomic, *short) if theirs[name]}
            expected: dict[str, str] = {}
            if ours.reth:
                header = ours.reth
                expected |= zip(
                    reth,
                    (f"0x{header.virtual_address:016x}", f"0x{header.rkey:08x}", str(header.dma_length)),
                    strict=True,
                )
            if ours.atomic_eth:
                one = ours.atomic_eth
                expected |= {reth[0]: f"0x{one.virtual_address:016x}", reth[1]: f"0x{one.rkey:08x}"}
                expected |= {atomic[0]: str(one.swap_add), atomic[1]: str(one.compare)}
            if ours.atomic_ack_eth:
                expected[atomic[2]] = str(ours.atomic_ack_eth.original)
            if ours.aeth:
                expected |= {short[0]: str(ours.aeth.syndrome), short[1]: str(ours.aeth.msn)}
            if ours.imm_dt:
                expected[short[2]] = ours.imm_dt.data.hex()
            if ours.ieth:
                expected[short[3]] = f"{ours.ieth.rkey:08x}"
            assert seen == expected
            assert theirs["data.data"] == (bytes(ours.payload) + bytes(ours.bth.pad_cnt)).hex()
            source = pair if outgoing else (pair[1], pair[0])
            if pair is V6 or outgoing:
                assert int(theirs["infiniband.invariant.crc"], 0) == int.from_bytes(
                    sealed(ours.pack(), source)[-4:], "big"
                )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("at", "trouble"), [(18, "checksum"), (40, "checksum"), (16, "length")], ids=["id", "udp", "length"]
    )
    def test_wireshark_reports_damaged_packets(self, tmp_path: Path, at: int, trouble: str) -> None:
        path = tmp_path / "broken.pcapng"
        frame = bytearray(udp_frame(*V4, SPORT, DPORT, sealed(bytes(12), V4)))
        frame[at] ^= 1
        path.write_bytes(section_header("test") + interface_description("eth0") + enhanced_packet(frame, 0))
        with pytest.raises(AssertionError, match="(?i)" + trouble):
            dissect(path)

    def test_linux_packets_are_dissected_without_errors(self, tmp_path: Path) -> None:
        path = tmp_path / "linux.pcapng"
        wanted = [one for source in RECEIVED for one in roce(source)]
        with Capture(path) as capture:
            for one in wanted:
                capture.tap(False, one.destination, one.source, one.sport, one.dport, memoryview(one.payload), 0)
        found = dissect(path, ["infiniband.bth.opcode", "infiniband.mad.attributeid", "infiniband.mad.transactionid"])
        assert [int(one["infiniband.bth.opcode"]) for one in found] == [one.payload[0] for one in wanted]
        # MADs of communication management are dissected up to their private data.
        assert len([one for one in found if one["infiniband.mad.attributeid"]]) > 50

    def test_alternate_path_of_a_req_is_dissected_to_its_fields(self, tmp_path: Path) -> None:
        alternate = CmPath(
            Gid("fe80::1"), Gid("fe80::2"), 0x11, 0x21, flow_label=0xABCDE, packet_rate=0x2A, traffic_class=0x31,
            hop_limit=0x40, sl=9, subnet_local=True, local_ack_timeout=0x15,
        )  # fmt: skip
        mads = [
            pack_message(REQ(1, CmPath(), alternate=alternate), 7),
            pack_message(LAP.loading(alternate), 8),
            pack_message(APR(1, 2, ApStatus.INVALID_LID, 2, b"\0\x21"), 8),
        ]
        path = tmp_path / "paths.pcapng"
        with Capture(path) as capture:
            for mad in mads:
                # UD SEND only, to QP 1 with its Q_Key, from QP 1.
                data = sealed(bytes.fromhex("6400ffff00000001000000008001000000000001") + mad, V4)
                capture.tap(True, *V4, SPORT, DPORT, [data], 0)
        # Without the flow label and the packet rate, which Wireshark 4.0 reads with wrong widths.
        names = ("locallid", "remotelid", "localgid", "remotegid", "tfcclass", "hoplim", "sl", "subnetlocal")
        fields = [f"infiniband.cm.req.alt_{name}" for name in (*names, "localacktout")]
        req, *others = dissect(path, ["infiniband.mad.attributeid", *fields])
        assert [int(req[field], 0) for field in fields if "gid" not in field] == [
            0x11, 0x21, 0x31, 0x40, 9, 1, 0x15,
        ]  # fmt: skip
        assert [req[field] for field in fields if "gid" in field] == [f"fe80{n:028x}" for n in (1, 2)]
        # Wireshark 4.0 knows the other messages by their attribute ids alone.
        assert [int(other["infiniband.mad.attributeid"], 0) for other in others] == [AttributeId.LAP, AttributeId.APR]


class Wire:
    """The part of a wire that a capture uses."""

    tap: Tap | None = None


class BusyWire(Wire):
    """A wire whose lock another thread has, which passes a packet to the tap with it."""

    def __init__(self, capture: Capture) -> None:
        self.waits: list[bool] = []
        self._capture = capture

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tap":
            packet = True, *V4, SPORT, DPORT, [sealed(bytes(12), V4)], 0
            thread = threading.Thread(target=self._capture.tap, args=packet, daemon=True)
            thread.start()
            thread.join(10)
            self.waits.append(thread.is_alive())
        super().__setattr__(name, value)


class TestFile:
    def test_killed_process_leaves_a_readable_file(self, tmp_path: Path) -> None:
        path = tmp_path / "killed.pcapng"
        code = f"""
import os, signal
from rdmacm.diagnosis.captures import Capture
capture = Capture({str(path)!r})
for _ in range(10):
    capture.tap(True, bytes(4), bytes(4), 1, 4791, [bytes(16)], 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", code], env=python_environment(), timeout=30, check=False)
        assert done.returncode == -signal.SIGKILL
        assert len(read(path)) == 10

    def test_close_stops_recording(self, tmp_path: Path) -> None:
        wire = Wire()
        with Capture(tmp_path / "a.pcapng") as capture:
            capture.attach(wire)
            assert wire.tap is not None
            wire.tap(True, *V4, SPORT, DPORT, [sealed(bytes(12), V4)], 0)
        assert wire.tap is None
        capture.tap(True, *V4, SPORT, DPORT, [sealed(bytes(12), V4)], 0)
        capture.close()
        assert len(read(tmp_path / "a.pcapng")) == 1
        capture.attach(wire)
        assert wire.tap is None

    def test_close_keeps_another_captures_tap(self, tmp_path: Path) -> None:
        wire = Wire()
        with Capture(tmp_path / "b.pcapng") as second:
            with Capture(tmp_path / "a.pcapng") as first:
                first.attach(wire)
                second.attach(wire)
            assert wire.tap == second.tap

    def test_capture_sets_the_tap_without_its_lock(self, tmp_path: Path) -> None:
        """The wire takes its own lock for that, and calls the tap with it: the two would wait for each other."""
        capture = Capture(tmp_path / "a.pcapng")
        wire = BusyWire(capture)
        capture.attach(wire)
        capture.close()
        assert wire.waits == [False, False]

    def test_missing_directory_raises(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no-such-directory/a\.pcapng"):
            Capture(tmp_path / "no-such-directory" / "a.pcapng")

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
    def test_full_disk_at_open_raises(self) -> None:
        with pytest.raises(OSError, match="/dev/full"):
            Capture("/dev/full")

    def test_full_disk_later_ends_the_capture_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path, wire = tmp_path / "limited.pcapng", Wire()
        packet = sealed(bytes(1000), V4)
        with Capture(path) as capture, caplog.at_level(logging.WARNING, "rdmacm"):
            capture.attach(wire)
            capture.tap(True, *V4, SPORT, DPORT, [packet], 0)
            # Room for a part of another packet only.
            with largest_file(path.stat().st_size + 100):
                capture.tap(True, *V4, SPORT, DPORT, [packet], 0)
            capture.tap(True, *V4, SPORT, DPORT, [packet], 0)
            assert capture.error is not None
            assert capture.packets == 1
            assert wire.tap is None, "the wire is no longer tapped"
        assert [one.payload for one in read(path)] == [packet], "the partial packet is removed"
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "limited.pcapng stopped after 1 packets" in record.getMessage()

    def test_concurrent_writers_lose_no_packet(self, tmp_path: Path) -> None:
        packets = [sealed(bytes([number]) * 100, V4) for number in range(4)]
        with Capture(tmp_path / "threads.pcapng") as capture:

            def send(packet: bytes) -> None:
                for _ in range(200):
                    capture.tap(True, *V4, SPORT, DPORT, [packet], 0)

            threads = [threading.Thread(target=send, args=(packet,)) for packet in packets]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert capture.packets == 800
        found = [one.payload for one in read(tmp_path / "threads.pcapng")]
        assert sorted(found) == sorted(packets * 200)

    def test_packet_sent_during_a_write_is_recorded(self, tmp_path: Path) -> None:
        """As a finalizer may send one."""
        packet = [sealed(bytes(12), V4)]
        ports = [2]

        def clock() -> int:
            if ports:
                capture.tap(True, *V4, ports.pop(), DPORT, packet, 0)
            return 0

        with Capture(tmp_path / "nested.pcapng", clock=clock) as capture:
            capture.tap(True, *V4, 1, DPORT, packet, 0)
        assert [one.sport for one in read(tmp_path / "nested.pcapng")] == [2, 1]

    def test_close_releases_the_descriptor(self, tmp_path: Path) -> None:
        gc.collect()
        before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
        with Capture(tmp_path / "a.pcapng"):
            pass
        after = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
        assert after == before


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the files of this process to ``size`` bytes."""
    resource = pytest.importorskip("resource", reason="limits are POSIX's")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestProvider:
    """:func:`rdmacm.capture`."""

    def test_capture_records_the_packets_of_a_host(self, tmp_path: Path) -> None:
        fabric, path = Fabric(), tmp_path / "host.pcapng"
        a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
        with CmId(provider=b.provider) as listener, CmId(provider=a.provider) as cmid:
            listener.bind_addr(("10.0.0.2", 7470))
            listener.listen()
            cmid.resolve_addr(("10.0.0.2", 7471))
            cmid.resolve_route()
            cmid.create_qp()
            with rdmacm.capture(path, a.provider) as found, pytest.raises(CmRejectedError):
                cmid.connect()
            assert a.provider.tap is None
        assert found.packets == len(read(path)) == 2

    def test_file_that_cannot_be_created_raises(self, tmp_path: Path) -> None:
        with pytest.raises(RdmaError) as caught:
            rdmacm.capture(tmp_path / "none" / "x")
        assert str(caught.value) == f"capture {tmp_path}/none/x: No such file or directory [ENOENT]"

    def test_unknown_provider_raises(self, tmp_path: Path) -> None:
        with pytest.raises(RdmaError, match=r"\[ENODEV\]"):
            rdmacm.capture(tmp_path / "x", "none")
