"""What the tools have in common: help pages, what they write, and the forms of JSON.

A tool is a module with a ``PAGE``, ``add_arguments(parser)`` and ``run(args)``; see :class:`Tool`. Its help page is
made of the PAGE and of the parser's own arguments, so it says of every option what the parser does with it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from socket import AF_INET
from typing import Any, NoReturn, Protocol

from rdmacm.address import SockAddr, SockAddrIB, parse_address
from rdmacm.errors import cm_error, printable
from rdmacm.proto.sa import PathData, PathRecord

__all__ = [
    "Page",
    "Parser",
    "ReaderGoneError",
    "Tool",
    "UsageError",
    "abandon_output",
    "address_json",
    "bold",
    "complain",
    "dim",
    "facts",
    "path_data_json",
    "path_record_json",
    "table",
    "write",
    "write_json",
]

PROGRAM = "rdmacm"

#: Help pages are this wide wherever they are read: lines much longer are hard to follow.
_WIDTH = 79

_EXIT_STATUS = (
    ("0", "Done."),
    ("1", "Failed; one line on standard error says at which step, for which address, why, and what to try."),
    ("2", "Wrong usage."),
    ("130", "Interrupted (Ctrl-C)."),
    ("141", "Whoever read standard output has gone away, as with '| head'."),
)

_ENVIRONMENT = (
    ("RDMACM_PROVIDER", "The provider to use where --provider is not given."),
    ("RDMACM_IB", "InfiniBand ports, with commas between them; the first where --port is not given."),
    ("NO_COLOR", "Where set, nothing is bold or dim on a terminal."),
)


class UsageError(Exception):
    """The command line is wrong; the text is one line."""


class ReaderGoneError(Exception):
    """Standard output is a pipe that nobody reads any more."""


# -- help pages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Page:
    """What a help page says beside the arguments.

    ``command`` is empty for the program itself. ``description`` is paragraphs with a blank line between them, of
    which those that are indented stay as they are; ``examples`` pairs a command line with what it does.
    """

    command: str
    summary: str
    description: str
    examples: tuple[tuple[str, str], ...]
    see_also: str

    @property
    def program(self) -> str:
        """``rdmacm devices``."""
        return f"{PROGRAM} {self.command}".rstrip()


class Tool(Protocol):
    """A tool's module."""

    @property
    def PAGE(self) -> Page:
        """Its help page."""

    def add_arguments(self, parser: Parser) -> None:
        """Add the tool's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit status; failures are RdmaErrors."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose help is a page in the manner of man(1), and whose errors are one line.

    ``commands`` are (name, summary) pairs to list, of the program's own page.
    """

    def __init__(self, page: Page, commands: Sequence[tuple[str, str]] = ()) -> None:
        self.page = page
        self._commands = commands
        self._arguments: list[argparse.Action] = []
        self._operands: list[str] = []
        # Abbreviated options would change their meaning as options are added.
        super().__init__(prog=page.program, add_help=False, allow_abbrev=False)
        # For what is found to be wrong only when all arguments are known.
        self.set_defaults(parser=self)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """As ArgumentParser's, and remembered for the page."""
        action = super().add_argument(*args, **kwargs)
        self._arguments.append(action)
        if not action.option_strings:
            # Noted now: while parse_intermixed_args() comes upon --help, every operand's nargs is another.
            some = {"?": "[{}]", "*": "[{}]..."}.get(str(action.nargs), "{}")
            self._operands.append(some.format(_metavar(action)))
        return action

    def has(self, dest: str) -> bool:
        """Whether there is an argument that goes by this name in what is parsed."""
        return any(action.dest == dest for action in self._arguments)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        where = f"{self.page.command}: " if self.page.command else ""
        raise UsageError(f"{where}{message}; try: {self.prog} --help")

    def print_help(self, file: object = None) -> None:  # noqa: ARG002
        """Write the page to standard output."""
        write(self.format_help())

    def format_help(self) -> str:
        """The page."""
        page = self.page
        sections = [
            ("NAME", [_wrapped(f"{page.program} - {page.summary}")]),
            ("SYNOPSIS", [_wrapped(self._synopsis())]),
            ("DESCRIPTION", [_paragraph(text) for text in textwrap.dedent(page.description).strip().split("\n\n")]),
            ("OPTIONS", [_entry(_invocation(action), _help(action)) for action in self._in_order()]),
            ("COMMANDS", [_entries(self._commands)] if self._commands else []),
            ("EXIT STATUS", [_entries(_EXIT_STATUS)]),
            ("ENVIRONMENT", [_entries(_ENVIRONMENT)]),
            ("EXAMPLES", [f"    {command}\n{_wrapped(what, 8)}" for command, what in page.examples]),
            ("SEE ALSO", [_wrapped(page.see_also)]),
        ]
        return "\n\n".join(f"{bold(title)}\n" + "\n\n".join(parts) for title, parts in sections if parts) + "\n"

    def _synopsis(self) -> str:
        tail = ["[ARGUMENT]..."] if self._commands else []
        return " ".join([self.prog, "[OPTION]...", *self._operands, *tail])

    def _in_order(self) -> list[argparse.Action]:
        """Operands first, then options."""
        return sorted(self._arguments, key=lambda action: bool(action.option_strings))


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _invocation(action: argparse.Action) -> str:
    if not action.option_strings:
        return _metavar(action)
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {_metavar(action)}"


def _help(action: argparse.Action) -> str:
    return (action.help or "") % vars(action)


def _wrapped(text: str, indent: int = 4) -> str:
    margin = " " * indent
    # A command's name and its options hold together across hyphens.
    return textwrap.fill(
        text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False, break_long_words=False
    )


def _paragraph(text: str) -> str:
    return textwrap.indent(text, "    ") if text.startswith(" ") else _wrapped(" ".join(text.split()))


def _entry(term: str, text: str) -> str:
    return f"    {term}\n{_wrapped(text, 8)}"


def _entries(pairs: Iterable[tuple[str, str]]) -> str:
    """Short terms with their texts beside them."""
    pairs = list(pairs)
    width = max(len(term) for term, _ in pairs) + 2
    return "\n".join(f"    {term:<{width}}" + _wrapped(text, 4 + width).lstrip() for term, text in pairs)


# -- writing -------------------------------------------------------------------------------------------------


def write(text: str) -> None:
    """Write to standard output, at once; ReaderGoneError where nobody reads it, RdmaError where it cannot be done."""
    out = sys.stdout
    if out is None:  # the program was started with its standard output closed
        raise _unwritable(OSError(errno.EBADF, os.strerror(errno.EBADF)))
    encoding = getattr(out, "encoding", None) or "utf-8"
    try:
        # What the encoding of the terminal cannot say is shown as an escape.
        out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()
    except BrokenPipeError:
        abandon_output()
        raise ReaderGoneError from None
    except OSError as error:
        abandon_output()
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> Exception:
    return cm_error(error.errno or 0, error.strerror or str(error), "write", "standard output")


def abandon_output() -> None:
    """Let go of standard output: the interpreter would try again to write what is left, and complain."""
    try:
        descriptor = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):  # standard output is an object of the caller's, not a file
        return
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def write_json(data: object) -> None:
    """Write data as JSON, for programs and people alike."""
    import json

    write(json.dumps(data, indent=2) + "\n")


def complain(message: str) -> None:
    """Write one line to standard error."""
    # Where even that cannot be written, the exit status still tells.
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.write(f"{PROGRAM}: {printable(message)}\n")


def bold(text: str) -> str:
    """Bold on a terminal."""
    return f"\x1b[1m{text}\x1b[0m" if _is_styled() else text


def dim(text: str) -> str:
    """Dim on a terminal."""
    return f"\x1b[2m{text}\x1b[0m" if _is_styled() else text


def _is_styled() -> bool:
    if "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Columns under their titles; those named in ``right`` are flush right. A row that is missing something has "-"."""
    cells = [[cell or "-" for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if title in right else cell.ljust(width)
            for title, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()

    return "\n".join([bold(line(head)), *map(line, cells)]) + "\n"


def facts(pairs: Iterable[tuple[str, str]], indent: int = 0) -> str:
    """One line a fact: a label, then what there is to say."""
    pairs = list(pairs)
    width = max(len(label) for label, _ in pairs) + 2
    return "".join(f"{'':{indent}}{dim(f'{label:<{width}}')}{printable(text)}".rstrip() + "\n" for label, text in pairs)


# -- JSON ----------------------------------------------------------------------------------------------------


def address_json(address: SockAddr | None) -> dict[str, object] | None:
    """An address for JSON, None for none.

    ``{"family": "inet", "host": "10.0.0.1", "port": 7471}``; ``inet6`` has ``flowinfo`` and ``scope_id`` too; ``ib``
    has ``gid``, ``sid``, ``sid_mask``, ``pkey``, ``flowinfo`` and ``scope_id``.
    """
    if address is None:
        return None
    known = parse_address(address)
    if isinstance(known, SockAddrIB):
        return {
            "family": "ib",
            "gid": str(known.addr),
            "sid": known.sid,
            "sid_mask": known.sid_mask,
            "pkey": known.pkey,
            "flowinfo": known.flowinfo,
            "scope_id": known.scope_id,
        }
    if known.family == AF_INET:
        return {"family": "inet", "host": known.host, "port": known.port}
    return {
        "family": "inet6",
        "host": known.host,
        "port": known.port,
        "flowinfo": known.flowinfo,
        "scope_id": known.scope_id,
    }


def path_record_json(path: PathRecord) -> dict[str, object]:
    """The fields of a path record, by their names; GIDs are text."""
    values = {field.name: getattr(path, field.name) for field in fields(path)}
    return {**values, "dgid": str(path.dgid), "sgid": str(path.sgid)}


def path_data_json(data: PathData) -> dict[str, object]:
    """A path record, and its ``flags``."""
    return {"flags": int(data.flags), **path_record_json(data.path)}
