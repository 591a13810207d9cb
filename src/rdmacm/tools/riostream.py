"""``rdmacm riostream``: write into each other's memory through an rsocket, with the protocol of riostream(1).

Each end maps a buffer at offset 0 for a test (riomap of rsocket(7)). After an exchange of 16 bytes, the client writes
the transfers of an iteration into the server's buffer by riowrite, and the server as many back. Nothing tells when they
are there but the last byte of the buffer, which counts the turns. Sizes and counts are not sent: both ends must be
started with the same values.
"""

from __future__ import annotations

import argparse
import errno
import select
import socket as tcp
import time

from rdmacm import rsocket
from rdmacm.errors import CmDisconnectedError, cm_error
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import Page, Parser
from rdmacm.tools.rstream import SYNC, Socket, StreamTest, StreamTests, add_stream_arguments, pattern, run_tests

PAGE = Page(
    command="riostream",
    summary=COMMANDS["riostream"],
    description="""
        The client writes into memory of the server, and the server writes as much back, for several sizes: first one
        transfer at a time (names in _lat), then many (_bw). With -I, -C or -S there is one test, named custom. Each end
        waits until the last byte of its buffer changes. Protocol, options and output are those of riostream(1) of
        librdmacm, which may run at the other end. The client is the end with HOST.

        A server reports its address on standard error, and serves one client. Both ends must be given the same -I, -C
        and -S. The columns, and the object of --json, are those of rdmacm rstream.
    """,
    examples=(
        ("rdmacm riostream", "Serve a client with the usual tests."),
        ("rdmacm riostream localhost", "Run that client."),
        ("rdmacm riostream storage-7 -S 4096 -C 100 -I 10 -T v", "Run one test and check the data."),
    ),
    see_also="riostream(1), rsocket(7), rdmacm rstream",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE"),
)

#: The letters of -T, and their words.
_TESTS = {"a": "async", "b": "blocking", "n": "nonblocking", "v": "verify"}


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm riostream``."""
    add_stream_arguments(parser, _TESTS)


def run(args: argparse.Namespace) -> int:
    """Run as the server or the client."""
    return run_tests(args, _TESTS, _MappedTests)


class _MappedTests(StreamTests):
    """One end."""

    def make(self, family: int) -> Socket:
        made = super().make(family)
        made.setsockopt(rsocket.SOL_RDMA, rsocket.RDMA_IOMAPSIZE, 1)
        return made

    def measure(self, stream: Socket, test: StreamTest, buffer: memoryview) -> None:
        """Make one test."""
        assert isinstance(stream, rsocket.socket)
        part = buffer[: test.size]
        part[-1] = 0xFF
        offset = stream.riomap(part, offset=0)
        exchange = memoryview(bytearray(len(SYNC)))
        for step in (self._send_all, self._receive_all) if self.is_client else (self._receive_all, self._send_all):
            step(stream, exchange)
        started = time.perf_counter()
        turn = 0
        for _ in range(test.iterations):
            for is_ours in (self.is_client, not self.is_client):
                if is_ours:
                    self._write(stream, part, test.transfers, turn)
                else:
                    self._await(stream, part, turn)
                turn = (turn + 1) % 256
        self.report(test, time.perf_counter() - started)
        stream.riounmap(offset)

    def _send_all(self, stream: rsocket.socket, data: memoryview) -> None:
        stream.sendall(data)

    def _receive_all(self, stream: rsocket.socket, into: memoryview) -> None:
        if stream.recv_into(into, 0, tcp.MSG_WAITALL) < len(into):
            raise CmDisconnectedError(errno.ECONNRESET, "the peer has closed the stream", "recv")

    def _write(self, stream: rsocket.socket, part: memoryview, transfers: int, turn: int) -> None:
        """Write the transfers of an iteration; the last one has the number of the turn in its last byte."""
        for number in range(transfers):
            if number == transfers - 1:
                part[-1] = turn
                if "v" in self.chosen:
                    part[:-1] = pattern(self.next_sent, len(part) - 1)
                    self.next_sent += len(part) - 1
            done = 0
            while done < len(part):
                self.poll(stream, select.POLLOUT)
                try:
                    done += stream.riowrite(part[done:], done, tcp.MSG_DONTWAIT if self.chosen & {"n", "a"} else 0)
                except BlockingIOError:
                    continue

    def _await(self, stream: rsocket.socket, part: memoryview, turn: int) -> None:
        """Wait until the peer has written: progress changes the last byte, and no call returns for it."""
        while part[-1] != turn:
            found = rsocket.poll([(stream, 0)], 0)
            if found and part[-1] != turn:
                raise CmDisconnectedError(errno.ECONNRESET, "the peer has ended the connection", "riowrite")
        if "v" in self.chosen:
            expected = pattern(self.next_seen, len(part) - 1)
            if part[:-1] != expected:
                at = next(number for number, byte in enumerate(part[:-1]) if byte != expected[number])
                raise cm_error(errno.EIO, f"data verification failed byte {self.next_seen + at}", "riowrite")
            self.next_seen += len(expected)
