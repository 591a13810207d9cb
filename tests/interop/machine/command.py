"""What ``tests/interop/guest`` does."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from interop.machine.cache import Unavailable
from interop.machine.choice import MACHINES, chosen
from interop.machine.run import MachineError

__all__ = ["main"]

#: Exit status when the machine cannot be used, as of docker(1) and env(1).
FAILED = 125


def main(arguments: list[str], description: str) -> int:
    parser = argparse.ArgumentParser(
        prog="guest", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=MACHINES, default=chosen()[0], help="which machine (%(default)s)")
    parser.add_argument("--update", action="store_true", help="take today's packages from now on")
    parser.add_argument("--prepare", action="store_true", help="fill the cache, and start no machine")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    try:
        if options.update or options.prepare:
            MACHINES[options.machine].prepare(update=options.update)
        return 0 if options.prepare else _run(options.machine, options.command)
    except (Unavailable, MachineError) as error:
        print(f"guest: {error}", file=sys.stderr)
        return FAILED


def _run(name: str, command: list[str]) -> int:
    with ExitStack() as stack:
        share = os.environ.get("RDMACM_GUEST_SHARE") or stack.enter_context(tempfile.TemporaryDirectory())
        if not command:
            stack.enter_context(_terminal_kept())
        machine = stack.enter_context(MACHINES[name](Path(share).absolute(), terminal=not command))
        network = machine.run("network", 180)
        if network.status != 0:
            raise MachineError(network.output)
        if not command:
            return machine.shell()
        # One argument is a line of shell, as for ssh(1).
        script = command[0] if len(command) == 1 else shlex.join(command)
        return machine.run(script, float(os.environ.get("RDMACM_GUEST_TIMEOUT", "900")), sys.stdout).status


@contextmanager
def _terminal_kept() -> Iterator[None]:
    """Restore our terminal's settings at the end: a machine sets them to its own, and is killed."""
    if not sys.stdin.isatty():
        yield
        return
    settings = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
