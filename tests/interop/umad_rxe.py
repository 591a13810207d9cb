"""Run in the machine: our transport on ib_umad, and a subnet administrator that echoes requests.

    umad_rxe.py DEVICE ADDRESS

ib_umad serves RoCE devices too, but only InfiniBand has subnet administrators, so a copy of sysfs here calls the port
InfiniBand. The address is IPv6, as the kernel matches an answer to its question by the GIDs of an IPv6 header.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import sys
import tempfile
import threading
from pathlib import Path

from rdmacm.address import Gid
from rdmacm.ib.transport import ReceivedMad
from rdmacm.ib.umad import UmadTransport
from rdmacm.proto.mad import GSI_Q_KEY, Mad, MadAddress, Method, MgmtClass

GET_TABLE, GET_TABLE_RESP = 0x12, 0x92
NEVER_ANSWERED = 0xFFFF
TABLE = bytes(range(256)) * 800
PATIENCE = 30.0


def as_infiniband(device: str, root: Path) -> UmadTransport:
    """The transport, with a copy of sysfs that calls the port InfiniBand."""
    here = Path("/sys/class/infiniband") / device
    there = root / "class/infiniband" / device
    names = ["lid", "sm_lid", "sm_sl", "lid_mask_count", "state", "rate", "pkeys/0"]
    names += [f"gids/{index}" for index in range(8)]
    texts = {f"ports/1/{name}": (here / "ports/1" / name).read_text() for name in names}
    texts |= {"ports/1/link_layer": "InfiniBand\n", "node_guid": (here / "node_guid").read_text()}
    for name, text in texts.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text(text)
    (root / "class/infiniband_mad").symlink_to("/sys/class/infiniband_mad")
    return UmadTransport(device, 1, sys=str(root))


class Administrator(threading.Thread):
    """Answers Get with the data of the question, and GetTable with a table that takes many datagrams."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.fd = os.open("/dev/infiniband/umad0", os.O_RDWR)
        fcntl.ioctl(self.fd, 0x1B03)
        methods = (1 << Method.GET | 1 << GET_TABLE).to_bytes(16, "little")
        registration = bytearray(struct.pack("=I16sBBB3sBx", 0, methods, 1, MgmtClass.SUBN_ADM, 2, bytes(3), 1))
        fcntl.ioctl(self.fd, 0xC01C1B01, registration)
        (self.agent,) = struct.unpack_from("=I", registration)

    def run(self) -> None:
        while True:
            packet = os.read(self.fd, 64 + 256)
            header, mad = bytearray(packet[:64]), bytearray(packet[64:])
            if mad[3] & 0x80 or mad[16:18] == NEVER_ANSWERED.to_bytes(2, "big"):
                continue
            timeout = 0
            if mad[3] == GET_TABLE:
                mad[24:28] = bytes((1, 1, 0x1F << 3 | 1, 0))  # RMPP: version, DATA, no response time, active
                mad[44:46] = (8).to_bytes(2, "big")
                mad[56:] = TABLE
                timeout = 1000
            mad[3] |= 0x80
            header[:20] = struct.pack("=5I", self.agent, 0, timeout, 3, 0)
            header[24:28] = GSI_Q_KEY.to_bytes(4, "big")
            os.write(self.fd, header + mad)


def arrivals(transport: UmadTransport, count: int) -> list[ReceivedMad]:
    poll = select.poll()
    poll.register(transport.fileno(), select.POLLIN)
    found: list[ReceivedMad] = []
    while len(found) < count and poll.poll(1000 * PATIENCE):
        found += transport.receive()
        if transport.dropped:
            break
    return found


def question(method: int, attribute: int, number: int) -> bytes:
    return Mad(MgmtClass.SUBN_ADM, 2, method, attribute, number, data=bytes(32) + bytes(range(200))).pack()


def main(device: str, address: str) -> None:
    try:
        UmadTransport(device, 1).open()
        refused = ""
    except OSError as error:
        refused = str(error)
    with tempfile.TemporaryDirectory() as root:
        transport = as_infiniband(device, Path(root))
        transport.open()
        port = transport.port()
        Administrator().start()
        to = MadAddress(0, gid=Gid(address), gid_index=port.gids.index(Gid(address)), hop_limit=64)
        asked = question(Method.GET, 0x35, 0x1122334455667788)
        transport.send(to, asked)
        ((source, answer),) = arrivals(transport, 1)
        for _ in range(2):
            transport.send(to, question(Method.GET, 0x35, 5))
        twice = [Mad.unpack(mad).transaction_id for _, mad in arrivals(transport, 2)]
        transport.send(to, question(GET_TABLE, 0x35, 9))
        ((_, table),) = arrivals(transport, 1)
        transport.send(to, question(Method.GET, NEVER_ANSWERED, 7))
        unanswered = arrivals(transport, 1)
        transport.close()
    seen = {
        "refused": refused,
        "state": port.state.name,
        "from": [str(source.gid), source.qpn],
        "answer": answer == asked[:3] + bytes((0x81,)) + asked[4:],
        "sent twice": twice,
        "table": table[3] == GET_TABLE_RESP and table[56 : 56 + len(TABLE)] == TABLE,
        "unanswered": [len(unanswered), dict(transport.dropped)],
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
