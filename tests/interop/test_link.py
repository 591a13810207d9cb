"""Links that lose, double and reorder packets, and links with larger packets."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from interop.batches import HEADERS, Batch, Batches
from interop.judge import RNR, SEQUENCE
from interop.machine.run import Result
from interop.operations import OPERATIONS
from interop.scenario import Guest

OURS = "python3 -m rdmacm rping"
#: Operations that come to the same whatever is lost (after an error it may be the NAK, which is not sent twice), with
#: packets of every kind.  Others like them would take minutes more.
SURE = (
    "send",
    "write_with_immediate",
    "read",
    "fetch_and_add",
    "many_outstanding",
    "more_reads_than_resources",
    "late_receive",
)
ROW = "links that lose 2 and 10 % of the packets, double or reorder them"
#: What happens to packets, in tc-netem(8)'s words, for each direction.
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
    # -V has compared the data; their lines come in pieces here, with those of the other program in between.
    for said in ("", "server "):
        assert re.findall(rf"^{said}ping data: rdma-ping-(\d)", done.output, re.MULTILINE) == [*"01234"], done.output


def until_told(guest: Guest, script: str) -> Result:
    """The result of a run whose server has heard that it was the end.

    Who says so goes at once, and so does not ask again where that is lost; then the server waits for ever.
    """
    return guest.run_again(script, "the server does not end", 300, naks=RNR | SEQUENCE)


def failures(batch: Batch) -> list[str]:
    parts = {operation.name: operation.parts for operation in OPERATIONS}
    found = (batch.failure(name, part) for name in SURE for part in parts[name])
    return [failure for failure in found if failure is not None]


class TestImpaired:
    @pytest.mark.cell(ROW, "passive")
    def test_client_of_librdmacm(self, guest: Guest, impairment: str) -> None:
        done = until_told(
            guest,
            f"serve_soft {OURS} -s -a $SOFT6 -S 20000 -C 5 -v -V\n"
            # Its status says nothing: its threads race for the event channel when they end.
            "rxe rping -c -a $SOFT6 -S 20000 -C 5 -v -V\n"
            "finish",
        )
        check_pings(done)

    @pytest.mark.cell(ROW, "active")
    def test_server_of_librdmacm(self, guest: Guest, impairment: str) -> None:
        done = until_told(
            guest,
            "serve_rxe rping -s -a $RXE4 -S 20000 -C 5 -v -V\n"
            f"soft {OURS} -c -a $RXE4 -S 20000 -C 5 -v -V || exit\n"
            "finish",
        )
        check_pings(done)

    @pytest.mark.cell(ROW, "both")
    # With the others, or with every tenth lost, so many connections would take minutes.
    @pytest.mark.parametrize("impairment", ["2 % are lost"], indirect=True)
    @pytest.mark.parametrize(("listens", "family"), [("rxe", 4), ("soft", 6)])
    def test_operations(self, guest: Guest, batches: Batches, impairment: str, listens: str, family: int) -> None:
        batch = batches.get(guest, family=family, listens=listens, only=SURE, link=impairment, naks=RNR | SEQUENCE)
        assert failures(batch) == []


@pytest.mark.cell("path MTU 2048 and 4096", "both")
@pytest.mark.parametrize(
    ("mtu", "listens", "family"), [(2048, "rxe", 4), (2048, "soft", 6), (4096, "rxe", 6), (4096, "soft", 4)]
)
def test_larger_packets(guest: Guest, batches: Batches, mtu: int, listens: str, family: int) -> None:
    batch = batches.get(guest, family=family, listens=listens, mtu=mtu, only=SURE, naks=RNR)
    assert failures(batch) == []
