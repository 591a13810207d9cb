"""Connect to a server of the kernel's, receive a forged REQ that says it has restarted, and report what happens.

    python3 tests/interop/stale_peer.py ADDRESS PORT [COMMAND]

The REQ is given to the connection manager as if the network had brought it, after the shell command. The connection
manager asks the peer whether it is there. Prints the state of the connection when that question has ended, how many
messages were sent at once, and how many questions have not ended after a minute.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from rdmacm import CmId
from rdmacm.address import Gid
from rdmacm.proto.cm.messages import REQ, Path, pack_message
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.qp import QPInitAttr

PATIENCE = 60.0  # seconds


def main(address: str, port: str, command: str = "") -> None:
    with CmId() as cmid:
        cmid.resolve_addr((address, int(port)))
        cmid.resolve_route()
        cmid.create_qp(QPInitAttr(cap=QPCap(max_send_wr=8, max_recv_wr=8)))
        cmid.connect()
        if command:
            subprocess.run(command, shell=True, check=True)
        backend: Any = cmid._backend
        connection = backend.connector.connection
        cm = backend.host.cm
        agent = cm.agent
        req = REQ(
            0x01067777,
            Path(Gid.from_ip(connection.path.remote), Gid.from_ip(connection.path.local), hop_limit=64),
            0x12345678,
            connection.remote_guid,
            local_qpn=connection.remote_qpn,
        )
        with backend.runtime.lock:
            before = sum(cm.sent)
            agent.mad_received(pack_message(req, 1), connection.path, backend.runtime.clock())
            rejections = sum(cm.sent) - before
        backend.runtime.drive(lambda: not agent.machine.questions, PATIENCE)
        print(f"{connection.state.name} rejections at once {rejections} asked {len(agent.machine.questions)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
