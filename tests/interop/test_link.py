"""Links that lose, duplicate and reorder packets, and links with larger packets."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from interop.batches import HEADERS, Batch, Batches
from interop.judge import REFUSAL, RNR, SEQUENCE
from interop.machine.run import Result
from interop.operations import OPERATIONS
from interop.scenario import ATTEMPTS, Guest, require_kernel

OURS = "python3 -m rdmacm rping"
#: Operations with packets of every kind whose result does not depend on which packets are lost. (The NAK of an error
#: is sent once and may be lost.)
RELIABLE = (
    "send",
    "write_with_immediate",
    "read",
    "fetch_and_add",
    "many_outstanding",
    "more_reads_than_resources",
    "late_receive",
)
ROW = "links that lose 2 and 10 % of the packets, duplicate or reorder them"
#: Impairments of each direction, as arguments of tc-netem(8).
IMPAIRMENTS = {
    "2 % are lost": "loss 2%",
    "10 % are lost": "loss 10%",
    "5 % overtake others": "delay 1ms reorder 5%",
    "20 % come twice": "duplicate 20%",
}


@pytest.fixture(params=IMPAIRMENTS)
def impairment(guest: Guest, request: pytest.FixtureRequest) -> Iterator[str]:
    row: str = request.param
    guest.network = f"network {1024 + HEADERS} && impair {IMPAIRMENTS[row]}"
    yield row
    guest.machine.run("unimpaired")


def check_pings(done: Result) -> None:
    assert done.status == 0, done.output
    # -V compares the data. Here its lines are mixed with those of the other program.
    for said in ("", "server "):
        assert re.findall(rf"^{said}ping data: rdma-ping-(\d)", done.output, re.MULTILINE) == [*"01234"], done.output


def until_disconnected(guest: Guest, script: str) -> Result:
    """The result of a run whose server received the client's DREQ.

    The client exits after it has sent the DREQ, so it does not send a lost one again, and the server waits for ever. If
    the ACK of the server's last message is lost too, the server finds that nobody answers. Each is one of the test's
    chances: the script runs again, :data:`ATTEMPTS` times in all, and the test fails if the last run has it too.
    """
    chances = ("the server does not end", "the peer no longer answers")
    return guest.run_again(script, chances, 300, naks=RNR | SEQUENCE)


def failures(batch: Batch) -> list[str]:
    parts = {operation.name: operation.parts for operation in OPERATIONS}
    found = (batch.failure(name, part) for name in RELIABLE for part in parts[name])
    return [failure for failure in found if failure is not None]


class TestImpairedLink:
    @pytest.mark.cell(ROW, "passive")
    def test_librdmacms_client_pings_our_server(self, guest: Guest, impairment: str) -> None:
        done = until_disconnected(
            guest,
            f"serve_soft {OURS} -s -a $SOFT6 -S 20000 -C 5 -v -V\nrxe rping -c -a $SOFT6 -S 20000 -C 5 -v -V\nfinish",
        )
        check_pings(done)

    @pytest.mark.cell(ROW, "active")
    def test_our_client_pings_librdmacms_server(self, guest: Guest, impairment: str) -> None:
        # rdma_rxe waits 2 s before it sends again: five losses in a row of one packet exceed the usual limit.
        done = until_disconnected(
            guest,
            "serve_rxe rping -s -a $RXE4 -S 20000 -C 5 -v -V\n"
            f"soft {OURS} -c --timeout 60 -a $RXE4 -S 20000 -C 5 -v -V || exit\n"
            "finish_rping",
        )
        check_pings(done)

    @pytest.mark.cell(ROW, "both")
    # So many connections take minutes where more packets are lost.
    @pytest.mark.parametrize("impairment", ["2 % are lost"], indirect=True)
    @pytest.mark.parametrize(("listens", "family"), [("rxe", 4), ("soft", 6)])
    def test_operations_succeed(
        self, guest: Guest, batches: Batches, impairment: str, listens: str, family: int
    ) -> None:
        found = []
        # About once in ten batches a READ from rdma_rxe runs out of retries; why is not known.
        for attempt in range(ATTEMPTS):
            batch = batches.get(
                guest,
                family=family,
                listens=listens,
                only=RELIABLE,
                link=impairment,
                naks=RNR | SEQUENCE,
                attempt=attempt,
            )
            found = failures(batch)
            if "RETRY_EXC_ERR" not in batch.result.output:
                break
        assert found == []

    @pytest.mark.cell(ROW, "active")
    @pytest.mark.parametrize("impairment", ["2 % are lost"], indirect=True)
    @pytest.mark.parametrize("family", [4, 6])
    def test_our_flushes_and_atomic_writes_succeed(
        self, guest: Guest, batches: Batches, impairment: str, family: int
    ) -> None:
        """Ours only: rdma_rxe repeats such a request with the address 0, so that of the peer is refused."""
        require_kernel(guest, (6, 2))
        names = ("flush", "atomic_write", "flush_and_atomic_write")
        naks = RNR | SEQUENCE | REFUSAL
        batch = batches.get(guest, family=family, listens="rxe", only=names, link=impairment, naks=naks)
        faults = [batch.failure(name, "request") for name in names]
        assert [fault for fault in faults if fault is not None and "our end" in fault] == []


@pytest.mark.cell("unreliable connections on a link that loses 10 % of the packets", "both")
@pytest.mark.parametrize("impairment", ["10 % are lost"], indirect=True)
@pytest.mark.parametrize(("listens", "family"), [("rxe", 4), ("soft", 4), ("rxe", 6), ("soft", 6)])
def test_loss_drops_messages_of_an_unreliable_connection(
    guest: Guest, batches: Batches, impairment: str, listens: str, family: int
) -> None:
    batch = batches.get(guest, family=family, listens=listens, only=("uc_loss",), link=impairment)
    assert [batch.failure("uc_loss", part) for part in ("request", "respond")] == [None, None]


@pytest.mark.cell("path MTU 2048 and 4096", "both")
@pytest.mark.parametrize(
    ("mtu", "listens", "family"), [(2048, "rxe", 4), (2048, "soft", 6), (4096, "rxe", 6), (4096, "soft", 4)]
)
def test_operations_succeed_with_larger_packets(
    guest: Guest, batches: Batches, mtu: int, listens: str, family: int
) -> None:
    batch = batches.get(guest, family=family, listens=listens, mtu=mtu, only=RELIABLE, naks=RNR)
    assert failures(batch) == []
