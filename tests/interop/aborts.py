"""Clients that abort at each step of the handshake; the server serves the next one, and keeps nothing of them.

    python3 -m interop.aborts PROVIDER HOST KIND SEED COUNT [OPTION...]

``KIND`` is one of :mod:`interop.abort_servers`. The seed draws of each client its tool, the step at which it aborts and
how. After each batch a good client exchanges a message, while silent clients keep their connections and after they have
left, and the objects of the server and of the kernel are counted. Options: ``iwarp`` for a device of iWARP, ``c`` for
librdmacm's programs as clients as well, and ``vanish`` for clients of the software device (in the namespace ``soft``
for a server of the kernel's) whose death nobody reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable

import rdmacm
from interop.abort_servers import COUNT, IDLE, SERVERS, SIZE
from rdmacm import CmEventType, CmId, ConnParam, EventChannel, RdmaError, aio
from support.clock import Stopwatch, eventually, pause
from support.own_network import enter_own_network

E = CmEventType
PORT = 7540
#: Seconds for a good client.
PATIENCE = 30.0
#: Seconds until the kernel gives a half-open connection up: 15 retries of 4.3 s; and a silent connection's end.
VANISHED = 120.0
#: Clients of one batch.
BATCH = 50
#: Clients that a process has at once when it is killed.
THREADS = 4
#: The queue pair that a client names which has none.
NO_QP = 77


class Abandoned(Exception):
    """The server has ended the connection first."""


class Campaign:
    """One server, and what its clients have done to it."""

    def __init__(self, provider: str, host: str, kind: str, seed: int, options: set[str]) -> None:
        self.provider, self.host, self.kind, self.options = provider, host, kind, options
        self.draw = random.Random(f"{seed} {provider} {host} {kind}")
        self.counts: Counter[str] = Counter()
        #: Ids whose clients say nothing any more, with their channels.
        self.silent: list[tuple[CmId, EventChannel]] = []
        #: Clients whose death nobody has reported.
        self.vanished = 0
        self.port = PORT + list(SERVERS).index(kind)
        self.server = forked(lambda ready: SERVERS[kind](provider, host, self.port, ready))
        #: A connection that lasts, which asks for the counts.
        self.asking = self.connect()
        self.good()
        self.abort_id("established", "destroy")  # makes the default protection domain of this process
        self.before = self.settled()

    # -- what has to hold -----------------------------------------------------------------------------

    def connect(self) -> rdmacm.Connection:
        return rdmacm.connect((self.host, self.port), provider=self.provider, timeout=PATIENCE, max_message=SIZE)

    def good(self) -> None:
        """A client that is served."""
        with self.connect() as connection:
            connection.send(b"hello")
            assert connection.recv(PATIENCE) == b"hello"

    def settled(self) -> dict[str, int]:
        """The objects when no connection ends any more."""
        before = self.objects()
        while True:
            pause(0.2, "connections end")
            now = self.objects()
            if now == before:
                return now
            before = now

    def objects(self) -> dict[str, int]:
        """The objects of the server by its own count, and those of all processes by the kernel's."""
        gc.collect()
        self.asking.send(COUNT)
        found: dict[str, int] = json.loads(self.asking.recv(PATIENCE))
        if self.provider == "kernel":
            shown = subprocess.run(["rdma", "resource", "show", "-j"], check=True, capture_output=True).stdout
            for device in json.loads(shown):
                found |= {
                    f"{device['ifname']} {name}": n
                    for name, n in device.items()
                    if name != "ifindex" and isinstance(n, int)
                }
        return found

    def check(self) -> None:
        """Nothing is left of the clients, but of those whose death nobody has reported."""
        # On siw, some connections of the server end by its own limits alone.
        self.await_less(lambda n: n > 2 * self.vanished, IDLE + PATIENCE)

    def excess(self) -> dict[str, int]:
        now = self.objects()
        return {name: n - self.before.get(name, 0) for name, n in now.items() if n > self.before.get(name, 0)}

    def end(self) -> None:
        """Nothing is left, also of the clients that vanished."""
        self.await_less(lambda _: True, VANISHED)

    def await_less(self, is_too_many: Callable[[int], bool], seconds: float) -> None:
        """Wait until there are not too many objects of any kind more than before."""
        watch = Stopwatch()
        while any(map(is_too_many, (found := self.excess()).values())):
            left = f"left behind: {found}, before: {self.before}; {dict(self.counts)}"
            assert watch.seconds < seconds, left
            pause(0.05, left)

    def stop(self) -> None:
        os.kill(self.server, signal.SIGKILL)
        os.waitpid(self.server, 0)

    # -- batches --------------------------------------------------------------------------------------

    def batch(self, count: int) -> int:
        """At least ``count`` aborts; returns how many."""
        done, draw = 0, self.draw
        while done < count:
            tool = draw.choices(*zip(*self.tools(), strict=True))[0]
            done += tool()
            self.objects()  # for the server not to end this connection
        self.good()
        self.release()
        self.good()
        self.check()
        return done

    def tools(self) -> list[tuple[Callable[[], int], int]]:
        """The kinds of clients, with how often each is drawn."""
        found: list[tuple[Callable[[], int], int]] = [
            (self.draw_id, 20),
            (self.abort_connect, 10),
            (self.abort_tasks, 2),
        ]
        if self.provider == "kernel" or "vanish" in self.options:
            found.append((self.kill_process, 1))
        if "c" in self.options:
            found.append((self.kill_program, 1))
        if self.provider == "kernel" and "vanish" in self.options:
            found.append((self.vanish, 1))
        return found

    def count(self, *names: str, number: int = 1) -> int:
        self.counts[" ".join(names)] += number
        return number

    # -- clients in this process ----------------------------------------------------------------------

    def draw_id(self) -> int:
        step = self.draw.choice(["requested", "replied", "established", "served"])
        if step == "replied" and "iwarp" in self.options:  # where the queue pair has to exist
            step = "requested"
        how = self.draw.choice(["destroy", "close", "silent"] + ["reject"] * (step == "replied"))
        return self.abort_id(step, how)

    def abort_id(self, step: str, how: str) -> int:
        """A bare id that stops at a step: destroyed, or rejecting, or silent until the batch is over."""
        channel = EventChannel(self.provider)
        cmid = CmId(channel)
        try:
            self.walk(cmid, step)
        except Abandoned:
            how = "destroy"
        if how == "silent":
            self.silent.append((cmid, channel))
        else:
            if how == "reject":
                cmid.reject(b"no")
            if how != "close":
                cmid.destroy()
            channel.close()
            cmid.destroy()
        return self.count("ids", step, how)

    def walk(self, cmid: CmId, step: str) -> None:
        """Take an id to a step of the handshake."""
        cmid.resolve_addr((self.host, self.port))
        expect(cmid, E.ADDR_RESOLVED)
        cmid.resolve_route()
        expect(cmid, E.ROUTE_RESOLVED)
        if step == "replied" or (step == "requested" and self.draw.random() < 0.5 and "iwarp" not in self.options):
            cmid.connect(ConnParam(qp_num=NO_QP))
        else:
            cmid.create_qp()
            cmid.connect()
        if step == "requested":
            return
        if step == "replied":
            expect(cmid, E.CONNECT_RESPONSE)
            return
        expect(cmid, E.ESTABLISHED)
        if step == "served":
            with cmid.reg_msgs(bytearray(SIZE)) as region:
                cmid.post_send(1, region, length=8)
                cmid.get_send_comp(PATIENCE)

    def release(self) -> None:
        for cmid, channel in self.silent:
            cmid.destroy()
            channel.close()
        self.silent.clear()

    def abort_connect(self) -> int:
        """A call of :func:`rdmacm.connect` whose time is up in its midst."""
        limit = self.draw.uniform(0, 0.04)
        how = "closed"
        try:
            connection = rdmacm.connect((self.host, self.port), provider=self.provider, timeout=limit, max_message=SIZE)
        except RdmaError:
            how = "timeout"
        else:
            connection.close()
        return self.count("connect", how)

    def abort_tasks(self) -> int:
        """Tasks of an event loop that are cancelled while they connect."""
        times = [self.draw.uniform(0, 0.1) for _ in range(8)]

        async def connect() -> None:
            with contextlib.suppress(RdmaError):
                async with await aio.connect((self.host, self.port), provider=self.provider, max_message=SIZE):
                    pass

        async def cancel(limit: float) -> None:
            task = asyncio.create_task(connect())
            await asyncio.wait([task], timeout=limit)
            task.cancel()
            await asyncio.wait([task])

        async def run() -> None:
            await asyncio.gather(*map(cancel, times))

        asyncio.run(run())
        return self.count("aio cancelled", number=len(times))

    # -- clients that are killed ----------------------------------------------------------------------

    def kill_process(self) -> int:
        """A process whose threads connect again and again."""
        number = self.draw.choice([signal.SIGKILL, signal.SIGINT])
        self.kill(lambda ready: hammer(self.provider, self.host, self.port, ready), number)
        if self.provider == "soft":  # nobody disconnects for it
            self.vanished += THREADS
        return self.count("process", number.name, number=THREADS)

    def vanish(self) -> int:
        """A process of the software device in another namespace: nobody answers for it when it is killed."""
        from interop.machine.warm import enter

        def run(ready: Callable[[], object]) -> None:
            enter("soft")
            hammer("soft", self.host, self.port, ready)

        self.kill(run, signal.SIGKILL)
        self.vanished += THREADS
        return self.count("process vanished", number=THREADS)

    def kill(self, run: Callable[[Callable[[], object]], object], number: signal.Signals) -> None:
        moment = self.draw.uniform(0, 0.3)
        pid = forked(run)
        pause(moment, "it is ended at a random moment")
        ended(pid, number)

    def kill_program(self) -> int:
        """One of librdmacm's programs."""
        port = str(self.port)
        programs = {
            "rping": ["rping", "-c", "-a", self.host, "-p", port],
            "ucmatose": ["ucmatose", "-s", self.host, "-p", port, "-c", "4", "-C", "10000"],
            "rdma_client": ["rdma_client", "-s", self.host, "-p", port],
        }
        if self.kind == "ids" and "iwarp" not in self.options:
            programs["udaddy"] = ["udaddy", "-s", self.host, "-p", port]
        name = self.draw.choice(list(programs))
        number = self.draw.choice([signal.SIGKILL, signal.SIGINT])
        moment = self.draw.uniform(0, 0.1)
        null = subprocess.DEVNULL
        with subprocess.Popen(programs[name], stdin=null, stdout=null, stderr=null) as process:
            pause(moment, "it is ended at a random moment")
            process.send_signal(number)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        return self.count(name, number.name)


def expect(cmid: CmId, kind: CmEventType) -> None:
    """The next event of an id whose server may have ended it: it has no more room for silent clients."""
    with cmid.channel.get_event(PATIENCE) as event:
        if event.type in (E.REJECTED, E.UNREACHABLE, E.DISCONNECTED):
            raise Abandoned
        assert event.type is kind, event


def hammer(provider: str, host: str, port: int, ready: Callable[[], object]) -> None:
    """Connect in several threads, until a signal comes."""

    def run() -> None:
        while True:
            with contextlib.suppress(RdmaError):
                with rdmacm.connect((host, port), provider=provider, timeout=PATIENCE, max_message=SIZE) as connection:
                    connection.send(b"hello")
                    connection.recv(PATIENCE)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(THREADS - 1)]
    for thread in threads:
        thread.start()
    ready()
    run()


def forked(run: Callable[[Callable[[], object]], object]) -> int:
    """A child that calls ``run``, and has told that it is ready; its number."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            try:
                run(lambda: os.write(writing, b"x"))
            except Exception as error:
                print("in a child:", repr(error), file=sys.stderr, flush=True)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1) == b"x", "a process has failed before it was ready"
    os.close(reading)
    return pid


def ended(pid: int, number: signal.Signals) -> None:
    """End a child by a signal; by SIGKILL where the signal does not do it."""
    os.kill(pid, number)
    eventually(lambda: os.waitpid(pid, os.WNOHANG)[0], f"{number.name} does not end a client")


def main() -> None:
    provider, host, kind, seed, count, *options = sys.argv[1:]
    if provider == "soft" and "vanish" not in options:
        # Processes of the same UDP port have sockets for each other, so the counts would change with other tests.
        enter_own_network()
    campaign = Campaign(provider, host, kind, int(seed), set(options))
    done = 0
    try:
        while done < int(count):
            done += campaign.batch(min(BATCH, int(count) - done))
        campaign.end()
    finally:
        print(f"{kind}: {done} aborts: {dict(sorted(campaign.counts.items()))}", flush=True)
        campaign.stop()
    print("served after each batch; the counts are as before:", campaign.before)


if __name__ == "__main__":
    main()
