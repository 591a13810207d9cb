"""Fabrics simulated by ibsim(1), with OpenSM as their subnet manager and administrator.

It needs neither root nor a network: all traffic uses abstract Unix sockets named after IBSIM_SOCKNAME. Each fabric has
its own name, so fabrics are independent.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Self

#: A command, and the Debian package it is in.
PACKAGES = {
    "cc": "gcc",
    "ibacm": "ibacm",
    "ibsim": "ibsim-utils",
    "ip": "iproute2",
    "opensm": "opensm",
    "saquery": "infiniband-diags",
    "unshare": "util-linux",
}
_SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"
#: Seconds to wait; a tree of a thousand hosts is up after five on an idle machine.
PATIENCE = 60.0

#: Two switches with two cables between them, two hosts each. The subnet manager is on HostM.
SMALL = """\
Switch 8 "SwitchA"
[1] "HostA"[1]
[2] "HostB"[1]
[7] "SwitchB"[7]
[8] "SwitchB"[8]

Switch 8 "SwitchB"
[1] "HostC"[1]
[2] "HostM"[1]
[7] "SwitchA"[7]
[8] "SwitchA"[8]

Hca 1 "HostM"
[1] "SwitchB"[2]

Hca 1 "HostA"
[1] "SwitchA"[1]

Hca 1 "HostB"
[1] "SwitchA"[2]

Hca 1 "HostC"
[1] "SwitchB"[1]
"""


def tree(leaves: int, hosts_a_leaf: int, spines: int) -> str:
    """Two levels: every leaf switch has its hosts, ``host0`` onwards, and one cable to each spine."""
    parts = []
    for leaf in range(leaves):
        parts.append(f'Switch {hosts_a_leaf + spines} "leaf{leaf}"')
        parts += [f'[{port + 1}] "host{leaf * hosts_a_leaf + port}"[1]' for port in range(hosts_a_leaf)]
        parts += [f'[{hosts_a_leaf + spine + 1}] "spine{spine}"[{leaf + 1}]' for spine in range(spines)]
    for spine in range(spines):
        parts.append(f'Switch {leaves} "spine{spine}"')
        parts += [f'[{leaf + 1}] "leaf{leaf}"[{hosts_a_leaf + spine + 1}]' for leaf in range(leaves)]
    for host in range(leaves * hosts_a_leaf):
        leaf, port = divmod(host, hosts_a_leaf)
        parts += [f'Hca 1 "host{host}"', f'[1] "leaf{leaf}"[{port + 1}]']
    # An empty line ends a node.
    return re.sub(r"\n(Switch|Hca)", r"\n\n\1", "\n".join(parts)) + "\n"


def missing(*commands: str) -> str | None:
    """The reason why tests that need these commands cannot run, or None."""
    lacking = [command for command in commands if shutil.which(command) is None and _in_system(command) is None]
    if not lacking:
        return None
    packages = " ".join(sorted({PACKAGES[command] for command in lacking}))
    return f"needs {', '.join(lacking)}: on Debian and Ubuntu, apt install {packages}"


def command(name: str) -> str:
    """The path of a program, also in the administrators' directories, which a user's PATH may lack."""
    return shutil.which(name) or _in_system(name) or name


def _in_system(name: str) -> str | None:
    return shutil.which(name, path=_SYSTEM)


def umad2sim() -> str:
    """The library of ibsim-utils that makes a program for libibumad use a simulated node, when preloaded."""
    found = glob.glob("/usr/lib/*/umad2sim/libumad2sim.so") + glob.glob("/usr/lib*/umad2sim/libumad2sim.so")
    return found[0]


class Talker:
    """A program whose output is read as it arrives, so that tests can wait for a text."""

    def __init__(self, arguments: Sequence[str], environ: dict[str, str], cwd: Path) -> None:
        self.text = ""
        self._more = threading.Condition()
        self._ended = False
        # The kernel ends the program when the tests are killed: ibsim would go on and use a whole processor.
        with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self.process = subprocess.Popen(
            [*with_us, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C goes to the tests only, which then end the programs in order
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        while line := os.read(output.fileno(), 1 << 16).decode(errors="replace"):
            with self._more:
                self.text += line
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def await_text(self, text: str, since: int = 0, patience: float = PATIENCE) -> int:
        """Wait until the output from ``since`` on has the text; returns the offset behind it."""
        if not self.wait_until(lambda output: text in output[since:], patience):
            why = "ended" if self._ended else f"took more than {patience:g} s"
            raise RuntimeError(f"{self.process.args!r} {why} before it said {text!r}; it said:\n{self.text}")
        return self.text.index(text, since) + len(text)

    def wait_until(self, condition: Callable[[str], bool], patience: float = PATIENCE) -> bool:
        """Wait until the condition holds for the output; returns False if the program ends or time runs out before."""
        with self._more:
            self._more.wait_for(lambda: condition(self.text) or self._ended, patience)
            return condition(self.text)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self, patience: float = 5.0) -> None:
        """End the program, with SIGKILL if it takes longer than ``patience`` seconds."""
        self.process.terminate()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self._reader.join(5)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class SimulatedFabric:
    """A fabric, a context manager; ``base`` is its IBSIM_SOCKNAME.

    OpenSM runs on ``hosts[0]``, from the start if ``managed``, and gives each host's port 2^``lmc`` LIDs.
    """

    def __init__(self, topology: str = SMALL, *, managed: bool = True, lmc: int = 0) -> None:
        self._topology = topology
        self._lmc = lmc
        self._managed = managed
        self.hosts: list[str] = re.findall(r'^Hca\s+\d+\s+"([^"]+)"', topology, re.MULTILINE)
        self.base = f"rdmacm-{os.urandom(6).hex()}"
        self._ibsim: Talker | None = None
        self._opensm: Talker | None = None

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="rdmacm-fabric-"))
        try:
            self._start_ibsim()
            if self._managed:
                self.start_opensm()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # In this order: OpenSM disconnects from ibsim.
        for one in (self._opensm, self._ibsim):
            if one is not None:
                one.end()
        self._opensm = self._ibsim = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start_ibsim(self) -> None:
        file = self.directory / "topology"
        file.write_text(self._topology)
        switches = [int(ports) for ports in re.findall(r"^Switch\s+(\d+)", self._topology, re.MULTILINE)]
        room = [len(self.hosts) + len(switches) + 16, len(switches) + 4, 2 * len(self.hosts) + sum(switches) + 512]
        sizes = [f"-{option}{size}" for option, size in zip("NSP", room, strict=True)]
        environ = dict(os.environ, IBSIM_SOCKNAME=self.base)
        self._ibsim = Talker([command("ibsim"), "-s", *sizes, str(file)], environ, self.directory)
        self._ibsim.await_text("sim> ")
        # It prints that it is ready too early; it is ready when it has answered a command.
        self.console("Attached")

    @property
    def ibsim(self) -> Talker:
        assert self._ibsim is not None
        return self._ibsim

    @property
    def opensm(self) -> Talker:
        assert self._opensm is not None
        return self._opensm

    def start_opensm(self) -> None:
        """Start the subnet manager and wait until the subnet is up."""
        # Log to standard output, unbuffered; sweep only after a trap.
        options = ["-f", "stdout", "-d", "2", "-s", "0", "-l", str(self._lmc)]
        environ = dict(self.environ(self.hosts[0]), OSM_CACHE_DIR=str(self.directory), OSM_TMP_DIR=str(self.directory))
        self._opensm = Talker([command("opensm"), *options], environ, self.directory)
        self._opensm.await_text("SUBNET UP")

    def kill_opensm(self) -> None:
        """Kill the subnet manager; its services and group members are lost."""
        pid = self.opensm.process.pid
        self.opensm.kill()
        self._opensm = None
        # ibsim keeps a dead client's slot, and a new manager on that node would get no datagrams.
        for client in re.findall(rf"Client (\d+): pid {pid} ", self.console("Attached")):
            self.console(f"X {client}")

    def environ(self, host: str) -> dict[str, str]:
        """The environment for a program of libibumad on that host; it writes files into the fabric's directory."""
        return dict(os.environ, IBSIM_SOCKNAME=self.base, SIM_HOST=host, LD_PRELOAD=umad2sim())

    def run(self, host: str, *arguments: str) -> str:
        """Run such a program on a host; returns its output."""
        done = subprocess.run(
            [command(arguments[0]), *arguments[1:]],
            env=self.environ(host),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        return done.stdout

    def console(self, line: str) -> str:
        """Give ibsim a command, such as ``Unlink "HostC"``; returns its answer."""
        since = len(self.ibsim.text)
        self.ibsim.say(line)
        end = self.ibsim.await_text("sim> ", since)
        return self.ibsim.text[since:end]

    def unlink(self, host: str) -> None:
        """Unplug the host's cable, and wait until the subnet manager has noticed."""
        self._recable(f'Unlink "{host}"')

    def relink(self, host: str) -> None:
        """Plug it in again, and wait until the subnet manager has noticed."""
        self._recable(f'ReLink "{host}"')

    def _recable(self, line: str) -> None:
        since = len(self.opensm.text)
        self.console(line)
        self.opensm.await_text("SUBNET UP", since)

    def stop_ibsim(self) -> None:
        """Suspend ibsim until :meth:`continue_ibsim`."""
        os.kill(self.ibsim.process.pid, signal.SIGSTOP)

    def continue_ibsim(self) -> None:
        os.kill(self.ibsim.process.pid, signal.SIGCONT)

    def kill_ibsim(self) -> None:
        self.ibsim.kill()

    def start_anew(self) -> None:
        """Restart ibsim and OpenSM; the new fabric does not know the clients of the old one."""
        self.opensm.kill()
        self.kill_ibsim()
        self._start_ibsim()
        self.start_opensm()


def main() -> None:
    """Run a fabric for manual tests until an empty line or Ctrl-C; other lines are commands for ibsim."""
    if reason := missing("ibsim", "opensm"):
        sys.exit(reason)
    with SimulatedFabric() as fabric, contextlib.suppress(KeyboardInterrupt):
        print(f"export IBSIM_SOCKNAME={fabric.base} RDMACM_IB=ibsim:{fabric.hosts[1]}")
        print(f"# hosts: {' '.join(fabric.hosts)}; rdmacm sa info; Enter ends the fabric", flush=True)
        while line := sys.stdin.readline().strip():
            print(fabric.console(line).removesuffix("sim> ").strip(), flush=True)


if __name__ == "__main__":
    main()
