"""The page of records names every field, outcome and phase."""

from __future__ import annotations

import dataclasses

from tests.docs.pages import column, table
from trio_gateway.contract import Outcome, Phase
from trio_gateway.ledger import GATEWAY_CRASHED, Record

PAGE = "reference/records.md"

# How a type is written in Python and on the page.
TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "str | None": "string or null",
    "int | None": "integer or null",
    "float | None": "number or null",
}


def test_every_field_of_a_record_is_described_in_its_order() -> None:
    assert column(PAGE, "Fields", "Field") == [field.name for field in dataclasses.fields(Record)]


def test_every_field_has_the_type_that_the_page_says() -> None:
    types = {field.name: TYPES[str(field.type)] for field in dataclasses.fields(Record)}
    shown = {row["Field"].strip("`"): row["Type"] for row in table(PAGE, "Fields")}
    assert shown == types


def test_every_field_has_a_meaning() -> None:
    assert all(row["Meaning"] for row in table(PAGE, "Fields"))


def test_every_outcome_is_described() -> None:
    assert column(PAGE, "Outcomes", "Outcome") == [*(outcome.value for outcome in Outcome), GATEWAY_CRASHED]


def test_every_phase_is_described() -> None:
    assert column(PAGE, "Phases", "Phase") == [phase.value for phase in Phase]
