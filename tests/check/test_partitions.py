"""A software device takes requests of the default partition only; ``check`` and ``trace`` name the P_Key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from rdmacm import capture
from rdmacm.check.findings import Sign, Step
from rdmacm.check.judging import judge_manager
from rdmacm.check.measured import Answer, Requests, Target
from rdmacm.check.measuring import Measurer
from rdmacm.proto.cm.messages import REQ
from rdmacm.soft.ids.ib_cm import IbCmConnector
from rdmacm.trace.files import CaptureFile
from rdmacm.trace.tracer import Tracer
from rdmacm.trace.verdicts import FAILED, Judge
from support.pair import ADDRESSES, ends


def test_request_of_another_partition(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
        with capture(tmp_path / "own.pcapng", both.a.host.provider):
            answer = measurer.measure_listener(found)
    assert (answer.answer, answer.reason) == (Answer.REJECTED, 12)
    finding = judge_manager(target, Requests(1, (1.0,)), answer)
    assert (finding.step, finding.sign, finding.rule) == (Step.MANAGER, Sign.BAD, "R2")
    assert "does not take this partition (P_Key)" in finding.meaning
    tracer = Tracer()
    with (tmp_path / "own.pcapng").open("rb") as file:
        tracer.feed(CaptureFile(file.read))
    (connection,) = tracer.found()
    verdict = Judge(tracer).verdict(connection)
    assert (verdict.level, verdict.rule) == (FAILED, "R2")
    assert "P_Key 0x8001 is not in its table" in verdict.text
