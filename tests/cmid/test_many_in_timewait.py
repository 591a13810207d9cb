"""Queue pair numbers of ended connections are held until TIMEWAIT is over; a host that needs more gets another slot."""

from __future__ import annotations

import pytest

from rdmacm import CmEventType
from rdmacm.soft.device import multiplexer
from support.pair import ends


def test_connections_go_on_while_all_numbers_of_a_slot_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexer, "_SLOT_QPNS", 32)
    monkeypatch.setattr(multiplexer, "_FREED_QPNS", 0)
    with ends() as both:
        numbers: list[int] = []
        for _ in range(100):
            active, passive = both.connect()
            assert active.qp is not None
            numbers.append(active.qp.qp_num)
            active.disconnect()
            both.b.event(CmEventType.DISCONNECTED)
            passive.disconnect()
            both.a.event(CmEventType.DISCONNECTED)
            for end, cmid in ((both.a, active), (both.b, passive)):
                cmid.destroy()
                end.ids.remove(cmid)
        assert len(set(numbers)) == 100
        for end in (both.a, both.b):
            assert len(end.provider.host.mux.wire.slots) == 4
