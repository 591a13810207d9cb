"""All pairs in a program of MPI, with ranks that are threads."""

from __future__ import annotations

import errno
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rdmacm.check.pairs import Node, Pair
from rdmacm.check.ranks import check_ranks, world
from rdmacm.errors import RdmaError, cm_error

NODES = [Node("a", "10.0.0.1"), Node("b", "10.0.0.2"), Node("c", "10.0.0.3")]


class Ranks:
    """What all ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meeting = threading.Barrier(size)
        self.given: dict[int, Any] = {}


class Rank:
    """A communicator."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self.rank, self.size = rank, ranks.size

    def allgather(self, sendobj: Any) -> list[Any]:
        self._ranks.given[self.rank] = sendobj
        self.barrier()
        found = [self._ranks.given[each] for each in range(self.size)]
        self.barrier()
        return found

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        found = self.allgather(sendobj)
        return found if self.rank == root else None

    def barrier(self) -> None:
        self._ranks.meeting.wait(60)


def found(node: Node, failed: str = "") -> dict[str, object]:
    """The data of a check."""
    steps = [{"step": "neighbour", "meaning": "it is silent"}, {"step": "loss", "rtt_min_us": 7.5}]
    return {"host": node.address, "failed": failed or None, "steps": steps}


def test_each_rank_checks_all_others() -> None:
    asked: dict[int, list[tuple[str, int]]] = {rank: [] for rank in range(3)}

    def run(rank: int) -> list[Pair] | None:
        def check(node: Node, port: int) -> dict[str, object]:
            asked[rank].append((node.name, port))
            if rank == 1 and node.name == "a":
                raise cm_error(errno.ENODEV, "no device", "open_device", "soft_va")
            return found(node, "neighbour" if node.name == "c" else "")

        return check_ranks(Rank(ranks, rank), NODES, lambda: 100 + rank, check)

    ranks = Ranks(3)
    with ThreadPoolExecutor(3) as pool:
        pairs, *others = pool.map(run, range(3))
    assert others == [None, None]
    assert asked == {0: [("b", 101), ("c", 102)], 1: [("c", 102), ("a", 100)], 2: [("a", 100), ("b", 101)]}
    assert pairs is not None
    by_ends = {(pair.source, pair.destination): pair for pair in pairs}
    assert len(pairs) == len(by_ends) == 6
    assert by_ends["a", "b"] == Pair("a", "b", True, 7.5)
    assert by_ends["b", "c"] == Pair("b", "c", False, 7.5, "neighbour", "it is silent")
    assert (by_ends["b", "a"].step, "no device" in by_ends["b", "a"].meaning) == ("start", True)


def test_ranks_and_hosts_differ() -> None:
    with pytest.raises(RdmaError, match="2 ranks, and the file has 3 hosts") as caught:
        check_ranks(Rank(Ranks(2), 0), NODES, lambda: 1, lambda node, _: found(node))
    assert "mpirun -n 3" in str(caught.value)


def test_mpi4py_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RdmaError, match=r"mpi4py cannot be used.*rdmacm\[mpi\]"):
        world()
