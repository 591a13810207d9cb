"""The flow of librdmacm's rping, with rdmacm.cma alone: ping-pong by RDMA READ and RDMA WRITE.

    python3 examples/rping.py -s [-a ADDRESS] [-p PORT] [-S SIZE] [-v]
    python3 examples/rping.py -c [-a ADDRESS] [-p PORT] [-S SIZE] [-v] [-C COUNT]

The peer may be librdmacm's ``rping``. In each ping the client advertises a buffer, which the server reads; then it
advertises another, to which the server writes what it read. The C program has a thread for events and one for
completions; here a second thread waits for the peer to disconnect.
"""

from __future__ import annotations

import argparse
import struct
import threading

from rdmacm.cma import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_QPT_RC,
    IBV_SEND_SIGNALED,
    IBV_WC_RDMA_READ,
    IBV_WC_RDMA_WRITE,
    IBV_WC_RECV,
    IBV_WC_SEND,
    IBV_WC_SUCCESS,
    IBV_WC_WR_FLUSH_ERR,
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE,
    IBV_WR_SEND,
    RDMA_CM_EVENT_ADDR_RESOLVED,
    RDMA_CM_EVENT_CONNECT_REQUEST,
    RDMA_CM_EVENT_DISCONNECTED,
    RDMA_CM_EVENT_ESTABLISHED,
    RDMA_CM_EVENT_ROUTE_RESOLVED,
    RDMA_PS_TCP,
    ibv_ack_cq_events,
    ibv_alloc_pd,
    ibv_create_comp_channel,
    ibv_create_cq,
    ibv_dealloc_pd,
    ibv_dereg_mr,
    ibv_destroy_comp_channel,
    ibv_destroy_cq,
    ibv_get_cq_event,
    ibv_poll_cq,
    ibv_post_recv,
    ibv_post_send,
    ibv_qp_init_attr,
    ibv_recv_wr,
    ibv_reg_mr,
    ibv_req_notify_cq,
    ibv_send_wr,
    ibv_sge,
    ibv_wc_status_str,
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

#: A message: address, rkey and size of a buffer. The server's go-ahead has the same form.
INFO = struct.Struct("!QII")


class Disconnected(Exception):
    """The peer has ended the connection."""


def wait_for_event(channel: rdma_event_channel, wanted: int) -> rdma_cm_id:
    """The id of the next event, which has to be of the type ``wanted``."""
    event = rdma_get_cm_event(channel)
    found, status, id = event.event, event.status, event.id
    rdma_ack_cm_event(event)
    if found != wanted:
        raise SystemExit(f"rping: {rdma_event_str(found)}, status {status}")
    return id


class Endpoint:
    """The queue pair and the buffers of one end, ``struct rping_cb`` in C."""

    def __init__(self, id: rdma_cm_id, size: int) -> None:
        self.id = id
        self.pd = ibv_alloc_pd(id.verbs)
        self.channel = ibv_create_comp_channel(id.verbs)
        self.cq = ibv_create_cq(id.verbs, 32, None, self.channel, 0)
        ibv_req_notify_cq(self.cq, 0)
        self.completed: list[int] = []
        self.has_disconnected = False

        init_attr = ibv_qp_init_attr()
        init_attr.cap.max_send_wr = 16
        init_attr.cap.max_recv_wr = 2
        init_attr.cap.max_send_sge = 1
        init_attr.cap.max_recv_sge = 1
        init_attr.qp_type = IBV_QPT_RC
        init_attr.send_cq = self.cq
        init_attr.recv_cq = self.cq
        rdma_create_qp(id, self.pd, init_attr)
        self.qp = id.qp

        remote = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
        self.send_buf, self.recv_buf = bytearray(INFO.size), bytearray(INFO.size)
        self.start_buf, self.rdma_buf = bytearray(size), bytearray(size)
        self.send_mr = ibv_reg_mr(self.pd, self.send_buf, INFO.size, 0)
        self.recv_mr = ibv_reg_mr(self.pd, self.recv_buf, INFO.size, IBV_ACCESS_LOCAL_WRITE)
        self.start_mr = ibv_reg_mr(self.pd, self.start_buf, size, remote)
        self.rdma_mr = ibv_reg_mr(self.pd, self.rdma_buf, size, remote)
        self.post_recv()

    def post_recv(self) -> None:
        ibv_post_recv(self.qp, ibv_recv_wr(sg_list=[ibv_sge(self.recv_mr.addr, INFO.size, self.recv_mr.lkey)]))

    def wait_for(self, opcode: int) -> None:
        """Wait for the completion of a request."""
        while opcode not in self.completed:
            completions = ibv_poll_cq(self.cq, 8)
            if not completions:
                cq, _ = ibv_get_cq_event(self.channel)
                ibv_ack_cq_events(cq, 1)
                ibv_req_notify_cq(cq, 0)
            for wc in completions:
                if wc.status == IBV_WC_WR_FLUSH_ERR:
                    raise Disconnected
                if wc.status != IBV_WC_SUCCESS:
                    raise SystemExit(f"rping: {ibv_wc_status_str(wc.status)}")
                self.completed.append(wc.opcode)
        self.completed.remove(opcode)

    def send(self, addr: int, rkey: int, size: int) -> None:
        """Send a message."""
        INFO.pack_into(self.send_buf, 0, addr, rkey, size)
        wr = ibv_send_wr()
        wr.opcode = IBV_WR_SEND
        wr.send_flags = IBV_SEND_SIGNALED
        wr.sg_list = [ibv_sge(self.send_mr.addr, INFO.size, self.send_mr.lkey)]
        ibv_post_send(self.qp, wr)
        self.wait_for(IBV_WC_SEND)

    def recv(self) -> tuple[int, int, int]:
        """The next message."""
        self.wait_for(IBV_WC_RECV)
        addr, rkey, size = INFO.unpack(self.recv_buf)
        self.post_recv()
        return addr, rkey, size

    def read(self, addr: int, rkey: int, size: int) -> bytes:
        """Read the peer's buffer."""
        wr = ibv_send_wr()
        wr.opcode = IBV_WR_RDMA_READ
        wr.send_flags = IBV_SEND_SIGNALED
        wr.wr.rdma.remote_addr = addr
        wr.wr.rdma.rkey = rkey
        wr.sg_list = [ibv_sge(self.rdma_mr.addr, size, self.rdma_mr.lkey)]
        ibv_post_send(self.qp, wr)
        self.wait_for(IBV_WC_RDMA_READ)
        return bytes(self.rdma_buf[:size])

    def write(self, addr: int, rkey: int, size: int) -> None:
        """Write what was read to the peer's buffer."""
        wr = ibv_send_wr()
        wr.opcode = IBV_WR_RDMA_WRITE
        wr.send_flags = IBV_SEND_SIGNALED
        wr.wr.rdma.remote_addr = addr
        wr.wr.rdma.rkey = rkey
        wr.sg_list = [ibv_sge(self.rdma_mr.addr, size, self.rdma_mr.lkey)]
        ibv_post_send(self.qp, wr)
        self.wait_for(IBV_WC_RDMA_WRITE)

    def watch(self, channel: rdma_event_channel) -> None:
        """Disconnect when the peer does, in a thread: what is posted completes with IBV_WC_WR_FLUSH_ERR."""

        def answer() -> None:
            wait_for_event(channel, RDMA_CM_EVENT_DISCONNECTED)
            if not self.has_disconnected:
                rdma_disconnect(self.id)

        self.thread = threading.Thread(target=answer, daemon=True)  # so that an error ends the process
        self.thread.start()

    def free(self) -> None:
        rdma_destroy_qp(self.id)
        for mr in (self.send_mr, self.recv_mr, self.start_mr, self.rdma_mr):
            ibv_dereg_mr(mr)
        ibv_destroy_cq(self.cq)
        ibv_destroy_comp_channel(self.channel)
        ibv_dealloc_pd(self.pd)
        rdma_destroy_id(self.id)


def connection_parameters() -> rdma_conn_param:
    conn_param = rdma_conn_param()
    conn_param.responder_resources = 1
    conn_param.initiator_depth = 1
    conn_param.retry_count = 7
    conn_param.rnr_retry_count = 7
    return conn_param


def text(data: bytes | bytearray) -> str:
    return data.partition(b"\0")[0].decode("latin-1")


def serve(channel: rdma_event_channel, address: str, port: int, size: int, verbose: bool) -> None:
    """Serve one client until it disconnects."""
    listen_id = rdma_create_id(channel, None, RDMA_PS_TCP)
    rdma_bind_addr(listen_id, (address, port))
    rdma_listen(listen_id, 3)
    print(f"rping: listening on port {rdma_get_src_port(listen_id)}", flush=True)

    id = wait_for_event(channel, RDMA_CM_EVENT_CONNECT_REQUEST)
    end = Endpoint(id, size)
    rdma_accept(id, connection_parameters())
    wait_for_event(channel, RDMA_CM_EVENT_ESTABLISHED)
    end.watch(channel)
    try:
        while True:
            data = end.read(*end.recv())
            if verbose:
                print(f"server ping data: {text(data)}")
            end.send(0, 0, 0)
            addr, rkey, _ = end.recv()
            end.write(addr, rkey, len(text(data)) + 1)
            end.send(0, 0, 0)
    except Disconnected:
        pass
    end.thread.join()
    end.free()
    rdma_destroy_id(listen_id)


def ping(channel: rdma_event_channel, address: str, port: int, size: int, verbose: bool, count: int) -> None:
    """Ping a server ``count`` times."""
    id = rdma_create_id(channel, None, RDMA_PS_TCP)
    rdma_resolve_addr(id, None, (address, port), 2000)
    wait_for_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED)
    rdma_resolve_route(id, 2000)
    wait_for_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED)
    end = Endpoint(id, size)
    rdma_connect(id, connection_parameters())
    wait_for_event(channel, RDMA_CM_EVENT_ESTABLISHED)

    end.watch(channel)
    try:
        for number in range(count):
            head = b"rdma-ping-%d: " % number
            end.start_buf[:] = (head + bytes(65 + (number + at) % 58 for at in range(size)))[: size - 1] + b"\0"
            end.send(end.start_mr.addr, end.start_mr.rkey, size)
            end.recv()
            end.send(end.rdma_mr.addr, end.rdma_mr.rkey, size)
            end.recv()
            if end.rdma_buf != end.start_buf:
                raise SystemExit("rping: data mismatch")
            if verbose:
                print(f"ping data: {text(end.rdma_buf)}")
    except Disconnected:
        raise SystemExit("rping: the server has disconnected") from None

    end.has_disconnected = True
    rdma_disconnect(id)
    end.thread.join()
    end.free()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ping-pong by RDMA READ and RDMA WRITE.")
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("-s", action="store_true", dest="server", help="be the server")
    role.add_argument("-c", action="store_true", dest="client", help="be the client")
    parser.add_argument("-a", dest="address", help="address of the server (127.0.0.1; a server's: any)")
    parser.add_argument("-p", dest="port", type=int, default=7174, help="port of the server (%(default)s)")
    parser.add_argument("-S", dest="size", type=int, default=64, help="bytes of a ping, 26 or more (%(default)s)")
    parser.add_argument("-C", dest="count", type=int, default=10, help="number of pings (%(default)s)")
    parser.add_argument("-v", dest="verbose", action="store_true", help="print the data")
    options = parser.parse_args()
    events = rdma_create_event_channel()
    if options.server:
        serve(events, options.address or "0.0.0.0", options.port, options.size, options.verbose)
    else:
        ping(events, options.address or "127.0.0.1", options.port, options.size, options.verbose, options.count)
    rdma_destroy_event_channel(events)
