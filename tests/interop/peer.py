"""Two programs that do operations with each other, one of a device each.

One listens, the other connects and says in its private data which operation it is about; one requests, the other
responds::

    python3 verbs_peer.py respond listen 10.0.0.1 7471
    python3 soft_peer.py request connect 10.0.0.1 7471 [--only NAME,...]

Each prints a line for every operation, ``ok NAME`` or ``FAILED NAME: why``, and ends with 1 where one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from ends import Device, End, EventKind, Param
from operations import OPERATIONS, Operation

__all__ = ["main"]

#: In private data, instead of an operation: there will be no more.
_END = 0xFF


def _run(end: End, operation: Operation, requests: bool) -> bool:
    """Do one end's part, and tell whether it went well."""
    try:
        (operation.request if requests else operation.respond)(end)
    except Exception as error:
        traceback.print_exc()
        print(f"FAILED {operation.name}: {type(error).__name__}: {error}", flush=True)
        return False
    else:
        print(f"ok {operation.name}", flush=True)
        return True
    finally:
        end.destroy()


def _listen(device: Device, address: str, port: int, requests: bool) -> bool:
    device.listen(address, port)
    good = True
    while True:
        request = device.event(EventKind.CONNECT_REQUEST, seconds=120)
        number = request.param.private_data[0]
        end = device.answer(request)
        if number == _END:
            end.reject(b"")
            end.destroy()
            return good
        end.number = number
        good &= _run(end, OPERATIONS[number], requests)


def _connect(device: Device, address: str, port: int, requests: bool, names: Sequence[str]) -> bool:
    good = True
    for number, operation in enumerate(OPERATIONS):
        if not names or operation.name in names:
            end = device.call(address, port)
            end.number = number
            good &= _run(end, operation, requests)
    end = device.call(address, port)
    end.connect_or_accept(Param(private_data=bytes((_END,))))
    # A refusal that is lost does not come again, as its program has ended.
    with contextlib.suppress(TimeoutError):
        device.event(EventKind.REJECTED, seconds=15)
    end.destroy()
    return good


def main(make: Callable[[], Device]) -> NoReturn:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("request", "respond"))
    parser.add_argument("place", choices=("listen", "connect"))
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--mtu", type=int, default=1024, help="of the path, bytes (%(default)s)")
    parser.add_argument("--only", default="", help="operations to do, with commas between; all unless given")
    options = parser.parse_args()
    device, requests = make(), options.role == "request"
    device.mtu = options.mtu
    if options.place == "listen":
        good = _listen(device, options.address, options.port, requests)
    else:
        names = [name for name in options.only.split(",") if name]
        good = _connect(device, options.address, options.port, requests, names)
    sys.exit(not good)
