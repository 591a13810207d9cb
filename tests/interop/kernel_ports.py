"""Refusals and ports that are down, on the provider ``kernel``: what the error says.

python3 -m interop.kernel_ports RULE
"""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import rdmacm
from rdmacm import CmId, RdmaError

HERE, THERE, IWARP_PEER = "10.0.0.1", "10.0.0.2", "10.0.1.2"


def refused(code: int, call: Callable[[], object]) -> RdmaError:
    found: RdmaError | None = None
    try:
        call()
    except RdmaError as error:
        found = error
    assert found is not None, f"no {errno.errorcode[code]}"
    assert found.errno == code, found
    return found


def connect(host: str) -> None:
    with CmId(provider="kernel") as cmid:
        cmid.resolve_addr((host, 7999), timeout_ms=500)
        cmid.resolve_route()
        cmid.create_qp()
        cmid.connect()


def a_refusal_of_iwarp_says_who_refuses() -> None:
    for call in (partial(connect, IWARP_PEER), partial(rdmacm.connect, (IWARP_PEER, 7999), provider="kernel")):
        error = refused(errno.ECONNREFUSED, call)
        assert error.strerror == "nobody listens on that port", error
        assert "a listener runs there" in str(error.hint), error


def a_port_that_is_down_is_named_at_once() -> None:
    subprocess.run(["ip", "link", "set", "va", "down"], check=True)
    error = refused(errno.ENETDOWN, partial(connect, HERE))
    assert error.strerror == "port 1 of rxe0 is DOWN", error
    assert "'rdma link' shows the state" in str(error.hint), error


def a_port_without_carrier_is_named() -> None:
    subprocess.run(["ip", "-n", "soft", "link", "set", "vb", "down"], check=True)
    subprocess.run(["ip", "neigh", "flush", "dev", "va"], check=True)
    error = refused(errno.ETIMEDOUT, partial(connect, THERE))
    assert error.strerror == "no neighbour has answered for the next hop: port 1 of rxe0 is DOWN", error


RULES = (
    a_refusal_of_iwarp_says_who_refuses,
    a_port_that_is_down_is_named_at_once,
    a_port_without_carrier_is_named,
)


def main() -> None:
    (rule,) = (rule for rule in RULES if rule.__name__ == sys.argv[1])
    rule()
    print("as expected")


if __name__ == "__main__":
    main()
