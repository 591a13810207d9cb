"""Runs the draws of a campaign in the machine.

    python3 -m interop.campaign.run rxe|siw SEED FIRST COUNT [FOLDER]

The draws of a block run side by side. A draw that fails runs once more, alone, with a recording of its packets in
FOLDER. Prints a line for each failure, with the command that repeats it, and the counts of all outcomes; the status is
1 if a draw failed.

The life of a draw: the server starts, and when it listens, the client. Where nothing is drawn that ends a connection,
both must succeed. Where an end is killed or the interface goes down, no end may hang or crash; and afterwards the
server must serve the next client, or if it has ended or serves only one, a new pair of programs must succeed at the
same port.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

from interop.campaign import tools
from interop.campaign.draws import Draw, End, block_of, draw
from interop.campaign.explanations import explanation
from interop.campaign.link import impaired, keep_addresses, recorded, renew_device, set_interface
from interop.campaign.processes import Process, waits

__all__ = ["Verdict", "main"]

#: Draws of a block that run at a time.
SIDE_BY_SIDE = 6
#: Seconds until an end counts as hanging, and until a server of one client counts as waiting for one.
PATIENCE, NOTICE = 240.0, 20.0
#: Seconds between two looks at the processes.
_LOOK = 0.05
#: Seconds that the interface is up at least before it goes down again.
_UP = 4.0
#: Seconds between two looks at the kernel's listeners, each of which starts a program.
_SELDOM = 0.4
#: Draws that take longer than so many seconds are listed.
_LONG = 120.0
_AFTER_DOWN = "succeeded after the interface was down"
_LISTS = Path("/tmp/campaign")


@dataclass(frozen=True)
class Verdict:
    """How a draw ended."""

    #: What is counted.
    outcome: str
    failed: bool = False
    #: Of a failure: the outputs of the programs, and where those that hang wait.
    details: str = ""


class Failure(Exception):
    """A draw failed."""


#: A step of a draw yields while it waits.
Steps = Generator[None, None, None]


@dataclass
class Quiet:
    """How many draws need the interface to stay up, and what it is."""

    draws: int = 0
    is_up: bool = True
    #: Whether the device is being removed, to be made again.
    is_renewing: bool = False
    #: How often the device was made again.
    renewals: int = 0


@dataclass
class Trial:
    """A draw that runs."""

    draw: Draw
    quiet: Quiet
    processes: list[tuple[str, Process]] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        #: What the programs that started last were told to do.
        self.work = self.draw
        self.renewals = 0

    def start(self, role: str, short: bool = False) -> Process:
        """Start an end; ``short``: with little work."""
        draw = self.draw
        if short:
            draw = replace(draw, messages=min(3, draw.messages), connections=min(2, draw.connections))
        self.work = draw
        end = draw.server if role == "server" else draw.client
        command = tools.server(draw) if role == "server" else tools.client(draw)
        output = _LISTS / f"{draw.number}-{len(self.processes)}.out"
        process = Process(end, command, output)
        self.processes.append((role, process))
        return process

    def run(self) -> Generator[None, None, Verdict]:
        outcome = "succeeded"
        began = time.monotonic()
        try:
            outcome = yield from self._run()
        except Failure as failure:
            return Verdict(str(failure), True, "\n".join([*self.details, *self._said()]))
        finally:
            for _, process in self.processes:
                process.end()
            self.seconds = time.monotonic() - began
        for role, process in self.processes:
            end = self.draw.server if role == "server" else self.draw.client
            if end.is_ours and _crashed(self.draw, process):
                return Verdict(f"our {role} crashed", True, "\n".join(self._said()))
        return Verdict(outcome)

    def _said(self) -> list[str]:
        return [f"--- {role}, status {each.status()}:\n{_shortened(each.said())}" for role, each in self.processes]

    def _run(self) -> Generator[None, None, str]:
        draw = self.draw
        self.renewals = self.quiet.renewals
        server = self.start("server")
        disturbed = draw.kill is not None or draw.link.down is not None
        if not (yield from self._listens(server)):
            if draw.link.down is None:
                raise Failure("the server does not listen")
            server.end()
            yield from self._new_pair()
            return _AFTER_DOWN
        client = self.start("client")
        killed = False
        if draw.kill is not None:
            killed = yield from self._kill(server, client)
        if not disturbed:
            yield from self._succeeds(client, "client")
            yield from self._server_ends(server)
            return "succeeded"
        outcome = yield from self._survives(server, client, killed)
        self.quiet.draws += 1
        try:
            while not self.quiet.is_up:
                self._give_back(server)
                yield
            if self.quiet.renewals != self.renewals:
                # The listener was of the device that is gone.
                server.end()
                outcome = "succeeded after the interface was down and rdma_rxe had lost its queue pair 1"
            yield from self._serves_the_next(server)
        finally:
            self.quiet.draws -= 1
        return outcome

    def _wait(self, process: Process, seconds: float) -> Generator[None, None, bool]:
        """Wait for the end of a process; returns whether it has ended."""
        until = time.monotonic() + seconds
        while process.status() is None:
            if time.monotonic() > until:
                return False
            if self.draw.tool == "rping" and "connect error" in process.said():
                until = min(until, time.monotonic() + NOTICE)
            self._give_back(process)
            yield
        return True

    def _give_back(self, process: Process) -> None:
        """End a program that would keep the device from being removed."""
        if self.quiet.is_renewing and process.holds_device:
            process.end()

    def _hangs(self, process: Process, role: str) -> None:
        end = self.draw.server if role == "server" else self.draw.client
        if end.is_ours:
            process.send(signal.SIGUSR1)
            time.sleep(0.1)
        self.details.append(f"--- {role} waits:\n{waits(process)}")

    def _succeeds(self, process: Process, role: str, what: str = "") -> Steps:
        whose = self._whose(role)
        if not (yield from self._wait(process, PATIENCE)):
            self._hangs(process, role)
            other = "client" if role == "server" else "server"
            for known, each in self.processes:
                if known == other and each.status() is None:
                    self._hangs(each, other)
            raise Failure(f"{whose} {what}{role} hangs")
        status = process.status()
        assert status is not None
        if not tools.succeeded(self.work, role, status, process.said()):
            raise Failure(f"{whose} {what}{role} fails")

    def _whose(self, role: str) -> str:
        end: End = self.draw.server if role == "server" else self.draw.client
        return f"{'our' if end.is_ours else 'C'} {self.draw.tool}"

    def _server_ends(self, server: Process, what: str = "") -> Steps:
        if self.draw.persistent:
            server.send(signal.SIGTERM)
            server.end()
        else:
            yield from self._succeeds(server, "server", what)

    def _listens(self, server: Process) -> Generator[None, None, bool]:
        until = time.monotonic() + PATIENCE
        while server.status() is None:
            if _is_listening(self.draw, server):
                return True
            if time.monotonic() > until:
                self._hangs(server, "server")
                raise Failure("the server does not listen")
            yield
        return False

    def _kill(self, server: Process, client: Process) -> Generator[None, None, bool]:
        """Send the signal at the drawn moment; returns whether the victim still ran."""
        kill = self.draw.kill
        assert kill is not None
        until = time.monotonic() + kill.after
        while time.monotonic() < until:
            yield
        victim = server if kill.victim == "server" else client
        done = victim.send(kill.number)
        if done:
            if not (yield from self._wait(victim, PATIENCE)):
                self._hangs(victim, kill.victim)
                raise Failure(f"{self._whose(kill.victim)} {kill.victim} does not end by {kill.number.name}")
        return done

    def _survives(self, server: Process, client: Process, killed: bool) -> Generator[None, None, str]:
        """Wait until the ends have noticed what happened."""
        draw = self.draw
        victim = draw.kill.victim if draw.kill is not None and killed else ""
        outcome = f"succeeded after the {victim} was killed" if victim else _AFTER_DOWN
        if draw.kill is not None and not killed:
            outcome = f"the {draw.kill.victim} had ended before the kill"
        if draw.link.down is None and not killed and draw.kill is not None:
            # The client may still run if the server of one client was the victim, and has ended.
            yield from self._succeeds(client, "client")
            return outcome
        if victim != "client" and not (yield from self._wait(client, PATIENCE)):
            if not self._is_told(victim) and not draw.client.is_ours:
                return f"{outcome}; nobody tells C's client"
            self._hangs(client, "client")
            raise Failure(f"{self._whose('client')} client hangs after the {victim or 'link'} is gone")
        if tools.client(draw).argv[-1] == "again" and self.quiet.renewals == self.renewals:
            yield from self._succeeds(client, "client", "persevering ")
        if victim != "server" and not draw.persistent:
            yield from self._wait(server, NOTICE)
        return outcome

    def _is_told(self, victim: str) -> bool:
        """Whether the death of the victim is told to its peer: by the kernel, or by a program that is interrupted."""
        kill = self.draw.kill
        if not victim or kill is None:
            return True
        end = self.draw.server if victim == "server" else self.draw.client
        return end.device != "soft" or kill.number is signal.SIGINT

    def _serves_the_next(self, server: Process) -> Steps:
        draw = self.draw
        if server.status() is None:
            client = self.start("client", draw.persistent and draw.tool != "rping")
            if draw.persistent:
                yield from self._succeeds(client, "client", "next ")
                yield from self._server_ends(server)
                return
            # A server of one client, which may wait for it, or has not noticed the death of another.
            if (yield from self._wait(client, PATIENCE)) and (yield from self._wait(server, NOTICE)):
                status = client.status()
                assert status is not None
                if tools.succeeded(draw, "client", status, client.said()):
                    return
            victim = draw.kill.victim if draw.kill is not None else ""
            if server.status() is None and self._is_told(victim):
                self._hangs(server, "server")
                raise Failure(f"{self._whose('server')} server hangs after the {victim or 'link'} is gone")
            client.end()
            server.end()
        yield from self._new_pair()

    def _new_pair(self) -> Steps:
        self.quiet.draws += 1
        try:
            while not self.quiet.is_up:
                yield
            server = self.start("server", short=True)
            if not (yield from self._listens(server)):
                raise Failure("the new server does not listen")
            client = self.start("client", short=True)
            yield from self._succeeds(client, "client", "new ")
            yield from self._server_ends(server, "new ")
        finally:
            self.quiet.draws -= 1


def _crashed(draw: Draw, process: Process) -> bool:
    if -(process.status() or 0) in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
        return True
    # The examples end with the traceback of an error of the connection; the operations print that of each failure.
    errors = re.findall(r"^([\w.]+(?:Error|Exception))\b", process.said(), re.MULTILINE)
    return draw.tool != "verbs" and not all(error.startswith("rdmacm.errors.") for error in errors)


def _shortened(text: str) -> str:
    """Without the data of pings."""
    lines = [line for line in text.splitlines() if "ping data: " not in line]
    return "\n".join(line[:300] for line in (lines if len(lines) < 60 else [*lines[:20], "...", *lines[-40:]]))


class _Listening:
    """The kernel's listeners, asked for at most once in a while."""

    found = ""
    asked = 0.0

    @classmethod
    def text(cls) -> str:
        now = time.monotonic()
        if now - cls.asked > _SELDOM:
            shown = subprocess.run(["rdma", "resource", "show", "cm_id"], check=True, capture_output=True)
            cls.found, cls.asked = shown.stdout.decode(), now
        return cls.found


def _is_listening(draw: Draw, server: Process) -> bool:
    if draw.tool == "mckey":
        reversed_octets = bytes(map(int, tools.group(draw).split("."))).hex()
        little = "".join(reversed([reversed_octets[i : i + 2] for i in range(0, 8, 2)])).upper()
        try:
            return little in Path(f"/proc/{server.pid}/net/igmp").read_text()
        except OSError:
            return False
    if draw.server.is_ours:
        return "listening" in server.said()
    if draw.tool == "verbs":
        return "listening" in server.said()
    return any(
        "LISTEN" in line and f":{draw.port} " in line and draw.address in line
        for line in _Listening.text().splitlines()
    )


def run_block(draws: list[Draw], recording: Path) -> list[Verdict]:
    """Run draws with one state of the link, side by side; returns their verdicts in order."""
    first = draws[0]
    _LISTS.mkdir(exist_ok=True)
    verdicts: dict[int, Verdict] = {}
    quiet = Quiet()
    waiting = list(draws)
    running: dict[int, Generator[None, None, Verdict]] = {}
    trials = {each.number: Trial(each, quiet) for each in draws}
    with recorded(first.campaign, recording), impaired(first.campaign, first.link):
        switching = _switch(first, quiet)
        try:
            while waiting or running:
                for each in list(waiting):
                    # udaddy has one port.
                    taken = {trials[number].draw.port for number in running}
                    if len(running) < SIDE_BY_SIDE and each.port not in taken:
                        waiting.remove(each)
                        running[each.number] = trials[each.number].run()
                next(switching)
                for number, steps in list(running.items()):
                    try:
                        next(steps)
                    except StopIteration as end:
                        verdicts[number] = end.value
                        if trials[number].seconds > _LONG:
                            print(
                                f"{trials[number].seconds:.0f} s: {number} {trials[number].draw}: {end.value.outcome}"
                            )
                        del running[number]
                time.sleep(_LOOK)
        finally:
            if not quiet.is_up:
                set_interface(first.campaign, up=True)
                for _ in renew_device(first.campaign):
                    time.sleep(_LOOK)
    return [verdicts[each.number] for each in draws]


def _switch(first: Draw, quiet: Quiet) -> Steps:
    """Take the interface down and up, again and again, while no draw needs it to stay up."""
    down = first.link.down
    before = down[0] if down else 0.0
    while True:
        if down is None or quiet.draws:
            yield
            continue
        for seconds, up in ((before, False), (down[1], True)):
            until = time.monotonic() + seconds
            while time.monotonic() < until and not (quiet.draws and not quiet.is_up):
                yield
            if up or not quiet.draws:
                set_interface(first.campaign, up)
                quiet.is_renewing = up
                quiet.renewals += up and (yield from renew_device(first.campaign))
                quiet.is_up, quiet.is_renewing = up, False
        before = max(before, _UP)


def main() -> int:
    campaign, seed, begin, count = sys.argv[1], *map(int, sys.argv[2:5])
    folder = Path(sys.argv[5] if len(sys.argv) > 5 else "/mnt/share")
    draws = [draw(campaign, seed, number) for number in range(begin, begin + count)]
    keep_addresses(campaign)
    counts: Counter[str] = Counter()
    failures = 0
    began = time.monotonic()
    while draws:
        block = [each for each in draws if block_of(each.number) == block_of(draws[0].number)]
        draws = draws[len(block) :]
        recording = folder / f"campaign-{campaign}-{seed}-block-{block_of(block[0].number)}.pcap"
        verdicts = run_block(block, recording)
        failed = [(each, verdict) for each, verdict in zip(block, verdicts, strict=True) if verdict.failed]
        counts.update(verdict.outcome for verdict in verdicts if not verdict.failed)
        if not failed:
            recording.unlink(missing_ok=True)
        for each, verdict in failed:
            why = explanation(each, verdict.outcome, verdict.details)
            if why:
                counts[f"explained: {why}"] += 1
                print(f"explained {each.number}: {why}\n  {each}", flush=True)
                continue
            failures += 1
            counts[f"FAILED: {verdict.outcome}"] += 1
            alone = folder / f"campaign-{campaign}-{seed}-{each.number}.pcap"
            (again,) = run_block([each], alone)
            _report(each, verdict, again)
        print(
            f"[{time.monotonic() - began:.0f} s] block {block_of(block[0].number)}: {block[0].link}: {_shown(counts)}",
            flush=True,
        )
    for outcome, number in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{number:5} {outcome}")
    print(f"{count} draws, {failures} failed")
    return int(failures > 0)


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())


def _report(each: Draw, verdict: Verdict, again: Verdict) -> None:
    repeat = f"python3 -m interop.campaign.run {each.campaign} {each.seed} {each.number} 1"
    print(f"FAILED {each.number}: {verdict.outcome}\n  {each}")
    print(f"  alone, recorded: {again.outcome if again.failed else 'succeeded'}")
    print(f"  repeat: tests/interop/guest 'network; iwarp_network; rxe {repeat}'")
    print("".join(f"    {line}\n" for line in verdict.details.splitlines()), end="")
    if again.failed:
        print("  alone:\n" + "".join(f"    {line}\n" for line in again.details.splitlines()), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
