"""A connection whose active end is gone when the kernel, at the other end, disconnects.

    python3 -m interop.gone_peer server ADDRESS
    python3 -m interop.gone_peer client ADDRESS

The client connects, cuts its link, and ends in order. The server disconnects once the file GO is there, and prints the
status of its DISCONNECTED: 0 if a peer has confirmed the end.
"""

from __future__ import annotations

import os
import subprocess
import sys

from rdmacm import CmEventType, CmId, EventChannel
from support.clock import eventually

PORT = 7490
GO = "/tmp/go"


def serve(address: str) -> None:
    with EventChannel("kernel") as channel, CmId(channel) as listener:
        listener.bind_addr((address, PORT))
        listener.listen()
        with channel.get_event() as event:
            passive = event.id
        passive.create_qp()
        passive.accept()
        with channel.get_event() as event:
            assert event.type is CmEventType.ESTABLISHED, event
        eventually(lambda: os.path.exists(GO), GO)
        passive.disconnect()
        with channel.get_event() as event:
            assert event.type is CmEventType.DISCONNECTED, event
            print("disconnected with status", event.status, flush=True)
        passive.destroy_qp()
        passive.destroy()


def connect(address: str) -> None:
    with CmId(provider="soft") as active:
        active.resolve_addr((address, PORT))
        active.resolve_route()
        active.create_qp()
        active.connect()
        subprocess.run(["tc", "qdisc", "replace", "dev", "vb", "root", "netem", "loss", "100%"], check=True)
        active.destroy_qp()


if __name__ == "__main__":
    {"server": serve, "client": connect}[sys.argv[1]](sys.argv[2])
