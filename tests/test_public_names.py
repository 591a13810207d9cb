"""Public names: help() lists them on a page, each is documented, and signatures name types that users can import."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import rdmacm

SOURCES = Path(rdmacm.__file__).parent

#: The public modules, as docs/architecture.md and the package's docstring name them.
PUBLIC = [
    "rdmacm",
    "rdmacm.aio",
    "rdmacm.cma",
    "rdmacm.explanation",
    "rdmacm.ib",
    "rdmacm.lab",
    "rdmacm.rsocket",
    "rdmacm.testing",
    "rdmacm.verbs",
]
#: Those with a list of their names, and the longest page of help() in lines.
INDEXES = {
    "rdmacm": 130,
    "rdmacm.ib": 60,
    "rdmacm.lab": 35,
    "rdmacm.rsocket": 55,
    "rdmacm.testing": 90,
    "rdmacm.verbs": 90,
}
#: The modules with the interfaces for other providers, networks and wires. Users can import their types.
INTERFACES = ["rdmacm.provider", "rdmacm.verbs.backend", "rdmacm.net", "rdmacm.soft.wire.base"]
#: The classes whose objects only the package makes. Their constructors take internal objects.
MADE_BY_THE_PACKAGE = {
    *("rdmacm.CmEvent", "rdmacm.Connection", "rdmacm.Listener", "rdmacm.Request", "rdmacm.Region", "rdmacm.Service"),
    *("rdmacm.aio.AsyncConnection", "rdmacm.aio.AsyncListener", "rdmacm.aio.AsyncRequest", "rdmacm.aio.StreamServer"),
    "rdmacm.lab.LabHost",
    *("rdmacm.testing.FabricWire", "rdmacm.testing.Host", "rdmacm.testing.Program"),
    *("rdmacm.verbs.AsyncEvent", "rdmacm.Context"),
}


class Definition(NamedTuple):
    """Where a name is defined."""

    module: str
    name: str


class Source:
    """The definitions and imports of a module, from its text: annotations are not evaluated."""

    def __init__(self, module: str) -> None:
        file = SOURCES.parent / f"{module.replace('.', '/')}.py"
        self.text = (file if file.exists() else file.with_suffix("") / "__init__.py").read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.imports: dict[str, Definition] = {}
        self.definitions: dict[str, ast.stmt] = {}
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                self.imports |= {a.asname or a.name: Definition(node.module, a.name) for a in node.names}
        for statement in tree.body:
            self.definitions |= dict.fromkeys(names_defined(statement), statement)


def names_defined(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [statement.name]
        case ast.Assign(targets=targets):
            return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


@cache
def source(module: str) -> Source:
    return Source(module)


def definition_of(module: str, name: str) -> Definition | None:
    """Where the package defines a name that a module uses; None if the name is not the package's."""
    if not module.startswith("rdmacm"):
        return None
    found = source(module)
    if name in found.definitions:
        return Definition(module, name)
    origin = found.imports.get(name)
    return definition_of(*origin) if origin is not None and origin != (module, name) else None


def public_names(module: ModuleType) -> list[str]:
    """The names that a module offers: its ``__all__``, or what it imports as itself."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return re.findall(r"^ *from [\w.]+ import (\w+) as \1$", source(module.__name__).text, re.MULTILINE)


@cache
def public() -> dict[Definition, str]:
    """The public name of each definition that has one."""
    found: dict[Definition, str] = {}
    for name in [*PUBLIC, *INTERFACES]:
        module = importlib.import_module(name)
        offered = {each: definition_of(name, each) for each in public_names(module)}
        if name == "rdmacm.cma":  # it has everything from its modules
            for part in ("calls", "constants", "ibverbs", "structures", "verbs"):
                inner = importlib.import_module(f"{name}.{part}")
                offered |= {each: definition_of(inner.__name__, each) for each in inner.__all__}
        for each, definition in offered.items():
            if definition is not None:
                found.setdefault(definition, f"{name}.{each}")
    return found


def definitions(modules: Sequence[str]) -> Iterator[tuple[str, Definition, ast.stmt]]:
    """The public names of some modules, with their definitions."""
    for definition, label in public().items():
        if label.rpartition(".")[0] in modules:
            yield label, definition, source(definition.module).definitions[definition.name]


def classes(modules: Sequence[str] = PUBLIC) -> Iterator[tuple[str, type]]:
    for label, (module, name), node in definitions(modules):
        if isinstance(node, ast.ClassDef):
            yield label, getattr(importlib.import_module(module), name)


def bodies(cls: type) -> Iterator[tuple[type, ast.ClassDef]]:
    """The classes of the package that a class consists of, with their definitions."""
    for base in cls.__mro__:
        if base.__module__.startswith("rdmacm"):
            node = source(base.__module__).definitions[base.__name__]
            assert isinstance(node, ast.ClassDef)
            yield base, node


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def annotations_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    yield from (each.annotation for each in every if each is not None and each.annotation is not None)
    if function.returns is not None:
        yield function.returns


def names_in(annotation: ast.expr) -> Iterator[str]:
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation = annotation.slice.elts[0]  # laid_out() takes the place on the wire away
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


# -- help() -------------------------------------------------------------------------------------------------------


def page_of(module: ModuleType) -> str:
    return pydoc.plain(pydoc.render_doc(module))


@pytest.mark.parametrize("name", INDEXES)
def test_page_of_a_package_lists_its_public_names(name: str) -> None:
    module = importlib.import_module(name)
    page = page_of(module)
    assert page.count("\n") <= INDEXES[name]
    entries = re.findall(r"^    (\w+(?:, \w+)*)(?: {2,}|$)", str(module.__doc__), re.MULTILINE)
    listed = [each for entry in entries for each in entry.split(", ")]
    modules = {each.rpartition(".")[2] for each in PUBLIC}
    assert sorted(listed) == sorted(set(public_names(module)) - modules), "each public name once"


def test_package_and_architecture_name_the_public_modules() -> None:
    entries = re.findall(r"^    (rdmacm\.[\w.]+(?:, rdmacm\.[\w.]+)*)", str(rdmacm.__doc__), re.MULTILINE)
    assert sorted(", ".join(entries).split(", ")) == sorted([*PUBLIC[1:], *INTERFACES])
    architecture = (SOURCES.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [name for name in [*PUBLIC, *INTERFACES] if f"`{name}`" not in architecture] == []


def test_tab_completion_offers_the_public_names_and_modules() -> None:
    assert dir(rdmacm) == sorted({*public_names(rdmacm), *(name.partition(".")[2] for name in PUBLIC[1:])})
    assert [name for name in dir(rdmacm) if not hasattr(rdmacm, name)] == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in INDEXES])
def test_page_of_a_module_has_its_public_names(name: str) -> None:
    module = importlib.import_module(name)
    page = page_of(module)
    assert [each for each in public_names(module) if not re.search(rf"\b{each}\b", page)] == []


def named_on_pages() -> list[str]:
    """What the pages tell their readers to give to pydoc."""
    texts = [importlib.import_module(name).__doc__ or "" for name in PUBLIC]
    texts.append((SOURCES.parents[1] / "README.md").read_text(encoding="utf-8"))
    found = {each for text in texts for each in re.findall(r"pydoc (rdmacm(?:\.\w+)*)", text)}
    return sorted(found | {*PUBLIC, *INTERFACES})


@pytest.mark.parametrize("name", named_on_pages())
def test_pydoc_describes_what_the_pages_name(name: str, tmp_path: Path) -> None:
    """As a command: it imports one name, and nothing is loaded before."""
    done = subprocess.run(
        [sys.executable, "-m", "pydoc", name], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    last = name.rpartition(".")[2]
    assert re.match(rf"Help on (package|module|class) (\w+\.)*{last}\b", done.stdout), done.stdout[:200]


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_has_a_page_of_its_own(name: str) -> None:
    for each in public_names(importlib.import_module(name)):
        assert pydoc.locate(f"{name}.{each}") is getattr(importlib.import_module(name), each)


# -- documentation ------------------------------------------------------------------------------------------------


def fields(cls: type, node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """The attributes that a class assigns or declares, and whether each is documented.

    Documentation is a comment ``#:`` above the field or above the group of fields it is in, the docstring of the class,
    which has the name in double backquotes, or a text in ``__slots__``.
    """
    slots = cls.__dict__.get("__slots__")
    described = {*slots} if isinstance(slots, dict) else set()
    described |= {*re.findall(r"\w+", " ".join(re.findall(r"``([^`]+)``", cls.__doc__ or "")))}
    lines = source(cls.__module__).lines
    inside = [each for method in methods(node) for each in ast.walk(method)]
    for each in [*node.body, *inside]:
        if isinstance(each, ast.Assign | ast.AnnAssign):
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                for name in attribute_names(target, each in node.body):
                    yield name, name in described or has_comment(lines, each.lineno)


def attribute_names(target: ast.expr, in_body: bool) -> Iterator[str]:
    for node in ast.walk(target):
        if in_body and isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def has_comment(lines: list[str], number: int) -> bool:
    """Whether a line is in a group of assignments, of one type if they have types, that a comment ``#:`` begins."""
    kind = re.match(r" +[\w.]+(: [^=]+| = )", lines[number - 1])
    for line in reversed(lines[: number - 1]):
        if line.strip().startswith("#:"):
            return True
        other = re.match(r" +[\w.]+(: [^=]+| = )", line)
        if kind is None or other is None or other[1].strip() != kind[1].strip():
            return False
    return False


def undocumented(cls: type) -> list[str]:
    """The public attributes without documentation, of the class itself or of the class that it has them from."""
    documented: dict[str, bool] = {}
    for base, node in bodies(cls):
        for method in methods(node):
            found = getattr(base, method.name, None)
            documented[method.name] = documented.get(method.name, False) or bool(inspect.getdoc(found))
        for name, has_text in fields(base, node):
            documented[name] = documented.get(name, False) or has_text or is_documented(getattr(base, name, None))
    return [name for name, has_text in documented.items() if not has_text and not name.startswith("_")]


def is_documented(value: Any) -> bool:
    """Whether a class attribute is a documented function, property or other descriptor, perhaps under another name."""
    text = str(value.__doc__ or "") if hasattr(value, "__get__") else ""
    return bool(text) and not text.startswith("Alias for field number")  # a field of a NamedTuple


def test_every_public_class_and_its_attributes_are_documented() -> None:
    missing = []
    for label, cls in classes([*PUBLIC, *INTERFACES]):
        if not (cls.__doc__ or "").strip():
            missing.append(label)
        if not issubclass(cls, enum.Enum):  # the manual page has the members
            missing += [f"{label}.{name}" for name in undocumented(cls)]
    assert missing == []


def test_every_public_function_is_documented() -> None:
    found = definitions([*PUBLIC, *INTERFACES])
    functions = {label: node for label, _, node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert [label for label, node in functions.items() if not ast.get_docstring(node)] == []


def test_constructors_that_take_internal_objects_are_not_for_users() -> None:
    made = {label: str(cls.__doc__) for label, cls in classes() if label in MADE_BY_THE_PACKAGE}
    assert made.keys() == MADE_BY_THE_PACKAGE
    assert [label for label, text in made.items() if "made by" not in text] == []


def docstrings() -> Iterator[tuple[str, str]]:
    for label, (module, name), _ in definitions(PUBLIC):
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type) or inspect.isroutine(found):
            yield label, inspect.getdoc(found) or ""
        if isinstance(found, type):
            for base, node in bodies(found):
                for method in methods(node):
                    if not method.name.startswith("_"):
                        yield f"{label}.{method.name}", inspect.getdoc(getattr(base, method.name)) or ""


def is_public_reference(reference: str) -> bool:
    modules = {*PUBLIC, *INTERFACES}
    parts = reference.split(".")
    for size in range(len(parts), 0, -1):
        name = ".".join(parts[:size])
        if name in modules:
            return size == len(parts) or parts[size] in public_names(importlib.import_module(name))
    return False


def test_public_docstrings_refer_to_public_names() -> None:
    found = [(label, each) for label, text in docstrings() for each in re.findall(r"`~?(rdmacm\.[\w.]+)`", text)]
    assert len(found) > 50
    assert [(label, reference) for label, reference in found if not is_public_reference(reference)] == []


def test_guides_and_examples_import_public_modules() -> None:
    root = SOURCES.parents[1]
    pages = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("examples/*.py")]
    imported = {
        (page.name, module)
        for page in pages
        for module in re.findall(r"^ *(?:from|import) (rdmacm[\w.]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(imported) > 10
    assert [each for each in sorted(imported) if each[1] not in {*PUBLIC, *INTERFACES}] == []


# -- types --------------------------------------------------------------------------------------------------------


def test_public_signatures_name_types_that_users_can_import() -> None:
    hidden: set[tuple[str, str]] = set()

    def check(module: str, found: ast.expr, where: str) -> None:
        for name in names_in(found):
            definition = definition_of(module, name)
            if definition is None or definition in public():
                continue
            if not is_type_variable(definition) and not is_descriptor(definition):
                hidden.add((f"{definition.module}.{definition.name}", where))

    for label, (module, _), node in definitions(PUBLIC):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for found in annotations_of(node):
                check(module, found, label)
    for label, cls in classes():
        for base, node in bodies(cls):
            for method in methods(node):
                is_special = method.name.startswith("__")
                if (is_special or not method.name.startswith("_")) and not (
                    method.name == "__init__" and label in MADE_BY_THE_PACKAGE
                ):
                    for found in annotations_of(method):
                        check(base.__module__, found, f"{label}.{method.name}")
            for each in ast.walk(node):
                if isinstance(each, ast.AnnAssign):
                    for name in attribute_names(each.target, each in node.body):
                        if not name.startswith("_"):
                            check(base.__module__, each.annotation, f"{label}.{name}")
    assert sorted(hidden) == []


def is_descriptor(definition: Definition) -> bool:
    """Whether users get what it holds, not the object."""
    found = getattr(importlib.import_module(definition.module), definition.name, None)
    return isinstance(found, type) and hasattr(found, "__get__")


def is_type_variable(definition: Definition) -> bool:
    node = source(definition.module).definitions[definition.name]
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("TypeVar(")
