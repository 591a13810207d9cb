"""Which requests are processed when more arrive than peers answer."""

from __future__ import annotations

from random import Random

from rdmacm.proto.cm.admission import PERMITS, RATE, Admission, Permits

#: More than the queues hold.
MANY = 20_000


class Clients:
    """Requests at an admission, in virtual time. Processed ones are named by their source."""

    def __init__(self) -> None:
        self.gate: Admission[str] = Admission(b"salt")
        self.now = 1000.0
        self.processed: list[str] = []

    def ask(self, source: str, number: int = 0) -> None:
        if self.gate.admit(self.now):
            self.processed.append(source)
        else:
            self.gate.wait(source, f"{source} {number}".encode(), source, self.now)
            self.run(self.now)

    def run(self, until: float) -> None:
        """Process what has a permit until a time."""
        while True:
            request = self.gate.take(self.now)
            if request is not None:
                self.processed.append(request)
                continue
            when = self.gate.next_time(self.now)
            if when is None or when > until:
                break
            assert when > self.now
            self.now = when
        self.now = until

    def flood(self, rate: int, seconds: float, many: bool = False) -> None:
        """Requests of strangers that never answer, from one source or each from its own."""
        start = self.now
        for number in range(int(rate * seconds)):
            self.run(start + number / rate)
            self.ask(f"stranger {start} {number}" if many else "stranger", number)


def test_peers_that_answer_never_wait() -> None:
    clients = Clients()
    for number in range(MANY):
        clients.ask("peer", number)
        if number >= PERMITS // 2:
            clients.gate.answered()
    assert len(clients.processed) == MANY
    assert len(clients.gate.waiting) == 0


def test_permits_are_replaced_at_a_rate() -> None:
    permits = Permits(10, 2)
    assert [permits.take(0.0) for _ in range(11)] == [True] * 10 + [False]
    assert permits.next_time(0.0) == 0.5
    assert [permits.take(1.0) for _ in range(3)] == [True, True, False]
    permits.give_back()
    assert permits.take(1.0)
    for _ in range(100):
        permits.give_back()
    assert [permits.take(1.0) for _ in range(11)] == [True] * 10 + [False]
    assert [permits.take(1000.0) for _ in range(11)] == [True] * 10 + [False]


def test_strangers_are_processed_at_a_bounded_rate() -> None:
    for many in (False, True):
        clients = Clients()
        clients.flood(10_000, 3.0, many)
        assert PERMITS <= len(clients.processed) <= PERMITS + 3 * RATE + 1
        assert len(clients.gate.waiting) < MANY


def test_newcomer_is_next_when_one_source_floods() -> None:
    clients = Clients()
    clients.flood(10_000, 2.0)
    clients.ask("newcomer")
    clients.flood(10_000, 2 / RATE)
    assert "newcomer" in clients.processed[-3:]


def test_sources_that_flood_share_the_permits() -> None:
    clients = Clients()
    for number in range(100):
        for source in range(20):
            clients.ask(f"source {source}", number)
    for _ in range(5):
        clients.ask("newcomer")
    clients.run(clients.now + 22 / RATE)
    assert "newcomer" in clients.processed


def test_repeated_request_goes_first() -> None:
    """Ten thousand sources a second, none of which repeats its request, but for one."""
    clients = Clients()
    clients.flood(10_000, 1.0, many=True)
    clients.ask("newcomer", 1)
    clients.flood(10_000, 4.8, many=True)
    assert "newcomer" not in clients.processed
    clients.ask("newcomer", 1)
    clients.flood(10_000, 4 / RATE, many=True)
    assert "newcomer" in clients.processed


def test_small_requests_are_limited_too() -> None:
    gate: Admission[str] = Admission(b"")
    assert sum(gate.admit_small(5.0) for _ in range(5000)) == 1024
    assert sum(gate.admit_small(5.5) for _ in range(5000)) == 500
    assert gate.admit(5.5), "they have permits of their own"


def test_memory_is_bounded_and_released() -> None:
    clients = Clients()
    random = Random(1)
    for number in range(MANY):
        clients.ask(f"{random.randrange(10_000)}", number)
    assert len(clients.gate.waiting) <= 8192
    clients.gate.clear()
    assert len(clients.gate.waiting) == 0
    assert clients.gate.take(clients.now) is None
    clients.now += 100.0
    clients.ask("later")
    assert clients.processed[-1] == "later"


def test_withdrawn_request_does_not_wait() -> None:
    admission: Admission[str] = Admission(b"")
    while admission.admit(0.0):
        pass
    assert admission.wait("source", b"1", "first", 0.0)
    assert admission.wait("source", b"2", "second", 0.0)
    assert admission.wait("source", b"2", "copy", 0.0)
    assert len(admission.waiting) == 2
    admission.withdraw(b"1")
    admission.withdraw(b"3")
    assert [admission.take(10.0), admission.take(10.0)] == ["copy", None]
