"""The port table's file: shared by processes, removed after use, safe against irregular files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from socket import AF_INET, inet_aton

import pytest

from rdmacm.constants import PortSpace
from rdmacm.soft.port_table import PortOwner, PortTable

NAME = "rdmacm-ports-net1"


def owner(port: int, host: str = "10.0.0.1", **changes: bool) -> PortOwner:
    settings = {"is_any": False, "reuseaddr": False, "afonly": True, **changes}
    return PortOwner(PortSpace.TCP, port, AF_INET, inet_aton(host), 0, **settings)


def table(directory: Path) -> PortTable:
    return PortTable("net:[1]", directory=str(directory))


def test_last_user_removes_the_file(tmp_path: Path) -> None:
    ports = table(tmp_path)
    assert not os.listdir(tmp_path), "the file is created on first use"
    ports.bind(owner(4000))
    assert os.listdir(tmp_path) == [NAME]
    assert ports.path is not None
    assert os.stat(ports.path).st_mode & 0o777 == 0o666, "every user can open the file, whatever the umask"
    ports.close()
    assert not os.listdir(tmp_path)
    ports.bind(owner(4000))  # the table can be used again
    ports.close()


def test_file_remains_while_another_process_uses_it(tmp_path: Path) -> None:
    ports = table(tmp_path)
    ports.bind(owner(4000))
    code = (
        f"import sys; sys.path[:0] = {[*sys.path, str(Path(__file__).parent)]!r}\n"
        "from test_port_table import *\n"
        "from pathlib import Path\n"
        f"ports = table(Path({str(tmp_path)!r}))\n"
        "try: ports.bind(owner(4000))\n"
        "except OSError as error: print(error.errno)\n"
        "ports.bind(owner(4001))\n"
        "ports.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EADDRINUSE)]
    assert os.listdir(tmp_path)
    ports.close()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_irregular_files_are_refused(tmp_path: Path, kind: str) -> None:
    ports, path = table(tmp_path), tmp_path / NAME
    target = tmp_path / "target"
    target.write_text("target")
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    with pytest.raises(OSError, match="cannot be opened"):
        ports.bind(owner(4000))
    assert target.read_text() == "target"


def test_lock_held_by_another_process_does_not_block(tmp_path: Path) -> None:
    ports, path = table(tmp_path), tmp_path / NAME
    path.touch()
    code = (
        "import fcntl, os, sys\n"
        f"fd = os.open({str(path)!r}, os.O_RDWR)\n"
        "fcntl.lockf(fd, fcntl.LOCK_EX, 0, 0)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(OSError, match="keeps it locked") as failed:
            ports.bind(owner(4000))
        assert failed.value.errno == errno.EBUSY
        assert holder.stdin is not None
        holder.stdin.close()
    ports.bind(owner(4000))
    ports.close()


def test_released_ports_are_free_and_shared_ports_remain(tmp_path: Path) -> None:
    ports = table(tmp_path)
    first, second = owner(4000, reuseaddr=True), owner(4000, reuseaddr=True)
    ports.bind(first)
    ports.bind(second)
    with pytest.raises(OSError, match="port 4000 is in use by another id of this process"):
        ports.bind(owner(4000))
    ports.release(first)
    with pytest.raises(OSError, match="in use"):
        ports.bind(owner(4000))
    ports.release(second)
    ports.release(second)
    ports.bind(owner(4000))
    ports.close()


def test_bind_fails_when_no_port_is_free(tmp_path: Path) -> None:
    ports = PortTable("net:[1]", (5000, 5003), directory=str(tmp_path))
    taken = [owner(0) for _ in range(4)]
    for each in taken:
        ports.bind(each)
    assert sorted(each.port for each in taken) == [5000, 5001, 5002, 5003]
    last = owner(0)
    with pytest.raises(OSError, match="free") as failed:
        ports.bind(last)
    assert failed.value.errno == errno.EADDRNOTAVAIL
    assert last.port == 0
    ports.release(taken[2])
    ports.bind(last)
    assert last.port == taken[2].port
    ports.close()


def test_unwritable_directories_fall_back_to_private_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    ports = table(tmp_path)
    ports.bind(owner(4000))
    with pytest.raises(OSError, match="port 4000 is in use by another id of this process"):
        ports.bind(owner(4000))
    assert "not shared with other processes" in caplog.text
    ports.close()
    assert not os.listdir(tmp_path)


def test_file_of_a_killed_process_is_removed_by_the_next_process(tmp_path: Path) -> None:
    code = (
        f"import os, signal, sys; sys.path[:0] = {[*sys.path, str(Path(__file__).parent)]!r}\n"
        "from test_port_table import *\n"
        f"ports = PortTable('net:[2]', directory={str(tmp_path)!r})\n"
        "ports.bind(owner(4000))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode < 0
    assert os.listdir(tmp_path) == ["rdmacm-ports-net2"]
    (tmp_path / "rdmacm-ports-link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "rdmacm-ports-fifo")
    (tmp_path / "other").touch()
    ports = table(tmp_path)
    ports.bind(owner(4000))
    assert sorted(os.listdir(tmp_path)) == ["other", "rdmacm-ports-fifo", "rdmacm-ports-link", NAME]
    ports.close()


def test_files_of_other_tables_of_the_process_stay_locked(tmp_path: Path) -> None:
    """A process with ids in two namespaces would lose its locks if it closed another descriptor of its file."""
    first = table(tmp_path)
    first.bind(owner(4000))
    second = PortTable("net:[2]", directory=str(tmp_path))
    second.bind(owner(4000))
    second.close()
    code = (
        f"import sys; sys.path[:0] = {[*sys.path, str(Path(__file__).parent)]!r}\n"
        "from test_port_table import *\n"
        "from pathlib import Path\n"
        f"ports = table(Path({str(tmp_path)!r}))\n"
        "try: ports.bind(owner(4000))\n"
        "except OSError as error: print(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EADDRINUSE)]
    first.close()
    assert not os.listdir(tmp_path)
