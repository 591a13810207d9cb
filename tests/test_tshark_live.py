"""Connections on loopback, recorded while they run, and checked by Wireshark and scapy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rdmacm import CmEvent, CmEventType, CmId, ConnParam, EventChannel, capture
from rdmacm.verbs import (
    MR,
    MW,
    AccessFlag,
    MWBindInfo,
    MWType,
    QPCap,
    QPInitAttr,
    SendFlag,
    SendWR,
    WCStatus,
    WROpcode,
)
from support.pcap import frames
from support.tshark import dissect, needs_tshark

E = CmEventType
SIGNALED, INLINE = SendFlag.SIGNALED, SendFlag.INLINE
EVERYTHING = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC
EVERYTHING |= AccessFlag.MW_BIND
LONG = 10_000


class Ends:
    """Both ends of a connection on loopback, in this process."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.channel = EventChannel()
        self.listener = CmId(self.channel)
        self.listener.bind_addr((host, 0))
        self.listener.listen()
        self.ids = [self.listener]
        self.regions: list[MR] = []
        self.windows: list[MW] = []

    def event(self, kind: CmEventType) -> CmEvent:
        with self.channel.get_event(timeout=20) as event:
            assert event.type is kind, event
        return event

    def region(self, cmid: CmId, size: int, access: AccessFlag = EVERYTHING) -> MR:
        self.regions.append(MR(cmid.pd, bytearray(size), access))
        return self.regions[-1]

    def window(self, cmid: CmId, region: MR) -> int:
        """The key of a memory window that the peer may invalidate."""
        window = MW(cmid.pd, MWType.TYPE_2)
        self.windows.append(window)
        bind = SendWR(1, WROpcode.BIND_MW)
        bind.set_bind_wr(window, MWBindInfo(region, region.addr, region.length, AccessFlag.REMOTE_WRITE))
        self.post(cmid, bind)
        return window.rkey

    def asked(self) -> tuple[CmId, CmId]:
        """Connect: (the id that connects, the id of its request)."""
        active = CmId(self.channel)
        active.resolve_addr((self.host, self.listener.src_port))
        self.event(E.ADDR_RESOLVED)
        active.resolve_route()
        self.event(E.ROUTE_RESOLVED)
        active.create_qp(QPInitAttr(cap=QPCap(16, 16, 2, 2, 64)))
        active.connect(ConnParam(b"from the client"))
        passive = self.event(E.CONNECT_REQUEST).id
        self.ids += [active, passive]
        return active, passive

    def connected(self) -> tuple[CmId, CmId]:
        active, passive = self.asked()
        passive.create_qp(QPInitAttr(cap=QPCap(16, 16, 2, 2, 64)))
        passive.accept(ConnParam(b"from the server"))
        for _ in range(2):
            self.event(E.ESTABLISHED)
        return active, passive

    def post(self, cmid: CmId, wr: SendWR, status: WCStatus = WCStatus.SUCCESS) -> None:
        wr.send_flags = SendFlag(wr.send_flags | SIGNALED)
        cmid.qp.post_send(wr)
        assert cmid.get_send_comp(20).status is status

    def close(self) -> None:
        for cmid in reversed(self.ids):
            cmid.destroy()
        for each in (*self.windows, *self.regions):
            each.close()
        self.channel.close()


def converse(host: str) -> None:
    """Use every operation, an RNR NAK, an error and a rejection."""
    ends = Ends(host)
    active, passive = ends.connected()
    inbox, memory, local = ends.region(passive, LONG), ends.region(passive, LONG), ends.region(active, LONG)
    rkey, addr = memory.rkey, memory.addr + (-memory.addr & 7)
    whole = [local.sge()]

    def send(wr: SendWR) -> None:
        passive.post_recv(1, inbox)
        ends.post(active, wr)
        assert passive.get_recv_comp(20).status is WCStatus.SUCCESS

    send(SendWR(1, WROpcode.SEND, [b"hello"], INLINE))
    send(SendWR(1, WROpcode.SEND, []))
    send(SendWR(1, WROpcode.SEND, whole))
    send(SendWR(1, WROpcode.SEND_WITH_IMM, [b"hello"], INLINE | SendFlag.SOLICITED, imm_data=7))
    send(SendWR(1, WROpcode.SEND_WITH_IMM, whole, imm_data=7))
    send(SendWR(1, WROpcode.SEND_WITH_INV, [b"bye"], INLINE, invalidate_rkey=ends.window(passive, memory)))
    send(SendWR(1, WROpcode.SEND_WITH_INV, whole, invalidate_rkey=ends.window(passive, memory)))
    for opcode in (WROpcode.RDMA_WRITE, WROpcode.RDMA_READ):
        for size in (LONG - 8, 5, 0):
            ends.post(active, SendWR(2, opcode, [local.sge(0, size)] if size else [], remote_addr=addr, rkey=rkey))
    for sg in ([local.sge(0, LONG - 8)], [local.sge(0, 3)]):
        send(SendWR(3, WROpcode.RDMA_WRITE_WITH_IMM, sg, remote_addr=addr, rkey=rkey, imm_data=9))
    for opcode in (WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD):
        wr = SendWR(4, opcode, [local.sge(0, 8)])
        wr.set_wr_atomic(rkey, addr, 1, 2)
        ends.post(active, wr)
    # No receive is posted for this message at first.
    active.qp.post_send(SendWR(5, WROpcode.SEND, [b"early"], INLINE | SIGNALED))
    assert not passive.recv_cq.wait(0.01)
    passive.post_recv(1, inbox)
    assert active.get_send_comp(20).status is WCStatus.SUCCESS
    active.disconnect()
    passive.disconnect()
    for _ in range(2):
        ends.event(E.DISCONNECTED)
    active, passive = ends.connected()
    wrong = SendWR(6, WROpcode.RDMA_WRITE, [b"no"], INLINE, remote_addr=addr, rkey=rkey ^ 1)
    ends.post(active, wrong, WCStatus.REM_ACCESS_ERR)
    passive.disconnect()
    active.disconnect()
    for _ in range(2):
        ends.event(E.DISCONNECTED)
    active, passive = ends.asked()
    passive.reject(b"not you")
    assert ends.event(E.REJECTED).status == 28
    ends.close()


@pytest.fixture(params=["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "live.pcapng"
    with capture(path):
        converse(request.param)
    return path


#: Every opcode of a reliable connection except those of unsupported extensions, and of MADs to QP 1.
OPCODES = {*range(0x15), 0x16, 0x17, 0x64}
#: Messages of the communication manager: each is in the file twice, as sent and as received.
REQ, REJ, REP, RTU, DREQ, DREP = "0x0010", "0x0012", "0x0013", "0x0014", "0x0015", "0x0016"
#: Syndromes of acknowledgements: with unlimited credits, receiver not ready for 0.64 ms, remote access error.
ACK, RNR, ACCESS = "31", "44", "98"


@needs_tshark
def test_wireshark_reports_no_errors(recorded: Path) -> None:
    names = ("infiniband.bth.opcode", "infiniband.mad.attributeid", "infiniband.aeth.syndrome")
    packets = dissect(recorded, (*names, "infiniband.cm.req", "infiniband.cm.rej.remotecommid"))
    requests = {packet["infiniband.cm.req"] for packet in packets if packet[names[1]] == REQ}
    # Processes of other tests share the port, and a REJ that names no process comes to all of them.
    ours = [each for each in packets if each[names[1]] != REJ or each["infiniband.cm.rej.remotecommid"] in requests]
    opcodes, messages, syndromes = (Counter(packet[name] for packet in ours) for name in names)
    assert {int(opcode) for opcode in opcodes} == OPCODES
    assert (messages[REQ], messages[REJ], messages[REP], messages[RTU]) == (6, 2, 4, 4)
    assert messages[DREQ] >= 4
    assert messages[DREP] >= 4
    assert set(syndromes) == {"", ACK, RNR, ACCESS}
    assert syndromes[ACCESS] == 2


def test_scapy_computes_the_same_icrc(recorded: Path) -> None:
    reason = "scapy, which checks the ICRCs, is not installed"
    contrib = pytest.importorskip("scapy.contrib.roce", reason=reason)
    layers = pytest.importorskip("scapy.layers.inet"), pytest.importorskip("scapy.layers.inet6")
    count = 0
    for _, frame in frames(recorded):
        ip = layers[1].IPv6(frame[14:]) if frame[12] == 0x86 else layers[0].IP(frame[14:])
        bth = ip[contrib.BTH]
        # compute_icrc takes the other headers from the dissected packet.
        assert contrib.BTH.compute_icrc(bth, bytes(bth)[:-4]) == frame[-4:]
        count += 1
    assert count > 100
