"""Listeners and connections of the provider ``kernel`` on a device that is removed."""

from __future__ import annotations

from interop.scenario import Guest


def test_listeners_end_with_their_device(guest: Guest) -> None:
    """Blocking, asyncio, servers, synchronous ids; the one of a wildcard address goes on with the next device."""
    done = guest.run("rxe python3 -m interop.kernel_listeners", timeout=60, record=False)
    assert done.output.splitlines() == ["as expected"], done.output


#: librdmacm's rping keeps its ids when it is told of the removal, so the removal waits until rping has ended.
HELD = """
rping -s -P -p 9000 >/dev/null 2>&1 &
SERVER=$!
_until_it_listens '[[ $(rdma resource show cm_id) == *LISTEN* ]]'
rping -c -a $RXE4 -p 9000 -C 1000000 >/dev/null 2>&1 &
CLIENT=$!
_until_it_listens '[[ $(rdma resource show cm_id) == *CONNECT* ]]'
rdma link delete rxe0 &
REMOVAL=$!
for ((i = 0; i < 3000; i++)); do [[ $(rdma link show) != *rxe0* ]] && break; nap 0.01; done
rxe env RDMACM_PROVIDER=kernel python3 -m rdmacm rping -c -a $SOFT4 -C 1
kill -KILL $SERVER $CLIENT
wait $REMOVAL
"""


def test_id_is_not_resolved_to_a_device_that_is_being_removed(guest: Guest) -> None:
    done = guest.run(HELD, timeout=60, record=False)
    assert "rdmacm: resolve_addr 10.0.0.2:7174: the device is being removed [ENODEV]" in done.output, done.output
