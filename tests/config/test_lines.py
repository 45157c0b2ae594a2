"""The line finder agrees with tomllib about the paths, and with a writer about the lines."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.config._lines import find_lines, read_key
from trio_gateway.config._problems import Path, dotted, quoted

# No surrogates: no TOML file can hold them. No DEL: it must be escaped, which json.dumps does not do.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=6)
KEYS = st.one_of(st.sampled_from(["a", "b", "id", "x-y", "1", "bind"]), TEXT)

# What looks like something else to a careless reader.
SCALARS = [
    "1",
    "-0.5e3",
    "true",
    "inf",
    "1979-05-27 07:32:00Z",
    "07:32:00",
    '"x # no comment ] } , ="',
    "'literal \\'",
    r'"escaped \" quote \\"',
    '""',
    "''",
    '"""\n[not.a.header]\nkey = 1 # none\n"""',
    '"""one " and two "" inside, two at the end"""""',
    r'"""an escaped \""" does not end it"""',
    '"""a line that goes on \\\n   here"""',
    "'''\n[[not]]\n'one' and ''two'' inside, one at the end''''",
    '""""begins with a quote"""',
]
NOISE = ["", "\n", "\n\n", "# [comment] = 1\n", '  # "open\n', "\t\n"]
BLANKS = ["", " ", "\t "]


class Writer:
    """Writes a random document, and notes on which line each path first appears."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.text = ""
        self.lines: dict[Path, int] = {}

    def one_of(self, choices: list[str]) -> str:
        choice: str = self.draw(st.sampled_from(choices))
        return choice

    def note(self, path: Path) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def put(self, text: str) -> None:
        self.text += text

    def table(self, path: Path, depth: int) -> None:
        """Write the pairs of a table, then its subtables with headers of their own."""
        names: list[str] = self.draw(st.lists(KEYS, unique=True, max_size=4))
        forms = [self.one_of(["pair", "dotted", "table", "list"]) for _ in names]
        for name, form in zip(names, forms, strict=True):
            if form in ("pair", "dotted"):
                self.put(self.one_of(NOISE) + self.one_of(BLANKS))
                self.pair((*path, name), form, depth)
                self.put(self.one_of(["\n", " # a comment\n", "\t\n"]))
        for name, form in zip(names, forms, strict=True):
            if form == "table":
                self.header((*path, name), "[", "]", depth)
            elif form == "list":
                for index in range(self.draw(st.integers(1, 3))):
                    self.header((*path, name, index), "[[", "]]", depth)

    def header(self, path: Path, opening: str, closing: str, depth: int) -> None:
        self.put(self.one_of(NOISE) + self.one_of(BLANKS))
        for length in range(1, len(path) + 1):
            self.note(path[:length])
        self.put(opening + self.key([step for step in path if isinstance(step, str)]) + closing)
        self.put(self.one_of(["\n", " # after a header\n"]))
        if depth > 0:
            self.table(path, depth - 1)

    def pair(self, path: Path, form: str, depth: int) -> None:
        more: list[str] = self.draw(st.lists(KEYS, min_size=1, max_size=2)) if form == "dotted" else []
        for length in range(len(more) + 1):
            self.note((*path, *more[:length]))
        name = path[-1]
        assert isinstance(name, str)
        self.put(self.key([name, *more]) + self.one_of(BLANKS) + "=" + self.one_of(BLANKS))
        self.value((*path, *more), depth)

    def key(self, parts: list[str]) -> str:
        return (self.one_of(BLANKS) + "." + self.one_of(BLANKS)).join(self.key_part(part) for part in parts)

    def key_part(self, part: str) -> str:
        forms = [json.dumps(part, ensure_ascii=False)]
        if re.fullmatch("[A-Za-z0-9_-]+", part):
            forms.append(part)
        if part.isprintable() and "'" not in part:
            forms.append(f"'{part}'")
        return self.one_of(forms)

    def value(self, path: Path, depth: int) -> None:
        form = self.one_of(["scalar", "array", "inline"]) if depth > 0 else "scalar"
        if form == "array":
            self.array(path, depth - 1)
        elif form == "inline":
            self.inline_table(path, depth - 1)
        else:
            self.put(self.one_of(SCALARS))

    def array(self, path: Path, depth: int) -> None:
        size = self.draw(st.integers(0, 3))
        self.put("[")
        for index in range(size):
            self.put(self.one_of(NOISE) + self.one_of(BLANKS))
            self.note((*path, index))
            self.value((*path, index), depth)
            self.put(self.one_of(NOISE))
            self.put("," if index < size - 1 else self.one_of(["", ","]))
        self.put(self.one_of(NOISE) + "]")

    def inline_table(self, path: Path, depth: int) -> None:
        names: list[str] = self.draw(st.lists(KEYS, unique=True, max_size=3))
        self.put("{")
        for index, name in enumerate(names):
            self.put((", " if index else "") + self.one_of(BLANKS))
            self.pair((*path, name), self.one_of(["pair", "dotted"]), depth)
        self.put("}")


@st.composite
def documents(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Writer:
    writer = Writer(draw)
    writer.table((), depth=3)
    writer.put(writer.one_of(NOISE))
    return writer


def paths_of(node: object, path: Path = ()) -> Iterator[Path]:
    """Every path that a parsed document has."""
    if path:
        yield path
    steps = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, inner in steps:
        yield from paths_of(inner, (*path, step))


@given(documents())
def test_every_path_is_found_on_the_line_where_it_was_written(written: Writer) -> None:
    assert set(paths_of(tomllib.loads(written.text))) == set(written.lines), "the writer writes what it says"
    assert find_lines(written.text) == written.lines


@given(documents())
def test_lines_that_end_as_on_windows_count_the_same(written: Writer) -> None:
    assert find_lines(written.text.replace("\n", "\r\n")) == written.lines


@given(st.lists(TEXT, min_size=1, max_size=4), TEXT)
def test_a_dotted_key_reads_back(parts: list[str], rest: str) -> None:
    assert read_key(dotted(tuple(parts)) + "=" + rest) == (tuple(parts), "=" + rest)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_quoted_string_reads_back(text: str) -> None:
    assert tomllib.loads(f"key = {quoted(text)}") == {"key": text}
    assert "\n" not in quoted(text)


@given(st.text())
def test_what_is_no_document_ends_in_a_value_error_or_in_lines(text: str) -> None:
    with suppress(ValueError):
        assert all(line >= 1 for line in find_lines(text).values())


@pytest.mark.parametrize("text", ["", "=", ".", "a.", "a..b", '"open', "'open", '"\\q"'])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the callers say it in their own words
        read_key(text)


def test_the_lines_of_a_configuration_are_those_an_editor_shows() -> None:
    text = """\
# a comment
[server]
bind = [
    "127.0.0.1:8080",
    "unix:gw.sock",
]

[[workers]]
id = "a"
[[workers]]
id = "b"
limits.slots = 3
[tenants.keys]
first = {id = "k", hash = "h"}
"""
    lines = find_lines(text)
    assert lines["server",] == 2
    assert lines["server", "bind"] == 3
    assert lines["server", "bind", 0] == 4
    assert lines["server", "bind", 1] == 5
    assert lines["workers",] == 8
    assert lines["workers", 0] == 8
    assert lines["workers", 1] == 10
    assert lines["workers", 1, "id"] == 11
    assert lines["workers", 1, "limits", "slots"] == 12
    assert lines["tenants", "keys", "first", "hash"] == 14


def test_a_long_document_takes_time_in_proportion() -> None:
    """One pattern that backtracks would make this take minutes."""
    text = "".join(f'[[workers]]\nid = "w{index}"\nlabels = ["a", "b"]\n' for index in range(2000))
    text += 'text = """' + '"" ' * 50_000 + '"""\n'
    lines = find_lines(text)
    assert lines["workers", 1999, "id"] == 5999
