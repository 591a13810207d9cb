"""The pictures of the course are those that docs/course/make_pictures.py makes of the programs on the pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from course.lessons import COURSE, LESSONS

SCRIPT = COURSE / "make_pictures.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("pictures")
    done = subprocess.run([sys.executable, str(SCRIPT), str(directory)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return pictures(directory)


def pictures(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.svg")}


@pytest.mark.parametrize("name", [f"{lesson}.svg" for lesson in LESSONS])
def test_picture_shows_what_happens(name: str, made: dict[str, str]) -> None:
    assert made[name] == (COURSE / name).read_text(encoding="utf-8"), f"python3 {os.path.relpath(SCRIPT)} makes it anew"


def test_each_picture_is_on_its_page_and_there_is_no_other(made: dict[str, str]) -> None:
    shown = {lesson: re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text()) for lesson, page in LESSONS.items()}
    assert shown == {lesson: [f"{lesson}.svg"] for lesson in LESSONS}
    assert made.keys() == pictures(COURSE).keys() == {f"{lesson}.svg" for lesson in LESSONS}


def test_pictures_have_colours_for_light_and_dark_pages() -> None:
    for name, picture in pictures(COURSE).items():
        style = re.search(r"<style>(.*?)@media\(prefers-color-scheme:dark\)\{(.*)\}\n</style>", picture, re.DOTALL)
        assert style, name
        # Each class of a colour has another one in the dark; .b is a weight.
        light, dark = (set(re.findall(r"\.(\w+)\{(?:fill|stroke)", part)) for part in style.groups())
        assert light == dark, name
