"""The command in this process, and two hosts for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rdmacm.tools.main import main
from support.netns import TwoHosts, two_hosts
from support.servers import Result, Run
from support.waiting import without_waiting


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, in the namespace of the calling thread."""

    def run(*argv: str) -> Result:
        status = main(argv)
        out, err = capsys.readouterr()
        return Result(status, out, without_waiting(err))

    return run


@pytest.fixture(scope="module")
def net() -> Iterator[TwoHosts]:
    with two_hosts() as net:
        yield net
