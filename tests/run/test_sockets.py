"""``rdmacm run --sockets``: ordinary programs, whose TCP sockets are those of rsocket(7)."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from support.run_command import datagrams
from support.run_programs import LIBRARIES, PROGRAMS, output_of


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
