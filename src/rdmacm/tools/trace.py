"""``rdmacm trace``: the RDMA connections of a capture, and how each fared."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TypeAlias, cast

from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.wire import WireError
from rdmacm.tools.arguments import integer_between, seconds_between
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import Page, Parser, ReportedError, bold, table, wrapped_line, write, write_json
from rdmacm.trace import live
from rdmacm.trace.connection import Connection
from rdmacm.trace.files import CaptureFile
from rdmacm.trace.mermaid import mermaid
from rdmacm.trace.report import connection_json
from rdmacm.trace.rows import heads
from rdmacm.trace.svg import svg
from rdmacm.trace.text import diagram, half_rows, operation_rows, title, verdict_text
from rdmacm.trace.tracer import Tracer
from rdmacm.trace.verdicts import FAILED, OK, Judge, Verdict, duration_text, size_text

PAGE = Page(
    command="trace",
    summary=COMMANDS["trace"],
    description="""
        Reads a capture of tcpdump, Wireshark or rdmacm's --pcap (pcap or pcapng, also compressed with gzip), and finds
        the connections in it: those of RoCEv2 (UDP port 4791) and RoCEv1, iWARP (TCP with MPA), and the management
        datagrams of InfiniBand. Each has a verdict in one sentence, and where a rule of rdmacm doctor fits, its
        name: 'rdmacm doctor C1' explains rule C1.

        A single connection, or the one that --connection chooses, is shown with its sequence diagram, what each
        operation moved and how long it took, lost and repeated packets, round trips, and the throughput over time.

        What was lost is known from the order of the packets. A packet that was lost before the place of the capture is
        missing, one that was lost behind it is sent again.

        With -i, packets are captured from an interface as they pass, which needs the privilege CAP_NET_RAW. Messages
        of connections are shown at once, and the verdicts at the end: after --seconds, or with Ctrl-C. --follow does
        the same with a file that another program still writes.

        With --json, writes one object: packets, rdma_packets, malformed, cut, fragments, unread, copies, strays,
        left_out, notes, seconds and connections.
    """,
    examples=(
        ("rdmacm trace file.pcap", "List the connections of a capture, with the verdicts."),
        ("rdmacm trace file.pcap --connection 3", "Show the third one in detail."),
        ("rdmacm trace file.pcap --svg file.svg", "Draw the connections."),
        ("rdmacm trace -", "Read standard input: 'rdmacm rping HOST --pcap - | rdmacm trace -'."),
        ("rdmacm trace -i eth0 --seconds 10", "Capture for ten seconds."),
    ),
    see_also="rdmacm doctor, rdmacm explain, tcpdump(8), tshark(1)",
    environment=("NO_COLOR",),
)

#: Connections in a list for people, and diagrams.
_MOST_LISTED, _MOST_DRAWN = 200, 50

#: A connection with its number and its verdict.
_Found: TypeAlias = "tuple[int, Connection, Verdict]"


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm trace``."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="The capture file; - is standard input.")
    parser.add_argument("-i", "--interface", metavar="IF", help="Capture from this interface instead.")
    parser.add_argument("--follow", action="store_true", help="Wait for more at the end of the file.")
    parser.add_argument(
        "--seconds", type=seconds_between(0.1, 1e6), metavar="S", help="End -i or --follow after this time."
    )
    parser.add_argument(
        "--connection", type=integer_between(1, 1 << 31), metavar="N", help="Show only this connection, in detail."
    )
    parser.add_argument("--host", metavar="ADDR", help="Show only connections of this address.")
    parser.add_argument("--port", type=integer_between(0, 65535), metavar="PORT", help="Show only those of this port.")
    parser.add_argument("--mermaid", action="store_true", help="Write the diagrams for Mermaid instead.")
    parser.add_argument("--svg", metavar="FILE", help="Also draw the connections to this file (SVG).")
    parser.add_argument("--check", action="store_true", help="Fail if a connection failed, or if there is none.")
    parser.add_argument("--json", action="store_true", help="Write one JSON object.")


def run(args: argparse.Namespace) -> int:
    """Read the packets, and show the connections."""
    if (args.file is None) == (args.interface is None):
        args.parser.error("one of FILE and -i is needed" if args.file is None else "FILE and -i exclude each other")
    if args.seconds is not None and args.interface is None and not args.follow:
        args.parser.error("--seconds needs -i or --follow")
    tracer = Tracer()
    shown = _Events(tracer) if (args.follow or args.interface) and not args.json and not args.mermaid else None
    tick: Callable[[], None] = shown.show if shown is not None else _nothing
    notes: list[str] = []
    interrupted = None
    try:
        if args.interface is not None:
            notes += _from_interface(tracer, args, tick)
        else:
            notes += _from_file(tracer, args, tick)
    except KeyboardInterrupt as interrupt:
        if args.interface is None and not args.follow:
            raise
        interrupted = interrupt
    tick()
    _show(tracer, args, notes)
    if interrupted is not None:
        raise interrupted
    return 0


def _nothing() -> None:
    """Show no events."""


# -- reading -----------------------------------------------------------------------------------------------------


def _from_interface(tracer: Tracer, args: argparse.Namespace, tick: Callable[[], None]) -> list[str]:
    name = args.interface
    if not live.is_supported():
        raise cm_error(errno.ENOSYS, "this system has no packet sockets", "trace", name, "capturing with tcpdump")
    try:
        interface = live.Interface(name, tick, seconds=args.seconds)
    except PermissionError as error:
        raise cm_error(
            errno.EPERM,
            "capturing from an interface needs the privilege CAP_NET_RAW",
            "trace",
            name,
            "running as root; or `rdmacm COMMAND --pcap FILE`, which needs none and has the command's own packets; or "
            f"a file that someone with the privilege makes (`tcpdump -i {name} -w FILE udp port 4791`)",
        ) from error
    except OSError as error:
        raise cm_error(error.errno or 0, error.strerror or str(error), "trace", name) from error
    with interface:
        tracer.feed(interface)
    if not interface.lost:
        return []
    return [f"{interface.lost:,} packets came faster than they were read: what is missing above may be among them"]


def _from_file(tracer: Tracer, args: argparse.Namespace, tick: Callable[[], None]) -> list[str]:
    path = args.file
    try:
        with _opened(path) as file:
            read: Callable[[int], bytes] = file.read
            if args.follow:
                read = live.Growing(file.fileno(), tick, seconds=args.seconds).read
            capture = CaptureFile(read)
            tracer.feed(capture)
    except WireError as error:
        raise cm_error(
            errno.EINVAL, str(error), "trace", path, "a file of tcpdump, Wireshark, or rdmacm's --pcap"
        ) from error
    except (OSError, EOFError) as error:
        if isinstance(error, RdmaError):
            raise
        code = getattr(error, "errno", None) or errno.EINVAL
        raise cm_error(code, getattr(error, "strerror", None) or str(error), "trace", path) from error
    return [capture.damage] if capture.damage else []


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """The file, or what gzip has compressed in it; reads return what is there."""
    if path == "-":
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as file:
            yield cast("IO[bytes]", file)
        return
    with open(path, "rb", buffering=0) as file:
        # Only of a file: of a pipe, the bytes would be gone.
        is_packed = file.seekable() and file.read(2) == b"\x1f\x8b"
        if file.seekable():
            file.seek(0)
        if not is_packed:
            yield cast("IO[bytes]", file)
            return
        import gzip

        with gzip.open(file, "rb") as unpacked:
            yield cast("IO[bytes]", unpacked)


class _Events:
    """Shows messages of connections as they come."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        #: How often each event of a connection was shown.
        self._shown: dict[int, list[int]] = {}

    def show(self) -> None:
        lines = []
        for connection in self._tracer.found():
            shown = self._shown.setdefault(id(connection), [])
            for at, event in enumerate(connection.events):
                if at == len(shown):
                    shown.append(0)
                if event.count == shown[at]:
                    continue
                shown[at] = event.count
                first, second = (end.name for end in connection.ends)
                arrow = "--" if event.sender is None else "->" if event.sender == 0 else "<-"
                time = duration_text(max(event.last - self._tracer.first, 0))
                lines.append((event.last, f"{time:>10}  {first} {arrow} {second}  {event.text}\n"))
        if lines:
            write("".join(line for _, line in sorted(lines)))


# -- showing -----------------------------------------------------------------------------------------------------


def _show(tracer: Tracer, args: argparse.Namespace, notes: list[str]) -> None:
    judge = Judge(tracer)
    every = [(number, each, judge.verdict(each)) for number, each in enumerate(tracer.found(), 1)]
    chosen = [found for found in every if _is_chosen(found, args)]
    if args.connection is not None and not chosen:
        raise cm_error(errno.ENOENT, f"there is no connection {args.connection}, but {len(every)}", "trace", args.file)
    if args.svg is not None:
        try:
            with open(args.svg, "w", encoding="utf-8") as file:
                file.write(svg(chosen[:_MOST_DRAWN]))
        except OSError as error:
            raise cm_error(error.errno or 0, error.strerror or str(error), "write", args.svg) from error
    notes = [*notes, *_notes(tracer)]
    if args.json:
        write_json(_json(tracer, chosen, notes))
    elif args.mermaid:
        _write_mermaid(chosen[:_MOST_DRAWN])
    else:
        _write_text(tracer, chosen, args, notes)
    failed = [found for found in chosen if found[2].level == FAILED]
    if args.check and (failed or not chosen):
        what = f"{len(failed)} of {len(chosen)} connections failed" if chosen else "there is no connection"
        raise ReportedError(cm_error(errno.EIO, what, "trace", args.file or args.interface))


def _is_chosen(found: _Found, args: argparse.Namespace) -> bool:
    number, connection, _ = found
    if args.connection is not None and number != args.connection:
        return False
    if args.host is not None and _plain(args.host) not in (end.host for end in connection.ends):
        return False
    return args.port is None or args.port in (end.port for end in connection.ends)


def _plain(address: str) -> str:
    """An IP address in its usual form."""
    from ipaddress import ip_address

    try:
        return str(ip_address(address))
    except ValueError:
        return address


def _notes(tracer: Tracer) -> list[str]:
    """What was left out, and why."""
    counts = (
        (tracer.malformed, "malformed packets"),
        (tracer.cut, "packets that the capture has cut (capture whole packets: tcpdump -s 0)"),
        (tracer.copies + tracer.managers.copies, "packets that the capture has twice"),
        (tracer.fragments, "fragments of IP packets, which are not joined"),
        (tracer.unread, "packets of a link type that is not known"),
        (tracer.managers.strays, "messages of connections whose beginning is not in the capture"),
        (tracer.connections.left_out, "connections beyond the limit"),
    )
    return [f"left out: {count:,} {what}" for count, what in counts if count]


def _json(tracer: Tracer, chosen: Sequence[_Found], notes: list[str]) -> dict[str, object]:
    return {
        "packets": tracer.packets,
        "bytes": tracer.octets,
        "rdma_packets": tracer.rdma,
        "seconds": max(tracer.last - tracer.first, 0) / 10**9,
        "malformed": tracer.malformed,
        "cut": tracer.cut,
        "fragments": tracer.fragments,
        "unread": tracer.unread,
        "copies": tracer.copies + tracer.managers.copies,
        "strays": tracer.managers.strays,
        "left_out": tracer.connections.left_out,
        "notes": notes,
        "connections": [connection_json(*found, tracer.first) for found in chosen],
    }


def _write_mermaid(chosen: Sequence[_Found]) -> None:
    drawn = [mermaid(*found) for found in chosen]
    write(drawn[0] if len(drawn) == 1 else "\n".join(f"```mermaid\n{each}```\n" for each in drawn))


def _write_text(tracer: Tracer, chosen: Sequence[_Found], args: argparse.Namespace, notes: Sequence[str]) -> None:
    plain = not _has_lines()
    parts = []
    if len(chosen) == 1:
        parts.append(_detail(*chosen[0], plain=plain))
    elif chosen:
        rows = [
            [str(number), each.kind, *_names(each), _moved(each), verdict_text(verdict)]
            for number, each, verdict in chosen[:_MOST_LISTED]
        ]
        parts.append(table(("#", "kind", "from", "to", "data", "verdict"), rows, ("#", "data")))
        if len(chosen) > _MOST_LISTED:
            parts.append(f"{len(chosen) - _MOST_LISTED} more: --host, --port or --json\n")
        parts.append("\n")
    took = duration_text(max(tracer.last - tracer.first, 0))
    counts = f"{tracer.packets:,} packets in {took}, {tracer.rdma:,} of RDMA"
    if chosen:
        good = sum(found[2].level == OK for found in chosen)
        bad = sum(found[2].level == FAILED for found in chosen)
        some = "1 connection" if len(chosen) == 1 else f"{len(chosen)} connections"
        counts += f"; {some}: {good} healthy, {len(chosen) - good - bad} with remarks, {bad} failed"
    else:
        counts += "; no connection" + (" of this host or port" if args.host or args.port is not None else "")
    parts += [f"{line}\n" for text in (counts, *notes) for line in wrapped_line(text)]
    write("".join(parts))


def _has_lines() -> bool:
    """Whether the encoding of standard output has the characters of diagrams."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "─│▶◀▁█".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _names(connection: Connection) -> tuple[str, str]:
    """The ends; a queue pair tells connections apart where ports do not."""
    if connection.ends[1].port is not None:
        return connection.ends[0].name, connection.ends[1].name
    return heads(connection)


def _moved(connection: Connection) -> str:
    return size_text(sum(half.octets for half in connection.halves if half is not None))


def _detail(number: int, connection: Connection, verdict: Verdict, *, plain: bool) -> str:
    columns = 80
    with contextlib.suppress(OSError, ValueError):
        columns = min(max(os.get_terminal_size(sys.stdout.fileno()).columns, 80), 120)
    parts = [f"{bold(title(number, connection))}\n"]
    parts += [f"{line}\n" for line in wrapped_line(verdict_text(verdict))]
    parts.append("\n" + "".join(f"{line}\n" for line in diagram(connection, columns, plain=plain)))
    if operations := operation_rows(connection):
        head = ("from", "operation", "count", "data", "p50", "p99")
        parts.append("\n" + table(head, operations, head[2:]))
    if halves := half_rows(connection, plain=plain):
        head_ = ("from", "packets", "data", "lost", "again", "round trip", "MB/s", "over time")
        parts.append("\n" + table(head_, halves, head_[1:-1]))
    return "".join(parts) + "\n"
