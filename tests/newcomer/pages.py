"""What a document tells its reader to do: commands, Python to paste, files to save, and the output they have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Languages of blocks that a reader only looks at.
READ_ONLY = frozenset({"", "c"})
#: Parts of the output that differ from run to run.
VARYING = re.compile(
    r"""
      (?P<time> \b ([\d,]+/)*[\d,]+(\.\d+)?\ us\b | \b [\d,]+\.\d+\ m?s\b )
    | (?P<process> (?<=process\ ) \d+ )
    | (?P<message> ^ [\d:.]{12}\ \d+ (?=\ rdmacm\.) )           # the time and the process of a line of the log
    | (?P<comm_id> (?<=\bid\ ) 0x[0-9a-f]{8} \b )
    | (?P<logged_qp> (?:(?<=QP\ )|(?<=to\ )) 0x[0-9a-f]{6} \b )
    | (?P<qp_number> (?<=number\ ) 0x[0-9a-f]{6} )
    | (?P<flow_label> (?<=flow\ label\ ) 0x[0-9a-f]{2,5} )
    | (?P<service_id> \b 0x13f[89a-f][0-9a-f]{3} \b )          # of a free port
    | (?P<port> (?<=:) [3-6]\d{4} \b )                         # a free port
    | (?P<rate> [\d,]+ (?=\ MB/s|\ a\ second|\ messages/s) )
    | (?P<core> \bwith(out)?\ the\ compiled\ core\ \(.*\) )
    | (?P<fabric> \b rdmacm-[0-9a-f]{12} \b )
    | (?P<guid> (?<![:\w]) [0-9a-f]{4} (:[0-9a-f]{4}){3} (?![:\w]) )
    | (?P<path> (?<=[(\ ]) (/[\w.-]+)+/ (?=python|rdmacm) )    # of the environment
    | (?P<decimal> (?<![\d.]) \d[\d,]*\.\d+ (?![\d.]) )        # a time or a rate, but not an IPv4 address
    """,
    re.VERBOSE,
)
#: Such parts in the rows of `rdmacm perf`: counts and rates, but not sizes and depths.
VARYING_IN_PERF = re.compile(
    r"(?P<count> (?<!\S) \d[\d,]{2,} (?!\S) ) | (?P<uses> \d+/\d+ (?!\S) ) | (?P<use> \d+ (?=\ %\ t?here) ) | "
    + VARYING.pattern,
    re.VERBOSE,
)
PERF_ROW = re.compile(r"(\S+:\d+ +)?(send|write|read) .*[KM]?i?B[, ]")


@dataclass(frozen=True)
class Command:
    """A command line, and the output that the page shows; None if it shows none."""

    line: int
    text: str
    shown: str | None

    @property
    def fails(self) -> bool:
        """Whether the page shows an error as the last line."""
        return bool(re.search(r"^rdmacm: .*\[E[A-Z]+\].*\n\Z", self.shown or "", re.MULTILINE))


@dataclass(frozen=True)
class Paste:
    """Python to paste, and the output that the page shows."""

    line: int
    text: str
    shown: str | None


@dataclass(frozen=True)
class File:
    """Python to save under the name in its first line."""

    line: int
    name: str
    text: str


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is the number of its first line within the fence."""

    line: int
    language: str
    text: str


def pages() -> dict[str, Path]:
    """README.md and the pages in docs/, by their path in the project; without the lessons, which tests/course reads."""
    found = [path for path in sorted(ROOT.glob("docs/**/*.md")) if not re.match(r"\d-", path.name)]
    return {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *found)}


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(.*)\n((?:.*\n)*?)^```$", text, re.MULTILINE)
    return [Block(text.count("\n", 0, match.start()) + 2, match[1], match[2]) for match in found]


def steps(page: Path) -> list[Command | Paste | File]:
    """What the reader of a page does, in order."""
    found: list[Command | Paste | File] = []
    for block in blocks(page):
        if block.language == "sh":
            lines = enumerate(block.text.splitlines(), block.line)
            found += [Command(number, without_comment(line), None) for number, line in lines]
        elif block.language == "console":
            found += commands_with_output(block)
        elif block.language == "python":
            named = re.match(r"# (\w+\.py)\n", block.text)
            found.append(File(block.line, named[1], block.text) if named else Paste(block.line, block.text, None))
        elif block.language == "output":
            last = found.pop() if found else None
            assert isinstance(last, Paste), f"{page.name}:{block.line}: output of nothing"
            found.append(Paste(last.line, last.text, block.text))
        else:
            assert block.language in READ_ONLY, f"{page.name}:{block.line}: what is a block of {block.language}?"
    return found


def without_comment(line: str) -> str:
    return re.sub(r"\s+# .*", "", line)


def commands_with_output(block: Block) -> list[Command | Paste | File]:
    """The lines of a terminal: commands after ``$``, each followed by its output."""
    found: list[Command | Paste | File] = []
    number = block.line
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE):
        command, _, shown = part.partition("\n")
        if part:
            assert number > block.line or block.text.startswith("$ "), f"line {number}: output without a command"
            found.append(Command(number, without_comment(command), shown))
        number += part.count("\n")
    return found


def output_pattern(shown: str) -> re.Pattern[str]:
    """Matches the outputs that the text of a page stands for.

    What differs from run to run (:data:`VARYING`) may have another value, a line ``...`` stands for any lines, ``...``
    at the end of a line for its rest, and the number of spaces between words does not matter. After a last line ``...``
    another one may have begun.
    """
    lines = shown.splitlines()
    return re.compile("".join(map(_line_pattern, lines)) + (".*" if lines[-1:] == ["..."] else ""))


def _line_pattern(line: str) -> str:
    if line == "...":
        return r"(?:.*\n)*?"
    varying = VARYING_IN_PERF if PERF_ROW.match(line) else VARYING
    pattern, end = "", 0
    for match in varying.finditer(line):
        pattern += _literal(line[end : match.start()]) + _any_value(match)
        end = match.end()
    rest = line[end:]
    is_cut = rest.endswith("...")
    return pattern + _literal(rest.removesuffix("...")) + (".*" if is_cut else " *") + r"\n"


def _literal(text: str) -> str:
    return re.sub(r"(\\ )+", " +", re.escape(text))


def _any_value(match: re.Match[str]) -> str:
    return {
        "time": r"[\d,./]+ [um]?s",
        "process": r"\d+",
        "message": r"[\d:.]{12} \d+",
        "comm_id": r"0x[0-9a-f]{8}",
        "logged_qp": r"0x[0-9a-f]{6}",
        "qp_number": r"0x[0-9a-f]{6}",
        "flow_label": r"0x[0-9a-f]+",
        "service_id": r"0x13f[89a-f][0-9a-f]{3}",
        "port": r"\d+",
        "uses": r"\d+/\d+",
        "core": r"with(?:out)? the compiled core \(.*\)",
        "fabric": r"rdmacm-[0-9a-f]{12}",
        "guid": r"[0-9a-f:]{19}",
        "path": r"(?:/[\w.-]+)+/",
    }.get(match.lastgroup or "", r"[\d,.]+")
