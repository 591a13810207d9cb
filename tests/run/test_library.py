"""The library for C programs: its names, and programs of the tests that use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import hatch_build
import pytest

from support.run_programs import LIBRARIES, Runs, needs_headers, output_of

pytestmark = needs_headers


def names_in(library: Path) -> set[str]:
    """The names that a library exports, with their versions; those of no version that is the default are left out."""
    command = ["nm", "-D", "--with-symbol-versions", "--defined-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in listed.splitlines() if "@@" in line}


def installed(library: str) -> Path | None:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    found = re.search(rf"^\s+{re.escape(library)} .*=> (.*)$", listed, re.MULTILINE)
    return Path(found[1]) if found else None


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_name_of_the_librarys_namesake_is_there(library: Path, name: str) -> None:
    """Else a program that preloads the library would get it from the other one, which knows nothing of our objects."""
    other = installed(name)
    if other is None:
        pytest.skip(f"needs {name} (Debian packages libibverbs1 and librdmacm1)")
    missing = names_in(other) - names_in(library / name)
    assert {each for each in missing if not each.startswith(("IBVERBS_", "RDMACM_"))} == set()


def test_structures_have_the_sizes_of_the_headers(tmp_path: Path) -> None:
    """Those that newer versions have made longer are left out: test_c_headers compares them."""
    header = Path(hatch_build.SOURCES, "library", "abi.h").read_text("utf-8")
    tags = re.findall(r"^(?:struct|union) (\w+) \{", header, re.MULTILINE)
    sources = {
        "ours": '#include "library/abi.h"\n',
        "theirs": "#include <rdma/rdma_cma.h>\n#include <infiniband/verbs.h>\n#include <infiniband/sa.h>\n",
    }
    longer = {"ibv_port_attr", "ibv_qp_ex"}
    public = [tag for tag in tags if tag.startswith(("ibv_", "rdma_")) and not tag.startswith("rdma_ucm_")]
    lines = "".join(
        f'    printf("{tag} %zu\\n", sizeof({kind} {tag}));\n'
        for tag in public
        if tag not in longer
        for kind in re.findall(rf"^(struct|union) {tag} \{{", header, re.MULTILINE)
    )
    printed = {}
    for name, include in sources.items():
        program = tmp_path / name
        text = f"#define _GNU_SOURCE\n{include}#include <stdio.h>\nint main(void) {{\n{lines}    return 0;\n}}\n"
        options = ["-w", f"-I{hatch_build.SOURCES}", "-o", str(program), "-xc", "-"]
        subprocess.run(["gcc", *options], input=text, text=True, check=True)
        printed[name] = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(printed["ours"]) > 80
    assert printed["ours"] == printed["theirs"]


def test_messages_of_every_kind_arrive_in_several_threads(runs: Runs) -> None:
    assert runs("exchange", "4", "30") == "done\n"


@pytest.mark.parametrize("what", ["fork", "cancel", "watch", "load", "poll"])
def test_program_may(runs: Runs, what: str) -> None:
    """``life.c`` says what each of these is."""
    assert runs("life", what) == "done\n"


def test_it_stays_loaded(library: Path) -> None:
    """Its threads run on when a program ends its use of it, as Open MPI does with libfabric."""
    unload = "import _ctypes, ctypes, os, sys; _ctypes.dlclose(ctypes.CDLL(sys.argv[1])._handle)"
    path = str(library / LIBRARIES[0])
    output_of([sys.executable, "-c", f"{unload}; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOLOAD)", path], {})


@pytest.mark.parametrize("what", ["gone", "unmapped", "changed", "built", "asked"])
def test_memory(runs: Runs, what: str) -> None:
    """``memory.c`` says what each of these is."""
    assert runs("memory", what) == "done\n"


#: Prints whether there is a list of devices, and how many there are.
COUNT_DEVICES = """
import ctypes
library = ctypes.CDLL("libibverbs.so.1")
library.ibv_get_device_list.restype = ctypes.c_void_p
count = ctypes.c_int(7)
print(bool(library.ibv_get_device_list(ctypes.byref(count))), count.value)
"""


def test_program_without_a_server_finds_no_devices(library: Path) -> None:
    environment = {"LD_LIBRARY_PATH": str(library), "RDMACM_RUN_SOCKET": "/nowhere/socket"}
    assert output_of([sys.executable, "-c", COUNT_DEVICES], environment) == "True 0\n"


#: Prints where the texts of the library are not those of :mod:`rdmacm.cma`.
COMPARE_TEXTS = """
import ctypes, sys
from rdmacm import cma
library = ctypes.CDLL(sys.argv[1])
for name in ("ibv_wc_status_str", "ibv_node_type_str", "ibv_port_state_str"):
    theirs = getattr(library, name)
    theirs.restype = ctypes.c_char_p
    for code in range(-1, 32):
        if theirs(code).decode() != getattr(cma, name)(code):
            print(name, code)
"""


def test_texts_are_those_of_the_package(library: Path) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    assert output_of([sys.executable, "-c", COMPARE_TEXTS, str(library / LIBRARIES[0])], environment) == ""
