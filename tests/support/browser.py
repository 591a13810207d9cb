"""Chromium without a window, for pages that a person looks at."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BROWSER", "SCHEMES", "Title", "title"]

_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
#: None where there is none.
BROWSER = next((path for name in _NAMES if (path := shutil.which(name))), None)
#: What ``prefers-color-scheme`` may be, and Blink's number of it.
SCHEMES = {"light": "1", "dark": "0"}


@dataclass(frozen=True)
class Title:
    """The title of a page when it has loaded, and what has appeared on its console."""

    text: str
    console: tuple[str, ...]


def title(url: str, width: int, scheme: str, profile: Path) -> Title:
    """Load a page, whose scripts may have written what they have measured to its title."""
    argv = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000", "--dump-dom"]
    argv += [f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    argv += ["--enable-logging=stderr", url]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=True)
    found = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    console = re.findall(r"CONSOLE.*?\] (.*)", done.stderr)
    return Title(html.unescape(found[1]), tuple(console))
