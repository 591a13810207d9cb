"""The kernel's RDMA devices: connection management by ``/dev/infiniband/rdma_cm``, queue pairs by libibverbs."""

from __future__ import annotations

import importlib

from rdmacm.kernel.nldev import device_indices
from rdmacm.kernel.provider import KernelProvider
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.kernel.ucma import check_available
from rdmacm.net import open_network
from rdmacm.provider.counters import Counters
from rdmacm.provider.namespaces import OpenProviders

__all__ = ["KernelProvider", "open_provider", "read_counters", "why_unusable"]


def open_provider() -> KernelProvider:
    """The provider of the calling thread's network namespace; one per namespace and process.

    ENODEV, EACCES: the device file of the connection manager is not there, or may not be opened; the text says why.
    """
    return _providers.get()


def _make(_namespace: str) -> KernelProvider:
    check_available()
    return KernelProvider(open_network())


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


def read_counters(sys: str = "/sys") -> Counters | None:
    """The counters of the devices of the calling thread's network namespace; None where there is none.

    They are there without the connection manager, too. ``sys`` is the directory of sysfs.
    """
    sysfs, indices = Sysfs(sys), device_indices()
    names = [name for name in sysfs.names() if not indices or name in indices]
    return Counters({name: sysfs.counters(name) for name in names}, sysfs.cm_counters(), {}, {}) if names else None


_providers = OpenProviders(_make)
