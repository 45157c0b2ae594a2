"""The page of log lines names every event with its level and its fields."""

from __future__ import annotations

import ast
import dataclasses

from tests.docs.pages import modules, table, words
from trio_gateway.ledger import Record

PAGE = "reference/logs.md"
LEVELS = {"debug", "info", "warning", "error"}

Line = tuple[str, set[str]]


def written() -> dict[str, Line]:
    """Every event in the package's code, with its level and the fields that are given by name."""
    calls = [
        node
        for name, tree in modules().items()
        if not name.startswith(("testing/", "demo/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    found = dict(filter(None, map(_line, calls)))
    # An exception's line has further fields, which the log itself adds where it writes it.
    level, of_all = _exception_fields()
    return {
        event: (level, fields | of_all) if kind == "exception" else (kind, fields)
        for event, (kind, fields) in found.items()
    }


def _line(call: ast.Call) -> tuple[str, Line] | None:
    assert isinstance(call.func, ast.Attribute)
    given = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    fields = {keyword.arg for keyword in call.keywords if keyword.arg}
    if call.func.attr in ("write", "write_object") and len(given) == 2 and given[0] in LEVELS:
        return str(given[1]), (str(given[0]), fields)
    if call.func.attr == "exception" and len(given) == 1:
        return str(given[0]), ("exception", fields)
    return None


def _exception_fields() -> Line:
    """Level and fields of the line about an exception, as the log's own method writes it."""
    (tree,) = modules("telemetry/_log.py").values()
    method = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "exception"
    )
    added = {
        index.value
        for node in ast.walk(method)
        if isinstance(node, ast.Subscript)
        and isinstance(index := node.slice, ast.Constant)
        and isinstance(index.value, str)
    }
    call = next(
        node
        for node in ast.walk(method)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write"
    )
    level = call.args[0]
    assert isinstance(level, ast.Constant)
    return str(level.value), {keyword.arg for keyword in call.keywords if keyword.arg} | added


def test_every_event_is_described_with_its_level_and_fields() -> None:
    described = {
        row["Event"].strip("`"): (row["Level"], set(words(row["Fields"]))) for row in table(PAGE, "Log lines")
    }
    assert described == written()


def test_no_event_is_described_twice() -> None:
    described = [row["Event"] for row in table(PAGE, "Log lines")]
    assert len(described) == len(set(described))


def test_the_line_of_an_exchange_has_the_fields_of_its_record() -> None:
    (row,) = [row for row in table(PAGE, "Log lines") if row["Event"] == "`exchange`"]
    assert row["Fields"] == "every field of a [record](records.md#fields)"
    assert not {field.name for field in dataclasses.fields(Record)} & {"at", "level", "event"}
