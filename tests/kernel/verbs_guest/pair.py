"""A context of the kernel's device, and queue pairs that are connected to each other.

``python3 -m kernel.verbs_guest.PROGRAM DEVICE [CHECK...]`` calls a program's checks, all without names, and prints the
name of each that has passed.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Sequence
from typing import Self

from rdmacm.errors import RdmaError
from rdmacm.kernel import verbs
from rdmacm.verbs import (
    CQ,
    MR,
    PD,
    QP,
    SRQ,
    WC,
    AccessFlag,
    AHAttr,
    Context,
    GlobalRoute,
    Mtu,
    QPAttr,
    QPCap,
    QPInitAttr,
    QPType,
    RecvWR,
    SendWR,
    WCStatus,
)

FULL = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
#: Seconds that something may take which is to happen.
PATIENCE = 20.0


def open_context(name: str) -> Context:
    return Context(name, lambda: verbs.read_device(name), lambda: verbs.open_device(name))


def global_row(context: Context) -> int:
    """The row of the GID of the IPv4 address."""
    return next(row.gid_index for row in context.query_port(1).gids if len(row.gid.ip) == 4)


def address(context: Context) -> AHAttr:
    """The way to the device itself."""
    row = global_row(context)
    return AHAttr(is_global=True, port_num=1, gr=GlobalRoute(context.query_gid(1, row), row, hop_limit=64))


def refused(call: Callable[[], object]) -> RdmaError:
    """The error that a call raises."""
    try:
        call()
    except RdmaError as error:
        return error
    raise AssertionError("nothing was refused")


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the errno that it raises."""
    try:
        return call()
    except RdmaError as error:
        return error.errno


class Pair:
    """Two queue pairs of one device, one completion queue, and a region of memory. ``first`` sends to ``second``."""

    def __init__(
        self,
        name: str,
        qp_type: QPType = QPType.RC,
        srq: Callable[[PD], SRQ] | None = None,
        access: AccessFlag = FULL,
        cqe: int = 200,
        inline: int = 128,
        qp_access: AccessFlag = FULL,
    ) -> None:
        self.context = open_context(name)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, cqe)
        self.srq = None if srq is None else srq(self.pd)
        self.memory = bytearray(1 << 16)
        self.mr = MR(self.pd, self.memory, access)
        init = QPInitAttr(qp_type, None, self.cq, self.cq, self.srq, QPCap(64, 64, 4, 4, inline))
        self.first, self.second = QP(self.pd, init), QP(self.pd, init)
        self._qp_access = qp_access
        for one, other in ((self.first, self.second), (self.second, self.first)):
            self.connect(one, other)

    def connect(self, one: QP, other: QP) -> None:
        """Move a queue pair from RESET to RTS, towards another one."""
        attr = QPAttr(
            port_num=1,
            qp_access_flags=self._qp_access,
            dest_qp_num=other.qp_num,
            path_mtu=Mtu.MTU_1024,
            min_rnr_timer=1,
            timeout=14,
            retry_cnt=7,
            rnr_retry=7,
            max_rd_atomic=1,
            max_dest_rd_atomic=1,
            qkey=0x11111111,
            ah_attr=address(self.context),
        )
        one.to_rts(attr)

    def completions(self, count: int) -> list[WC]:
        """The next completions, in the order of their requests' numbers."""
        found: list[WC] = []
        while len(found) < count:
            assert self.cq.wait(PATIENCE), found
            found += self.cq.poll(count - len(found))
        return sorted(found, key=lambda wc: wc.wr_id)

    def do(self, *wrs: SendWR, receives: Sequence[RecvWR] = ()) -> list[WC]:
        """Post, and return the completions, all of which are successes."""
        if receives:
            self.second.post_recv(receives)
        self.first.post_send(wrs)
        found = self.completions(len(wrs) + len(receives))
        assert all(wc.status is WCStatus.SUCCESS for wc in found), found
        return found

    def close(self) -> None:
        for part in (self.first, self.second, self.srq, self.mr, self.cq, self.pd, self.context):
            if part is not None:
                part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run_checks(checks: dict[str, object]) -> None:
    """Call the functions of a program whose names begin with ``check_``."""
    device, *names = sys.argv[1:]
    faulthandler.dump_traceback_later(40, exit=True)
    for name in names or [name for name in checks if name.startswith("check_")]:
        check = checks[name]
        assert callable(check)
        check(device)
        print(name, flush=True)
