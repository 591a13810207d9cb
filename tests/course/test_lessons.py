"""Each lesson of docs/course, followed by copying: every file and command in order, with the output on the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from course.lessons import LESSONS, Reader, needs_of
from newcomer.environment import newcomers_host
from support.netns import Host


@pytest.fixture
def host() -> Iterator[Host | None]:
    with newcomers_host() as host:
        yield host


#: Where a process that waits half a second for a processor changes the output: the other one's device sends again.
SEES_TIME = "2-queue-pair"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "lesson",
    [pytest.param(lesson, marks=pytest.mark.wallclock if lesson == SEES_TIME else ()) for lesson in LESSONS],
)
def test_lesson_does_what_it_says(lesson: str, host: Host | None, tmp_path: Path) -> None:
    page = LESSONS[lesson]
    if reason := needs_of(page):
        pytest.skip(reason)
    with Reader(tmp_path, host) as reader:
        reader.read(page)
