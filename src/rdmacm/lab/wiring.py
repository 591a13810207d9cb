"""What the network of a lab is like, and the addresses of its hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: The most hosts: the last byte of their IPv4 address is their number.
MAX_HOSTS = 200
#: The name of a host, as hosts(5) and sethostname(2) take it.
NAME = re.compile(r"[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Wiring:
    """The network of a lab. Raises ValueError for values out of range.

    - ``mtu``: of each host's interface, in bytes, 1280 (the least of IPv6) to 65000.
    - ``loss``: how likely each packet is lost on its way to a host, 0 to 1.
    - ``delay``: how long each packet takes to a host, in seconds, at most 60.
    - ``seed``: decides which packets are lost.
    """

    mtu: int = 1500
    loss: float = 0.0
    delay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1280 <= self.mtu <= 65000:
            raise ValueError(f"the MTU must be 1280 to 65000, not {self.mtu}")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"the loss must be a probability, 0 to 1, not {self.loss}")
        if not 0 <= self.delay <= 60:
            raise ValueError(f"the delay must be 0 to 60 seconds, not {self.delay}")

    @property
    def has_faults(self) -> bool:
        """Whether the network is worse than a wire."""
        return bool(self.loss or self.delay)


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError for names that hosts cannot have."""
    if not 1 <= len(names) <= MAX_HOSTS:
        raise ValueError(f"a lab has 1 to {MAX_HOSTS} hosts, not {len(names)}")
    for name in names:
        if not NAME.fullmatch(name) or name.lower() == "localhost":
            raise ValueError(f"{name!r} is no name of a host: letters, digits and hyphens, beginning with a letter")
    if len({name.lower() for name in names}) < len(names):
        raise ValueError(f"a name is given twice: {', '.join(names)}")


def addresses_of(number: int) -> tuple[str, str]:
    """The addresses of a host, by its number from 1."""
    return f"10.77.0.{number}", f"fd77::{number:x}"


def hosts_file(names: Sequence[str], before: str) -> str:
    """What hosts(5) has in a lab, from what it has outside."""
    lines = [f"{address} {name}" for at, name in enumerate(names, 1) for address in addresses_of(at)]
    if not re.search(r"^\s*127\.0\.0\.1\s", before, re.MULTILINE):
        lines.append("127.0.0.1 localhost")
    return "\n".join([*lines, before])
