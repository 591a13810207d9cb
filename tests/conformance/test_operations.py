"""The operations that tests/interop tries with other devices, between two processes of this package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from interop.operations import OPERATIONS
from rdmacm import CmId, EventChannel, PortSpace
from support.netns import python_environment

LOSSLESS = [operation for operation in OPERATIONS if not operation.needs_loss]
COMMAND = [sys.executable, "-m", "interop.soft_peer"]


def free_port() -> int:
    with EventChannel() as channel, CmId(channel, PortSpace.TCP) as cmid:
        cmid.bind_addr(("127.0.0.1", 0))
        return cmid.src_port


@pytest.mark.slow
def test_every_operation_works_between_two_processes() -> None:
    environment = python_environment()
    arguments = ["127.0.0.1", str(free_port()), "--mtu", "4096"]
    with subprocess.Popen(
        [*COMMAND, "listen", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "listening\n"
            client = subprocess.run(
                [*COMMAND, "connect", *arguments, "--only", ",".join(operation.name for operation in LOSSLESS)],
                capture_output=True,
                text=True,
                env=environment,
                check=False,
            )
            assert client.returncode == 0, client.stdout + client.stderr
            output = server.stdout.read()
        finally:
            server.kill()
    parts = [(part, operation.name) for operation in LOSSLESS for part in operation.parts]
    assert client.stdout.splitlines() == [f"ok {part} {name}" for part, name in parts]
    swapped = {"request": "respond", "respond": "request", "both": "both"}
    assert output.splitlines() == [f"ok {swapped[part]} {name}" for part, name in parts]
