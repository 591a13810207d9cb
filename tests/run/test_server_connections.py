"""Connections of programs, by the commands of rdma_cm at the control server."""

from __future__ import annotations

import errno
import fcntl
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from rdmacm.address import unpack_address
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.kernel import abi
from rdmacm.proto.user_cm import Command, Query
from rdmacm.provider.connparam import ConnParam, Ece
from rdmacm.run.server import Server
from rdmacm.verbs.enums import QPAttrMask, QPState
from support.run_client import Channel, Client, Id, inet

HOST = "127.0.0.1"
LISTENER, CHILD, ACTIVE = 0x1111, 0x2222, 0x3333


class Pair(NamedTuple):
    """A connection between two programs: the channels and ids of both ends."""

    listener: Id
    active: Id
    passive: Id


@pytest.fixture
def channels(served: Server) -> Iterator[tuple[Channel, Channel]]:
    """An event channel of each of two connections."""
    with Client(served.path) as first, Client(served.path) as second:
        yield Channel(first), Channel(second)


def request(channels: tuple[Channel, Channel], param: ConnParam) -> Pair:
    """Resolve, connect, and take the request."""
    passive, active = channels
    listener = Id(passive, LISTENER)
    port = listener.listen(HOST)
    cmid = Id(active, ACTIVE)
    cmid.resolve(HOST, port)
    cmid.connect(param, Ece(0xABCDEF, 5))
    event = passive.expect(CmEventType.CONNECT_REQUEST)
    assert event.uid == LISTENER
    assert event.ece == Ece(0xABCDEF, 5)
    return Pair(listener, cmid, Id(passive, 0, number=event.id))


def establish(channels: tuple[Channel, Channel]) -> Pair:
    """Connect, and confirm the reply."""
    pair = request(channels, ConnParam(b"hello", 3, 2, qp_num=0x123456))
    pair.passive.accept(ConnParam(b"welcome", 2, 3, qp_num=0x654321), CHILD)
    pair.active.channel.expect(CmEventType.CONNECT_RESPONSE)
    pair.active.accept(None)
    assert pair.passive.channel.expect(CmEventType.ESTABLISHED).uid == CHILD
    return pair


def test_a_connection_with_queue_pairs_of_the_programs(channels: tuple[Channel, Channel]) -> None:
    passive, active = channels
    pair = request(channels, ConnParam(b"hello", 3, 2, retry_count=5, rnr_retry_count=6, srq=1, qp_num=0x123456))

    attr, mask = pair.passive.init_qp_attr(QPState.INIT)
    assert mask & QPAttrMask.PORT
    assert attr.port_num == 1
    attr, mask = pair.passive.init_qp_attr(QPState.RTR)
    assert mask & QPAttrMask.DEST_QPN
    assert attr.dest_qp_num == 0x123456
    passive_sq_psn, mask = pair.passive.init_qp_attr(QPState.RTS)
    assert passive_sq_psn.retry_cnt == 5
    passive_rq_psn = attr.rq_psn

    pair.passive.accept(ConnParam(b"welcome", 2, 3, rnr_retry_count=4, qp_num=0x654321), CHILD, Ece(0xABCDEF, 9))
    event = active.expect(CmEventType.CONNECT_RESPONSE)
    assert (event.uid, event.id, event.ece) == (ACTIVE, pair.active.number, Ece(0xABCDEF, 9))
    param = abi.unpack_conn(event.param)
    assert param.private_data.rstrip(b"\0") == b"welcome"
    assert (param.qp_num, param.responder_resources, param.initiator_depth) == (0x654321, 3, 2)

    assert pair.active.init_qp_attr(QPState.INIT)[0].port_num == 1
    to_rtr, mask = pair.active.init_qp_attr(QPState.RTR)
    assert (to_rtr.dest_qp_num, to_rtr.max_dest_rd_atomic, to_rtr.ah_attr.port_num) == (0x654321, 3, 1)
    assert to_rtr.ah_attr.gr.dgid.ip == bytes((127, 0, 0, 1))
    to_rts, mask = pair.active.init_qp_attr(QPState.RTS)
    assert (to_rts.retry_cnt, to_rts.rnr_retry, to_rts.max_rd_atomic) == (5, 4, 2)
    assert (to_rts.sq_psn, to_rtr.rq_psn) == (passive_rq_psn, passive_sq_psn.sq_psn)

    assert not passive.is_readable()
    pair.active.accept(None)
    event = passive.expect(CmEventType.ESTABLISHED)
    assert (event.uid, event.id) == (CHILD, pair.passive.number)
    pair.active.disconnect()
    passive.expect(CmEventType.DISCONNECTED)
    pair.passive.disconnect()
    assert active.expect(CmEventType.DISCONNECTED).uid == ACTIVE
    assert pair.passive.destroy() == 2
    assert pair.listener.destroy() == 1
    assert pair.active.destroy() == 4


def test_parameters_of_a_request(channels: tuple[Channel, Channel]) -> None:
    passive, active = channels
    listener = Id(passive, LISTENER)
    port = listener.listen(HOST)
    cmid = Id(active, ACTIVE)
    cmid.resolve(HOST, port)
    cmid.connect(ConnParam(b"hello", 3, 2, 1, 5, 6, 1, 0x123456))
    param = abi.unpack_conn(passive.expect(CmEventType.CONNECT_REQUEST).param)
    assert param.private_data == b"hello".ljust(56, b"\0")
    assert (param.responder_resources, param.initiator_depth, param.flow_control) == (2, 3, 1)
    assert (param.retry_count, param.rnr_retry_count, param.srq, param.qp_num) == (5, 6, 1, 0x123456)


def test_queries_show_addresses_gids_and_the_path(channels: tuple[Channel, Channel]) -> None:
    passive, active = channels
    name, (index, rows) = next(iter(passive.client.devices().items()))
    listener = Id(passive, LISTENER)
    port = listener.listen(HOST)
    bound = listener.addresses()
    assert (bound.node_guid, bound.port_num) == (0, 0)  # as in the kernel, a loopback address binds to no device
    cmid = Id(active, ACTIVE)
    assert cmid.addresses().source is None
    cmid.resolve(HOST, port)
    found = cmid.addresses()
    assert found.device_index == index, name
    assert found.destination == inet(HOST, port)
    gids = cmid.addresses(Query.GID)
    assert gids.source is not None
    assert not isinstance(gids.source, tuple)
    assert bytes(gids.source.addr) in rows
    assert gids.source.sid >> 16 == PortSpace.TCP
    (path,) = abi.unpack_paths(active.command(Command.QUERY, abi.query(0, cmid.number, Query.PATH)))
    assert path.path.dgid.ip == bytes((127, 0, 0, 1))
    route = active.command(Command.QUERY_ROUTE, abi.query(0, cmid.number, Query.ADDR))
    assert len(route) == 208
    assert route[8:24] == bytes(path.path.dgid)
    assert unpack_address(route[164:192]) == inet(HOST, port)


def test_a_rejected_connection(channels: tuple[Channel, Channel]) -> None:
    pair = request(channels, ConnParam(qp_num=7))
    pair.passive.channel.command(Command.REJECT, abi.reject(pair.passive.number, b"no", 0))
    event = pair.active.channel.expect(CmEventType.REJECTED, 28)
    assert abi.unpack_conn(event.param).private_data.startswith(b"no\0")


def test_nobody_listens(channels: tuple[Channel, Channel]) -> None:
    cmid = Id(channels[0], ACTIVE)
    cmid.resolve(HOST, 7471)
    cmid.connect(ConnParam(qp_num=7))
    channels[0].expect(CmEventType.REJECTED, 8)


def test_datagrams(channels: tuple[Channel, Channel]) -> None:
    passive, active = channels
    listener = Id(passive, LISTENER, PortSpace.UDP)
    port = listener.listen(HOST)
    cmid = Id(active, ACTIVE, PortSpace.UDP)
    cmid.resolve(HOST, port)
    attr, mask = cmid.init_qp_attr(QPState.INIT)
    assert mask & QPAttrMask.QKEY
    assert attr.qkey == 0x01234567
    cmid.connect(ConnParam(b"who?"))
    event = passive.expect(CmEventType.CONNECT_REQUEST)
    assert abi.unpack_ud(event.param).private_data.rstrip(b"\0") == b"who?"
    Id(passive, 0, number=event.id).accept(ConnParam(b"me", qp_num=0x4242), CHILD)
    param = abi.unpack_ud(active.expect(CmEventType.ESTABLISHED).param)
    assert (param.qp_num, param.qkey, param.private_data.rstrip(b"\0")) == (0x4242, 0x01234567, b"me")
    assert param.ah_attr.is_global
    assert param.ah_attr.gr.dgid.ip == bytes((127, 0, 0, 1))


def test_a_program_that_ends_takes_its_connections_with_it(served: Server, channels: tuple[Channel, Channel]) -> None:
    pair = establish(channels)
    pair.active.channel.client.close()
    assert not pair.passive.channel.is_readable(0.05)  # the other connection is of the same process
    pair.active.channel.sock.close()


def test_one_event_at_a_time_and_destroyed_ones_are_taken_back(client: Client) -> None:
    channel = Channel(client)
    first, second = Id(channel, 1), Id(channel, 2)
    for each in (first, second, first):
        channel.command(Command.WRITE_CM_EVENT, abi.write_cm_event(each.number, CmEventType.USER, 0, each.uid))
    event = channel.expect(CmEventType.USER)
    assert (event.uid, abi.unpack_arg(event.param)) == (1, 1)
    assert channel.is_readable(5)
    assert second.destroy() == 0
    assert channel.get_event().uid == 1
    assert first.destroy() == 2
    assert not channel.is_readable()


def test_an_event_that_is_being_freed_has_been_read(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_byte_at_least(fd: int, request: int, room: bytes) -> bytes:
        queued = int.from_bytes(ioctl(fd, request, room), sys.byteorder)
        return max(1, queued).to_bytes(4, sys.byteorder)

    ioctl = fcntl.ioctl
    monkeypatch.setattr(fcntl, "ioctl", one_byte_at_least)
    channel = Channel(client)
    for uid in (1, 2, 3):
        number = Id(channel, uid).number
        channel.command(Command.WRITE_CM_EVENT, abi.write_cm_event(number, CmEventType.USER, 0, 0))
    assert [channel.get_event().uid for _ in range(3)] == [1, 2, 3]


def test_migration_takes_the_events_along(client: Client) -> None:
    old, new = Channel(client), Channel(client)
    first, second = Id(old, 1), Id(old, 2)
    for each in (first, second, first):
        old.command(Command.WRITE_CM_EVENT, abi.write_cm_event(each.number, CmEventType.USER, 0, 0))
    answer = new.command(Command.MIGRATE_ID, abi.migrate_id(0, first.number, old.number))
    assert abi.unpack_number(answer) == 0
    assert [new.get_event().uid, new.get_event().uid, old.get_event().uid] == [1, 1, 2]
    first.channel = new
    assert first.destroy() == 2


def test_errors_are_those_of_the_kernel(client: Client) -> None:
    channel, other = Channel(client), Channel(client)
    cmid = Id(channel, 1)

    def fails(code: int, command: int, body: bytes, where: Channel = channel) -> None:
        with pytest.raises(OSError) as caught:
            client.ask(command, body, where.number)
        assert caught.value.errno == code

    fails(errno.ENOENT, Command.LISTEN, abi.pair(999, 0))
    fails(errno.EINVAL, Command.LISTEN, abi.pair(cmid.number, 0), other)
    fails(errno.EINVAL, Command.LISTEN, b"short")
    fails(errno.EINVAL, Command.CREATE_ID, abi.create_id(0, 1, 0x9999, 0))
    fails(errno.EINVAL, Command.CONNECT, abi.connect(cmid.number, ConnParam(), Ece(0)))
    fails(errno.EINVAL, Command.RESOLVE_ROUTE, abi.pair(cmid.number, 2000))
    fails(errno.EINVAL, Command.INIT_QP_ATTR, abi.init_qp_attr(0, cmid.number, QPState.INIT))
    fails(errno.EADDRNOTAVAIL, Command.BIND, abi.bind(cmid.number, inet("192.0.2.1", 0)))
    fails(errno.ENOSYS, Command.SET_OPTION, abi.set_option(0, 1, cmid.number, 7, 0) + b"\0")
    fails(errno.EINVAL, Command.SET_OPTION, abi.set_option(0, 99, cmid.number, 0, 0))
    fails(errno.ENOSYS, 13, b"")
    fails(errno.EINVAL, 99, b"")
    cmid.bind(HOST, 7472)
    with pytest.raises(OSError) as caught:
        Id(other, 2).bind(HOST, 7472)
    assert caught.value.errno == errno.EADDRINUSE
    cmid.set_option(0, 0, b"\x20")
