"""What the sides of a check say to each other: bounded, and checked in each field."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.check.lines import (
    LONGEST_LINE,
    MOST_DATAGRAMS,
    LineError,
    address_of,
    classes_of,
    interfaces_of,
    number_of,
    pack,
    rows_of,
    text_of,
    unpack,
)
from rdmacm.check.serving import CheckServer
from rdmacm.check.tcp import Lines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
NAMES = ("hello", "from", "send", "classes", "interfaces", "error")


def test_lines_are_returned() -> None:
    rows = [(256, 0, 10), (4096, 104, 8)]
    line = unpack(pack(hello=1, rows=rows, source="10.0.0.1"))
    assert number_of(line, "hello", 1, 1) == 1
    assert rows_of(line, "rows") == rows
    assert address_of(line, "source") == "10.0.0.1"


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"1", b"\xff\xfe", b"[" * 5000, b'{"error": "no"}', b'{"a":' * 900, b" " * (LONGEST_LINE + 1)],
)
def test_bad_lines(line: bytes) -> None:
    with pytest.raises(LineError):
        unpack(line)


@pytest.mark.parametrize(
    "rows",
    [
        None,
        1,
        [1],
        [[1, 2]],
        [["1", 0, 1]],
        [[5000, 0, 1]],
        [[256, 256, 1]],
        [[256, 0, -1]],
        [[256, 0, True]],
        [[256, 0, MOST_DATAGRAMS], [256, 0, 1]],
        [[1, 0, 0]] * 33,
    ],
)
def test_bad_rows(rows: object) -> None:
    with pytest.raises(LineError):
        rows_of({"send": rows}, "send")


def test_interfaces() -> None:
    assert interfaces_of({"interfaces": {"02:00:00:00:00:01": "eth0"}}) == {"02:00:00:00:00:01": "eth0"}


def test_text_has_no_control_characters() -> None:
    assert text_of({"hint": "a\x1b[2Jb\nc"}, "hint") == "a?[2Jb?c"


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_no_line_raises_anything_else(fields: dict[str, object]) -> None:
    try:
        line = unpack(json.dumps(fields).encode())
    except LineError:
        return
    for take in (
        lambda: number_of(line, "hello", 1),
        lambda: address_of(line, "from"),
        lambda: rows_of(line, "send"),
        lambda: classes_of(line, "classes"),
        lambda: interfaces_of(line),
        lambda: text_of(line, "error"),
    ):
        with contextlib.suppress(LineError):
            take()


class TestServer:
    @pytest.fixture
    def lines(self) -> object:
        server = CheckServer("127.0.0.1", 0, "soft")
        thread = threading.Thread(target=server.run)
        thread.start()
        sock = socket.create_connection(server.where, 5)
        yield Lines(sock, 5)
        sock.close()
        server.close()
        thread.join(30)
        assert not thread.is_alive(), "a server that is closed still runs"

    @pytest.mark.parametrize(
        "line",
        [
            {"send": [[256, 0, 1]]},
            {"hello": 2},
            {"hello": 1, "from": "x", "to": "y"},
            {"hello": 1, "from": "127.0.0.1", "to": "127.0.0.1", "key": -1},
            {"what": "ever"},
        ],
    )
    def test_wrong_lines_end_the_connection(self, lines: Lines, line: dict[str, object]) -> None:
        with pytest.raises(LineError):
            lines.ask(**line)

    def test_datagrams_go_to_the_asker_only(self, lines: Lines) -> None:
        """Another address gets the answer whether there is a route, and nothing else."""
        hello = {"from": "127.0.0.9", "to": "127.0.0.1", "key": 7, "qpn": 5, "qkey": 1, "path_mtu": 1024}
        assert "qpn" in lines.ask(hello=1, **hello)
        assert lines.ask(send=[[256, 0, 10]]) == {"sent": []}

    def test_long_lines_end_the_connection(self, lines: Lines) -> None:
        with pytest.raises((LineError, OSError)):
            lines.ask(hello="x" * (2 * LONGEST_LINE))
