"""What the lessons have in common: their parts, and output that fits a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest

from course.lessons import COURSE, LESSONS, Entered, steps
from newcomer.pages import File, blocks

COLUMNS = 80
TEXTS = {lesson: page.read_text(encoding="utf-8") for lesson, page in LESSONS.items()}


def test_the_first_page_lists_the_lessons_in_order() -> None:
    listed = re.findall(r"^(\d)\. \[(.+)\]\((.+)\.md\)", (COURSE / "index.md").read_text(), re.MULTILINE)
    assert [name for _, _, name in listed] == [*LESSONS]
    assert [f"# {number}. {title}" for number, title, _ in listed] == [t.splitlines()[0] for t in TEXTS.values()]


@pytest.mark.parametrize("lesson", LESSONS)
def test_commands_and_their_output_fit_a_terminal(lesson: str) -> None:
    shown = [
        line for block in blocks(LESSONS[lesson]) if block.language == "console" for line in block.text.split("\n")
    ]
    assert [line for line in shown if len(line) > COLUMNS] == []


@pytest.mark.parametrize("lesson", LESSONS)
def test_three_questions_have_three_answers(lesson: str) -> None:
    before, _, after = TEXTS[lesson].partition("\n## Questions\n")
    assert "\n## What you saw\n" in before
    questions, _, answers = after.partition("\n<details>\n<summary>Answers</summary>\n\n")
    answers, _, rest = answers.partition("\n</details>\n")
    assert rest
    for part in (questions, answers):
        assert re.findall(r"^(\d)\. ", part, re.MULTILINE) == ["1", "2", "3"]


def test_a_lesson_ends_with_the_way_to_the_next() -> None:
    last = [re.findall(r"\]\(([^)#]+)\.md[^)]*\)", text)[-1] for text in TEXTS.values()]
    assert last == [*[*LESSONS][1:], "index"]


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_command_has_its_output(lesson: str) -> None:
    """Of commands in the server's terminal at least a line, which tells that it is ready."""
    entered = [step for step in steps(LESSONS[lesson]) if isinstance(step, Entered)]
    assert entered
    assert all(step.command.shown is not None for step in entered)


def test_each_call_of_the_c_program_is_in_its_port_in_the_same_order() -> None:
    calls = re.compile(r"\brdma_\w+(?=\()")
    programs = {step.name: step.text for step in steps(LESSONS["6-c-program"]) if isinstance(step, File)}
    called = calls.findall(programs["greet.c"])
    # In Python, structures are called, too.
    assert [call for call in calls.findall(programs["greet_cma.py"]) if call in called] == called
