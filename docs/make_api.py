"""The pages of the site about the public modules, made of their docstrings: what ``pydoc`` shows, with links."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

#: Where the public modules are listed, and their rows.
LIST = Path(__file__).with_name("architecture.md")
TABLE = re.compile(r"^\| public module \|.*\n\|---.*\n((?:\|.*\n)+)", re.MULTILINE)
ROW = re.compile(r"^\| `(rdmacm[\w.]*)` \| (.+) \|$", re.MULTILINE)
#: What a docstring says about its list for the reader of a terminal.
ABOUT_THE_LIST = re.compile(r"This page lists the public names.*?(?: describes one\.|:$)\s*", re.DOTALL | re.MULTILINE)
#: The modules of rdmacm.cma, each a header of C or a part of one.
PARTS = ("calls", "verbs", "ibverbs", "extended", "refused", "structures", "constants")
#: What classes inherit from these is Python's, and not listed.
PYTHONS = "_BaseSelectorImpl, object, int, str, tuple, IntEnum, IntFlag, OSError, Protocol, NamedTuple"
ABOUT = """\
The public modules, from their docstrings:

{modules}

`python3 -m pydoc rdmacm.CmId` shows the same in a terminal. What is on none of these pages is internal
([architecture](../architecture.md#public-and-internal)).
"""


@dataclass
class Group:
    """A group of names in the docstring of an index: its rows are names and what they are."""

    title: str
    rows: list[tuple[list[str], str]] = field(default_factory=list)

    def add(self, line: str) -> None:
        names, _, text = line.removeprefix("    ").partition("  ")
        if line.startswith(" " * 8):  # the rest of a row
            self.rows[-1] = (self.rows[-1][0], f"{self.rows[-1][1]} {line.strip()}".strip())
        else:
            self.rows.append((names.split(", "), text.strip()))


class Pages:
    """The pages, in which each class and function is described once."""

    def __init__(self) -> None:
        #: Where an object is described.
        self.described: dict[int, str] = {}
        table = TABLE.search(LIST.read_text("utf-8"))
        assert table is not None
        self.modules = ROW.findall(table[1])

    def made(self) -> dict[str, str]:
        """The text of each page, by its file in the folder of these pages."""
        links = "\n".join(f"- [{name}]({name}.rst): {purpose}" for name, purpose in self.modules)
        pages = "\n".join(name for name, _ in self.modules)
        index = f"# API\n\n{ABOUT.format(modules=links)}\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
        return {"index.md": index} | {f"{name}.rst": "\n".join(self._page(name)) for name, _ in self.modules}

    def _page(self, name: str) -> Iterator[str]:
        module = import_module(name)
        text, groups = split(inspect.getdoc(module) or "")
        yield from heading(name, "=")
        yield from [f".. py:module:: {name}", "", text, ""]
        for group in groups:
            title, _, more = group.title.partition(":")
            yield from heading(title, "-")
            yield from [more.strip().capitalize() + "." if more else "", ""]
            yield from overview(group, dict(self.modules))
            for each in (each for names, _ in group.rows for each in names):
                yield from self._description(name, each)
        if not groups:
            parts = [f"{name}.{part}" for part in PARTS] if name == "rdmacm.cma" else [name]
            for part in parts:
                yield from self._part(name, import_module(part))

    def _part(self, name: str, module: ModuleType) -> Iterator[str]:
        """The names of a module's ``__all__``; those of another module are its part."""
        names: list[str] = module.__all__
        if module.__name__ != name:
            title, _, text = (inspect.getdoc(module) or "").partition("\n")
            yield from heading(module.__name__.rpartition(".")[2], "-")
            yield from [f"{title}\n{text}", ""]
        constants = [each for each in names if not callable(getattr(module, each))]
        for each in names:
            if each not in constants:
                yield from self._description(name, each)
        if constants:
            yield from [", ".join(f"``{each}``" for each in constants), ""]

    def _description(self, module: str, name: str) -> Iterator[str]:
        found = getattr(import_module(module), name, None)
        if found is None or inspect.ismodule(found) or id(found) in self.described:
            return
        self.described[id(found)] = f"{module}.{name}"
        if isinstance(found, type) and issubclass(found, enum.Enum):
            yield from [f".. autoclass:: {module}.{name}", "   :no-inherited-members:", ""]
        elif isinstance(found, type):
            yield from [f".. autoclass:: {module}.{name}", f"   :inherited-members: {PYTHONS}", ""]
        elif inspect.isroutine(found):
            yield from [f".. autofunction:: {module}.{name}", ""]
        else:
            yield from [f".. autodata:: {module}.{name}", "   :no-value:", ""]


def heading(text: str, line: str) -> list[str]:
    return [text, line * len(text), ""]


def split(docstring: str) -> tuple[str, list[Group]]:
    """The text of a docstring, and the groups of names in it: paragraphs whose rows are indented."""
    text, groups = [], list[Group]()
    docstring = ABOUT_THE_LIST.sub("", docstring)
    for paragraph in docstring.split("\n\n"):
        title, *rows = paragraph.splitlines() or [""]
        if title.startswith("    "):
            title, rows = "Names", [title, *rows]
        if rows and all(row.startswith("    ") for row in rows):
            groups.append(Group(title))
            for row in rows:
                groups[-1].add(row)
        else:
            text.append(paragraph)
    return "\n\n".join(text), groups


def overview(group: Group, modules: Collection[str]) -> Iterator[str]:
    """The rows of a group, as a table with links."""
    yield from [".. list-table::", "   :widths: 38 62", ""]
    for names, text in group.rows:
        shown = ", ".join(f":doc:`{each}`" if each in modules else f":py:obj:`{each}`" for each in names)
        yield from [f"   * - {shown}", f"     - {text}"]
    yield ""
