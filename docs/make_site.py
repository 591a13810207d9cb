"""Build the site: ``python3 docs/make_site.py DIRECTORY``, where ``python3 dev.py site`` has installed what it needs.

README is its first page. The pages of docs/ and those beside README follow, as they are: a link between two files is
the same link on the site. A link to a file of the source gets a page with its text, and each public module a page made
of its docstrings. A warning of Sphinx is an error, and so is a link that leads nowhere.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "src"))

from make_api import Pages  # noqa: E402 (after the path of the sources)

#: The pages beside README, and what they are called among those of docs/.
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "CHANGELOG.md": "changelog.md",
}
#: The navigation: what each part is for, and its pages in docs/, perhaps under another title. A name that ends in "/"
#: stands for the pages of a folder.
NAVIGATION: dict[str, list[str]] = {
    "Learn": ["course/", "tour"],
    "Do": [
        *("connections", "asyncio", "rsocket", "verbs", "tuning", "infiniband", "kernel", "lossless", "containers"),
        *("porting", "pyverbs", "ci", "run", "testing", "simulation", "debugging", "trace"),
    ],
    "Look up": [
        *("questions", "Symptoms, causes, cures <doctor>", "glossary"),
        *("tools", "api/index", "limits", "parity", "states"),
    ],
    "Understand": ["resolution", "architecture", "core", "run-design", "security", "interop", "performance"],
    "Project": ["contributing", "Report a fault of security <reporting>", "changelog"],
}
#: What is copied as it is.
IMAGES = (".svg", ".png")
#: A link to a file of the project.
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<file>[^)#:\s]+)(?P<anchor>#[^)\s]+)?\)")
#: The language of a file, for its colours; others are shown as they are.
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".toml": "toml"}


def slug(heading: str) -> str:
    """The anchor of a heading, as hosts of repositories make it, so that a link works there and here."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def heading(page: Path) -> str:
    """The title of a page."""
    return page.read_text("utf-8").partition("\n")[0].removeprefix("# ")


# -- the sources of the site ---------------------------------------------------------------------------------


class Sources:
    """What Sphinx reads: the pages with the links of the site, and those made for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pages = {ROOT / name: target for name, target in BESIDE.items()}
        self.pages |= {page: page.relative_to(DOCS).as_posix() for page in sorted(DOCS.rglob("*.md"))}
        #: The files of the source that get a page, as pages link to them.
        self.shown: list[Path] = []
        #: Links to files that do not exist.
        self.missing: list[str] = []

    def write(self) -> None:
        for page, target in self.pages.items():
            self._put(target, self.text(page, target))
        api = Pages().made()
        for name, text in api.items():
            self._put(f"api/{name}", text)
        contents = "".join(self._contents(caption, names) for caption, names in NAVIGATION.items())
        for path in self.shown:  # grows, where a folder lists its files
            self._put(self._shown_as(path), self._source(path))
        self._put("index.md", (self.directory / "index.md").read_text("utf-8") + contents)
        for picture in (each for each in DOCS.rglob("*") if each.suffix in IMAGES and "_static" not in each.parts):
            shutil.copyfile(picture, self.directory / picture.relative_to(DOCS))
        for name in ("conf.py", "_static"):
            copy = shutil.copytree if (DOCS / name).is_dir() else shutil.copyfile
            copy(DOCS / name, self.directory / name)

    def _put(self, target: str, text: str) -> None:
        path = self.directory / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def text(self, page: Path, target: str) -> str:
        """The text of a page, with its links to files as they are on the site."""
        parts = re.split(r"(^```.*?^```$)", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for at in range(0, len(parts), 2):  # those between are code
            parts[at] = LINK.sub(lambda link: self._link(page, target, link), parts[at])
        return "".join(parts)

    def _link(self, page: Path, target: str, link: re.Match[str]) -> str:
        file = (page.parent / link["file"]).resolve()
        if not file.exists():
            self.missing.append(f"{page.relative_to(ROOT)}: {link['file']}")
            return link[0]
        # The name of a page's file stands for its title.
        text = heading(file) if Path(link["text"]).name == file.name and file in self.pages else link["text"]
        return f"[{text}]({os.path.relpath(self._place(file), Path(target).parent)}{link['anchor'] or ''})"

    def _place(self, file: Path) -> str:
        if file in self.pages:
            return self.pages[file]
        if file.suffix in IMAGES:
            return file.relative_to(DOCS).as_posix()
        if file not in self.shown:
            self.shown.append(file)
        return self._shown_as(file)

    def _shown_as(self, path: Path) -> str:
        return f"source/{path.relative_to(ROOT).as_posix()}.md"

    def _source(self, path: Path) -> str:
        """The page that shows a file, or lists the files of a folder."""
        name, target = path.relative_to(ROOT).as_posix(), self._shown_as(path)
        if path.is_dir():
            files = sorted(each for each in path.iterdir() if each.suffix in LANGUAGES)
            links = (f"- [{each.name}]({os.path.relpath(self._place(each), Path(target).parent)})" for each in files)
            return "\n".join(["---", "orphan: true", "---", f"# {name}/", "", *links, ""])
        text, fence = path.read_text("utf-8"), "`" * 8
        code = f"{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}"
        return f"---\norphan: true\n---\n# {name}\n\n{code}\n"

    def _contents(self, caption: str, names: list[str]) -> str:
        """A part of the navigation, in the form that the theme reads."""
        pages = "\n".join(page for name in names for page in self._entries(name))
        return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"

    def _entries(self, name: str) -> list[str]:
        if not name.endswith("/"):
            return [name]
        inside = [name + path.stem for path in self.directory.glob(f"{name}*.md")]
        return sorted(inside, key=lambda page: (not page.endswith("/index"), page))


# -- links ---------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.links.add(value)


def broken(site: Path) -> Iterator[str]:
    """The links of a site that lead to no file of it, or to no anchor."""
    pages = {file: Page(file) for file in site.rglob("*.html")}
    for file, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                yield f"{file.relative_to(site)}: {link}"


def main() -> int:
    from sphinx.cmd.build import build_main

    site = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="rdmacm-site-") as place:
        sources = Sources(Path(place, "sources"))
        sources.write()
        shutil.rmtree(site, ignore_errors=True)
        options = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(Path(place, "doctrees"))]
        status = build_main([*options, str(sources.directory), str(site)])
    wrong = [*sources.missing, *broken(site)]
    for each in wrong:
        print(f"broken link: {each}", file=sys.stderr)
    return status or bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
