"""A key opens a region to the peers of its protection domain: by default, to one."""

from __future__ import annotations

import errno

import pytest

from rdmacm import CmPermissionError, Connection, RdmaError, connect, listen
from rdmacm.verbs import PD
from support.endpoints import accepting, connected

HOST = "127.0.0.1"


def test_key_of_one_connection_opens_nothing_to_the_peer_of_another() -> None:
    memory = bytearray(16)
    with listen((HOST, 0)) as listener:
        with accepting(listener) as first:
            one = connect((HOST, listener.port), timeout=20)
        with accepting(listener) as second:
            other = connect((HOST, listener.port), timeout=20)
        with one, other, first[0] as served, second[0]:
            remote = served.register(memory, remote_write=True).remote
            with pytest.raises(CmPermissionError, match="wrong key"):
                other.write(remote, b"foreign")
            assert memory == bytes(16)
            one.write(remote, b"own peer")
            assert memory[:8] == b"own peer"


@pytest.mark.parametrize("of", ["listener", "first connection"])
def test_connections_share_regions_where_they_share_a_domain(of: str) -> None:
    memory = bytearray(16)
    with listen((HOST, 0)) as listener, accepting(listener) as accepted:
        first = connect((HOST, listener.port), timeout=20)
    with first, accepted[0] as passive:
        domain = PD(passive.id.verbs) if of == "listener" else passive.pd
        with listen((HOST, 0), pd=domain) as listener:
            peers: list[Connection] = []
            served: list[Connection] = []
            for _ in range(2):
                with accepting(listener) as accepted:
                    peers.append(connect((HOST, listener.port), timeout=20))
                served.append(accepted[0])
            region = served[0].register(memory, remote_write=True)
            peers[1].write(region.remote, b"shared")
            assert memory[:6] == b"shared"
            served[1].send(region)
            assert peers[1].recv()[:6] == b"shared"
            for connection in (*peers, *served):
                connection.close()
        if of == "listener":
            domain.close()
        else:
            passive.register(bytearray(8)).close()


def test_region_of_another_domain_is_refused_as_a_buffer() -> None:
    with connected() as (active, passive):
        region = passive.register(bytearray(8))
        with pytest.raises(RdmaError, match="another protection domain") as caught:
            active.send(region)
        assert caught.value.errno == errno.EINVAL
        active.send(b"still open")
        assert passive.recv(20) == b"still open"
