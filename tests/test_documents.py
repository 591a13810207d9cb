"""README and the pages of docs/: links and file names exist, lines are short. newcomer/ runs their examples."""

from __future__ import annotations

import re
from pathlib import Path

from rdmacm.tools.commands import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "rdmacm"
PAGES = {path: path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]}


def without_code(text: str) -> str:
    """The prose of a page, without code and without the tables that programs write."""
    text = re.sub(r"^```.*?^```\n", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^<!-- (\w+): made.*?<!-- \1: end -->\n", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)]+)\)", without_code(text)):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(PAGES[target])):
                broken.append(f"{page.name}: {link}")
    assert not broken


def test_lines_of_prose_are_at_most_120_columns() -> None:
    long = [
        f"{page.name}: {line}"
        for page, text in PAGES.items()
        for line in without_code(text).splitlines()
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not long


def test_commands_in_the_text_exist() -> None:
    text = "\n".join(without_code(text) for text in PAGES.values())
    of_dev = set(re.findall(r"^    python3 dev\.py ([a-z]+)", (ROOT / "dev.py").read_text(), re.MULTILINE))
    assert set(re.findall(r"`python3 dev\.py ([a-z]+)", text)) <= of_dev
    assert set(re.findall(r"`rdmacm ([a-z]+)", text)) <= COMMANDS.keys()
    assert [file for file in re.findall(r"`python3 ([\w/]+\.py)", text) if not (ROOT / file).exists()] == []


def test_architecture_names_each_folder_and_only_files_that_exist() -> None:
    text = PAGES[ROOT / "docs" / "architecture.md"]
    folders = {path.parent.relative_to(SOURCES).as_posix() + "/" for path in SOURCES.rglob("*/*.py")}
    assert folders == set(re.findall(r"`([\w/]+/)` \|", text))
    # The row of a folder names its files without the folder.
    files = [path for folder in ("src", "tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    existing = {path.relative_to(ROOT).as_posix() for path in (*files, *ROOT.glob("*.py"))}
    for path in SOURCES.rglob("*.py"):
        existing |= {path.name, path.relative_to(SOURCES).as_posix()}
    assert set(re.findall(r"`([\w/]+\.py)`", text)) <= existing


def test_architecture_names_only_functions_that_exist() -> None:
    steps = re.findall(r"\| `([\w/]+\.py)` \| `(\w+)` \|", PAGES[ROOT / "docs" / "architecture.md"])
    assert len(steps) == 29
    assert [(file, name) for file, name in steps if f"def {name}(" not in (SOURCES / file).read_text()] == []
