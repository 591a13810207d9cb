"""Run by test_umad.py under umad2sim: queries a path record through the simulated device file; prints JSON."""

from __future__ import annotations

import ctypes
import json
import select
import struct

from rdmacm.ib.umad import UmadTransport
from rdmacm.proto.mad import Mad, MadAddress, Method, MgmtClass
from rdmacm.proto.sa import PathRecord


def initialize_libibumad() -> None:
    """umad2sim uses libibumad's size of the header, which libibumad determines when it opens a port."""
    library = ctypes.CDLL("libibumad.so.3")
    library.umad_init()
    library.umad_close_port(library.umad_open_port(b"ibsim0", 1))


def main() -> None:
    initialize_libibumad()
    transport = UmadTransport("ibsim0", 1)
    transport.open()
    port = transport.port()
    wanted = PathRecord(port.gids[0], port.gids[0]).pack()
    data = (struct.pack("!12xQHxxQ", 0, 0, 0x180C) + wanted).ljust(232, b"\0")
    asked = Mad(MgmtClass.SUBN_ADM, 2, Method.GET, 0x35, 0x1122334455667788, data=data)
    poll = select.poll()
    poll.register(transport.fileno(), select.POLLIN)
    transport.send(MadAddress(port.sm_lid), asked.pack())
    assert poll.poll(5000)
    ((source, mad),) = transport.receive()
    transport.send(MadAddress(0x2FFF), asked.pack())
    assert poll.poll(5000)
    assert transport.receive() == []
    dropped = dict(transport.dropped)
    transport.close()
    path = PathRecord.unpack(mad[56:120])
    print(
        json.dumps(
            {
                "lid": port.lid,
                "sm_lid": port.sm_lid,
                "gid": str(port.gids[0]),
                "node_guid": port.node_guid,
                "pkeys": port.pkeys,
                "state": port.state.name,
                "rate": port.rate,
                "from": source[:2],
                "tid": Mad.unpack(mad[:256].ljust(256)).transaction_id,
                "path": [path.slid, path.dlid, str(path.sgid)],
                "unanswered": dropped["unanswered"],
            }
        )
    )


if __name__ == "__main__":
    main()
