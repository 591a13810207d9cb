"""The core on ARMv8, which QEMU emulates: its CRC-32 is zlib's, and its C code compiles without a warning."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS = [
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Werror",
    f"-I{CORE / 'engine'}",
    f"-I{CORE / 'wire'}",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
        reason=f"needs {COMPILER} and {EMULATOR} (Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user)",
    ),
]


def test_crc32_is_that_of_zlib(tmp_path: Path) -> None:
    program = tmp_path / "crc32"
    sources = [CORE / "engine" / "crc32.c", CORE / "engine" / "icrc.c", Path(__file__).with_name("crc32_of_input.c")]
    subprocess.run([COMPILER, *FLAGS, "-static", "-o", program, *sources], check=True)
    source = random.Random(1)
    pieces = [
        (source.getrandbits(32), source.randbytes(length)) for length in (*range(301), 1024, 4099, 65536, 300_001)
    ]
    records = b"".join(struct.pack("<II", start, len(data)) + data for start, data in pieces)
    done = subprocess.run([EMULATOR, "-cpu", "max", program], input=records, capture_output=True, check=True)
    method, *lines = done.stdout.decode().splitlines()
    assert method == "armv8"
    assert lines == [" ".join([f"{zlib.crc32(data, start):08x}"] * 2) for start, data in pieces]


def test_code_compiles_without_a_warning(tmp_path: Path) -> None:
    for path in CORE.glob("*/*.c"):
        if path.parent.name != "python":  # these need Python.h
            subprocess.run([COMPILER, *FLAGS, "-c", "-o", tmp_path / "object", path], check=True)
