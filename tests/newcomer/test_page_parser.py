"""What the test of the pages takes for a command, and for the same output."""

from __future__ import annotations

from pathlib import Path

import pytest

from newcomer.pages import Command, File, Paste, output_pattern, steps


@pytest.mark.parametrize(
    ("shown", "output"),
    [
        ("one\n", "one\n"),
        ("", ""),
        ("one\n...\nfour\n", "one\ntwo\nthree\nfour\n"),
        ("one\n...\n", "one\n"),
        ("waiting ... (at most 3 s)\n", "waiting ... (at most 3 s)\n"),
        ("only the start...\n", "only the start of a line\n"),
        ("  name   1344.4 us  2 addresses\n", "  name  44,070.1 us  2 addresses\n"),
        ("connect  2744.4 us  process 1 to process 2\n", "connect  14.7 ms  process 31 to process 32\n"),
        ("bind [::]:43588\n", "bind [::]:60995\n"),
        ("700 MB/s, 3,026 a second\n", "1 MB/s, 26 a second\n"),
        ("write 4 KiB 64 32912 269.5 2.16 65,798\n", "write 4 KiB 64 1200 26.5 0.16 798\n"),
        ("<Service at [fe80::1]:0x13fc566>\n", "<Service at [fe80::1]:0x13f8000>\n"),
    ],
)
def test_output_that_differs_in_what_varies_is_the_same(shown: str, output: str) -> None:
    assert output_pattern(shown).fullmatch(output)


@pytest.mark.parametrize(
    ("shown", "output"),
    [
        ("one\n", "two\n"),
        ("one\n", "one\ntwo\n"),
        ("", "one\n"),
        ("one\n...\nfour\n", "one\ntwo\n"),
        ("waiting ... (at most 3 s)\n", "waiting for long (at most 3 s)\n"),
        ("source 192.0.2.2\n", "source 192.0.2.3\n"),
        ("port 7471\n", "port 7472\n"),
        ("127.0.0.1:7471\n", "127.0.0.1:7472\n"),
        ("name 12.0 us 2 addresses\n", "name 12.0 us 1 addresses\n"),
        ("write 4 KiB 64 32912 269.5\n", "write 8 KiB 64 32912 269.5\n"),
        ("MTU 2048, LID 4 -> 5\n", "MTU 4096, LID 4 -> 5\n"),
        ("[fe80::1]:0x13f1d2f\n", "[fe80::1]:0x13f1d30\n"),
    ],
)
def test_output_that_differs_otherwise_is_another(shown: str, output: str) -> None:
    assert not output_pattern(shown).fullmatch(output)


PAGE = """\
```sh
pip install .   # the package
```

```python
# server.py
print(1)
```

```console
$ python3 server.py   # prints
1
$ rdmacm rping -c
rdmacm: connect: nobody listens [ECONNREFUSED]; try: a listener
```

```python
print(2)
```

It prints:

```output
2
```
"""


def test_steps_of_a_page_have_lines_and_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = steps(page)
    assert found == [
        Command(2, "pip install .", None),
        File(6, "server.py", "# server.py\nprint(1)\n"),
        Command(11, "python3 server.py", "1\n"),
        Command(13, "rdmacm rping -c", "rdmacm: connect: nobody listens [ECONNREFUSED]; try: a listener\n"),
        Paste(18, "print(2)\n", "2\n"),
    ]
    assert [step.fails for step in found if isinstance(step, Command)] == [False, False, True]


@pytest.mark.parametrize(
    "text", ["```output\n1\n```\n", "```python\n# a.py\n```\n\n```output\n1\n```\n", "```ruby\n```\n"]
)
def test_output_of_nothing_and_unknown_languages_are_refused(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=r"page\.md:"):
        steps(page)
