"""Sockets over RDMA, rsocket(7): streams of bytes and datagrams with the methods of Python's sockets.

They speak the protocol of librdmacm's rsockets, so either end may be a program that uses those. This page lists the
public names:

    socket              as of the module socket
    create_connection, create_server
                        sockets that are connected, or listen
    poll, select        wait for rsockets, ordinary sockets and descriptors
    Selector            the same, as of the module selectors
    FileLike, HasFileno
                        what they wait for
    query_faults        how often peers have broken the protocol
    SOL_RDMA            the level of the options below, <rdma/rsocket.h>
    RDMA_SQSIZE, RDMA_RQSIZE, RDMA_INLINE, RDMA_IOMAPSIZE, RDMA_ROUTE
                        sizes of queues, inline data and mappings, and paths

docs/rsocket.md is the guide. The other modules of this package are internal.
"""

# "X as X" exports a name to type checkers. Without __all__, help() shows the list above instead of every class.
from rdmacm.rsocket.creating import create_connection as create_connection
from rdmacm.rsocket.creating import create_server as create_server
from rdmacm.rsocket.creating import query_faults as query_faults

# Its import gives the class socket the type SOCK_DGRAM.
from rdmacm.rsocket.datagram_socket import DatagramSocket as _DatagramSocket  # noqa: F401
from rdmacm.rsocket.options import RDMA_INLINE as RDMA_INLINE
from rdmacm.rsocket.options import RDMA_IOMAPSIZE as RDMA_IOMAPSIZE
from rdmacm.rsocket.options import RDMA_ROUTE as RDMA_ROUTE
from rdmacm.rsocket.options import RDMA_RQSIZE as RDMA_RQSIZE
from rdmacm.rsocket.options import RDMA_SQSIZE as RDMA_SQSIZE
from rdmacm.rsocket.options import SOL_RDMA as SOL_RDMA
from rdmacm.rsocket.polling import FileLike as FileLike
from rdmacm.rsocket.polling import HasFileno as HasFileno
from rdmacm.rsocket.polling import Selector as Selector
from rdmacm.rsocket.polling import poll as poll
from rdmacm.rsocket.polling import select as select
from rdmacm.rsocket.sockets import socket as socket
