"""README and the pages of docs/, as a newcomer reads them: every command and every block of Python, in order.

Each page has a new host and an empty directory; README has the checkout. A new virtual environment has nothing but the
package, installed as README says. What the pages show as output is compared with the output.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Self

import pytest

from infiniband.fabric import missing
from newcomer.environment import (
    HOSTS,
    INTERPRETER,
    MARK,
    Terminal,
    copy_project,
    newcomers_host,
    package_index,
    variables,
)
from newcomer.pages import READ_ONLY, ROOT, Command, File, Paste, blocks, output_pattern, pages, steps
from support.netns import Host


@dataclass(frozen=True)
class NotRun:
    """The command is not run."""

    reason: str


@dataclass(frozen=True)
class Needs:
    """The command is run where a program is installed."""

    program: str


@dataclass(frozen=True)
class OwnTerminal:
    """The command runs in a terminal of its own, beside what follows, until it ends or the page ends."""


@dataclass(frozen=True)
class Fabric(OwnTerminal):
    """The same, in the checkout, and Enter ends it. The line that it prints is entered in the terminals after it."""


@dataclass(frozen=True)
class EachTerminal:
    """The command is entered, and again in each terminal opened after it."""


VIRTUAL_MACHINE = NotRun("starts a virtual machine, which takes minutes to make")
IMAGE = NotRun("fetches an image")
QUIET = NotRun("its server is not heard when it begins to listen; test_ping.py of docs/ci.md does the same")
SOCKETS = NotRun("its server is not heard when it begins to listen; tests/run does the same")

#: The commands that are not simply typed, one after the other, in one terminal for each page.
COMMANDS: dict[str, NotRun | Needs | OwnTerminal | EachTerminal] = {
    "python3 dev.py interop": VIRTUAL_MACHINE,
    "python3 dev.py interop -k rping": VIRTUAL_MACHINE,
    "python3 dev.py interop -k campaign": VIRTUAL_MACHINE,
    "RDMACM_CAMPAIGN=100 RDMACM_CAMPAIGN_SEED=7 python3 dev.py interop -k campaign": VIRTUAL_MACHINE,
    "RDMACM_GUEST_TIMEOUT=9000 tests/interop/guest 'rxe python3 -m interop.campaign.run rxe 23 0 1000'": (
        VIRTUAL_MACHINE
    ),
    "RDMACM_GUEST_TIMEOUT=9000 tests/interop/guest 'iwarp_network; rxe python3 -m interop.campaign.run siw 23 0 400'": (
        VIRTUAL_MACHINE
    ),
    "python3 dev.py interop --machine qemu": VIRTUAL_MACHINE,
    "python3 dev.py interop --machine both": VIRTUAL_MACHINE,
    "python3 dev.py interop --write": VIRTUAL_MACHINE,
    "python3 dev.py bench guest --write": VIRTUAL_MACHINE,
    "python3 dev.py bench programs --write": VIRTUAL_MACHINE,
    "tests/interop/guest": VIRTUAL_MACHINE,
    "tests/interop/guest 'rdma link; soft python3 -m rdmacm devices'": VIRTUAL_MACHINE,
    "tests/interop/guest 'serve_soft python3 -m rdmacm rping -s -C 3; rxe rping -c -a $SOFT4 -C 3 -v; finish'": (
        VIRTUAL_MACHINE
    ),
    "tests/interop/guest --machine qemu uname -a": VIRTUAL_MACHINE,
    "tests/interop/guest --prepare": VIRTUAL_MACHINE,
    "tests/interop/guest --update true": VIRTUAL_MACHINE,
    "python3 tests/infiniband/fabric.py": Fabric(),
    "podman build --tag rdmacm .": IMAGE,
    "podman run --rm rdmacm": IMAGE,
    "podman run --rm rdmacm resolve 127.0.0.1 7471": IMAGE,
    ". venv/bin/activate": EachTerminal(),
    "python3 server.py": OwnTerminal(),
    "rdmacm rping -s": OwnTerminal(),
    "rdmacm ucmatose -c 100": OwnTerminal(),
    "rdmacm rstream -S 4000 -C 50 -I 3 -T v": OwnTerminal(),
    "rdmacm riostream -S 4000 -C 50 -I 3 -T v": OwnTerminal(),
    "rdmacm rcopy --directory .": OwnTerminal(),
    "rdmacm udpong": OwnTerminal(),
    "rdmacm run --serve": OwnTerminal(),
    "rdmacm check --serve": OwnTerminal(),
    "rdmacm lab up --mtu 4200 --delay 0.001": OwnTerminal(),
    "rdmacm run -- rping -s -a 127.0.0.1 -C 2 -v": QUIET,
    "rdmacm run -- rping -c -a 127.0.0.1 -C 2 -v": QUIET,
    "rdmacm run -- rstream -S 5000 -C 20 -I 10 -T v": SOCKETS,
    "rdmacm run --sockets -- python3 -m http.server -b 127.0.0.1 8000": SOCKETS,
    "rdmacm run --sockets -- curl http://127.0.0.1:8000/": SOCKETS,
    "pytest -q test_ping.py": Needs("rping"),
}

#: Without the course, whose lessons tests/course follows.
PAGES = {name: path for name, path in pages().items() if steps(path) and not name.startswith("docs/course/")}


def commands(page: str) -> list[str]:
    return [step.text for step in steps(PAGES[page]) if isinstance(step, Command)]


# --- every page, without running it -------------------------------------------------------------------------


def test_each_command_that_is_treated_specially_is_on_a_page() -> None:
    assert {command for page in PAGES for command in commands(page)} >= COMMANDS.keys()


@pytest.mark.parametrize("name", PAGES)
def test_each_program_to_be_saved_is_run_by_a_command(name: str) -> None:
    run = set(re.findall(r"(?:python3|pytest -q) (\w+\.py)", "\n".join(commands(name))))
    assert {step.name for step in steps(PAGES[name]) if isinstance(step, File)} <= run


@pytest.mark.parametrize("name", pages())
def test_no_python_is_in_a_block_without_a_language(name: str) -> None:
    for block in blocks(pages()[name]):
        if block.language in READ_ONLY:
            with pytest.raises(SyntaxError):
                ast.parse(block.text)


# --- every page, run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("index")
    try:
        package_index(directory, "hatchling", "numpy", "pytest")
    except PackageNotFoundError as error:
        pytest.skip(f"needs {error.name} to build the package without a network: the extra dev")
    environ = variables(directory, directory)
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    version = subprocess.check_output(["python3", "-c", code], env=environ, text=True).strip()
    if version != "{}.{}".format(*sys.version_info):
        pytest.skip(f"python3 is Python {version}, and the packages to install from here are for another one")
    return directory


@pytest.fixture(scope="module")
def installation(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Installs the package for a page, with README's commands; returns the one that is entered in each terminal.

    Pages that install something get an installation of their own, the others share one. The package is built for README
    and once more for all others: that takes longest.
    """
    made: dict[str, str] = {}

    def run(directory: Path, script: str) -> None:
        environ = variables(index, directory)
        ended = subprocess.run(
            ["bash", "-c", script],
            cwd=directory / "project",
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{script}\n{ended.stdout}\n{ended.stderr}"

    @cache
    def wheel() -> Path:
        directory = tmp_path_factory.mktemp("wheel")
        copy_project(ROOT, directory / "project")
        run(directory, "python3 -m pip wheel --no-deps --wheel-dir .. .")
        return next(directory.glob("*.whl"))

    def install(page: str) -> str:
        key = page if any("pip install" in command for command in commands(page)) else ""
        if key not in made:
            directory = tmp_path_factory.mktemp("installation")
            copy_project(ROOT, directory / "project")
            script = " && ".join(command for command in commands("README.md") if re.search(r"venv|pip", command))
            run(directory, script if key == "README.md" else script.replace("install .", f"install {wheel()}"))
            made[key] = f". {directory}/project/venv/bin/activate"
        return made[key]

    return install


class Reader:
    """Does what a page says, on a host and in a directory.

    :param entered: what is entered in each terminal
    """

    def __init__(
        self, page: str, host: Host | None, directory: Path, environ: dict[str, str], entered: list[str]
    ) -> None:
        self.page = page
        self.host = host
        self.environ = environ
        self.entered = entered
        self.place = directory / "place"
        if page == "README.md":
            copy_project(ROOT, self.place)
        else:
            self.place.mkdir()
        self.hosts = directory / "hosts"
        self.hosts.write_text(HOSTS)
        self.terminals = ExitStack()
        self.shell: Terminal | None = None
        self.python: Terminal | None = None
        self.servers: list[tuple[Command, Terminal]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminals.close()

    def open_terminal(self, *command: str, cwd: Path | None = None) -> Terminal:
        terminal = Terminal(command, self.environ, cwd or self.place, self.host, self.hosts)
        self.terminals.callback(terminal.close)
        return terminal

    def open_shell(self, cwd: Path | None = None) -> Terminal:
        shell = self.open_terminal("bash", "--norc", "--noprofile", cwd=cwd)
        for line in self.entered:
            shell.type(line)
        return shell

    def open_python(self) -> Terminal:
        script = "\n".join([*self.entered, 'exec python3 -c "$0"'])
        return self.open_terminal("bash", "--norc", "--noprofile", "-c", script, INTERPRETER)

    def read(self) -> None:
        for step in steps(PAGES[self.page]):
            if isinstance(step, File):
                (self.place / step.name).write_text(step.text)
            elif self.host is None and "192.0.2." in step.text:
                continue  # no address of this machine or its neighbours
            elif isinstance(step, Paste):
                self.paste(step)
            else:
                self.enter(step)
        for command, terminal in self.servers:
            self.compare(command, terminal)

    def paste(self, step: Paste) -> None:
        # The blocks of README are independent of each other, those of a guide are one program.
        if self.python is None or self.page == "README.md":
            self.python = self.open_python()
        since = self.python.type(json.dumps([self.page, step.line, step.text, MARK]))
        status = self.python.status(since)
        output = self.python.output(since)
        assert (status, "Warning" in output) == (0, False), output
        self.compare(step, self.python, since)

    def enter(self, command: Command) -> None:
        treatment = COMMANDS.get(command.text)
        if isinstance(treatment, NotRun) or (isinstance(treatment, Needs) and not shutil.which(treatment.program)):
            return
        if isinstance(treatment, Fabric) and (reason := missing("ibsim", "opensm")):
            pytest.skip(f"{self.page} from line {command.line} on {reason}")
        if isinstance(treatment, OwnTerminal):
            self.serve(command, treatment)
            return
        if self.shell is None:
            self.shell = self.open_shell()
        since = self.shell.type(f"{command.text}\nprintf '\\n{MARK} %d\\n' $?")
        status = self.shell.status(since)
        output = self.shell.output(since)
        assert (status != 0) == command.fails, f"line {command.line}: {output}"
        assert "Warning" not in output or command.text.startswith("pip"), f"line {command.line}: {output}"
        self.compare(command, self.shell, since)
        if isinstance(treatment, EachTerminal):
            self.entered.append(command.text)

    def serve(self, command: Command, how: OwnTerminal) -> None:
        terminal = self.open_shell(ROOT if isinstance(how, Fabric) else None)
        terminal.type(f"exec {command.text}")
        assert command.shown is not None
        # It runs when it has printed the first line that it prints by itself.
        first = command.shown.splitlines(keepends=True)[0]
        start = re.compile(output_pattern(first).pattern + r"(?:.*\n)*.*")
        assert terminal.shows(start), f"line {command.line}: {terminal.output()}"
        if isinstance(how, Fabric):
            self.entered.append(terminal.output().splitlines()[0])
            self.shell = None
            self.terminals.callback(terminal.press_enter)
        self.servers.append((command, terminal))

    def compare(self, step: Command | Paste, terminal: Terminal, since: int = 0) -> None:
        """Wait for the output that the page shows.

        Only on the host of the pages: on another one, addresses and devices differ.
        """
        if step.shown is None:
            return
        if self.host is not None:
            pattern = output_pattern(step.shown)
        elif step.shown and step.text.endswith("&"):
            pattern = re.compile("(?:.*\\n)+")  # a server is ready when it has printed something
        else:
            return
        # What runs in the background may still print.
        shows = terminal.shows(pattern, since, patience=30)
        assert shows, f"line {step.line}: {step.text}\n{terminal.output(since)}\n--- on the page:\n{step.shown}"


@pytest.fixture
def host() -> Iterator[Host | None]:
    with newcomers_host() as host:
        yield host


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PAGES)
def test_page_does_what_it_says(
    name: str, index: Path, installation: Callable[[str], str], host: Host | None, tmp_path: Path
) -> None:
    entered = [] if name == "README.md" else [installation(name)]
    with Reader(name, host, tmp_path, variables(index, tmp_path), entered) as reader:
        reader.read()
