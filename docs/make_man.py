"""Write the manual pages and the completions of shells for a wheel: python3 docs/make_man.py DIRECTORY.

DIRECTORY gets what an installation has in share/: man/man1 from the help pages of the commands, man/man3 from the
docstrings of the public names, and the completion of each shell where it looks for it.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

import rdmacm  # noqa: E402
from rdmacm.tools.commands import COMMANDS  # noqa: E402
from rdmacm.tools.completion import script  # noqa: E402
from rdmacm.tools.main import parser_of, program_parser  # noqa: E402
from rdmacm.tools.output import EXIT_STATUS, Parser, help_of, invocation  # noqa: E402

#: Where each shell looks for a completion, below share/.
COMPLETIONS = {
    "bash": "bash-completion/completions/rdmacm",
    "zsh": "zsh/site-functions/_rdmacm",
    "fish": "fish/vendor_completions.d/rdmacm.fish",
}
#: The modules with a page in section 3, and the names of rdmacm and of rdmacm.aio with one.
MODULES = ("rdmacm.aio", "rdmacm.verbs", "rdmacm.cma", "rdmacm.testing", "rdmacm.ib")
NAMES = (
    *("connect", "listen", "Connection", "Listener", "Request", "Region", "RemoteRegion"),
    *("getaddrinfo", "AddrInfo", "explain", "CmId", "EventChannel", "CmEvent", "ConnParam", "create_ep"),
    *("devices", "open_device", "Device", "Context", "RdmaError", "capture", "query_counters"),
)
AIO_NAMES = ("connect", "listen", "AsyncConnection", "AsyncListener")
VERBS_NAMES = ("QP", "CQ", "PD", "MR", "SendWR", "RecvWR", "CompChannel", "SRQ", "MW", "AH")


# -- roff ----------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Text for troff: what it would take for a request, an escape or a typographic character stays as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    for sign, name in (("'", "aq"), ("`", "ga"), ("^", "ha"), ("~", "ti")):
        text = text.replace(sign, f"\\({name}")
    text = "".join(each if each.isascii() else f"\\[u{ord(each):04X}]" for each in text)
    return re.sub(r"^\.", "\\&.", text, flags=re.MULTILINE)


def head(name: str, section: int) -> list[str]:
    """The first lines of a page."""
    manual = "User Commands" if section == 1 else "Library Functions"
    title = escaped(name.upper() if section == 1 else name)
    moment = float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())  # for builds that anybody can repeat
    date = time.strftime("%Y-%m-%d", time.gmtime(moment))
    return [f'.TH "{title}" {section} "{date}" "rdmacm {rdmacm.__version__}" "{manual}"']


def inline(text: str) -> str:
    """A paragraph of a docstring: names in bold, references by their last part."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"``\1``", " ".join(text.split()))
    parts = re.split(r"``(.+?)``", text)
    return "".join(f"\\fB{escaped(part)}\\fR" if at % 2 else escaped(part) for at, part in enumerate(parts))


def literal(text: str) -> list[str]:
    """Lines that are not filled."""
    return [".PP", ".in +4n", ".nf", *escaped(textwrap.dedent(text)).split("\n"), ".fi", ".in"]


def guarded(line: str) -> str:
    """A line of text that does not begin as a request does."""
    return f"\\&{line}" if line.startswith((".", "'")) else line


# -- section 1 -----------------------------------------------------------------------------------------------


def command_page(parser: Parser) -> str:
    """The page of a command."""
    page = parser.page
    name = page.program.replace(" ", "-")
    out = [*head(name, 1), ".SH NAME", f"{escaped(name)} \\- {escaped(page.summary)}"]
    out += [".SH SYNOPSIS", f"\\fB{escaped(page.program)}\\fR {escaped(parser.synopsis)}", ".SH DESCRIPTION"]
    for number, text in enumerate(page.paragraphs):
        if text.startswith(" "):
            out += literal(text)
        else:
            out += [".PP"] * (number > 0) + [guarded(escaped(" ".join(text.split())))]
    out.append(".SH OPTIONS")
    for action in parser.arguments:
        out += [".TP", f"\\fB{escaped(invocation(action))}\\fR", guarded(escaped(help_of(action)))]
    if not page.command:
        out.append(".SH COMMANDS")
        for command in COMMANDS:
            out += [".TP", f"\\fBrdmacm\\-{command}\\fR(1)", escaped(tool_parser(command).page.summary)]
    for title, pairs in (("EXIT STATUS", EXIT_STATUS), ("ENVIRONMENT", page.variables)):
        out.append(f".SH {title}")
        for term, text in pairs:
            out += [".TP", f"\\fB{escaped(term)}\\fR", guarded(escaped(text))]
    out.append(".SH EXAMPLES")
    for example, text in page.examples:
        out += [".TP", f"\\fB{escaped(example)}\\fR", guarded(escaped(text))]
    out += [".SH SEE ALSO", guarded(escaped(page.see_also))]
    return "\n".join(out) + "\n"


def tool_parser(command: str) -> Parser:
    """The parser of a command."""
    return parser_of(import_module(f"rdmacm.tools.{command}"))


# -- section 3 -----------------------------------------------------------------------------------------------


def documented(text: str) -> list[str]:
    """A docstring: paragraphs, lists, definitions, examples."""
    out: list[str] = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = part.split("\n")
        if lines[0].startswith((">>>", "    ", "|", "+-")):
            out += literal(part)
        elif lines[0].startswith("- "):
            for item in re.split(r"\n(?=- )", part):
                out += [".IP \\(bu 2", guarded(inline(item[2:]))]
        elif len(lines) > 1 and all(line.startswith("    ") for line in lines[1:]):  # a title and its table
            out += [".PP", f"\\fB{escaped(lines[0])}\\fR", *literal("\n".join(lines[1:]))]
        else:
            out += [".PP", guarded(inline(part))]
    return out


def signature(name: str, thing: object) -> str:
    """How it is called, in the order of its parameters; without the types, which help() shows."""
    try:
        found = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    kept = [each.replace(annotation=each.empty) for each in found.parameters.values() if each.name != "self"]
    try:
        text = str(found.replace(parameters=kept, return_annotation=found.empty))
        return name + re.sub(r"<([\w.|]+): [^>]*>", r"\1", text)  # members of enumerations
    except ValueError:
        return name


def first_sentence(text: str) -> str:
    """What the line NAME says."""
    first = re.sub(r":\w+:`~?([^`]+)`", r"\1", " ".join(inspect.cleandoc(text).split("\n\n")[0].split())).replace(
        "``", ""
    )
    return re.split(r"(?<=[a-z)])[.:;]\s", first + " ")[0].strip().rstrip(".")


def api_page(name: str, thing: object) -> str:
    """The page of a public name or module."""
    text = inspect.getdoc(thing) or ""
    out = [*head(name, 3), ".SH NAME", f"{escaped(name)} \\- {escaped(first_sentence(text))}", ".SH SYNOPSIS", ".nf"]
    module = name if isinstance(thing, ModuleType) else name.rpartition(".")[0]
    out.append(f"\\fBimport {escaped(module)}\\fR")
    out.append(".fi")
    if callable(thing):
        out += [".PP", f"\\fB{escaped(signature(name, thing))}\\fR"]
    out += [".SH DESCRIPTION", *documented(text)[1:]]
    if inspect.isclass(thing):
        out += members(thing)
    out += [".SH SEE ALSO", "\\fBrdmacm\\fR(1), \\fBrdmacm\\fR(3), \\fBrdma_cm\\fR(7)"]
    return "\n".join(out) + "\n"


def members(thing: type) -> list[str]:
    """The public methods and properties of a class."""
    out: list[str] = []
    for name in dir(thing):
        found = inspect.getattr_static(thing, name)
        text = inspect.getdoc(getattr(thing, name, None) if not isinstance(found, property) else found)
        is_ours = any(name in vars(base) for base in thing.__mro__ if base.__module__.startswith("rdmacm"))
        if name.startswith("_") or not text or not is_ours:
            continue
        if isinstance(found, property):
            out += [".TP", f"\\fB{escaped(name)}\\fR"]
        elif inspect.isroutine(getattr(thing, name)):
            out += [".TP", f"\\fB{escaped(signature(name, getattr(thing, name)))}\\fR"]
        else:
            continue
        first, *rest = documented(text)[1:]
        out += [first, *(".sp" if line == ".PP" else line for line in rest)] if rest else [first]
    return [".SH METHODS AND ATTRIBUTES", *out] if out else []


def pages() -> dict[str, str]:
    """All manual pages, by their path below share/."""
    found = {"man/man1/rdmacm.1": command_page(program_parser(with_commands=True))}
    for command in COMMANDS:
        found[f"man/man1/rdmacm-{command}.1"] = command_page(tool_parser(command))
    things: list[tuple[str, object]] = [("rdmacm", rdmacm), *((name, import_module(name)) for name in MODULES)]
    things += [(f"rdmacm.{name}", getattr(rdmacm, name)) for name in NAMES]
    things += [(f"rdmacm.aio.{name}", getattr(import_module("rdmacm.aio"), name)) for name in AIO_NAMES]
    things += [(f"rdmacm.verbs.{name}", getattr(import_module("rdmacm.verbs"), name)) for name in VERBS_NAMES]
    found |= {f"man/man3/{name}.3": api_page(name, thing) for name, thing in things}
    return found


def files() -> dict[str, str]:
    """Everything, by its path below share/."""
    return pages() | {path: script(shell) for shell, path in COMPLETIONS.items()}


if __name__ == "__main__":
    for path, text in files().items():
        file = Path(sys.argv[1], path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
