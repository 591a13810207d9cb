"""Datagrams between two processes on loopback: UD queue pairs of rdmacm, Python's UDP sockets, and libfabric's "udp".

    python3 dev.py bench datagrams [--json] [--rounds N] [--effort X] [PEER...]

The peers run in turn, and the table has the medians of the rounds, for messages of 64 bytes and of 1 KiB:

- half a round trip, both ends polling, and both sleeping while they wait;
- messages a second of a sender that does not pause, and how many of them arrive at a receiver that keeps posting;
- the loss-free rate: the highest at which no message of half a second is lost, in steps of a fifth. Messages leave in
  bursts, one a millisecond.

A datagram of "sockets" is as long as the packet of a message, so the difference is this library's. fi_pingpong measures
round trips only, and polls.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import peers
from peers import HOST, times

from rdmacm import CmEvent, CmEventType, CmId, EventChannel, PortSpace
from rdmacm.provider.connparam import UdParam
from rdmacm.verbs import AH, CQ
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import QPType, SendFlag, WCStatus, WROpcode
from rdmacm.verbs.qp import QPInitAttr
from rdmacm.verbs.wr import RecvWR, SendWR

SCRIPT = Path(__file__).resolve()
FABRIC = peers.Peer("fi-udp", peers.fi_pingpong("udp", "dgram"), "fi_pingpong", "libfabric-bin")
SIZES = (64, 1024)
#: Iterations of each measurement, at full effort.
ROUND_TRIPS, BLAST = 5000, 50_000
#: Bytes of a packet around the message: BTH, DETH and ICRC.
HEADERS = 24
#: The lowest rate, messages a second; the factors between rates; and the seconds of each, at full effort.
FIRST_RATE, STEPS, SECONDS = 1000.0, (2.0, 1.2), 0.5
#: A receiver has everything when it has got nothing for so many seconds after the sender has finished.
QUIET = 0.1
#: Receives that are posted, and completions that are taken at once.
DEPTH, BATCH = 1024, 64
GRH = 40
#: Maximum time to wait for a message, or for an event, in seconds.
PATIENCE = 20.0


@dataclass(frozen=True)
class Figures:
    """The figures of a peer, by size of a message in bytes: microseconds, then messages a second."""

    half_round_trip_us: Mapping[int, float] = field(default_factory=dict)
    half_round_trip_asleep_us: Mapping[int, float] = field(default_factory=dict)
    sent: Mapping[int, float] = field(default_factory=dict)
    received: Mapping[int, float] = field(default_factory=dict)
    loss_free: Mapping[int, float] = field(default_factory=dict)


class End(Protocol):
    """One of two ends that send each other messages of one size."""

    def send(self, count: int) -> None:
        """Send messages."""

    def receive(self, poll: bool) -> None:
        """Wait for the next message."""

    def take(self, timeout: float) -> int:
        """Wait up to ``timeout`` seconds for messages, and return how many there are."""

    def close(self) -> None:
        """Release everything."""


class Control:
    """A TCP connection between the two processes, with a JSON object on each line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._lines = connection.makefile("r")

    def say(self, **values: object) -> None:
        self._socket.sendall(json.dumps(values).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines.readline())
        return found

    def has_said(self) -> bool:
        """Whether the other end has sent a line that was not read."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


# --- Python's sockets ---------------------------------------------------------------------------------------


class SocketEnd:
    """A UDP socket."""

    def __init__(self, control: Control, size: int, _is_server: bool) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self._socket.bind((HOST, 0))
        control.say(port=self._socket.getsockname()[1])
        self._socket.connect((HOST, control.hear()["port"]))
        self._message = bytes(size + HEADERS)
        self._buffer = bytearray(size + HEADERS)

    def send(self, count: int) -> None:
        send, message = self._socket.send, self._message
        for _ in range(count):
            send(message)

    def receive(self, poll: bool) -> None:
        self._socket.setblocking(not poll)
        receive, buffer = self._socket.recv_into, self._buffer
        while True:
            try:
                receive(buffer)
            except BlockingIOError:
                continue
            return

    def take(self, timeout: float) -> int:
        if not select.select([self._socket], [], [], timeout)[0]:
            return 0
        self._socket.setblocking(False)
        receive, buffer = self._socket.recv_into, self._buffer
        for count in range(BATCH):
            try:
                receive(buffer)
            except BlockingIOError:
                return count
        return BATCH

    def close(self) -> None:
        self._socket.close()


# --- queue pairs --------------------------------------------------------------------------------------------


class QueuePairEnd:
    """A UD queue pair. The client finds the server's by SIDR; the server answers the sender of the first message."""

    def __init__(self, control: Control, size: int, is_server: bool) -> None:
        self._channel = EventChannel()
        self._ids = [CmId(self._channel, PortSpace.UDP)]
        self._ah: AH | None = None
        if is_server:
            (listener,) = self._ids
            listener.bind_addr((HOST, 0))
            listener.listen()
            control.say(port=listener.src_port)
            self._ids.append(self._event(CmEventType.CONNECT_REQUEST).id)
            self._open(size)
            self._cmid.accept()
        else:
            self._cmid.resolve_addr((HOST, control.hear()["port"]))
            self._event(CmEventType.ADDR_RESOLVED)
            self._cmid.resolve_route()
            self._event(CmEventType.ROUTE_RESOLVED)
            self._open(size)
            self._cmid.connect()
            param = self._event(CmEventType.ESTABLISHED).param
            assert isinstance(param, UdParam)
            self._reach(AH(self._cmid.pd, param.ah_attr), param.qp_num)

    @property
    def _cmid(self) -> CmId:
        return self._ids[-1]

    def _event(self, wanted: CmEventType) -> CmEvent:
        with self._channel.get_event(PATIENCE) as event:
            if event.type is not wanted:
                raise event.error or ConnectionError(f"{event.type.name} instead of {wanted.name}")
            return event

    def _open(self, size: int) -> None:
        self._send_cq, self._recv_cq = CQ(self._cmid.verbs, 2 * BATCH), CQ(self._cmid.verbs, DEPTH)
        cap = QPCap(max_send_wr=2 * BATCH, max_recv_wr=DEPTH)
        self._qp = self._cmid.create_qp(QPInitAttr(QPType.UD, scq=self._send_cq, rcq=self._recv_cq, cap=cap))
        self._region = self._cmid.reg_msgs(bytearray(GRH + size))
        self._receives = [RecvWR(0, [self._region.sge()])] * BATCH
        for _ in range(DEPTH // BATCH):
            self._qp.post_recv(self._receives)

    def _reach(self, ah: AH, qpn: int) -> None:
        """Send to a queue pair from now on. The last message of a batch is signaled."""
        self._ah = ah
        qkey = self._qp.query()[0].qkey
        plain, self._signaled = (
            SendWR(0, WROpcode.SEND, [self._region.sge(GRH)], flags, ah=ah, remote_qpn=qpn, remote_qkey=qkey)
            for flags in (SendFlag(0), SendFlag.SIGNALED)
        )
        self._batch = [plain] * (BATCH - 1) + [self._signaled]

    def send(self, count: int) -> None:
        post, taken = self._qp.post_send, self._send_cq.poll
        for left in range(count, 0, -BATCH):
            post(self._batch[-left:] if left < BATCH else self._batch)
            while not (found := taken(1)):
                pass
            assert found[0].status is WCStatus.SUCCESS

    def receive(self, poll: bool) -> None:
        while not (found := self._recv_cq.poll(1)):
            if not poll:
                self._recv_cq.wait(PATIENCE)
        self._qp.post_recv(self._receives[:1])
        if self._ah is None:
            (wc,) = found
            self._reach(AH(self._cmid.pd, wc=wc, grh=self._region.buf, port_num=self._cmid.port_num), wc.src_qp)

    def take(self, timeout: float) -> int:
        found = self._recv_cq.poll(BATCH)
        if not found:
            self._recv_cq.wait(timeout)
            found = self._recv_cq.poll(BATCH)
        if found:
            self._qp.post_recv(self._receives[: len(found)])
        return len(found)

    def close(self) -> None:
        if self._ah is not None:
            self._ah.close()
        self._cmid.destroy_qp()
        for cmid in reversed(self._ids):
            cmid.destroy()
        self._region.close()
        self._send_cq.close()
        self._recv_cq.close()
        self._channel.close()


ENDS: dict[str, Callable[[Control, int, bool], End]] = {"rdmacm": QueuePairEnd, "sockets": SocketEnd}


# --- the two processes --------------------------------------------------------------------------------------


def serve() -> None:
    with socket.create_server((HOST, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            control = Control(listener.accept()[0])
            order = control.hear()
            end = ENDS[order["peer"]](control, order["size"], True)
            control.say()
            if order["mode"] == "take":
                count = take(end, control)
                control.say(count=count)
            else:
                for _ in range(order["count"]):
                    end.receive(order["mode"] == "poll")
                    end.send(1)
            control.hear()  # the client has closed its end
            end.close()
            control.close()


def take(end: End, control: Control) -> int:
    """Receive until the sender has finished; return the number of messages."""
    total = 0
    while True:
        count = end.take(QUIET)
        total += count
        if not count and control.has_said():
            control.hear()
            return total


@contextmanager
def opened(peer: str, port: int, mode: str, size: int, count: int = 0) -> Iterator[tuple[Control, End]]:
    """The client's end of a measurement, while the server is at the other."""
    control = Control(socket.create_connection((HOST, port)))
    control.say(peer=peer, mode=mode, size=size, count=count)
    end = ENDS[peer](control, size, False)
    control.hear()
    yield control, end
    end.close()
    control.say()
    control.close()


def half_round_trip(peer: str, port: int, size: int, count: int, mode: str) -> float:
    """Half a round trip in microseconds."""
    warm = max(1, count // 10)
    with opened(peer, port, mode, size, warm + count) as (_, end):
        started = 0.0
        for i in range(warm + count):
            if i == warm:
                started = time.perf_counter()
            end.send(1)
            end.receive(mode == "poll")
        return (time.perf_counter() - started) / count / 2 * 1e6


def blast(peer: str, port: int, size: int, count: int) -> tuple[float, float]:
    """Send without a pause: messages sent a second, and of these those that arrived."""
    with opened(peer, port, "take", size) as (control, end):
        started = time.perf_counter()
        end.send(count)
        seconds = time.perf_counter() - started
        control.say()
        arrived = control.hear()["count"]
        return count / seconds, arrived / seconds


def is_lost(peer: str, port: int, size: int, rate: float, seconds: float) -> bool:
    """Whether a message is lost at a rate, or the sender cannot keep the rate."""
    with opened(peer, port, "take", size) as (control, end):
        sent, total = 0, max(1, round(rate * seconds))
        started = time.perf_counter()
        while sent < total:
            due = min(total, int((time.perf_counter() - started) * rate) + 1) - sent
            if due:
                end.send(due)
                sent += due
            time.sleep(0.001)
        late = (time.perf_counter() - started) > 1.1 * seconds + 0.01
        control.say()
        lost: bool = control.hear()["count"] < total
        return lost or late


def loss_free_rate(peer: str, port: int, size: int, seconds: float) -> float:
    """The highest rate without loss, messages a second."""
    if is_lost(peer, port, size, FIRST_RATE, seconds):
        return 0.0
    rate = FIRST_RATE
    for step in STEPS:
        while not is_lost(peer, port, size, rate * step, seconds):
            rate *= step
    return rate


def figures(peer: str, port: int, effort: float) -> Figures:
    trips = times(ROUND_TRIPS, effort)
    blasts = {size: blast(peer, port, size, times(BLAST, effort)) for size in SIZES}
    return Figures(
        {size: half_round_trip(peer, port, size, trips, "poll") for size in SIZES},
        {size: half_round_trip(peer, port, size, trips, "sleep") for size in SIZES},
        {size: sent for size, (sent, _) in blasts.items()},
        {size: received for size, (_, received) in blasts.items()},
        {size: loss_free_rate(peer, port, size, max(0.05, SECONDS * effort)) for size in SIZES},
    )


# --- rounds -------------------------------------------------------------------------------------------------


def of_script(peer: str, effort: float) -> Figures:
    with peers.serving_script(SCRIPT.name, "serve") as port:
        command = [sys.executable, str(SCRIPT), "measure", peer, port, str(effort)]
        found = json.loads(peers.client(command))
    return Figures(**{name: {int(size): value for size, value in row.items()} for name, row in found.items()})


def of_fi_pingpong(effort: float) -> Figures:
    trips = times(ROUND_TRIPS, effort)
    return Figures({size: peers.fi_transfer("udp", "dgram", size, trips) for size in SIZES})


MEASURES: dict[str, Callable[[float], Figures]] = {
    "rdmacm": lambda effort: of_script("rdmacm", effort),
    "sockets": lambda effort: of_script("sockets", effort),
    "fi-udp": of_fi_pingpong,
}
#: The rows of the table: title, and a field of :class:`Figures`.
ROWS = (
    ("half round trip, us", "half_round_trip_us"),
    ("the same, sleeping, us", "half_round_trip_asleep_us"),
    ("sent without a pause, /s", "sent"),
    ("received of these, /s", "received"),
    ("loss-free, /s", "loss_free"),
)


def medians(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over all rounds."""
    found: dict[str, dict[int, float]] = {}
    for _, name in ROWS:
        rows = [getattr(one, name) for one in rounds]
        found[name] = {size: statistics.median(row[size] for row in rows) for size in rows[0]}
    return Figures(**found)


def table(outcome: Mapping[str, Figures], against: str) -> str:
    """The peers side by side. In brackets: how many times as good as the peer ``against`` each one is."""
    lines = [" " * 36 + "".join(f"{name:>18}" for name in outcome)]
    for title, name in ROWS:
        is_time = name.endswith("_us")
        for size in SIZES:
            base = getattr(outcome[against], name).get(size) if against in outcome else None
            cells = []
            for peer, figures in outcome.items():
                number = getattr(figures, name).get(size)
                text = "-" if number is None else peers.number_text(number)
                if number and base and peer != against:
                    text += f" ({base / number if is_time else number / base:.2f}x)"
                cells.append(f"{text:>18}")
            lines.append(f"{size:>5} B, {title:<27}" + "".join(cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"only these: {', '.join(MEASURES)}")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    parser.add_argument("--effort", type=float, default=1.0, help="share of the usual iterations (1.0)")
    options = parser.parse_args()
    if unknown := set(options.peers) - set(MEASURES):
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; known are {', '.join(MEASURES)}")
    if options.rounds < 1 or options.effort <= 0:
        parser.error("rounds and effort must be greater than 0")
    names = [name for name in MEASURES if not options.peers or name in options.peers]
    if "fi-udp" in names and (missing := FABRIC.missing()):
        names.remove("fi-udp")
        print(f"fi-udp: {missing.reason}; to install it: {missing.install}", file=sys.stderr)
    rounds: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            rounds[name].append(MEASURES[name](options.effort))
    outcome = {name: medians(found) for name, found in rounds.items()}
    if options.json:
        found = {name: asdict(figures) for name, figures in outcome.items()}
        print(json.dumps({"machine": peers.machine(), "rounds": options.rounds, "peers": found}))
    else:
        print(f"Medians of {options.rounds} rounds in turn. In brackets: the speed as a multiple of that of sockets.\n")
        print(table(outcome, "sockets"))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    elif sys.argv[1:2] == ["measure"]:
        _, _, peer, port, effort = sys.argv
        print(json.dumps(asdict(figures(peer, int(port), float(effort)))))
    else:
        sys.exit(main())
