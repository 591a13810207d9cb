"""The queue with the sockets of all slots: its order, its room, and the limits of the system."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from rdmacm.proto.constants import MAX_SLOT
from rdmacm.soft.wire import parking as module
from rdmacm.soft.wire.parking import Parking
from support.processes import linux_only

pytestmark = linux_only

#: A user without processes: the system counts the descriptors that a user has under way.
NOBODY_ELSE = 48_791
#: What Linux allows a process without privileges (net.core.wmem_max).
DEFAULT_BYTES = 212_992


@pytest.fixture
def queue() -> Iterator[Parking]:
    queue = Parking.create(2)
    yield queue
    queue.close()


def park_all(queue: Parking, fds: list[int], last: int = MAX_SLOT) -> list[range]:
    """Park copies of two sockets at each position."""
    done = []
    while queue.last_position() < last and (positions := queue.next_positions()):
        queue.park(positions[0], fds * len(positions))
        done.append(positions)
    return done


def test_all_positions_fit_into_the_send_buffer_of_any_process(queue: Parking) -> None:
    queue.ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, DEFAULT_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        positions = park_all(queue, [sock.fileno()] * 2)
        assert [position for each in positions for position in each] == list(range(1, MAX_SLOT + 1))
        assert queue.last_position() == MAX_SLOT
        for position in (1, 128, 129, 160, 161, 1000, MAX_SLOT):
            copies = queue.copies(position)
            assert [os.path.sameopenfile(each.fileno(), sock.fileno()) for each in copies] == [True, True]
            for each in copies:
                each.close()


@pytest.mark.parametrize("families", [1, 2])
def test_each_position_has_its_own_sockets(families: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SINGLE", 3)
    monkeypatch.setattr(module, "_BATCH", 4)
    monkeypatch.setattr(module, "MAX_SLOT", 9)
    queue = Parking.create(families)
    made: list[socket.socket] = []
    seen = []
    while positions := queue.next_positions():
        seen.append(list(positions))
        added = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(families * len(positions))]
        queue.park(positions[0], [each.fileno() for each in added])
        made += added
        assert queue.last_position() == positions[-1]
    assert seen == [[1], [2], [3], [4, 5, 6, 7], [8, 9]]
    descriptors = len(os.listdir("/proc/self/fd"))
    for position in (5, 1, 9, 4, 8, 3, 7, 2, 6):
        copies = queue.copies(position)
        wanted = made[(position - 1) * families : position * families]
        assert [os.fstat(each.fileno()).st_ino for each in copies] == [
            os.fstat(each.fileno()).st_ino for each in wanted
        ]
        for each in copies:
            each.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    queue.close()
    for sock in made:
        sock.close()


def test_sockets_that_do_not_arrive_are_an_error(queue: Parking) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        park_all(queue, [sock.fileno()] * 2, 1)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = len(os.listdir("/proc/self/fd"))
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        spare = [os.dup(0) for _ in range(highest)]  # no number below is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 2, before[1]))
        try:
            with pytest.raises(OSError, match=r"2 descriptors .* did not arrive.*RLIMIT_NOFILE") as caught:
                queue.copies(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in spare:
                os.close(fd)
        assert caught.value.errno == errno.EMFILE
        assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_only_the_hard_limit_of_open_files_counts(queue: Parking) -> None:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY_ELSE)
            os.setuid(NOBODY_ELSE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
            try:
                park_all(queue, [0, 0])
            except OSError as error:
                # The kernel compares what was under way before a message.
                is_right = error.errno == errno.ETOOMANYREFS and 512 < 2 * queue.last_position() < 512 + 2 * 33
                is_kept = resource.getrlimit(resource.RLIMIT_NOFILE) == (64, 512)
                status = 0 if is_right and is_kept else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
