"""Every constant, size and offset is that of the C headers: of the installed ones, and of the newest rdma-core.

What newer versions of rdma-core add is compatible, for these reasons:

- ``struct ibv_port_attr`` (``active_speed_ex``) and ``struct ibv_qp_ex`` (``wr_flush``) have grown at their end. The
  library fills in as much of the first as its caller says that there is; it makes the second.
- ``struct verbs_context`` grows at its beginning, and ``sz`` says by how much. Its members are found from its end, so
  the functions of newer versions (``reg_mr_ex``, ``alloc_dmah``, ``alloc_buf``) are in front of the first one here.
- Enumerations and unions got members: those in ``newer`` of ``tables/abi.toml`` are here as well. Left out are
  ``IBV_PORT_LINK_SPEED_XDR_SUP``, ``IBV_ODP_SUPPORT_FLUSH``, ``IBV_ODP_SUPPORT_ATOMIC_WRITE``, the constants of calls
  that only newer versions have, and ``RDMA_CM_EVENT_INTERNAL``, which no program sees.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import pytest

from interop.machine.cache import Unavailable
from rdmacm import cma
from rdmacm.kernel.verbs import layouts
from rdmacm.proto import user_cm
from rdmacm.verbs.enums import DeviceCapFlag, SrqInitAttrMask, SRQType
from support.debian import unpack_newest

TABLES = Path(__file__).resolve().parents[1] / "tables"
TABLE = tomllib.loads((TABLES / "abi.toml").read_text("utf-8"))
PACKAGES = ("libibverbs-dev", "librdmacm-dev", "linux-libc-dev")
USER = ("rdma/rdma_cma.h", "rdma/rdma_verbs.h", "infiniband/verbs.h", "netdb.h")
KERNEL = ("rdma/rdma_user_cm.h", "rdma/ib_user_verbs.h")
#: The last members of structures, which an older header lacks.
NEWER_MEMBERS = {("ibv_port_attr", "active_speed_ex"), ("ibv_qp_ex", "wr_flush")}
#: Members of structures inside another that a format has in their place.
INSIDE = {
    **dict.fromkeys(("vendor_id", "attr_mod"), "ece"),
    **dict.fromkeys(("dgid", "flow_label", "sgid_index", "hop_limit", "traffic_class"), "grh"),
    **dict.fromkeys(("service_id", "service_name", "flags"), "ibs"),
}
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
#: 14 megabytes of the archive's lists and packages.
newest_of_archive = pytest.param("newest", marks=pytest.mark.slow)


class Answer(NamedTuple):
    """A number of C, as an expression, and what it is here."""

    expression: str
    ours: int


def _files(folder: Path) -> Iterator[Path]:
    """What has the version of rdma-core."""
    for pattern in ("usr/lib*/pkgconfig", "usr/lib/*/pkgconfig"):
        yield from folder.glob(f"{pattern}/libibverbs.pc")


class Root:
    """The headers of a root directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = "".join(file.read_text("utf-8") for file in _files(folder))
        version = re.search(r"^Version: \d+\.\d+\.(\d+)", text, re.MULTILINE)
        #: Whether the headers lack nothing that is here.
        self.is_new = version is not None and int(version[1]) >= TABLE["newest"]
        include = folder / "usr/include"
        self._options = [] if folder == Path("/") else [f"-isystem{each}" for each in (include, *include.glob("*-gnu"))]
        self._options.append("-D_GNU_SOURCE")

    def words(self, headers: Iterable[str]) -> set[str]:
        """The names in the headers, those of macros included."""
        source = "".join(f"#include <{name}>\n" for name in headers)
        command = ["gcc", "-E", "-dD", *self._options, "-xc", "-"]
        done = subprocess.run(command, input=source, check=True, capture_output=True, text=True)
        return set(re.findall(r"\w+", done.stdout))

    def numbers(self, headers: Iterable[str], expressions: Iterable[str], program: Path) -> list[int]:
        """The values that a program of these headers prints, as numbers of 64 bits."""
        lines = [f"#include <{name}>" for name in (*headers, "stddef.h", "stdio.h")]
        lines += ["int main(void) {"]
        lines += [f'printf("%llu\\n", (unsigned long long)({expression}));' for expression in expressions]
        source = "\n".join([*lines, "return 0; }"])
        subprocess.run(["gcc", "-o", program, *self._options, "-xc", "-"], input=source, check=True, text=True)
        return [int(line) for line in subprocess.run([program], check=True, stdout=subprocess.PIPE).stdout.split()]

    def assert_same(self, headers: Iterable[str], answers: list[Answer], program: Path) -> None:
        theirs = self.numbers(headers, [answer.expression for answer in answers], program)
        ours = [answer.ours & 0xFFFFFFFFFFFFFFFF for answer in answers]
        expressions = [answer.expression for answer in answers]
        assert dict(zip(expressions, ours, strict=True)) == dict(zip(expressions, theirs, strict=True))

    def without_newer(self, headers: Iterable[str], answers: Iterable[tuple[str, Answer]]) -> list[Answer]:
        """The answers whose name the headers have. They lack only newer ones; new headers lack none."""
        words = self.words(headers)
        found = [answer for name, answer in answers if name in words]
        lacking = {name for name, _ in answers if name not in words}
        assert lacking - (TABLE["newer"].keys() | TABLE["newer_structures"].keys()) == set()
        assert not (self.is_new and lacking)
        return found


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    """The headers of the newest rdma-core and Linux, or why they are not to be had."""
    try:
        return unpack_newest(PACKAGES, tmp_path_factory.mktemp("newest"))
    except Unavailable as error:
        return str(error)


@pytest.fixture(params=["installed", newest_of_archive])
def root(request: pytest.FixtureRequest) -> Root:
    if request.param == "newest":
        found: Path | str = request.getfixturevalue("newest")
        if isinstance(found, str):
            pytest.skip(found)
        return Root(found)
    missing = [name for name in (*USER, *KERNEL) if not Path("/usr/include", name).exists()]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} ({', '.join(PACKAGES)})")
    return Root(Path("/"))


def constants() -> Iterator[tuple[str, Answer]]:
    """C's names in the star import, and members of enumerations that it has not."""
    of_kernel = {f"IBV_DEVICE_{flag.name}" for flag in DeviceCapFlag if flag >> 32}
    for name in vars(cma.constants)["__all__"]:
        if name not in of_kernel and name != "EAI_QPTYPE":  # which no header has
            yield name, Answer(name, int(getattr(cma, name)))
    yield "IBV_SRQT_TM", Answer("IBV_SRQT_TM", SRQType.TM)
    yield "IBV_SRQ_INIT_ATTR_TM", Answer("IBV_SRQ_INIT_ATTR_TM", SrqInitAttrMask.TM)


@needs_gcc
def test_constants_are_those_of_the_headers(root: Root, tmp_path: Path) -> None:
    root.assert_same(USER, root.without_newer(USER, list(constants())), tmp_path / "constants")


def kernel_constants() -> Iterator[tuple[str, Answer]]:
    prefixes: list[tuple[str, type[IntEnum]]] = [("CMD", user_cm.Command), ("QUERY", user_cm.Query)]
    for prefix, kind in prefixes:
        for member in kind:
            name = f"RDMA_USER_CM_{prefix}_{member.name}"
            yield name, Answer(name, member)
    for flag in user_cm.ServiceFlag:
        name = f"RDMA_USER_CM_IB_SERVICE_FLAG_{flag.name}"
        yield name, Answer(name, flag)
    for cap in DeviceCapFlag:
        if cap >> 32:
            name = f"IB_UVERBS_DEVICE_{cap.name}"
            yield name, Answer(name, cap)


@needs_gcc
def test_constants_of_the_kernel_are_those_of_the_headers(root: Root, tmp_path: Path) -> None:
    root.assert_same(KERNEL, root.without_newer(KERNEL, list(kernel_constants())), tmp_path / "constants")


def offsets(owner: str, kind: type[ctypes.Structure], at: int = 0, path: str = "") -> Iterator[tuple[str, int]]:
    """The members of a structure and of those inside it, as C's expressions, and where they are."""
    for name, member, *_ in kind._fields_:
        place = at + getattr(kind, name).offset
        yield f"{path}{name}", place
        if isinstance(member, type) and issubclass(member, ctypes.Structure | ctypes.Union):
            yield from offsets(owner, member, place, f"{path}{name}.")  # type: ignore[arg-type]


@needs_gcc
def test_structures_are_those_of_the_compiler(root: Root, tmp_path: Path) -> None:
    words = root.words(USER)
    answers = []
    for kind in layouts.STRUCTURES:
        name = kind.__name__
        lacking = [member for owner, member in NEWER_MEMBERS if owner == name and member not in words]
        size = getattr(kind, lacking[0]).offset if lacking else ctypes.sizeof(kind)
        assert not (root.is_new and lacking)
        if kind is layouts.verbs_context:  # from its end, which is where ibv_context ends
            for path, offset in offsets(name, kind):
                answers.append(Answer(f"sizeof(struct {name}) - offsetof(struct {name}, {path})", size - offset))
            continue
        answers.append(Answer(f"sizeof(struct {name})", size))
        for path, offset in offsets(name, kind):
            if path not in lacking:
                answers.append(Answer(f"offsetof(struct {name}, {path})", offset))
    root.assert_same(USER, answers, tmp_path / "structures")


def formats() -> Iterator[tuple[str, Answer]]:
    """The sizes of the kernel's structures, and the offsets of their members."""
    source = Path(str(user_cm.__file__)).read_text("utf-8")
    comments = re.findall(r"#: ``struct (\w+)``: ([^`]*)\.\n(\w+) = struct.Struct", source)
    assert [name for _, _, name in comments] == [name for name in vars(user_cm) if _is_format(name)]
    for structure, text, name in comments:
        form: struct.Struct = getattr(user_cm, name)
        yield structure, Answer(f"sizeof(struct {structure})", form.size)
        places = []
        end = 0
        for count, letter in re.findall(r"(\d*)(\w)", form.format.removeprefix("=")):
            each = struct.calcsize(f"={count}s") if letter == "s" else struct.calcsize(f"={letter}")
            times = 1 if letter == "s" else int(count or 1)
            places += [end + number * each for number in range(times)] if letter != "x" else []
            end += times * each
        members = text.replace("\n#:", "").split(", ")
        for member, place in zip(members, places, strict=True):
            path = f"{INSIDE[member]}.{member}" if member in INSIDE else member
            yield structure, Answer(f"offsetof(struct {structure}, {path})", place)
    at = user_cm.DEVICE_INDEX_OFFSET
    yield "ibdev_index", Answer("offsetof(struct rdma_ucm_query_addr_resp, ibdev_index)", at)


def _is_format(name: str) -> bool:
    return isinstance(getattr(user_cm, name), struct.Struct)


@needs_gcc
def test_formats_of_the_kernels_structures_are_those_of_the_compiler(root: Root, tmp_path: Path) -> None:
    root.assert_same(KERNEL, root.without_newer(KERNEL, list(formats())), tmp_path / "formats")


def test_the_generator_says_what_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, str(TABLES / "generate.py"), "--check", "--headers", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "skipped, needs libibverbs-dev, librdmacm-dev, linux-libc-dev" in done.stdout


@needs_gcc
def test_the_generator_makes_the_same_modules_of_these_headers(root: Root) -> None:
    command = [sys.executable, str(TABLES / "generate.py"), "--check", "--headers", str(root.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if "skipped" in done.stdout:
        pytest.skip(done.stdout.strip())
