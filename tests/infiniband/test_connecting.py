"""Connections between ids on InfiniBand, from the request to DISCONNECTED."""

from __future__ import annotations

import errno

import pytest

from infiniband.datagrams import PATH_RECORD, message, question
from infiniband.hosts import ALL_BITS, PORT, QPN, SID, IbHost, event, param
from rdmacm import CmEventType, CmId, EventChannel, PortSpace, RaiFlag, RdmaError
from rdmacm.address import Gid, SockAddrIB, service_id
from rdmacm.errors import CmRejectedError
from rdmacm.proto.mad import MadAddress
from rdmacm.provider.connparam import ConnParam, UdParam


class TestConnecting:
    def test_connection_is_established_and_disconnected(self, a: IbHost, b: IbHost) -> None:
        with b.listening() as listener, EventChannel(a.provider) as channel, a.id(channel) as cmid:
            cmid.resolve_addr(b.at())
            event(channel).ack()
            cmid.resolve_route()
            event(channel).ack()
            cmid.connect(param(b"q" * 92))
            with event(listener.channel) as request:
                server = request.id
                assert request.type is CmEventType.CONNECT_REQUEST
                assert isinstance(request.param, ConnParam)
                assert (request.private_data, request.param.qp_num) == (b"q" * 92, QPN)
                assert (server.route.sgid, server.route.dgid) == (b.gid, a.gid)
                assert server.verbs.name == b.device
                server.accept(param(b"r" * 196, qp_num=QPN + 1))
            with event(channel) as reply:
                assert reply.type is CmEventType.CONNECT_RESPONSE
                assert isinstance(reply.param, ConnParam)
                assert (reply.private_data, reply.param.qp_num) == (b"r" * 196, QPN + 1)
            cmid.establish()
            with event(listener.channel) as established:
                assert (established.type, established.id) == (CmEventType.ESTABLISHED, server)
            cmid.disconnect()
            with event(listener.channel) as ended:
                assert ended.type is CmEventType.DISCONNECTED
            server.disconnect()
            with event(channel) as ended:
                assert ended.type is CmEventType.DISCONNECTED
            server.destroy()

    def test_id_connects_to_a_resolved_service(self, a: IbHost, offered: CmId) -> None:
        with EventChannel(a.provider) as channel, a.id(channel) as cmid:
            cmid.bind_addr(a.source)
            cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
            event(channel).ack()
            cmid.resolve_route()
            event(channel).ack()
            cmid.connect(param())
            with event(offered.channel) as request:
                request.id.accept(param())
                with event(channel) as reply:
                    assert reply.type is CmEventType.CONNECT_RESPONSE
                server = request.id
            server.destroy()

    def test_connect_without_a_listener_is_rejected(self, a: IbHost, b: IbHost) -> None:
        with b.listening(), a.resolved(b.at(service_id(PortSpace.IB, 9))) as cmid:
            with pytest.raises(CmRejectedError) as refused:
                cmid.connect(param())
            assert refused.value.reason == 8

    def test_rejection_arrives_with_its_private_data(self, a: IbHost, b: IbHost) -> None:
        with b.listening() as listener, EventChannel(a.provider) as channel, a.id(channel) as cmid:
            cmid.resolve_addr(b.at())
            event(channel).ack()
            cmid.resolve_route()
            event(channel).ack()
            cmid.connect(param())
            with event(listener.channel) as request:
                request.id.reject(b"no")
                server = request.id
            server.destroy()
            with event(channel) as refused:
                assert (refused.type, refused.status) == (CmEventType.REJECTED, 28)
                assert refused.private_data[:2] == b"no"

    def test_too_long_private_data_raises(self, a: IbHost, b: IbHost) -> None:
        with a.resolved(b.at()) as cmid:
            with pytest.raises(RdmaError, match="92") as refused:
                cmid.connect(param(bytes(93)))
            assert refused.value.errno == errno.EINVAL

    def test_wildcard_listener_gets_the_request(self, a: IbHost, b: IbHost) -> None:
        with EventChannel(b.provider) as channel, b.id(channel) as listener:
            listener.bind_addr(SockAddrIB(Gid(), SID, ALL_BITS))
            listener.listen()
            with EventChannel(a.provider) as own, a.id(own) as cmid:
                cmid.resolve_addr(b.at())
                event(own).ack()
                cmid.resolve_route()
                event(own).ack()
                cmid.connect(param())
                with event(channel) as request:
                    assert request.id.local_addr == b.at()
                    request.id.reject()
                    server = request.id
                server.destroy()

    def test_sidr_request_is_answered_with_a_qp_number(self, a: IbHost, b: IbHost) -> None:
        sid = service_id(PortSpace.UDP, PORT)
        with b.listening(sid, PortSpace.UDP) as listener, EventChannel(a.provider) as channel:
            with a.id(channel, PortSpace.UDP) as cmid:
                cmid.resolve_addr(b.at(sid))
                event(channel).ack()
                cmid.resolve_route()
                event(channel).ack()
                cmid.connect(param(b"hello"))
                with event(listener.channel) as request:
                    request.id.accept(param(b"there", qp_num=77))
                    server = request.id
                with event(channel) as found:
                    assert found.type is CmEventType.ESTABLISHED
                    assert isinstance(found.param, UdParam)
                    assert (found.param.qp_num, found.param.private_data[:5]) == (77, b"there")
                server.destroy()


def test_malformed_mads_are_counted(a: IbHost, b: IbHost) -> None:
    """MADs of an unknown class, query or connection change nothing else."""
    with EventChannel(a.provider), b.listening() as listener:
        subnet = b.provider.host.ib.subnets[0]
        lid = subnet.transport.port().lid
        with a.id() as cmid:
            cmid.bind_addr(a.source)
            send = a.provider.host.ib.subnets[0].transport.send
            noise = bytes([1, 0x04, 1, 3]) + bytes(252)
            for mad in (noise, message(7, b"\xff" * 232), question(PATH_RECORD, 0, b"")):
                send(MadAddress(lid), mad)
            with pytest.raises(TimeoutError):
                listener.channel.get_event(0.3)
            assert subnet.dropped["class"] >= 1
            assert sum(subnet.cm.agent.dropped.values()) + sum(subnet.sa.client.dropped.values()) >= 1
            cmid.resolve_addr(b.at())
            cmid.resolve_route()
