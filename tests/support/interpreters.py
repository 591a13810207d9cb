"""A process whose sub-interpreter imports rdmacm, too: ``python interpreters.py legacy|isolated``.

The main interpreter has a connection, and transfers messages before and after. The output is what the sub-interpreter
has to report, line by line. This needs no package but rdmacm, so any Python can run it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from importlib import import_module

import rdmacm

LOOPBACK = "127.0.0.1"
PROGRAM = """
import sys
try:
    import rdmacm
    from rdmacm.proto import core_choice
    lines = [f"core {core_choice.name}", f"found {rdmacm.getaddrinfo('127.0.0.1', '7471')[0].dst_addr[1]}"]
    calls = {
        "bind": lambda: rdmacm.CmId().bind_addr(("127.0.0.1", 0)),
        "listen": lambda: rdmacm.listen(("127.0.0.1", 0)),
    }
    for name in ("bind", "listen"):
        try:
            calls[name]()
            lines.append(f"{name} works")
        except rdmacm.RdmaError as error:
            lines.append(f"{name} {error}")
except ImportError as error:
    lines = [f"import {error}"]
with open(PATH, "w") as file:
    file.write("\\n".join(lines))
"""
#: Another process, which tries to take a port.
BIND = "import sys, rdmacm; rdmacm.CmId().bind_addr(('127.0.0.1', int(sys.argv[1])))"


def run(program: str, is_isolated: bool) -> None:
    """Run a program in a new sub-interpreter."""
    if sys.version_info >= (3, 13):
        interpreters = import_module("_interpreters")
        interpreter = interpreters.create("isolated" if is_isolated else "legacy")
    else:
        interpreters = import_module("_xxsubinterpreters")
        interpreter = interpreters.create(isolated=is_isolated)
    failure = interpreters.run_string(interpreter, program)
    assert failure is None, failure
    interpreters.destroy(interpreter)


def main(is_isolated: bool) -> None:
    accepted = []
    with rdmacm.listen((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=lambda: accepted.append(listener.accept(30)))
        thread.start()
        with rdmacm.connect((LOOPBACK, listener.port), timeout=30) as ours:
            thread.join()
            with accepted[0] as theirs:

                def exchange() -> None:
                    for one, other in ((ours, theirs), (theirs, ours)):
                        one.send(b"message", timeout=30)
                        assert other.recv(30) == b"message"

                exchange()
                with tempfile.NamedTemporaryFile("r") as found:
                    run(f"PATH = {found.name!r}\n{PROGRAM}", is_isolated)
                    print(found.read())
                exchange()
                done = subprocess.run(
                    [sys.executable, "-c", BIND, str(listener.port)], stderr=subprocess.PIPE, check=False
                )
                print("the port is", "taken" if b"EADDRINUSE" in done.stderr else f"free {done.stderr!r}")


if __name__ == "__main__":
    main(sys.argv[1] == "isolated")
