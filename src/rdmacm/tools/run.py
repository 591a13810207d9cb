"""``rdmacm run``: programs in C on the software devices."""

from __future__ import annotations

import argparse

from rdmacm.tools.arguments import add_number, integer_between, probability, seconds_between
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import Page, Parser, write_error

PAGE = Page(
    command="run",
    summary=COMMANDS["run"],
    description="""
        Starts PROGRAM with a library in the place of libibverbs.so.1 and librdmacm.so.1. The program is not changed,
        and no RDMA hardware, kernel module or privilege is needed: each network interface has a software device. It
        connects to programs that run in the same way, to the commands of this program, and to RoCEv2 adapters.

        PROGRAM gets the signals that are sent to this command. Processes that it starts use the devices too, and the
        command lasts as long as one of them does. Programs that are linked statically, or that get privileges of their
        own, take no library.

        The exit status is that of PROGRAM, or 128 and the number of the signal that has ended it; 127 if PROGRAM is not
        found, 126 if it cannot be executed or takes no library.
    """,
    examples=(
        ("rdmacm run -- ibv_devinfo", "List the software devices."),
        ("rdmacm run -- rping -s -a 127.0.0.1", "Serve rping(1) on this host."),
        ("rdmacm run --serve", "Serve programs that are started by other means; prints their environment."),
    ),
    see_also="rdmacm devices, ibv_devinfo(1), rping(1), ld.so(8)",
    own_environment=(("RDMACM_RUN_LIBRARY", "Another library to run programs with."),),
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm run``."""
    # Options behind the name of the program are the program's.
    parser.parse_intermixed_args = parser.parse_args  # type: ignore[method-assign]
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM",
        help="The program and its arguments, of which none is an option of this command; -- may come before it.",
    )
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME",
        help="Show PROGRAM this device only; may be given several times. An address of another one is not resolved.",
    )
    parser.add_argument(
        "--explain", action="store_true", help="Explain each resolution of an address on standard error."
    )
    parser.add_argument(
        "--pcap",
        dest="capture",
        metavar="FILE",
        help="Write the RoCEv2 packets of all programs to this file (pcapng).",
    )
    add_number(
        parser, ("--loss",), probability, 0, "P", "How likely each packet is lost that PROGRAM sends, from 0 to 1"
    )
    delay = "Seconds that each packet is held up that PROGRAM sends, up to 60"
    add_number(parser, ("--delay",), seconds_between(0, 60), 0, "SECONDS", delay)
    seed = "Decides which packets are lost: the same ones with the same number"
    add_number(parser, ("--seed",), integer_between(0, 2**63), 0, "N", seed)
    parser.add_argument(
        "--sockets",
        action="store_true",
        help="Give PROGRAM sockets of rsocket(7) for its TCP sockets: what it sends goes by RDMA.",
    )
    parser.add_argument(
        "--serve", action="store_true", help="Start no program; print what the environment of one has to be, and wait."
    )


def run(args: argparse.Namespace) -> int:
    """Run ``rdmacm run``. Returns the exit status of the program."""
    # Not before: they take long to load, and the page of each command is read for the list of commands.
    from rdmacm.run.command import run_program, serve
    from rdmacm.run.options import Options
    from rdmacm.run.programs import CannotRun

    options = Options(
        *(frozenset(args.device), args.explain, args.capture, args.loss, args.delay, args.seed, args.sockets)
    )
    if args.capture == "-":
        args.parser.error("--pcap - writes to standard output, which is PROGRAM's")
    argv = args.program[1:] if args.program[:1] == ["--"] else args.program
    if args.serve:
        if argv:
            args.parser.error("--serve takes no program")
        return serve(options)
    if not argv:
        args.parser.error("no program is given")
    try:
        return run_program(argv, options)
    except CannotRun as failure:
        write_error(str(failure))
        return failure.status
