"""README and the pages of docs/: their links lead somewhere, their lines are short, and README's examples run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {path: path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}


def without_code(text: str) -> str:
    """The prose of a page: no code, and nothing that a program writes into README."""
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


def test_examples_of_the_readme_run_by_themselves() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGES[ROOT / "README.md"], re.DOTALL | re.MULTILINE)
    assert len(blocks) > 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
