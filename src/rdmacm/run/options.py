"""What ``rdmacm run`` is asked for beside running a program."""

from __future__ import annotations

from dataclasses import dataclass

from rdmacm.verbs.device import Device


@dataclass(frozen=True, slots=True)
class Options:
    """The options; by default there are none."""

    #: The names of the devices that programs see; empty: all.
    devices: frozenset[str] = frozenset()
    #: Whether each resolution is explained on standard error.
    explains: bool = False
    #: The capture file; None: packets are not captured.
    pcap: str | None = None
    #: How likely each packet is lost that a program sends, from 0 to 1, and how many seconds it is held up.
    loss: float = 0.0
    delay: float = 0.0
    #: Decides which packets are lost, 64 bits.
    seed: int = 0
    #: Whether the TCP sockets of programs are those of rsocket(7).
    moves_sockets: bool = False

    def shows(self, device: Device) -> bool:
        """Whether programs see a device."""
        return not self.devices or device.name in self.devices
