"""The kernel takes a device away while it is used."""

from __future__ import annotations

import contextlib
import errno
import gc
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator

from kernel.verbs_guest.pair import PATIENCE, Pair, open_context, outcome, run_checks
from rdmacm.kernel.verbs import open_device, runtime
from rdmacm.verbs import CQ, MR, PD, QP, CompChannel, EventType, QPInitAttr, RecvWR, SendWR, WROpcode
from support.clock import eventually, pause

INTERFACE = "va"


@contextlib.contextmanager
def removing(name: str) -> Iterator[None]:
    """Remove the device while the block runs; the command does not end before this process lets the device go."""
    with subprocess.Popen(["rdma", "link", "delete", name]) as removal:
        yield
        while removal.poll() is None:
            runtime().drive(lambda: None, 0.05)  # hears of the removal, which may not have begun
        assert removal.returncode == 0
    add(name)


def add(name: str) -> None:
    kind = name.rstrip("0123456789")
    subprocess.run(["rdma", "link", "add", name, "type", kind, "netdev", INTERFACE], check=True)

    def has_gid() -> bool:  # they come a moment later
        with open_context(name) as context:
            return any(len(row.gid.ip) == 4 for row in context.query_port(1).gids)

    eventually(has_gid)


def check_removal(name: str) -> None:
    pair = Pair(name)
    channel = CompChannel(pair.context)
    cq = CQ(pair.context, 10, channel)
    qp = QP(pair.pd, QPInitAttr(scq=cq, rcq=cq))
    assert pair.context.async_fd >= 0
    while outcome(lambda: pair.context.get_async_event(0.2).ack()) != errno.ETIMEDOUT:
        pass
    cq.req_notify()
    waits: dict[str, Callable[[], object]] = {
        "cq": lambda: pair.cq.wait(PATIENCE),
        "channel": lambda: channel.get_cq_event(PATIENCE),
        "event": lambda: pair.context.get_async_event(PATIENCE),
    }
    found: dict[str, object] = {}
    threads = [
        threading.Thread(target=lambda key=key, call=call: found.setdefault(key, outcome(call)))
        for key, call in waits.items()
    ]
    for thread in threads:
        thread.start()
    pause(0.2, "the threads begin to wait")
    with removing(name):
        for thread in threads:
            thread.join()
        refuses_everything(name, pair, channel, cq, qp, found)
    for part in (qp, cq, channel, pair):
        part.close()


def refuses_everything(name: str, pair: Pair, channel: CompChannel, cq: CQ, qp: QP, found: dict[str, object]) -> None:
    """What every call says then. ``found``: what the waits have returned."""
    event = found.pop("event")
    assert getattr(event, "event_type", None) is EventType.DEVICE_FATAL, event
    assert outcome(lambda: pair.context.get_async_event(PATIENCE)) == errno.ENODEV
    assert found["cq"] == errno.ENODEV, found
    # An armed queue reports, so that the program polls it and learns why; otherwise the channel says it.
    assert found["channel"] in (cq, errno.ENODEV), found
    if found["channel"] is cq:
        cq.ack_events()
    assert outcome(lambda: cq.poll(1)) == errno.ENODEV
    send = SendWR(1, WROpcode.SEND, [pair.mr.sge(0, 1)])
    for call in (
        lambda: pair.first.post_send(send),
        lambda: pair.context.query_port(1),
        lambda: MR(pair.pd, bytearray(10), 1),
        lambda: CQ(pair.context, 1),
        lambda: PD(pair.context) and QP(pair.pd, QPInitAttr(scq=cq, rcq=cq)),
        pair.first.to_error,
        pair.first.query,
        lambda: channel.get_cq_event(0.1),
    ):
        assert outcome(call) in (errno.ENODEV, errno.EIO), call
    outcome(lambda: pair.second.post_recv(RecvWR(1, [pair.mr.sge(0, 1)])))  # into the queue's memory
    assert outcome(lambda: open_device(name)) in (errno.ENODEV, errno.ENOENT)


def check_new_device_of_that_name(name: str) -> None:
    old = Pair(name)
    with removing(name):
        pass
    with Pair(name) as pair:
        assert pair.context.backend is not old.context.backend
        pair.do(SendWR(1, WROpcode.SEND, [pair.mr.sge(0, 1)]), receives=[RecvWR(2, [pair.mr.sge(0, 1)])])
    assert outcome(lambda: old.cq.wait(PATIENCE)) == errno.ENODEV
    old.close()


def check_polling_notices(name: str) -> None:
    """A program that does nothing but poll learns that the device is gone."""
    with Pair(name) as pair, removing(name):
        assert eventually(lambda: outcome(lambda: pair.cq.poll(1))) == errno.ENODEV


def check_objects_are_forgotten(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        pair = Pair(name)
        pair.myself = pair  # type: ignore[attr-defined] # a cycle
        with removing(name):
            pause(0.1, "the removal begins")
            del pair
            gc.collect()


if __name__ == "__main__":
    run_checks(globals())
