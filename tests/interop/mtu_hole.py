"""A READ over a link that carries no long packets: what the error says, on the provider ``kernel``.

python3 -m interop.mtu_hole serve
python3 -m interop.mtu_hole read
"""

from __future__ import annotations

import subprocess
import sys

import rdmacm

#: Drops longer packets from the software device.
HOLE = "ip netns exec soft tc qdisc replace dev vb root tbf rate 10gbit burst 1600 limit 10000000"


def serve() -> None:
    with rdmacm.listen(("10.0.0.2", 7471)) as listener, listener.accept() as connection:
        region = connection.register(bytearray(3000), remote_read=True)
        connection.send(region.remote.pack())
        for _ in connection:
            pass


def read() -> None:
    with rdmacm.connect(("10.0.0.2", 7471), provider="kernel") as connection:
        remote = rdmacm.RemoteRegion.unpack(connection.recv())
        connection.read(remote[:1000])
        subprocess.run(HOLE.split(), check=True)
        try:
            connection.read(remote)
        except TimeoutError as error:
            print(error)


if __name__ == "__main__":
    {"serve": serve, "read": read}[sys.argv[1]]()
