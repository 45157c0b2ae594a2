"""The page of the admin API is the one of the code: every route, code and shape, and the bounds."""

from __future__ import annotations

import ast

from tests.docs.admin_reference import PAGE, whole
from tests.docs.pages import assigned, column, page, section
from trio_gateway.admin import SHAPES, openapi_document


def test_the_page_has_the_routes_codes_and_shapes_of_the_code() -> None:
    assert page(PAGE) == whole(page(PAGE)), "run: python -m tests.docs.admin_reference"


def test_every_route_of_the_document_is_in_the_page() -> None:
    told = [*column(PAGE, "Routes for reading", "Route"), *column(PAGE, "Routes for acting", "Route")]
    assert set(told) == openapi_document("")["paths"].keys()


def test_the_events_of_the_feed_are_described_with_their_shapes() -> None:
    assert column(PAGE, "The feed", "Event") == ["snapshot", "ending"]
    assert set(column(PAGE, "The feed", "Data")) <= SHAPES.keys()


def number(module: str, name: str) -> str:
    """A number that a module of the room names."""
    return f"{eval(ast.unparse(assigned(f'admin/{module}.py', name))):g}"


def test_the_bounds_that_the_page_tells_are_those_of_the_code() -> None:
    text = " ".join((section(PAGE, "Bounds") + section(PAGE, "Rules of an action")).split())
    assert f"{number('_server', 'MOST_OPERATORS')} connections at a time" in text
    assert f"{number('_feed', 'MOST_FEEDS')} may follow" in text
    assert f"does not take for {number('_server', 'STUCK')} seconds" in text
    kib, values = int(number("_guard", "MOST_BYTES")) // 1024, number("_app", "MOST_VALUES")
    assert f"at most {kib} KiB and {values} values" in text
