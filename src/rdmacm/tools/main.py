"""``rdmacm COMMAND ...``: parse the command line and run the command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn, cast

from rdmacm.errors import RdmaError, cm_error
from rdmacm.interrupts.command import STATUS, exit_when_interrupted, raise_when_interrupted
from rdmacm.provider.choice import choose, noting_the_choice
from rdmacm.tools.arguments import named_hosts
from rdmacm.tools.output import (
    Page,
    Parser,
    ReaderGoneError,
    ReportedError,
    Tool,
    UsageError,
    error_json,
    write,
    write_error,
    write_json,
)

#: The commands, in the order of the help page. Each is a module of this package, imported when it is used.
COMMANDS = (
    "devices",
    "sa",
    "getaddrinfo",
    "resolve",
    "explain",
    "demo",
    "rping",
    "ucmatose",
    "udaddy",
    "mckey",
    "cmtime",
    "perf",
    "run",
)

_PAGE = Page(
    command="",
    summary="inspect RDMA devices and address resolution, test and measure connections",
    description="""
        Runs rdma_getaddrinfo(3), rdma_resolve_addr(3) and rdma_resolve_route(3) at the prompt: lists the devices,
        shows what a name resolves to, and explains why. Other commands connect, move data and measure. No RDMA
        hardware is needed: each network interface has a software device.

        Output is for people, or with --json for programs. --pcap FILE, before or after the command, captures the
        packets sent and received for Wireshark. 'rdmacm COMMAND --help' is the page of a command.
    """,
    examples=(
        ("rdmacm devices", "List the devices, their ports and GIDs."),
        ("rdmacm explain localhost 7471", "Explain how a program on this host would reach port 7471."),
    ),
    see_also="rdma_cm(7), ibv_devinfo(1), ip-route(8), ip-neighbour(8)",
    environment=("RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_ACM_RUNDIR", "RDMACM_CORE", "NO_COLOR"),
)


def _tool(command: str) -> Tool:
    return cast("Tool", import_module(f"rdmacm.tools.{command.replace('-', '_')}"))


def parser_of(tool: Tool) -> Parser:
    """Return the parser of a command: the tool's own arguments, and those of all tools."""
    parser = Parser(tool.PAGE)
    tool.add_arguments(parser)
    if parser.has("provider"):
        parser.add_argument(
            "--pcap", metavar="FILE", help="Write the RoCEv2 packets sent and received to this file (pcapng)."
        )
    parser.add_argument("-h", "--help", action="help", help="Show this page.")
    return parser


def _command_of(argv: list[str]) -> tuple[str, list[str]] | None:
    """Return the command and its arguments, or None after writing the help page or the version."""
    moved: list[str] = []  # --pcap may also stand before the command
    while argv and argv[0].partition("=")[0] == "--pcap":
        size = 1 if "=" in argv[0] else 2
        moved, argv = [*moved, *argv[:size]], argv[size:]
    # The program's own options take no values, so the first argument that is no option is the command.
    at = next((i for i, argument in enumerate(argv) if not argument.startswith("-") or argument == "-"), len(argv))
    own, command, rest = argv[:at], argv[at : at + 1], argv[at + 1 :]
    if command == ["help"]:  # "rdmacm help resolve" is "rdmacm resolve --help"
        own, command, rest = (own, rest[:1], ["--help"]) if rest else (["--help"], [], [])
    asks = any(option in ("-h", "--help") for option in own)
    parser = Parser(_PAGE, [(name, _tool(name).PAGE.summary) for name in COMMANDS] if asks else ())
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="The command to run; see COMMANDS.")
    parser.add_argument("-h", "--help", action="help", help="Show this page.")
    parser.add_argument("--version", action="store_true", help="Show the version, and which core runs.")
    if parser.parse_args([*own, *command]).version:
        from rdmacm import __version__
        from rdmacm.proto import core_choice

        write(f"rdmacm {__version__}, {core_choice.description()}\n")
        return None
    if not command:
        parser.error("no command is given")
    if command[0] not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command[0], COMMANDS, 1)
        raise UsageError(f"no command {command[0]!r}; try: {f'rdmacm {near[0]}' if near else 'rdmacm --help'}")
    return command[0], [*moved, *rest]


def _run(argv: Sequence[str]) -> int:
    try:
        found = _command_of(list(argv))
        if found is None:
            return 0
        tool = _tool(found[0])
        args = parser_of(tool).parse_intermixed_args(found[1])  # options may stand between NODE and SERVICE
    except SystemExit:  # --help was written
        return 0
    given, hosts = getattr(args, "provider", None), named_hosts(args)
    if hosts:
        args.provider = choose(given, hosts).name
    with noting_the_choice(given, hosts):
        return _run_tool(tool, args)


def _run_tool(tool: Tool, args: argparse.Namespace) -> int:
    if getattr(args, "pcap", None) is None:
        return tool.run(args)
    from rdmacm.diagnosis.captures import capture

    with capture(args.pcap, args.provider) as packets:
        status = tool.run(args)
    if packets.error is not None:
        raise cm_error(
            packets.error.errno or 0, f"the capture is incomplete: {packets.error.strerror}", "capture", args.pcap
        )
    return status


def command() -> NoReturn:
    """Run :func:`main` as a process of its own, where Ctrl-C is quiet from the first import to the end."""
    try:
        try:
            sys.unraisablehook = _unraisable
            raise_when_interrupted()
            status = main()
        finally:
            exit_when_interrupted()
    except KeyboardInterrupt:
        status = STATUS
    sys.exit(status)


def _unraisable(failure: sys.UnraisableHookArgs) -> None:
    """Deliver an interrupt again that came while a finalizer ran, which cannot raise it. Report anything else."""
    if not isinstance(failure.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(failure)
        return
    import threading

    # Not in this thread: it would come before this function returns, and be lost again.
    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: ``sys.argv[1:]``) and return its exit status.

    Usage errors and RdmaErrors are reported as one line on standard error, and with ``--json`` as an object on standard
    output. Any other exception is a bug and propagates.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    notes: list[str] = []
    try:
        try:
            return _run(arguments)
        except UsageError as error:
            message, status = str(error), 2
            text, _, hint = message.rpartition("; try: ")
            nothing = dict.fromkeys(("errno", "errno_name", "step", "address"))
            report: dict[str, object] | None = {"message": text, **nothing, "hint": hint}
        except ReportedError as reported:
            message, status, report = str(reported.error), 1, None
        except RdmaError as error:
            message, status, report = str(error), 1, error_json(error)
            notes = getattr(error, "__notes__", [])
        for line in (message, *notes):
            write_error(line)
        if report is not None and "--json" in arguments:
            with suppress(RdmaError):  # standard output cannot be written, which is the error
                write_json({"error": report})
        return status
    except ReaderGoneError:
        return 141  # 128 + SIGPIPE
    except KeyboardInterrupt:
        return STATUS
