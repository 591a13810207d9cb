"""Which names of a module of functions or structures are C's, for its ``__all__``.

For type checkers, which cannot compute it, every public name of the module is exported.
"""

from __future__ import annotations

__all__ = ["is_c_name"]


def is_c_name(name: str, value: object, module: str) -> bool:
    """Whether a global is what this module defines, or a class of the package that it gives a name of C."""
    if not (name.startswith(("rdma_", "ibv_", "sockaddr_")) or name.endswith("_ibv_rate")):
        return False
    return getattr(value, "__module__", module) == module or getattr(value, "__name__", name) != name
