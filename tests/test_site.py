"""The documentation as a site: it builds without a warning, no link is broken, and no page is wider than its window."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.browser import BROWSER, SCHEMES, title

ROOT = Path(__file__).parents[1]
MAKER = ROOT / "docs" / "make_site.py"
WIDTHS = (1280, 375)
#: Loads each page in a frame of each width, and writes what is too wide to the title.
MEASURE = """<title>-</title><script>
const scrolls = each => each.localName !== "article" &&
  (["auto", "scroll"].includes(getComputedStyle(each).overflowX) || scrolls(each.parentElement));
onload = () => {
  const wrong = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const inside = frame.contentDocument, root = inside.documentElement;
    const name = `${frame.width} ${frame.getAttribute("src")}: `;
    if (!inside.querySelector("article")) wrong.push(name + "nothing loaded");
    if (root.scrollWidth > root.clientWidth) wrong.push(`${name}${root.scrollWidth} wide`);
    // The theme cuts off what is too wide, unless it is in a box that scrolls.
    const cut = [...inside.querySelectorAll("article *")].filter(each =>
      each.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(each));
    if (cut.length) wrong.push(name + cut[0].outerHTML.slice(0, 200));
    const dark = getComputedStyle(inside.body).backgroundColor !== "rgb(255, 255, 255)";
    if (dark !== matchMedia("(prefers-color-scheme: dark)").matches) wrong.push(name + "not in the scheme's colours");
  }
  document.title = JSON.stringify(wrong);
}
</script>"""


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    sys.path.insert(0, str(MAKER.parent))
    try:
        spec = importlib.util.spec_from_file_location("make_site", MAKER)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(MAKER.parent))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(package, reason=f"needs {package}: the extra docs")
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, str(MAKER), str(directory)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return directory


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_document_is_a_page_of_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert [page for page in sorted(pages) if not (site / page).exists()] == []
    first = (site / "index.html").read_text()
    assert all(f'href="{page.as_posix()}"' in first for page in pages)
    assert "conn.recv_message" in (site / "connections.html").read_text()
    assert 'id="rdmacm.CmId.resolve_addr"' in (site / "api" / "rdmacm.html").read_text()


def test_broken_links_are_found(maker: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here"></a><a href="b.html#there"></a><a href="https://example.org/none">'
        '</a><a href="#none"></a><a href="b.html#none"></a><img src="none.png">'
    )
    (tmp_path / "b.html").write_text('<h1 id="there"></h1><a href="none.html">')
    assert sorted(maker.broken(tmp_path)) == [
        "a.html: #none",
        "a.html: b.html#none",
        "a.html: none.png",
        "b.html: none.html",
    ]


def test_links_are_those_of_the_site(maker: ModuleType, tmp_path: Path) -> None:
    sources = maker.Sources(tmp_path)
    page = ROOT / "docs" / "states.md"  # links to sources
    text = sources.text(page, "states.md")
    assert "](source/src/rdmacm/provider/cmstate.py.md)" in text
    first = sources.text(ROOT / "README.md", "index.md")
    assert "](core.md)" in first
    assert "[Contributing](contributing.md)" in first
    assert "](docs/" not in first
    assert sources.missing == []


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(600)
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian package chromium)")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_page_is_wider_than_its_window(site: Path, tmp_path: Path, scheme: str) -> None:
    pages = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html")) if "source" not in path.parts]
    frames = (f'<iframe width="{width}" height="800" src="{page}"></iframe>' for page in pages for width in WIDTHS)
    (site / "frames.html").write_text(MEASURE + "\n".join(frames))
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/frames.html"
            shown = title(url, 1400, scheme, tmp_path / "profile")
        finally:
            server.shutdown()
            thread.join()
            (site / "frames.html").unlink()
    assert (json.loads(shown.text), shown.console) == ([], ())


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
