"""A listener whose device is removed."""

from __future__ import annotations

import errno

import pytest

from rdmacm import RdmaError
from rdmacm.endpoint.connection_state import ConnectionOptions
from rdmacm.endpoint.listening import ListenerState
from rdmacm.testing import Fabric
from support.endpoints import Ends, Part, play


@pytest.mark.parametrize("call", ["accept", "get_request"])
def test_removal_of_the_device_ends_a_wait_for_connections(call: str) -> None:
    fabric = Fabric(1)
    ends = Ends(fabric)
    network = ends.b.network
    listener = ListenerState(ends.b_dispatcher, ("10.0.0.2", 7472), 0, ConnectionOptions())

    def wait() -> Part:
        return Part(ends.b_dispatcher, listener.accept(b"") if call == "accept" else listener.get_request())

    waiting = wait()
    network.remove_interface(next(each.index for each in network.interfaces() if each.name == "eth0"))
    later = wait()
    for part in (waiting, later):
        with pytest.raises(RdmaError, match=rf"{call} 10\.0\.0\.2:7472: soft_eth0: interface eth0 is gone") as caught:
            play(fabric, part)
        assert caught.value.errno == errno.ENODEV
    listener.close()
    with pytest.raises(RdmaError, match="closed") as caught:
        play(fabric, wait())
    assert caught.value.errno == errno.EBADF
    ends.close()
