"""The machines by name."""

from __future__ import annotations

import os

from interop.machine.qemu import Qemu
from interop.machine.run import Machine
from interop.machine.user_mode import UserMode

__all__ = ["MACHINES", "chosen"]

#: The first is the default.
MACHINES: dict[str, type[Machine]] = {"uml": UserMode, "qemu": Qemu}


def chosen() -> list[str]:
    """The names of the machines that RDMACM_GUEST_MACHINE asks for, or of the default: one, or all for "both"."""
    name = os.environ.get("RDMACM_GUEST_MACHINE") or next(iter(MACHINES))
    if name == "both":
        return list(MACHINES)
    if name not in MACHINES:
        raise ValueError(f"RDMACM_GUEST_MACHINE={name}: there are {', '.join(MACHINES)}, and both")
    return [name]
