"""What programs of ``rdmacm run`` count, which ``rdmacm stat`` shows."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hatch_build
import pytest

from rdmacm.provider.statistics import ProcessCounters, process_counters
from rdmacm.run.command import environment_of
from rdmacm.run.counting import COUNTS, ERRNOS, LOST, MOST_DEVICES, REFUSALS, STRAYS, SharedCounters, command_of
from rdmacm.run.options import Options
from rdmacm.run.protocol import Request
from rdmacm.run.server import Server
from rdmacm.soft.wire.base import TRAFFIC
from support.clock import eventually
from support.run_client import Client
from support.run_programs import compile_program, needs_headers

pytestmark = needs_headers


@pytest.fixture
def program(library: Path, served: Server, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``counted.c``, which has printed its first line."""
    path = tmp_path / "counted"
    compile_program("counted", path, library)
    environment = {**os.environ, **environment_of(str(library), served.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([path, "a", "b"], stdin=pipe, stdout=pipe, text=True, env=environment) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "sent\n"
        yield started
        started.kill()


def counters_of(program: subprocess.Popen[str]) -> ProcessCounters:
    (found,) = (each for each in process_counters() if each.pid == program.pid)
    return found


def test_a_program_is_shown_while_it_runs(served: Server, program: subprocess.Popen[str]) -> None:
    device = served.devices()[0].name

    def counted(name: str) -> int:
        return counters_of(program).counters.devices[device][name]

    # The peer of its second message has no receive: these go on without a call of the program.
    eventually(lambda: counted("rcvd_rnr_err") >= 2)
    found = counters_of(program)
    assert found.command == "counted a b"
    assert list(found.counters.devices) == [device]
    assert set(found.counters.traffic) == set(TRAFFIC)
    assert counted("send_rnr_err") >= counted("rcvd_rnr_err")
    traffic = found.counters.traffic
    # Both ends are in it. 2,048 bytes of the first message, and its two packets, their ACK and an RNR NAK.
    assert traffic["sent_pkts"] >= traffic["rcvd_pkts"] >= 5
    assert traffic["rcvd_bytes"] > 2048
    assert traffic["send_err"] == 0
    assert not found.counters.udp
    assert os.getpid() in [each.pid for each in process_counters()]
    program.communicate("go\n", timeout=60)
    assert program.returncode == 0
    eventually(lambda: program.pid not in [each.pid for each in process_counters()])


@pytest.mark.parametrize("options", [Options(delay=0.001)])
def test_packets_that_are_held_up_count_as_sent(options: Options, program: subprocess.Popen[str]) -> None:
    found = counters_of(program).counters.traffic
    assert found["sent_pkts"] >= found["rcvd_pkts"] >= 3


def test_memory_is_of_a_fixed_size_and_new_each_time(client: Client) -> None:
    for _ in range(2):
        error, _, (fd,) = client.ask_all(Request.COUNTERS)
        try:
            assert not error
            assert os.fstat(fd).st_size == SharedCounters.SIZE
            for size in (0, 2 * SharedCounters.SIZE):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
            assert not any(os.pread(fd, SharedCounters.SIZE, 0))
            os.pwrite(fd, b"\xff" * SharedCounters.SIZE, 0)
        finally:
            os.close(fd)


def test_a_device_that_is_not_there_is_not_shown() -> None:
    shared = SharedCounters()
    os.pwrite(shared.fd, b"\xff" * SharedCounters.SIZE, 0)
    found = shared.read({1: "soft_lo"})
    shared.close()
    assert not found.devices
    assert set(found.traffic.values()) == {2**64 - 1}
    with pytest.raises(ValueError, match="closed"):
        shared.read({})


def test_command_of_a_process_that_has_ended_is_empty() -> None:
    assert command_of(os.getpid())
    assert command_of(2**30) == ""


# -- the layout -------------------------------------------------------------------------------------------------


def enumerators(path: str, name: str) -> list[str]:
    """Those of an enum that have a name in Python; the others are their number."""
    text = (hatch_build.SOURCES / path).read_text().partition(f"enum {name} {{\n")[2].partition("\n};")[0]
    found = re.findall(r"^ +(RDMACM_\w+),", text, re.MULTILINE)
    return [each for each in found if each not in ("RDMACM_COUNTS", "RDMACM_REFUSALS", "RDMACM_STRAYS")]


def names(path: str, pattern: str) -> dict[str, str]:
    """The initialisers of an array by index."""
    return dict(re.findall(rf"\[(RDMACM_\w+)\] = {pattern}", (hatch_build.SOURCES / path).read_text()))


def test_names_stand_in_the_order_of_the_core() -> None:
    of = names("python/module_engine.c", r'\{"\w+", "(\w[\w ]*)"\}')
    counters = names("python/module_engine.c", r'\{"(\w+)", "\w[\w ]*"\}')
    assert [(counters[each], of[each]) for each in enumerators("engine/rdmacm_core.h", "rdmacm_count")] == [*COUNTS]
    of = names("python/module_engine.c", r'"(\w[\w ]*)"')
    assert [of[each] for each in enumerators("engine/rdmacm_core.h", "rdmacm_refusal")] == [*REFUSALS]
    of = names("python/module_wire.c", r'"(\w[\w ]*)"')
    strays = [of[each] for each in enumerators("wire/rdmacm_wire.h", "rdmacm_stray")]
    assert [each.removeprefix("rx_") for each in STRAYS] == strays


def test_sizes_are_those_of_the_library(tmp_path: Path) -> None:
    lines = """
#include "library/objects.h"
#include <stdio.h>
int main(void) {
    struct shared_counters *shared = NULL;
    printf("%zu %zu %zu %d %d\\n", sizeof *shared, sizeof shared->tally / 8, sizeof shared->tally.traffic / 8,
           RDMACM_ERRNO_COUNT, MOST_COUNTED_DEVICES);
}
"""
    path = tmp_path / "sizes"
    include = [f"-I{hatch_build.SOURCES / each}" for each in ("", "engine", "wire")]
    subprocess.run(["gcc", "-w", "-D_GNU_SOURCE", *include, "-o", path, "-xc", "-"], input=lines, text=True, check=True)
    printed = subprocess.run([path], capture_output=True, text=True, check=True).stdout.split()
    tally = len(TRAFFIC) + len(STRAYS) + ERRNOS + len(LOST)
    assert [*map(int, printed)] == [SharedCounters.SIZE, tally, len(TRAFFIC), ERRNOS, MOST_DEVICES]
