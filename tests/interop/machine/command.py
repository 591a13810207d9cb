"""What ``tests/interop/guest`` does."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from interop.machine.packages import Unavailable, image
from interop.machine.run import Machine, MachineError

__all__ = ["main"]


def main(arguments: list[str], usage: str) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0
    update = arguments[:1] == ["--update"]
    arguments = arguments[update:]
    # One argument is a line of the shell, as for ssh.
    command = arguments[0] if len(arguments) == 1 else shlex.join(arguments)
    with ExitStack() as stack:
        share = os.environ.get("RDMACM_GUEST_SHARE") or stack.enter_context(tempfile.TemporaryDirectory())
        try:
            found = image(update=update)
            machine = stack.enter_context(Machine(found, Path(share), terminal=not arguments))
            network = machine.run("network", 180)
            if network.status != 0:
                raise MachineError(network.output)
            if not arguments:
                return machine.shell()
            return machine.run(command, float(os.environ.get("RDMACM_GUEST_TIMEOUT", "900")), sys.stdout).status
        except (Unavailable, MachineError) as error:
            print(f"guest: {error}", file=sys.stderr)
            return 125
