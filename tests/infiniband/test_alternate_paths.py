"""Alternate paths of connections between two hosts on a subnet in memory, whose ports have several LIDs."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from infiniband.fabric import SimulatedFabric
from infiniband.hosts import IbHost, event, param
from infiniband.sites import Embedded, OpenSM, Virtual
from rdmacm import (
    ApStatus,
    CmEventType,
    CmId,
    CmStateError,
    EventChannel,
    Gid,
    IbOption,
    OptionLevel,
    PathFlag,
    RdmaError,
)
from rdmacm.proto.cm.codes import FailoverAccepted
from rdmacm.proto.cm.messages import LAP, REP, REQ, Message, Path, unpack_mad
from rdmacm.proto.sa import PATH_FLAGS, PathData, PathRecord
from rdmacm.testing import SubnetMad
from rdmacm.verbs import MigState, QPAttrMask, QPState
from rdmacm.verbs.enums import EventType
from support.rows import for_each

ALTERNATE = PathFlag.ALTERNATE | PathFlag.BIDIRECTIONAL


class Subnet:
    """Two hosts with four LIDs each: 16 to 19, and 32 to 35. Two paths lead from the first to the second."""

    def __init__(self, site: Embedded, a: IbHost, b: IbHost) -> None:
        self.site, self.a, self.b = site, a, b
        self.subnet = site.subnet
        self.subnet.change_port("HostA", lid=16, lmc=2)
        self.subnet.change_port("HostB", lid=32, lmc=2)
        self.first, self.second = self.path(), self.path(slid=17, dlid=33, sl=2, packet_life_time=14)
        self.subnet.sa.set_paths(a.gid, b.gid, self.first, self.second)
        #: The messages of connection managers: sender, destination LID and message.
        self.messages: list[tuple[str, Message]] = []
        self.subnet.faults = self._keep

    def path(self, **fields: Any) -> PathRecord:
        return self.subnet.sa.path(self.a.gid, self.b.gid).replace(**fields)

    def _keep(self, mad: SubnetMad) -> None:
        if mad.kind in ("REQ", "REP", "LAP", "APR", "DREQ", "DREP"):
            self.messages.append((mad.source, unpack_mad(mad.data)[0]))

    def sent(self, kind: type[Message]) -> list[Any]:
        return [message for _, message in self.messages if isinstance(message, kind)]


class Connection:
    """An established connection: the ids of both ends, and the channel of each."""

    def __init__(self, a: IbHost, b: IbHost, alternate: bool) -> None:
        self._listening = b.listening()
        self.listener = self._listening.__enter__()
        self.channel = EventChannel(a.provider)
        self.client = a.id(self.channel)
        self.client.resolve_addr(b.at())
        self.expect(self.channel, CmEventType.ADDR_RESOLVED)
        self.client.resolve_route(alternate=alternate)
        self.expect(self.channel, CmEventType.ROUTE_RESOLVED)
        self.client.connect(param())
        with event(self.listener.channel) as request:
            self.server = request.id
        self.server.accept(param())
        self.expect(self.channel, CmEventType.CONNECT_RESPONSE)
        self.client.establish()
        self.expect(self.listener.channel, CmEventType.ESTABLISHED)

    @staticmethod
    def expect(channel: EventChannel, kind: CmEventType) -> None:
        with event(channel) as found:
            assert (found.type, found.status) == (kind, 0)

    def close(self) -> None:
        self.client.destroy()
        self.server.destroy()
        self.channel.close()
        self._listening.__exit__(None, None, None)


@contextmanager
def _subnet(site: Embedded) -> Iterator[Subnet]:
    with site.host("HostA") as a, site.host("HostB") as b:
        yield Subnet(site, a, b)


@pytest.fixture
def subnet() -> Iterator[Subnet]:
    """In virtual time."""
    with _subnet(Virtual()) as made:
        yield made


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Subnet]:
    """In real time: two threads wait at once."""
    monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
    with _subnet(Embedded()) as made:
        yield made


@contextmanager
def connected(subnet: Subnet, alternate: bool = True) -> Iterator[Connection]:
    connection = Connection(subnet.a, subnet.b, alternate)
    try:
        yield connection
    finally:
        connection.close()


def lids(cmid: CmId) -> list[tuple[int, int]]:
    return [(path.slid, path.dlid) for path in cmid.route.path_rec]


def refused(code: int, text: str) -> Any:
    return pytest.raises(RdmaError, match=text, check=lambda error: error.errno == code)


# -- a path that the REQ brings -----------------------------------------------------------------------------------


def test_both_sides_know_the_alternate_path_of_the_req(subnet: Subnet) -> None:
    with connected(subnet) as both:
        assert both.client.route.path_rec == (subnet.first, subnet.second)
        assert lids(both.server) == [(32, 16), (33, 17)]
        alternate = both.server.route.path_rec[1]
        assert (alternate.dgid, alternate.sl, alternate.mtu) == (subnet.a.gid, 2, subnet.first.mtu)
    (rep,) = subnet.sent(REP)
    assert rep.failover_accepted == FailoverAccepted.ACCEPTED


@for_each("side", ["client", "server"])
def test_attributes_of_a_queue_pair_load_and_arm_the_path(subnet: Subnet, side: str) -> None:
    with connected(subnet) as both:
        cmid: CmId = getattr(both, side)
        to_rtr, rtr_mask = cmid.init_qp_attr(QPState.RTR)
        to_rts, rts_mask = cmid.init_qp_attr(QPState.RTS)
        assert rtr_mask & QPAttrMask.ALT_PATH
        assert not rtr_mask & QPAttrMask.PATH_MIG_STATE
        assert rts_mask & QPAttrMask.ALT_PATH
        assert rts_mask & QPAttrMask.PATH_MIG_STATE
        assert to_rts.path_mig_state is MigState.REARM
        vector = to_rtr.alt_ah_attr
        dlid = {"client": 33, "server": 17}[side]
        assert (vector.dlid, vector.sl, vector.src_path_bits, vector.port_num) == (dlid, 2, 1, 1)
        assert to_rtr.ah_attr.dlid == dlid - 1
        assert (to_rtr.alt_port_num, to_rtr.alt_pkey_index) == (1, 0)
        assert 0 < to_rtr.alt_timeout < 32
    with connected(subnet, alternate=False) as both:
        for cmid in (both.client, both.server):
            assert not cmid.init_qp_attr(QPState.RTR)[1] & QPAttrMask.ALT_PATH
            to_rts, rts_mask = cmid.init_qp_attr(QPState.RTS)
            assert not rts_mask & (QPAttrMask.ALT_PATH | QPAttrMask.PATH_MIG_STATE)
            assert to_rts.path_mig_state is MigState.MIGRATED


@pytest.mark.parametrize(
    "fields",
    [{"dlid": 40}, {"dgid": "fe80::99"}, {"hop_limit": 0, "dlid": 0}],
    ids=["LID of another port", "GID of another port", "no LID"],
)
def test_path_to_another_port_is_refused_and_the_connection_stays(subnet: Subnet, fields: dict[str, Any]) -> None:
    if "dgid" in fields:
        fields["dgid"] = Gid(fields["dgid"])
    subnet.subnet.sa.set_paths(subnet.a.gid, subnet.b.gid, subnet.first, subnet.second.replace(**fields))
    with subnet.b.listening() as listener, EventChannel(subnet.a.provider) as channel, subnet.a.id(channel) as cmid:
        cmid.resolve_addr(subnet.b.at())
        event(channel).ack()
        given = PathData(subnet.first, PATH_FLAGS).pack() + PathData(subnet.second.replace(**fields), ALTERNATE).pack()
        cmid.set_option(OptionLevel.IB, IbOption.PATH, given)
        event(channel).ack()
        cmid.connect(param())
        with event(listener.channel) as request:
            server = request.id
            assert lids(server) == [(32, 16)]
        server.accept(param())
        with event(channel) as reply:
            assert reply.type is CmEventType.CONNECT_RESPONSE
        assert cmid.route.num_paths == 1
        assert not cmid.init_qp_attr(QPState.RTR)[1] & QPAttrMask.ALT_PATH
        server.destroy()
    (rep,) = subnet.sent(REP)
    assert rep.failover_accepted == FailoverAccepted.REJECTED


def test_alternate_path_has_the_mtu_and_partition_of_the_first(subnet: Subnet) -> None:
    small, foreign = subnet.second.replace(mtu=1), subnet.second.replace(pkey=0x8001, dlid=34)
    subnet.subnet.sa.set_paths(subnet.a.gid, subnet.b.gid, subnet.first, small, foreign)
    with subnet.a.id() as cmid:
        cmid.resolve_addr(subnet.b.at())
        cmid.resolve_route(alternate=True)
        assert cmid.route.path_rec == (subnet.first,)


def test_administrator_gives_a_path_to_each_lid_of_a_port(subnet: Subnet) -> None:
    subnet.subnet.sa.reset_paths()
    with subnet.a.id() as cmid:
        cmid.resolve_addr(subnet.b.at())
        cmid.resolve_route(alternate=True)
        assert lids(cmid) == [(16, 32), (17, 33)]
    subnet.subnet.change_port("HostA", lmc=0)
    subnet.subnet.change_port("HostB", lmc=0)
    with subnet.a.id() as cmid:
        cmid.resolve_addr(subnet.b.at())
        cmid.resolve_route(alternate=True)
        assert lids(cmid) == [(16, 32)]


def test_option_sets_an_alternate_path_beside_the_first(subnet: Subnet) -> None:
    with subnet.a.id() as cmid:
        cmid.resolve_addr(subnet.b.at())
        given = PathData(subnet.second, ALTERNATE).pack() + PathData(subnet.first, PATH_FLAGS).pack()
        cmid.set_option(OptionLevel.IB, IbOption.PATH, given)
        assert cmid.route.path_rec == (subnet.first, subnet.second)
    with subnet.a.id() as cmid:
        cmid.resolve_addr(subnet.b.at())
        with refused(errno.EINVAL, "GMP, PRIMARY, BIDIRECTIONAL"):
            cmid.set_option(OptionLevel.IB, IbOption.PATH, PathData(subnet.second, ALTERNATE).pack())
        for wrong in (subnet.first, subnet.second.replace(mtu=1), subnet.second.replace(pkey=0x8001)):
            given = PathData(subnet.first, PATH_FLAGS).pack() + PathData(wrong, ALTERNATE).pack()
            with refused(errno.EINVAL, "first path"):
                cmid.set_option(OptionLevel.IB, IbOption.PATH, given)
        assert cmid.route.path_rec == ()


def test_messages_take_the_alternate_path_after_a_migration(subnet: Subnet) -> None:
    with connected(subnet) as both:
        both.client.notify(EventType.PATH_MIG)
        assert lids(both.client) == [(17, 33), (16, 32)]
        assert both.client.init_qp_attr(QPState.RTR)[0].ah_attr.dlid == 33
        # The peer has not been told, and takes the DREQ on the alternate path all the same.
        both.client.disconnect()
        both.expect(both.listener.channel, CmEventType.DISCONNECTED)
        both.server.disconnect()
        both.expect(both.channel, CmEventType.DISCONNECTED)
    with connected(subnet, alternate=False) as both, refused(errno.EINVAL, "no alternate path"):
        both.client.notify(EventType.PATH_MIG)


# -- a path that a LAP loads --------------------------------------------------------------------------------------


class Load(threading.Thread):
    """load_alternate_path() in a thread of its own, since it waits for the peer's application."""

    def __init__(self, cmid: CmId, path: PathRecord) -> None:
        super().__init__(daemon=True)
        self._cmid, self._path = cmid, path
        self.error: RdmaError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._cmid.load_alternate_path(self._path)
        except RdmaError as error:
            self.error = error

    def outcome(self) -> RdmaError | None:
        self.join(10)
        assert not self.is_alive()
        return self.error


def test_accepted_path_is_the_second_of_both_sides(real: Subnet) -> None:
    third = real.path(slid=18, dlid=34, sl=1)
    with connected(real) as both:
        both.server.allow_alternate_paths()
        with pytest.raises(CmStateError):
            _ = both.server.offered_path
        load = Load(both.client, third)
        both.expect(both.listener.channel, CmEventType.ALTERNATE_PATH)
        offered = both.server.offered_path
        assert (offered.slid, offered.dlid, offered.sl, offered.dgid) == (34, 18, 1, real.a.gid)
        assert lids(both.server) == [(32, 16), (33, 17)]
        with refused(errno.EINVAL, "LAP_SENT"):
            both.client.load_alternate_path(third)
        both.server.answer_alternate_path()
        assert load.outcome() is None
        assert both.client.route.path_rec == (real.first, third)
        assert lids(both.server) == [(32, 16), (34, 18)]
        for cmid, dlid in ((both.client, 34), (both.server, 18)):
            attr, mask = cmid.init_qp_attr(QPState.RTS)
            assert mask & QPAttrMask.ALT_PATH
            assert mask & QPAttrMask.PATH_MIG_STATE
            assert (attr.alt_ah_attr.dlid, attr.path_mig_state) == (dlid, MigState.REARM)
        with refused(errno.EINVAL, "the peer has offered no path"):
            both.server.answer_alternate_path()


def test_connection_without_alternate_path_gets_one(real: Subnet) -> None:
    with connected(real, alternate=False) as both:
        both.server.allow_alternate_paths()
        load = Load(both.client, real.second)
        both.expect(both.listener.channel, CmEventType.ALTERNATE_PATH)
        both.server.answer_alternate_path()
        assert load.outcome() is None
        assert lids(both.client) == [(16, 32), (17, 33)]
        assert lids(both.server) == [(32, 16), (33, 17)]


@for_each("status", [status for status in ApStatus if status is not ApStatus.SUCCESS], ids=lambda status: status.name)
def test_refused_path_changes_nothing_and_says_why(real: Subnet, status: ApStatus) -> None:
    with connected(real) as both:
        both.server.allow_alternate_paths()
        load = Load(both.client, real.path(slid=18, dlid=34))
        both.expect(both.listener.channel, CmEventType.ALTERNATE_PATH)
        both.server.answer_alternate_path(status)
        error = load.outcome()
        assert error is not None
        assert error.errno == (errno.EOPNOTSUPP if status is ApStatus.UNSUPPORTED else errno.ECONNREFUSED)
        assert status.name.lower().replace("_", " ") in str(error)
        assert lids(both.client) == [(16, 32), (17, 33)]
        assert lids(both.server) == [(32, 16), (33, 17)]


def test_application_that_takes_no_paths_is_not_asked(subnet: Subnet) -> None:
    with connected(subnet) as both:
        with refused(errno.EOPNOTSUPP, "unsupported"):
            both.client.load_alternate_path(subnet.path(slid=18, dlid=34))
        with pytest.raises(BlockingIOError):
            both.listener.channel.get_event(0)
        assert lids(both.client) == [(16, 32), (17, 33)]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"alternate_remote_lid": 40}, "invalid lid"),
        ({"alternate_local_lid": 0xC000}, "invalid lid"),
        ({"alternate_remote_gid": "fe80::99"}, "invalid gid"),
        ({"alternate_local_gid": "ff12::1"}, "invalid gid"),
        ({"alternate_subnet_local": False, "alternate_hop_limit": 1}, "invalid hop limit"),
        ({"alternate_local_lid": 16, "alternate_remote_lid": 32}, "is current"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_path_that_does_not_fit_is_refused_without_an_event(
    subnet: Subnet, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], status: str
) -> None:
    """Our own client would not offer these; a peer may."""
    loading = LAP.loading

    def changed(path: Path) -> LAP:
        lap = loading(path)
        for name, value in fields.items():
            setattr(lap, name, Gid(value) if isinstance(value, str) else value)
        return lap

    monkeypatch.setattr(LAP, "loading", changed)
    with connected(subnet) as both:
        both.server.allow_alternate_paths()
        with refused(errno.ECONNREFUSED, status):
            both.client.load_alternate_path(subnet.path(slid=18, dlid=34))
        with pytest.raises(BlockingIOError):
            both.listener.channel.get_event(0)
        with pytest.raises(CmStateError):
            _ = both.server.offered_path


def test_path_that_does_not_fit_the_connection_is_not_offered(subnet: Subnet) -> None:
    with connected(subnet) as both:
        for path, text in (
            (subnet.first, "is the first path already"),
            (subnet.second.replace(slid=40), "is not at HostA port 1"),
            (subnet.second.replace(sgid=subnet.b.gid), "is not at HostA port 1"),
            (subnet.second.replace(mtu=1), "no smaller MTU"),
        ):
            with refused(errno.EINVAL, text):
                both.client.load_alternate_path(path)
        with refused(errno.EINVAL, "the side that has sent the REQ"):
            both.server.load_alternate_path(both.server.route.path_rec[1].replace(slid=34))
    assert subnet.sent(LAP) == []


def test_unanswered_offer_times_out_and_the_connection_stays(subnet: Subnet) -> None:
    with connected(subnet) as both:
        both.server.allow_alternate_paths()
        with refused(errno.ETIMEDOUT, "did not answer"):
            both.client.load_alternate_path(subnet.path(slid=18, dlid=34))
        both.expect(both.listener.channel, CmEventType.ALTERNATE_PATH)
        both.client.disconnect()
        both.expect(both.listener.channel, CmEventType.DISCONNECTED)
        with refused(errno.EINVAL, "offered no path"):
            both.server.answer_alternate_path()


@for_each("ending", ["peer disconnects", "peer destroyed", "destroyed", "disconnected"])
def test_end_of_the_connection_ends_the_wait(real: Subnet, ending: str) -> None:
    with connected(real) as both:
        both.server.allow_alternate_paths()
        load = Load(both.client, real.path(slid=18, dlid=34))
        both.expect(both.listener.channel, CmEventType.ALTERNATE_PATH)
        if ending == "peer disconnects":
            both.server.disconnect()
        elif ending == "peer destroyed":
            both.server.destroy()
        elif ending == "destroyed":
            both.client.destroy()
        else:
            both.client.disconnect()
            both.expect(both.listener.channel, CmEventType.DISCONNECTED)
            both.server.disconnect()
        if ending != "destroyed":
            both.expect(both.channel, CmEventType.DISCONNECTED)
        error = load.outcome()
        assert error is not None
        assert error.errno == (errno.ECANCELED if ending == "destroyed" else errno.ECONNRESET)


def test_unconnected_id_has_no_alternate_path_to_load(subnet: Subnet) -> None:
    with subnet.a.id() as cmid:
        calls: tuple[Callable[[], object], ...] = (
            lambda: cmid.load_alternate_path(subnet.second),
            cmid.allow_alternate_paths,
            cmid.answer_alternate_path,
            lambda: cmid.offered_path,
        )
        for call in calls:
            with refused(errno.EINVAL, "not allowed in state IDLE"):
                call()
    assert not subnet.sent(REQ)


# -- on a fabric with OpenSM --------------------------------------------------------------------------------------


def test_opensm_gives_a_path_to_each_lid(lmc_fabric: SimulatedFabric) -> None:
    """Two LIDs for each port: the REQ brings one alternate path, a LAP loads another, and messages migrate to it."""
    site = OpenSM(lmc_fabric)
    with site.host("HostA") as a, site.host("HostB") as b:
        both = Connection(a, b, alternate=True)
        first, second = both.client.route.path_rec
        assert (first.sgid, first.dgid) == (second.sgid, second.dgid) == (a.gid, b.gid)
        # The simulated administrator gives the same: between the first LIDs, then between the second.
        assert (second.slid, second.dlid) == (first.slid + 1, first.dlid + 1)
        there = both.server.route.path_rec
        assert [(path.dlid, path.slid) for path in there] == lids(both.client)
        attr, mask = both.client.init_qp_attr(QPState.RTS)
        assert mask & QPAttrMask.PATH_MIG_STATE
        assert (attr.alt_ah_attr.dlid, attr.path_mig_state) == (second.dlid, MigState.REARM)
        third = second.replace(slid=first.slid)
        both.server.allow_alternate_paths()
        load = Load(both.client, third)
        both.expect(both.listener.channel, CmEventType.ALTERNATE_PATH)
        both.server.answer_alternate_path()
        assert load.outcome() is None
        assert both.client.route.path_rec == (first, third)
        both.client.notify(EventType.PATH_MIG)
        both.client.disconnect()
        both.expect(both.listener.channel, CmEventType.DISCONNECTED)
        both.server.disconnect()
        both.expect(both.channel, CmEventType.DISCONNECTED)
        both.close()
