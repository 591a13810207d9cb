"""Which provider carries the API, by its name or by what the host has.

``soft`` are the software devices, ``kernel`` those of the kernel. ``auto``, the default, is ``kernel`` where the
kernel's connection manager can be opened, libibverbs is there, and a device of the network namespace has an active
port; elsewhere it is ``soft``. It is decided once for each network namespace.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable
from typing import Any

from rdmacm.errors import cm_error
from rdmacm.net import namespace_key

__all__ = ["opener_of"]

#: The environment variable that names the provider.
ENVIRONMENT = "RDMACM_PROVIDER"
AUTO = "auto"

#: Name → module with ``open_provider()``; a new provider is added here. The module is imported when first chosen, so
#: nothing above the seam depends on it.
_MODULES = {"kernel": "rdmacm.kernel", "soft": "rdmacm.soft"}
_openers: dict[str, Callable[[], Any]] = {}

#: The device file of the kernel's connection manager.
_KERNEL_FILE = "/dev/infiniband/rdma_cm"
#: What ``auto`` is, by network namespace.
_decided: dict[str, str] = {}


def opener_of(provider: str | None) -> Callable[[], Any]:
    """The function that opens a provider in the calling thread's network namespace. ENODEV for an unknown name.

    ``provider``: its name; None for the name in RDMACM_PROVIDER, else ``auto``.
    """
    name = provider or os.environ.get(ENVIRONMENT) or AUTO
    if name == AUTO:
        name = _automatic()
    opener = _openers.get(name)
    if opener is None:
        module = _MODULES.get(name)
        if module is None:
            origin = "argument" if provider else f"environment variable {ENVIRONMENT}"
            text, names = f"no provider {name!r} (from the {origin})", ", ".join(sorted((AUTO, *_MODULES)))
            raise cm_error(errno.ENODEV, text, "provider", hint=f"one of: {names}")
        opener = _openers[name] = importlib.import_module(module).open_provider
    return opener


def _automatic() -> str:
    """``kernel`` where that can be used, else ``soft``."""
    if not os.path.exists(_KERNEL_FILE):
        return "soft"
    key = namespace_key()
    name = _decided.get(key)
    if name is None:
        is_usable: Callable[[], bool] = importlib.import_module(_MODULES["kernel"]).is_usable
        name = _decided[key] = "kernel" if is_usable() else "soft"
    return name
