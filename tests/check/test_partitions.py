"""A software device takes requests of the default partition only, and ``rdmacm check`` names the P_Key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from rdmacm.check.findings import Sign, Step
from rdmacm.check.judging import judge_manager
from rdmacm.check.measured import Answer, Requests, Target
from rdmacm.check.measuring import Measurer
from rdmacm.proto.cm.messages import REQ
from rdmacm.soft.ids.ib_cm import IbCmConnector
from support.pair import ADDRESSES, ends


def test_request_of_another_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    request = IbCmConnector._request

    def forged(*args: Any) -> REQ:
        return replace(request(*args), partition_key=0x8001)

    address = ADDRESSES["ipv4"][1]
    with ends() as both:
        listener = both.b.listen(address)
        target = Target(address, listener.src_port)
        measurer = Measurer(target, cast("Any", both.a.host.provider), None, 1.0, 1)
        found = measurer.measure_resolution()
        monkeypatch.setattr(IbCmConnector, "_request", forged)
        answer = measurer.measure_listener(found)
    assert (answer.answer, answer.reason) == (Answer.REJECTED, 12)
    finding = judge_manager(target, Requests(1, (1.0,)), answer)
    assert (finding.step, finding.sign, finding.rule) == (Step.MANAGER, Sign.BAD, "R2")
    assert "does not take this partition (P_Key)" in finding.meaning
