"""librdmacm's example rdma_client, line by line: send one message, receive the reply, disconnect.

    python3 examples/rdma_client.py [-s ADDRESS] [-p PORT]

The server is ``rdma_server.py``, or librdmacm's ``rdma_server``.
"""

from __future__ import annotations

import argparse

from rdmacm import AddrInfo
from rdmacm.cma import (
    IBV_SEND_INLINE,
    RDMA_PS_TCP,
    rdma_connect,
    rdma_create_ep,
    rdma_dereg_mr,
    rdma_destroy_ep,
    rdma_disconnect,
    rdma_freeaddrinfo,
    rdma_get_recv_comp,
    rdma_get_send_comp,
    rdma_getaddrinfo,
    rdma_post_recv,
    rdma_post_send,
    rdma_reg_msgs,
)
from rdmacm.verbs import QPCap, QPInitAttr

SIZE = 16


def run(server: str, port: str) -> None:
    """Send a message to a server, and receive its reply."""
    send_msg, recv_msg = bytearray(SIZE), bytearray(SIZE)
    res = rdma_getaddrinfo(server, port, AddrInfo(port_space=RDMA_PS_TCP))
    attr = QPInitAttr(cap=QPCap(max_send_wr=1, max_recv_wr=1, max_inline_data=SIZE), sq_sig_all=True)
    id = rdma_create_ep(res, None, attr)
    rdma_freeaddrinfo(res)
    send_flags = IBV_SEND_INLINE if id.qp.cap.max_inline_data >= SIZE else 0
    recv_mr = rdma_reg_msgs(id, recv_msg, SIZE)
    send_mr = None if send_flags else rdma_reg_msgs(id, send_msg, SIZE)
    rdma_post_recv(id, None, recv_msg, SIZE, recv_mr)
    rdma_connect(id, None)
    rdma_post_send(id, None, send_msg, SIZE, send_mr, send_flags)
    rdma_get_send_comp(id)
    rdma_get_recv_comp(id)

    rdma_disconnect(id)
    rdma_destroy_ep(id)
    rdma_dereg_mr(recv_mr)
    if send_mr is not None:
        rdma_dereg_mr(send_mr)
    print("rdma_client: end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Send one message over RDMA and receive the reply.")
    parser.add_argument("-s", dest="server", default="127.0.0.1", help="address of the server (%(default)s)")
    parser.add_argument("-p", dest="port", default="7471", help="port of the server (%(default)s)")
    options = parser.parse_args()
    run(options.server, options.port)
