"""A lesson that does not say what happens is noticed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from course.lessons import Entered, Reader, is_shown, steps
from newcomer.pages import Command, File

PAGE = """\
```python
# server.py
print("ready")
print("took 1.5 ms, PSN 0x0000ff")
```

Terminal 1:

```console
$ python3 server.py
ready
took 0.3 ms, PSN 0x123456
```

Terminal 2:

```console
$ python3 -c 'print("one"); print("two")'
one
two
```

```console
$ true
```
"""


def read(page: str, directory: Path) -> None:
    path = directory / "page.md"
    path.write_text(page)
    with Reader(directory, None) as reader:
        reader.read(path)


def test_steps_have_their_terminals(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert steps(path) == [
        File(2, "server.py", '# server.py\nprint("ready")\nprint("took 1.5 ms, PSN 0x0000ff")\n'),
        Entered(1, Command(10, "python3 server.py", "ready\ntook 0.3 ms, PSN 0x123456\n")),
        Entered(2, Command(18, 'python3 -c \'print("one"); print("two")\'', "one\ntwo\n")),
        Entered(2, Command(24, "true", "")),
    ]


def test_a_page_that_says_what_happens_is_followed_to_its_end(tmp_path: Path) -> None:
    read(PAGE, tmp_path)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("two\n```", "three\n```"),  # another output
        ("two\n```", "two\nthree\n```"),  # too little
        ("one\ntwo\n```", "one\n```"),  # too much
        ("$ true", "$ false"),  # a command that fails
        ("took 0.3 ms", "gave 0.3 ms"),  # after the first line of a server
        ('print("ready")', 'import sys; sys.exit("no")'),  # a server that does not start
        ('print("took', 'print("Warning: took'),
    ],
)
def test_a_page_that_is_wrong_fails(right: str, wrong: str, tmp_path: Path) -> None:
    assert right in PAGE
    with pytest.raises(AssertionError):
        read(PAGE.replace(right, wrong), tmp_path)


@pytest.mark.parametrize("block", ["```python\nprint(1)\n```\n", "```c\nint x;\n```\n", "```\ntext\n```\n"])
def test_each_program_has_a_name(block: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(block)
    with pytest.raises(AssertionError, match="is no file"):
        steps(path)


def test_times_of_a_simulated_network_are_compared() -> None:
    shown = textwrap.dedent("""\
        0.000020  |-- REQ #1 -->|
    """)
    other = shown.replace("20", "40")
    assert is_shown(shown, other)
    assert is_shown(shown, shown, repeated=True)
    assert not is_shown(shown, other, repeated=True)
