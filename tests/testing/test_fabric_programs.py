"""Programs on a fabric: blocking functions and scripts, scheduled one at a time, in virtual time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rdmacm
from rdmacm import cma
from rdmacm.testing import Fabric, FaultScript, Host, SimulationError
from rdmacm.verbs import CQ, QPCap, QPInitAttr
from support.fabric import two

PORT = 7471
ROOT = Path(__file__).parents[2]

#: Starts programs on two hosts. The folder is for scripts.
Start = Callable[[Fabric, Host, Host, Path], "list[rdmacm.testing.Program[Any]]"]
#: Seeds of each test of programs on a lossy network.
SEEDS = range(int(os.environ.get("RDMACM_PROGRAM_SEEDS") or 5))


def serve() -> bytes:
    with rdmacm.listen(("10.0.0.2", PORT)) as listener, listener.accept() as connection:
        message = connection.recv()
        connection.send(message[::-1])
        return message


def ask(text: bytes = b"live") -> bytes:
    with rdmacm.connect(("10.0.0.2", PORT), timeout=60) as connection:
        connection.send(text)
        return connection.recv()


# -- functions ----------------------------------------------------------------------------------------------------


def test_a_server_and_a_client_that_block() -> None:
    with Fabric(seed=1) as fabric:
        a, b = two(fabric)
        server, client = b.start(serve), a.start(ask, b"stressed")
        assert not client.done, "nothing happens before the fabric runs"
        assert client.result() == b"desserts"
        assert server.result() == b"stressed"
        assert 0 < fabric.now < 1


def test_the_test_itself_may_be_the_client() -> None:
    with Fabric(seed=1) as fabric:
        a, b = two(fabric)
        b.start(serve)
        with a.as_default():
            assert ask() == b"evil"


def test_what_a_program_raises() -> None:
    with Fabric() as fabric:
        a, _ = two(fabric)
        with pytest.raises(rdmacm.CmTimeoutError, match="not connected within 60 s"):
            a.start(ask).result()
        assert fabric.now == 60


def test_waiting_for_ever_names_the_line() -> None:
    with Fabric() as fabric:
        _, b = two(fabric)
        with pytest.raises(SimulationError, match=r"program serve on host b waits for ever in .*test_fabric_programs"):
            b.start(serve).result()


def test_a_wait_that_needs_a_program_says_so() -> None:
    with Fabric() as fabric:
        _, b = two(fabric)
        with b.as_default(), pytest.raises(SimulationError, match=r"try: host\.start"):
            serve()


def test_a_thread_of_the_test_is_refused() -> None:
    fabric = Fabric()
    refused: list[str] = []

    def other() -> None:
        try:
            fabric.run(seconds=1)
        except SimulationError as error:
            refused.append(str(error))

    def run_in_a_thread() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    fabric.call_at(0, run_in_a_thread)
    fabric.run()
    assert len(refused) == 1
    assert "host.start" in refused[0]


def test_a_program_may_wait_for_another_one() -> None:
    with Fabric() as fabric:
        a, b = two(fabric)
        b.start(serve)
        client = a.start(ask)
        assert a.start(client.result).result() == b"evil"


def test_programs_that_are_left_end_with_the_fabric() -> None:
    ended: list[str] = []

    def stay(seconds: float) -> None:
        try:
            time.sleep(seconds)
        finally:
            ended.append("ended")

    before = threading.active_count()
    with Fabric() as fabric:
        a, _ = two(fabric)
        programs = [a.start(stay, 1e6), a.start(stay, 1e7)]
        fabric.run(seconds=1)
    for program in programs:
        program._strand.thread.join()
    assert ended == ["ended", "ended"]
    assert threading.active_count() == before


# -- time and threads ---------------------------------------------------------------------------------------------


def test_clocks_and_sleeps_are_virtual() -> None:
    def look() -> list[float]:
        began = time.time()
        time.sleep(86400)
        return [time.time() - began, time.monotonic(), time.perf_counter(), time.monotonic_ns() / 1e9]

    with Fabric() as fabric:
        a, _ = two(fabric)
        assert a.start(look).result() == [86400] * 4
        assert fabric.now == 86400
    assert time.sleep.__module__ == "time", "the originals are back"


def waits() -> dict[str, Callable[[], object]]:
    """Calls that would wait for a second, and what they return then."""

    def released() -> bool:
        lock = threading.Lock()
        lock.acquire()
        threading.Timer(1, lock.release).start()
        return lock.acquire()

    def joined() -> bool:
        thread = threading.Thread(target=time.sleep, args=(1,))
        thread.start()
        thread.join()
        return not thread.is_alive()

    def passed() -> int:
        passing: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Timer(1, passing.put, (1,)).start()
        return passing.get()

    def pooled() -> bool:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(time.sleep, (1, 1))) == [None, None]

    def empty() -> bool:
        with pytest.raises(queue.Empty):
            queue.Queue[int]().get(timeout=1)
        return True

    return {
        "lock": released,
        "RLock": lambda: not _other_thread_has(threading.RLock()),
        "condition": lambda: not threading.Event().wait(1),
        "join": joined,
        "join, timeout": _alive_after_a_second,
        "queue": passed,
        "queue, timeout": empty,
        "pool": pooled,
        "select": lambda: select.select([], [], [], 1) == ([], [], []),
        "poll": lambda: select.poll().poll(1000) == [],
        "asyncio": lambda: asyncio.run(asyncio.sleep(1, True)),
    }


def _other_thread_has(lock: threading.RLock) -> bool:
    def hold() -> None:
        lock.acquire()
        time.sleep(5)

    threading.Thread(target=hold).start()
    time.sleep(0)
    time.sleep(0.5)
    return lock.acquire(timeout=0.5)


def _alive_after_a_second() -> bool:
    thread = threading.Thread(target=time.sleep, args=(2,))
    thread.start()
    thread.join(1)
    return thread.is_alive()


@pytest.mark.parametrize("call", waits())
def test_waits_of_the_standard_library(call: str) -> None:
    with Fabric() as fabric:
        a, _ = two(fabric)
        assert a.start(waits()[call]).result()
        assert fabric.now == 1


def test_a_program_that_polls_lets_time_pass() -> None:
    def poll() -> bytes:
        with rdmacm.CmId(None, qp_type=rdmacm.QPType.RC) as cmid:
            cmid.resolve_addr(("10.0.0.2", PORT))
            context = cmid.verbs
            with CQ(context, 4) as cq:
                before = time.monotonic()
                while time.monotonic() < before + 1:
                    assert not cq.poll()
            return b"polled"

    with Fabric() as fabric:
        a, _ = two(fabric)
        assert a.start(poll).result() == b"polled"
        assert 1 <= fabric.now < 1.01


def test_the_seed_decides_who_goes_first() -> None:
    def orders(seed: int) -> list[int]:
        order: list[int] = []
        with Fabric(seed) as fabric:
            a, _ = two(fabric)
            for number in range(5):
                a.start(order.append, number)
            fabric.run()
        return order

    assert orders(1) == orders(1)
    assert len({tuple(orders(seed)) for seed in range(10)}) > 1


# -- faults of hosts ----------------------------------------------------------------------------------------------


def test_a_crash_ends_the_programs_of_a_host() -> None:
    with Fabric() as fabric:
        a, b = two(fabric)
        server = b.start(serve)
        client = a.start(ask)
        fabric.run(lambda: fabric.log.count(kind="REQ") > 0)
        fabric.crash("b")
        with pytest.raises(rdmacm.RdmaError):
            client.result()
        assert server.done
        with pytest.raises(SimulationError, match="was killed"):
            server.result()


def test_a_host_that_is_paused_does_not_run_programs() -> None:
    with Fabric() as fabric:
        a, _ = two(fabric)
        sleeper = a.start(lambda: time.sleep(1))
        fabric.run(seconds=0.5)
        fabric.pause("a")
        fabric.call_at(10, lambda: fabric.resume("a"))
        sleeper.result()
        assert fabric.now == 10


def test_a_slow_host_answers_late() -> None:
    def ends(lag: float) -> float:
        with Fabric() as fabric:
            a, b = two(fabric)
            fabric.slow("b", lag)
            b.start(serve)
            assert a.start(ask).result() == b"evil"
            return fabric.now

    assert ends(0) < 0.01 < ends(0.01) < ends(0.1)


def test_a_fast_clock() -> None:
    def sleep() -> float:
        time.sleep(10)
        return time.monotonic()

    with Fabric() as fabric:
        a, b = two(fabric)
        fabric.drift("a", 2.0)
        fabric.jump(100, "a")
        assert a.start(sleep).result() == 110
        assert (fabric.now, b.clock()) == (5, 5)
        with a.as_default(), pytest.raises(rdmacm.CmTimeoutError), rdmacm.CmId() as cmid:
            cmid.resolve_addr(("10.0.0.9", PORT), timeout_ms=5000)
        assert fabric.now == 7.5


# -- programs as they are -----------------------------------------------------------------------------------------


def workers() -> int:
    """A server with a thread for each client."""
    served: list[bytes] = []

    def work(connection: rdmacm.Connection) -> None:
        with connection:
            for message in connection:
                time.sleep(0.01)
                served.append(message)
                with contextlib.suppress(rdmacm.RdmaError):
                    connection.send(message[::-1])

    threads = []
    with rdmacm.listen(("10.0.0.2", PORT)) as listener:
        for _ in range(3):
            threads.append(threading.Thread(target=work, args=(listener.accept(timeout=30),)))
            threads[-1].start()
    for thread in threads:
        thread.join()
    return len(served)


def three_clients() -> list[bytes]:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return list(pool.map(ask, (b"live", b"stressed", b"reward")))


def c_server() -> bytes:
    """Line by line from C, with an event channel, and completions that are polled for."""
    channel = cma.rdma_create_event_channel()
    listener = cma.rdma_create_id(channel, None, cma.RDMA_PS_TCP)
    cma.rdma_bind_addr(listener, ("10.0.0.2", PORT))
    cma.rdma_listen(listener, 1)
    event = cma.rdma_get_cm_event(channel)
    assert event.event == cma.RDMA_CM_EVENT_CONNECT_REQUEST
    id, verbs = event.id, event.id.verbs
    assert verbs is not None
    pd = cma.ibv_alloc_pd(verbs)
    cq = cma.ibv_create_cq(verbs, 4)
    cma.rdma_create_qp(id, pd, QPInitAttr(scq=cq, rcq=cq))
    memory = bytearray(64)
    mr = cma.rdma_reg_msgs(id, memory, len(memory))
    cma.rdma_post_recv(id, None, memory, len(memory), mr)
    cma.rdma_accept(id, None)
    cma.rdma_ack_cm_event(event)
    cma.rdma_ack_cm_event(cma.rdma_get_cm_event(channel))
    while not (found := cma.ibv_poll_cq(cq, 1)):
        pass
    return bytes(memory[: found[0].byte_len])


def c_client() -> None:
    attr = QPInitAttr(cap=QPCap(max_send_wr=1, max_recv_wr=1), sq_sig_all=True)
    res = cma.rdma_getaddrinfo("10.0.0.2", str(PORT), rdmacm.AddrInfo(port_space=cma.RDMA_PS_TCP))
    id = cma.rdma_create_ep(res, None, attr)
    message = bytearray(b"live")
    mr = cma.rdma_reg_msgs(id, message, len(message))
    cma.rdma_connect(id, None)
    cma.rdma_post_send(id, None, message, len(message), mr, 0)
    cma.rdma_get_send_comp(id)


def start_of_page(host: Host, page: str, begin: str, path: Path) -> rdmacm.testing.Program[None]:
    """Start the program of a page that has this line, as a script."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (found,) = (program for program in programs if begin in program.splitlines())
    path.write_text(found if "import rdmacm" in found else f"import rdmacm, rdmacm.aio\n{found}")
    return host.script(path)


def start_readme(fabric: Fabric, a: Host, folder: Path) -> list[rdmacm.testing.Program[None]]:
    hosts = {"server.py": a, "client.py": fabric.process("a", "client")}
    return [start_of_page(host, "README.md", f"# {name}", folder / name) for name, host in hosts.items()]


def start_both(page: str, begin: str) -> Start:
    """A program of a page, which is both sides."""
    return lambda _fabric, a, _b, folder: [start_of_page(a, f"docs/{page}", begin, folder / "both.py")]


def start_examples(server: str, client: str) -> Start:
    """Two of the examples, each with its arguments."""

    def start(_fabric: Fabric, a: Host, b: Host, _folder: Path) -> list[rdmacm.testing.Program[None]]:
        words = [line.split() for line in (server, client)]
        return [host.script(ROOT / "examples" / name, *rest) for host, (name, *rest) in zip((b, a), words, strict=True)]

    return start


#: What starts programs, and what they return on a network without faults.
PROGRAMS: dict[str, tuple[Start, list[object]]] = {
    "README": (lambda fabric, a, _b, folder: [*start_readme(fabric, a, folder)], [None, None]),
    "threads": (
        lambda _fabric, a, b, _folder: [b.start(workers), a.start(three_clients)],
        [3, [b"evil", b"desserts", b"drawer"]],
    ),
    "a thread": (start_both("connections.md", "server = threading.Thread(target=serve)"), [None]),
    "asyncio": (start_both("asyncio.md", '        assert answers == [b"desserts", b"evil"]'), [None]),
    "C names": (lambda _fabric, a, b, _folder: [b.start(c_server), a.start(c_client)], [b"live", None]),
    "rdma_server": (start_examples("rdma_server.py", "rdma_client.py -s 10.0.0.2"), [None, None]),
    "rdma_xserver": (start_examples("rdma_xserver.py", "rdma_xclient.py -s 10.0.0.2"), [None, None]),
    "rping": (start_examples("rping.py -s", "rping.py -c -a 10.0.0.2 -C 3"), [None, None]),
    "cmtime": (start_examples("cmtime.py -c 3", "cmtime.py -s 10.0.0.2 -c 3"), [None, None]),
}


def ends(fabric: Fabric, name: str, folder: Path) -> list[object]:
    """Run programs on two hosts of a fabric; their results or errors."""
    programs = PROGRAMS[name][0](fabric, fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2"), folder)
    fabric.run(lambda: all(program.done for program in programs), seconds=300)
    results: list[object] = []
    for program in programs:
        try:
            results.append(program.result() if program.done else f"waits in {program.where}")
        except (rdmacm.RdmaError, SystemExit) as error:
            results.append(str(error))
    return results


def run(name: str, seed: int, folder: Path, **faults: float) -> tuple[list[object], list[tuple[object, ...]]]:
    """Run programs; their results or errors, and what happened to each packet.

    The log is without the checksums, as some of them send addresses of their memory.
    """
    with Fabric(seed, **faults) as fabric:  # type: ignore[arg-type]
        results = ends(fabric, name, folder)
        packets: list[tuple[object, ...]] = [
            (e.time, e.outcome, e.packet.source, e.packet.kind, e.packet.psn, len(e.data)) for e in fabric.log
        ]
    return results, packets


#: What the programs leave open, and what ends their threads, is theirs.
THEIRS = pytest.mark.filterwarnings(
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


@THEIRS
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_as_they_are(name: str, tmp_path: Path) -> None:
    results, packets = run(name, 1, tmp_path)
    assert results == PROGRAMS[name][1]
    assert packets


@THEIRS
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_a_lossy_network(name: str, seed: int, tmp_path: Path) -> None:
    """Each ends as it should, or with an error of the package; and the same seed gives the same run."""
    first = run(name, seed, tmp_path, loss=0.2)
    for found, expected in zip(first[0], PROGRAMS[name][1], strict=True):
        assert found == expected or isinstance(found, str), "a wrong result"
    assert first == run(name, seed, tmp_path, loss=0.2)


# -- how connections end, with each loss by a rule ----------------------------------------------------------------


def outcome(name: str, folder: Path, faults: str) -> list[object]:
    """As :func:`run`, with a script of faults."""
    with Fabric(1) as fabric:
        fabric.faults = FaultScript.parse(faults)
        return ends(fabric, name, folder)


@THEIRS
def test_a_send_whose_acknowledgement_is_lost_fails_if_the_peer_disconnects(tmp_path: Path) -> None:
    found = outcome("README", tmp_path, "lose ACK 2 from a to client")
    assert found == [None, "send 127.0.0.1:7471: the peer has disconnected [ECONNRESET]"]


@THEIRS
def test_a_script_that_fails_disconnects(tmp_path: Path) -> None:
    """The peer has nothing to send, so nothing but the DREQ ends its wait."""
    exceeded = "rping: transport retry counter exceeded"
    assert outcome("rping", tmp_path, "lose ACK * from b") == [None, exceeded]
    assert outcome("rping", tmp_path, "lose ACK * from a") == [exceeded, "rping: the server has disconnected"]


@THEIRS
def test_a_lost_dreq_of_a_script_that_fails_is_not_repeated(tmp_path: Path) -> None:
    """As that of a process: no timer runs on a connection that is idle."""
    found = outcome("rping", tmp_path, "lose ACK * from b\nlose DREQ 1 from a")
    assert "waits in" in str(found[0])
    assert found[1] == "rping: transport retry counter exceeded"


def test_a_script_ends_as_a_process_does(tmp_path: Path) -> None:
    """It waits for its threads but for daemons, and what it has not closed is destroyed; a function keeps that."""
    path = tmp_path / "server.py"
    path.write_text(
        "import threading, time, rdmacm\n"
        "listener = rdmacm.listen(('10.0.0.2', 7471))\n"
        "kept = listener.accept()\n"
        "threading.Thread(target=time.sleep, args=(10,)).start()\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )

    def ask() -> float:
        with rdmacm.connect(("10.0.0.2", PORT), timeout=60) as connection:
            with pytest.raises(rdmacm.RdmaError, match="disconnected"):
                connection.recv()
            return time.monotonic()

    with Fabric() as fabric:
        a, b = two(fabric)
        for _ in range(2):  # the address is free again
            began = fabric.now
            b.script(path)
            assert a.start(ask).result() == pytest.approx(began + 10, abs=0.001)
        assert not fabric._programs._all
        connection = b.start(rdmacm.listen, ("10.0.0.2", PORT)).result()
        assert connection.port == PORT
        connection.close()


#: Prints a run of three clients with threads and a server with threads.
ONE_RUN = """
import sys
from rdmacm.testing import Fabric
from testing.test_fabric_programs import three_clients, workers
with Fabric(int(sys.argv[1]), loss=0.1) as fabric:
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    b.start(workers)
    a.start(three_clients)
    fabric.run(seconds=300)
    print(fabric.log.to_text())
"""


def test_the_same_run_in_other_processes_and_with_either_engine() -> None:
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    runs = set()
    for core, hashes in (("", "1"), ("python", "2")):
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": hashes, "RDMACM_CORE": core}
        done = subprocess.run(
            [sys.executable, "-c", ONE_RUN, "3"], env=environment, capture_output=True, text=True, check=True
        )
        runs.add(done.stdout)
    assert len(runs) == 1
    assert "RTU" in runs.pop()
