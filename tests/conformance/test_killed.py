"""Peers that die during an operation: what the survivor sees, and that it can connect to others."""

from __future__ import annotations

import errno
import signal

import pytest

from rdmacm import CmEventType, CmId, ConnParam, EventChannel, IdOption, OptionLevel
from rdmacm.testing import Fabric, Host
from rdmacm.verbs import MR, WC, AccessFlag, QPCap, QPInitAttr, QPState, SendFlag, WCStatus
from support.echo import EchoClient, EchoServer
from support.hostile import ADDRESSES, PORT, Server, Talk

E = CmEventType
SERVER, CLIENT, _ = ADDRESSES
LOOPBACK = pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])


def failures(cmid: CmId, count: int) -> list[WC]:
    """The completions of ``count`` sends, from the first failed one on."""
    found: list[WC] = []
    while not found or len(found) < count - found[0].wr_id:
        wc = cmid.get_send_comp(20)
        if found or wc.status is not WCStatus.SUCCESS:
            found.append(wc)
    return found


@LOOPBACK
def test_transfer_to_a_killed_process_fails(host: str) -> None:
    with EchoServer(host) as server:
        with EchoClient(host, server.port, ack_timeout=13, retry_count=2) as client:
            assert client.wait() == 0
            client.echo(10)
            cmid, count = client.cmid, 40
            attr, _ = cmid.qp.query()
            assert (attr.timeout, attr.retry_cnt) == (13, 2), "33 ms, at most four times as long, for three attempts"
            # More messages than both sides have receives: only a living server can return them all.
            for number in range(count):
                cmid.post_send(number, client.region, 0, 4096, SendFlag.SIGNALED)
                if number == 5:
                    server.process.send_signal(signal.SIGKILL)
            failed = failures(cmid, count)
            assert failed[0].status is WCStatus.RETRY_EXC_ERR
            assert {wc.status for wc in failed[1:]} == {WCStatus.WR_FLUSH_ERR}
            assert [wc.wr_id for wc in failed] == list(range(failed[0].wr_id, count))
            assert cmid.qp.state is QPState.ERR
            while (wc := cmid.get_recv_comp(5)).status is WCStatus.SUCCESS:
                pass
            assert wc.status is WCStatus.WR_FLUSH_ERR
            cmid.disconnect()  # no peer answers; its timeout is tested below, in virtual time
    with EchoServer(host) as another, EchoClient(host, another.port) as client:
        assert client.wait() == 0
        client.echo(3)


@LOOPBACK
def test_port_of_a_killed_listener_is_free_again(host: str) -> None:
    with EchoServer(host) as server:
        with EchoClient(host, server.port) as client:
            assert client.wait() == 0
            client.echo()
            server.kill()
            with EchoClient(host, server.port) as other:  # the living process rejects the request
                assert (other.wait(), other.kind) == (8, E.REJECTED)
        with EchoServer(host, server.port) as successor, EchoClient(host, successor.port) as client:
            assert client.wait() == 0
            client.echo()


@pytest.mark.slow
def test_request_to_a_killed_listener_is_rejected() -> None:
    """Another process rejects it, after four seconds if the first copy was lost with the killed process."""
    with EchoServer() as server, EchoClient("127.0.0.1", server.port) as first:
        assert first.wait() == 0
        server.process.send_signal(signal.SIGSTOP)
        with EchoClient("127.0.0.1", server.port) as client:
            server.kill()
            assert (client.wait(), client.kind) == (8, E.REJECTED)


# -- in virtual time ------------------------------------------------------------------------------------


def test_transfer_to_a_crashed_host_fails() -> None:
    fabric = Fabric(1)
    server = Server(fabric.host("a", SERVER))
    b = fabric.host("b", CLIENT)
    with EventChannel(b.provider) as channel, CmId(channel) as cmid:
        cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 14)
        cmid.resolve_addr((SERVER, PORT))
        channel.get_event().ack()
        cmid.resolve_route()
        channel.get_event().ack()
        cmid.create_qp(QPInitAttr(cap=QPCap(16, 16, 1, 1, 64)))
        cmid.connect(ConnParam(retry_count=3))
        with channel.get_event() as event:
            assert event.type is E.ESTABLISHED
            told = event.private_data
        region = MR(cmid.pd, bytearray(64), AccessFlag.LOCAL_WRITE)
        cmid.post_recv(1, region)
        addr, rkey = int.from_bytes(told[:8], "big"), int.from_bytes(told[8:12], "big")
        cmid.post_write(0, b"alive", addr, rkey, flags=SendFlag.SIGNALED | SendFlag.INLINE)
        assert cmid.get_send_comp(1).status is WCStatus.SUCCESS
        fabric.crash("a")
        crashed = fabric.now
        for number in range(3):
            cmid.post_send(number, b"dead?", flags=SendFlag.SIGNALED | SendFlag.INLINE)
        assert [cmid.get_send_comp(60).status for _ in range(3)] == [
            WCStatus.RETRY_EXC_ERR,
            WCStatus.WR_FLUSH_ERR,
            WCStatus.WR_FLUSH_ERR,
        ]
        # Four attempts of 4.096 µs * 2 ** 14, which may each last up to four times as long (9.7.6.1.3).
        assert 4 * 0.067 < fabric.now - crashed < 4 * 4 * 0.0672
        assert cmid.get_recv_comp(1).status is WCStatus.WR_FLUSH_ERR
        assert cmid.qp.state is QPState.ERR
        cmid.disconnect()
        with channel.get_event(timeout=300) as event:
            assert (event.type, event.status) == (E.DISCONNECTED, -errno.ETIMEDOUT)
        assert fabric.log.count(kind="DREQ") == 16, "one DREQ and fifteen retransmissions"
        with channel.get_event(timeout=300) as event:
            assert event.type is E.TIMEWAIT_EXIT
        region.close()
    server.close()
    again = Server(fabric.host("a", SERVER))
    talk = Talk(again, b)
    talk.on()
    talk.end()
    again.close()


def listening(host: Host, port: int = PORT) -> tuple[EventChannel, CmId]:
    channel = EventChannel(host.provider)
    listener = CmId(channel)
    listener.bind_addr((host.addresses[0], port))
    listener.listen()
    return channel, listener


@pytest.mark.parametrize("reboots", [False, True])
def test_connect_to_a_crashed_host_fails(reboots: bool) -> None:
    fabric = Fabric(1)
    a, b = fabric.host("a", SERVER), fabric.host("b", CLIENT)
    silent, listener = listening(a)
    with EventChannel(b.provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addr((SERVER, PORT))
        channel.get_event().ack()
        cmid.resolve_route()
        channel.get_event().ack()
        cmid.create_qp()
        cmid.connect()
        fabric.run(seconds=1)
        fabric.crash("a")
        listener.destroy()
        silent.close()
        if reboots:  # the host is back, without a listener on that port
            silent, listener = listening(fabric.host("a", SERVER), PORT + 1)
        with channel.get_event(timeout=1000) as event:
            expected = (E.REJECTED, 8) if reboots else (E.UNREACHABLE, -errno.ETIMEDOUT)
            assert (event.type, event.status) == expected
        assert cmid.qp.state is QPState.ERR
    listener.destroy()
    silent.close()
