"""The options of tools that librdmacm has, too: its options (44.0), their defaults and limits."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import NamedTuple

import pytest

from rdmacm.tools.main import parser_of
from rdmacm.tools.output import UsageError


class Option(NamedTuple):
    """An option of C's tool."""

    letter: str
    takes_argument: bool = False
    default: object = None
    #: Values that are taken and refused, at the limits; C's, or those of docs/parity.md.
    taken: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


#: What rstream and riostream share.
OF_STREAMS = [
    Option("s", True),
    Option("b", True),
    Option("f", True, "name", ("name", "ip", "ipv6"), ("ib", "gid")),
    Option("B", True, 1 << 19, ("1", "2147483647"), ("2147483648",)),
    Option("i", True, 64, ("0", "2147483647"), ("-1",)),
    Option("I", True, None, ("0", "2147483647"), ("2147483648",)),
    Option("C", True, None, ("0", "2147483647"), ("2147483648",)),
    Option("S", True, None, ("all", "1000")),
    Option("p", True, 7471, ("0", "65535"), ("65536",)),
    Option("T", True, []),
]
#: C's getopt strings: "a:I:Pp:C:S:t:scvVdq" (-t is refused), "s:b:f:P:c:C:S:t:p:a:m",
#: "s:b:c:C:S:t:p:P:f:", "m:M:sb:c:C:S:p:ol", "s:b:c:p:r:t:", "s:b:f:B:i:I:C:S:p:k:T:" and "p:".
TOOLS = {
    "rping": [
        Option("s", default=False),
        Option("c", default=False),
        Option("v", default=False),
        Option("V", default=False),
        Option("d", default=False),
        Option("P", default=False),
        Option("q", default=False),
        Option("a", True),
        Option("I", True),
        Option("p", True, 7174, ("0", "65535"), ("65536",)),
        Option("C", True, 0, ("0", "1", "2147483647"), ("2147483648",)),
        Option("S", True, 64, ("23", "65536"), ("22", "65537")),
    ],
    "ucmatose": [
        Option("s", True),
        Option("b", True),
        Option("f", True, "name", ("name", "ip", "ipv6", "gid"), ("ib",)),
        Option("P", True, "tcp", ("tcp", "ib"), ("udp",)),
        Option("c", True, 1, ("1", "10000"), ("0", "10001")),
        Option("C", True, 10, ("0", "32768"), ("32769",)),
        Option("S", True, 100, ("0", "1073741824"), ("1073741825",)),
        Option("t", True, None, ("0", "255"), ("256",)),
        Option("a", True, None, ("0", "31"), ("32",)),
        Option("p", True, 7471, ("0", "65535"), ("65536",)),
        Option("m", default=False),
    ],
    "udaddy": [
        Option("s", True),
        Option("b", True),
        Option("f", True, "name", ("name", "ip", "ipv6", "gid"), ("ib",)),
        Option("P", True, "udp", ("udp", "ipoib"), ("tcp",)),
        Option("p", True, None, ("0x0111", "0x2"), ("0x106", "7174")),
        Option("c", True, 1, ("1", "10000"), ("0", "10001")),
        Option("C", True, 10, ("0", "32768"), ("32769",)),
        Option("S", True, 100, ("0", "1073741824"), ("1073741825",)),
        Option("t", True, None, ("0", "255"), ("256",)),
    ],
    "mckey": [
        Option("m", True),
        Option("M", True, None, ("ff1e::7",), ("239.1.2.3",)),
        Option("s", default=False),
        Option("b", True),
        Option("c", True, 1, ("1", "1000"), ("0", "1001")),
        Option("C", True, 10, ("0", "32768"), ("32769",)),
        Option("S", True, 100, ("0", "1073741824"), ("1073741825",)),
        Option("p", True, "0x0111", ("0x0111", "0x2"), ("0x106", "7174")),
        Option("o", default=False),
        Option("l", default=False),
    ],
    "cmtime": [
        Option("s", True),
        Option("b", True),
        Option("c", True, 100, ("1", "100000"), ("0", "100001")),
        Option("p", True, 7471, ("0", "65535"), ("65536",)),
        Option("r", True, 2, ("0", "1000"), ("1001",)),
        Option("t", True, 2000, ("1", "2147483647"), ("0", "2147483648")),
    ],
    "rstream": [*OF_STREAMS, Option("k", True, None, ("0", "30"), ("x",))],
    "riostream": OF_STREAMS,
    "rcopy": [Option("p", True, 7427, ("0", "65535"), ("65536",))],
    "udpong": [
        Option("s", True),
        Option("b", True),
        Option("B", True, 1 << 19, ("1", "2147483647"), ("2147483648",)),
        Option("C", True, None, ("0", "2147483647"), ("2147483648",)),
        Option("S", True, None, ("16", "2056"), ("15", "2057")),
        Option("p", True, 7174, ("0", "65535"), ("65536",)),
        Option("T", True, []),
    ],
}
#: Letters that C's tool does not have.
OWN = {
    "rping": set(),
    "ucmatose": {"V"},
    "udaddy": set(),
    "mckey": set(),
    "cmtime": set(),
    "rstream": set(),
    "riostream": set(),
    "rcopy": set(),
    "udpong": set(),
}
ROWS = [pytest.param(tool, option, id=f"{tool} -{option.letter}") for tool, rows in TOOLS.items() for option in rows]


def actions(tool: str) -> dict[str, argparse.Action]:
    """The options with a letter, without --help's."""
    parser = parser_of(import_module(f"rdmacm.tools.{tool}"))
    return {
        name[1]: action
        for action in parser._actions
        for name in action.option_strings
        if len(name) == 2 and action.dest != "help"
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_letters_are_those_of_c(tool: str) -> None:
    assert set(actions(tool)) == {option.letter for option in TOOLS[tool]} | OWN[tool]


@pytest.mark.parametrize(("tool", "option"), ROWS)
def test_option_has_cs_argument_default_and_limits(tool: str, option: Option) -> None:
    action = actions(tool)[option.letter]
    assert (action.nargs != 0) is option.takes_argument
    assert action.default == option.default
    parser = parser_of(import_module(f"rdmacm.tools.{tool}"))
    for value in option.taken:
        assert str(getattr(parser.parse_args([f"-{option.letter}", value]), action.dest)) == value
    for value in option.refused:
        with pytest.raises(UsageError):
            parser.parse_args([f"-{option.letter}", value])


def test_every_client_has_the_same_wait_limit() -> None:
    for tool in (*TOOLS, "perf", "demo"):
        parser = parser_of(import_module(f"rdmacm.tools.{tool}"))
        (action,) = (action for action in parser._actions if "--timeout" in action.option_strings)
        assert action.default == 10
        for refused in ("0", "-1", "nan", "x"):
            with pytest.raises(UsageError):
                parser.parse_args([f"--timeout={refused}"])
