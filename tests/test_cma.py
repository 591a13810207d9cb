"""A client as the manual pages write it, line by line."""

from __future__ import annotations

import pytest

import rdmacm
from rdmacm.cma import (
    RDMA_CM_EVENT_ADDR_RESOLVED,
    RDMA_CM_EVENT_ADDRINFO_RESOLVED,
    RDMA_CM_EVENT_ROUTE_RESOLVED,
    RDMA_CM_EVENT_USER,
    RDMA_OPTION_ID,
    RDMA_OPTION_ID_REUSEADDR,
    RDMA_PS_TCP,
    rdma_ack_cm_event,
    rdma_bind_addr,
    rdma_create_event_channel,
    rdma_create_id,
    rdma_destroy_event_channel,
    rdma_destroy_id,
    rdma_event_str,
    rdma_free_devices,
    rdma_freeaddrinfo,
    rdma_get_cm_event,
    rdma_get_devices,
    rdma_get_dst_port,
    rdma_get_local_addr,
    rdma_get_peer_addr,
    rdma_get_src_port,
    rdma_getaddrinfo,
    rdma_migrate_id,
    rdma_query_addrinfo,
    rdma_resolve_addr,
    rdma_resolve_addrinfo,
    rdma_resolve_route,
    rdma_set_option,
    rdma_write_cm_event,
)


def test_a_client_over_loopback() -> None:
    res = rdma_getaddrinfo("127.0.0.1", "7471", rdmacm.AddrInfo(port_space=RDMA_PS_TCP))
    channel = rdma_create_event_channel()
    id = rdma_create_id(channel, "context", RDMA_PS_TCP)
    try:
        assert res[0].dst_addr is not None
        rdma_resolve_addr(id, None, res[0].dst_addr, 2000)
        event = rdma_get_cm_event(channel)
        assert (event.id, event.type, event.status) == (id, RDMA_CM_EVENT_ADDR_RESOLVED, 0)
        assert rdma_event_str(event.type) == "RDMA_CM_EVENT_ADDR_RESOLVED"
        rdma_ack_cm_event(event)
        rdma_resolve_route(id, 2000)
        event = rdma_get_cm_event(channel)
        assert event.type == RDMA_CM_EVENT_ROUTE_RESOLVED
        rdma_ack_cm_event(event)
        assert rdma_get_peer_addr(id) == ("127.0.0.1", 7471)
        assert rdma_get_local_addr(id) == ("127.0.0.1", rdma_get_src_port(id))
        assert rdma_get_dst_port(id) == 7471
        assert id.context == "context"
        rdma_freeaddrinfo(res)
        assert res == []
        rdma_freeaddrinfo(None)
    finally:
        rdma_destroy_id(id)
        rdma_destroy_event_channel(channel)


def test_the_rest_of_the_pages() -> None:
    channel = rdma_create_event_channel()
    id = rdma_create_id(channel)
    other = rdma_create_event_channel()
    try:
        rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 1)
        rdma_bind_addr(id, ("127.0.0.1", 0))
        rdma_write_cm_event(id, RDMA_CM_EVENT_USER, 3, 4)
        rdma_migrate_id(id, other)
        event = rdma_get_cm_event(other)
        assert (event.type, event.status, event.arg) == (RDMA_CM_EVENT_USER, 3, 4)
        rdma_ack_cm_event(event)
        rdma_resolve_addrinfo(id, "127.0.0.1", "7471")
        event = rdma_get_cm_event(other)
        assert event.type == RDMA_CM_EVENT_ADDRINFO_RESOLVED
        rdma_ack_cm_event(event)
        assert rdma_query_addrinfo(id)[0].dst_addr == ("127.0.0.1", 7471)
        devices = rdma_get_devices()
        assert any(context.name == "soft_lo" for context in devices)
        assert devices[0].query_port(1).port_num == 1
        rdma_free_devices(devices)
        assert devices == []
    finally:
        rdma_destroy_id(id)
        rdma_destroy_event_channel(channel)
        rdma_destroy_event_channel(other)


def test_a_synchronous_id() -> None:
    id = rdma_create_id(None)
    try:
        rdma_resolve_addr(id, None, ("127.0.0.1", 1), 2000)
        rdma_resolve_route(id, 2000)
        assert id.route.num_paths == 1
        with pytest.raises(rdmacm.CmStateError):
            rdma_bind_addr(id, ("127.0.0.1", 0))
    finally:
        rdma_destroy_id(id)
