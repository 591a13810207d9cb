"""Command-line arguments that several tools share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rdmacm.tools.output import Parser


def integer_between(least: int, most: int, what: str = "number") -> Callable[[str], int]:
    """Return the type of an option whose value is a decimal integer from ``least`` to ``most``."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what} from {least} to {most}")
        return int(text)

    return parse


def seconds_between(least: float, most: float) -> Callable[[str], float]:
    """Return the type of an option whose value is a number of seconds from ``least`` to ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {least:g} to {most:g}")
        return value

    return parse


def probability(text: str) -> float:
    """The type of an option whose value is a probability."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability, a number from 0 to 1")
    return value


def add_number(
    parser: Parser, names: tuple[str, ...], parse: Callable[[str], float], default: float, metavar: str, what: str
) -> None:
    """Add an option with a number as its value. Its help is ``what`` and the default."""
    parser.add_argument(*names, type=parse, default=default, metavar=metavar, help=f"{what} (default: %(default)s).")


def add_roles(parser: Parser, *, host: bool) -> None:
    """Add ``-s`` and ``-c``. With ``host``, ``-c`` takes the server's address as its value."""
    parser.add_argument("-s", "--server", action="store_true", help="Run as the server: wait for clients.")
    if host:
        parser.add_argument("-c", "--client", metavar="HOST", help="Run as the client of the server on this host.")
    else:
        parser.add_argument("-c", "--client", action="store_true", help="Run as the client.")


def add_host(parser: Parser) -> None:
    """Add the operand HOST, for :func:`take_host`."""
    what = "Run as the client of the server on this host, which may be HOST:PORT or [IPV6]:PORT."
    parser.add_argument("host", nargs="?", metavar="HOST", help=what)


def host_and_port(text: str) -> tuple[str, str]:
    """Split ``HOST:PORT`` and ``[IPV6]:PORT``; the port is empty without one."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest[1:] if rest.startswith(":") else ""
    host, colon, port = text.partition(":")
    return (host, port) if colon and ":" not in port else (text, "")


def take_host(args: argparse.Namespace, dest: str) -> None:
    """Make the operand HOST the value of the option ``dest``, and what follows its address the value of ``--port``."""
    if args.host is not None:
        if getattr(args, dest) is not None:
            args.parser.error(f"HOST {args.host!r} and {getattr(args, dest)!r} are two servers")
        setattr(args, dest, args.host)
    given = getattr(args, dest)
    if given is None:
        return
    host, port = host_and_port(given)
    if port:
        try:
            args.port = integer_between(0, 65535, "port")(port)
        except argparse.ArgumentTypeError as problem:
            args.parser.error(f"{given!r}: {problem}")
    setattr(args, dest, host)


def add_address(parser: Parser) -> None:
    """Add ``-b``."""
    parser.add_argument("-b", "--bind", metavar="ADDR", help="The local address to listen on or to connect from.")


def add_port(parser: Parser, default: int) -> None:
    """Add ``-p``."""
    what = "The server's port; the server takes 0 for any free port"
    add_number(parser, ("-p", "--port"), integer_between(0, 65535), default, "PORT", what)


def add_provider(parser: Parser) -> None:
    """Add ``--provider``."""
    parser.add_argument(
        "--provider",
        metavar="NAME",
        help="The provider to use: kernel, soft or auto, which is kernel where an RDMA device is usable, and soft "
        "elsewhere and for loopback addresses.",
    )


def named_hosts(args: argparse.Namespace) -> list[str]:
    """The hosts that the options of a command name, to connect to or to listen on."""
    values = (getattr(args, name, None) for name in ("host", "address", "server", "client", "bind"))
    return [host_and_port(value)[0] for value in values if isinstance(value, str)]


def add_resolution_timeout(parser: Parser) -> None:
    """Add ``-t``, the time that a neighbour may take to answer."""
    parse = integer_between(1, (1 << 31) - 1, "number of milliseconds")
    what = "How long the next hop may take to answer, in milliseconds"
    add_number(parser, ("-t", "--timeout-ms"), parse, 2000, "MS", what)


def add_wait_limit(parser: Parser) -> None:
    """Add ``--timeout``, the time that a client waits for its peer."""
    what = "How long to wait for an answer of the peer, in seconds; servers wait without limit"
    add_number(parser, ("--timeout",), seconds_between(0.1, 1e6), 10, "SECONDS", what)
