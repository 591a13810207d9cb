"""What the tools say about the core of the software devices (docs/core.md)."""

from __future__ import annotations


def core_name(provider: str) -> str | None:
    """``c`` or ``python`` for the provider ``soft``; None for others, whose packets are not made here."""
    if provider != "soft":
        return None
    from rdmacm.proto import core_choice  # which fails if RDMACM_CORE is wrong, so only where the answer depends on it

    return core_choice.name


def core_line(provider: str, devices: str = "device") -> str:
    """A line of text that says which core runs; empty where :func:`core_name` is None."""
    if core_name(provider) is None:
        return ""
    from rdmacm.proto import core_choice

    return f"software {devices} {core_choice.description()}\n"
