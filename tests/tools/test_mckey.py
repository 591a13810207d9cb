"""``rdmacm mckey`` between processes: its protocol, its output, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.netns import python_environment
from support.pcap import roce
from support.roce_packets import RocePacket
from support.servers import Run

SENDER = """\
mckey: starting client
mckey: joining
mckey: joined dgid: ::ffff:239.1.2.3 mlid 0x0 sl 0
initiating data transfers
data transfers complete
test complete
return status 0
"""
RECEIVER = SENDER.replace("client", "server").replace("initiating", "receiving")
HERE = ("-m", "239.1.2.3", "-b", "127.0.0.1")


@contextmanager
def receivers(count: int, *argv: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have joined the group, and post no line before that."""
    command = [sys.executable, "-u", "-m", "rdmacm", "mckey", *HERE, *argv]
    pipe, environment = subprocess.PIPE, python_environment()
    made = [subprocess.Popen(command, stdout=pipe, text=True, env=environment) for _ in range(count)]
    try:
        yield made
    finally:
        for process in made:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def await_joins(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each process writes until it receives."""
    found = []
    for process in processes:
        assert process.stdout is not None
        said = ""
        while not said.endswith("receiving data transfers\n"):
            said += process.stdout.readline()
        found.append(said)
    return found


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_output_matches_mckey_at_each_end(run: Run, count: int) -> None:
    with receivers(count) as processes:
        said = await_joins(processes)
        assert run("mckey", *HERE, "-s", "--pause", "0") == (0, SENDER, "")
        assert [before + process.communicate()[0] for before, process in zip(said, processes, strict=True)] == (
            [RECEIVER] * count
        )
        assert [process.returncode for process in processes] == [0] * count


@pytest.mark.slow
def test_several_queue_pairs_of_a_sender_that_receives_nothing(run: Run) -> None:
    argv = ("-c", "3", "-C", "5", "-S", "4096")
    with receivers(1, *argv) as processes:
        await_joins(processes)
        found = run("mckey", *HERE, "-s", "-o", "--pause", "0", "--json", *argv).json
        processes[0].communicate()
        assert processes[0].returncode == 0
    assert found.pop("seconds") > 0
    moved = {"connections": 3, "messages": 5, "size": 4096, "sent": 61_440, "received": 0}
    assert found == {"role": "client", "group": "::ffff:239.1.2.3", **moved}


@pytest.mark.slow
def test_capture_has_the_packets_of_both_directions(run: Run, tmp_path: Path) -> None:
    files = [tmp_path / "receiver.pcapng", tmp_path / "sender.pcapng"]
    with receivers(1, "--pcap", str(files[0])) as processes:
        await_joins(processes)
        run("mckey", *HERE, "-s", "-o", "--pause", "0", "--pcap", str(files[1]))
        processes[0].wait()
    for file in files:
        packets = [RocePacket.unpack(datagram.payload[:-4]) for datagram in roce(file)]
        assert [packet.bth.dest_qpn for packet in packets] == [0xFFFFFF] * 10


@pytest.mark.slow
def test_receiver_that_misses_messages_ends(run: Run) -> None:
    with receivers(1, "--timeout", "0.5") as processes:
        await_joins(processes)
        run("mckey", *HERE, "-s", "-C", "4", "--pause", "0")
        out, _ = processes[0].communicate(timeout=20)
    assert processes[0].returncode == 1
    assert out.endswith("test complete\nreturn status -110\n")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((), "either -m ADDR or -M GID is needed"),
        (("-m", "239.1.2.3", "-M", "ff1e::7", "-b", "::1"), "either -m ADDR or -M GID is needed"),
        (("-M", "ff1e::7"), "requires binding to source address"),
        (("-M", "239.1.2.3"), "not a GID"),
        (("-m", "0.0.0.0", "-b", "127.0.0.1"), "not the address of a multicast group"),
        ((*HERE, "-l"), "EOPNOTSUPP"),
        ((*HERE, "-S", "4097"), "longer than the port's MTU of 4096"),
    ],
)
def test_wrong_arguments(run: Run, argv: tuple[str, ...], text: str) -> None:
    found = run("mckey", "-s", "--pause", "0", *argv)
    assert found.status
    assert text in found.err


def test_group_by_its_gid(run: Run) -> None:
    found = run("mckey", "-M", "::ffff:239.1.2.3", "-b", "127.0.0.1", "-s", "-C", "0")
    assert (found.status, found.err) == (0, "")
    assert "joined dgid: ::ffff:239.1.2.3 mlid 0x0 sl 0" in found.out
