"""What is found in captures of Linux's drivers. golden.txt has each connection with its verdict.

``python3 tests/trace/test_golden.py`` with ``PYTHONPATH=src:tests`` writes it anew.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from rdmacm.trace.files import CaptureFile
from rdmacm.trace.text import title, verdict_text
from rdmacm.trace.tracer import Tracer
from rdmacm.trace.verdicts import Judge
from support.rows import for_each
from support.traces import Bytes, traced
from support.tshark import needs_tshark

DATA = Path(__file__).parents[1] / "data"
FILES = sorted([*DATA.glob("captures/*.pcap*"), *DATA.glob("traces/*.pcap*")], key=lambda path: path.name)
GOLDEN = Path(__file__).with_name("golden.txt")


def found_in(path: Path) -> list[str]:
    tracer, file = traced(path.read_bytes())
    judge = Judge(tracer)
    lines = [f"{path.name}: {tracer.packets} packets, {tracer.rdma} of RDMA"]
    for number, each in enumerate(tracer.found(), 1):
        verdict = judge.verdict(each)
        lines += [title(number, each), f"    {verdict.level}: {verdict_text(verdict)}"]
    assert (tracer.malformed, tracer.cut, tracer.unread, file.damage) == (0, 0, 0, ""), path.name
    return lines


def golden() -> str:
    return "\n\n".join("\n".join(found_in(path)) for path in FILES) + "\n"


def test_captures_of_drivers_have_the_connections_and_verdicts_of_golden_txt() -> None:
    assert golden() == GOLDEN.read_text(encoding="utf-8")


def test_a_capture_in_small_pieces_has_the_same() -> None:
    for path in FILES:
        whole, pieces = traced(path.read_bytes())[0], traced(path.read_bytes(), step=7)[0]
        assert [each.events for each in pieces.found()] == [each.events for each in whole.found()], path.name


def test_a_capture_at_two_places_has_the_same_connections() -> None:
    for name in (
        "captures/rxe-rping-3000.pcap",
        "captures/rxe-atomic-cmp-swap.pcap",
        "captures/rxe-udaddy-nolistener.pcap",
    ):
        once, twice = Tracer(), Tracer()
        packets = list(CaptureFile(Bytes((DATA / name).read_bytes()).read))
        once.feed(packets)
        twice.feed(copy for each in packets for copy in (each, (each[0] + 1000, *each[1:])))
        assert [each.events for each in twice.found()] == [each.events for each in once.found()]
        assert twice.copies + twice.managers.copies == once.rdma
        for first, second in zip(once.found(), twice.found(), strict=True):
            assert [half and (half.packets, half.lost, half.repeated) for half in second.halves] == [
                half and (half.packets, half.lost, half.repeated) for half in first.halves
            ]


@needs_tshark
@for_each("name", ["python-peer-rxe-active.pcapng", "rxe-loss5-rping.pcap", "rxe-rping-ipv6.pcap", "rxe-udaddy.pcap"])
def test_tshark_takes_as_many_packets_for_rdma(name: str) -> None:
    (path,) = (each for each in FILES if each.name == name)
    tracer: Tracer = traced(path.read_bytes())[0]
    command = ["tshark", "-n", "-r", str(path), "-Y", "infiniband && !icmp && !icmpv6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.splitlines()) == tracer.rdma


if __name__ == "__main__":
    GOLDEN.write_text(golden(), encoding="utf-8")
