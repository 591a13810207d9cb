"""A Python process that has imported what the tests' programs import, and forks for each program.

Starting Python and importing rdmacm takes long in these machines. An order is a line on the FIFO /run/warm/orders: a
path. PATH.args holds, each ended by NUL, the process whose output the program inherits, the network namespace ("soft"
or ""), the working directory and the command: "python3 ..." or "env NAME=VALUE... python3 ...". PATH.pid appears when
the program has started, PATH.status when it has ended, with its status as bash would report it. ``net.sh`` has the
functions that write orders.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import runpy
import select
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import NoReturn

from support.inherited import populate

ORDERS = Path("/run/warm/orders")
IMPORTS = (
    "argparse",
    "ctypes",
    "json",
    "platform",
    "rdmacm.aio",
    "rdmacm.cma",
    "rdmacm.diagnosis.explain",
    "rdmacm.endpoint",
    "rdmacm.kernel.provider",
    "rdmacm.kernel.verbs",
    "rdmacm.proto.roce.rc.engine",
    "rdmacm.soft.provider",
    "rdmacm.soft.wire.udp",
    "rdmacm.soft.device.device",
    "rdmacm.tools.cmtime",
    "rdmacm.tools.devices",
    "rdmacm.tools.main",
    "rdmacm.tools.mckey",
    "rdmacm.tools.perf",
    "rdmacm.tools.rping",
    "rdmacm.tools.rstream",
    "rdmacm.tools.udaddy",
    "rdmacm.tools.ucmatose",
    "interop.operations",
    "interop.peer",
    "traceback",
)
_CLONE_NEWNS, _CLONE_NEWNET, _MS_REC, _MS_SLAVE = 0x20000, 0x40000000, 1 << 14, 1 << 19


def next_program() -> list[str]:
    """Wait for orders. Returns the arguments of one, in a child process that is to run it."""
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    # Every signal makes "woken" readable.
    woken, wake = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, Path] = {}
    # Opened for writing as well, the FIFO never reaches its end.
    with ORDERS.open("r+b", buffering=0) as orders:
        while True:
            readable, _, _ = select.select([orders.fileno(), woken], [], [])
            if woken in readable:
                os.read(woken, 4096)
                report(running)
            if orders.fileno() not in readable:
                continue
            for line in orders.read(4096).splitlines():
                order = Path(os.fsdecode(line))
                pid = os.fork()
                if pid == 0:
                    for number in (woken, wake):
                        os.close(number)
                    return become(order)
                running[pid] = order
                tell(order.with_suffix(".pid"), pid)


def report(running: dict[int, Path]) -> None:
    """Write the status of each program that has ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        ended = os.waitstatus_to_exitcode(status)
        tell(running.pop(pid).with_suffix(".status"), ended if ended >= 0 else 128 - ended)


def become(order: Path) -> list[str]:
    """Give this process the output, namespace and directory of the order; returns Python's arguments."""
    output, namespace, folder, *command = os.fsdecode(order.with_suffix(".args").read_bytes()).split("\0")[:-1]
    program = command.index("python3")
    for assignment in command[1:program]:
        name, _, value = assignment.partition("=")
        os.environ[name] = value
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    populate()
    for number in (1, 2):
        found = os.open(f"/proc/{output}/fd/{number}", os.O_WRONLY | os.O_APPEND)
        os.dup2(found, number)
        os.close(found)
    faulthandler.register(signal.SIGUSR1)
    if namespace:
        enter(namespace)
    os.chdir(folder)
    return command[program + 1 :]


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
    """What ``python3 ARGUMENTS`` does."""
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


def run_and_exit(arguments: list[str]) -> NoReturn:
    """Run the program and end the process, without freeing what was imported.

    That would touch every page of memory that was inherited, which takes longer than most of the programs.
    """
    status = 0
    try:
        run(arguments)
    except SystemExit as end:
        if end.code is not None:
            status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    # Objects that the program left open warn now.
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run_and_exit(next_program())
