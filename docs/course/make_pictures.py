"""Write the pictures of the course: ``python3 docs/course/make_pictures.py [DIRECTORY]``.

Each shows what happened: the programs of a lesson run on a simulated network (``rdmacm.testing.Fabric``), whose log is
drawn. The network has a seed and virtual time, so the pictures are the same each time.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent)]

from pictures import picture, text  # noqa: E402 (after the path of the sources)

import rdmacm  # noqa: E402
from rdmacm.testing import Fabric, FabricPacket, LogEntry, Outcome  # noqa: E402

#: The text of a packet's arrow, by its kind.
WORDS = {
    "RC_SEND_FIRST": "SEND, first packet",
    "RC_SEND_MIDDLE": "SEND, middle packet",
    "RC_SEND_LAST": "SEND, last packet",
    "RC_SEND_ONLY": "SEND",
    "RC_RDMA_WRITE_ONLY": "WRITE",
    "RC_RDMA_READ_REQUEST": "READ request",
    "RC_RDMA_READ_RESPONSE_ONLY": "READ response",
}
#: What an acknowledgement says, by the byte after the BTH (InfiniBand Architecture, 9.7.5.2.8).
NAKS = {0x60: "NAK: sequence error", 0x61: "NAK: invalid request", 0x62: "NAK: remote access error"}
SYNDROME = 12  # its offset

WIDTH, LEFT, RIGHT, NOTES, TOP, STEP = 860, 110, 500, 522, 56, 28


@dataclass(frozen=True)
class Arrow:
    """A packet from the client (``from_client``) or to it, and whether it has arrived."""

    time: float
    from_client: bool
    text: str
    arrives: bool

    @property
    def is_bad(self) -> bool:
        return not self.arrives or "NAK" in self.text


# --- what happened ------------------------------------------------------------------------------------------


def programs(lesson: str) -> dict[str, str]:
    """The Python of a lesson, by file name."""
    page = (HERE / f"{lesson}.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```python\n(?=# (\w+\.py)\n)(.*?)^```$", page, re.DOTALL | re.MULTILINE))


@contextlib.contextmanager
def saved(lesson: str) -> Iterator[None]:
    """In a directory with the programs of a lesson, whose output is dropped."""
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        for name, program in programs(lesson).items():
            Path(name).write_text(program, encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()):
            yield


def arrows_of(lesson: str, server: str, client: str) -> list[Arrow]:
    """The packets of two programs of a lesson, each on a host of its own."""
    with saved(lesson):
        with Fabric(seed=1, latency=20e-6) as fabric:
            a, b = fabric.host("client", "10.0.0.1"), fabric.host("server", "10.0.0.2")
            with rdmacm.EventChannel(a.provider):  # the device stays open for answers that no program waits for
                serving = b.script(server)
                a.script(client, "10.0.0.2").result()
                serving.result()
                fabric.run(seconds=1)
            return arrows(fabric.log, "client")


def of_program(lesson: str, program: str, *arguments: str) -> dict[str, Any]:
    """The names of a program that has run, which has a network of its own."""
    before = sys.argv
    sys.argv = [program, *arguments]
    try:
        with saved(lesson):
            return runpy.run_path(program)
    finally:
        sys.argv = before


def arrows(log: Iterable[LogEntry], client: str) -> list[Arrow]:
    """The packets of a log, in the order in which they were sent."""
    return [
        Arrow(
            entry.packet.time,
            entry.packet.source == client,
            words(entry.packet),
            entry.outcome is Outcome.DELIVERED,
        )
        for entry in sorted(log, key=lambda entry: entry.packet.number)
    ]


def words(packet: FabricPacket) -> str:
    """What a packet is."""
    if packet.kind != "RC_ACKNOWLEDGE":
        return WORDS.get(packet.kind, packet.kind)
    syndrome = packet.data[SYNDROME]
    if syndrome >> 5 == 1:
        return "RNR NAK"
    return NAKS.get(syndrome, "ACK")


# --- how it is drawn ----------------------------------------------------------------------------------------


def sequence(drawn: Sequence[Arrow], notes: dict[str, str], ends: tuple[str, str] = ("client", "server")) -> str:
    """The picture of one diagram."""
    height, parts = diagram(drawn, notes, ends)
    return picture(WIDTH, height, parts)


def diagram(drawn: Sequence[Arrow], notes: dict[str, str], ends: tuple[str, str]) -> tuple[int, list[str]]:
    """An arrow for each packet, with a note beside the first packet with its text: the height, and the parts."""
    bottom = TOP + STEP * len(drawn) + 14
    parts = [
        text(LEFT, 28, ends[0], "b", "middle"),
        text(RIGHT, 28, ends[1], "b", "middle"),
        *(f'<path class="l" d="M{x} 38V{bottom}"/>' for x in (LEFT, RIGHT)),
    ]
    left = dict(notes)
    for place, arrow in enumerate(drawn):
        y = TOP + STEP * place + 14
        kind = "x" if arrow.is_bad else "a"
        start, end = (LEFT, RIGHT) if arrow.from_client else (RIGHT, LEFT)
        forward = 1 if arrow.from_client else -1
        if not arrow.arrives:
            end = start + forward * (RIGHT - LEFT) * 7 // 8
            parts.append(
                f'<path class="x" d="M{end - 6} {y - 6}L{end + 6} {y + 6}M{end - 6} {y + 6}L{end + 6} {y - 6}"/>'
            )
        else:
            parts.append(f'<path class="t{kind}" d="M{end} {y}l{-forward * 9} -4v8z"/>')
        parts.append(f'<path class="{kind}" d="M{start} {y}H{end}"/>')
        parts.append(text((LEFT + RIGHT) // 2, y - 5, arrow.text + ("" if arrow.arrives else " (lost)"), "", "middle"))
        parts.append(text(LEFT - 12, y + 4, duration(arrow.time), "s", "end"))
        if note := left.pop(arrow.text, ""):
            parts.append(text(NOTES, y + 4, note, "s"))
    assert not left, f"no packet is {', '.join(left)}"
    return bottom + 12, parts


def duration(seconds: float) -> str:
    """A time with its unit, as short as it can be."""
    micro = round(seconds * 1e6)
    if micro < 1000:
        return f"{micro} µs"
    return f"{micro / 1000:.3g} ms" if micro < 1_000_000 else f"{micro / 1e6:.3g} s"


# --- each lesson --------------------------------------------------------------------------------------------


def first_connection() -> str:
    return sequence(
        arrows_of("1-first-connection", "server.py", "client.py"),
        {
            "REQ": "may I connect to port 7471?",
            "REP": "yes",
            "RTU": "ready to use",
            "SEND": "a message, into a buffer that waits for it",
            "ACK": "it is in my memory",
            "DREQ": "I disconnect",
            "DREP": "so do I",
        },
    )


def queue_pair() -> str:
    return sequence(
        arrows_of("2-queue-pair", "qp_server.py", "qp_client.py"),
        {
            "SEND": "the first send, number 11, and the second, 12",
            "RNR NAK": "11 has arrived; no receive for 12, wait 0.64 ms",
            "DREQ": "the client has given up and disconnects",
        },
    )


def memory() -> str:
    return sequence(
        arrows_of("3-memory", "lender.py", "borrower.py"),
        {
            "SEND": "address and rkey, into a receive",
            "READ request": "address, length and rkey",
            "READ response": "the bytes",
            "WRITE": "address, rkey and bytes",
            "NAK: remote access error": "that rkey is not mine; nothing was written",
        },
        ("borrower", "lender"),
    )


def addresses() -> str:
    """The steps from an address to a packet, and the packet."""
    host = of_program("4-addresses", "way.py")["provider"]
    why = rdmacm.explain("10.0.0.2", 7471, provider=host)
    packet = of_program("4-addresses", "packet.py")["packet"]
    assert why.route is not None
    assert why.neighbour is not None
    assert why.path is not None
    parts: list[str] = []
    y = 20

    def step(name: str, lines: Sequence[tuple[str, bool]]) -> None:
        nonlocal y
        if parts:
            parts.append(f'<path class="a" d="M430 {y - 14}v10"/><path class="ta" d="M430 {y}l-4 -8h8z"/>')
        parts.append(text(150, y + 19, name, "b", "end"))
        for line, hot in lines:
            parts.append(f'<rect class="{"hot" if hot else "box"}" x="170" y="{y}" width="520" height="28" rx="4"/>')
            parts.append(text(182, y + 19, line))
            y += 30
        y += 16

    step("destination", [("10.0.0.2, port 7471", False)])
    step("route", [(f"interface {why.route.interface}, source {why.route.source}", False)])
    rows = sorted(why.candidates, key=lambda each: (each.device, each.gid_index))
    marks = ["chosen" if row.chosen else row.rule for row in rows]
    table = [f"{row.device}, row {row.gid_index}: {row.gid} ({mark})" for row, mark in zip(rows, marks, strict=True)]
    step("GID tables", [(line, row.chosen) for line, row in zip(table, rows, strict=True)])
    step("neighbour", [(f"{why.neighbour.address} is at {why.neighbour.link_layer_address}", False)])
    step("path record", [(f"MTU {why.path['mtu']}, hop limit {why.path['hop_limit']}", False)])
    y += 10
    source, destination = ip_address(packet.local), ip_address(packet.remote)
    x = 20
    for width, name, detail in (
        (160, "Ethernet", f"to {why.neighbour.link_layer_address}"),
        (180, "IP", f"{source} to {destination}"),
        (110, "UDP", "to port 4791"),
        (130, "BTH", f"queue pair {packet.dest_qp}"),
        (150, packet.kind, "service ID with 7471"),
        (80, "ICRC", "checksum"),
    ):
        parts.append(f'<rect class="{"hot" if name == "UDP" else "box"}" x="{x}" y="{y}" width="{width}" height="48"/>')
        parts.append(text(x + width // 2, y + 20, name, "b", "middle"))
        parts.append(text(x + width // 2, y + 38, detail, "s", "middle"))
        x += width + 2
    return picture(WIDTH, y + 68, parts)


def losses() -> str:
    """Two runs, one below the other."""
    gap = {
        "SEND, middle packet": "b cannot notice that yet",
        "NAK: sequence error": "the middle packet is missing",
        "ACK": "all three are here",
    }
    silence = {"SEND, last packet": "b cannot notice that, as nothing follows", "ACK": "all three are here"}
    parts, height = [], 0
    for rule, notes in (("lose RC_SEND_MIDDLE 1", gap), ("lose RC_SEND_LAST 1", silence)):
        fabric = of_program("5-losses", "lossy.py", "1", "0", rule)["fabric"]
        below, drawn = diagram(arrows(fabric.log, "a"), notes, ("a", "b"))
        parts += [f'<g transform="translate(0 {height})">', *drawn, "</g>"]
        height += below
    return picture(WIDTH, height, parts)


def c_program() -> str:
    return sequence(arrows_of("6-c-program", "greet_cma.py", "greet_cma.py"), {"SEND": "the greeting"})


PICTURES: dict[str, Callable[[], str]] = {
    "1-first-connection": first_connection,
    "2-queue-pair": queue_pair,
    "3-memory": memory,
    "4-addresses": addresses,
    "5-losses": losses,
    "6-c-program": c_program,
}

if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    os.environ.pop("RDMACM_LOG", None)
    for name, draw in PICTURES.items():
        (target / f"{name}.svg").write_text(draw(), encoding="utf-8")
