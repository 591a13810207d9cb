"""The machine of tests/interop, whose kernel has rdma_rxe, for programs that use its devices by rdmacm.kernel.verbs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from interop.conftest import machine, mark, pytest_generate_tests
from interop.machine.run import Machine
from interop.scenario import NETWORK_SECONDS

__all__ = ["machine", "pytest_generate_tests", "run_program"]

HERE = Path(__file__).parent
#: Seconds that a program may take.
PROGRAM_SECONDS = 60


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark(HERE, config, items)


@pytest.fixture
def run_program(machine: Machine) -> Callable[[str], str]:
    """Runs Python with these arguments in the machine, which has this folder's modules, and returns what it prints."""

    def run(arguments: str) -> str:
        folder = machine.share / "kernel"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(HERE, folder / HERE.name)
        script = f"network || exit\nexport PYTHONPATH=$PYTHONPATH:/mnt/share\npython3 {arguments}"
        result = machine.insist(script, PROGRAM_SECONDS + NETWORK_SECONDS)
        assert result.status == 0, result.output
        return result.output

    return run
