"""Usage as text, and the words in which it is asked for."""

from __future__ import annotations

import csv
import io
import json

import pytest

from trio_gateway.ledger import DIMENSIONS, KINDS, UsageRow, parse_dimensions, parse_moment, usage_page
from trio_gateway.ledger._usage_page import COUNTS

TOKENS = dict(zip(KINDS, (1_234_567, 0, 8, 7, 0), strict=True))
ROWS = [UsageRow(("acme", "m1"), 1200, 1100, 3, 40, TOKENS), UsageRow(("b", None), 1, 1, 0, 0, TOKENS)]
BY = ("tenant", "model")


def test_a_table_has_words_to_the_left_and_numbers_to_the_right() -> None:
    rows = [line.split("  ") for line in usage_page(ROWS, BY, "table").splitlines()]
    lengths = {len("  ".join(row)) for row in rows}
    assert len(lengths) == 1, "every column is as wide as its widest word"
    assert [line.split() for line in usage_page(ROWS, BY, "table").splitlines()] == [
        [*BY, *COUNTS],
        ["acme", "m1", "1,200", "1,100", "3", "40", "1,234,567", "0", "8", "7", "0"],
        ["b", "-", "1", "1", "0", "0", "1,234,567", "0", "8", "7", "0"],
    ]
    assert usage_page(ROWS, BY, "table").splitlines()[2].startswith("b       -             1 ")


def test_csv_and_json_hold_the_same_for_programs() -> None:
    (first, second) = csv.DictReader(io.StringIO(usage_page(ROWS, BY, "csv")))
    assert list(first) == [*BY, *COUNTS]
    assert (first["tenant"], first["requests"], first["prompt"], second["model"]) == (
        "acme",
        "1200",
        "1234567",
        "",
    )
    told = json.loads(usage_page(ROWS, BY, "json"))
    assert (
        told[1]
        == {"tenant": "b", "model": None, "requests": 1, "completed": 1, "open": 0, "estimated": 0} | TOKENS
    )


@pytest.mark.parametrize(
    ("style", "page"), [("json", "[]"), ("csv", ",".join(COUNTS)), ("table", "  ".join(COUNTS))]
)
def test_nothing_is_told_as_nothing(style: str, page: str) -> None:
    assert usage_page([], (), style) == page


def test_dimensions_are_named_with_commas() -> None:
    assert parse_dimensions(" tenant, day,") == ("tenant", "day")
    assert parse_dimensions("") == ()
    assert parse_dimensions(",".join(DIMENSIONS)) == DIMENSIONS


@pytest.mark.parametrize(
    ("text", "complaint"), [("tenant,mood", "'mood' is none of tenant, "), ("day,day", "twice")]
)
def test_wrong_dimensions_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_dimensions(text)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-01", 1_793_491_200.0),
        ("2026-11-01T00:00:30", 1_793_491_230.0),
        ("2026-11-01T01:00+01:00", 1_793_491_200.0),
        ("2026-11-01T00:00:00Z", 1_793_491_200.0),
    ],
)
def test_a_moment_without_a_zone_is_utc(text: str, moment: float) -> None:
    assert parse_moment(text) == moment


def test_what_is_no_moment_is_refused() -> None:
    with pytest.raises(ValueError, match="'yesterday' is no date"):
        parse_moment("yesterday")
