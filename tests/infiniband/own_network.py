"""Run by test_ibacm.py in a network namespace with 192.168.7.1/24; its argument is the verbs device. Prints JSON.

For a question without a source address, the daemon takes one from the routing table, so it needs its own network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from infiniband.fabric import SimulatedFabric
from infiniband.ibacm import ibacm, port_of
from rdmacm.addrinfo import getaddrinfo
from rdmacm.constants import PortSpace
from rdmacm.resolution import acm
from rdmacm.resolution.acm import AcmClient
from support.acm import WithInfiniBand, infiniband_device


def main() -> None:
    with SimulatedFabric() as fabric:
        here, there = (port_of(fabric, host).gids[0] for host in ("HostA", "HostB"))
        with ibacm(fabric, Path(sys.argv[1]), "HostA", own="192.168.7.1", known={"192.168.7.2": there}) as rundir:
            acm.CLIENT = AcmClient(str(rundir))
            acm.DEADLINE = 20
            provider = WithInfiniBand(infiniband_device(gid=here))
            found = getaddrinfo("192.168.7.2", 7471, port_space=PortSpace.TCP, provider=provider)
            acm.CLIENT.close()
    print(json.dumps([[int(info.family), info.src_addr, info.connect.hex()] for info in found], default=str))


main()
