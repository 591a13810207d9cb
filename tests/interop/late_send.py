"""A send, and a receive, that are posted after both ends have closed the connection.

    python3 -m interop.late_send rdma-core|rdmacm ADDRESS

Both ends are in this process, on the kernel's device of the address, and use rdma-core's libraries alone, or the
provider ``kernel``. Prints the status of each completion, or that there is none within five seconds.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import sys

from interop import verbs_peer
from interop.ends import EventKind, Opcode, Param, Work
from interop.rdma_core import rdma
from interop.verbs_peer import VerbsDevice, VerbsEnd
from rdmacm import CmEvent, CmEventType, CmId, EventChannel, RdmaError

PORT = 7492


class RcDevice(VerbsDevice):
    """Listens for reliable connections alone: on iWARP, a listener for the others would need the same TCP port."""

    max_inline = 0

    def listen(self, address: str, port: int) -> None:
        listener = self._make_id()
        rdma.rdma_bind_addr(listener, c.byref(verbs_peer._address(address, port)))
        rdma.rdma_listen(listener, 8)


def by_rdma_core(address: str) -> None:
    there, here = RcDevice(), RcDevice()
    there.listen(address, PORT)
    active = here.call(address, PORT)
    active.connect_or_accept(Param())
    passive = there.answer(there.event(EventKind.CONNECT_REQUEST))
    passive.connect_or_accept(Param())
    for device in (here, there):
        device.event(EventKind.ESTABLISHED)
    region = passive.region(b"late")
    active.disconnect()
    there.event(EventKind.DISCONNECTED)
    with contextlib.suppress(OSError):  # there is no connection any more
        passive.disconnect()
    passive.post(Work(Opcode.SEND, (region.piece(0, 4),), 1))
    passive.post_receive(2, (region.piece(0, 4),))
    assert isinstance(passive, VerbsEnd)
    passive.patience = 5.0
    for name, of_sends in (("send", True), ("receive", False)):
        try:
            (found,) = passive.completions(of_sends, 1)
            print(f"{name}: completed with status {int(found.status)}", flush=True)
        except TimeoutError:
            print(f"{name}: not completed", flush=True)


def by_rdmacm(address: str) -> None:
    with EventChannel("kernel") as channel, CmId(channel) as listener, CmId(channel) as active:
        listener.bind_addr((address, PORT))
        listener.listen()
        active.resolve_addr((address, PORT))
        event_of(channel, CmEventType.ADDR_RESOLVED)
        active.resolve_route()
        event_of(channel, CmEventType.ROUTE_RESOLVED)
        active.create_qp()
        active.connect()
        with event_of(channel, CmEventType.CONNECT_REQUEST).id as passive:
            passive.create_qp()
            passive.accept()
            for _ in range(2):
                event_of(channel, CmEventType.ESTABLISHED)
            memory = passive.reg_msgs(bytearray(4))
            active.disconnect()
            for _ in range(2):
                event_of(channel, CmEventType.DISCONNECTED)
            with contextlib.suppress(RdmaError):  # there is no connection any more
                passive.disconnect()
            passive.post_send(1, memory)
            passive.post_recv(2, memory)
            for name, wait in (("send", passive.get_send_comp), ("receive", passive.get_recv_comp)):
                try:
                    print(f"{name}: completed with status {int(wait(5.0).status)}", flush=True)
                except RdmaError as error:
                    print(f"{name}: {error}", flush=True)
            passive.destroy_qp()
            memory.close()
        active.destroy_qp()


def event_of(channel: EventChannel, kind: CmEventType) -> CmEvent:
    with channel.get_event(20.0) as event:
        assert event.type is kind, event
        return event


if __name__ == "__main__":
    {"rdma-core": by_rdma_core, "rdmacm": by_rdmacm}[sys.argv[1]](sys.argv[2])
