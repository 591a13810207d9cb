"""What programs count: their library does it in memory that the server reads when somebody asks.

The memory is ``struct shared_counters`` of ``core/library/objects.h``. The server makes it, and seals its size, so that
no program can take it away while it is read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import suppress

from rdmacm.errors import errno_name
from rdmacm.proto.engine import EngineCounters
from rdmacm.provider.counters import Counters
from rdmacm.soft.counters import hw_counters
from rdmacm.soft.wire.base import TRAFFIC

__all__ = ["COUNTS", "ERRNOS", "LOST", "MOST_DEVICES", "REFUSALS", "STRAYS", "SharedCounters", "command_of"]

#: ``enum rdmacm_stray``: what :attr:`rdmacm.provider.counters.Counters.udp` has, in the same order.
STRAYS = ("short", "stray", "backlog_full", "rx_short", "rx_unknown_qp", "rx_address", "rx_state", "rx_group")
#: RDMACM_ERRNO_COUNT.
ERRNOS = 160
#: The last members of ``struct rdmacm_wire_counts``. A queue pair's own drops are counted by reason as well.
LOST = ("no_room", "trains_cut", "")
#: ``enum rdmacm_count``: the counter of :class:`EngineCounters`, and the name there.
COUNTS = (
    ("errors", "local_ack_timeout_err"),
    ("errors", "completer_retry_err"),
    ("errors", "rcvd_seq_err"),
    ("errors", "rcvd_rnr_err"),
    ("errors", "implied_nak_seq_err"),
    ("errors", "out_of_seq_request"),
    ("dropped", "sequence"),
    ("dropped", "duplicate"),
    ("dropped", "not ready"),
    ("dropped", "refused"),
    ("dropped", "answer"),
    ("errors", "retry_exceeded_err"),
    ("errors", "retry_rnr_exceeded_err"),
)
#: ``enum rdmacm_refusal``: the names of :attr:`EngineCounters.dropped`.
REFUSALS = (
    *("length", "opcode", "version", "qpn", "state", "pkey", "qkey", "icrc"),
    *("no receive", "receive too short"),
)
#: MOST_COUNTED_DEVICES.
MOST_DEVICES = 16

_TALLY = struct.Struct(f"={len(TRAFFIC) + len(STRAYS) + ERRNOS + len(LOST)}Q")
_DEVICE = struct.Struct(f"=I4x{len(COUNTS) + len(REFUSALS)}Q")
#: Characters of a command line that are shown.
_COMMAND = 200


class SharedCounters:
    """The counters of one program."""

    SIZE = _TALLY.size + MOST_DEVICES * _DEVICE.size

    def __init__(self) -> None:
        #: For the program; -1 once it has it.
        self.fd: int = os.memfd_create("rdmacm-counters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.SIZE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self.fd, self.SIZE)
        except BaseException:
            os.close(self.fd)
            raise

    def close_fd(self) -> None:
        """The program has a copy of the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """The program has ended."""
        self.close_fd()
        self._memory.close()

    def read(self, names: dict[int, str]) -> Counters:
        """What it has counted. ``names``: those of the devices, by index. ValueError once it is closed."""
        found = self._memory[:]
        numbers = iter(_TALLY.unpack_from(found))
        traffic = {name: next(numbers) for name in TRAFFIC}
        udp = {name: next(numbers) for name in STRAYS}
        for code in range(ERRNOS):
            udp[errno_name(code)] = next(numbers)
        udp.update(zip(LOST, numbers, strict=True))
        devices = {}
        for at in range(_TALLY.size, self.SIZE, _DEVICE.size):
            index, *counts = _DEVICE.unpack_from(found, at)
            if index in names:
                devices[names[index]] = _of_device(counts)
        return Counters(devices, {}, {name: count for name, count in udp.items() if count and name}, {}, traffic)


def _of_device(counts: list[int]) -> dict[str, int]:
    engines = EngineCounters()
    kinds = (*COUNTS, *(("dropped", name) for name in REFUSALS))
    engines.add((counter, name, count) for (counter, name), count in zip(kinds, counts, strict=True))
    found = hw_counters(engines, 0)
    del found["link_downed"]  # the port's, which the server follows
    return found


def command_of(pid: int) -> str:
    """The command line of a process, shortened; empty once it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        path, *arguments = os.fsdecode(file.read()).rstrip("\0").split("\0")
        return " ".join([os.path.basename(path), *arguments])[:_COMMAND]
    return ""
