"""``rdmacm doctor``: output, JSON, exit status, and what is done for real in a process of its own."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rdmacm.doctor import QUESTIONS, RULES
from rdmacm.provider import choice
from rdmacm.tools.main import main
from support.netns import Host, TwoHosts, needs_netns, python_environment, two_hosts


@pytest.fixture
def soft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.ENVIRONMENT, "soft")


@pytest.fixture(scope="module")
def net() -> Iterator[TwoHosts]:
    with two_hosts() as net:
        yield net


def test_a_rule_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "c1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("C1 UDP port 4791 is filtered\n")
    assert "likely" in text
    assert main(["doctor", "C1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rule"], found["question"], found["evidence"]) == ("C1", "UDP port 4791", "likely")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["X9"], "no rule 'X9', there are D1 D2"),
        (["--from", "10.0.0.1"], "--from is for --to"),
        (["--matrix", "m.json"], "--matrix is for --report"),
        (["--port", "0"], "from 1 to 65535"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], argv: list[str], text: str) -> None:
    assert main(["doctor", *argv]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("soft")
@pytest.mark.parametrize(
    ("content", "status", "text"), [(None, 1, "ENOENT"), ("{", 2, "is no matrix"), ("[]", 2, "pairs")]
)
def test_matrix_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None, status: int, text: str
) -> None:
    file = tmp_path / "matrix.json"
    if content is not None:
        file.write_text(content)
    assert main(["doctor", "--report", str(tmp_path / "r.html"), "--matrix", str(file)]) == status
    assert text in capsys.readouterr().err


@needs_netns
class TestOnAHost:
    def run(self, host: Host, *argv: str, mounts: str = "", before: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
        command = [*before, sys.executable, "-m", "rdmacm", "doctor", "--provider", "soft", "--json", *argv]
        if mounts:
            command = ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$0" "$@"', *command]
        done = host.run(command, check=False, env=python_environment())
        return done.returncode, json.loads(done.stdout)

    def test_a_healthy_host_is_silent(self, net: TwoHosts) -> None:
        done = net.a.python(["-m", "rdmacm", "doctor", "--provider", "soft", "--to", "10.7.0.2"])
        first = done.stdout.splitlines()[0]
        assert first.startswith("nothing found; looked at: provider soft, devices: none of the kernel,")

    def test_every_rule_is_listed(self, net: TwoHosts) -> None:
        text = net.a.python(["-m", "rdmacm", "doctor", "--provider", "soft", "-v"]).stdout
        lines = text.splitlines()
        assert [line for line in lines if line in QUESTIONS] == list(QUESTIONS)
        listed = {words[1] for line in lines if line.startswith("  ") and len(words := line.split()) > 2}
        assert {rule.id for rule in RULES} <= listed

    def test_json(self, net: TwoHosts) -> None:
        status, found = self.run(net.a)
        assert (status, found["ok"], found["provider"], found["findings"]) == (0, True, "soft", [])
        assert [each["question"] for each in found["questions"]] == list(QUESTIONS)
        assert {each["state"] for each in found["questions"]} == {"ok"}
        assert {each["rule"] for each in found["rules"]} == {rule.id for rule in RULES}

    def test_questions_behind_a_finding_are_not_reached(self, net: TwoHosts) -> None:
        status, found = self.run(net.a, "--to", "10.9.0.1")
        assert (status, [each["rule"] for each in found["findings"]]) == (1, ["A3"])
        states = {each["question"]: each["state"] for each in found["questions"]}
        assert (states["device"], states["source and route"], states["MTU"]) == ("ok", "finding", "not reached")
        done = net.a.python(["-m", "rdmacm", "doctor", "--provider", "soft", "--to", "10.9.0.1"], check=False)
        assert done.stdout.startswith("A3 No route\n  no route to 10.9.0.1 [ENETUNREACH]\n  try: ip route get 10.9.0.1")
        assert "\nnot reached: neighbour, MTU," in done.stdout

    def test_names_of_the_hosts_file(self, net: TwoHosts, tmp_path: Path) -> None:
        hosts = tmp_path / "hosts"
        hosts.write_text("127.0.1.1 node7\n10.7.0.3 two\n10.7.0.2 two\n")
        mounts = f"mount --bind {hosts} /etc/hosts"
        status, found = self.run(net.a, "--to", "node7", mounts=mounts)
        assert (status, [each["rule"] for each in found["findings"]]) == (1, ["A16"])
        assert "node7 is 127.0.1.1 here" in found["findings"][0]["finding"]
        status, found = self.run(net.a, "--to", "two", mounts=mounts)
        notes = {each["rule"]: each["finding"] for each in found["notes"]}
        assert (status, found["findings"]) == (0, [])
        assert "of 2 addresses of two some do not resolve: 10.7.0.3" in notes["A17"]

    @pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (Debian package util-linux)")
    def test_privileged_port(self, net: TwoHosts) -> None:
        for port, rules in (("80", ["A9"]), ("7471", [])):
            _, found = self.run(net.a, "--port", port, before=["setpriv", "--bounding-set=-net_bind_service"])
            assert [each["rule"] for each in found["findings"]] == rules
        _, found = self.run(net.a, "--port", "80")
        assert found["findings"] == []

    def test_report(self, net: TwoHosts, tmp_path: Path) -> None:
        file, matrix = tmp_path / "report.html", tmp_path / "matrix.json"
        matrix.write_text('{"hosts": ["a", "b"], "pairs": [{"from": "a", "to": "b", "ok": true, "rtt_us": 7}]}')
        status, _ = self.run(net.a, "--report", str(file), "--matrix", str(matrix))
        assert status == 0
        text = file.read_text()
        for part in ("soft_va/1", "10.7.0.1/24", "::ffff:10.7.0.1", "10.7.0.0/24", "All pairs", "nothing found"):
            assert part in text
        status, found = self.run(net.a, "--report", str(tmp_path))
        assert (status, found["error"]["errno_name"]) == (1, "EISDIR")
