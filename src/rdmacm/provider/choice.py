"""Which provider carries the API, by its name or by what the host has.

``soft`` are the software devices, ``kernel`` those of the kernel. ``auto``, the default, is ``kernel`` where the
kernel's connection manager can be opened, libibverbs is there, and a device of the network namespace has an active port
and a device file that may be opened; elsewhere it is ``soft``. That is decided once for each network namespace, and the
reason is kept.

The kernel's devices have no path to a loopback address on RoCE and iWARP, and a listener on one takes requests from the
network. So with ``auto`` a loopback address is always a software device's, for calls that know the address when they
choose the provider.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from rdmacm.address import is_loopback_host
from rdmacm.capabilities import KERNEL, Feature
from rdmacm.errors import RdmaError, cm_error
from rdmacm.net import namespace_key

#: The environment variable that names the provider.
ENVIRONMENT = "RDMACM_PROVIDER"
AUTO = "auto"

#: Opens the provider that None stands for in this context, if that is not the usual choice: that of a simulated host.
CONTEXT_OPENER: ContextVar[Callable[[], Any] | None] = ContextVar("rdmacm_provider", default=None)

#: Name → module with ``open_provider()``; a new provider is added here. The module is imported when first chosen, so
#: nothing above the seam depends on it.
_MODULES = {"kernel": "rdmacm.kernel", "soft": "rdmacm.soft"}
_openers: dict[str, Callable[[], Any]] = {}

#: The device file of the kernel's connection manager.
_KERNEL_FILE = "/dev/infiniband/rdma_cm"
#: Where the kernel shows its devices.
_KERNEL_DEVICES = "/sys/class/infiniband"


class Choice(NamedTuple):
    """A provider, and why ``auto`` has not chosen the kernel's devices."""

    name: str
    #: Empty where the provider was named, where it is ``kernel``, and on a host without RDMA devices of the kernel.
    reason: str = ""


#: What ``auto`` is, by network namespace.
_decided: dict[str, Choice] = {}


def choose(provider: str | None, hosts: Sequence[str] = ()) -> Choice:
    """The provider of a name; None stands for the name in RDMACM_PROVIDER, else ``auto``.

    ``hosts``: the names or addresses that it is going to be used with, if they are known.
    """
    name = provider or os.environ.get(ENVIRONMENT) or AUTO
    if name != AUTO:
        return Choice(name)
    found = _automatic()
    lacks_loopback = Feature.LOOPBACK_ADDRESSES in KERNEL.lacks and found.name == KERNEL.provider
    if lacks_loopback and hosts and all(map(is_loopback_host, hosts)):
        return Choice("soft", f"the kernel's devices have no path to a loopback address such as {hosts[0]}")
    return found


def opener_of(provider: str | None, hosts: Sequence[str] = ()) -> Callable[[], Any]:
    """The function that opens a provider in the calling thread's network namespace. ENODEV for an unknown name.

    Arguments are those of :func:`choose`.
    """
    if provider is None and (opener := CONTEXT_OPENER.get()) is not None:
        return opener
    name = choose(provider, hosts).name
    opener = _openers.get(name)
    if opener is None:
        module = _MODULES.get(name)
        if module is None:
            origin = "argument" if provider else f"environment variable {ENVIRONMENT}"
            text, names = f"no provider {name!r} (from the {origin})", ", ".join(sorted((AUTO, *_MODULES)))
            raise cm_error(errno.ENODEV, text, "provider", hint=f"one of: {names}")
        opener = _openers[name] = importlib.import_module(module).open_provider
    return opener


@contextmanager
def noting_the_choice(provider: object, hosts: Sequence[str] = ()) -> Iterator[None]:
    """Add a note to an error of the block, where ``auto`` has not chosen the kernel's devices of this host.

    ``provider``: None, a name or an object; for the latter there is no note.
    """
    try:
        yield
    except RdmaError as error:
        if isinstance(provider, str) or (provider is None and CONTEXT_OPENER.get() is None):
            note_choice(error, choose(provider, hosts).reason)
        raise


def note_choice(error: BaseException, reason: str) -> None:
    """Add the reason of a choice to an error, once, as a note; nothing without a reason."""
    note = f"provider soft, because {reason}"
    if reason and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _automatic() -> Choice:
    """``kernel`` where that can be used, else ``soft``."""
    # Before every call that names no provider; os.path.exists() takes twice as long.
    if not os.access(_KERNEL_FILE, os.F_OK) and not os.access(_KERNEL_DEVICES, os.F_OK):
        return Choice("soft")
    key = namespace_key()
    found = _decided.get(key)
    if found is None:
        why_unusable: Callable[[], str | None] = importlib.import_module(_MODULES["kernel"]).why_unusable
        reason = why_unusable()
        found = _decided[key] = Choice("kernel") if reason is None else Choice("soft", reason)
    return found
