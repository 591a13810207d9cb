"""librdmacm's example rdma_xserver, line by line: receive one message over a reliable connection.

    python3 examples/rdma_xserver.py [-s ADDRESS] [-p PORT]

The client is ``rdma_xclient.py``, or librdmacm's ``rdma_xclient -c r``. As in C, the private data of the accept are
four bytes, the number of an XRC shared receive queue; it is 0, as there is none.
"""

from __future__ import annotations

import argparse

from rdmacm import AddrInfo, ConnParam
from rdmacm.cma import (
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
    rdma_getaddrinfo,
    rdma_listen,
    rdma_post_recv,
    rdma_reg_msgs,
)
from rdmacm.verbs import QPCap, QPInitAttr

SIZE = 16


def run(server: str, port: str) -> None:
    """Serve one client."""
    recv_msg = bytearray(SIZE)
    res = rdma_getaddrinfo(server, port, AddrInfo(flags=RAI_PASSIVE, port_space=RDMA_PS_TCP))
    attr = QPInitAttr(cap=QPCap(max_send_wr=1, max_recv_wr=1), sq_sig_all=True)
    listen_id = rdma_create_ep(res, None, attr)
    rdma_freeaddrinfo(res)
    rdma_listen(listen_id, 0)
    print(f"rdma_xserver: listening on port {listen_id.src_port}", flush=True)

    id = rdma_get_request(listen_id)
    recv_mr = rdma_reg_msgs(id, recv_msg, SIZE)
    rdma_post_recv(id, None, recv_msg, SIZE, recv_mr)
    rdma_accept(id, ConnParam(private_data=bytes(4)))
    rdma_get_recv_comp(id)

    rdma_disconnect(id)
    rdma_destroy_ep(id)
    rdma_dereg_mr(recv_mr)
    rdma_destroy_ep(listen_id)
    print("rdma_xserver: end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Receive one message over RDMA.")
    parser.add_argument("-s", dest="server", default="0.0.0.0", help="address to listen on (%(default)s)")
    parser.add_argument("-p", dest="port", default="7471", help="port to listen on, 0 for a free one (%(default)s)")
    options = parser.parse_args()
    run(options.server, options.port)
