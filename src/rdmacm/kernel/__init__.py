"""The kernel's RDMA devices: connection management by ``/dev/infiniband/rdma_cm``, queue pairs by libibverbs."""

from __future__ import annotations

import atexit
import importlib
import os
import threading

from rdmacm.kernel.nldev import device_indices
from rdmacm.kernel.provider import KernelProvider
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.kernel.ucma import check_available
from rdmacm.net import namespace_key, open_network

__all__ = ["KernelProvider", "open_provider", "why_unusable"]

#: Guards the two below.
_lock = threading.Lock()
#: By network namespace.
_providers: dict[str, KernelProvider] = {}
#: Whether the handlers for fork and for the end of the process are registered.
_guarded = False


def open_provider() -> KernelProvider:
    """The provider of the calling thread's network namespace; one per namespace and process.

    ENODEV, EACCES: the device file of the connection manager is not there, or may not be opened; the text says why.
    """
    key = namespace_key()
    provider = _providers.get(key)
    if provider is not None:
        return provider
    check_available()
    global _guarded
    with _lock:
        provider = _providers.get(key)
        if provider is None:
            if not _guarded:
                _guarded = True
                os.register_at_fork(after_in_child=_forget_parent)
                atexit.register(_leave)
            for other in [k for k, p in _providers.items() if p.retire()]:
                del _providers[other]
            provider = _providers[key] = KernelProvider(open_network())
    return provider


def why_unusable(dev: str = "/dev", sys: str = "/sys") -> str | None:
    """Why this process cannot connect and move data on a device of the calling thread's network namespace.

    None where it can; empty where there is no device. ``dev`` and ``sys`` are the directories of the device files and
    of sysfs.
    """
    sysfs = Sysfs(sys)
    if not sysfs.names() and not device_indices():
        return ""
    try:
        check_available(dev, sys)
        verbs = importlib.import_module("rdmacm.kernel.verbs")
        known = verbs.device_names()
    except ImportError as error:
        return f"libibverbs cannot be used: {error}"
    except OSError as error:
        return str(error.strerror or error)
    if not known:
        return "libibverbs has no driver for the devices of the kernel"
    return sysfs.why_unusable(known, dev)


def _leave() -> None:
    for provider in list(_providers.values()):
        provider.leave()


def _forget_parent() -> None:
    # A child shares its parent's files and must not read from them; it makes new providers.
    global _lock
    _lock = threading.Lock()
    for provider in _providers.values():
        provider.abandon()
    _providers.clear()
