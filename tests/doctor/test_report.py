"""The page of HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rdmacm.doctor import examine
from rdmacm.doctor.matrix import heat_map, parse
from rdmacm.doctor.report import page
from rdmacm.net.tables import Route
from support.browser import BROWSER, SCHEMES, title
from support.doctor import Tree, packed

PAIRS = [
    {"from": "n1", "to": "n2", "ok": True, "rtt_us": 12.5, "step": None},
    {"from": "n2", "to": "n1", "ok": True, "rtt_us": 900, "step": None},
    {"from": "n1", "to": "<b>n3</b>", "ok": False, "rtt_us": None, "step": '"connect"'},
    {"from": "n3.of.a.rack.with.a.long.name.example.com", "to": "n1", "ok": True, "rtt_us": None, "step": None},
]
MATRIX = {"hosts": ["n1", "n2"], "pairs": PAIRS}
#: Elements without an end.
VOID = {"meta", "path", "rect"}
#: Writes what is wider than the page, or than its box, to the document's title.
MEASURE = """<script>
const wrong = [], root = document.documentElement;
if (root.scrollWidth > root.clientWidth) wrong.push(`page ${root.scrollWidth} > ${root.clientWidth}`);
for (const each of document.querySelectorAll("main > *, .card *, li"))
  if (each.getBoundingClientRect().right > root.clientWidth && !each.closest(".scroll")) wrong.push(each.outerHTML);
for (const box of document.querySelectorAll("svg g")) {
  const room = box.querySelector("rect").getBBox();
  for (const text of box.querySelectorAll("text")) {
    const own = text.getBBox();
    if (own.x + own.width > room.x + room.width || own.y + own.height > room.y + room.height)
      wrong.push(text.textContent);
  }
}
for (const box of document.querySelectorAll("svg"))
  if (box.getBBox().width > box.width.baseVal.value) wrong.push("svg");
const back = getComputedStyle(document.body).backgroundColor;
document.title = JSON.stringify([back, wrong]);
</script>"""


class Parser(HTMLParser):
    """Checks that elements nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def text(tmp_path: Path) -> str:
    """The page of a host with findings, and with hostile and long names."""
    tree = Tree(tmp_path / "host")
    tree.limit("8192")
    tree.write("proc/sys/net/ipv4/ip_local_port_range", "40000 40001")
    tree.environment["NCCL_IB_GID_INDEX"] = "0"
    long = "2001:db8:1111:2222:3333:4444:5555:6666"
    tree.tables.add(4, "<i>&\"'</i>", f"{long}/64", flags=0x1003)
    tree.tables.lines += [
        Route(2, "unicast", "default", 2, packed("10.0.0.254"), None, 254),
        Route(10, "unreachable", f"{long}/128", 4, packed(long), None, 1234567),
    ]
    tree.gids("mlx5_0", *((long[:-4] + f"{number:04x}", "RoCE v2") for number in range(40)))
    host = replace(tree.host(), provider_reason="<script>alert(1)</script>")
    return page(examine(host), parse(MATRIX), name="<h1>host</h1>")


def test_page_is_one_file_and_escaped(text: str) -> None:
    parser = Parser()
    parser.feed(text)
    assert parser.open == []
    assert not parser.seen & {"script", "i", "b", "link", "img"}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text
    assert ["&lt;script&gt;" in text, "&lt;i&gt;&amp;" in text, "&lt;b&gt;n3" in text] == [True] * 3


def test_page_has_findings_drawing_and_matrix(text: str) -> None:
    for part in ("D7", "A5", "3 findings", "mlx5_0/1", "via 10.0.0.254", "table 1234567", "and 16 more", "12", "✕"):
        assert part in text
    assert text.count('class="edge"') == 4  # two routes, one device, one table of GIDs


def test_page_of_a_healthy_host(tmp_path: Path) -> None:
    text = page(examine(Tree(tmp_path).host()))
    assert "<h2>nothing found</h2>" in text
    assert "All pairs" not in text


def test_matrix() -> None:
    matrix = parse(MATRIX)
    assert matrix.hosts == ("n1", "n2", "<b>n3</b>", "n3.of.a.rack.with.a.long.name.example.com")
    text = heat_map(matrix)
    assert re.findall(r'class="(heat\d|failed)"', text) == ["heat0", "failed", "heat6", "heat0"]
    assert "n1 to &lt;b&gt;n3&lt;/b&gt;: failed at &quot;connect&quot;" in text
    assert "4 pairs, 1 failed" in text


@pytest.mark.parametrize("data", [None, [], {}, {"pairs": {}}, {"pairs": [1]}, {"pairs": [{"from": "a"}]}])
def test_what_is_no_matrix(data: object) -> None:
    with pytest.raises(ValueError):
        parse(data)


@pytest.mark.parametrize("data", ["nan", float("nan"), True, -1])
def test_round_trips_that_are_none(data: object) -> None:
    assert parse({"pairs": [{"from": "a", "to": "b", "ok": 1, "rtt_us": data}]}).pairs["a", "b"].rtt_us is None


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian package chromium)")
@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_overflows(text: str, tmp_path: Path, width: int, scheme: str) -> None:
    file = tmp_path / "page.html"
    file.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    background = "rgb(20, 23, 28)" if scheme == "dark" else "rgb(246, 247, 249)"
    assert title(file.as_uri(), width, scheme, tmp_path / "profile").text == f'["{background}",[]]'
