"""``rdmacm lab``: hosts in network namespaces on one machine, for any user."""

from __future__ import annotations

import argparse
import errno
import sys
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.tools.arguments import add_number, integer_between, probability, seconds_between
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import Page, Parser, UsageError, table, write

if TYPE_CHECKING:
    from rdmacm.lab import Lab

PAGE = Page(
    command="lab",
    summary=COMMANDS["lab"],
    description="""
        Makes hosts on one network, each a network namespace with an interface eth0. No privilege is needed, and nobody
        else sees them. Names of hosts lead to their addresses in all of them. ACTION is one of:

          run 'HOST: COMMAND'...  run commands in hosts, until they have ended
          up [HOST]...            make hosts (default: h1 h2), until Ctrl-C
          shell [HOST [COMMAND]]  start a shell, or a command, in a host of 'up'
          list                    list the hosts that 'up' has made

        The commands of 'run' begin in their order: each when the host of the one before it has a listening socket (TCP,
        or UDP port 4791), when that one has ended, or after --patience. Their lines begin with the name of the host. If
        one fails, the others get SIGTERM. 'HOST&: COMMAND' runs in the background: it gets SIGTERM when the others have
        ended. Signals that are sent to this command reach all of them.

        The exit status of 'run' is 0, or that of the first command that has failed. When this command ends, also by
        SIGKILL, everything in its hosts does.
    """,
    examples=(
        ("rdmacm lab run 'h1: rdmacm rping -s' 'h2: rdmacm rping -c -a h1'", "A server and a client."),
        ("rdmacm lab up --mtu 4200 --loss 0.01 a b c", "Three hosts on a network that loses packets."),
        ("rdmacm lab shell a", "A shell in one of them, in another terminal."),
    ),
    see_also="rdmacm run, rdmacm rping, ip-netns(8), unshare(1), tc-netem(8)",
    own_environment=(("SHELL", "The shell of 'shell'."),),
)

_RUN, _UP, _SHELL, _LIST = "run", "up", "shell", "list"


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm lab``."""
    parser.add_argument("action", metavar="ACTION", choices=[_RUN, _UP, _SHELL, _LIST], help="As listed above.")
    parser.add_argument("operands", metavar="OPERAND", nargs="*", help="Its operands: a HOST, 'HOST: COMMAND'.")
    add_number(parser, ("--mtu",), integer_between(1280, 65000), 1500, "BYTES", "The MTU of each interface")
    add_number(parser, ("--loss",), probability, 0, "P", "How likely each packet is lost, from 0 to 1")
    delay = "Seconds that each packet takes, up to 60"
    add_number(parser, ("--delay",), seconds_between(0, 60), 0, "SECONDS", delay)
    seed = "Decides which packets are lost, where the kernel has no netem"
    add_number(parser, ("--seed",), integer_between(0, 2**63), 0, "N", seed)
    patience = "How long a command of 'run' may take to listen before the next one begins"
    add_number(parser, ("--patience",), seconds_between(0, 1e6), 5, "SECONDS", patience)
    parser.add_argument("--name", metavar="NAME", default="lab", help="The name of the lab (default: %(default)s).")


def run(args: argparse.Namespace) -> int:
    """Run ``rdmacm lab``."""
    return {_RUN: _run, _UP: _up, _SHELL: _shell, _LIST: _list}[args.action](args)


def _lab(args: argparse.Namespace, names: list[str]) -> Lab:
    from rdmacm.lab import Lab, Wiring

    try:
        return Lab(names, Wiring(args.mtu, args.loss, args.delay, args.seed))
    except ValueError as error:
        raise UsageError(f"lab: {error}; try: rdmacm lab --help") from error


def _run(args: argparse.Namespace) -> int:
    from rdmacm.lab.crew import Crew, Task

    if not args.operands:
        args.parser.error("no command is given; run takes 'HOST: COMMAND'")
    try:
        tasks = [Task.parse(text) for text in args.operands]
    except ValueError as error:
        args.parser.error(str(error))
    names = list(dict.fromkeys(task.host for task in tasks))

    def show(host: str, is_error: bool, line: bytes) -> None:
        text = f"{host}: {line.decode(errors='backslashreplace')}"
        if is_error:
            sys.stderr.write(text)
            sys.stderr.flush()
        else:
            write(text)

    with _lab(args, names) as lab:
        return Crew(lab, tasks, show, args.patience).run()


def _up(args: argparse.Namespace) -> int:
    from rdmacm.lab.crew import wait_for_signal
    from rdmacm.lab.names import published

    with _lab(args, args.operands or ["h1", "h2"]) as lab:
        with published(args.name, {name: host.pid for name, host in lab.hosts.items()}):
            where = "" if args.name == "lab" else f" --name {args.name}"
            for name, host in lab.hosts.items():
                write(f"{name}  {'  '.join(host.addresses)}  rdmacm lab shell{where} {name}\n")
            return 128 + wait_for_signal()


def _shell(args: argparse.Namespace) -> int:
    import os

    from rdmacm.lab.inside import enter
    from rdmacm.lab.lab import shell
    from rdmacm.lab.names import published_labs

    if len(args.operands) > 2:
        args.parser.error("shell takes a host and one command, which may be quoted")
    hosts = published_labs().get(args.name)
    if hosts is None:
        raise cm_error(errno.ENOENT, "there is no lab of this name", "lab", args.name, "rdmacm lab up, rdmacm lab list")
    host, *command = args.operands or [next(iter(hosts))]
    if host not in hosts:
        raise cm_error(errno.ENOENT, f"the lab has no such host, but {', '.join(hosts)}", "lab", host)
    os.environ["RDMACM_LAB"] = host
    argv = ["/bin/sh", "-c", command[0]] if command else [shell()]
    try:
        return enter(hosts[host], False, argv)
    except OSError as error:
        raise cm_error(error.errno or 0, error.strerror or str(error), "lab", host) from error


def _list(args: argparse.Namespace) -> int:
    from rdmacm.lab.names import published_labs

    if args.operands:
        args.parser.error("list takes no operand")
    rows = [(lab, ", ".join(hosts)) for lab, hosts in published_labs().items()]
    write(table(("LAB", "HOSTS"), rows) if rows else "")
    return 0
