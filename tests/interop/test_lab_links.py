"""The interfaces of a lab, as Linux's tools show them: netem, where the kernel has it, and no trains before it."""

from __future__ import annotations

import re

from interop.machine.run import Machine

SCRIPT = """
python3 -c '
import os
from rdmacm.lab.links import Links
with Links() as links:
    links.add_veth("port1", 4200, "port2", os.getpid())
    links.set_up("port1")
    assert links.add_netem("port1", 0.25, 0.005)
    links.cut_trains("port1")
'
tc qdisc show dev port1
ip -d link show port1
ip link delete port1
"""


def test_the_kernel_has_what_was_asked_for(machine: Machine) -> None:
    done = machine.run(SCRIPT)
    assert done.status == 0, done.output
    assert re.search(r"qdisc netem .* limit 100000 delay 5ms loss 25%", done.output), done.output
    assert re.search(r"port1.* mtu 4200 ", done.output)
    assert "gso_max_segs 1 " in done.output
