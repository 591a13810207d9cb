"""What one simulation does: the network, and steps at times. A seed draws a script; a script is also text.

A line of the text is ``fabric NAME=VALUE ...``, ``rule RULE`` (of :class:`rdmacm.testing.FaultScript`), or
``TIME STEP NAME=VALUE ...``. The lines of a failing script can be removed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

__all__ = ["FAULTS", "Script", "Step", "draw"]

#: The steps that are faults of the network or of a host. The others are work.
FAULTS = frozenset(
    (
        *("partition", "heal", "crash", "start", "pause", "resume", "jump", "loss", "limit", "capacity"),
        *("connections", "interface", "unplug", "plug", "descriptors", "helper", "forward", "replay", "forge"),
    )
)
#: Virtual seconds after which the network is whole again.
HEAL = 60.0
#: The faults of one host that may end a connection.
_EXPOSING = frozenset(
    ("crash", "pause", "limit", "capacity", "connections", "interface", "unplug", "descriptors", "forward")
)
#: What an application may do to a connection at any moment.
_DEEDS = (
    *("destroy", "disconnect", "error", "migrate", "migrate", "sqd", "sqd", "reset", "reject", "notify"),
    "disconnect",
)
PORT = 7471
#: Loss that a reliable connection with 7 retries survives for certain: 0.1 ** 8 for each packet.
MILD = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """One step. ``at`` is in virtual seconds; the values of ``given`` are text."""

    at: float
    name: str
    given: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([f"{self.at:.6f}", self.name, *(f"{key}={value}" for key, value in self.given.items())])


@dataclass(frozen=True, slots=True)
class Script:
    """A simulation. ``fabric`` are arguments of Fabric; ``rules`` is the text of a FaultScript."""

    seed: int
    fabric: dict[str, str]
    steps: tuple[Step, ...]
    rules: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = " ".join(["fabric", f"seed={self.seed}", *(f"{key}={value}" for key, value in self.fabric.items())])
        return "\n".join([head, *(f"rule {rule}" for rule in self.rules), *map(str, self.steps)])

    @classmethod
    def parse(cls, text: str) -> Script:
        """The script of a text; ValueError for another text."""
        fabric, steps, rules = {"seed": "0"}, [], []
        for line in text.splitlines():
            first, *rest = line.partition("#")[0].split() or [""]
            if first == "fabric":
                fabric.update(word.split("=", 1) for word in rest)  # type: ignore[misc]
            elif first == "rule":
                rules.append(" ".join(rest))
            elif first:
                given = dict(word.split("=", 1) for word in rest[1:])
                steps.append(Step(float(first), rest[0], given))
        return cls(int(fabric.pop("seed")), fabric, tuple(steps), tuple(rules))

    def exposed(self) -> frozenset[str]:
        """The hosts that suffer from a fault that may end a connection."""
        names: set[str] = set()
        if self.rules or any(float(self.fabric.get(name, "0")) > MILD for name in ("loss", "corrupt")):
            return frozenset("abcd")
        for step in self.steps:
            if step.name in ("partition", "loss") and float(step.given.get("value", "1")) > MILD:
                names.update(step.given["one"], step.given["other"])
            elif step.name in _EXPOSING:
                names.add(step.given["host"][0])
        return frozenset(names - {","})


def draw(seed: int) -> Script:
    """The script of a seed."""
    random = Random(f"swarm {seed}")
    roll = random.random
    fabric = {"mtu": random.choice(("400", "1500", "4200")), "trains": str(int(roll() < 0.5))}
    mild = roll() < 0.7
    for name in ("loss", "duplicate", "reorder", "corrupt"):
        if roll() < 0.5:
            fabric[name] = f"{roll() * (MILD / 2 if mild else 0.15):.4f}"
    if roll() < 0.2:
        fabric["reorder_delay"] = "1.0"
    if roll() < 0.3:
        fabric["jitter"] = "0.00005"
    processes = ["a", "b", "c", *(["b2"] if roll() < 0.4 else [])]
    steps = [Step(0.0, "start", {"host": name}) for name in processes]
    steps += _work(random, processes)
    if roll() < 0.7:
        steps += _faults(random, processes)
    rules = tuple(_rule(random) for _ in range(random.choice((0, 0, 0, 0, 1, 2, 4))))
    # As the text has them, so that it is the same script.
    steps = [Step(round(step.at, 6), step.name, step.given) for step in steps]
    return Script(seed, fabric, tuple(sorted(steps, key=lambda step: step.at)), rules)


def _rule(random: Random) -> str:
    kind = random.choice(("REQ", "REP", "RTU", "REJ", "DREQ", "DREP", "MRA", "ACK", "RNR_NAK", "DATA", "RC_*"))
    action = random.choice(("lose", "corrupt", "repeat copies 5", "delay by 0.01", "delay by 8")).split()
    first = random.choice((1, 1, 2, 3))
    numbers = random.choice((f"{first}", f"{first}-{first + random.randint(0, 5)}"))
    about = random.choice(("", "", f"connection {random.randint(1, 6)}"))
    return " ".join([action[0], kind, numbers, *about.split(), *action[1:]])


def _work(random: Random, processes: list[str]) -> list[Step]:
    roll = random.random
    # Each process listens at ports of its own; the last port has no listener.
    ports = {name: str(PORT + index) for index, name in enumerate(processes)}
    steps = []
    for name, port in ports.items():
        backlog = random.choice(("0", "1", "3", "128"))
        steps.append(Step(0.0, "listen", {"host": name, "port": port, "backlog": backlog}))
        if roll() < 0.15:
            at = roll() * 5
            steps.append(Step(at, "unlisten", {"host": name, "port": port}))
            if roll() < 0.7:
                steps.append(Step(at + roll(), "listen", {"host": name, "port": port, "backlog": backlog}))
    for number in range(1, random.choice((4, 8, 16, 32)) + 1):
        source, target = random.choice(processes), random.choice(processes)
        server = random.choice(("accept",) * 12 + ("reject", "late", "silent", "noqp", "leave"))
        port = ports[target] if roll() < 0.97 else "9999"
        at = roll() * random.choice((0.001, 0.1, 5.0, 30.0))
        given = {"n": str(number), "source": source, "host": target, "port": port, "server": server}
        given["space"] = "UDP" if roll() < 0.06 else "TCP"
        given["closer"] = random.choice(("both", "active", "passive", "destroy"))
        if roll() < 0.08:
            # A queue pair that is not the id's: the application answers the REP.
            given["own"] = random.choice(("establish", "late", "reject", "leave"))
        if roll() < 0.06:
            given["hesitate"] = random.choice(("0.001", "0.5"))  # between resolving and connecting
        if roll() < 0.1:
            given["linger"] = random.choice(("0.001", "0.1", "8"))  # until it answers a DISCONNECTED
        if roll() < 0.2:
            given["look"] = random.choice(("0.002", "0.02", "0.3"))  # a slow reader
        if roll() < 0.05:
            given["spoil"] = "1"
        steps.append(Step(at, "connect", given))
        trouble = roll()
        for _ in range(random.choice((1, 1, 1, 2)) if trouble < 0.2 else 0):
            side = random.choice(("active", "passive"))
            after = at + roll() * random.choice((0.0001, 0.001, 0.1, 5.0))
            steps.append(Step(after, random.choice(_DEEDS), {"n": str(number), "side": side}))
    return steps


def _faults(random: Random, processes: list[str]) -> list[Step]:
    roll = random.random
    victim = random.choice(processes)
    others = [name for name in processes if name != victim]
    steps = []
    for _ in range(random.choice((1, 1, 2, 4))):
        at = roll() * random.choice((0.01, 1.0, 10.0, 30.0))
        until = min(HEAL, at + random.choice((0.001, 0.1, 5.0, 40.0)))
        other = random.choice(others)
        kind = random.choice(sorted(FAULTS - {"heal", "start", "resume", "plug"}))
        if kind == "partition":
            group = ",".join(random.sample(others, random.randint(1, len(others))))
            one, two = random.choice(((victim, group), (group, victim)))
            steps.append(Step(at, kind, {"one": one, "other": two, "one_way": str(int(roll() < 0.5))}))
            steps.append(Step(until, "heal"))
        elif kind == "crash":
            steps.append(Step(at, kind, {"host": victim}))
            if roll() < 0.8:  # or never again
                steps.append(Step(until, "start", {"host": victim}))
        elif kind == "pause":
            steps += [Step(at, kind, {"host": victim}), Step(until, "resume", {"host": victim})]
        elif kind == "interface":
            steps += [Step(when, kind, {"host": victim, "up": up}) for when, up in ((at, "0"), (until, "1"))]
        elif kind == "unplug":
            steps += [Step(at, kind, {"host": victim}), Step(until, "plug", {"host": victim})]
        elif kind == "descriptors":  # there are none when the process begins, at first or again
            begin = at * random.choice((0, 1))
            steps += [Step(begin, "crash", {"host": victim}), Step(begin, kind, {"host": victim, "value": "0"})]
            steps.append(Step(begin + (until - begin) / 2, "start", {"host": victim}))
            steps.append(Step(until, kind, {"host": victim, "value": "1"}))
        elif kind == "helper":
            steps.append(Step(at, kind, {"host": victim, "value": random.choice(("0.01", "0.1", "0.3"))}))
            steps.append(Step(until, kind, {"host": victim, "value": "0"}))
        elif kind == "forward":
            steps += [Step(at, kind, {"host": victim, "value": value}) for value in (random.choice(("0.5", "1")),)]
            steps.append(Step(until, kind, {"host": victim, "value": "0"}))
        elif kind in ("replay", "forge"):
            for _ in range(random.choice((1, 4, 16))):
                when = at + (until - at) * roll()
                steps.append(Step(when, kind, {"which": f"{roll():.4f}"}))
        elif kind == "jump":
            steps.append(Step(at, kind, {"seconds": random.choice(("0.5", "10", "3600"))}))
        elif kind == "loss":
            one, two = random.choice(((victim, other), (other, victim)))
            for when, value in ((at, random.choice(("0.2", "0.6", "1.0"))), (until, "0")):
                steps.append(Step(when, kind, {"one": one, "other": two, "value": value}))
        else:
            few = random.choice(("0", "1", "3"))
            steps.append(Step(at, kind, {"host": victim, "value": few}))
            steps.append(Step(until, kind, {"host": victim, "value": "4096"}))
    return steps
