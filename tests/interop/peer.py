"""Two programs that run the operations between them, each on its own device::

    python3 -m interop.verbs_peer listen 10.0.0.1 7471
    python3 -m interop.soft_peer connect 10.0.0.1 7471 [--only NAME,...]

One listens, the other connects twice for each operation: it requests in one connection and responds in the other, as
its private data says. Each prints a line for every operation, ``ok request NAME`` or ``FAILED request NAME: why``
(``respond`` or ``both`` if that was its part), and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from interop.ends import Device, End, EventKind, Param
from interop.operations import OPERATIONS

__all__ = ["main"]

#: In private data, instead of an operation: there are no more operations.
_END = 0xFF
#: In private data, beside an operation: the end that connects responds.
_RESPONDS = 0x80


def _run(end: End, number: int, requests: bool) -> bool:
    """Do one end's part; returns whether it succeeded."""
    operation = OPERATIONS[number & ~_RESPONDS]
    end.number = number
    part = f"{operation.parts[0 if requests else -1]} {operation.name}"
    try:
        (operation.request if requests else operation.respond)(end)
    except Exception as error:
        traceback.print_exc()
        print(f"FAILED {part}: {type(error).__name__}: {error}", flush=True)
        return False
    else:
        print(f"ok {part}", flush=True)
        return True
    finally:
        end.destroy()


def _listen(device: Device, address: str, port: int) -> bool:
    device.listen(address, port)
    print("listening", flush=True)
    good = True
    while True:
        request = device.event(EventKind.CONNECT_REQUEST, seconds=120)
        number = request.param.private_data[0]
        end = device.answer(request)
        if number == _END:
            end.reject(b"")
            end.destroy()
            return good
        good &= _run(end, number, requests=bool(number & _RESPONDS))


def _connect(device: Device, address: str, port: int, names: Sequence[str]) -> bool:
    good = True
    for number, operation in enumerate(OPERATIONS):
        if operation.name in names if names else operation.since is None and not operation.needs_loss:
            good &= _run(device.call(address, port, operation.unreliable), number, requests=True)
            if "respond" in operation.parts:
                good &= _run(device.call(address, port, operation.unreliable), number | _RESPONDS, requests=False)
    end = device.call(address, port)
    end.connect_or_accept(Param(private_data=bytes((_END,))))
    # A lost rejection is not sent again, as the other program has ended.
    with contextlib.suppress(TimeoutError):
        device.event(EventKind.REJECTED, seconds=15)
    end.destroy()
    return good


def main(make: Callable[[], Device]) -> NoReturn:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", choices=("listen", "connect"))
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--mtu", type=int, default=1024, help="of the path, bytes (%(default)s)")
    parser.add_argument("--only", default="", help="operations, separated by commas (default: those of any rdma_rxe)")
    options = parser.parse_args()
    device = make()
    device.mtu = options.mtu
    if options.place == "listen":
        good = _listen(device, options.address, options.port)
    else:
        names = [name for name in options.only.split(",") if name]
        good = _connect(device, options.address, options.port, names)
    sys.exit(not good)
