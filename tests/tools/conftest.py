"""The command in this process."""

from __future__ import annotations

import pytest

from rdmacm.tools.main import main
from support.servers import Result, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, in the namespace of the calling thread."""

    def run(*argv: str) -> Result:
        status = main(argv)
        return Result(status, *capsys.readouterr())

    return run
