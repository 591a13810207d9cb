"""The open providers of one kind: one for each network namespace that a thread of the process has been in."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rdmacm.net import namespace_key


class _Kept(Protocol):
    def leave(self) -> None:
        """The process ends."""

    def retire(self) -> bool:
        """Close every descriptor if nothing is in use; True if that was so."""

    def abandon(self) -> None:
        """This is a child of fork(2)."""


P = TypeVar("P", bound=_Kept)


class OpenProviders(Generic[P]):
    """See the module. ``make`` returns the provider of the calling thread's namespace, whose key is the argument."""

    def __init__(self, make: Callable[[str], P]) -> None:
        self._make = make
        #: Guards the two below.
        self._lock = threading.Lock()
        self._by_namespace: dict[str, P] = {}
        #: Whether the handlers for exit and fork are registered.
        self._guarded = False

    def get(self) -> P:
        """The provider of the calling thread's network namespace."""
        key = namespace_key()
        provider = self._by_namespace.get(key)
        if provider is not None:
            return provider
        with self._lock:
            provider = self._by_namespace.get(key)
            if provider is None:
                if not self._guarded:
                    self._guarded = True
                    atexit.register(self._leave)
                    if hasattr(os, "register_at_fork"):
                        os.register_at_fork(after_in_child=self._forget_parent)
                # Sockets keep a namespace alive: close those of namespaces that this process no longer uses.
                for other in [k for k, p in self._by_namespace.items() if p.retire()]:
                    del self._by_namespace[other]
                provider = self._by_namespace[key] = self._make(key)
        return provider

    def _leave(self) -> None:
        # Otherwise peers would notice only by timeouts.
        for provider in list(self._by_namespace.values()):
            provider.leave()

    def _forget_parent(self) -> None:
        # A child shares its parent's sockets and files and must not read from them; it makes new providers.
        self._lock = threading.Lock()
        for provider in self._by_namespace.values():
            provider.abandon()
        self._by_namespace.clear()
