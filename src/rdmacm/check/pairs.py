"""Every pair of a cluster: one process at each host helps, and one checks the ways to all others.

The processes are started by a command of the cluster, ``ssh`` or ``srun``, with the host in it. The check at a host
gets the others on its standard input, and writes a JSON object in a line for each.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO

from rdmacm.errors import cm_error, printable

#: Hosts that check at the same time, and seconds that one may take for a peer.
_AT_A_TIME, _PAIR_SECONDS = 8, 60
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}"
_SRUN = "srun --overlap -N1 -n1 -w {host}"
#: The step of a pair whose check could not be started.
NOT_STARTED = "start"


@dataclass(frozen=True, slots=True)
class Node:
    """A host: its ``name`` for the launcher, and the ``address`` that is checked."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Pair:
    """The way from one host to another. ``step`` is the one that failed, "" if none has."""

    source: str
    destination: str
    ok: bool
    rtt_us: float | None = None
    step: str = ""
    meaning: str = ""

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "from": self.source,
            "to": self.destination,
            "ok": self.ok,
            "rtt_us": self.rtt_us,
            "step": self.step or None,
            "meaning": self.meaning or None,
        }


def parse_hosts(text: str) -> list[Node]:
    """The hosts of a file: in each line a name, and perhaps the address of its adapter. ``#`` begins a comment.

    >>> parse_hosts("a\\n# none\\nb 10.0.0.2 slots=4\\n")
    [Node(name='a', address='a'), Node(name='b', address='10.0.0.2')]
    """
    nodes: dict[str, Node] = {}
    for line in text.splitlines():
        words = [word for word in line.partition("#")[0].split() if "=" not in word]
        if words:
            nodes.setdefault(words[0], Node(words[0], words[1] if len(words) > 1 else words[0]))
    return list(nodes.values())


def default_launcher() -> str:
    """``srun`` in a job of Slurm, else ``ssh``."""
    return _SRUN if "SLURM_JOB_ID" in os.environ else _SSH


class Launcher:
    """Starts processes at hosts. ``template`` has ``{host}``; ``program`` is the command there, with its options."""

    def __init__(self, template: str, program: Sequence[str]) -> None:
        self._template = shlex.split(template)
        # ssh joins its arguments for a shell at the other side.
        self._is_shell = bool(self._template) and os.path.basename(self._template[0]) == "ssh"
        self._program = list(program)

    def command(self, host: str, options: Sequence[str]) -> list[str]:
        """The command line for a host.

        >>> Launcher("ssh {host}", ["rdmacm"]).command("a", ["check", "--bind", "x y"])
        ['ssh', 'a', "rdmacm check --bind 'x y'"]
        """
        inner = [*self._program, *options]
        before = [word.replace("{host}", host) for word in self._template]
        return [*before, shlex.join(inner)] if self._is_shell else [*before, *inner]

    def start(self, host: str, options: Sequence[str]) -> subprocess.Popen[str]:
        """Start it."""
        command = self.command(host, options)
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        except OSError as error:
            raise cm_error(error.errno or 0, error.strerror or str(error), "start", command[0]) from None


def check_all(
    nodes: list[Node], launcher: Launcher, options: Sequence[str], shown: Callable[[Pair], None]
) -> list[Pair]:
    """Check all pairs; ``shown`` is called with each, from any thread. ``options`` are those of each check."""
    helpers: list[subprocess.Popen[str]] = []
    lock = threading.Lock()

    def show(pair: Pair) -> None:
        with lock:
            shown(pair)

    try:
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            helpers.extend(pool.map(lambda node: _start_helper(launcher, node, options), nodes))
            rows = list(pool.map(lambda node: _check_from(node, nodes, launcher, options, show), nodes))
    finally:
        for helper in helpers:
            _end(helper)
    return [pair for row in rows for pair in row]


def _start_helper(launcher: Launcher, node: Node, options: Sequence[str]) -> subprocess.Popen[str]:
    """Start the helper at a host, and wait until it listens, or has failed: then the pairs tell."""
    child = launcher.start(node.name, ["check", "--serve", "--while-stdin", *_of_server(options)])
    assert child.stderr is not None
    child.stderr.readline()
    return child


def _of_server(options: Sequence[str]) -> list[str]:
    """The options that a server has, too."""
    found: list[str] = []
    for name in ("--control-port", "--provider"):
        if name in options:
            at = list(options).index(name)
            found += options[at : at + 2]
    return found


def _end(child: subprocess.Popen[str]) -> None:
    """End a helper: it ends with its standard input, also at the other side of ssh."""
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _check_from(
    node: Node, nodes: list[Node], launcher: Launcher, options: Sequence[str], shown: Callable[[Pair], None]
) -> list[Pair]:
    others = [other for other in nodes if other is not node]
    by_address = {other.address: other for other in others}
    child = launcher.start(node.name, ["check", "--each", *options])
    killer = threading.Timer(_PAIR_SECONDS * max(1, len(others)), child.kill)
    killer.daemon = True
    killer.start()
    pairs: dict[str, Pair] = {}
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            child.stdin.write("".join(f"{other.address}\n" for other in others))
            child.stdin.close()
        except BrokenPipeError:
            pass
        for line in child.stdout:
            pair = _pair_of_line(node, line, by_address)
            if pair is not None:
                pairs[pair.destination] = pair
                shown(pair)
        reason = next((line.strip() for line in child.stderr if line.strip()), "it has ended early")
    finally:
        killer.cancel()
        child.kill()
        child.wait()
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
    for other in others:
        if other.name not in pairs:
            pairs[other.name] = Pair(node.name, other.name, False, None, NOT_STARTED, printable(reason))
            shown(pairs[other.name])
    return [pairs[other.name] for other in others]


def _pair_of_line(node: Node, line: str, by_address: Mapping[str, Node]) -> Pair | None:
    """The pair that a line of a check is about; None if it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return pair_of(node, found, by_address)


def pair_of(node: Node, found: Any, by_address: Mapping[str, Node]) -> Pair | None:
    """The pair that the JSON data of a check are about; None if they are none."""
    try:
        other = by_address.get(found["host"])
        steps = {step["step"]: step for step in found["steps"]}
        failed = found["failed"] or ""
        rtt = steps.get("loss", {}).get("rtt_min_us") or steps.get("manager", {}).get("rtt_us")
        meaning = str(steps[failed].get("meaning") or "") if failed else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if other is None:
        return None
    return Pair(node.name, other.name, not failed, float(rtt) if rtt is not None else None, failed, printable(meaning))


def as_json(nodes: list[Node], pairs: list[Pair]) -> dict[str, object]:
    """All pairs as JSON data."""
    return {"hosts": [node.name for node in nodes], "pairs": [pair.as_dict() for pair in worst_first(pairs)]}


def worst_first(pairs: list[Pair]) -> list[Pair]:
    """Failed pairs, and then the others, those with the longest round trip first."""
    return sorted(pairs, key=lambda pair: (pair.ok, -(pair.rtt_us or 0.0)))


def matrix(nodes: list[Node], pairs: list[Pair]) -> list[list[str]]:
    """Rows of a matrix: the name of the host, and for each other the round trip in µs, or the step that failed."""
    known = {(pair.source, pair.destination): pair for pair in pairs}

    def cell(source: Node, destination: Node) -> str:
        pair = known.get((source.name, destination.name))
        if pair is None:
            return "."
        if not pair.ok:
            return pair.step
        return "ok" if pair.rtt_us is None else f"{pair.rtt_us:.0f}"

    return [[source.name, *(cell(source, destination) for destination in nodes)] for source in nodes]


def hosts_of(stream: TextIO | None) -> list[str]:
    """The hosts on standard input, for a check at one host of a cluster."""
    return [line.strip() for line in stream or sys.stdin if line.strip()]
