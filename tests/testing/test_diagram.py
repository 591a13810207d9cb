"""The log of a fabric as a picture, and as a capture file."""

from __future__ import annotations

from pathlib import Path

from rdmacm.testing import Fabric, FabricLog, FabricPacket, LogEntry, Outcome
from support.pcap import roce

HEADER = bytes.fromhex("64000000000000010000000000000000")


def entry(time: float, number: int, source: str, destination: str, outcome: Outcome, data: bytes = HEADER) -> LogEntry:
    addresses = {"a": b"\x0a\0\0\1", "b": b"\x0a\0\0\2", "c": b"\x0a\0\0\3", "": b"\x0a\0\0\4"}
    local, remote = addresses[source], addresses[destination]
    packet = FabricPacket(number, 0.0, source, destination, local, remote, 50000, 0, 0, HEADER)
    return LogEntry(time, outcome, packet, data)


def log_of(*entries: LogEntry) -> FabricLog:
    log = FabricLog()
    for each in entries:
        log._append(each)
    return log


LOG = log_of(
    entry(0.0, 1, "a", "b", Outcome.LOST),
    entry(0.00002, 2, "b", "a", Outcome.DELIVERED),
    entry(0.5, 3, "a", "c", Outcome.DUPLICATED),
    entry(0.5, 3, "a", "c", Outcome.DELIVERED),
    entry(1.0, 4, "c", "b", Outcome.PARTITIONED),
    entry(1.5, 5, "b", "b", Outcome.DELIVERED),
    entry(2.0, 6, "c", "", Outcome.UNREACHABLE),
    entry(3.0, 7, "b", "c", Outcome.DELIVERED, HEADER[:-1] + b"\1"),
)


def test_each_entry_is_an_arrow() -> None:
    assert LOG.to_diagram() == (
        "              a                       b                       c\n"
        "    0.000000  |-- UD_SEND_ONLY #1 -x  |                       |  lost\n"
        "    0.000020  |<-- UD_SEND_ONLY #2 ---|                       |\n"
        "    0.500000  |-- UD_SEND_ONLY #3 ---------------------------~|  duplicated\n"
        "    0.500000  |-- UD_SEND_ONLY #3 --------------------------->|\n"
        "    1.000000  |                       |  x-- UD_SEND_ONLY #4 -|  partitioned\n"
        "    1.500000  |                       |-- UD_SEND_ONLY #5 ->  |\n"
        "    2.000000  |                       |                       |-- UD_SEND_ONLY #6 -x  unreachable\n"
        "    3.000000  |                       |-- UD_SEND_ONLY #7 --->|"
    )


def test_the_last_entries_are_shown() -> None:
    lines = LOG.to_diagram(2).splitlines()
    assert lines[0] == "... 6 earlier entries"
    assert [line.split()[0] for line in lines[2:]] == ["2.000000", "3.000000"]
    assert FabricLog().to_diagram() == ""


def test_the_file_has_each_packet_once_for_each_arrival(tmp_path: Path) -> None:
    path = tmp_path / "log.pcapng"
    assert LOG.write_pcapng(path) == 7
    packets = [(found.source[-1], found.destination[-1], found.sport, found.payload[-1]) for found in roce(path)]
    ends = [(1, 2, 0), (2, 1, 0), (1, 3, 0), (3, 2, 0), (2, 2, 0), (3, 4, 0), (2, 3, 1)]
    assert packets == [(source, destination, 50000, last) for source, destination, last in ends]
    text = path.read_bytes()
    assert b"a > b #1: lost" in text
    assert b"c > ? #6: unreachable" in text
    assert b"b > c #7: delivered, corrupted" in text


def test_a_fabric_without_packets_has_an_empty_file(tmp_path: Path) -> None:
    assert Fabric(1).log.write_pcapng(tmp_path / "log.pcapng") == 0
