"""A Python that has imported what the tests' programs import, and forks for each of them.

Where the processor is emulated, to start Python and to import rdmacm takes seconds. An order is a line on the FIFO
/run/warm/orders: a path; PATH.args has the process whose output the program's goes to, "soft" or "" for the network
namespace, the working directory and Python's arguments. PATH.pid tells that it runs, PATH.status how it ended, as bash
would say it. The words of ``net.sh`` do this.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path

ORDERS = Path("/run/warm/orders")
IMPORTS = (
    "argparse",
    "ctypes",
    "json",
    "rdmacm.aio",
    "rdmacm.cma",
    "rdmacm.endpoint",
    "rdmacm.proto.roce.rc",
    "rdmacm.soft.provider",
    "rdmacm.soft.wire.udp",
    "rdmacm.soft.device.device",
    "rdmacm.tools.cmtime",
    "rdmacm.tools.main",
    "rdmacm.tools.perf",
    "rdmacm.tools.rping",
    "rdmacm.tools.ucmatose",
    "interop.operations",
    "interop.peer",
    "traceback",
)
_CLONE_NEWNS, _CLONE_NEWNET, _MS_REC, _MS_SLAVE = 0x20000, 0x40000000, 1 << 14, 1 << 19


def next_program() -> list[str]:
    """Wait for orders; returns the arguments of one, in a process of its own that is to carry it out."""
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    # Nobody asks how the keepers ended, see below.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Open for writing as well, it never comes to its end.
    with ORDERS.open("r+b", buffering=0) as orders:
        while True:
            for line in orders.read(4096).splitlines():
                if os.fork() == 0:
                    program = keep(Path(os.fsdecode(line)))
                    if program is not None:
                        return program
                    os._exit(0)


def keep(order: Path) -> list[str] | None:
    """Fork the program and tell of its beginning and its end; returns its arguments where it is the program."""
    output, namespace, folder, *arguments = os.fsdecode(order.with_suffix(".args").read_bytes()).split("\0")[:-1]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        tell(order.with_suffix(".pid"), pid)
        _, status = os.waitpid(pid, 0)
        ended = os.waitstatus_to_exitcode(status)
        tell(order.with_suffix(".status"), ended if ended >= 0 else 128 - ended)
        return None
    os.setpgid(0, 0)
    for number in (1, 2):
        found = os.open(f"/proc/{output}/fd/{number}", os.O_WRONLY | os.O_APPEND)
        os.dup2(found, number)
        os.close(found)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)
    if namespace:
        enter(namespace)
    os.chdir(folder)
    return arguments


def tell(file: Path, number: int) -> None:
    unfinished = file.with_suffix(".new")
    unfinished.write_text(f"{number}\n")
    unfinished.rename(file)


def enter(namespace: str) -> None:
    """What ip-netns(8) does for "exec"."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    for done in (
        libc.setns(found, _CLONE_NEWNET),
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None),
        libc.umount2(b"/sys", 2),
        libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None),
    ):
        if done:
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")
    os.close(found)


def run(arguments: list[str]) -> None:
    """As ``python3 ARGUMENTS`` would."""
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run(next_program())
