"""Four ranks of MPI: messages between two, collective operations, and one-sided ones."""

from array import array

import mpi4py

mpi4py.rc.threads = False  # some of Open MPI's components do not take several
from mpi4py import MPI  # noqa: E402

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
for length in (8, 4096, 1 << 20):
    sent, received = bytes([rank + 1]) * length, bytearray(length)
    for _ in range(5):
        if rank == 0:
            comm.Send(sent, 1)
            comm.Recv(received, 1)
        elif rank == 1:
            comm.Recv(received, 0)
            comm.Send(sent, 0)
    assert rank > 1 or received == bytes([2 - rank]) * length
assert comm.alltoall([rank * 100 + other for other in range(size)]) == [other * 100 + rank for other in range(size)]
total = array("d", bytes(400_000))
comm.Allreduce(array("d", [rank]) * 50_000, total)
assert total == array("d", [sum(range(size))]) * 50_000
window = MPI.Win.Create(total, 8, comm=comm)
window.Fence()
window.Put(array("d", [rank + 0.5]), (rank + 1) % size)
window.Fence()
assert total[0] == (rank - 1) % size + 0.5
window.Free()
comm.Barrier()
if rank == 0:
    print("done", flush=True)
