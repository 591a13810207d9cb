"""The flow of librdmacm's cmtime, with rdmacm.cma alone: the time of each step of many connections.

    python3 examples/cmtime.py [-b ADDRESS] [-p PORT] [-c CONNECTIONS]
    python3 examples/cmtime.py -s ADDRESS [-p PORT] [-c CONNECTIONS]

The first line is the server, which ends after that number of connections. The client starts a step of all connections,
then handles events until all have done it. The C program handles events in a thread; here the one thread does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from rdmacm.cma import (
    IBV_QPT_RC,
    RDMA_CM_EVENT_ADDR_RESOLVED,
    RDMA_CM_EVENT_CONNECT_REQUEST,
    RDMA_CM_EVENT_DISCONNECTED,
    RDMA_CM_EVENT_ESTABLISHED,
    RDMA_CM_EVENT_ROUTE_RESOLVED,
    RDMA_PS_TCP,
    ibv_qp_init_attr,
    rdma_accept,
    rdma_ack_cm_event,
    rdma_bind_addr,
    rdma_cm_id,
    rdma_conn_param,
    rdma_connect,
    rdma_create_event_channel,
    rdma_create_id,
    rdma_create_qp,
    rdma_destroy_event_channel,
    rdma_destroy_id,
    rdma_destroy_qp,
    rdma_disconnect,
    rdma_event_channel,
    rdma_event_str,
    rdma_get_cm_event,
    rdma_get_src_port,
    rdma_listen,
    rdma_resolve_addr,
    rdma_resolve_route,
)


class Node:
    """A connection, with the seconds of its steps."""

    def __init__(self) -> None:
        self.id: rdma_cm_id
        self.began: dict[str, float] = {}
        self.took: dict[str, float] = {}


def init_attr() -> ibv_qp_init_attr:
    attr = ibv_qp_init_attr()
    attr.cap.max_send_wr = 1
    attr.cap.max_recv_wr = 1
    attr.cap.max_send_sge = 1
    attr.cap.max_recv_sge = 1
    attr.qp_type = IBV_QPT_RC
    return attr


def conn_param() -> rdma_conn_param:
    return rdma_conn_param(retry_count=5, rnr_retry_count=7)


def serve(channel: rdma_event_channel, address: str, port: int, connections: int) -> None:
    """Accept connections until so many have been disconnected."""
    listen_id = rdma_create_id(channel, None, RDMA_PS_TCP)
    rdma_bind_addr(listen_id, (address, port))
    rdma_listen(listen_id, 0)
    print(f"cmtime: listening on port {rdma_get_src_port(listen_id)}", flush=True)
    while connections:
        event = rdma_get_cm_event(channel)
        kind, status, id = event.event, event.status, event.id
        rdma_ack_cm_event(event)
        if kind == RDMA_CM_EVENT_CONNECT_REQUEST:
            rdma_create_qp(id, None, init_attr())
            rdma_accept(id, conn_param())
        elif kind == RDMA_CM_EVENT_DISCONNECTED:
            rdma_disconnect(id)
            rdma_destroy_qp(id)
            rdma_destroy_id(id)
            connections -= 1
        elif kind != RDMA_CM_EVENT_ESTABLISHED:
            raise SystemExit(f"cmtime: {rdma_event_str(kind)}, status {status}")
    rdma_destroy_id(listen_id)


def wait_for_all(channel: rdma_event_channel, step: str, wanted: int, connections: int) -> None:
    """Handle one event of each connection."""
    for _ in range(connections):
        event = rdma_get_cm_event(channel)
        kind, status, node = event.event, event.status, event.id.context
        rdma_ack_cm_event(event)
        if kind != wanted:
            raise SystemExit(f"cmtime: {step}: {rdma_event_str(kind)}, status {status}")
        assert isinstance(node, Node)
        node.took[step] = time.perf_counter() - node.began[step]


def connect(channel: rdma_event_channel, server: tuple[str, int], connections: int) -> None:
    """Take every connection through each step, and print the times."""

    def create(node: Node) -> None:
        node.id = rdma_create_id(channel, node, RDMA_PS_TCP)

    def destroy(node: Node) -> None:
        rdma_destroy_qp(node.id)
        rdma_destroy_id(node.id)

    steps: list[tuple[str, Callable[[Node], None], int | None]] = [
        ("create id", create, None),
        ("resolve addr", lambda node: rdma_resolve_addr(node.id, None, server, 2000), RDMA_CM_EVENT_ADDR_RESOLVED),
        ("resolve route", lambda node: rdma_resolve_route(node.id, 2000), RDMA_CM_EVENT_ROUTE_RESOLVED),
        ("create qp", lambda node: rdma_create_qp(node.id, None, init_attr()), None),
        ("connect", lambda node: rdma_connect(node.id, conn_param()), RDMA_CM_EVENT_ESTABLISHED),
        ("disconnect", lambda node: rdma_disconnect(node.id), RDMA_CM_EVENT_DISCONNECTED),
        ("destroy", destroy, None),
    ]
    nodes = [Node() for _ in range(connections)]
    print("step              total ms     max ms     min us  us / conn")
    for name, start, wanted in steps:
        began = time.perf_counter()
        for node in nodes:
            node.began[name] = time.perf_counter()
            start(node)
            node.took[name] = time.perf_counter() - node.began[name]
        if wanted is not None:
            wait_for_all(channel, name, wanted, connections)
        total = time.perf_counter() - began
        times = [node.took[name] for node in nodes]
        print(
            f"{name:<13}: {total * 1e3:11.2f}{max(times) * 1e3:11.2f}{min(times) * 1e6:11.2f}"
            f"{total * 1e6 / connections:11.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time each step of many connections.")
    parser.add_argument("-s", dest="server", help="connect to the server at this address")
    parser.add_argument("-b", dest="address", default="0.0.0.0", help="the server's address to listen on (any)")
    parser.add_argument("-p", dest="port", type=int, default=7471, help="port of the server (%(default)s)")
    parser.add_argument("-c", dest="connections", type=int, default=100, help="connections (%(default)s)")
    options = parser.parse_args()
    events = rdma_create_event_channel()
    if options.server is None:
        serve(events, options.address, options.port, options.connections)
    else:
        connect(events, (options.server, options.port), options.connections)
    rdma_destroy_event_channel(events)
