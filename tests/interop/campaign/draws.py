"""What a campaign draws: the tool, its two ends, the size of its work, the state of the link, and the death of an end.

A draw depends on the device, the seed and its number alone. Neighbouring numbers are a block, which has one state of
the link, so that its draws can run side by side.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ADDRESSES", "DEVICES", "NAMESPACES", "OPERATIONS", "Draw", "End", "Kill", "Link", "block_of", "draw"]

DEVICES = ("rxe", "siw")
#: The draws of a block.
BLOCK = 10
#: The addresses of each device of net.sh, IPv4 and IPv6, and its network namespace.
ADDRESSES = {
    ("rxe", 4): "10.0.0.1",
    ("rxe", 6): "fd00:0:0:1::1",
    ("soft", 4): "10.0.0.2",
    ("soft", 6): "fd00:0:0:1::2",
    ("siw0", 4): "10.0.1.1",
    ("siw0", 6): "fd00:0:0:2::1",
    ("siw1", 4): "10.0.1.2",
    ("siw1", 6): "fd00:0:0:2::2",
}
NAMESPACES = {"rxe": "", "soft": "soft", "siw0": "", "siw1": "iwarp"}

#: Operations of ``interop.operations``, of which a draw takes some: rdma-core's verbs at one end, ours at the other.
OPERATIONS = (
    *("send", "send_with_immediate", "write", "write_with_immediate", "read", "scatter_gather", "fence", "inline"),
    *("many_outstanding", "more_reads_than_resources", "both_at_once", "last_word", "late_receive", "no_receive"),
    *("small_receive", "write_wrong_key", "read_out_of_range", "atomic_not_permitted", "window_of_type_2", "negotiate"),
    "reject",
)
#: The tools and their weights. udaddy and mckey count their datagrams: no loss, and nothing sent twice.
_TOOLS = {
    "rxe": {
        "rping": 5,
        "ucmatose": 3,
        "udaddy": 2,
        "mckey": 1,
        "cmtime": 3,
        "rdma_server": 2,
        "perf": 2,
        "endpoints": 4,
        "ids": 3,
        "verbs": 2,
    },
    # siw has no datagrams, and the server of ucmatose and of perf sends first, which iWARP forbids (RFC 5044, 7.1).
    "siw": {"rping": 4, "cmtime": 3, "rdma_server": 2, "endpoints": 3, "ids": 3},
}
_COUNTS_DATAGRAMS = ("udaddy", "mckey")
#: Both ends are ours, as C has no such program.
_OURS_ALONE = ("perf", "endpoints", "ids")
_LINKS = {"clean": 6, "loss": 4, "duplication": 2, "reordering": 2, "all of these": 2, "down": 3}
#: A kill is drawn for this part of the draws; and the latest moment, in seconds after the client's start.
_KILLS, _LATEST = 0.3, 1.5
_PORT = 20000


class End(NamedTuple):
    """One of the two programs."""

    #: Whether the program is ours, or librdmacm's (rdma-core's).
    is_ours: bool
    #: Its device: rxe, soft, siw0 or siw1.
    device: str

    @property
    def namespace(self) -> str:
        return NAMESPACES[self.device]

    @property
    def provider(self) -> str:
        return "soft" if self.device == "soft" else "kernel"

    def __str__(self) -> str:
        return f"{'ours' if self.is_ours else 'C'} on {self.device}"


class Kill(NamedTuple):
    """The death of an end."""

    victim: str
    number: signal.Signals
    #: Seconds after the client's start.
    after: float

    def __str__(self) -> str:
        return f"{self.number.name} for the {self.victim} after {self.after:.2f} s"


@dataclass(frozen=True)
class Link:
    """The state of the link during a block."""

    name: str
    #: Arguments of tc-netem(8) for both directions; none for a link that is not impaired.
    netem: tuple[str, ...] = ()
    #: The interface goes down this many seconds after the block's start, and up so many seconds later.
    down: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.down:
            return "down after {:.2f} s for {:.2f} s".format(*self.down)
        return " ".join(self.netem) or "clean"


@dataclass(frozen=True)
class Draw:
    """Two programs that connect, and what disturbs them."""

    campaign: str
    seed: int
    number: int
    link: Link
    tool: str
    server: End
    client: End
    family: int
    connections: int
    #: Of each connection; and bytes of each.
    messages: int
    size: int
    #: perf: the operation and the type of the queue pairs; rping: options; verbs: the operations.
    variant: tuple[str, ...]
    kill: Kill | None

    @property
    def port(self) -> int:
        """udaddy of librdmacm has no option for it."""
        return 7174 if self.tool == "udaddy" else _PORT + self.number % 10_000

    @property
    def address(self) -> str:
        return ADDRESSES[self.server.device, self.family]

    @property
    def crosses_the_link(self) -> bool:
        return self.server.device != self.client.device

    @property
    def persistent(self) -> bool:
        """Whether the server serves any number of clients."""
        return self.tool in ("cmtime", "perf", "endpoints", "ids") or "-P" in self.variant

    def __str__(self) -> str:
        kind = " ".join(self.variant)
        return (
            f"{self.tool} {kind}{' ' if kind else ''}IPv{self.family}, server {self.server}, client {self.client}, "
            f"{self.connections} x {self.messages} x {self.size} bytes; link: {self.link}"
            + (f"; {self.kill}" if self.kill else "")
        )


def block_of(number: int) -> int:
    return number // BLOCK


def _weighted(chance: random.Random, weights: dict[str, int]) -> str:
    (found,) = chance.choices(list(weights), list(weights.values()))
    return found


def _link(campaign: str, seed: int, block: int) -> Link:
    chance = random.Random(f"{campaign} {seed} link {block}")
    name = _weighted(chance, _LINKS)
    loss, twice = f"{chance.uniform(0.2, 5):.1f}%", f"{chance.uniform(0.5, 10):.1f}%"
    late = ("delay", f"{chance.choice([1, 2, 5])}ms", "reorder", f"{chance.uniform(75, 99):.0f}%", "50%")
    down = chance.uniform(0, 1.5), chance.choice([0.05, 0.3, 1, 2, 4])
    match name:
        case "loss":
            return Link(name, ("loss", loss))
        case "duplication":
            return Link(name, ("duplicate", twice))
        case "reordering":
            return Link(name, late)
        case "all of these":
            return Link(name, (*late, "loss", loss, "duplicate", twice))
        case "down":
            return Link(name, down=down)
    return Link(name)


def _ends(chance: random.Random, campaign: str, tool: str) -> tuple[End, End]:
    """At least one of them is ours."""
    if campaign == "siw":
        places = ("siw0", "siw1")
    elif tool == "verbs" or chance.random() < 0.6:
        places = ("rxe", "soft")
    else:
        places = ("rxe", "rxe")
    if tool == "verbs":
        programs = (False, True)
    elif tool in _OURS_ALONE:
        programs = (True, True)
    else:
        programs = chance.choice([(True, True), (False, True), (True, False)])
    ends = [End(ours or place == "soft", place) for ours, place in zip(programs, places, strict=True)]
    chance.shuffle(ends)
    return ends[0], ends[1]


def _variant(chance: random.Random, tool: str, killed: bool) -> tuple[str, ...]:
    match tool:
        case "rping":
            return ("-P",) if killed or chance.random() < 0.5 else ()
        case "verbs":
            return tuple(chance.sample(OPERATIONS, 3))
        case "perf":
            kind = chance.choice(["rc", "rc", "uc", "ud"])
            operations = {"rc": ["send", "write", "read"], "uc": ["send", "write"], "ud": ["send"]}[kind]
            return kind, chance.choice(operations)
    return ()


def draw(campaign: str, seed: int, number: int) -> Draw:
    """The draw of this number."""
    chance = random.Random(f"{campaign} {seed} draw {number}")
    link = _link(campaign, seed, block_of(number))
    tools = _TOOLS[campaign]
    if link.name != "clean":
        tools = {tool: weight for tool, weight in tools.items() if tool not in _COUNTS_DATAGRAMS}
    tool = _weighted(chance, tools)
    server, client = _ends(chance, campaign, tool)
    kill = None
    if chance.random() < _KILLS:
        victim = chance.choice(["server", "client"])
        numbers = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
        kill = Kill(victim, chance.choice(numbers), chance.uniform(0, _LATEST))
    variant = _variant(chance, tool, kill is not None)
    # librdmacm's mckey joins groups of IPv4 only.
    family = 4 if tool == "mckey" else chance.choice([4, 6])
    connections = chance.choice([1, 1, 2, 3, 8])
    largest = 1024 if tool in _COUNTS_DATAGRAMS or "ud" in variant else 65536
    size = min(largest, int(2 ** chance.uniform(0, 16.5)))
    most = max(1, min(15, 500_000 // (size * connections)))
    messages = chance.randint(1, most) * (10 if kill else 1)
    return Draw(campaign, seed, number, link, tool, server, client, family, connections, messages, size, variant, kill)
