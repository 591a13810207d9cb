"""The Python of README and of the guides passes mypy --strict and pyright, as a reader's program would."""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from newcomer.pages import ROOT, blocks, pages

MYPY = """
[mypy]
strict = True
[mypy-zlib_ng.*]
ignore_missing_imports = True
"""
#: What a port of a C program does, beside the pages.
IDIOMS = """
from rdmacm.cma import *

sge = ibv_sge()
wr = ibv_send_wr()
wr.num_sge = 1
wr.sg_list = sge
wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE
recv = ibv_recv_wr()
recv.sg_list = [sge, sge]
recv.num_sge = 2
ah_attr = ibv_ah_attr()
ah_attr.is_global = 1
ah_attr.is_global = True
init_attr = ibv_qp_init_attr()
init_attr.sq_sig_all = 1
init_attr.sq_sig_all = True
id = rdma_create_id(None)
if id.verbs is None or id.qp is None:
    rdma_resolve_addr(id, None, ("127.0.0.1", 7471), 2000)
print(id.verbs.device.name)
cq = ibv_create_cq(id.verbs, 1)
ibv_req_notify_cq(cq, 0)
cq.req_notify(1)
attr = ibv_qp_attr()
attr.qp_state = IBV_QPS_INIT
attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ
attr.qp_access_flags = 0
attr.path_mtu = IBV_MTU_1024


def handle(event: rdma_cm_event) -> rdma_cm_id:
    print(event.param.conn.private_data, event.param.ud.ah_attr)
    return event.id
"""


class Module(NamedTuple):
    """A block of a page as a module; its first line has the names of the blocks before that it uses."""

    name: str
    text: str


class Names(ast.NodeVisitor):
    """The names that a block binds at its top, with their imports, and those that it uses."""

    def __init__(self, tree: ast.Module) -> None:
        self.imports: dict[str, str] = {}
        self.stars: list[str] = []
        self.bound: set[str] = set()
        self.used: dict[str, None] = {}
        #: What functions, classes and comprehensions bind for themselves.
        self.inner: set[str] = set()
        self._depth = 0
        self.visit(tree)

    def _bind(self, name: str) -> None:
        (self.inner if self._depth else self.bound).add(name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.used[node.id] = None
        else:
            self._bind(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        self.inner.add(node.arg)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name is not None:
            self._bind(node.name)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for each in node.names:
            if each.name == "*":
                self.stars.append(ast.unparse(node))
                continue
            name = (each.asname or each.name).partition(".")[0]
            self._bind(name)
            if not self._depth:
                node.names, names = [each], node.names
                self.imports[name] = ast.unparse(node)
                node.names = names

    visit_ImportFrom = visit_Import

    def _inside(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._bind(node.name)
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _inside
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _inside

    def missing(self) -> list[str]:
        """The names that the block has from the blocks before."""
        return [name for name in self.used if name not in self.bound | self.inner | set(dir(builtins))]


def modules(page: str) -> list[Module]:
    """The Python blocks of a page as modules."""
    found: list[Module] = []
    before: list[tuple[str, Names]] = []
    files: dict[str, str] = {}
    for block in blocks(ROOT / page):
        if block.language != "python":
            continue
        names = Names(ast.parse(block.text))
        lines: dict[str, None] = {}
        for name in names.missing():
            for earlier, its in reversed(before):
                if name in its.bound:
                    lines[its.imports.get(name, f"from {earlier} import {name}")] = None
                    break
            else:  # C's names, which a page imports all
                lines.update(dict.fromkeys(line for _, its in before for line in its.stars))
        stem = f"{Path(page).stem.lower()}_{block.line}"
        text = re.sub(r"(?<=^from )\w+", lambda name: files.get(name[0], name[0]), block.text, flags=re.MULTILINE)
        found.append(Module(stem, f"{'; '.join(lines)}\n{text}"))
        before.append((stem, names))
        if file := re.match(r"# (\w+)\.py$", block.text, re.MULTILINE):
            files[file[1]] = stem
    return found


def write_modules(place: Path) -> list[str]:
    """Write the modules of all pages; the names of their files, each with the line of its block."""
    written = [Module("idioms_of_c", IDIOMS), *(module for page in pages() for module in modules(page))]
    for module in written:
        (place / f"{module.name}.py").write_text(module.text, encoding="utf-8")
    assert len(written) > 50, "the pages have fewer blocks of Python than they had"
    return [f"{module.name}.py" for module in written]


def test_names_of_the_blocks_before_are_those_that_a_block_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "from a import *\nimport b, c\nx = f()\n", "print([y for y in b.d if y == x], g)\n"
    (tmp_path / "page.md").write_text(f"```python\n{first}```\n\n```python\n{second}```\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert modules("page.md") == [
        ("page_2", f"\n{first}"),
        ("page_8", f"import b; from page_2 import x; from a import *\n{second}"),
    ]


@pytest.mark.slow
def test_python_of_the_pages_passes_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "mypy.ini").write_text(MYPY)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *write_modules(tmp_path)],
        cwd=tmp_path,
        env=dict(os.environ, MYPYPATH=str(ROOT / "src")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def pyright(place: Path, *arguments: str) -> dict[str, object]:
    """What pyright reports in a directory, where it is installed."""
    program = shutil.which("pyright", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("pyright is not installed")
    settings = {"extraPaths": [str(ROOT / "src")], "reportMissingModuleSource": False}
    (place / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [program, "--outputjson", "--pythonpath", sys.executable, *arguments],
        cwd=place,
        env=dict(os.environ, PYTHONPATH=str(ROOT / "src")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_python_of_the_pages_passes_pyright(tmp_path: Path) -> None:
    write_modules(tmp_path)
    found = pyright(tmp_path)["generalDiagnostics"]
    assert isinstance(found, list)
    wrong = [f"{Path(each['file']).name}:{each['range']['start']['line']}: {each['message']}" for each in found]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_types_of_the_package_are_complete_for_pyright(tmp_path: Path) -> None:
    found = pyright(tmp_path, "--verifytypes", "rdmacm", "--ignoreexternal")["typeCompleteness"]
    assert isinstance(found, dict)
    assert found.get("pyTypedPath") == str(ROOT / "src/rdmacm/py.typed"), "not the package of this checkout"
    # The others have no place: they are unknown because one of these is.
    unknown = [
        f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}: {symbol['name']}: {each['message']}"
        for symbol in found["symbols"]
        if symbol["isExported"] and not symbol["isTypeKnown"]
        for each in symbol["diagnostics"]
        if each["file"] and each["severity"] == "error"
    ]
    assert found["completenessScore"] >= 0.99, "\n".join(unknown)
