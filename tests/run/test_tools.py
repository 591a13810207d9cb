"""The tools of rdma-core and of perftest, unchanged, on both ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from rdmacm.run.command import environment_of
from rdmacm.run.server import Server
from support.clock import eventually
from support.run_command import datagrams, is_listening, running

#: Where ``ibv_*_pingpong`` and perftest without ``-R`` listen.
TCP_PORT = 18515
ADDRESSES = pytest.mark.parametrize("address", ["127.0.0.1", "::1"])

pytestmark = pytest.mark.slow


def needs(program: str, package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program} (Debian package {package})")


class Talk(Protocol):
    """Run a server and a client; what they print. ``goes_on``: the server does not end by itself."""

    def __call__(self, server: str, client: str, *, goes_on: bool = False) -> str: ...


@contextmanager
def started(command: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    variables = {**os.environ, **environment}
    with subprocess.Popen(command.split(), env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


@pytest.fixture
def talk(library: Path, served: Server) -> Talk:
    """Run a server and a client, whose devices one server of ``rdmacm run`` serves; what they print."""
    environment = environment_of(str(library), served.path)
    listeners = served.provider.host.cm._listeners

    def once(server: str, client: str, goes_on: bool) -> tuple[int, str]:
        """The status and the output of the client, and if that is 0 of a server that ends."""
        with started(server, environment) as serving:
            eventually(lambda: listeners or is_listening(TCP_PORT) or serving.poll() is not None)
            with started(client, environment) as asking:
                try:
                    printed, _ = asking.communicate(timeout=30)
                except subprocess.TimeoutExpired:
                    return 1, "the client does not end"
            if asking.returncode or goes_on:
                return asking.returncode or serving.poll() or 0, printed
            try:
                heard, _ = serving.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the server does not end; the client has printed {printed[-2000:]}")
        return serving.returncode, heard + printed

    def run(server: str, client: str, *, goes_on: bool = False) -> str:
        before = datagrams()
        # With -R, perftest's server listens twice, and its client may come before the second time: it is rejected.
        for left in range(9 if "-R" in client.split() else 0, -1, -1):
            status, printed = once(server, client, goes_on)
            if status == 0 or not left:
                break
            eventually(lambda: not listeners)
        assert status == 0, printed[-4000:]
        assert datagrams() - before > 5
        return printed

    return run


@needs("rping", "rdmacm-utils")
@ADDRESSES
@pytest.mark.parametrize("arguments", ["-C 3", "-C 3 -V -S 20000", "-C 3 -q"])
def test_rping(talk: Talk, address: str, arguments: str) -> None:
    talk(f"rping -s -a {address} {arguments}", f"rping -c -a {address} {arguments}")


@needs("ucmatose", "rdmacm-utils")
@ADDRESSES
@pytest.mark.parametrize("arguments", ["-c 5 -S 3000", "-m -c 2"])
def test_ucmatose(talk: Talk, address: str, arguments: str) -> None:
    printed = talk(f"ucmatose -b {address} {arguments}", f"ucmatose -s {address} {arguments}")
    assert printed.count("return status 0") == 2


@needs("udaddy", "rdmacm-utils")
@ADDRESSES
def test_udaddy(talk: Talk, address: str) -> None:
    printed = talk(f"udaddy -b {address} -c 3", f"udaddy -s {address} -c 3")
    assert printed.count("return status 0") == 2


@needs("cmtime", "rdmacm-utils")
@ADDRESSES
def test_cmtime(talk: Talk, address: str) -> None:
    printed = talk(f"cmtime -b {address}", f"cmtime -s {address} -c 300", goes_on=True)
    assert "error" not in printed
    assert "destroy      :" in printed


@needs("rdma_server", "rdmacm-utils")
@pytest.mark.parametrize(
    "ends", ["rdma_server|rdma_client", "rdma_xserver -c r|rdma_xclient -c r", "rdma_xserver -c x|rdma_xclient -c x"]
)
def test_examples(talk: Talk, ends: str) -> None:
    server, _, client = ends.partition("|")
    printed = talk(server, f"{client} -s 127.0.0.1")
    assert printed.count("end 0") == 2


@needs("ibv_rc_pingpong", "ibverbs-utils")
@pytest.mark.parametrize(
    "program",
    [
        "ibv_rc_pingpong",
        "ibv_rc_pingpong -e",
        "ibv_uc_pingpong",
        "ibv_ud_pingpong -s 1024",
        "ibv_srq_pingpong",
        "ibv_xsrq_pingpong",
    ],
)
def test_pingpong(talk: Talk, program: str) -> None:
    command = f"{program} -g 0 -n 100"
    if program == "ibv_xsrq_pingpong":  # it counts nothing
        command = f"{program} -g 0"
    talk(command, f"{command} 127.0.0.1")


@needs("ibv_devinfo", "ibverbs-utils")
def test_devinfo(library: Path) -> None:
    printed = running(library, "ibv_devinfo", "-v", "-d", "soft_lo")
    assert "PORT_ACTIVE (4)" in printed
    assert "::ffff:127.0.0.1, RoCE v2" in printed


@needs("fio", "fio")
@pytest.mark.parametrize("verb", ["write", "read", "send"])
def test_fio(talk: Talk, verb: str) -> None:
    # Its connections do not retry when a receive is missing, so the server has one for each message.
    command = "fio --name=rdma --thread --ioengine=rdma --port=18600 --bs=64k --size=4m"
    printed = talk(f"{command} --iodepth=64 --rw=read", f"{command} --hostname=127.0.0.1 --rw=write --verb={verb}")
    assert printed.count("err= 0") == 2


@needs("ib_send_lat", "perftest")
@pytest.mark.parametrize("transport", ["RC", "UC", "UD", "XRC"])
@pytest.mark.parametrize("program", ["send", "write", "read", "atomic"])
@pytest.mark.parametrize("measured", ["lat", "bw"])
def test_perftest(talk: Talk, program: str, measured: str, transport: str) -> None:
    if (program != "send" and transport == "UD") or (program in ("read", "atomic") and transport == "UC"):
        pytest.skip("the transport has no such operation")
    if transport in ("UC", "UD") and measured == "bw":
        pytest.skip("what is lost is not sent again, so the program may wait for ever")
    command = f"ib_{program}_{measured} -c {transport} -x 0 -n 50 -F"
    talk(command, f"{command} 127.0.0.1")


@needs("ib_send_lat", "perftest")
@pytest.mark.parametrize(
    "arguments",
    [
        "ib_send_lat -R",
        "ib_write_bw -R",
        "ib_send_lat -R -c UD",
        "ib_send_bw --use-srq -x 0",
        "ib_send_lat -e -x 0",
        "ib_write_bw -q 8 -x 0 --report_gbits",
        "ib_send_bw -b -x 0",
        "ib_send_bw -s 1048576 -x 0",
    ],
)
def test_options_of_perftest(talk: Talk, arguments: str) -> None:
    talk(f"{arguments} -n 50 -F", f"{arguments} -n 50 -F 127.0.0.1")
