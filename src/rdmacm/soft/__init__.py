"""The software provider: RDMA devices in user space, on any network interface that carries IP."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING

from rdmacm.net import namespace_key, open_network
from rdmacm.soft.provider import SoftProvider

if TYPE_CHECKING:
    from rdmacm.ib.transport import MadTransport

__all__ = ["SoftProvider", "open_provider"]

#: Guards the two below.
_lock = threading.Lock()
#: By network namespace.
_providers: dict[str, SoftProvider] = {}
#: Whether the handlers for exit and fork are registered.
_guarded = False


def open_provider() -> SoftProvider:
    """The provider of the calling thread's network namespace; one per namespace and process."""
    key = namespace_key()
    provider = _providers.get(key)
    if provider is not None:
        return provider
    global _guarded
    with _lock:
        provider = _providers.get(key)
        if provider is None:
            if not _guarded:
                _guarded = True
                atexit.register(_leave)
                if hasattr(os, "register_at_fork"):
                    os.register_at_fork(after_in_child=_forget_parent)
            # Sockets keep a namespace alive: close those of namespaces that this process no longer uses.
            for other in [k for k, p in _providers.items() if p.retire()]:
                del _providers[other]
            provider = _providers[key] = SoftProvider(open_network(), namespace=key, infiniband=_infiniband())
    return provider


def _infiniband() -> list[MadTransport]:
    """The ports that RDMACM_IB names."""
    if not os.environ.get("RDMACM_IB"):
        return []
    from rdmacm.ib import port_names_in, transport_of

    return [transport_of(name) for name in port_names_in(os.environ)]


def _leave() -> None:
    # Otherwise peers would notice only by timeouts.
    for provider in _providers.values():
        provider.leave()


def _forget_parent() -> None:
    # A child shares its parent's sockets and must not read from them; it makes new providers.
    global _lock
    _lock = threading.Lock()
    for provider in _providers.values():
        provider.abandon()
    _providers.clear()
