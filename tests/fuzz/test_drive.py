"""The command "dev.py fuzz": a fault is found and reported, and some seconds of fuzzing find none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import drive, harness
from fuzz.harness import Target


def test_one_input_of_one_target_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert drive.main(["slots", "--input", "00" * 64]) == 0
    assert capsys.readouterr() == ("", "")


def test_unknown_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        drive.main(["nothing"])
    assert "no target nothing; the targets are roce_packet" in capsys.readouterr().err


def faulty(data: bytes) -> None:
    assert data[1:2] < b"\x80", "the fault"


@pytest.mark.slow
def test_hypothesis_finds_a_fault(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    target = Target("faulty", faulty, lambda: [b"\7\0\0\0"], 16)
    assert drive._with_hypothesis(target, 20.0, tmp_path) == 1
    assert (tmp_path / "fault-1").read_bytes()[1] >= 0x80


def test_random_changes_find_a_fault(tmp_path: Path) -> None:
    target = Target("faulty", faulty, lambda: [b"\7\0\0\0"], 16)
    assert drive._with_random(target, 20.0, tmp_path) == 1
    assert (tmp_path / "fault-1").read_bytes()[1] >= 0x80


def test_inputs_that_reach_new_code_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "CORPUS", tmp_path)
    monkeypatch.setattr(harness, "CORPUS", tmp_path)
    target = harness.load_targets()["acm_reply"]
    valid = next(iter(target.seeds()))
    other_version = b"\2" + valid[1:]
    assert drive.keep(target, [valid, other_version, b"\3" + valid[1:] + b"\0"]) == 1
    assert harness.stored_inputs("acm_reply") == [other_version]


#: Targets that have a state; test_corpus.py runs the inputs of all. Each takes two seconds to start.
ENGINES = ("rc_sealed", "cm_agent", "sa_client", "rmpp", "ud_engine", "uc_engine", "xrc_target", "device", "requests")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fuzzing_finds_no_fault() -> None:
    command = [sys.executable, drive.__file__, *ENGINES, "--seconds", "9", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
