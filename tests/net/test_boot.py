"""The secret of a host: the same in each process, unknown to others."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rdmacm.net import boot
from rdmacm.testing import Fabric

HAS_BOOT_ID = Path(boot._BOOT_ID).exists()


@pytest.mark.skipif(not HAS_BOOT_ID, reason="the system has no boot id")
def test_processes_of_a_namespace_share_the_key() -> None:
    text = "from rdmacm.net.boot import boot_key; print(boot_key().hex())"
    other = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.strip()
    assert boot.boot_key().hex() == other


def test_key_differs_in_each_namespace_and_after_each_boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = set()
    for namespace in ("net:[1]", "net:[2]"):
        monkeypatch.setattr(boot, "namespace_key", lambda found=namespace: found)
        for number in (1, 2):
            path = tmp_path / str(number)
            path.write_text(f"boot {number}")
            monkeypatch.setattr(boot, "_BOOT_ID", str(path))
            assert boot.boot_key() == boot.boot_key()
            keys.add(boot.boot_key())
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}


def test_process_has_a_key_of_its_own_where_there_is_no_boot_id(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_open = builtins.open

    def refused(name: Any, *rest: Any, **options: Any) -> Any:
        if name == boot._BOOT_ID:
            raise PermissionError
        return plain_open(name, *rest, **options)

    monkeypatch.setattr(builtins, "open", refused)
    monkeypatch.setattr(boot, "_process_key", b"")
    key = boot.boot_key()
    assert boot.boot_key() == key
    monkeypatch.setattr(boot, "_process_key", b"")
    assert boot.boot_key() != key


def test_node_guid_depends_on_the_key_and_on_the_hardware_address() -> None:
    """An off-path stranger may know the hardware address: it must not tell the GUID, which names connections."""
    guids = set()
    for key in (b"", b"a", b"b"):
        host = Fabric().host("a", "10.0.0.1")
        host.network.boot_key = key
        for mac in ("020000000001", "020000000002"):
            (ifindex,) = (each.index for each in host.network.interfaces() if each.name == "eth0")
            host.network.set_interface(ifindex, mac=bytes.fromhex(mac))
            (guid,) = (device.node_guid for device in host.provider.devices() if device.name == "soft_eth0")
            assert guid >> 56 & 3 == 2, "locally administered, not a group's"
            guids.add(guid)
    assert len(guids) == 6
