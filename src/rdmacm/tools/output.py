"""What all tools share: help pages, output to the terminal, and JSON data.

A tool is a module with ``PAGE``, ``add_arguments(parser)`` and ``run(args)``; see :class:`Tool`. Its help page consists
of PAGE and the arguments that the parser knows, so the page and the parser always agree.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from rdmacm.errors import RdmaError, cm_error, printable

if TYPE_CHECKING:  # help pages need neither
    from rdmacm.address import SockAddr
    from rdmacm.proto.sa import PathRecord

PROGRAM = "rdmacm"

#: Width of help pages in columns, whatever the terminal's: longer lines are hard to read.
_WIDTH = 79
#: The greatest width of a line of output that has no longer word, and the least width of a wrapped text, in columns.
_COLUMNS, _LEAST_TEXT = 80, 20

EXIT_STATUS = (
    ("0", "Success."),
    ("1", "Failure; one line on standard error, and with --json an object, has the step, address, reason and hint."),
    ("2", "Wrong usage."),
    ("130", "Interrupted (Ctrl-C)."),
    ("143", "Terminated (SIGTERM)."),
    ("141", "Standard output was closed by its reader, as with '| head'."),
)

#: The environment variables of several commands. A page lists those that its command uses.
_VARIABLES = {
    "RDMACM_PROVIDER": "The provider to use without --provider: kernel, soft or auto (the default).",
    "RDMACM_IB": "InfiniBand ports that the provider soft uses, separated by commas.",
    "RDMACM_ACM_RUNDIR": "Where ibacm(8) has its socket, instead of /run; empty to use no ibacm.",
    "RDMACM_CORE": "The core of the software devices: c, python or auto, which is c if installed.",
    "NO_COLOR": "If set, terminal output is neither bold nor dim.",
    "RDMACM_LOG": "Debug messages to standard error: debug, or some of id,cm,qp,resolution,device.",
}


class UsageError(Exception):
    """The command line is wrong. The text is one line."""


class ReportedError(Exception):
    """A failure that the tool's own JSON document has reported. ``error`` is the reason."""

    def __init__(self, error: RdmaError) -> None:
        super().__init__(error)
        self.error = error


class ReaderGoneError(Exception):
    """Standard output is a pipe whose reader has closed it."""


# -- help pages ----------------------------------------------------------------------------------------------


class Page(NamedTuple):
    """The text of a help page apart from the arguments.

    ``command`` is empty for the program itself. ``description`` has paragraphs separated by blank lines; indented ones
    are not rewrapped. ``examples`` has pairs of a command line and its description. ``environment`` has the names of
    common environment variables that the command uses, all but RDMACM_LOG; ``own_environment`` has pairs of a variable
    and its description.
    """

    command: str
    summary: str
    description: str
    examples: tuple[tuple[str, str], ...]
    see_also: str
    environment: tuple[str, ...] = ()
    own_environment: tuple[tuple[str, str], ...] = ()

    @property
    def program(self) -> str:
        """``rdmacm devices``."""
        return f"{PROGRAM} {self.command}".rstrip()

    @property
    def variables(self) -> list[tuple[str, str]]:
        """The environment variables with their descriptions."""
        return [*self.own_environment, *((name, _VARIABLES[name]) for name in (*self.environment, "RDMACM_LOG"))]

    @property
    def paragraphs(self) -> list[str]:
        """The paragraphs of the description; an indented one begins with a space."""
        return textwrap.dedent(self.description).strip().split("\n\n")


class Tool(Protocol):
    """The module of a tool."""

    @property
    def PAGE(self) -> Page:
        """The help page."""

    def add_arguments(self, parser: Parser) -> None:
        """Add the tool's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the tool and return its exit status; raises RdmaError for a failure."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose help is a page in the style of man(1) and whose errors are one line.

    ``commands`` has the (name, summary) pairs that the program's own page lists.
    """

    def __init__(self, page: Page, commands: Sequence[tuple[str, str]] = ()) -> None:
        self.page = page
        self._commands = commands
        self._arguments: list[argparse.Action] = []
        self._operands: list[str] = []
        # Abbreviated options would change their meaning as options are added.
        super().__init__(prog=page.program, add_help=False, allow_abbrev=False)
        # For errors that a tool finds once all arguments are parsed: args.parser.error(...).
        self.set_defaults(parser=self)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument to the parser and to the page."""
        action = super().add_argument(*args, **kwargs)
        self._arguments.append(action)
        if not action.option_strings:
            # Not later: parse_intermixed_args() changes the operands' nargs while it parses options such as --help.
            some = {"?": "[{}]", "*": "[{}]..."}.get(str(action.nargs), "{}")
            self._operands.append(some.format(_metavar(action)))
        return action

    def has(self, dest: str) -> bool:
        """Return whether the parsed arguments have an attribute of this name."""
        return any(action.dest == dest for action in self._arguments)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        if message.startswith("the following arguments are required"):
            for action in self._arguments:
                if not action.option_strings and action.nargs is None and action.choices:
                    message = f"{_metavar(action)} is missing, one of {', '.join(map(str, action.choices))}"
        where = f"{self.page.command}: " if self.page.command else ""
        raise UsageError(f"{where}{message}; try: {self.prog} --help")

    def print_help(self, file: object = None) -> None:  # noqa: ARG002
        """Write the page to standard output."""
        write(self.format_help())

    @property
    def arguments(self) -> list[argparse.Action]:
        """The arguments, operands first."""
        return sorted(self._arguments, key=lambda action: bool(action.option_strings))

    @property
    def synopsis(self) -> str:
        """What follows the name of the command."""
        return " ".join(["[OPTION]...", *self._operands, *(["[ARGUMENT]..."] if self._commands else [])])

    def format_help(self) -> str:
        """Return the page."""
        page = self.page
        sections = [
            ("NAME", [_wrapped(f"{page.program} - {page.summary}")]),
            ("SYNOPSIS", [_wrapped(f"{self.prog} {self.synopsis}")]),
            ("DESCRIPTION", [_paragraph(text) for text in page.paragraphs]),
            ("OPTIONS", [_entry(invocation(action), help_of(action)) for action in self.arguments]),
            ("COMMANDS", [_entries(self._commands)] if self._commands else []),
            ("EXIT STATUS", [_entries(EXIT_STATUS)]),
            ("ENVIRONMENT", [_entries(page.variables)]),
            ("EXAMPLES", [f"    {command}\n{_wrapped(what, 8)}" for command, what in page.examples]),
            ("SEE ALSO", [_wrapped(page.see_also)]),
        ]
        return "\n\n".join(f"{bold(title)}\n" + "\n\n".join(parts) for title, parts in sections if parts) + "\n"


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def invocation(action: argparse.Action) -> str:
    """How an argument is written: ``-p, --port PORT``."""
    if not action.option_strings:
        return _metavar(action)
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {_metavar(action)}"


def help_of(action: argparse.Action) -> str:
    """The description of an argument."""
    return (action.help or "") % vars(action)


def _wrapped(text: str, indent: int = 4) -> str:
    margin = " " * indent
    # Breaking at hyphens would split the names of options.
    return textwrap.fill(
        text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False, break_long_words=False
    )


def _paragraph(text: str) -> str:
    return textwrap.indent(text, "    ") if text.startswith(" ") else _wrapped(" ".join(text.split()))


def _entry(term: str, text: str) -> str:
    return f"    {term}\n{_wrapped(text, 8)}"


def _entries(pairs: Iterable[tuple[str, str]]) -> str:
    """Format short terms with their texts beside them."""
    pairs = list(pairs)
    width = max(len(term) for term, _ in pairs) + 2
    return "\n".join(f"    {term:<{width}}" + _wrapped(text, 4 + width).lstrip() for term, text in pairs)


# -- writing -------------------------------------------------------------------------------------------------


def write(text: str) -> None:
    """Write to standard output and flush it.

    Raises ReaderGoneError when the reader has closed it, RdmaError for any other failure.
    """
    out = sys.stdout
    if out is None:  # the program was started with standard output closed
        raise _unwritable(OSError(errno.EBADF, os.strerror(errno.EBADF)))
    encoding = getattr(out, "encoding", None) or "utf-8"
    try:
        # Characters that the terminal's encoding lacks are shown as escapes.
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
    """Redirect standard output to the null device: at exit the interpreter would try to write the rest, and fail."""
    try:
        descriptor = sys.stdout.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):  # standard output is an object without a descriptor
        return
    os.dup2(null, descriptor)
    os.close(null)


def write_json(data: object) -> None:
    """Write data as indented JSON."""
    import json

    write(json.dumps(data, indent=2) + "\n")


def write_error(message: str) -> None:
    """Write one line to standard error."""
    # If even that fails, the exit status still reports the error.
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.write(f"{PROGRAM}: {printable(message)}\n")


def bold(text: str) -> str:
    """Return the text in bold, if standard output is a terminal that supports it."""
    return f"\x1b[1m{text}\x1b[0m" if _is_styled() else text


def dim(text: str) -> str:
    """Return the text dimmed, if standard output is a terminal that supports it."""
    return f"\x1b[2m{text}\x1b[0m" if _is_styled() else text


def _is_styled() -> bool:
    if "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Format a table of up to 80 columns.

    Cells in columns named in ``right`` are aligned to the right; an empty cell is shown as "-". The text of the last
    column is wrapped. If the others leave no room for it, it is on lines of its own.
    """
    cells = [[cell or "-" for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    indent = before if _COLUMNS - before >= min(widths[-1], _LEAST_TEXT) else 4
    is_wrapped = head[-1] not in right and before + widths[-1] > _COLUMNS

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if title in right else cell.ljust(width)
            for title, cell, width in zip(head, row, widths, strict=True)
        ]
        if not is_wrapped:
            return "  ".join(padded).rstrip()
        text = textwrap.wrap(row[-1], _COLUMNS - indent) or [""]
        start = ["  ".join(padded[:-1]) + "  " + text.pop(0)] if indent == before else ["  ".join(padded[:-1])]
        return "\n".join(part.rstrip() for part in [*start, *(" " * indent + part for part in text)])

    return "\n".join([bold(line(head)), *map(line, cells)]) + "\n"


def wrapped_line(text: str) -> list[str]:
    """The lines of up to 80 columns of one long line; those after the first are indented by four columns more."""
    if len(text) <= _COLUMNS:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    return textwrap.wrap(text, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def labelled_lines(pairs: Iterable[tuple[str, str]], indent: int = 0) -> str:
    """Format labelled values with aligned labels, each on one line of up to 80 columns or wrapped beside its label."""
    pairs = list(pairs)
    width = max(len(label) for label, _ in pairs) + 2
    room = max(_LEAST_TEXT, _COLUMNS - indent - width)
    lines = []
    for label, text in pairs:
        shown = printable(text)
        parts = [shown]
        if len(shown) > room:
            parts = textwrap.wrap(shown, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(f"{'':{indent}}{dim(f'{label:<{width}}')}{parts[0]}".rstrip())
        lines += [" " * (indent + width) + part for part in parts[1:]]
    return "".join(f"{line}\n" for line in lines)


# -- JSON ----------------------------------------------------------------------------------------------------


def address_json(address: SockAddr | None) -> dict[str, object] | None:
    """Return an address as JSON data, or None.

    ``{"family": "inet", "host": "10.0.0.1", "port": 7471}``; ``inet6`` also has ``flowinfo`` and ``scope_id``; ``ib``
    has ``gid``, ``sid``, ``sid_mask``, ``pkey``, ``flowinfo`` and ``scope_id``.
    """
    if address is None:
        return None
    from socket import AF_INET

    from rdmacm.address import SockAddrIB, parse_address

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
    found: dict[str, object] = {"family": "inet", "host": known.host, "port": known.port}
    if known.family == AF_INET:
        return found
    return {**found, "family": "inet6", "flowinfo": known.flowinfo, "scope_id": known.scope_id}


def error_json(error: RdmaError) -> dict[str, object]:
    """Return an error as JSON data: ``message``, ``errno``, ``errno_name``, ``step``, ``address`` and ``hint``."""
    return {
        "message": printable(str(error.strerror)),
        "errno": error.errno,
        "errno_name": error.code_name,
        "step": error.step,
        "address": error.address,
        "hint": error.hint,
    }


def path_record_json(path: PathRecord) -> dict[str, object]:
    """Return the fields of a path record as JSON data, by their names; GIDs are text."""
    from dataclasses import fields

    values = {field.name: getattr(path, field.name) for field in fields(path)}
    return {**values, "dgid": str(path.dgid), "sgid": str(path.sgid)}
