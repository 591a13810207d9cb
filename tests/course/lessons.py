"""A lesson of docs/course as its reader has it: files to save, and commands with their output, in one or two terminals.

A block of Python or C that names a file in its first line is that file. A console block is typed in the terminal that
the line above it names (``Terminal 1:``), and without such a line in terminal 2. Terminal 1 is the server's: what
follows does not wait for the end of its command.
"""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from newcomer.environment import HOSTS, MARK, Terminal, variables
from newcomer.pages import ROOT, Block, Command, File, blocks, commands_with_output, output_pattern
from support.netns import Host
from support.waiting import without_waiting

COURSE = ROOT / "docs" / "course"
LESSONS = {path.stem: path for path in sorted(COURSE.glob("[0-9]-*.md"))}
SERVER, CLIENT = 1, 2
#: What varies in these pages, beside what newcomer.pages knows: PSNs, keys, addresses in memory, and the length of
#: arrows, which depends on the text in them.
VARYING = re.compile(r"(?<=PSN )0x[0-9a-f]{6}\b|(?<=rkey )0x[0-9a-f]{1,8}\b|(?<=bytes at )0x[0-9a-f]{9,16}\b")


@dataclass(frozen=True)
class Entered:
    """A command, and the terminal in which it is entered."""

    terminal: int
    command: Command


def steps(page: Path) -> list[Entered | File]:
    """What the reader of a lesson does, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Entered | File] = []
    for block in blocks(page):
        if block.language == "console":
            # The fence is above the block, an empty line above that, and then the label.
            label = re.fullmatch(r"Terminal (\d):", lines[block.line - 4])
            terminal = int(label[1]) if label else CLIENT
            for command in commands_with_output(block):
                assert isinstance(command, Command)
                found.append(Entered(terminal, command))
        else:
            found.append(File(block.line, file_name(block), block.text))
    return found


def file_name(block: Block) -> str:
    """The name in the first line of a program; AssertionError if there is none."""
    named = re.match(r"(?:# (\w+\.py)|/\* (\w+\.c) \*/)\n", block.text)
    assert named, f"line {block.line}: a block of {block.language or 'nothing'} that is no file"
    return str(named[1] or named[2])


def is_repeated(command: Command, page: Path) -> bool:
    """Whether the output is the same each time: that of a simulated network, and of commands that are not rdmacm's."""
    files = {step.name: step.text for step in steps(page) if isinstance(step, File)}
    named = [text for name, text in files.items() if name in command.text.split()]
    return all("rdmacm.testing" in text for text in named) and "rdmacm" not in command.text


def is_shown(shown: str, output: str, *, repeated: bool = False) -> bool:
    """Whether a command has the output that the page shows, apart from what varies if it is not ``repeated``."""
    if repeated:
        return shown == output
    return output_pattern(_steady(shown)).fullmatch(without_waiting(_steady(output))) is not None


def _steady(text: str) -> str:
    text = VARYING.sub("0x0", text)
    return re.sub(r"─+", "─", text)


class Shell:
    """A terminal, and the command that may still run in it."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._running: tuple[Command, int, bool] | None = None

    def start(self, command: Command, *, repeated: bool) -> None:
        self.finish()
        since = self.terminal.type(f"{command.text}\nprintf '\\n{MARK} %d\\n' $?")
        self._running = (command, since, repeated)

    def await_first_line(self) -> None:
        """Wait until a server shows its first line: it listens then."""
        assert self._running is not None
        command, since, _ = self._running
        assert command.shown, f"line {command.line}: nothing tells that the server is ready"
        # Any line ends the waiting, so that a server that does not start is noticed at once.
        self.terminal.shows(re.compile(r"(?!rdmacm: waiting for )(?:.*\n)+"), since)
        output = self.terminal.output(since)
        lines = zip(command.shown.splitlines(), without_waiting(output).splitlines(), strict=False)
        ready = next((is_shown(f"{shown}\n", f"{line}\n") for shown, line in lines), False)
        assert ready, f"line {command.line}: {command.text}\n{output}"

    def finish(self) -> None:
        """Wait until the command has ended, and compare its output."""
        if self._running is None:
            return
        command, since, repeated = self._running
        self._running = None
        status = self.terminal.status(since)
        output = self.terminal.output(since)
        where = f"line {command.line}: {command.text}\n{output}"
        assert (status != 0) == command.fails, f"exit status {status}, {where}"
        assert "Warning" not in output, where
        same = is_shown(command.shown or "", output, repeated=repeated)
        assert same, f"{where}\n--- on the page:\n{command.shown}"


class Reader:
    """Follows a lesson in an empty directory, on the host of the pages, or on this machine if that is None."""

    def __init__(self, directory: Path, host: Host | None) -> None:
        self._host = host
        self._place = directory / "place"
        self._place.mkdir()
        self._hosts = directory / "hosts"
        self._hosts.write_text(HOSTS)
        self._environ = environment(directory)
        self._terminals = ExitStack()
        self._shells: dict[int, Shell] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._terminals.close()

    def read(self, page: Path) -> None:
        for step in steps(page):
            if isinstance(step, File):
                (self._place / step.name).write_text(step.text)
            else:
                self._enter(step.terminal, step.command, is_repeated(step.command, page))
        for shell in self._shells.values():
            shell.finish()

    def _enter(self, terminal: int, command: Command, repeated: bool) -> None:
        if self._host is None and "eth0" in (command.shown or "") and not repeated:
            command = replace(command, shown="...\n")  # this machine has other addresses and devices
        shell = self._shells.get(terminal)
        if shell is None:
            bash = ["bash", "--norc", "--noprofile"]
            opened = Terminal(bash, self._environ, self._place, self._host, self._hosts)
            self._terminals.callback(opened.close)
            shell = self._shells[terminal] = Shell(opened)
        shell.start(command, repeated=repeated)
        if terminal == SERVER:
            shell.await_first_line()
        else:
            shell.finish()


def environment(directory: Path) -> dict[str, str]:
    """That of a terminal in which these sources are installed, as a package and as the command ``rdmacm``."""
    programs = directory / "bin"
    programs.mkdir()
    command = programs / "rdmacm"
    command.write_text('#!/bin/sh\nexec python3 -m rdmacm "$@"\n')
    command.chmod(0o755)
    environ = variables(directory, directory)
    path = f"{programs}:{environ['PATH']}"
    return {**environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"}


def needs_of(page: Path) -> str | None:
    """What this machine lacks for a lesson, or None."""
    compiled = any(isinstance(step, File) and step.name.endswith(".c") for step in steps(page))
    if not compiled:
        return None
    if shutil.which("cc") is None:
        return "needs a C compiler: on Debian and Ubuntu, apt install gcc"
    if not Path("/usr/include/rdma/rdma_cma.h").exists():
        return "needs the C headers: on Debian and Ubuntu, apt install librdmacm-dev libibverbs-dev"
    if not list((ROOT / "src" / "rdmacm" / "run").glob("librdmacm_run.so*")):
        return "needs the library of rdmacm run: python3 dev.py core"
    return None
