"""One scenario, two ends, any network: the same coroutines on a simulated fabric, between processes and namespaces.

A scenario has two coroutine functions, one for each end; each gets a :class:`Side`. A side awaits conditions.
On a :class:`~rdmacm.testing.Fabric` both run in this thread and virtual time passes until one of their conditions
holds; in processes each end waits for its own condition in real time.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from rdmacm import CmEvent, CmEventType, CmId, EventChannel, PortSpace, RdmaError
from rdmacm.address import InetAddr, parse_address
from rdmacm.provider import get_provider
from rdmacm.testing import Fabric
from rdmacm.verbs import CQ, WC, TransportType, WCStatus
from rdmacm.verbs.backend import DeviceBackend
from support.clock import LONGEST, eventually
from support.inherited import populate

T = TypeVar("T")
Scenario: TypeAlias = "Callable[[Side], Coroutine[Any, Any, Any]]"

#: Virtual seconds after which a scenario on a fabric has failed.
PATIENCE = 300.0


@contextmanager
def refused(code: int) -> Iterator[None]:
    """The call inside fails with this errno. (Scenarios also run where there is no pytest.)"""
    try:
        yield
    except RdmaError as error:
        if error.errno != code:
            raise
    else:
        raise AssertionError(f"the call succeeded, where errno {code} was expected")


class Until(Awaitable[T], Generic[T]):
    """Wait for a condition and return what it returns."""

    def __init__(self, done: Callable[[], T], what: str) -> None:
        self.done = done
        self.what = what

    def __await__(self) -> Generator[Until[T], T, T]:
        found = self.done()
        while not found:
            found = yield self
        return found


class Side:
    """One end: its address, and the conditions for which it can wait."""

    def __init__(self, provider: Any, address: str, peer: str, port: int) -> None:
        self.provider = provider
        self.address, self.peer, self.port = address, peer, port
        self.channel = EventChannel(provider)
        self.events: list[CmEvent] = []
        self.completions: dict[CQ, list[WC]] = {}
        #: The values that the other end has told, by name.
        self.heard: dict[str, Any] = {}
        self.tell: Callable[[str, Any], None]
        self.look: Callable[[], None] = lambda: None

    @property
    def device(self) -> DeviceBackend:
        """The device that has this end's address."""
        address = parse_address((self.address, self.port))
        assert isinstance(address, InetAddr)
        owner = self.provider.owner_of(address)
        assert owner is not None, f"no device has {self.address}"
        opened: DeviceBackend = self.provider.open_device(owner[0])
        return opened

    @property
    def is_iwarp(self) -> bool:
        """Whether the transport is iWARP."""
        return self.device.transport_type is TransportType.IWARP

    @property
    def is_rxe(self) -> bool:
        """Whether the device is Linux's rdma_rxe, which departs from the specification in what scenarios say there."""
        return bool(self.provider.name == "kernel" and self.device.attr.vendor_id == 0xFFFFFF)

    @property
    def is_siw(self) -> bool:
        """Whether the device is Linux's siw, which does not check that a region may be read."""
        return bool(self.provider.name == "kernel" and self.device.attr.vendor_id == 0x626D74)

    def padded(self, data: bytes, size: int) -> bytes:
        """Private data as the peer gets them: InfiniBand fills the message's field with zeros."""
        return data if self.is_iwarp else data.ljust(size, b"\0")

    def make_id(self, port_space: int = PortSpace.TCP, qp_type: int | None = None) -> CmId:
        return CmId(self.channel, port_space, qp_type=qp_type)

    # -- waiting --------------------------------------------------------------------------------------

    def _event(self) -> CmEvent | None:
        if not self.events and self.channel._queue.ready:  # type: ignore[attr-defined]
            self.events.append(self.channel.get_event(timeout=0))
        return self.events.pop(0) if self.events else None

    async def event(self, kind: CmEventType | None = None) -> CmEvent:
        """The next event; AssertionError if it is of another kind."""
        event = await Until(self._event, f"event {kind}")
        assert event is not None
        assert kind is None or event.type is kind, f"{event!r} where {kind} was expected"
        event.ack()
        return event

    async def completion(self, cq: CQ | None, status: WCStatus | None = WCStatus.SUCCESS) -> WC:
        """The next completion; AssertionError if it has another status (None: any)."""
        assert cq is not None
        waiting = self.completions.setdefault(cq, [])

        def done() -> WC | None:
            if not waiting:
                waiting.extend(cq.poll(64))
            return waiting.pop(0) if waiting else None

        wc = await Until(done, "a completion")
        assert wc is not None
        assert status is None or wc.status is status, wc
        return wc

    async def told(self, name: str) -> Any:
        """Wait until the other end tells the value of this name."""
        await Until(lambda: self.look() or name in self.heard, f"to be told {name}")
        return self.heard.pop(name)

    # -- the beginning of most scenarios --------------------------------------------------------------

    async def resolved(self, port_space: int = PortSpace.TCP, *, qp_type: int | None = None, **options: Any) -> CmId:
        """An id with a resolved route to the other end's port."""
        await self.told("listening")
        cmid = self.make_id(port_space, qp_type)
        cmid.resolve_addr((self.peer, self.port), **options)
        await self.event(CmEventType.ADDR_RESOLVED)
        cmid.resolve_route()
        await self.event(CmEventType.ROUTE_RESOLVED)
        return cmid

    def listening(self, backlog: int = 0, port_space: int = PortSpace.TCP, *, qp_type: int | None = None) -> CmId:
        """A listener on this end's address."""
        listener = self.make_id(port_space, qp_type)
        listener.bind_addr((self.address, self.port))
        listener.listen(backlog)
        self.tell("listening", None)
        return listener

    def close(self) -> None:
        for event in self.events:
            event.ack()
        self.channel.close()


# -- on a fabric --------------------------------------------------------------------------------------


class _Running:
    def __init__(self, side: Side, scenario: Scenario) -> None:
        self.side = side
        self.coroutine = scenario(side)
        self.waiting: Until[Any] | None = None
        self.found: Any = None
        self.result: Any = None
        self.over = False

    def step(self) -> None:
        found, self.found = self.found, None
        try:
            self.waiting = self.coroutine.send(found)
        except StopIteration as stop:
            self.over, self.result, self.waiting = True, stop.value, None

    def ready(self) -> bool:
        if self.waiting is not None and not self.found:
            self.found = self.waiting.done()
        return bool(self.found)


def run_on_fabric(
    fabric: Fabric, addresses: tuple[str, str], passive: Scenario, active: Scenario, port: int = 7471
) -> tuple[Any, Any]:
    """Run both ends in virtual time; returns the result of each."""
    hosts = [fabric.host(name, address) for name, address in zip(("passive", "active"), addresses, strict=True)]
    sides = [Side(host.provider, *ends, port) for host, ends in zip(hosts, (addresses, addresses[::-1]), strict=True)]
    for side, other in (sides, sides[::-1]):
        side.tell = other.heard.__setitem__
    running = [_Running(side, scenario) for side, scenario in zip(sides, (passive, active), strict=True)]
    try:
        for one in running:
            one.step()
        while not all(one.over for one in running):
            if not fabric.run(lambda: any(one.ready() for one in running), seconds=PATIENCE):
                waits = "; ".join(f"{one.waiting.what}" for one in running if one.waiting is not None)
                raise AssertionError(f"at {fabric.now:.3f} s they still wait: {waits}")
            for one in running:
                if one.found:
                    one.step()
    finally:
        for one in running:
            one.coroutine.close()
        for side in sides:
            side.close()
    return running[0].result, running[1].result


# -- in processes -------------------------------------------------------------------------------------


def run_here(side: Side, scenario: Scenario, link: socket.socket) -> Any:
    """Run one end in this process in real time; ``link`` is a socket to the process that passes on told values."""
    link.setblocking(False)
    buffer = bytearray()

    def tell(name: str, value: Any) -> None:
        message = pickle.dumps((name, value))
        link.sendall(len(message).to_bytes(4, "big") + message)

    def look() -> None:
        try:
            while chunk := link.recv(65536):
                buffer.extend(chunk)
            raise AssertionError("the other end has failed")
        except BlockingIOError:
            pass
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := int.from_bytes(buffer[:4], "big")):
            name, value = pickle.loads(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            side.heard[name] = value

    side.tell, side.look = tell, look
    # The kernel's channel has a descriptor that shows events, and no completions.
    longest = 5 if side.provider.name == "kernel" else 1000
    poll = select.poll()
    for fd in (side.channel.fileno(), link.fileno()):
        poll.register(fd, select.POLLIN)
    running = _Running(side, scenario)

    def ready() -> bool:
        if not running.ready():
            side.provider.drive(lambda: None, 0)
        if not running.ready():
            poll.poll(longest)
            side.provider.drive(lambda: None, 0)
        return running.ready()

    try:
        running.step()
        while not running.over:
            eventually(ready, f"still waiting: {running.waiting and running.waiting.what}")
            running.step()
    finally:
        running.coroutine.close()
        side.close()
    return running.result


_FORKER = """
import socket, sys
sys.path.insert(0, {tests!r})
from support import scenario
scenario.fork_children(socket.socket(fileno={fd}), {modules!r})
"""

Spawn: TypeAlias = "Callable[[list[str], tuple[int, ...]], subprocess.Popen[Any]]"


def spawn(command: list[str], fds: tuple[int, ...]) -> subprocess.Popen[Any]:
    """A child on this host."""
    return subprocess.Popen(command, pass_fds=fds)


class Forker:
    """A process that has only imported ``modules``, and forks a child for each end of a scenario.

    Importing takes most of the time of a short scenario.
    """

    def __init__(self, make: Spawn = spawn, modules: tuple[str, ...] = ("rdmacm.soft.provider",)) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _FORKER.format(tests=str(Path(__file__).parent.parent), fd=theirs.fileno(), modules=modules)
        self._process = make([sys.executable, "-c", code], (theirs.fileno(),))
        theirs.close()

    def fork(self, module: str, name: str, address: str, peer: str, port: int) -> socket.socket:
        """Run one end in a new process; returns a socket to it, which reads EOF when the process has ended."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [pickle.dumps((module, name, address, peer, port))], [theirs.fileno()])
        theirs.close()
        return ours

    def close(self) -> None:
        """End the process, and all its children."""
        self._control.close()
        self._process.wait()


def fork_children(control: socket.socket, modules: tuple[str, ...]) -> None:
    """The main loop of a forker. In a child it returns, so that the child ends as a program does.

    In a machine in user mode (RDMACM_QUICK_END), where memory takes long to get and to give back, a child gets what it
    inherits at once, and at its end only calls its exit handlers.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forker does not wait for its children
    for each in modules:
        importlib.import_module(each)
    gc.freeze()
    is_quick = bool(os.environ.get("RDMACM_QUICK_END"))
    while True:
        message, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            os.killpg(0, signal.SIGKILL)
        if not os.fork():
            if is_quick:
                populate()
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end: tuple[str, str, str, str, int] = pickle.loads(message)
            child_main(*end, socket.socket(fileno=fds[0]))
            if is_quick:
                atexit._run_exitfuncs()
                os._exit(0)
            return
        os.close(fds[0])


def child_main(module: str, name: str, address: str, peer: str, port: int, link: socket.socket) -> None:
    """The main function of a child: runs one end of a scenario and sends its outcome over the link."""
    loaded = next((each for each in sys.modules.values() if getattr(each, "__file__", None) == module), None)
    if loaded is None:
        spec = importlib.util.spec_from_file_location("scenarios", module)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    try:
        side = Side(get_provider(), address, peer, port)
        outcome = True, run_here(side, getattr(loaded, name), link)
    except BaseException:
        outcome = False, traceback.format_exc()
    message = pickle.dumps(("", outcome))
    link.setblocking(True)
    with suppress(BrokenPipeError):  # nobody asks any more, as the other end has failed
        link.sendall(len(message).to_bytes(4, "big") + message)
    link.detach()  # it stays open until the process has ended


def run_in_processes(
    addresses: tuple[str, str], passive: Scenario, active: Scenario, port: int, forkers: tuple[Forker, Forker]
) -> tuple[Any, Any]:
    """Run each end in a process of its own; returns the result of each. AssertionError with a child's traceback."""
    links = []
    for scenario, forker, ends in zip((passive, active), forkers, (addresses, addresses[::-1]), strict=True):
        module = sys.modules[scenario.__module__].__file__
        assert module is not None
        links.append(forker.fork(module, scenario.__qualname__, *ends, port))
    try:
        results = _relay(links)
        for link in links:
            link.settimeout(LONGEST)
            while link.recv(4096):
                pass  # until the process has ended
        return results
    finally:
        for link in links:
            link.close()


def _relay(links: list[socket.socket]) -> tuple[Any, Any]:
    """Pass on the values that the children tell each other, until both are done."""
    results: dict[int, Any] = {}
    while len(results) < 2:
        # A child that waits in vain says so itself, after LONGEST.
        ready, _, _ = select.select([link for i, link in enumerate(links) if i not in results], [], [], LONGEST + 5)
        assert ready, "the children do not end"
        for link in ready:
            index = links.index(link)
            header = _exactly(link, 4)
            message = _exactly(link, int.from_bytes(header, "big"))
            name, value = pickle.loads(message)
            if name:
                if 1 - index not in results:
                    links[1 - index].sendall(header + message)
                continue
            worked, outcome = value
            assert worked, f"{('passive', 'active')[index]} side:\n{outcome}"
            results[index] = outcome
    return results[0], results[1]


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = link.recv(size - len(data))
        assert chunk, "a child has died"
        data += chunk
    return data


def free_port() -> int:
    """A port number that other runs on this machine are unlikely to use at the same time."""
    # Not derived from the process id: the ids of concurrent test processes are consecutive.
    return random.SystemRandom().randrange(10000, 30000)
