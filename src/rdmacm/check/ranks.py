"""Every pair of a cluster, in a program of MPI: each rank is at a host, helps the others, and checks the ways to them.

mpirun has started the processes, so that no login at the hosts is needed. Rank 0 is at the first host of the file, and
so on.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Protocol

from rdmacm.check.pairs import NOT_STARTED, Node, Pair, pair_of
from rdmacm.errors import RdmaError, cm_error, printable


class Communicator(Protocol):
    """What is used of ``mpi4py.MPI.Comm``."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def allgather(self, sendobj: int) -> list[int]: ...
    def gather(self, sendobj: list[Pair], root: int = 0) -> list[list[Pair]] | None: ...
    def barrier(self) -> None: ...


def world() -> Communicator:
    """All ranks. ENOENT: mpi4py, or the library that it needs, is not installed."""
    try:
        import_module("mpi4py").rc.thread_level = "funneled"
        comm: Communicator = import_module("mpi4py.MPI").COMM_WORLD
    except (ImportError, RuntimeError) as error:
        text = f"mpi4py cannot be used: {error}"
        raise cm_error(errno.ENOENT, text, "launch", "mpi", "pip install 'rdmacm[mpi]' and an MPI") from None
    return comm


def check_ranks(
    comm: Communicator,
    nodes: list[Node],
    serve: Callable[[], int],
    check: Callable[[Node, int], Mapping[str, object]],
) -> list[Pair] | None:
    """Check from this rank's host to all others; returns all pairs at rank 0, and None elsewhere.

    ``serve`` begins to help, and returns the TCP port, 0 if that is not possible. ``check(node, port)`` checks the way
    to a host, and returns the JSON data. EINVAL: there are not as many ranks as hosts.
    """
    if comm.size != len(nodes):
        text = f"{comm.size} ranks, and the file has {len(nodes)} hosts"
        raise cm_error(errno.EINVAL, text, "launch", "mpi", f"mpirun -n {len(nodes)} --map-by node")
    own = nodes[comm.rank]
    ports = comm.allgather(serve())
    pairs = []
    # Each begins with another one, so that a host is not checked by all at once.
    for at in (*range(comm.rank + 1, comm.size), *range(comm.rank)):
        other = nodes[at]
        try:
            pair = pair_of(own, check(other, ports[at]), {other.address: other})
        except RdmaError as error:
            pair = Pair(own.name, other.name, False, None, NOT_STARTED, printable(str(error)))
        pairs += [pair] if pair is not None else []
    rows = comm.gather(pairs)
    comm.barrier()  # until then, this rank helps
    return None if rows is None else [pair for row in rows for pair in row]
