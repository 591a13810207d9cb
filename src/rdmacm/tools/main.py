"""``rdmacm COMMAND ...``: parse the command line and run the command."""

from __future__ import annotations

import argparse
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from importlib import import_module
from time import sleep
from typing import NoReturn, cast

from rdmacm.errors import RdmaError, cm_error
from rdmacm.interrupts.command import STATUS, exit_when_interrupted, raise_when_interrupted
from rdmacm.tools.arguments import named_hosts
from rdmacm.tools.commands import COMMANDS, GROUPS
from rdmacm.tools.output import (
    Page,
    Parser,
    ReaderGoneError,
    ReportedError,
    Tool,
    UsageError,
    abandon_output,
    bold,
    error_json,
    write,
    write_error,
    write_json,
)

_PAGE = Page(
    command="",
    summary="inspect RDMA devices and address resolution, test and measure connections",
    description="""
        Runs rdma_getaddrinfo(3), rdma_resolve_addr(3) and rdma_resolve_route(3) at the prompt: lists the devices,
        shows what a name resolves to, and explains why. Other commands connect, move data and measure. No RDMA
        hardware is needed: each network interface has a software device.

        Output is for people, or with --json for programs. --pcap FILE, before or after the command, captures the
        packets sent and received for Wireshark; with --pcap - they go to standard output, and text to standard error.
        'rdmacm COMMAND --help' is the page of a command.
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


def program_parser(*, with_commands: bool) -> Parser:
    """Return the parser of what stands before a command. ``with_commands``: its page lists them."""
    parser = Parser(_PAGE, [*COMMANDS.items()] if with_commands else ())
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="The command to run; see COMMANDS.")
    parser.add_argument("-h", "--help", action="help", help="Show this page.")
    parser.add_argument("--version", action="store_true", help="Show the version, and which core runs.")
    parser.add_argument("--json", action="store_true", help="With --version, write an object: version, core and why.")
    return parser


def parser_of(tool: Tool) -> Parser:
    """Return the parser of a command: the tool's own arguments, and those of all tools."""
    parser = Parser(tool.PAGE)
    tool.add_arguments(parser)
    if parser.has("provider"):
        parser.add_argument(
            "--pcap",
            metavar="FILE",
            help="Write the RoCEv2 packets sent and received to this file (pcapng). With - they go to standard output,"
            " and text to standard error.",
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
    parser = program_parser(with_commands=asks)
    args = parser.parse_args([*own, *command])
    if args.version:
        _write_version(is_json=args.json)
        return None
    if args.json:
        parser.error("--json stands behind the command")
    if not command:
        if moved:
            parser.error("no command is given")
        write(_overview())
        return None
    if command[0] not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command[0], COMMANDS, 1)
        raise UsageError(f"no command {command[0]!r}; try: {f'rdmacm {near[0]}' if near else 'rdmacm --help'}")
    return command[0], [*moved, *rest]


def _write_version(*, is_json: bool) -> None:
    from rdmacm import __version__
    from rdmacm.proto import core_choice

    if is_json:
        write_json({"version": __version__, "core": core_choice.name, "why": core_choice.description()})
    else:
        write(f"rdmacm {__version__}, {core_choice.description()}\n")


def _overview() -> str:
    """The commands by purpose, for a command line without one."""
    width = max(map(len, COMMANDS))
    parts = [
        f"{bold(title)}\n" + "".join(f"  {name:<{width}}  {summary}\n" for name, summary in commands.items())
        for title, commands in GROUPS.items()
    ]
    return "\n".join(
        ["rdmacm COMMAND [OPTION]... [ARGUMENT]...\n", *parts, "'rdmacm COMMAND --help' is the page of a command.\n"]
    )


def _run(argv: Sequence[str]) -> int:
    try:
        found = _command_of(list(argv))
        if found is None:
            return 0
        tool = _tool(found[0])
        args = parser_of(tool).parse_intermixed_args(found[1])  # options may stand between NODE and SERVICE
    except SystemExit:  # --help was written
        return 0
    from rdmacm.provider.choice import choose, noting_the_choice

    given, hosts = getattr(args, "provider", None), named_hosts(args)
    if hosts:
        args.provider = choose(given, hosts).name
    with noting_the_choice(given, hosts):
        return _run_tool(tool, args)


def _run_tool(tool: Tool, args: argparse.Namespace) -> int:
    if getattr(args, "pcap", None) is None:
        return tool.run(args)
    from rdmacm.diagnosis.captures import capture

    with ExitStack() as stack:
        path = args.pcap
        if path == "-":
            path = _binary_output(args)
            stack.callback(os.close, path)
            stack.enter_context(redirect_stdout(sys.stderr))  # what the tool shows, as tcpdump -w - does
            _end_with_reader(path)
        packets = stack.enter_context(capture(path, args.provider))
        status = tool.run(args)
    if packets.error is not None and args.pcap == "-" and packets.error.errno == errno.EPIPE:
        abandon_output()
        raise ReaderGoneError
    if packets.error is not None:
        raise cm_error(
            packets.error.errno or 0, f"the capture is incomplete: {packets.error.strerror}", "capture", args.pcap
        )
    return status


def _binary_output(args: argparse.Namespace) -> int:
    """A descriptor of standard output, for packets."""
    if getattr(args, "json", False):
        args.parser.error("--json and --pcap - both write to standard output")
    if sys.stdout is None:
        raise cm_error(errno.EBADF, os.strerror(errno.EBADF), "capture", "standard output")
    if sys.stdout.isatty():
        args.parser.error("--pcap - would write packets to the terminal; to a program: --pcap - | tcpdump -r -")
    return os.dup(sys.stdout.fileno())


def _end_with_reader(descriptor: int) -> None:
    """Raise ReaderGoneError in the main thread once nobody reads the pipe any more."""

    def see(*_: object) -> None:
        poll = select.poll()
        poll.register(descriptor, 0)
        if poll.poll(0):  # not another broken pipe or socket
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            raise ReaderGoneError

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGPIPE, see)


def command() -> NoReturn:
    """Run :func:`main` as a process of its own, where Ctrl-C is quiet from the first import to the end."""
    try:
        try:
            sys.unraisablehook = _unraisable
            raise_when_interrupted()
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, _terminate)
            status = main()
        finally:
            exit_when_interrupted()
    except KeyboardInterrupt:
        status = STATUS
    if _terminated and status == STATUS:
        status = 128 + signal.SIGTERM
    sys.exit(status)


#: Whether SIGTERM has come.
_terminated = False


def _terminate(*_: object) -> None:
    """SIGTERM ends a command as Ctrl-C does: it shows what it has, and its peers learn that it ends."""
    global _terminated
    _terminated = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt


def _unraisable(failure: sys.UnraisableHookArgs) -> None:
    """Deliver an interrupt again that came while a finalizer ran, which cannot raise it. Report anything else."""
    if not isinstance(failure.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(failure)
        return
    threading.Thread(target=_interrupt_again, daemon=True).start()


def _interrupt_again() -> None:
    """Interrupt the main thread once it has left :func:`_unraisable`, where an interrupt would be lost again."""
    main_thread = threading.main_thread().ident or 0
    frame = sys._current_frames().get(main_thread)
    while frame is not None:
        if frame.f_code is _unraisable.__code__:
            sleep(0.001)
            frame = sys._current_frames().get(main_thread)
        else:
            frame = frame.f_back
    os.kill(os.getpid(), signal.SIGINT)


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
