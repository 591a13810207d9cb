"""A machine as a newcomer has it: Python, a package index that needs no network, a host with addresses, terminals."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from infiniband.fabric import Talker
from support.netns import Host, Topology, requirement
from support.waiting import without_waiting

#: Seconds for a command or an output, on a busy machine.
PATIENCE = 120.0
#: As on Debian and others: the name leads to both families.
HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
#: What a terminal prints at the end of a command, before the exit status.
MARK = "=#= ended with"
#: Runs the Python that it reads from standard input, block by block, as one program.
INTERPRETER = """
import json, sys, traceback
names = {"__name__": "__main__"}
for request in sys.stdin:
    file, line, text, mark = json.loads(request)
    status = 0
    try:
        # The traceback has the line numbers of the page.
        exec(compile("\\n" * (line - 1) + text, file, "exec"), names)
    except BaseException:
        traceback.print_exc()
        status = 1
    print(f"\\n{mark} {status}", flush=True)
"""


def package_index(directory: Path, *packages: str) -> None:
    """Pack packages of this environment, and those they require, as wheels.

    pip takes them from there instead of a network (``--no-index --find-links``).

    :raises importlib.metadata.PackageNotFoundError: one of ``packages`` is not installed here
    """
    wanted, packed = list(packages), set[str]()
    while wanted:
        name = wanted.pop()
        if name in packed:
            continue
        packed.add(name)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in packages:
                raise
            continue  # required on other systems only
        _pack(package, directory)
        requires = [each for each in package.requires or () if "extra ==" not in each]
        wanted += [re.split(r"[^\w.-]", each)[0] for each in requires]


def _pack(package: importlib.metadata.Distribution, directory: Path) -> None:
    tags = re.findall(r"^Tag: (.+)$", package.read_text("WHEEL") or "", re.MULTILINE)
    # A file name has one set of tags: the parts of several are joined by dots.
    parts = zip(*(tag.split("-") for tag in tags), strict=True)
    tag = "-".join(".".join(dict.fromkeys(part)) for part in parts)
    name = re.sub(r"[-_.]+", "_", package.metadata["Name"])
    with zipfile.ZipFile(directory / f"{name}-{package.version}-{tag}.whl", "w") as wheel:
        for file in package.files or ():
            # Without scripts, which are outside of the directory of modules, and what their installation added.
            if ".." not in file.parts and file.suffix != ".pyc" and file.name not in ("INSTALLER", "REQUESTED"):
                wheel.write(str(file.locate()), file.as_posix())


def variables(index: Path, home: Path) -> dict[str, str]:
    """The environment variables of a terminal in which Python is installed and nothing else."""
    python = getattr(sys, "_base_executable", None) or sys.executable
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TERM", "TMPDIR") if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)]),
        # pip fetches nothing.
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_NO_COMPILE": "1",  # which takes longest
        "PIP_NO_INDEX": "1",
        # Output appears line by line, as on a terminal.
        "PYTHONUNBUFFERED": "1",
        # An example that does not close what it opens is reported.
        "PYTHONWARNINGS": "default",
    }


def copy_project(source: Path, target: Path) -> None:
    """What a clone has, with the changes that are not committed."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "venv", ".*_cache", ".hypothesis", "__pycache__", "artifacts", "dist"
    )
    shutil.copytree(source, target, ignore=ignored)


@contextlib.contextmanager
def newcomers_host() -> Iterator[Host | None]:
    """The host of the pages: eth0 has 192.0.2.2 and fd00::2.

    192.0.2.7 is a neighbour that answers nothing, and no other neighbour exists. None if namespaces cannot be made.
    """
    if requirement() is not None:
        yield None
        return
    with Topology() as topology:
        host, peer = topology.host(), topology.host()
        host.ip_batch(
            f"link add name eth0 index 2 address 02:fc:00:00:00:01 type veth peer name eth0 netns {peer.name}",
            "address add 192.0.2.2/24 dev eth0",
            "address add fd00::2/64 dev eth0",
            "neighbour add 192.0.2.7 lladdr 02:fc:00:00:00:07 dev eth0 nud permanent",
            "link set dev eth0 up",
        )
        peer.ip("link", "set", "dev", "eth0", "up")
        host.settle("eth0")
        yield host


class Terminal:
    """A shell on the host, or Python."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], cwd: Path, host: Host | None, hosts: Path
    ) -> None:
        if host is not None:
            script = 'mount --bind "$0" /etc/hosts && exec "$@"'  # in the mount namespace that ip makes
            command = ["ip", "netns", "exec", host.name, "sh", "-c", script, str(hosts), *command]
        self._talker = Talker(command, dict(environ), cwd)

    def type(self, line: str) -> int:
        """Enter a line; returns the offset of the output that follows."""
        since = len(self._talker.text)
        self._talker.say(line)
        return since

    def status(self, since: int) -> int:
        """Wait for the end of what was entered, as :data:`MARK` reports it; returns the exit status."""
        end = self._talker.await_text(f"\n{MARK} ", since, PATIENCE)
        stop = self._talker.await_text("\n", end, PATIENCE)
        return int(self._talker.text[end:stop])

    def output(self, since: int = 0) -> str:
        return without_marks(self._talker.text[since:])

    def shows(self, pattern: re.Pattern[str], since: int = 0, patience: float = PATIENCE) -> bool:
        """Wait until the output matches; False if it does not in ``patience`` seconds.

        On a slow machine the tools say that they wait, where the page does not show it.
        """

        def matches(text: str) -> bool:
            output = without_marks(text[since:])
            return any(pattern.fullmatch(each) for each in (output, without_waiting(output)))

        return self._talker.wait_until(matches, patience)

    def press_enter(self) -> None:
        """Press Enter, and wait for the end of what runs in place of the shell."""
        self._talker.say("")
        self._talker.process.wait(PATIENCE)

    def close(self) -> None:
        self._signal(signal.SIGTERM)
        self._talker.end()
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        # The terminal and what runs in it are one process group, and what is left of it gets the signal.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._talker.process.pid, number)


def without_marks(text: str) -> str:
    return re.sub(rf"\n{MARK} \d+\n", "", text)
