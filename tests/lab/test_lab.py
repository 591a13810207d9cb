"""Hosts in namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rdmacm.lab import Lab, Wiring
from support.clock import eventually
from support.labs import needs_lab
from support.netns import python_environment

pytestmark = needs_lab

#: Echoes one message, on the address of its argument.
SERVER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], 5000), family=family) as listener:
    print("listening", flush=True)
    peer, address = listener.accept()
    peer.sendall(peer.recv(100))
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as peer:
    peer.sendall(b"hello")
    print(peer.recv(100))
"""
COUNT = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
    peer.bind(("", 5000))
    print("ready", flush=True)
    count = 0
    while peer.recv(100) != b"end":
        count += 1
    print(count)
"""
SEND = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)  # ARP would lose packets of its own
    for _ in range(200):
        peer.sendto(b"x", ("10.77.0.255", 5000))
    for _ in range(40):
        peer.sendto(b"end", ("10.77.0.255", 5000))
"""


def test_names_lead_to_hosts_that_reach_each_other() -> None:
    with Lab(["alpha", "beta", "gamma"]) as lab:
        alpha, _, gamma = lab.hosts.values()
        assert (gamma.name, gamma.addresses) == ("gamma", ("10.77.0.3", "fd77::3"))
        for address in ("gamma", *gamma.addresses):
            command = [sys.executable, "-c", SERVER, address]
            with gamma.popen(command, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                assert server.stdout.readline() == "listening\n"
                assert alpha.run([sys.executable, "-c", CLIENT, address]).stdout == "b'hello'\n"
            assert server.returncode == 0
        assert alpha.run(["uname", "-n"]).stdout == "alpha\n"


def test_a_program_has_environment_directory_input_and_status(tmp_path: Path) -> None:
    with Lab(["h1"]) as lab:
        h1 = lab.hosts["h1"]
        script = "pwd; cat; echo $NAME >&2; exit 7"
        done = h1.run(
            ["sh", "-c", script], cwd=tmp_path, input="in\n", env={**os.environ, "NAME": "value"}, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (7, f"{tmp_path}\nin\n", "value\n")
        with pytest.raises(subprocess.CalledProcessError) as caught:
            h1.run(["sh", "-c", "echo why >&2; exit 3"])
        assert (caught.value.returncode, caught.value.__notes__) == (3, ["why"])
        assert h1.run(["sh", "-c", "kill -9 $$"], check=False).returncode == 128 + 9
        assert h1.run(["no-such-program"], check=False).returncode == 127
        assert h1.run(["/etc"], check=False).returncode == 126


def test_files_belong_to_the_user(tmp_path: Path) -> None:
    with Lab(["h1"]) as lab:
        lab.hosts["h1"].run(["touch", str(tmp_path / "made")])
        assert lab.hosts["h1"].run(["id", "-u"]).stdout == "0\n"
    assert (tmp_path / "made").stat().st_uid == os.geteuid()


def test_signals_are_passed_on() -> None:
    script = "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
    with Lab(["h1"]) as lab:
        with lab.hosts["h1"].popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.terminate()
            assert child.stdout.read() == "got\n"
        assert child.returncode == 5


def test_the_interface_has_the_mtu() -> None:
    for wiring in (Wiring(mtu=4200), Wiring(mtu=9000, delay=0.001)):
        with Lab(["h1", "h2"], wiring) as lab:
            assert lab.hosts["h2"].run(["cat", "/sys/class/net/eth0/mtu"]).stdout == f"{wiring.mtu}\n"


@pytest.mark.parametrize("loss", [0.0, 0.5])
def test_packets_are_lost_as_likely_as_wanted(loss: float) -> None:
    with Lab(["h1", "h2"], Wiring(loss=loss, delay=0.001)) as lab:
        h1, h2 = lab.hosts["h1"], lab.hosts["h2"]
        with h2.popen([sys.executable, "-c", COUNT], stdout=subprocess.PIPE, text=True) as counter:
            assert counter.stdout is not None
            assert counter.stdout.readline() == "ready\n"
            h1.run([sys.executable, "-c", SEND])
            count = int(counter.stdout.readline())
    assert count == 200 if loss == 0 else 50 < count < 150


def test_two_labs_do_not_see_each_other() -> None:
    with Lab(["h1", "h2"]) as one, Lab(["h1", "h2"]) as other:
        with one.hosts["h1"].popen([sys.executable, "-c", SERVER, "h1"], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            server.stdout.readline()
            refused = other.hosts["h2"].run([sys.executable, "-c", CLIENT, "h1"], check=False)
            assert "ConnectionRefusedError" in refused.stderr
            assert one.hosts["h2"].run([sys.executable, "-c", CLIENT, "h1"]).stdout == "b'hello'\n"


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def test_the_end_of_a_lab_ends_what_runs_in_it() -> None:
    with Lab(["h1"]) as lab:
        host = lab.hosts["h1"]
        script = "setsid sleep 1000 & echo; exec sleep 1000"
        child = host.popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
    assert child.returncode == 128 + signal.SIGKILL
    assert child.stdout.read() == "", "the one that was left behind has closed it"
    child.stdout.close()
    assert is_gone(host.pid)
    lab.close()


def test_a_lab_ends_with_its_process_even_by_sigkill() -> None:
    script = (
        "import signal; from rdmacm.lab import Lab; lab = Lab(['h1']); h1 = lab.hosts['h1'];"
        " h1.popen(['sleep', '1000']); print(h1.pid, flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=python_environment()) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not is_gone(pid)
        process.kill()
        assert process.stdout.read() == "", "the programs of the lab have closed it"
    assert eventually(lambda: is_gone(pid))


def test_a_system_that_refuses_namespaces_is_told_of() -> None:
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    program = "from rdmacm.lab import Lab; Lab(['h1'])"
    with Lab(["h1"]) as lab:
        command = ["sh", "-c", script, "sh", sys.executable, "-c", program]
        done = lab.hosts["h1"].run(command, check=False, env=python_environment())
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rdmacm.errors.RdmaError: lab: namespaces are refused here: unshare: ")
    assert last.endswith("[ENOSPC]; try: sysctl user.max_user_namespaces=10000 as root")


def test_names_are_checked_first() -> None:
    with pytest.raises(ValueError, match="localhost"):
        Lab(["localhost"])
