"""What a wheel installs beside the package: manual pages, and completions for shells."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import rdmacm
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.completion import SHELLS, script
from support.servers import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_man", ROOT / "docs" / "make_man.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def share(maker: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("share")
    for path, text in maker.files().items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return directory


def checked(*command: str | Path, text: str | None = None) -> str:
    """What a program writes, to either output; a test without the program is skipped."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    environment = dict(os.environ, LC_ALL="C.UTF-8")
    done = subprocess.run(
        [str(each) for each in command],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=environment,
    )
    return done.stdout


class TestManualPages:
    def test_each_command_and_main_name_has_a_page(self, share: Path) -> None:
        assert {file.name for file in (share / "man" / "man1").iterdir()} == {
            "rdmacm.1",
            *(f"rdmacm-{command}.1" for command in COMMANDS),
        }
        names = {file.name.removesuffix(".3") for file in (share / "man" / "man3").iterdir()}
        assert {"rdmacm", "rdmacm.CmId", "rdmacm.connect", "rdmacm.aio", "rdmacm.verbs.QP"} <= names

    def test_groff_has_no_warnings(self, share: Path) -> None:
        for page in sorted(share.glob("man/*/*")):
            assert checked("groff", "-ww", "-K", "utf8", "-man", "-T", "utf8", "-z", page) == "", page.name

    def test_mandoc_has_no_warnings(self, share: Path) -> None:
        for page in sorted(share.glob("man/*/*")):
            assert checked("mandoc", "-T", "lint", "-W", "warning", page) == "", page.name

    def test_page_has_the_text_of_the_help(self, share: Path, run: Run) -> None:
        shown = checked("man", "-l", share / "man" / "man1" / "rdmacm-perf.1")
        if "manual pages" in shown and "NAME" not in shown:  # a container's stand-in for man(1)
            pytest.skip("man is not installed")
        words = shown.replace("\u2010\n", "").split()
        assert {"NAME", "SYNOPSIS", "OPTIONS", "EXAMPLES"} <= set(words)
        assert "--bidirectional" in words
        assert "--bidirectional" in run("perf", "--help").out

    def test_text_is_not_taken_for_requests(self, maker: ModuleType) -> None:
        assert maker.escaped(".x \\n 'a' -b") == "\\&.x \\en \\(aqa\\(aq \\-b"
        assert maker.inline("see :meth:`~rdmacm.CmId.connect` and ``x-y``") == (
            "see \\fBrdmacm.CmId.connect\\fR and \\fBx\\-y\\fR"
        )
        assert maker.signature("rdmacm.create_ep", rdmacm.create_ep).startswith("rdmacm.create_ep(")


class TestCompletion:
    @pytest.mark.parametrize("shell", SHELLS)
    def test_command_writes_the_script(self, run: Run, shell: str) -> None:
        assert run("completion", shell) == (0, script(shell), "")

    @pytest.mark.parametrize("shell", SHELLS)
    def test_script_has_no_errors_of_syntax(self, share: Path, maker: ModuleType, shell: str) -> None:
        assert checked(shell, "-n", share / maker.COMPLETIONS[shell]) == ""

    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("pe", "perf"),
            ("perf --o", "--op"),
            ("perf --op wr", "write"),
            ("perf --provider so", "soft"),
            ("--pcap x rp", "rping"),
            ("sa no", "nodes"),
            ("explain --pcap /dev/nul", "/dev/null"),
            ("completion z", "zsh"),
        ],
    )
    def test_bash_completes(self, share: Path, maker: ModuleType, line: str, found: str) -> None:
        words = ["rdmacm", *line.split()]
        ask = (
            f"source {share / maker.COMPLETIONS['bash']}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1};"
            f" _rdmacm rdmacm {words[-1]} {words[-2]}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        )
        assert found in checked("bash", "-c", ask).split()

    @pytest.mark.parametrize(("line", "found"), [("pe", "perf"), ("perf --o", "--op"), ("perf --op wr", "write")])
    def test_fish_completes(self, share: Path, maker: ModuleType, line: str, found: str) -> None:
        if "no" in checked("fish", "-N", "-c", "functions -q __fish_seen_subcommand_from; or echo no"):
            pytest.skip("the functions of fish are not installed")
        ask = f"source {share / maker.COMPLETIONS['fish']}; complete -C 'rdmacm {line}'"
        assert found in checked("fish", "-N", "-c", ask).split()
