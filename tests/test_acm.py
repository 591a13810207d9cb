"""The client of ibacm with daemons that answer, fail or misbehave; ``infiniband/test_ibacm.py`` has the real one."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from socket import AF_INET

import pytest

from rdmacm.address import Gid, InetAddr, SockAddrIB
from rdmacm.constants import PathFlag
from rdmacm.interrupts import handlers
from rdmacm.proto.acm import MAX_ENDPOINTS, AcmReply, AcmStatus
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.resolution.acm import AcmClient, Paths, paths_from_acm, paths_in_background
from support.acm import HERE, IB_PATH, THERE, Asked, Daemon, path_endpoint, reply

DESTINATION = InetAddr(AF_INET, bytes((192, 168, 7, 2)))
SOURCE = InetAddr(AF_INET, bytes((192, 168, 7, 1)))
FOUND = AcmReply(0, (PathData(IB_PATH),))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[AcmClient]:
    client = AcmClient(str(tmp_path), look=0)
    yield client
    client.close()


def with_one_path(asked: Asked) -> None:
    asked.answer(path_endpoint())


def ask(client: AcmClient, timeout: float = 10) -> AcmReply | None:
    return client.resolve(destination=DESTINATION, timeout=timeout)


class TestConnecting:
    @pytest.mark.parametrize("tcp", [False, True])
    def test_connection_is_kept_open(self, tmp_path: Path, client: AcmClient, tcp: bool) -> None:
        with Daemon(tmp_path, with_one_path, tcp=tcp) as daemon:
            assert [ask(client) for _ in range(3)] == [FOUND] * 3
            assert len(daemon.connections) == 1
            assert len({asked.tid for asked in daemon.asked}) == 3

    @pytest.mark.parametrize("text", ["0\n", "", "port", "65536", "-1"])
    def test_invalid_port_file_falls_back_to_the_socket(self, tmp_path: Path, client: AcmClient, text: str) -> None:
        (tmp_path / "ibacm.port").write_text(text)
        with Daemon(tmp_path, with_one_path):
            assert ask(client) == FOUND

    def test_client_reconnects_to_a_restarted_daemon(self, tmp_path: Path, client: AcmClient) -> None:
        with Daemon(tmp_path, with_one_path):
            assert ask(client) == FOUND
        with Daemon(tmp_path, with_one_path, tcp=True) as daemon:
            assert ask(client) == FOUND
            daemon.hang_up()
            assert ask(client) == FOUND
            assert len(daemon.connections) == 2

    def test_missing_daemon_gives_no_answer(self, client: AcmClient) -> None:
        assert not client.is_there()
        assert ask(client) is None

    def test_stale_socket_of_a_dead_daemon_gives_no_answer(self, tmp_path: Path) -> None:
        client = AcmClient(str(tmp_path))
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(os.fspath(tmp_path / "ibacm.sock"))
        assert client.is_there()
        assert ask(client) is None
        assert not client.is_there()

    def test_missing_daemon_is_checked_at_intervals(self, tmp_path: Path) -> None:
        client = AcmClient(str(tmp_path), look=3600)
        assert not client.is_there()
        with Daemon(tmp_path, with_one_path):
            assert not client.is_there()

    def test_directory_is_taken_from_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        client = AcmClient(look=0)
        with Daemon(tmp_path, with_one_path):
            monkeypatch.setenv("RDMACM_ACM_RUNDIR", str(tmp_path))
            assert ask(client) == FOUND
            monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
            assert not client.is_there()
            client.close()

    def test_forked_child_opens_its_own_connection(self, tmp_path: Path, client: AcmClient) -> None:
        with Daemon(tmp_path, with_one_path) as daemon:
            assert ask(client) == FOUND
            with client._lock:  # as if another thread of the parent held it
                child = os.fork()
                if child == 0:
                    os._exit(0 if ask(client) == FOUND else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert ask(client) == FOUND
            assert len(daemon.connections) == 2


class TestAnswers:
    def test_response_arriving_in_pieces_is_read_whole(self, tmp_path: Path, client: AcmClient) -> None:
        def byte_by_byte(asked: Asked) -> None:
            asked.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in reply(asked.tid, path_endpoint()):
                asked.connection.sendall(bytes([byte]))

        with Daemon(tmp_path, byte_by_byte, tcp=True):
            assert ask(client) == FOUND

    def test_response_with_the_maximum_of_paths_is_read(self, tmp_path: Path, client: AcmClient) -> None:
        paths = [replace(IB_PATH, sl=number) for number in range(MAX_ENDPOINTS)]
        with Daemon(tmp_path, lambda asked: asked.answer(*map(path_endpoint, paths))):
            assert ask(client) == AcmReply(0, tuple(map(PathData, paths)))

    def test_error_status_is_an_answer(self, tmp_path: Path, client: AcmClient) -> None:
        with Daemon(tmp_path, lambda asked: asked.answer(status=AcmStatus.ENODATA)) as daemon:
            assert [ask(client), ask(client)] == [AcmReply(AcmStatus.ENODATA)] * 2
            assert len(daemon.connections) == 1

    def test_threads_get_their_own_responses(self, tmp_path: Path, client: AcmClient) -> None:
        def mirror(asked: Asked) -> None:
            asked.answer((1, 2, asked.endpoints[0][2]))

        wrong: list[object] = []

        def questions(number: int) -> None:
            source = InetAddr(AF_INET, bytes((10, 0, 0, number)))
            for _ in range(50):
                answer = client.resolve(source=source, timeout=30)
                if answer != AcmReply(0, (), source):
                    wrong.append(answer)

        with Daemon(tmp_path, mirror) as daemon:
            threads = [threading.Thread(target=questions, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong
            assert len(daemon.asked) == 400


def hanging_up(asked: Asked) -> None:
    asked.connection.shutdown(socket.SHUT_RDWR)


def half(asked: Asked) -> None:
    asked.connection.sendall(reply(asked.tid, path_endpoint())[:50])
    hanging_up(asked)


class TestFailingDaemon:
    @pytest.mark.parametrize(
        "behave",
        [
            pytest.param(lambda asked: None, id="silent"),
            pytest.param(lambda asked: asked.connection.sendall(b"\xff" * 1000), id="garbage"),
            pytest.param(lambda asked: asked.connection.sendall(reply(asked.tid + 1, path_endpoint())), id="wrong-tid"),
            pytest.param(lambda asked: asked.connection.sendall(reply(asked.tid, path_endpoint())[:50]), id="stuck"),
            pytest.param(lambda asked: asked.answer(*[path_endpoint()] * 9), id="too-many"),
            pytest.param(half, id="half"),
            pytest.param(hanging_up, id="hangs-up"),
        ],
    )
    def test_misbehaving_daemon_costs_one_timeout(self, tmp_path: Path, client: AcmClient, behave: object) -> None:
        with Daemon(tmp_path, behave) as daemon:  # type: ignore[arg-type]
            assert ask(client, 0.2) is None
            assert not client.is_there()
            assert ask(client, 3600) is None
            assert len(daemon.asked) == 1

    def test_short_timeout_does_not_mark_the_daemon_as_failed(self, tmp_path: Path, client: AcmClient) -> None:
        with Daemon(tmp_path, lambda asked: None) as daemon:
            assert ask(client, 0.01) is None
            assert ask(client, 0) is None
            daemon.behave = with_one_path
            assert ask(client) == FOUND

    def test_failed_daemon_is_tried_again(self, tmp_path: Path) -> None:
        client = AcmClient(str(tmp_path), rest=0, look=0)
        with Daemon(tmp_path, lambda asked: None) as daemon:
            assert ask(client, 0.2) is None
            daemon.behave = with_one_path
            assert ask(client) == FOUND
            client.close()

    def test_slow_response_does_not_extend_other_callers_timeouts(self, tmp_path: Path, client: AcmClient) -> None:
        busy = threading.Event()
        go_on = threading.Event()

        def slow(asked: Asked) -> None:
            busy.set()
            go_on.wait(30)
            with_one_path(asked)

        answers: list[AcmReply | None] = []
        with Daemon(tmp_path, slow):
            thread = threading.Thread(target=lambda: answers.append(ask(client, 60)))
            thread.start()
            busy.wait(30)
            assert ask(client, 0.05) is None
            go_on.set()
            thread.join()
        assert answers == [FOUND]

    @pytest.mark.parametrize("providers", [0, 1])
    def test_interrupted_request_leaves_no_state(self, tmp_path: Path, client: AcmClient, providers: int) -> None:
        """Also while a provider is in use: handlers are deferred then, but where a call waits."""
        waiting, main = threading.Event(), threading.get_ident()
        users = [object() for _ in range(providers)]
        for user in users:
            handlers.guard(user)

        def interrupt() -> None:
            waiting.wait(30)
            signal.pthread_kill(main, signal.SIGINT)

        with Daemon(tmp_path, lambda asked: waiting.set()) as daemon:
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                ask(client, 3)  # a signal between the look for signals and the wait counts after the wait
            thread.join()
            daemon.behave = with_one_path
            assert ask(client) == FOUND
        for user in users:
            handlers.unguard(user)


IB_SOURCE, IB_DESTINATION = SockAddrIB(HERE), SockAddrIB(THERE, pkey=0x8001)


class TestRoutes:
    def test_path_is_queried_by_gids(self, tmp_path: Path, client: AcmClient) -> None:
        with Daemon(tmp_path, with_one_path) as daemon:
            assert paths_from_acm(IB_SOURCE, IB_DESTINATION, client=client) == (PathData(IB_PATH),)
            ((flags, kind, info),) = daemon.asked[0].endpoints
            asked = PathRecord.unpack(info)
            assert (flags, kind, asked.sgid, asked.dgid, asked.pkey) == (0, 0x10, HERE, THERE, 0x8001)

    def test_path_is_queried_by_ip_addresses(self, tmp_path: Path, client: AcmClient) -> None:
        with Daemon(tmp_path, with_one_path) as daemon:
            assert paths_from_acm(SOURCE, DESTINATION, client=client) == (PathData(IB_PATH),)
            assert [(flags, kind, info[:4]) for flags, kind, info in daemon.asked[0].endpoints] == [
                (1, 2, SOURCE.ip),
                (2, 2, DESTINATION.ip),
            ]

    @pytest.mark.parametrize(
        "endpoint",
        [
            path_endpoint(replace(IB_PATH, dgid=Gid("fe80::bad"))),
            path_endpoint(replace(IB_PATH, sgid=Gid("fe80::bad"))),
            path_endpoint(flags=PathFlag.ALTERNATE),
            (1, 2, SOURCE.ip),
        ],
    )
    def test_unusable_path_is_rejected(
        self, tmp_path: Path, client: AcmClient, endpoint: tuple[int, int, bytes]
    ) -> None:
        with Daemon(tmp_path, lambda asked: asked.answer(endpoint)):
            assert paths_from_acm(IB_SOURCE, IB_DESTINATION, client=client) is None

    def test_addresses_of_mixed_families_have_no_path(self, tmp_path: Path, client: AcmClient) -> None:
        with Daemon(tmp_path, with_one_path):
            assert paths_from_acm(IB_SOURCE, DESTINATION, client=client) is None

    def test_queries_in_the_background_do_not_block(self, tmp_path: Path, client: AcmClient) -> None:
        outcomes: queue.SimpleQueue[Paths | None] = queue.SimpleQueue()
        go_on = threading.Event()

        def slow(asked: Asked) -> None:
            go_on.wait(30)
            with_one_path(asked)

        with Daemon(tmp_path, slow):
            for _ in range(20):
                assert paths_in_background(IB_SOURCE, IB_DESTINATION, outcomes.put, timeout=30, client=client)
            assert outcomes.empty()
            go_on.set()
            assert [outcomes.get(timeout=30) for _ in range(20)] == [(PathData(IB_PATH),)] * 20

    def test_all_callers_share_one_timeout(self, tmp_path: Path) -> None:
        outcomes: queue.SimpleQueue[Paths | None] = queue.SimpleQueue()
        client = AcmClient(str(tmp_path), look=0, rest=0)  # the daemon is asked again after a failure, if there is time
        with Daemon(tmp_path, lambda asked: None) as daemon, closing(client):
            for _ in range(100):
                if not paths_in_background(IB_SOURCE, IB_DESTINATION, outcomes.put, timeout=0.2, client=client):
                    outcomes.put(None)
            assert [outcomes.get(timeout=30) for _ in range(100)] == [None] * 100
            assert len(daemon.asked) < 100, "each had a timeout of its own"

    def test_background_query_without_a_daemon_is_refused(self, client: AcmClient) -> None:
        outcomes: queue.SimpleQueue[Paths | None] = queue.SimpleQueue()
        assert not paths_in_background(IB_SOURCE, IB_DESTINATION, outcomes.put, client=client)
        assert outcomes.empty()
