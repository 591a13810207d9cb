"""An end on this package's software device, through its public interface; ``peer`` runs it."""

from __future__ import annotations

from collections.abc import Sequence

from interop.ends import (
    PATIENCE,
    QUEUE,
    Access,
    Attributes,
    Completion,
    Device,
    End,
    Event,
    EventKind,
    Flag,
    Param,
    Piece,
    Region,
    Window,
    Work,
)
from interop.peer import main
from rdmacm import CmId, ConnParam, EventChannel, PortSpace
from rdmacm.verbs import (
    CQ,
    MR,
    MW,
    PD,
    SGE,
    MWBind,
    MWBindInfo,
    MWType,
    QPCap,
    QPInitAttr,
    QPType,
    RecvWR,
    SendFlag,
    SendWR,
    WROpcode,
)


class SoftRegion(Region):
    def __init__(self, pd: PD, content: bytes, access: int) -> None:
        self.mr = MR(pd, bytearray(content), access)
        self.addr, self.length = self.mr.addr, self.mr.length
        self.lkey, self.rkey = self.mr.lkey, self.mr.rkey

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        return self.mr.read(self.length - offset if length is None else length, offset)

    def write(self, data: bytes, offset: int = 0) -> None:
        self.mr.write(data, offset=offset)


class SoftDevice(Device):
    name = "soft"

    def __init__(self) -> None:
        super().__init__()
        self.channel = EventChannel("soft")
        self._listeners: list[CmId] = []

    def _make_id(self, unreliable: bool) -> CmId:
        if unreliable:
            return CmId(self.channel, PortSpace.IB, qp_type=QPType.UC)
        return CmId(self.channel, PortSpace.TCP)

    def listen(self, address: str, port: int) -> None:
        for unreliable in (False, True):
            listener = self._make_id(unreliable)
            listener.bind_addr((address, port))
            listener.listen(8)
            self._listeners.append(listener)

    def answer(self, request: Event) -> End:
        return SoftEnd(self, request, request.id)

    def call(self, address: str, port: int, unreliable: bool = False) -> End:
        cmid = self._make_id(unreliable)
        cmid.resolve_addr((address, port), timeout_ms=2000)
        self.event(EventKind.ADDR_RESOLVED)
        cmid.resolve_route(timeout_ms=2000)
        self.event(EventKind.ROUTE_RESOLVED)
        return SoftEnd(self, None, cmid)

    def next_event(self, seconds: float) -> Event:
        with self.channel.get_event(seconds) as event:
            param = Param()
            if isinstance(conn := event._param, ConnParam):
                param = Param(
                    conn.responder_resources,
                    conn.initiator_depth,
                    conn.flow_control,
                    conn.retry_count,
                    conn.rnr_retry_count,
                    conn.private_data,
                )
            return Event(event.type, event.status, event.id, param)


class SoftEnd(End):
    def __init__(self, device: Device, request: Event | None, cmid: CmId) -> None:
        super().__init__(device, request)
        self._id = cmid
        context = cmid.verbs
        self._pd = PD(context)
        # One for receives, one for sends.
        self._cqs = [CQ(context, 2 * QUEUE), CQ(context, 2 * QUEUE)]
        attr = QPInitAttr(cmid.qp_type, scq=self._cqs[1], rcq=self._cqs[0], cap=QPCap(QUEUE, QUEUE, 4, 4, 256))
        self._qp = cmid.create_qp(attr, self._pd)
        self._regions: list[SoftRegion] = []
        self._windows: list[MW] = []

    def region(self, content: bytes, access: int = Access.LOCAL_WRITE) -> Region:
        region = SoftRegion(self._pd, content, access)
        self._regions.append(region)
        return region

    def window(self, mw_type: int) -> Window:
        self._windows.append(MW(self._pd, MWType(mw_type)))
        return Window(self._windows[-1], mw_type)

    def post_bind(self, window: Window, region: Region, offset: int, length: int, access: int) -> int:
        assert isinstance(region, SoftRegion)
        mw = window.mw
        info = MWBindInfo(region.mr, region.addr + offset, length, access)
        if window.mw_type == MWType.TYPE_1:
            self._qp.bind_mw(mw, MWBind(info, SendFlag.SIGNALED))
        else:
            bind = SendWR(0, WROpcode.BIND_MW)
            bind.set_bind_wr(mw, info)
            self._qp.post_send(bind)
        key: int = mw.rkey
        return key

    def post_receive(self, wr_id: int, pieces: Sequence[Piece]) -> None:
        self._qp.post_recv(RecvWR(wr_id, [SGE(*piece) for piece in pieces]))

    def post(self, *works: Work) -> None:
        self._qp.post_send(
            [
                SendWR(
                    work.wr_id,
                    WROpcode(work.opcode),
                    [work.data] if work.data else [SGE(*piece) for piece in work.pieces],
                    work.flags | (Flag.INLINE if work.data else 0),
                    imm_data=work.imm,
                    remote_addr=work.addr,
                    rkey=work.rkey,
                    compare_add=work.compare_add,
                    swap=work.swap,
                    invalidate_rkey=work.invalidate,
                    flush_length=work.length,
                    flush_type=work.placement,
                    flush_level=work.selectivity,
                )
                for work in works
            ]
        )

    def completions(self, of_sends: bool, number: int) -> list[Completion]:
        cq = self._cqs[of_sends]
        found: list[Completion] = []
        while len(found) < number:
            for wc in cq.poll(number - len(found)):
                extra = wc.imm_data or wc.invalidated_rkey or 0
                found.append(Completion(wc.wr_id, wc.status, wc.opcode, wc.byte_len, extra, wc.wc_flags))
            if len(found) < number and not cq.wait(PATIENCE):
                raise TimeoutError(f"no completion of a {'send' if of_sends else 'receive'}: {found}")
        return found

    def attributes(self) -> Attributes:
        attr, _ = self._qp.query()
        return Attributes.of(attr)

    def connect_or_accept(self, param: Param) -> None:
        conn = ConnParam(
            param.private_data,
            param.responder_resources,
            param.initiator_depth,
            param.flow_control,
            param.retry_count,
            param.rnr_retry_count,
        )
        if self.request:
            self._id.accept(conn)
        else:
            self._id.connect(conn)

    def reject(self, private_data: bytes) -> None:
        self._id.reject(private_data)

    def disconnect(self) -> None:
        self._id.disconnect()

    def destroy(self) -> None:
        self._id.destroy()
        for window in self._windows:
            window.close()
        for region in self._regions:
            region.mr.close()
        for cq in self._cqs:
            cq.close()
        self._pd.close()


if __name__ == "__main__":
    main(SoftDevice)
