"""Connections of the provider ``kernel`` in a process that may lock 8 MiB of memory, a usual limit.

    python3 -m interop.kernel_locked COUNT

Makes COUNT connections with both ends in this process, without the privilege to lock more. Then the receivers make no
call while 16 messages are sent to each of two, and the growth of the last finds no memory left.
"""

from __future__ import annotations

import os
import resource
import sys
import threading

import rdmacm

HERE, PORT = "10.0.0.1", 7491
PATIENCE = 20.0
LOCKED = 8 << 20
MESSAGES = [bytes([number]) * 200 for number in range(16)]


def send_all(end: rdmacm.Connection) -> None:
    for message in MESSAGES:
        end.send(message, timeout=PATIENCE)


def main() -> None:
    count = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKED, LOCKED))
    os.setuid(65534)  # without the capability CAP_IPC_LOCK
    active_ends: list[rdmacm.Connection] = []
    passive_ends: list[rdmacm.Connection] = []
    with rdmacm.listen((HERE, PORT)) as listener:
        for number in range(count):
            thread = threading.Thread(target=lambda: passive_ends.append(listener.accept(PATIENCE)))
            thread.start()
            try:
                active_ends.append(rdmacm.connect((HERE, PORT), timeout=PATIENCE))
            except rdmacm.RdmaError as error:
                sys.exit(f"connection {number}: {error}")
            finally:
                thread.join()
        pairs = list(zip(active_ends, passive_ends, strict=True))
        for active, passive in (pairs[0], pairs[1]):
            send_all(active)
            for message in MESSAGES:
                assert passive.recv(timeout=PATIENCE) == message
        print("16 messages arrived while the receiver made no call")
        held = []
        try:
            while True:
                held.append(pairs[0][0].register(bytearray(64 << 10)))
        except rdmacm.RdmaError:
            pass
        active, passive = pairs[-1]
        sender = threading.Thread(target=send_all, args=(active,))
        sender.start()
        for message in MESSAGES:
            assert passive.recv(timeout=PATIENCE) == message
        sender.join()
        print("16 messages arrived with four buffers")
        for pair in pairs:
            for end in pair:
                end.close()
    print("as expected")


if __name__ == "__main__":
    main()
