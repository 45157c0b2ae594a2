"""The tables that the explanations draw are those of the code, read off its syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator
from typing import Final

from tests.docs.pages import DOCS, constants, fields_of, modules, setting_defaults, table, words
from trio_gateway.contract import Outcome
from trio_gateway.errors import CODES
from trio_gateway.wire import REJECTIONS

PAGE: Final = "explanation/endings-and-retries.md"
SETTING: Final = re.compile(r"`((?:[a-z]+)\.[a-z_]+)` \[([^\]]+)\]")


# Endings --------------------------------------------------------------------------------------------------


def farewells() -> dict[str, str]:
    """The table from an outcome to how a client is left."""
    (tree,) = modules("exchange/_endings.py").values()
    (found,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FAREWELLS"
    ]
    assert isinstance(found, ast.Dict)
    pairs = zip(found.keys, found.values, strict=True)
    return {_word(key): _word(value) for key, value in pairs if key is not None}


def _word(member: ast.expr) -> str:
    """The last part of an enumeration's member, as the page writes it."""
    return ast.unparse(member).rpartition(".")[2].lower().replace("_", " ")


def test_the_page_draws_the_table_of_farewells() -> None:
    drawn = {
        row["Outcome"].strip("`").replace("_", " "): row["Farewell"]
        for row in table(PAGE, "How a client is left")
    }
    assert drawn == farewells()


def test_every_outcome_has_a_farewell_on_the_page() -> None:
    drawn = {word for row in table(PAGE, "How a client is left") for word in words(row["Outcome"])}
    assert drawn == {outcome.value for outcome in Outcome}


# Retries --------------------------------------------------------------------------------------------------

Meaning = tuple[set[str], bool, bool, set[str], set[str]]
SIGNALS: Final = {*REJECTIONS, "loading"}


def failures() -> dict[str, Meaning]:
    """Every way in which an attempt can fail, by its reason: where to go, fault, no room, codes, signals."""
    (tree,) = modules("exchange/_retry.py").values()
    return dict(
        _meaning(call, statements[:number])
        for statements in _blocks(tree)
        for number, statement in enumerate(statements)
        for call in _failures_in(statement)
    )


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for block in (getattr(node, "body", []), getattr(node, "orelse", [])):
            if isinstance(block, list):
                yield block


def _failures_in(statement: ast.stmt) -> Iterator[ast.Call]:
    """The failures that a statement itself makes, not those of the blocks in it."""
    if isinstance(statement, ast.Return | ast.AnnAssign) and isinstance(statement.value, ast.Call):
        call = statement.value
        if ast.unparse(call.func) == "Failure":
            yield call


def _meaning(call: ast.Call, before: list[ast.stmt]) -> tuple[str, Meaning]:
    given = dict(zip(fields_of("exchange/_retry.py", "Failure"), call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    reason = given["reason"]
    assert isinstance(reason, ast.Constant)
    return str(reason.value), (
        {name.lower() for name in _texts(given["way"], before, fields_of("exchange/_retry.py", "Way"))},
        "fault" in given and ast.unparse(given["fault"]) == "True",
        "rejected" in given and ast.unparse(given["rejected"]) == "True",
        _texts(given["problem"], before, CODES),
        _texts(given["signal"], before, SIGNALS) if "signal" in given else set(),
    )


def _texts(expression: ast.AST, before: list[ast.stmt], among: Container[str]) -> set[str]:
    """The words in an expression that are of a kind, and in what was assigned before to the names in it."""
    members = (node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute))
    found = {text for text in (*constants(expression, str), *members) if text in among}
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    for number, statement in enumerate(before):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in names:
            found |= _texts(statement.value, before[:number], among)
    return found


def test_the_page_draws_the_table_of_failed_attempts() -> None:
    flag = {"yes": True, "": False}
    drawn = {
        row["Reason"].strip("`"): (
            set(row["Again"].split(" or ")),
            flag[row["Fault"]],
            flag[row["No room"]],
            set(words(row["Told"])),
            set(words(row["Says of the worker"])),
        )
        for row in table(PAGE, "What a failed attempt means")
    }
    assert drawn == failures()


def test_where_no_code_is_fixed_the_page_says_what_is_told_instead() -> None:
    for row in table(PAGE, "What a failed attempt means"):
        assert words(row["Told"]) or row["Told"] in ("the engine's words", "what it cannot do")


# Figures --------------------------------------------------------------------------------------------------


def test_every_default_that_a_page_mentions_is_the_one_of_the_settings() -> None:
    known = setting_defaults()
    mentioned = [
        (path.name, setting, figure)
        for path in DOCS.rglob("*.md")
        for setting, figure in SETTING.findall(path.read_text("utf-8"))
    ]
    assert len(mentioned) > 20
    wrong = [found for found in mentioned if known.get(found[1], "no such setting").strip('"') != found[2]]
    assert not wrong


def test_every_setting_that_a_page_names_exists() -> None:
    known = setting_defaults()
    sections = {name.partition(".")[0] for name in known} - {"keys", "tokens"}  # tables inside of sections
    for path in DOCS.rglob("*.md"):
        if path.name == "settings.md":
            continue
        for word in words(path.read_text("utf-8")):
            if re.fullmatch(r"[a-z]+\.[a-z_]+", word) and word.partition(".")[0] in sections:
                assert word in known, f"{path.name}: {word}"
