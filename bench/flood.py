"""Packets from strangers: how much of an established connection's speed they take, and who still connects.

    python3 dev.py bench flood [--kind req] [--rate 10000] [--seconds 4] [--newcomers 3] [--sources one|many|both]
                               [--json]
    python3 dev.py bench flood --computing [--kind no_qp] [--rate 10000] [--seconds 4] [--json]

Three network namespaces: a server, a client, and a sender of forged packets. The client's rounds are messages of 64
bytes that the server sends back, on one connection. They are counted while the sender sends its datagrams to a UDP port
of the server's host that nobody reads ("quiet"), and while it sends them to port 4791. So the figures differ by what
the server does with the packets, and not by the processor time that the sender takes. In the flood a new client
connects a few times; its slowest time counts. With "one", every packet has the sender's address; with "many", each has
one of 65,534 addresses, and none of them ever answers.

``--kind`` is a message of the connection manager ("req" by default), an unknown attribute or management class, packets
for a queue pair that exists ("qp") or does not ("no_qp"), "all" of these mixed, or "each", one after the other. The
stranger knows the top byte of the server's numbers, as a peer does. The server's counters must account for what was
sent. Its memory may not grow, and it may not log anything.

With ``--computing`` the server computes in pure Python, and the rounds are READs (computing.py). Without ``--kind`` and
``--rate``, each kind of that is sent at 1,000, 10,000 and 100,000 a second.

Each packet is well-formed, has a right ICRC, and differs from all others. The server accepts every request. Needs the
privilege to make network namespaces.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path as FilePath
from typing import Any

import computing
from forged import KINDS, forged

import rdmacm
from rdmacm.soft.wire import sockets

ROCE_PORT, DECOY_PORT, SERVICE_PORT = 4791, 4790, 7471
SERVER, CLIENT = "10.81.1.1", "10.81.1.2"
TARGET, STRANGER = "10.81.2.1", "10.81.2.2"
#: The addresses of "many" are in this network, 10.82.0.0/16.
MANY = 10 << 24 | 82 << 16
MESSAGE = bytes(64)
#: How the names of counters begin that count packets without an effect.
DROPS = ("dropped_", "rx_request_flood", "rx_address", "rx_unknown_qp", "stray")
#: Seconds that a client waits for a connection or a message.
PATIENCE = 30.0
#: Seconds of the flood, for each newcomer, in which no request is sent again.
FRESH = 7.0
#: How often the two ways of sending alternate: other work of the machine then disturbs both.
PHASES = 4


# -- the server and the clients -------------------------------------------------------------------------------------


def echo(connection: rdmacm.Connection) -> None:
    with suppress(rdmacm.RdmaError), connection:
        for message in connection:
            connection.send(message)


def serve() -> None:
    """For each line of input, print what was counted and logged so far, the memory in KiB, and the processor time."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)

    def accept() -> None:
        while True:
            threading.Thread(target=echo, args=(listener.accept(),), daemon=True).start()

    with rdmacm.listen((None, SERVICE_PORT)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        print("ready", flush=True)
        for _ in sys.stdin:
            counters = rdmacm.query_counters()
            counts: Counter[str] = Counter()
            for part in (counters.cm, counters.udp, counters.errors, *counters.devices.values()):
                counts.update(part)
            with open("/proc/self/statm") as file:
                resident = int(file.read().split()[1]) * (os.sysconf("SC_PAGESIZE") // 1024)
            found = {"counters": counts, "resident": resident, "logged": logged, "processor": time.process_time()}
            print(json.dumps(found), flush=True)


def decoy() -> None:
    """Keep a UDP port open that nobody reads."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", DECOY_PORT))
        print("ready", flush=True)
        sys.stdin.read()


def client() -> None:
    """For each line of input, a number of seconds: exchange messages, and print how many.

    Before that, print the number of the server's queue pair.
    """
    with rdmacm.connect((SERVER, SERVICE_PORT), timeout=PATIENCE) as connection:
        attr, _ = connection.id.qp.query()
        print("ready", flush=True)
        print(attr.dest_qp_num, flush=True)
        is_owed = False  # the server has not sent the last message back yet
        for line in sys.stdin:
            until, rounds = time.monotonic() + float(line), 0
            while (left := until - time.monotonic()) > 0:
                if not is_owed:
                    connection.send(MESSAGE)
                try:
                    connection.recv(left)
                except rdmacm.CmTimeoutError:
                    is_owed = True
                    break
                is_owed = False
                rounds += 1
            print(rounds, flush=True)


def newcomer() -> None:
    """For each line of input: connect, and print the seconds that it took."""
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.monotonic()
        try:
            connection = rdmacm.connect((SERVER, SERVICE_PORT), timeout=PATIENCE)
        except rdmacm.RdmaError as error:
            print(json.dumps(str(error)), flush=True)
            continue
        print(time.monotonic() - began, flush=True)
        connection.close()


# -- the flood ------------------------------------------------------------------------------------------------------


def flood(kind: str, rate: int, count: int, many: bool, qpn: int) -> None:
    """Two lines of input: begin to send to a port, and end. Print how many were sent each second."""
    sock = sockets.open_socket(socket.AF_INET, ROCE_PORT + 1)
    assert sock is not None
    network = MANY if many else None
    packets = list(forged(kind, count, STRANGER, TARGET, network, 0x01060000 + SERVICE_PORT, qpn, 1))
    controls = {source: sockets.control(source, 0, 0) for source, _ in packets}
    prepared = [(controls[source], (packet,)) for source, packet in packets]
    print("ready", flush=True)
    used: Counter[int] = Counter()  # by port, so that no packet is sent twice to one
    while line := sys.stdin.readline().strip():
        address, began, sent = (TARGET, int(line)), time.monotonic(), 0
        first = used[address[1]]
        while not select.select([0], [], [], 0.001)[0]:
            for _ in range(int((time.monotonic() - began) * rate) - sent):
                control, buffers = prepared[(first + sent) % count]
                sent += 1
                with suppress(OSError):  # an ICMP error of an earlier datagram, or a full queue
                    sock.sendmsg(buffers, control, 0, address)
        sys.stdin.readline()
        used[address[1]] += sent
        print(sent / (time.monotonic() - began), flush=True)


# -- namespaces and processes ---------------------------------------------------------------------------------------


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL)


@contextmanager
def namespaces() -> Iterator[dict[str, str]]:
    """The names of three namespaces: server, client, stranger. The server has a link to each of the others."""
    names = {role: f"rdmacm-flood-{role}-{os.getpid()}" for role in ("server", "client", "stranger")}
    made: list[str] = []
    try:
        for name in names.values():
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
            for setting in ("all", "default"):
                ip("netns", "exec", name, "sysctl", "-q", "-w", f"net.ipv4.conf.{setting}.rp_filter=0")
        for role, ours, theirs in (("client", SERVER, CLIENT), ("stranger", TARGET, STRANGER)):
            near, far = f"to-{role}", "eth0"
            ip("-n", names["server"], "link", "add", near, "type", "veth", "peer", far, "netns", names[role])
            for name, link, address in ((names["server"], near, ours), (names[role], far, theirs)):
                ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
        for name in names.values():
            while b"state DOWN" in subprocess.check_output(["ip", "-n", name, "link"], stderr=subprocess.DEVNULL):
                time.sleep(0.01)
        network = f"{ip_address(MANY)}/16"
        ip("-n", names["server"], "route", "add", network, "via", STRANGER)
        ip("-n", names["stranger"], "route", "add", "local", network, "dev", "lo")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


class Role:
    """A process that plays a part in a namespace, and takes orders by lines."""

    def __init__(self, namespace: str, *arguments: str) -> None:
        command = ["ip", "netns", "exec", namespace, sys.executable, str(FilePath(__file__).resolve()), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.line() != "ready":
            raise SystemExit(f"{arguments[0]} does not start")

    def order(self, line: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def answer(self, line: object) -> Any:
        self.order(line)
        return json.loads(self.line() or "null")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def measure(kind: str, rate: int, seconds: float, newcomers: int, many: bool) -> dict[str, Any]:
    roles: list[Role] = []

    def role(namespace: str, *arguments: object) -> Role:
        roles.append(Role(names[namespace], *map(str, arguments)))
        return roles[-1]

    with namespaces() as names:
        try:
            role("server", "decoy")
            server = role("server", "serve")
            established, coming = role("client", "client"), role("client", "newcomer")
            qpn = json.loads(established.line())
            stranger = role("stranger", "flood", kind, rate, int(rate * (seconds + newcomers * FRESH)), many, qpn)
            found: dict[str, Any] = {"kind": kind, "sources": "many" if many else "one", "rate": rate}
            found["newcomer_quiet_seconds"] = coming.answer("go")
            established.answer(seconds / 4)
            rounds = {DECOY_PORT: 0, ROCE_PORT: 0}
            before, flooding = server.answer("report"), 0.0
            processor, mark = dict.fromkeys(rounds, 0.0), before["processor"]
            for _ in range(PHASES):
                for port in rounds:
                    stranger.order(port)
                    began = time.monotonic()
                    rounds[port] += established.answer(seconds / PHASES)
                    sent = stranger.answer("end")
                    start, mark = mark, server.answer("report")["processor"]
                    processor[port] += mark - start
                    flooding += sent * (time.monotonic() - began) if port == ROCE_PORT else 0.0
            stranger.order(ROCE_PORT)
            found["newcomers"] = [coming.answer("go") for _ in range(newcomers)]
            found["sent"] = stranger.answer("end")
            found["received"] = round(flooding)
            after = server.answer("report")
            per_round = processor[DECOY_PORT] / max(1, rounds[DECOY_PORT])
            spent = processor[ROCE_PORT] - rounds[ROCE_PORT] * per_round
            found["microseconds_per_packet"] = round(spent / max(1.0, flooding) * 1e6, 1)
            counts = {name: count - before["counters"].get(name, 0) for name, count in after["counters"].items()}
            found["counters"] = {name: count for name, count in counts.items() if count and not name.startswith("tx_")}
            found["dropped"] = sum(counts.get(name, 0) for name in counts if name.startswith(DROPS))
            found["grown_kib"], found["logged"] = after["resident"] - before["resident"], after["logged"]
            found["quiet"], found["flood"] = (count / seconds for count in rounds.values())
            found["ratio"] = found["flood"] / found["quiet"]
            return found
        finally:
            for one in roles:
                one.close()


def measure_computing(kinds: tuple[str, ...], rates: tuple[int, ...], seconds: float) -> Iterator[dict[str, Any]]:
    with namespaces() as names:
        # So that the stranger may have the client's address, and reach the one that the client is connected to.
        ip("-n", names["stranger"], "route", "add", "local", f"{CLIENT}/32", "dev", "lo")
        ip("-n", names["stranger"], "route", "add", f"{SERVER}/32", "via", TARGET)
        for kind in kinds:
            for rate in rates:
                roles: list[Role] = []

                def role(namespace: str, *arguments: object, roles: list[Role] = roles) -> Role:
                    roles.append(Role(names[namespace], *map(str, arguments)))
                    return roles[-1]

                try:
                    yield computing.measure(kind, rate, seconds, role, (SERVER, CLIENT, TARGET, STRANGER))
                finally:
                    for one in roles:
                        one.close()


def main_computing(options: argparse.Namespace) -> int:
    kinds = computing.KINDS if options.kind in (None, "each") else (options.kind,)
    rates = (1_000, 10_000, 100_000) if options.rate is None else (options.rate,)
    found = []
    for row in measure_computing(kinds, rates, options.seconds):
        found.append(row)
        if not options.json:
            print(f"{row['kind']} at {row['rate']:,} a second ({row['sent']:,.0f} were sent), a server that computes")
            quiet, flood, lost = row["quiet"], row["flood"], "; the connection was LOST" if row["lost"] else ""
            print(f"  READs a second: quiet {quiet:,.0f}, flood {flood:,.0f}, ratio {row['ratio']:.2f}{lost}")
            print("  " + ", ".join(f"{name} {count:,}" for name, count in sorted(row["counters"].items())), flush=True)
    if options.json:
        print(json.dumps(found))
    return 0


ROLES = {"serve": serve, "decoy": decoy, "client": client, "newcomer": newcomer, "victim": computing.victim}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = sorted({*KINDS, *computing.KINDS, "all", "each"})
    parser.add_argument("--kind", choices=kinds, help="what the stranger sends; by default req")
    parser.add_argument("--rate", type=int, help="packets a second; by default 10,000")
    parser.add_argument("--computing", action="store_true", help="the server computes")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long rounds are counted, each way")
    parser.add_argument("--newcomers", type=int, default=3, help="clients that connect in the flood, one by one")
    parser.add_argument("--sources", choices=("one", "many", "both"), default="both")
    parser.add_argument("--json", action="store_true", help="one JSON list")
    options = parser.parse_args()
    if options.computing:
        return main_computing(options)
    options.kind, options.rate = options.kind or "req", options.rate or 10_000
    if options.kind not in (*KINDS, "all", "each"):
        parser.error(f"{options.kind} is for --computing")
    found = [
        measure(kind, options.rate, options.seconds, options.newcomers, sources == "many")
        for kind in (KINDS if options.kind == "each" else (options.kind,))
        for sources in ("one", "many")
        if options.sources in (sources, "both")
    ]
    if options.json:
        print(json.dumps(found))
        return 0
    for row in found:
        print(f"{row['rate']:,} {row['kind']} a second from {row['sources']} ({row['sent']:,.0f} were sent)")
        print(f"  rounds a second: quiet {row['quiet']:,.0f}, flood {row['flood']:,.0f}, ratio {row['ratio']:.2f}")
        times = ", ".join(str(one) if isinstance(one, str) else f"{one:.3f} s" for one in row["newcomers"])
        drops = ", ".join(f"{name} {count:,}" for name, count in sorted(row["counters"].items()))
        print(f"  of about {row['received']:,}, {row['dropped']:,} are counted as dropped ({drops})")
        print(f"  the server's processor time: {row['microseconds_per_packet']} us for each packet")
        print(f"  memory {row['grown_kib']:+,} KiB; {len(row['logged'])} messages logged")
        print(f"  newcomers connected in {times}; without a flood in {row['newcomer_quiet_seconds']:.3f} s")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["flood"]:
        flood(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "True", int(sys.argv[6]))
    elif sys.argv[1:2] == ["strangers"]:
        kind, rate, source, target, peer, number = sys.argv[2:]
        computing.flood(kind, int(rate), source, target, peer, int(number))
    elif sys.argv[1:2] == ["peer"]:
        computing.peer(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    elif sys.argv[1:2] == ["reader"]:
        computing.reader(sys.argv[2])
    elif len(sys.argv) == 2 and sys.argv[1] in ROLES:
        ROLES[sys.argv[1]]()
    else:
        sys.exit(main())
