"""The page about looking live names every key and button, and its pictures are there and small."""

from __future__ import annotations

import ast
import re
from typing import Any

from tests.docs.pages import DOCS, assigned, column, page, table
from trio_gateway.admin import DASHBOARD_PAGES

PAGE = "how-to/observe/dashboard.md"
SCRIPT = DASHBOARD_PAGES["/"].body.decode()


def value_of(name: str) -> Any:
    """What a module-level name of the terminal's screen is."""
    return ast.literal_eval(assigned("cli/_top_screen.py", name))


def test_every_key_of_the_terminal_is_described_and_no_other() -> None:
    moves = assigned("cli/_top_screen.py", "_MOVES")
    assert isinstance(moves, ast.Dict)
    keys = {ast.literal_eval(key) for key in moves.keys if key is not None}
    help_ = {word for line in value_of("HELP").values() for word in re.findall(r"(?:^|  )(\S+) ", line)}
    assert set(column(PAGE, "In a terminal", "Key")) == keys | help_


def test_the_numbers_of_rows_are_those_of_the_code() -> None:
    text = " ".join(page(PAGE).split())
    assert f"newest {value_of('MANY'):,} requests each time; otherwise for {value_of('FEW')}" in text


def test_every_button_that_the_page_names_is_there() -> None:
    for row in table(PAGE, "In a browser", 2):
        for name in row["Button"].split(", "):
            assert name in SCRIPT, name
    quoted = set(re.findall(r'"([A-Z][\w ]+)"', page(PAGE)))
    assert len(quoted) > 5
    assert not [name for name in quoted if name not in SCRIPT]


def test_the_pictures_are_small() -> None:
    names = set(re.findall(r"\(([\w-]+\.png)\)", page(PAGE)))
    assert len(names) == 5
    assert {path.name for path in (DOCS / PAGE).parent.glob("*.png")} == names
    assert all((DOCS / PAGE).with_name(name).stat().st_size < 100_000 for name in names)
