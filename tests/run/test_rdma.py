"""``rdma dev`` and ``rdma link`` of a program that ``rdmacm run`` has started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rdmacm.run.rdma import main
from rdmacm.run.server import Server


def test_it_may_be_the_program_itself(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(Path(sys.executable).resolve().read_bytes()[:64])
    variables = {"RDMACM_RUN_LIBRARY": str(library), "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    done = subprocess.run(
        [sys.executable, "-m", "rdmacm", "run", "--device", "soft_lo", "--", "rdma", "link"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = "link soft_lo/1 state ACTIVE physical_state LINK_UP netdev lo \n"
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


@pytest.mark.parametrize("words", ["dev", "dev show soft_lo", "d l soft_lo", "link", "link show soft_lo/1", "l"])
def test_it_shows_the_devices(served: Server, capsys: pytest.CaptureFixture[str], words: str) -> None:
    (device,) = (each for each in served.devices() if each.name == "soft_lo")
    assert main(served.path, words.split()) == 0
    if words.startswith("d"):
        guids = f"node_guid {device.guid_text} sys_image_guid {device.guid_text}"
        line = f"{device.index}: soft_lo: node_type ca {guids} "
    else:
        line = "link soft_lo/1 state ACTIVE physical_state LINK_UP netdev lo "
    lines = capsys.readouterr().out.splitlines()
    assert line in lines
    assert len(lines) == (1 if "soft_lo" in words else len(served.devices()))


@pytest.mark.parametrize("given", [["-j"], ["-jp"], ["--json", "-d"]])
def test_it_shows_them_in_json(served: Server, capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    assert main(served.path, ["link", *given]) == 0
    index = socket.if_nametoindex("lo")
    shown = {"ifname": "soft_lo", "port": 1, "state": "ACTIVE", "physical_state": "LINK_UP"}
    assert {"ifindex": index, **shown, "netdev": "lo", "netdev_index": index} in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("link add x type rxe netdev lo", "not supported"),
        ("dev set soft_lo name x", "not supported"),
        ("resource show qp", "not supported"),
        ("link show soft_lo/2", "Wrong device name"),
        ("dev show soft_lo/1", "Wrong device name"),
        ("-x link", "not recognized"),
    ],
)
def test_it_says_what_it_does_not_do(served: Server, capsys: pytest.CaptureFixture[str], words: str, text: str) -> None:
    assert main(served.path, words.split()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rdma: ")
    assert text in captured.err


def test_help_and_a_server_that_has_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "socket")
    assert main(path, []) == main(path, ["help"]) == main(path, ["-V"]) == 0
    assert "Usage: rdma" in capsys.readouterr().out
    assert main(path, ["dev"]) == 1
    assert "does not answer" in capsys.readouterr().err
