"""librdmacm's example rdma_xclient, line by line: send one message over a reliable connection.

    python3 examples/rdma_xclient.py [-s ADDRESS] [-p PORT]

The server is ``rdma_xserver.py``, or librdmacm's ``rdma_xserver -c r``.
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
    rdma_get_send_comp,
    rdma_getaddrinfo,
    rdma_post_send,
    rdma_reg_msgs,
)
from rdmacm.verbs import QPCap, QPInitAttr

SIZE = 16


def run(server: str, port: str) -> None:
    """Send a message to a server."""
    send_msg = bytearray(SIZE)
    res = rdma_getaddrinfo(server, port, AddrInfo(port_space=RDMA_PS_TCP))
    attr = QPInitAttr(cap=QPCap(max_send_wr=1, max_recv_wr=1, max_inline_data=SIZE), sq_sig_all=True)
    id = rdma_create_ep(res, None, attr)
    rdma_freeaddrinfo(res)
    send_mr = rdma_reg_msgs(id, send_msg, SIZE)
    rdma_connect(id, None)
    rdma_post_send(id, None, send_msg, SIZE, send_mr, IBV_SEND_INLINE)
    rdma_get_send_comp(id)

    rdma_disconnect(id)
    rdma_destroy_ep(id)
    rdma_dereg_mr(send_mr)
    print("rdma_xclient: end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Send one message over RDMA.")
    parser.add_argument("-s", dest="server", default="127.0.0.1", help="address of the server (%(default)s)")
    parser.add_argument("-p", dest="port", default="7471", help="port of the server (%(default)s)")
    options = parser.parse_args()
    run(options.server, options.port)
