"""A port of a subnet in memory that sends queries, and a loop that lets time pass for several ports."""

from __future__ import annotations

from random import Random
from typing import Any

from rdmacm.ib.transport import MadTransport
from rdmacm.proto.mad import MadAddress
from rdmacm.proto.sa.client import SaClient, SaResponse
from rdmacm.proto.sa.mad import SaMethod
from rdmacm.proto.sa.query import query_for
from rdmacm.testing import MemorySubnet, VirtualClock


class Asker:
    """The query engine of a port on its transport; ``answers`` has the answer of each query by its number."""

    def __init__(self, subnet: MemorySubnet, transport: MadTransport, seed: int = 1) -> None:
        self.subnet = subnet
        self.transport = transport
        self.client = SaClient(Random(seed), reassembles=transport.reassembles)
        self.answers: dict[int, SaResponse] = {}
        self.times: dict[int, float] = {}
        transport.open()

    def ask(self, method: SaMethod, kind: Any, timeout: float = 2.0, tries: int = 10, **fields: Any) -> int:
        mask, record = query_for(kind, **fields)
        return self.ask_raw(method, kind.ATTRIBUTE, mask, record.pack(), timeout, tries)

    def ask_raw(
        self, method: int, attribute: int, mask: int = 0, data: bytes = b"", timeout: float = 2.0, tries: int = 10
    ) -> int:
        sm = MadAddress(self.transport.port().sm_lid)
        now = self.subnet.clock()
        number = self.client.query(method, attribute, mask, data, sm, now, timeout=timeout, tries=tries)
        self.progress()
        return number

    def progress(self) -> None:
        """Carry datagrams between the engine and the transport."""
        client, now = self.client, self.subnet.clock()
        while True:
            arrived = self.transport.receive()
            for source, mad in arrived:
                client.mad_received(source, mad, now)
            client.timer(now)
            leaving = client.mads_to_send()
            for address, mad in leaving:
                self.transport.send(address, mad)
            for answer in client.events():
                self.answers[answer.query] = answer
                self.times[answer.query] = now
            if not arrived and not leaving:
                return

    def wait(self, number: int) -> SaResponse:
        """Let virtual time pass until a query has its answer."""
        run(self.subnet, self)
        return self.answers[number]

    def find(self, method: SaMethod, kind: Any, **fields: Any) -> SaResponse:
        return self.wait(self.ask(method, kind, **fields))

    def records(self, method: SaMethod, kind: Any, **fields: Any) -> list[Any]:
        """The records of an answer; AssertionError if it is an error."""
        answer = self.find(method, kind, **fields)
        assert (answer.error, answer.status) == (None, 0)
        return [kind.unpack(record) for record in answer.records]


def run(subnet: MemorySubnet, *askers: Asker) -> None:
    """Let virtual time pass until no query is outstanding."""
    assert isinstance(subnet.clock, VirtualClock)
    for _ in range(1_000_000):
        subnet.settle()
        for asker in askers:
            asker.progress()
        if not any(len(asker.client) for asker in askers):
            return
        due = [subnet.next_deadline(), *(asker.client.next_deadline() for asker in askers)]
        subnet.clock.now = max(subnet.clock.now, min(time for time in due if time is not None))
    raise AssertionError("no end")
