"""Another user of the host: names and files that it takes, messages that it sends.

The other user is a process that has given up root's privileges, so these tests need root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from socket import AF_INET, inet_aton

import pytest

from rdmacm.constants import PortSpace
from rdmacm.proto.cm.codes import AttributeId
from rdmacm.soft.port_table import PortOwner, PortTable
from rdmacm.soft.wire import group_names, parking
from rdmacm.soft.wire import port_group as sharing
from rdmacm.soft.wire.forwarding import _pack, bind_name
from rdmacm.soft.wire.udp import UdpWire
from support.processes import CallFailed, MakeWorker, Server, Worker, linux_only
from support.wires import SERVICE, collect, mad, packet, path, wait

pytestmark = [
    linux_only,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to be two users"),
]

NOBODY = 65534
HERE = path("127.0.0.1", "127.0.0.1")
ANY = bytes(4)


@pytest.fixture
def stranger(worker: MakeWorker) -> Worker:
    """A process of another user, which has no wire."""
    found = worker()
    found(Server.become, NOBODY)
    return found


@pytest.fixture
def wire(port: int, stranger: Worker) -> Iterator[UdpWire]:
    """The wire of this process, the first member. It does not exist yet in the other processes."""
    wire = UdpWire(port=port)
    wire.open()
    yield wire
    wire.close()


def admit(wire: UdpWire, worker: Worker) -> int:
    """Have a worker open its wire, and admit it to the group. Returns its slot."""
    worker.begin(Server.open)
    while not worker.control.poll():
        wire.receive()
    worker.slot = worker.result()
    return worker.slot


# -- what the other user does, in its process ------------------------------------------------------------------------


def forge(server: Server, name: str, message: bytes) -> None:
    """Send a message to a forwarding socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect("\0" + name)
        sock.send(message)


def names_in_use(server: Server, port: int) -> list[str]:
    """What any user can see."""
    with open("/proc/net/unix") as file:
        found = [line.split()[-1].removeprefix("@") for line in file]
    return sorted({name for name in found if name.startswith(f"rdmacm-{port}-")})


def bind_names(server: Server, names: list[str], listens: bool) -> int:
    """Bind the names that are free, and return how many were."""
    bound = 0
    for name in names:
        try:
            sock = bind_name(name)
        except OSError:
            continue
        if listens:
            sock.listen()
        server.tokens.append(sock)
        bound += 1
    return bound


def bind_guesses(server: Server, port: int) -> int:
    """Bind the names that follow from those in use, if they say what they are for. Return how many were bound."""
    guesses = set()
    for name in names_in_use(server, port):
        found = re.fullmatch(r"(rdmacm-\d+-\w+-)(slot|service)-.*", name)
        if found is not None:
            guesses |= {f"{found[1]}slot-{slot}" for slot in range(1, 256)}
            guesses |= {f"{found[1]}service-{SERVICE:016x}-{where}" for where in ("any", "00000000", "0" * 32)}
    return bind_names(server, sorted(guesses), listens=False)


def fill_backlog(server: Server, name: str) -> None:
    """Bind a name, listen, and connect to it until nobody else can."""
    listener = bind_name(name)
    listener.listen(0)
    server.tokens.append(listener)
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        server.tokens.append(sock)
        try:
            sock.connect("\0" + name)
        except BlockingIOError:
            return


# -- names of sockets ------------------------------------------------------------------------------------------------


def test_other_user_cannot_forward_packets(wire: UdpWire, worker: MakeWorker, stranger: Worker) -> None:
    honest = worker()
    assert wire._group is not None  # no public call returns the names
    name = wire._group.slot_name(wire.slot)
    message = b"".join(_pack((memoryview(bytes(16)), 0, ("127.0.0.1", 4791), bytes(4))))
    for sender, expected in ((stranger, 0), (honest, 1)):
        sender(forge, name, message)
        wait([wire])
        # One call accepts the connection, one reads from it, one sees its end.
        assert sum(len(wire.receive()) for _ in range(3)) == expected


def test_other_user_cannot_intercept_by_binding_a_name(wire: UdpWire, stranger: Worker) -> None:
    assert wire._group is not None
    assert stranger(bind_names, [wire._group.service_name(SERVICE, None)], True) == 1
    wire.send(wire.route(HERE), (mad(AttributeId.REQ), bytes(4)))
    assert [each.body for each in collect(wire, 1)] == [mad(AttributeId.REQ)]


def test_names_of_free_slots_and_services_cannot_be_guessed(
    wire: UdpWire, worker: MakeWorker, stranger: Worker
) -> None:
    """Finding F8: one look at /proc/net/unix told the names of all slots and services of a group."""
    token = wire.listen(SERVICE + 1, None)
    assert stranger(bind_guesses, wire.port) == 0
    admit(wire, worker())
    wire.unlisten(wire.listen(SERVICE, None))
    wire.unlisten(token)


@pytest.mark.parametrize("listens", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_released_name_that_another_user_binds_is_abandoned(
    wire: UdpWire, worker: MakeWorker, stranger: Worker, listens: bool
) -> None:
    sender = worker()
    admit(wire, sender)
    for again in range(3):
        token = wire.listen(SERVICE, None)
        before = stranger(names_in_use, wire.port)
        wire.unlisten(token)
        assert stranger(bind_names, before, listens) == 1
        token = wire.listen(SERVICE, None)
        with pytest.raises(CallFailed, match="another process listens"):
            sender(Server.listen, SERVICE, None)
        sender(Server.send, 1, mad(AttributeId.REQ, tail=bytes([again]))[12:])
        assert [each.body for each in collect(wire, 1)] == [mad(AttributeId.REQ, tail=bytes([again]))]
        wire.unlisten(token)


@pytest.mark.slow
def test_released_slot_that_another_user_binds_is_used_once_all_others_are(
    wire: UdpWire, worker: MakeWorker, stranger: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "MAX_SLOT", 3)
    second, third = worker(), worker()
    slot = admit(wire, second)
    names = stranger(names_in_use, wire.port)
    second.kill()
    assert stranger(bind_names, names, True) == 1
    assert admit(wire, third) != slot
    successor = worker()
    assert admit(wire, successor) == slot
    assert wire._group is not None
    message = b"".join(_pack((memoryview(packet(slot << 12 | 7)), 0, ("127.0.0.1", 4791), bytes(4))))
    worker()(forge, wire._group.slot_name(slot), message)
    assert len(successor.collect(1)) == 1
    with pytest.raises(CallFailed, match="own all 4095 slots") as caught:
        admit(wire, worker())
    assert caught.value.errno == errno.EUSERS


@pytest.mark.slow
def test_number_of_abandoned_names_is_limited(
    wire: UdpWire, worker: MakeWorker, stranger: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_names, "MAX_ABANDONED", 2)
    assert wire._group is not None
    for _ in range(2):
        wire.unlisten(wire.listen(SERVICE, None))
        assert stranger(bind_names, [wire._group.service_name(SERVICE, None)], False) == 1
        wire.unlisten(wire.listen(SERVICE, None))
    stranger(bind_names, [wire._group.service_name(SERVICE, None)], False)
    with pytest.raises(OSError, match="another process listens") as caught:
        wire.listen(SERVICE, None)
    assert caught.value.errno == errno.EADDRINUSE
    wire.unlisten(wire.listen(SERVICE + 1, None))


@pytest.mark.parametrize("how", ["bound", pytest.param("full", marks=pytest.mark.slow)])
def test_name_of_the_port_that_another_user_binds_is_named_in_the_error(
    port: int, stranger: Worker, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who binds first has the port: the UDP port itself is as free as its name."""
    # A name that is bound ends the attempt without a wait; only a full backlog is waited for.
    monkeypatch.setattr(sharing, "JOIN_SECONDS", 1000.0 if how == "bound" else 0.1)
    if how == "bound":
        stranger(bind_names, [f"rdmacm-{port}-admission"], False)
    else:
        stranger(fill_backlog, f"rdmacm-{port}-admission")
    with pytest.raises(OSError, match=f"of user {NOBODY} has the port.*network namespace of your own") as caught:
        UdpWire(port=port).open()
    assert caught.value.errno == errno.EACCES


# -- the file of port numbers ----------------------------------------------------------------------------------------

NAME = "rdmacm-ports-net1"


def owner(port: int) -> PortOwner:
    return PortOwner(PortSpace.TCP, port, AF_INET, inet_aton("10.0.0.1"), 0, False, False, True)


def table(directory: Path) -> PortTable:
    return PortTable("net:[1]", directory=str(directory))


def bind_port(server: Server, directory: str) -> str | None:
    """Bind port 4000; return the path of the file."""
    ports = table(Path(directory))
    ports.bind(owner(4000))
    server.tokens.append(ports)
    return ports.path


def close_table(server: Server) -> None:
    ports = server.tokens.pop()
    assert isinstance(ports, PortTable)
    ports.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory like /dev/shm, which all users can enter."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    "kind",
    [
        "unreadable",
        "locked",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("directory", "fifo", "link")),
    ],
)
def test_file_that_another_user_denies_is_replaced(stranger: Worker, directory: Path, kind: str) -> None:
    """Finding F8: a file with the name of the table, made before, kept all other users from binding."""
    denied = directory / NAME
    if kind == "directory":
        denied.mkdir()
    elif kind == "fifo":
        os.mkfifo(denied)
    elif kind == "link":
        denied.symlink_to("/etc/passwd")
    else:
        denied.touch()
        denied.chmod(0o666 if kind == "locked" else 0o600)
    with denied.open("r+") if kind == "locked" else open(os.devnull, "w") as file:
        if kind == "locked":
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        used = stranger(bind_port, str(directory))
        assert used == str(directory / f"{NAME}-{NOBODY}")
        assert os.stat(used).st_mode & 0o777 == 0o600
        stranger(close_table)
    assert os.listdir(directory) == [NAME]


def test_both_files_denied_leave_a_private_table(stranger: Worker, directory: Path) -> None:
    for name in (NAME, f"{NAME}-{NOBODY}"):
        (directory / name).touch(0o600)
    assert stranger(bind_port, str(directory)) is None


def test_file_of_another_user_is_shared_if_it_can_be(stranger: Worker, directory: Path) -> None:
    ports = table(directory)
    ports.bind(owner(4001))
    assert stranger(bind_port, str(directory)) == str(directory / NAME)
    with pytest.raises(OSError, match="port 4000 is in use by process"):
        ports.bind(owner(4000))
    stranger(close_table)
    ports.close()
    assert not os.listdir(directory)


def test_full_file_system_leaves_a_private_table(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ports = table(directory)
    monkeypatch.setattr(os, "open", full)
    ports.bind(owner(4000))
    monkeypatch.undo()
    assert "not shared with other processes" in caplog.text
    assert ports.path is None
    ports.close()
