"""The software provider: RDMA devices in user space, on any network interface that carries IP."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rdmacm.net import open_network
from rdmacm.provider.namespaces import OpenProviders
from rdmacm.soft.provider import SoftProvider

if TYPE_CHECKING:
    from rdmacm.ib.transport import MadTransport

__all__ = ["SoftProvider", "open_provider"]


def open_provider() -> SoftProvider:
    """The provider of the calling thread's network namespace; one per namespace and process."""
    return _providers.get()


def _make(namespace: str) -> SoftProvider:
    return SoftProvider(open_network(), namespace=namespace, infiniband=_infiniband())


def _infiniband() -> list[MadTransport]:
    """The ports that RDMACM_IB names."""
    if not os.environ.get("RDMACM_IB"):
        return []
    from rdmacm.ib import port_names_in, transport_of

    return [transport_of(name) for name in port_names_in(os.environ)]


_providers = OpenProviders(_make)
