"""What a failed connect() on a fabric blames."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest

import rdmacm
from rdmacm.testing import Fabric, Host, Outcome, SimulationError

PORT = 7471


def two(fabric: Fabric) -> tuple[Host, Host]:
    """Hosts that have not opened a device."""
    return fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")


def connect(timeout: float | None = 60) -> None:
    rdmacm.connect(("10.0.0.2", PORT), timeout=timeout).close()


def listen_elsewhere() -> None:
    with rdmacm.listen(("10.0.0.2", PORT + 1)):
        threading.Event().wait(1000)


def listen_and_sleep() -> None:
    with rdmacm.listen(("10.0.0.2", PORT)):
        threading.Event().wait(1000)


def take_requests_and_sleep() -> None:
    with rdmacm.CmId() as listener:
        listener.bind_addr(("10.0.0.2", PORT))
        listener.listen()
        with listener.get_request():
            threading.Event().wait(1000)


def test_a_host_without_a_program_says_that_its_port_is_closed() -> None:
    with Fabric() as fabric:
        a, _ = two(fabric)
        with pytest.raises(rdmacm.CmRefusedError, match=r"10\.0\.0\.2 reports that the port is closed") as raised:
            a.start(connect).result()
        assert str(raised.value.hint).startswith("starting the peer")
        assert fabric.now == pytest.approx(2 * fabric.latency)
        assert fabric.log.count(Outcome.REFUSED) == 1


@pytest.mark.parametrize("how", ["fabric", "link", "partition"])
def test_that_report_may_be_lost(how: str) -> None:
    with Fabric() as fabric:
        a, b = two(fabric)
        if how == "link":
            fabric.link("b", "a").loss = 1.0
        elif how == "partition":  # resolving the address needs both ways
            fabric.call_at(0, lambda: fabric.partition("b", "a", one_way=True))
        else:
            fabric.call_at(0, lambda: setattr(fabric, "loss", 1.0))
            fabric.link("a", "b").loss = 0.0
        with pytest.raises(rdmacm.CmTimeoutError, match="still in connect"):
            a.start(connect, 5).result()
        assert fabric.log.count(Outcome.REFUSED) == 2
        assert not b.wire.is_open


def test_a_report_comes_too_late_for_a_server_that_has_begun() -> None:
    with Fabric(latency=0.1) as fabric:
        a, b = two(fabric)
        client = a.start(connect)
        fabric.run(until=0.15)
        b.start(listen_and_sleep)
        with pytest.raises(rdmacm.CmRefusedError):
            client.result()


def test_a_host_without_that_listener_says_so() -> None:
    with Fabric() as fabric:
        a, b = two(fabric)
        b.start(listen_elsewhere)
        with pytest.raises(rdmacm.CmRejectedError, match="nobody listens on that port") as raised:
            a.start(connect).result()
        assert raised.value.errno == errno.ECONNREFUSED


@pytest.mark.parametrize("timeout", [5, 60, None])
@pytest.mark.parametrize("serve", [listen_and_sleep, take_requests_and_sleep])
def test_a_listener_that_nobody_serves_is_named(serve: Callable[[], None], timeout: float | None) -> None:
    with Fabric() as fabric:
        a, b = two(fabric)
        b.start(serve)
        with pytest.raises(rdmacm.CmTimeoutError, match="has the request, and no program there has accepted") as raised:
            a.start(connect, timeout).result()
        assert timeout is None or raised.value.hint == "calling accept() or get_request() there, or a longer timeout"
        (note,) = raised.value.__notes__
        assert f"programs that wait: {serve.__name__} on host b in {__file__}:" in note


def test_a_lost_request_is_no_fault_of_the_program() -> None:
    with Fabric(loss=1.0) as fabric:
        a, b = two(fabric)
        b.start(listen_and_sleep)
        with pytest.raises(rdmacm.CmTimeoutError, match="still in connect"):
            a.start(connect, 5).result()
        with pytest.raises(rdmacm.CmTimeoutError, match="the peer did not answer"):
            a.start(connect, None).result()


def test_a_test_that_is_the_server_too_is_told_to_start_a_program() -> None:
    with Fabric() as fabric:
        a, b = two(fabric)
        with b.as_default(), rdmacm.listen(("10.0.0.2", PORT)) as listener:
            with a.as_default(), pytest.raises(rdmacm.CmTimeoutError, match="no program there has accepted"):
                connect(5)
            with pytest.raises(SimulationError, match=r"try: host\.start"):
                while True:
                    listener.accept()
