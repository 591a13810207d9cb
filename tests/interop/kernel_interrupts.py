"""Waits of the provider ``kernel`` and what may come between: signals, forks, the collector, the removal of the device.

python3 -m interop.kernel_interrupts [NAME...]
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import rdmacm
from interop.kernel_churn import HERE, PATIENCE, PORT, Ends, descriptors, progress, resources
from rdmacm import CmEventType, CmId, EventChannel, PortSpace, RdmaError
from rdmacm.verbs import CQ, MR, WC, WCStatus
from support.clock import eventually, pause

E = CmEventType
SIGNALS = 1000
SEED = 1
#: The errors of calls on what a removed device had.
GONE = (errno.ENODEV, errno.ENXIO, errno.ECONNRESET, errno.EIO, errno.EBADF)


class Pair:
    """Two ids of a channel with queue pairs and regions, connected.

    ``again`` makes each wait, and ``act`` the call before it, which has what is waited for as its result.
    """

    def __init__(
        self,
        ends: Ends,
        again: Callable[[Callable[[], Any]], Any] = lambda wait: wait(),
        act: Callable[[Callable[[], object]], object] = lambda call: call(),
    ) -> None:
        self.channel, self.again, self.act = ends.channel, again, act
        self.active = CmId(ends.channel)
        act(lambda: self.active.resolve_addr((HERE, PORT)))
        self.events(E.ADDR_RESOLVED)
        act(self.active.resolve_route)
        self.events(E.ROUTE_RESOLVED)
        self.active.create_qp()
        act(self.active.connect)
        self.passive: CmId = self.events(E.CONNECT_REQUEST)[0].id
        self.passive.create_qp()
        self.received = bytearray(64)
        self.sending, self.receiving = self.active.reg_msgs(bytearray(64)), self.passive.reg_msgs(self.received)
        self.passive.post_recv(1, self.receiving)
        act(self.passive.accept)
        self.events(E.ESTABLISHED, E.ESTABLISHED)

    def events(self, *kinds: CmEventType) -> list[Any]:
        """The next events, which are of these kinds and no others."""
        found = []
        for _ in kinds:
            with self.again(lambda: self.channel.get_event(PATIENCE)) as event:
                assert event.status == 0, event
                found.append(event)
        assert sorted(event.type for event in found) == sorted(kinds), found
        return found

    def move(self) -> None:
        self.act(lambda: self.active.post_send(2, self.sending))
        for wait in (self.active.get_send_comp, self.passive.get_recv_comp):
            found: WC = self.again(partial(wait, PATIENCE))
            assert found.status is WCStatus.SUCCESS, found

    def disconnect(self) -> None:
        self.act(self.active.disconnect)
        self.events(E.DISCONNECTED, E.DISCONNECTED)

    def close(self) -> None:
        for part in (self.sending, self.receiving):
            part.close()
        for end in (self.active, self.passive):
            end.destroy_qp()
            end.destroy()


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the errno that it raises."""
    try:
        return call()
    except RdmaError as error:
        return error.errno


# -- signals --------------------------------------------------------------------------------------------


def ctrl_c_ends_each_wait() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ends = Ends()
    pair = Pair(ends)
    cq, channel = pair.passive.recv_cq, pair.passive.recv_cq_channel
    assert cq is not None
    assert channel is not None
    listener = rdmacm.listen((HERE, PORT + 20), provider="kernel")
    synchronous = CmId(provider="kernel")
    synchronous.bind_addr((HERE, PORT + 21))
    synchronous.listen()
    unanswered = CmId(provider="kernel")
    unanswered.resolve_addr((HERE, PORT + 21))
    unanswered.resolve_route()
    unanswered.create_qp()
    waits: dict[str, Callable[[], object]] = {
        "get_event": ends.channel.get_event,
        "get_request": synchronous.get_request,
        "connect": unanswered.connect,
        "accept": listener.accept,
        "get_recv_comp": pair.passive.get_recv_comp,
        "get_cq_event": channel.get_cq_event,
        "cq": cq.wait,
    }
    for name, wait in waits.items():
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            wait()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError(f"{name} was not interrupted")
        timer.join()
    pair.move()
    pair.disconnect()
    pair.close()
    for each in (unanswered, synchronous):
        each.destroy()
    listener.close()
    ends.close()


def a_wait_lets_other_threads_run() -> None:
    with EventChannel("kernel") as channel, CmId(channel) as cmid:
        cmid.bind_addr((HERE, 0))
        with CQ(cmid.verbs, 5) as cq:
            for wait in (channel.get_event, cq.wait):
                counts = [0]
                is_over = threading.Event()

                def count(counts: list[int] = counts, is_over: threading.Event = is_over) -> None:
                    while not is_over.is_set():
                        counts[0] += 1

                thread = threading.Thread(target=count)
                thread.start()
                before = time.thread_time()
                with contextlib.suppress(rdmacm.CmTimeoutError):
                    wait(0.5)
                own = time.thread_time() - before
                is_over.set()
                thread.join()
                assert counts[0] > 1000, counts
                assert own < 0.25, own


class Interrupted(Exception):
    pass


class Storm:
    """Signals of another process at random times, whose handler raises in some of the waits that they interrupt."""

    def __init__(self) -> None:
        self.random = random.Random(SEED)
        self.calls = self.raised = 0
        self.actions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.actor = threading.Thread(target=self._act)
        signal.signal(signal.SIGUSR1, self._handle)
        receiver = os.getpid()
        self.sender = os.fork()
        if self.sender == 0:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            times = random.Random(SEED)
            while os.getppid() == receiver:
                pause(times.uniform(0, 0.004), "the receiver goes on")
                os.kill(receiver, signal.SIGUSR1)
            os._exit(0)

        self.actor.start()

    def _act(self) -> None:
        times = random.Random(SEED + 1)
        while (call := self.actions.get()) is not None:
            pause(times.uniform(0, 0.004), "the receiver goes on")
            call()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.calls += 1
        # Not between a call and what the program does with its result: there Python itself would lose that.
        while frame is not None and frame.f_globals.get("__name__") == "rdmacm.interrupts.handlers":
            frame = frame.f_back
        is_in_a_wait = frame is not None and frame.f_globals.get("__name__") == "rdmacm.progress.wake"
        if is_in_a_wait and self.random.random() < 0.5:
            self.raised += 1
            raise Interrupted

    def again(self, wait: Callable[[], Any]) -> Any:
        """What a wait returns, which is repeated when it is interrupted."""
        while True:
            try:
                return wait()
            except Interrupted:
                continue

    def end(self) -> None:
        self.actions.put(None)
        self.actor.join()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.kill(self.sender, signal.SIGKILL)
        os.waitpid(self.sender, 0)


def no_event_is_lost_to_a_signal() -> None:
    """1,000 signals while connections are made, used and ended: every event and completion comes, once."""
    storm = Storm()  # handlers are seen at once where they are older than the first channel
    ends = Ends()
    connections = 0
    while storm.calls < SIGNALS:
        pair = Pair(ends, storm.again, storm.actions.put)
        pair.move()
        pair.disconnect()
        pair.close()
        connections += 1
    storm.end()
    try:
        raise AssertionError(ends.channel.get_event(0))
    except rdmacm.CmWouldBlockError:
        pass
    ends.close()
    assert storm.raised > SIGNALS // 20, storm.raised
    print(f"{storm.calls} signals, {storm.raised} of which ended a wait; {connections} connections")


# -- forks ----------------------------------------------------------------------------------------------


def a_connection_belongs_to_the_parent() -> None:
    ends = Ends()
    pair = Pair(ends)
    child = os.fork()
    if child == 0:
        try:
            for call in (
                lambda: ends.channel.get_event(1),
                lambda: pair.active.post_send(1, pair.sending),
                lambda: pair.passive.get_recv_comp(1),
                lambda: MR(pair.active.pd, bytearray(64), 1),
                pair.active.disconnect,
                ends.listeners[PortSpace.TCP].listen,
            ):
                assert outcome(call) == errno.EBADF, call
            pair.close()
            ends.close()
            gc.collect()
            os._exit(0)
        except BaseException as error:
            print("in the child:", repr(error), flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    pair.move()
    pair.disconnect()
    pair.close()
    ends.close()


def a_peer_that_leaves_at_once_has_disconnected() -> None:
    """Its answer may be here before its acknowledgement, which the end of the queue pair discards."""
    reading, writing = os.pipe()
    server = os.fork()
    if server == 0:
        with rdmacm.listen((HERE, PORT + 50), provider="kernel") as listener:
            os.write(writing, b"x")
            while True:
                with contextlib.suppress(RdmaError), listener.accept() as peer:
                    peer.send(peer.recv(PATIENCE))
    os.read(reading, 1)
    for _ in range(100):
        with rdmacm.connect((HERE, PORT + 50), provider="kernel") as client:
            reason: str | None = "the peer has disconnected"
            try:
                client.send(b"hello")
            except rdmacm.CmDisconnectedError as error:
                reason = error.strerror
            assert reason == "the peer has disconnected"
            assert client.recv(PATIENCE) == b"hello"
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    for fd in (reading, writing):
        os.close(fd)


# -- the collector --------------------------------------------------------------------------------------


def references_are_dropped_in_any_order() -> None:
    """Parts of connections are forgotten in the order of a seeded shuffle, and some in cycles."""
    before, files = resources(), descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for seed in range(30):
            forget(random.Random(seed))
            gc.collect()
            progress()
    assert resources() == before, (resources(), before)
    assert descriptors() == files, (descriptors(), files)


def forget(order: random.Random) -> None:
    ends = Ends()
    pair = Pair(ends)
    server = rdmacm.listen((HERE, PORT + 30), provider="kernel")
    accepted: list[object] = []
    thread = threading.Thread(target=lambda accept: accepted.append(accept(PATIENCE)), args=[server.accept])
    thread.start()
    client = rdmacm.connect((HERE, PORT + 30), provider="kernel")
    thread.join()
    pair.active.post_send(2, pair.sending)
    held: list[object] = [server, client, client.register(bytearray(4096)), *accepted, ends, ends.channel]
    held += [*ends.listeners.values(), pair.sending, pair.receiving]
    for each in (pair.active, pair.passive):
        held += [each, each.qp, each.pd, each.send_cq, each.recv_cq, each.send_cq_channel, each.recv_cq_channel]
    accepted.clear()
    order.shuffle(held)
    if order.random() < 0.5:
        held[0:0] = [[*held[:3], held]]  # a cycle
    del ends, pair, server, client, each, thread
    while held:
        held.pop()
        if order.random() < 0.3:
            gc.collect()


# -- removal --------------------------------------------------------------------------------------------


def a_device_is_removed_under_connections_and_waits() -> None:
    ends = Ends()
    pair = Pair(ends)
    server = rdmacm.listen((HERE, PORT + 40), provider="kernel")
    accepted: list[rdmacm.Connection] = []
    thread = threading.Thread(target=lambda: accepted.append(server.accept(PATIENCE)))
    thread.start()
    client = rdmacm.connect((HERE, PORT + 40), provider="kernel")
    thread.join()
    cq = pair.active.send_cq
    assert cq is not None
    synchronous = CmId(provider="kernel")
    synchronous.bind_addr((HERE, PORT + 41))
    synchronous.listen()
    waits: dict[str, Callable[[], object]] = {
        "get_event": lambda: ends.channel.get_event(PATIENCE),
        "get_request": lambda: synchronous.get_request(PATIENCE),
        "cq": lambda: cq.wait(PATIENCE),
        "get_recv_comp": lambda: pair.active.get_recv_comp(PATIENCE),
        "client": lambda: client.recv(PATIENCE),
        "server": lambda: accepted[0].recv(PATIENCE),
        "accept": lambda: server.accept(PATIENCE),
    }
    found: dict[str, object] = {}
    threads = [
        threading.Thread(target=lambda key=key, call=call: found.setdefault(key, outcome(call)))
        for key, call in waits.items()
    ]
    for each in threads:
        each.start()
    pause(0.2, "the threads begin to wait")
    with subprocess.Popen(["rdma", "link", "delete", "rxe0"]) as removal:
        for each in threads:
            each.join()
        event = found.pop("get_event")
        assert isinstance(event, rdmacm.CmEvent), event
        kinds = [event.type]
        event.ack()
        while len(kinds) < 4:  # of both ends and both listeners
            with ends.channel.get_event(PATIENCE) as event:
                kinds.append(event.type)
        assert set(kinds) == {E.DEVICE_REMOVAL}, kinds
        assert all(code in GONE for code in found.values()), found
        for call in (lambda: pair.active.post_send(1, pair.sending), pair.active.create_qp):
            assert outcome(call) is not None, call
        outcome(pair.active.disconnect)  # it may still succeed: the device goes when its ids have gone
        pair.close()
        client.close()
        accepted[0].close()
        server.close()
        synchronous.destroy()
        ends.close()
        assert removal.wait(PATIENCE) == 0
    subprocess.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "va"], check=True)
    eventually(
        lambda: any(
            str(row.gid) == f"::ffff:{HERE}" for d in rdmacm.devices("kernel") for p in d.ports for row in p.gids
        )
    )
    again = Ends()
    again.connect(PortSpace.TCP)
    again.close()


RULES = (
    ctrl_c_ends_each_wait,
    a_wait_lets_other_threads_run,
    no_event_is_lost_to_a_signal,
    a_connection_belongs_to_the_parent,
    a_peer_that_leaves_at_once_has_disconnected,
    references_are_dropped_in_any_order,
    a_device_is_removed_under_connections_and_waits,
)


def main() -> None:
    before = resources()
    for rule in RULES:
        if sys.argv[1:] and rule.__name__ not in sys.argv[1:]:
            continue
        try:
            rule()
        except BaseException:
            print(f"{rule.__name__}:", file=sys.stderr)
            raise
    progress()
    assert resources() == before, (resources(), before)
    print("as expected")


if __name__ == "__main__":
    main()
