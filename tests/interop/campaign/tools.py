"""The commands of a draw, and what each prints or returns when all went well."""

from __future__ import annotations

import re
from typing import NamedTuple

from interop.campaign.draws import ADDRESSES, Draw

__all__ = ["Command", "client", "group", "server", "succeeded"]

#: librdmacm's rping closes its event channel while its other thread waits there, which may end it with 255.
_STATUSES_OF_RPING = (0, 255)

#: Seconds that our tools wait for an answer: many programs share the machine's processor, and packets are lost.
_TIMEOUT = "60"


class Command(NamedTuple):
    argv: tuple[str, ...]
    #: Whether it is run by Python.
    is_python: bool


def group(draw: Draw) -> str:
    """The multicast group of a draw of mckey."""
    return f"239.7.{draw.number >> 8 & 0xFF}.{draw.number & 0xFF}"


def _rdmacm(*arguments: object) -> Command:
    return Command(("-m", "rdmacm", *map(str, arguments), "--timeout", _TIMEOUT), is_python=True)


def _module(name: str, *arguments: object) -> Command:
    return Command(("-m", f"interop.{name}", *map(str, arguments)), is_python=True)


def _of_either(is_ours: bool, *arguments: object) -> Command:
    """A tool whose options ours has as well."""
    return _rdmacm(*arguments) if is_ours else Command(tuple(map(str, arguments)), is_python=False)


def _work(draw: Draw) -> tuple[object, ...]:
    return ("-c", draw.connections, "-C", draw.messages, "-S", draw.size)


def server(draw: Draw) -> Command:
    ours, address, port = draw.server.is_ours, draw.address, draw.port
    match draw.tool:
        case "rping":
            # Its server serves one size and checks it.
            return _of_either(ours, "rping", "-s", "-a", address, "-p", port, "-v", *_pings(draw), *draw.variant)
        case "ucmatose":
            return _of_either(ours, "ucmatose", "-b", address, "-p", port, *_work(draw))
        case "udaddy":
            return _of_either(ours, "udaddy", "-b", address, *_work(draw))
        case "mckey":
            return _of_either(ours, "mckey", "-m", group(draw), "-b", address, *_work(draw))
        case "cmtime":
            return _of_either(ours, "cmtime", "-b", address, "-p", port)
        case "rdma_server":
            return _example("rdma_server", ours, "-s", address, "-p", port)
        case "perf":
            return _rdmacm("perf", "-s", "-b", address, "-p", port, "--type", draw.variant[0])
        case "endpoints" | "ids":
            return _module(f"campaign.{draw.tool}", "serve", address, port)
        case "verbs":
            return _verbs(draw, ours, "listen")
    raise ValueError(draw.tool)


def client(draw: Draw) -> Command:
    ours, address, port = draw.client.is_ours, draw.address, draw.port
    match draw.tool:
        case "rping":
            return _of_either(ours, "rping", "-c", "-a", address, "-p", port, "-v", "-V", *_pings(draw))
        case "ucmatose":
            return _of_either(ours, "ucmatose", "-s", address, "-p", port, *_work(draw))
        case "udaddy":
            return _of_either(ours, "udaddy", "-s", address, *_work(draw))
        case "mckey":
            return _of_either(ours, "mckey", "-m", group(draw), "-b", _own(draw), "-s", *_work(draw))
        case "cmtime":
            return _of_either(ours, "cmtime", "-s", address, "-p", port, "-c", draw.connections)
        case "rdma_server":
            return _example("rdma_client", ours, "-s", address, "-p", port)
        case "perf":
            kind, operation = draw.variant
            measured = ("--type", kind, "--op", operation, "--size", draw.size, "--count", draw.messages)
            return _rdmacm("perf", "-c", address, "-p", port, *measured, "--json")
        case "endpoints" | "ids":
            again = draw.tool == "endpoints" and draw.link.down is not None and draw.kill is None
            work = (*_work(draw)[1::2], *(["again"] if again else []))
            return _module(f"campaign.{draw.tool}", "connect", address, port, *work)
        case "verbs":
            return _verbs(draw, ours, "connect", "--only", ",".join(draw.variant))
    raise ValueError(draw.tool)


def _own(draw: Draw) -> str:
    return ADDRESSES[draw.client.device, draw.family]


def _pings(draw: Draw) -> tuple[object, ...]:
    return ("-C", draw.messages, "-S", min(65000, max(64, draw.size)))


def _example(name: str, ours: bool, *arguments: object) -> Command:
    if ours:
        return Command((f"/project/examples/{name}.py", *map(str, arguments)), is_python=True)
    return Command((name, *map(str, arguments)), is_python=False)


def _verbs(draw: Draw, ours: bool, *arguments: object) -> Command:
    role, *rest = arguments
    return _module("soft_peer" if ours else "verbs_peer", role, draw.address, draw.port, *rest)


def succeeded(draw: Draw, role: str, status: int, output: str) -> bool:
    """Whether the end of this role ended as it does when nothing disturbs it."""
    ours = (draw.server if role == "server" else draw.client).is_ours
    if "data mismatch" in output:
        return False
    if draw.tool == "rping" and not ours:
        if status not in _STATUSES_OF_RPING:
            return False
        # Its last message, on standard error, may interrupt a line of the data.
        whole = output.replace("client DISCONNECT EVENT...\n", "")
        return role == "server" or len(re.findall(r"(?<!server )ping data: ", whole)) == draw.messages
    if draw.tool in ("ucmatose", "udaddy", "mckey") and "return status 0" not in output:
        return False
    if draw.tool == "rdma_server" and not ours:
        return status == 0 and f"{'rdma_server' if role == 'server' else 'rdma_client'}: end 0" in output
    return status == 0
