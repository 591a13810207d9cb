"""``rdmacm run --sockets``: ordinary programs, whose TCP sockets are those of rsocket(7)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.run_command import datagrams
from support.run_programs import LIBRARIES, PROGRAMS, output_of
from support.scenario import free_port

TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
#: Debian's interpreter, for Debian's redis-py.
SYSTEM_PYTHON = "/usr/bin/python3"


def has_redis() -> bool:
    """Whether there is Debian's redis-py."""
    return Path("/usr/lib/python3/dist-packages/redis").exists()


@pytest.fixture
def multiplexed(tmp_path: Path) -> str:
    """An ordinary program, linked with the C library only."""
    program = tmp_path / "multiplexed"
    source = PROGRAMS / "multiplexed.c"
    subprocess.run(["gcc", "-O1", "-w", "-pthread", "-o", str(program), str(source)], check=True)
    return str(program)


def printed(library: Path, *argv: str) -> str:
    """What ``rdmacm run`` with these arguments prints."""
    environment = {
        "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
        "RDMACM_RUN_LIBRARY": str(library / LIBRARIES[0]),
    }
    return output_of([sys.executable, "-m", "rdmacm", "run", *argv], environment)


def test_program_of_tcp_sockets(library: Path) -> None:
    before = datagrams()
    program = [sys.executable, str(PROGRAMS / "tcp.py")]
    assert printed(library, "--sockets", "--", *program) == "1024000 bytes True RDMA\n"
    assert datagrams() - before > 5
    assert printed(library, "--", *program) == "1024000 bytes True TCP\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_and_pythons_server(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 2000)
    script = f"""
        cd {tmp_path}
        mkfifo told
        {sys.executable} -u -m http.server -b 127.0.0.1 0 > told 2> log &
        read -r line < told
        port=$(echo "$line" | sed -n 's/.* port \\([0-9]*\\) .*/\\1/p')
        curl -sS -o copy http://127.0.0.1:$port/file
        curl -sS -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:$port/nothing
        kill $!
    """
    assert printed(library, "--sockets", "--", "sh", "-c", script) == "404\n"
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("options", [[], ["--sockets"]], ids=["TCP", "RDMA"])
def test_epoll_and_its_kin(library: Path, multiplexed: str, options: list[str]) -> None:
    """``multiplexed.c`` says what; the kernel's sockets do the same."""
    assert printed(library, *options, "--", multiplexed) == "done\n"


def test_server_and_clients_of_asyncio(library: Path) -> None:
    program = [sys.executable, str(PROGRAMS / "served.py")]
    assert printed(library, "--sockets", "--", *program) == "1560021 RDMA\n"


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
@pytest.mark.skipif(not has_redis(), reason="needs python3-redis")
def test_redis(library: Path, tmp_path: Path) -> None:
    port = free_port()
    script = f"""
        cd {tmp_path}
        mkfifo told
        redis-server --port {port} --bind 127.0.0.1 --save '' > told &
        grep -q 'Ready to accept connections' told
        {SYSTEM_PYTHON} {PROGRAMS}/values.py {port} || kill $!
        wait
    """
    assert printed(library, "--sockets", "--", "sh", "-c", script) == "100000 100 subscribe message\n"


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx-light")
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_nginx_before_another(library: Path, tmp_path: Path) -> None:
    """One server has the file, with sendfile(2); the other one asks it."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4000)
    paths = "".join(f"{each}_temp_path {tmp_path}/{each};" for each in TEMPORARY)
    first, second = free_port(), free_port()
    (tmp_path / "conf").write_text(f"""
        daemon off; master_process off; pid {tmp_path}/pid; error_log stderr notice; events {{ use epoll; }}
        http {{
            access_log off; {paths}
            server {{ listen 127.0.0.1:{first}; root {tmp_path}; sendfile on; tcp_nopush on; }}
            server {{ listen 127.0.0.1:{second}; location / {{ proxy_pass http://127.0.0.1:{first}; }} }}
        }}
    """)
    script = f"""
        cd {tmp_path}
        mkfifo told
        nginx -e stderr -c {tmp_path}/conf 2> told &
        exec 3< told  # stays open, as nginx says more, which would end it by SIGPIPE
        sed "/event method/q" <&3 >&2
        curl -sS -o copy http://127.0.0.1:{second}/file
        curl -sS -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:{first}/nothing
        kill $!
    """
    assert printed(library, "--sockets", "--", "sh", "-c", script) == "404\n"
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
