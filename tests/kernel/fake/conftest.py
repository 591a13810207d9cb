"""Builds ``ibverbs.c`` with the compiler and the headers of this machine, and puts it in the place of libibverbs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel.fake.fake_library import FakeLibrary
from rdmacm.kernel import verbs
from rdmacm.kernel.verbs import library

SOURCE = Path(__file__).with_name("ibverbs.c")
HEADER = Path("/usr/include/infiniband/verbs.h")


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not HEADER.exists():
        pytest.skip("needs a C compiler and libibverbs-dev")
    path = tmp_path_factory.mktemp("fake") / "libibverbs-fake.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-fvisibility=hidden", "-o", path, SOURCE], check=True)
    return str(path)


@pytest.fixture
def fake(fake_path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    """The library in the place of libibverbs, without devices."""
    found = FakeLibrary(fake_path)
    found.reset()
    monkeypatch.setattr(library, "_library", found.library)
    verbs._devices.clear()
    yield found
    verbs._devices.clear()
