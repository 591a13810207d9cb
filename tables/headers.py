"""What C headers say: their enumerations and structures, and the numbers that the compiler gives them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Field", "Function", "Headers", "Parameter", "Record", "fields_of", "installed", "version_of"]

#: Debian's packages, and a header of each.
_PACKAGES = {
    "libibverbs-dev": "infiniband/verbs.h",
    "librdmacm-dev": "rdma/rdma_cma.h",
    "linux-libc-dev": "rdma/rdma_user_cm.h",
}
_TOKEN = re.compile(r"\w+|[^\w\s]")
_CLOSING = {"{": "}", "(": ")", "[": "]"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, or its result: ``levels`` of pointers to a type."""

    type: str
    levels: int


@dataclass(frozen=True)
class Function:
    """The result and the parameters of a function."""

    result: Parameter
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Field:
    """A member of a structure.

    ``type`` is ``*`` for pointers, else C's; ``inner`` what is declared in place; ``function`` what it points to.
    """

    name: str
    type: str
    length: str = ""
    inner: Record | None = None
    function: Function | None = None


@dataclass(frozen=True)
class Record:
    """A structure or a union."""

    kind: str
    fields: tuple[Field, ...]


def installed(folder: Path) -> str:
    """Why the headers of a root directory cannot be read; empty if they can."""
    missing = [name for name, file in _PACKAGES.items() if not (folder / "usr/include" / file).exists()]
    missing += ["gcc"] if shutil.which("gcc") is None else []
    return f"needs {', '.join(missing)}" if missing else ""


def version_of(folder: Path) -> int:
    """The version of rdma-core whose headers are in a root directory, as 44; 0 if nothing tells it."""
    for pattern in ("usr/lib*/pkgconfig", "usr/lib/*/pkgconfig"):
        for file in folder.glob(f"{pattern}/libibverbs.pc"):
            if found := re.search(r"^Version: \d+\.\d+\.(\d+)", file.read_text("utf-8"), re.MULTILINE):
                return int(found[1])
    return 0


def closing(tokens: Sequence[str], start: int) -> int:
    """Where the bracket at ``start`` is closed."""
    depth, opening, closing = 0, tokens[start], _CLOSING[tokens[start]]
    for at in range(start, len(tokens)):
        depth += (tokens[at] == opening) - (tokens[at] == closing)
        if not depth:
            return at
    raise ValueError("a bracket is not closed")


def split(tokens: Sequence[str], separator: str) -> list[list[str]]:
    """The parts between separators that are in no bracket."""
    parts: list[list[str]] = [[]]
    at = 0
    while at < len(tokens):
        end = closing(tokens, at) + 1 if tokens[at] in _CLOSING else at + 1
        if tokens[at] == separator:
            parts.append([])
        else:
            parts[-1] += tokens[at:end]
        at = end
    return [part for part in parts if part]


def _field(tokens: list[str]) -> Field:
    if tokens[0] in ("struct", "union") and "{" in tokens[:3]:
        start = tokens.index("{")
        end = closing(tokens, start)
        record = Record(tokens[0], _fields(tokens[start + 1 : end]))
        return Field(tokens[end + 1] if end + 1 < len(tokens) else "", tokens[0], inner=record)
    if "(" in tokens:  # a pointer to a function, whose name is in the first brackets
        at = tokens.index("(")
        return Field(tokens[at + 2], "*", function=_function(tokens[:at], tokens[tokens.index(")") + 2 : -1]))
    length = ""
    if "[" in tokens:
        at = tokens.index("[")
        tokens, length = tokens[:at], " ".join(tokens[at + 1 : -1]) or "0"
    assert "," not in tokens, tokens
    return Field(tokens[-1], "*" if "*" in tokens else " ".join(tokens[:-1]), length)


def _parameter(tokens: Sequence[str], *, has_name: bool = True) -> Parameter:
    words = [token for token in tokens if token not in ("const", "*")]
    return Parameter(" ".join(words[:-1] if has_name else words), tokens.count("*"))


def _function(result: Sequence[str], parameters: Sequence[str]) -> Function:
    texts = [] if [*parameters] == ["void"] else split(parameters, ",")
    return Function(_parameter(result, has_name=False), tuple(_parameter(text) for text in texts))


def _fields(tokens: Sequence[str]) -> tuple[Field, ...]:
    return tuple(_field(part) for part in split(tokens, ";"))


def fields_of(text: str) -> tuple[Field, ...]:
    """The members in the text of a structure."""
    return _fields(_TOKEN.findall(text))


class Headers:
    """Some headers of a root directory."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        include = folder / "usr/include"
        #: Options of gcc: these headers before the system's.
        self.options = [] if folder == Path("/") else [f"-isystem{each}" for each in (include, *include.glob("*-gnu"))]
        self.options += ["-D_GNU_SOURCE"]
        self.text = "".join(f"#include <{name}>\n" for name in names)
        self.macros = set(re.findall(r"^#define (\w+)", self._preprocessed("-dM"), re.MULTILINE))
        #: The enumerators by the tag of their enumeration; those of enumerations without a tag have an empty one.
        self.enums: dict[str, list[str]] = {}
        self.records: dict[str, Record] = {}
        text = re.sub(r"__attribute__ *\(\(([^()]|\([^()]*\))*\)\)|__extension__", "", self._preprocessed("-P"))
        self._declarations = text
        self.token = _TOKEN
        tokens = self.tokens = _TOKEN.findall(text)
        for at, token in enumerate(tokens[:-2]):
            if token not in ("enum", "struct", "union") or "{" not in tokens[at + 1 : at + 3]:
                continue
            start = tokens.index("{", at)
            tag, inside = "".join(tokens[at + 1 : start]), tokens[start + 1 : closing(tokens, start)]
            if token == "enum":
                self.enums.setdefault(tag, []).extend(part[0] for part in split(inside, ","))
            elif tag.startswith(("ib", "_ib", "rdma", "verbs")):
                self.records[tag] = Record(token, _fields(inside))
        self.enumerators = {name for names in self.enums.values() for name in names}
        self._values: dict[str, int] = {}

    def _preprocessed(self, option: str) -> str:
        command = ["gcc", "-E", option, *self.options, "-xc", "-"]
        return subprocess.run(command, input=self.text, check=True, capture_output=True, text=True).stdout

    def has(self, name: str) -> bool:
        """Whether this is an enumerator, a macro, or the tag of a structure."""
        return name in self.enumerators or name in self.macros or name in self.records

    def function(self, name: str) -> Function:
        """A function that the headers declare."""
        found = re.search(rf"^(\w[\w \*]*?)\b{name} *\(([^()]*)\) *;", self._declarations, re.MULTILINE)
        if found is None:
            raise ValueError(f"the headers declare no {name}")
        return _function(_TOKEN.findall(found[1]), _TOKEN.findall(found[2]))

    def values(self, expressions: Iterable[str], declarations: str = "") -> dict[str, int]:
        """The values of expressions, as a program that the compiler makes prints them."""
        wanted = list(dict.fromkeys(expressions))
        if unknown := [each for each in wanted if each not in self._values]:
            # A program takes its time, whatever it prints: the first one has all enumerators.
            every = [*unknown, *(() if self._values else self.enumerators)]
            self._values |= self._printed(every, declarations)
        return {each: self._values[each] for each in wanted}

    def _printed(self, expressions: Sequence[str], declarations: str) -> dict[str, int]:
        lines = "".join(
            f'    printf(({each}) < 0 ? "%lld\\n" : "%llu\\n", (long long)({each}));\n' for each in expressions
        )
        text = f"{self.text}#include <stddef.h>\n#include <stdio.h>\n{declarations}\nint main(void) {{\n{lines}}}\n"
        with tempfile.TemporaryDirectory() as place:
            program = str(Path(place, "values"))
            subprocess.run(["gcc", "-w", *self.options, "-o", program, "-xc", "-"], input=text, check=True, text=True)
            printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
        return dict(zip(expressions, map(int, printed.split()), strict=True))
