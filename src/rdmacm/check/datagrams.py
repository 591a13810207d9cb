"""Numbered datagrams through a device: each end has a queue pair of type UD, and counts what it receives."""

from __future__ import annotations

import errno
import struct
import time
from collections import Counter
from contextlib import suppress

from rdmacm.check.lines import LONGEST_PAYLOAD, MOST_DATAGRAMS, Rows
from rdmacm.cmid import CmId
from rdmacm.errors import RdmaError
from rdmacm.proto.constants import GRH_LENGTH
from rdmacm.proto.roce.grh import GRH
from rdmacm.proto.wire import WireError
from rdmacm.verbs.ah import AH
from rdmacm.verbs.attr import AHAttr, GlobalRoute, QPCap
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import QPType, SendFlag, WCStatus
from rdmacm.verbs.qp import QPInitAttr

#: Key of the check, number, payload, traffic class as sent.
_HEADER = struct.Struct("!QIHB")
#: The shortest payload, which the header fits into.
SHORTEST = 32
#: Receives that are posted, and sends under way. The former fit into locked memory of 8 MiB.
_RECEIVES, _SENDS = 512, 16
_SLOT = GRH_LENGTH + LONGEST_PAYLOAD
#: Nothing has come for so many seconds: nothing more is coming.
_QUIET_SECONDS = 0.1
#: The Q_Key of datagrams.
QKEY = 0x01234567


class DatagramEnd:
    """One end of a check. It owns ``cmid``, whose route to the other end is resolved."""

    def __init__(self, cmid: CmId) -> None:
        self.cmid = cmid
        context = cmid.verbs
        attr = context.backend.attr
        self._depth = max(1, min(_RECEIVES, attr.max_qp_wr, attr.max_cqe - _SENDS))
        self._cq = CQ(context, self._depth + _SENDS)
        cap = QPCap(max_send_wr=_SENDS, max_recv_wr=self._depth, max_send_sge=1, max_recv_sge=1)
        cmid.create_qp(QPInitAttr(QPType.UD, scq=self._cq, rcq=self._cq, cap=cap))
        self._memory = bytearray(self._depth * _SLOT)
        self._region = cmid.reg_msgs(self._memory)
        self._outbox = bytearray(_SENDS * LONGEST_PAYLOAD)
        self._out_region = cmid.reg_msgs(self._outbox)
        #: The handles of the other end, by traffic class.
        self._handles: dict[int, AH] = {}
        #: Slots whose receive is not posted.
        self._idle = list(range(self._depth))
        self._free_sends = list(range(_SENDS))
        self._numbers: set[int] = set()
        self.key: int = 0
        #: Of what came: (payload, class sent) and how many.
        self.received: Counter[tuple[int, int]] = Counter()
        self.classes: dict[int, int] = {}
        #: The source of what came, if it is not the other end's address.
        self.other_source: str = ""

    @property
    def qpn(self) -> int:
        """The number of the queue pair."""
        return self.cmid.qp.qp_num

    @property
    def qkey(self) -> int:
        """The Q_Key of the queue pair."""
        return self.cmid.qp.query()[0].qkey

    @property
    def path_mtu(self) -> int:
        """Payload of the longest datagram."""
        return next((path.mtu_bytes for path in self.cmid.route.path_rec), 0)

    def expect(self, key: int) -> None:
        """Forget what came, and be ready for datagrams with a key."""
        self._drain()
        self.key = key
        self.received.clear()
        self.classes.clear()
        self._numbers.clear()
        self.other_source = ""
        self._post_receives()

    def _post_receives(self) -> None:
        while self._idle:
            slot = self._idle.pop()
            self.cmid.post_recv(slot, self._region, slot * _SLOT, _SLOT)

    def send(self, rows: Rows, qpn: int, qkey: int, key: int) -> Rows:
        """Send datagrams; return those that this host has sent. Longer ones than it can send are left out."""
        sent: Counter[tuple[int, int]] = Counter()
        number = 0
        for payload, traffic_class, count in rows:
            for _ in range(count if SHORTEST <= payload <= self.path_mtu else 0):
                number += 1
                self._send_one(payload, traffic_class, qpn, qkey, key, number)
                sent[payload, traffic_class] += 1
        self._drain(until_sent=True)
        return [(*what, count) for what, count in sent.items()]

    def _send_one(self, payload: int, traffic_class: int, qpn: int, qkey: int, key: int, number: int) -> None:
        while not self._free_sends:
            self._drain(until_sent=True)
        slot = self._free_sends.pop()
        at = slot * LONGEST_PAYLOAD
        _HEADER.pack_into(self._outbox, at, key, number, payload, traffic_class)
        handle = self._handles.get(traffic_class) or self._handle(traffic_class)
        wr_id = self._depth + slot
        self.cmid.post_ud_send(wr_id, self._out_region, handle, qpn, qkey, at, payload, SendFlag.SIGNALED)

    def _handle(self, traffic_class: int) -> AH:
        cmid = self.cmid
        path = cmid.route.path_rec[0]
        route = GlobalRoute(path.dgid, cmid.gid_index, path.flow_label, path.hop_limit or 64, traffic_class)
        handle = AH(cmid.pd, AHAttr(is_global=True, port_num=cmid.port_num, sl=path.sl, gr=route))
        self._handles[traffic_class] = handle
        return handle

    def _drain(self, *, until_sent: bool = False) -> bool:
        """Process completions; with ``until_sent`` wait until nothing is being sent. Return whether there were any."""
        was_any = False
        until = time.monotonic() + 5
        while True:
            for wc in self._cq.poll(64):
                was_any = True
                if wc.wr_id >= self._depth:
                    self._free_sends.append(wc.wr_id - self._depth)
                else:
                    self._idle.append(wc.wr_id)
                    if wc.status is WCStatus.SUCCESS:
                        self._take(wc.wr_id, wc.byte_len)
            if not until_sent or len(self._free_sends) == _SENDS or time.monotonic() > until:
                return was_any
            self._cq.wait(0.1)

    def _take(self, slot: int, length: int) -> None:
        at = slot * _SLOT
        if length < GRH_LENGTH + _HEADER.size:
            return
        key, number, payload, sent_class = _HEADER.unpack_from(self._memory, at + GRH_LENGTH)
        if key != self.key or payload != length - GRH_LENGTH or number in self._numbers or number > MOST_DATAGRAMS:
            return
        self._numbers.add(number)
        self.received[payload, sent_class] += 1
        with suppress(WireError):
            header = GRH.unpack(memoryview(self._memory)[at : at + GRH_LENGTH])
            self.classes[sent_class] = header.traffic_class
            if header.sgid != self.cmid.route.dgid:
                self.other_source = str(header.sgid)

    def collect(self, expected: int) -> None:
        """Wait for datagrams: until all have come, or none comes any more."""
        while sum(self.received.values()) < expected and (self._drain() or self._cq.wait(_QUIET_SECONDS)):
            self._drain()
            self._post_receives()

    def rows(self) -> Rows:
        """What came."""
        return [(*what, count) for what, count in self.received.items()]

    def close(self) -> None:
        """Destroy everything."""
        with suppress(RdmaError):
            for handle in self._handles.values():
                handle.close()
            self.cmid.destroy_qp()
            self._region.close()
            self._out_region.close()
        self.cmid.destroy()
        with suppress(RdmaError):
            self._cq.close()


def error_text(error: OSError) -> str:
    """An error as one line."""
    return str(error.strerror or errno.errorcode.get(error.errno or 0, str(error)))
