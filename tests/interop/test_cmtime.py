"""librdmacm's cmtime and ours: many connections, one after the other or at once."""

from __future__ import annotations

import json

import pytest

from interop.scenario import Guest

OURS = "python3 -m rdmacm cmtime"
ROW = "cmtime: 20 connections, one after the other and at once"
FAMILIES = pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])


@pytest.mark.cell(ROW, "passive")
@FAMILIES
def test_librdmacms_client_connects_to_our_server(guest: Guest, family: int) -> None:
    done = guest.run(
        f"serve_soft {OURS} -b $SOFT{family}\nrxe cmtime -s $SOFT{family} -c 20 || exit\nkill $SERVER", timeout=180
    )
    assert done.status == 0, done.output
    lines = done.output.splitlines()
    assert "connecting" in lines
    assert not [line for line in lines if "error" in line]
    steps = [line.split()[0] for line in lines if ":" in line and not line.startswith("rdmacm")]
    assert steps == ["create", "resolve", "resolve", "create", "connect", "disconnect", "destroy"]


@pytest.mark.cell(ROW, "active")
@FAMILIES
@pytest.mark.parametrize("order", ["serial", "concurrent"])
def test_our_client_connects_to_librdmacms_server(guest: Guest, family: int, order: str) -> None:
    """librdmacm's server refuses connections once its first one has ended."""
    done = guest.run(
        f"serve_rxe cmtime -b $RXE{family}\nsoft {OURS} -s $RXE{family} -c 20 --{order} --json || exit\nkill $SERVER",
        timeout=180,
    )
    assert done.status == 0, done.output
    found = json.loads(done.output[done.output.index("{") : done.output.rindex("}") + 1])
    assert {step["name"]: step["count"] for step in found["steps"]}["establish"] == 20
