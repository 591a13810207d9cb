"""librdmacm's example rdma_server, line by line: accept one connection, receive one message, reply, disconnect.

    python3 examples/rdma_server.py [-s ADDRESS] [-p PORT]

The client is ``rdma_client.py``, or librdmacm's ``rdma_client``.
"""

from __future__ import annotations

import argparse

from rdmacm import AddrInfo
from rdmacm.cma import (
    IBV_SEND_INLINE,
    RAI_PASSIVE,
    RDMA_PS_TCP,
    rdma_accept,
    rdma_create_ep,
    rdma_dereg_mr,
    rdma_destroy_ep,
    rdma_disconnect,
    rdma_freeaddrinfo,
    rdma_get_recv_comp,
    rdma_get_request,
    rdma_get_send_comp,
    rdma_getaddrinfo,
    rdma_listen,
    rdma_post_recv,
    rdma_post_send,
    rdma_reg_msgs,
)
from rdmacm.verbs import QPCap, QPInitAttr

SIZE = 16


def run(server: str, port: str) -> None:
    """Serve one client."""
    send_msg, recv_msg = bytearray(SIZE), bytearray(SIZE)
    res = rdma_getaddrinfo(server, port, AddrInfo(flags=RAI_PASSIVE, port_space=RDMA_PS_TCP))
    attr = QPInitAttr(cap=QPCap(max_send_wr=1, max_recv_wr=1, max_inline_data=SIZE), sq_sig_all=True)
    listen_id = rdma_create_ep(res, None, attr)
    rdma_freeaddrinfo(res)
    rdma_listen(listen_id, 0)
    print(f"rdma_server: listening on port {listen_id.src_port}", flush=True)

    id = rdma_get_request(listen_id)
    send_flags = IBV_SEND_INLINE if id.qp.cap.max_inline_data >= SIZE else 0
    recv_mr = rdma_reg_msgs(id, recv_msg, SIZE)
    send_mr = None if send_flags else rdma_reg_msgs(id, send_msg, SIZE)
    rdma_post_recv(id, None, recv_msg, SIZE, recv_mr)
    rdma_accept(id, None)
    rdma_get_recv_comp(id)
    rdma_post_send(id, None, send_msg, SIZE, send_mr, send_flags)
    rdma_get_send_comp(id)

    rdma_disconnect(id)
    rdma_destroy_ep(id)
    if send_mr is not None:
        rdma_dereg_mr(send_mr)
    rdma_dereg_mr(recv_mr)
    rdma_destroy_ep(listen_id)
    print("rdma_server: end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Receive one message over RDMA and reply.")
    parser.add_argument("-s", dest="server", default="0.0.0.0", help="address to listen on (%(default)s)")
    parser.add_argument("-p", dest="port", default="7471", help="port to listen on, 0 for a free one (%(default)s)")
    options = parser.parse_args()
    run(options.server, options.port)
