"""Device files: what a program of ``rdmacm run`` finds in ``/sys/class/infiniband`` and ``/dev/infiniband``."""

from __future__ import annotations

import os
import pty
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rdmacm.run.server import Server
from rdmacm.run.tree import tree_of

#: Prefixes of a command. Root with so few capabilities has what any user has; it needs one to have its own user id.
PLAIN: tuple[str, ...] = ()
UNPRIVILEGED = ("setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all")
#: Mount namespaces are refused, as in many containers; and user namespaces to one who needs them.
REFUSED = ("unshare", "-Ur", "sh", "-c", 'echo 0 >/proc/sys/user/max_mnt_namespaces && exec "$@"', "sh")
REFUSED_TO_USERS = (
    *("unshare", "-Ur", "sh", "-c", 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"', "sh"),
    *("setpriv", "--bounding-set=-all", "--inh-caps=-all"),
)


def works(*command: str) -> bool:
    return (
        shutil.which(command[0]) is not None
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )


needs_mounts = pytest.mark.skipif(not works("unshare", "-Urm", "true"), reason="needs user and mount namespaces")
privileges = pytest.mark.parametrize(
    "prefix",
    [
        pytest.param(PLAIN, id="own-privileges"),
        pytest.param(
            UNPRIVILEGED,
            id="unprivileged",
            marks=pytest.mark.skipif(not works(*UNPRIVILEGED, "true"), reason="needs root, and setpriv of util-linux"),
        ),
    ],
)


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the place of the library: no program of these tests takes one of its names."""
    found = tmp_path / "library.so"
    found.write_bytes(Path(sys.executable).resolve().read_bytes()[:64])
    monkeypatch.setenv("RDMACM_RUN_LIBRARY", str(found))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
    return found


def run(prefix: tuple[str, ...], *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program by ``rdmacm run``."""
    command = [*prefix, sys.executable, "-m", "rdmacm", "run", "--", *argv]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)


def printed(prefix: tuple[str, ...], *argv: str) -> str:
    done = run(prefix, *argv)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# -- the files ------------------------------------------------------------------------------------------------


def test_files_say_what_the_device_is(served: Server) -> None:
    (device,) = (each for each in served.devices() if each.name == "soft_lo")
    tree = tree_of([device], "host")
    at = "/sys/class/infiniband/soft_lo"
    files = {path.removeprefix(f"{at}/"): text.rstrip("\n") for path, text in tree.files.items()}
    assert files["node_guid"] == files["sys_image_guid"] == device.guid_text
    assert (files["node_type"], files["node_desc"], files["parent"]) == ("1: CA", "host:soft_lo", "lo")
    assert (files["ports/1/state"], files["ports/1/phys_state"]) == ("4: ACTIVE", "5: LinkUp")
    assert (files["ports/1/link_layer"], files["ports/1/rate"]) == ("Ethernet", "2.5 Gb/sec (1X SDR)")
    row = device.ports[0].gids[0]
    assert files[f"ports/1/gids/{row.gid_index}"] == "0000:0000:0000:0000:0000:ffff:7f00:0001"
    assert files[f"ports/1/gid_attrs/types/{row.gid_index}"] == "RoCE v2"
    assert files[f"ports/1/gid_attrs/ndevs/{row.gid_index}"] == "lo"
    assert files["ports/1/pkeys/0"] == "0xffff"
    assert files["device/net/lo/ifindex"] == str(device.index)
    assert tree.files[f"/sys/class/infiniband_verbs/uverbs{device.index}/ibdev"] == "soft_lo\n"
    assert tree.nodes == ["/dev/infiniband/rdma_cm", f"/dev/infiniband/uverbs{device.index}"]


def test_a_port_without_an_address_has_a_first_row_of_zeros(served: Server) -> None:
    """libibumad, and so ibstat, fails for all devices where one has none."""
    (device,) = (each for each in served.devices() if each.name == "soft_lo")
    bare = replace(device, ports=(replace(device.ports[0], gids=()),))
    rows = {path: text for path, text in tree_of([bare], "host").files.items() if "/gid" in path}
    assert rows == {"/sys/class/infiniband/soft_lo/ports/1/gids/0": ":".join(8 * ["0000"]) + "\n"}


def test_counters_are_not_made_up(served: Server) -> None:
    """Programs that list them find none."""
    tree = tree_of(served.devices(), "host")
    at = "/sys/class/infiniband/soft_lo/ports/1/"
    assert {f"{at}counters", f"{at}hw_counters"} <= {*tree.directories}
    assert not [path for path in tree.files if "counters" in path]


# -- mounts ---------------------------------------------------------------------------------------------------

LOOK = """
import os, stat
paths = [f"/dev/infiniband/{name}" for name in sorted(os.listdir("/dev/infiniband"))]
print(len(paths), all(stat.S_ISCHR(os.stat(path).st_mode) and os.access(path, os.R_OK | os.W_OK) for path in paths))
print(open("/sys/class/infiniband/soft_lo/ports/1/state").read(), end="")
for path in ("infiniband_verbs/uverbs1/device", "infiniband/soft_lo/../.."):
    print(os.path.realpath(f"/sys/class/{path}"))
print(os.getuid(), os.getgid(), os.readlink("/proc/self/ns/net"))
"""


@needs_mounts
@privileges
def test_a_program_sees_the_devices_as_the_same_user_in_the_same_network(prefix: tuple[str, ...]) -> None:
    nodes, who = f"{len(socket.if_nameindex()) + 1} True\n", f"{os.getuid()} {os.getgid()}"
    places = "/sys/class/infiniband/soft_lo/device\n/sys/class"
    network = os.readlink("/proc/self/ns/net")
    assert printed(prefix, sys.executable, "-c", LOOK) == f"{nodes}4: ACTIVE\n{places}\n{who} {network}\n"


@needs_mounts
@pytest.mark.parametrize("program", ["ibstat", "ibstatus"])
def test_tools_that_read_the_files_show_every_device(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program} (Debian package infiniband-diags)")
    shown = printed(PLAIN, program)
    for _, name in socket.if_nameindex():
        assert f"soft_{name}'" in shown
    (loopback,) = (text for text in re.split("^(?=CA|Infiniband)", shown, flags=re.MULTILINE) if "soft_lo'" in text)
    fields = dict(re.findall(r"^[ \t]*([\w ]+):[ \t]*(.*)$", loopback, re.MULTILINE))
    if program == "ibstat":
        assert (fields["State"], fields["Physical state"], fields["Rate"]) == ("Active", "LinkUp", "2.5")
        assert (fields["CA type"], fields["Link layer"], fields["Base lid"]) == ("rdmacm", "Ethernet", "0")
    else:
        assert (fields["state"], fields["phys state"], fields["link_layer"]) == ("4: ACTIVE", "5: LinkUp", "Ethernet")
        assert fields["default gid"].endswith("ffff:7f00:0001")


@needs_mounts
@privileges
def test_what_else_is_in_dev_and_sys_stays(prefix: tuple[str, ...]) -> None:
    expected = {
        "/dev": {*os.listdir("/dev"), "infiniband"},
        "/sys/class": {*os.listdir("/sys/class"), "infiniband", "infiniband_verbs", "infiniband_mad"},
    }
    for place, names in expected.items():
        assert {*printed(prefix, "ls", "-1", place).split()} == names
    script = """
        echo lost >/dev/null; head -c 8 /dev/urandom | wc -c; cat /sys/class/net/lo/mtu; test -w /dev/shm
        cat </dev/stdin; echo x 2>/dev/null >/dev/full || echo full
    """
    mtu = Path("/sys/class/net/lo/mtu").read_text().strip()
    assert printed(prefix, "sh", "-c", script).split() == ["8", mtu, "full"]


@needs_mounts
@privileges
def test_pseudo_terminals_work(prefix: tuple[str, ...]) -> None:
    try:
        for fd in pty.openpty():
            os.close(fd)
    except OSError:
        pytest.skip("needs pseudo terminals")
    script = "import os, pty; pid, fd = pty.fork(); pid or os._exit(not os.isatty(0)); print(os.wait()[1])"
    assert printed(prefix, sys.executable, "-c", script) == "0\n"


@needs_mounts
@privileges
def test_a_program_of_a_program_has_a_tree_of_its_own(prefix: tuple[str, ...]) -> None:
    """Where the directories exist, as on a host with RDMA devices, they are replaced."""
    again = (sys.executable, "-m", "rdmacm", "run", "--", "ls", "/sys/class/infiniband")
    assert "soft_lo" in printed(prefix, *again).split()


@needs_mounts
@privileges
def test_nothing_is_left_on_the_host(prefix: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = {*os.listdir(tmp_path)}
    printed(prefix, "true")
    assert run(prefix, "sh", "-c", "kill -9 $$").returncode == 137
    mounts = Path("/proc/self/mounts").read_text()
    assert "infiniband" not in mounts
    assert str(tmp_path) not in mounts
    assert {*os.listdir(tmp_path)} == before


def test_what_is_no_device_of_rdma_says_so() -> None:
    """A command of the kernel's ABI that a program writes itself fails, and does not seem to succeed."""
    done = run(
        PLAIN, sys.executable, "-c", "import os; os.write(os.open('/dev/infiniband/rdma_cm', os.O_RDWR), bytes(8))"
    )
    assert "No space left on device" in done.stderr


@needs_mounts
@pytest.mark.parametrize("prefix", [REFUSED, REFUSED_TO_USERS], ids=["mounts", "users"])
def test_where_namespaces_are_refused_the_program_runs_without_and_it_is_told(prefix: tuple[str, ...]) -> None:
    if not works(*prefix, "true"):
        pytest.skip("needs setpriv of util-linux")
    done = run(prefix, "sh", "-c", "test -S $RDMACM_RUN_SOCKET; ls /dev/infiniband/uverbs1 2>/dev/null; exit 5")
    assert done.returncode == 5
    assert done.stdout == ""
    assert "/dev/infiniband and /sys/class/infiniband do not show the devices" in done.stderr


def test_an_error_of_the_mounts_is_one_of_the_system(tmp_path: Path) -> None:
    """In a child, as it may end up in a namespace."""
    script = f"""
import sys
from rdmacm.run.mounts import show
from rdmacm.run.tree import Tree
try:
    show(Tree(nodes=["/dev/infiniband/rdma_cm"]), {str(tmp_path / "missing")!r})
except OSError as error:
    sys.exit(error.errno)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 2


def test_a_file_that_is_no_program_has_the_status_of_one(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\0\0")
    program.chmod(0o755)
    done = run(PLAIN, str(program))
    assert done.returncode == 126
    assert "Exec format error" in done.stderr
