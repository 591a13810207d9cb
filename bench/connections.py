"""Many open connections between two processes on loopback: time, memory, and resources left after closing them.

    python3 dev.py bench connections [COUNT] [--window N] [--calls] [--json]

Opens COUNT (10,000) connections to a second process, each with a queue pair, up to N (64) of them at a time. Then makes
one more request, to measure how fast both processes answer with all connections open, and closes them. Memory is the
growth of a process's resident memory divided by COUNT. "timers" is the number of entries in the timers of the
connection manager, "descriptors" the number of open file descriptors. No peer offers comparable connections, so there
is no ratio.

With --calls, it counts instead of measuring time: the calls of Python functions that a connection costs at each end,
from its id to the end of its TIMEWAIT, by room. COUNT is 200 then. "of these by turns" are those of the rooms that make
progress, and so depend on how many packets arrive at a time. --json has the functions as well.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from cProfile import Profile
from pathlib import Path
from types import CodeType
from typing import Any

from rdmacm import CmEvent, CmEventType, CmId, ConnParam, EventChannel
from rdmacm.tools.measure import resident_bytes
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.qp import QPInitAttr

HOST = "127.0.0.1"
#: Private data of a request for a report. The report is the private data of its rejection.
REPORT = b"report"
#: The same of requests to begin counting calls, and to end it and print them.
COUNT, COUNTED = b"count calls", b"calls counted"
#: A report: resident memory in bytes, and the numbers of connections, queue pairs, descriptors and timers.
ANSWER = struct.Struct("!5Q")
CAP = QPCap(max_send_wr=1, max_recv_wr=1)
#: The rooms that make progress.
TURNS = ("interrupts", "net", "progress", "python", "soft/helper", "soft/host", "soft/wire")
#: Maximum time to wait for an event, in seconds.
PATIENCE = 30.0


class Calls:
    """Counts the calls of functions in this thread and in those that start afterwards, but for this file's in Python.

    With the interpreter's own profiler: a counter in Python takes several times as long as a call, and what is done
    once in a millisecond would be done for nearly every connection.
    """

    def __init__(self) -> None:
        self._profilers: list[Profile] = []
        threading.setprofile(self._thread_begins)  # the helper thread serves peers while this one computes
        self._thread_begins()

    def _thread_begins(self, *_: object) -> None:
        profiler = Profile(subcalls=False)
        self._profilers.append(profiler)
        profiler.enable()

    def begin(self) -> None:
        for profiler in self._profilers:
            profiler.clear()

    def end(self, connections: int) -> dict[str, Any]:
        """The calls of a connection: by function and by room, and those of functions in C."""
        functions: Counter[str] = Counter()
        rooms: Counter[str] = Counter()
        in_c = 0
        for entry in [entry for profiler in self._profilers for entry in profiler.getstats()]:
            code = entry.code
            if isinstance(code, str):
                in_c += entry.callcount
            elif code.co_filename != __file__:
                module = module_of(code)
                functions[f"{module}:{code.co_qualname}"] += entry.callcount
                rooms[room_of(module)] += entry.callcount
        return {
            "python": sum(rooms.values()) / connections,
            "turns": sum(rooms[name] for name in TURNS) / connections,
            "c": in_c / connections,
            "rooms": {name: count / connections for name, count in rooms.most_common()},
            "functions": {name: count / connections for name, count in functions.most_common()},
        }


def module_of(code: CodeType) -> str:
    """The module of a function; "rdmacm.generated" of one that was made at run time, as those of dataclasses."""
    if code.co_filename.startswith("<"):
        return "rdmacm.generated"
    _, found, inside = code.co_filename.rpartition("/rdmacm/")
    return "rdmacm." + inside.removesuffix(".py").replace("/", ".") if found else "python"


def room_of(module: str) -> str:
    """The folder of a module, or the module itself where it is in none; of Python's own modules "python"."""
    name, *inside = module.split(".")
    if name != "rdmacm" or not inside:
        return "python"
    package, *rest = inside
    return f"{package}/{rest[0]}" if len(rest) > 1 or (package == "soft" and rest) else package


class Side:
    """One of the two processes, with its event channel and its connections."""

    def __init__(self) -> None:
        self.channel = EventChannel()
        self.open: set[CmId] = set()
        self.queue: CQ | None = None

    def make_qp(self, cmid: CmId) -> None:
        if self.queue is None:
            self.queue = CQ(cmid.verbs, 16)
        cmid.create_qp(QPInitAttr(scq=self.queue, rcq=self.queue, cap=CAP))

    def report(self) -> tuple[int, ...]:
        provider: Any = self.channel.provider
        timers = len(provider.host.cm.agent.timers)
        descriptors = len(os.listdir("/proc/self/fd"))
        return resident_bytes(), len(self.open), len(provider.host.mux), descriptors, timers

    def end(self, cmid: CmId) -> None:
        cmid.destroy()
        self.open.discard(cmid)

    def await_quiet(self, most: int) -> None:
        """Wait until every TIMEWAIT is over; ``most`` connections may be left."""
        provider: Any = self.channel.provider
        known = provider.host.cm.agent._connections.by_id  # by len(agent), these looks would be counted
        provider.drive(lambda: len(known) <= most, PATIENCE)


def serve(counts_calls: bool) -> None:
    calls = Calls() if counts_calls else None
    counted = 0
    side = Side()
    with CmId(side.channel) as listener:
        listener.bind_addr((HOST, 0))
        listener.listen()
        print(listener.src_port, flush=True)
        for event in side.channel:
            with event:
                cmid, kind = event.id, event.type
                data = event.private_data if kind is CmEventType.CONNECT_REQUEST else b""
                if calls is not None and data.startswith(COUNTED):
                    side.await_quiet(1)
                    print(json.dumps(calls.end(counted)), flush=True)
                    cmid.reject()
                elif calls is not None and data.startswith(COUNT):
                    counted = 0
                    calls.begin()
                    cmid.reject()
                elif data.startswith(REPORT):
                    cmid.reject(ANSWER.pack(*side.report()))
                elif kind is CmEventType.CONNECT_REQUEST:
                    side.open.add(cmid)
                    counted += 1
                    side.make_qp(cmid)
                    cmid.accept()
                elif kind is CmEventType.DISCONNECTED:
                    cmid.disconnect()
            if kind is CmEventType.DISCONNECTED:
                side.end(cmid)


class Client(Side):
    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port

    def begin(self) -> None:
        cmid = CmId(self.channel)
        self.open.add(cmid)
        cmid.resolve_addr((HOST, self.port))

    def go_on(self, event: CmEvent, data: bytes = b"") -> bool:
        """Start the next step of a connection; return whether it is established."""
        cmid = event.id
        if event.type is CmEventType.ADDR_RESOLVED:
            cmid.resolve_route()
        elif event.type is CmEventType.ROUTE_RESOLVED:
            self.make_qp(cmid)
            cmid.connect(ConnParam(data))
        elif event.type is CmEventType.ESTABLISHED:
            return True
        else:
            raise event.error or ConnectionError(event.type.name)
        return False

    def connect(self, count: int, window: int) -> None:
        begun = done = 0
        while done < count:
            while begun < count and begun - done < window:
                self.begin()
                begun += 1
            with self.channel.get_event(PATIENCE) as event:
                done += self.go_on(event)

    def ask(self, data: bytes = REPORT) -> tuple[int, ...]:
        """Ask the server for something; return its report."""
        self.begin()
        while True:
            event = self.channel.get_event(PATIENCE)
            with event:
                if event.type is not CmEventType.REJECTED:
                    self.go_on(event, data)
                    continue
                found = ANSWER.unpack_from(event.private_data)
            self.end(event.id)
            return found

    def disconnect(self, window: int) -> None:
        waiting = list(self.open)
        while self.open:
            while waiting and len(self.open) - len(waiting) < window:
                waiting.pop().disconnect()
            with self.channel.get_event(PATIENCE) as event:
                if event.type is not CmEventType.DISCONNECTED or event.status:
                    raise event.error or ConnectionError(event.type.name)
            self.end(event.id)

    def await_closed(self) -> tuple[int, ...]:
        """Wait until the server has closed all connections, and return its report."""
        limit = time.monotonic() + PATIENCE
        while (found := self.ask())[1]:
            if time.monotonic() > limit:
                raise TimeoutError(f"the server still has {found[1]} connections")
        return found


@contextmanager
def server(how: str = "serve") -> Iterator[tuple[int, Any]]:
    """Run a server process; yield its port and its output."""
    process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline() or 0), process.stdout
    finally:
        process.kill()
        process.communicate()


def measure(count: int, window: int) -> dict[str, Any]:
    with server() as (port, _):
        client = Client(port)
        client.connect(1, 1)  # so that initialization of the processes is not measured
        client.disconnect(1)
        theirs, ours = client.await_closed(), client.report()
        started = time.perf_counter()
        client.connect(count, window)
        opened = time.perf_counter()
        their_open = client.ask()
        answered = time.perf_counter()
        our_open = client.report()
        client.disconnect(window)
        closed = time.perf_counter()
        their_end, our_end = client.await_closed(), client.report()
        if client.queue is not None:
            client.queue.close()
        client.channel.close()

    def side(before: tuple[int, ...], during: tuple[int, ...], after: tuple[int, ...]) -> dict[str, Any]:
        names = "connections", "queue_pairs", "descriptors", "timers"
        return {
            "bytes_per_connection": round((during[0] - before[0]) / count),
            "open": dict(zip(names, during[1:], strict=True)),
            "before": dict(zip(names, before[1:], strict=True)),
            "after": dict(zip(names, after[1:], strict=True)),
        }

    return {
        "connections": count,
        "open_seconds": opened - started,
        "answer_seconds": answered - opened,
        "close_seconds": closed - answered,
        "client": side(ours, our_open, our_end),
        "server": side(theirs, their_open, their_end),
    }


def count_calls(count: int, window: int) -> dict[str, Any]:
    calls = Calls()
    with server("serve-counting") as (port, output):
        client = Client(port)
        client.connect(window, window)  # so that initialization of the processes is not counted
        client.disconnect(window)
        client.await_closed()
        client.await_quiet(0)
        client.ask(COUNT)
        client.await_quiet(0)
        calls.begin()
        client.connect(count, window)
        client.disconnect(window)
        client.await_quiet(0)
        found = calls.end(count)
        client.ask(COUNTED)
        theirs = json.loads(output.readline())
        if client.queue is not None:
            client.queue.close()
        client.channel.close()
    return {"connections": count, "window": window, "client": found, "server": theirs}


def print_calls(found: dict[str, Any]) -> None:
    print(f"calls a connection, {found['connections']} connections, {found['window']} at a time")
    ends = found["client"], found["server"]
    print(f"{'room':<20}{'client':>8}{'server':>8}")
    rooms = Counter(ends[0]["rooms"]) | Counter(ends[1]["rooms"])
    for name, _ in rooms.most_common():
        print(f"{name:<20}" + "".join(f"{end['rooms'].get(name, 0):8.1f}" for end in ends))
    for name, text in (("python", "all"), ("turns", "of these by turns"), ("c", "functions in C")):
        print(f"{text:<20}" + "".join(f"{end[name]:8.1f}" for end in ends))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, metavar="COUNT")
    parser.add_argument("--window", type=int, default=64, metavar="N")
    parser.add_argument("--calls", action="store_true", help="count calls of functions instead")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if options.count is None:
        options.count = 200 if options.calls else 10_000
    if not 0 < options.count <= 20_000 or not 0 < options.window <= 512:
        parser.error("COUNT is 1 to 20,000, and N 1 to 512")
    found = (count_calls if options.calls else measure)(options.count, options.window)
    if options.json:
        print(json.dumps(found))
        return 0
    if options.calls:
        print_calls(found)
        return 0
    count = options.count
    for name in ("open", "close"):
        seconds = found[f"{name}_seconds"]
        print(f"{name:<6} {count:,} connections in {seconds:.2f} s, {count / seconds:,.0f} per second")
    print(f"answer {found['answer_seconds'] * 1000:.1f} ms while all are open")
    for name in ("client", "server"):
        side = found[name]
        print(f"{name} {side['bytes_per_connection']:,} bytes a connection")
        for when in ("before", "open", "after"):
            print(f"  {when:<6} " + ", ".join(f"{value:,} {what}" for what, value in side[when].items()))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] in (["serve"], ["serve-counting"]):
        serve(counts_calls=sys.argv[1] == "serve-counting")
    else:
        sys.exit(main())
