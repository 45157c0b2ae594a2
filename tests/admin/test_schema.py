"""Shapes are told apart: what fits is silent, and what does not is named where it stands."""

from __future__ import annotations

from typing import Any

import pytest

from trio_gateway.admin import SHAPES, complaints
from trio_gateway.admin._schema import (
    Schema,
    anything,
    count,
    many,
    named,
    number,
    optional,
    or_null,
    shape,
    switch,
    table,
    text,
    word,
)
from trio_gateway.testing import FakeAdminPort, ending_row, request_row, worker_row

ROW = optional(shape(id=text(), n=count(most=9)), more=many(number()))
TREE: dict[str, Schema] = {"Tree": shape(name=text(), children=many(named("Tree")))}


def told(value: object, schema: Schema) -> list[tuple[str, str]]:
    return list(complaints(value, schema, TREE))


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ({"id": "a", "n": 9}, ROW),
        ({"id": "a", "n": 0, "more": [1, 2.5]}, ROW),
        (None, or_null(count())),
        (3, or_null(count())),
        (None, or_null(word("a"))),
        ("a", or_null(word("a"))),
        (True, switch()),
        ({"x": 1}, anything()),
        ({"x": 1, "y": 2}, table(count())),
        ({"name": "a", "children": [{"name": "b", "children": []}]}, named("Tree")),
        ("", text()),
    ],
)
def test_what_fits_is_silent(value: object, schema: Schema) -> None:
    assert told(value, schema) == []


@pytest.mark.parametrize(
    ("value", "schema", "where", "why"),
    [
        ({"id": "a"}, ROW, "n", "must be given"),
        ({"id": "a", "n": 1, "x": 1}, ROW, "x", "is not known"),
        ({"id": 1, "n": 1}, ROW, "id", "must be a string"),
        ({"id": "a", "n": 10}, ROW, "n", "must be 9 or less"),
        ({"id": "a", "n": -1}, ROW, "n", "must be 0 or more"),
        ({"id": "a", "n": True}, ROW, "n", "must be a whole number"),
        ({"id": "a", "n": 1.0}, ROW, "n", "must be a whole number"),
        ({"id": "a", "n": 1, "more": [1, "x"]}, ROW, "more[1]", "must be a number"),
        ("b", word("a", "c"), "", "must be one of a, c"),
        (1, or_null(text()), "", "must be a string or null"),
        (1, or_null(word("a")), "", "must be a string"),
        (1, switch(), "", "must be true or false"),
        ({"x": "1"}, table(count()), "x", "must be a whole number"),
        ([], table(count()), "", "must be an object"),
        ({}, many(text()), "", "must be a list"),
        ("", text(minLength=1), "", "must not be empty"),
        (
            {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}]},
            named("Tree"),
            "children[0].children[0].children",
            "must be given",
        ),
    ],
)
def test_what_does_not_fit_is_named_where_it_stands(
    value: object, schema: Schema, where: str, why: str
) -> None:
    assert told(value, schema) == [(where, why)]


async def test_the_fake_port_answers_in_the_shapes_of_the_real_one() -> None:
    port = FakeAdminPort()
    of_a_kind: list[tuple[Any, str]] = [
        *((request_row(n), "Request") for n in range(3)),
        (ending_row(1), "Ending"),
        (worker_row(1), "Worker"),
        (port.queues(), "Queues"),
        (await port.limits(), "Limits"),
        (await port.self_audit(), "SelfAudit"),
        (port.snapshot(), "Snapshot"),
        (port.version(), "Version"),
        ({"tasks": await port.tasks()}, "Tasks"),
        ({"tenants": await port.tenants()}, "Tenants"),
        (port.timeline(port.rows[0]["id"]), "Timeline"),
    ]
    for value, name in of_a_kind:
        assert list(complaints(value, SHAPES[name], SHAPES)) == []
