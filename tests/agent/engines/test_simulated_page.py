"""The page about the simulated engine has the faults, fields, kinds and routes of the code."""

from __future__ import annotations

import re
import typing
from typing import Final

import msgspec
import pytest

from tests.docs.pages import column, page, section, table, words
from trio_gateway.agent.engines import SimulatedEngine, SimulatedServer
from trio_gateway.agent.engines._simulated_core import LOG_LENGTH, SimulatedCore
from trio_gateway.agent.engines._simulated_dialects import MANNERS
from trio_gateway.agent.engines._simulated_faults import Fault, Kind, PlannedFault, Wishes
from trio_gateway.agent.engines._simulated_generation import Entry, Limits, Speed, StepEntry
from trio_gateway.agent.engines._simulated_http import LOG_ENTRIES
from trio_gateway.agent.engines._simulated_metrics import log_of
from trio_gateway.agent.engines._simulated_process import SimulatedSettings
from trio_gateway.agent.engines._simulated_request import LONGEST, SHORTEST

PAGE: Final = "reference/simulated-engine.md"


def fields(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def test_every_fault_is_described() -> None:
    assert column(PAGE, "Faults", "Kind") == list(typing.get_args(Kind))


def test_every_setting_of_a_fault_is_described_with_its_default() -> None:
    text = section(PAGE, "Faults")
    assert set(fields(Fault)) - {"kind"} <= set(words(text))
    fault = Fault("hang")
    assert f"`factor`th step [{fault.factor:.0f}]" in text
    assert f"`seconds` [{fault.seconds:.0f}]" in text
    assert f"`{fault.after}` (the default" in text


def test_every_field_of_a_planned_fault_and_of_a_wish_is_described() -> None:
    assert [words(row["Field"]) for row in table(PAGE, "Faults", 2)] == [
        [name] for name in fields(PlannedFault)
    ]
    assert column(PAGE, "What it says", "Field") == fields(Wishes)


def test_every_kind_is_described_with_its_routes() -> None:
    rows = {words(row["Kind"])[0]: row for row in table(PAGE, "Its HTTP interface")}
    assert list(rows) == list(MANNERS)
    everywhere = set(words(section(PAGE, "Its HTTP interface").split("|")[0]))
    others = re.findall(r"`((?:GET|POST) [^`]+)`(?: \(`(\w+)`\))?", page(PAGE))
    for kind, row in rows.items():
        server = SimulatedServer(SimulatedEngine(), kind, metrics=True)
        of_kind = {word for cell in ("Health", "Load") for word in words(row[cell]) if " " in word}
        own = {route for route, only in others if only == kind or route.endswith(("/faults", "/log"))}
        assert server.routes == everywhere & server.routes | of_kind | own, kind


def test_every_field_of_the_log_is_described() -> None:
    log = log_of(SimulatedCore(), 0.0, 1)
    rows = table(PAGE, "Its HTTP interface", 2)
    described = [word for row in rows for word in words(row["Field"])]
    assert described == [*log, "connections"]
    meanings = {words(row["Field"])[0]: words(row["Meaning"]) for row in rows}
    assert meanings["requests"] == list(Entry._fields)
    assert meanings["last_steps"] == list(StepEntry._fields)
    assert meanings["kv"] == list(log["kv"])
    assert f"[{LOG_ENTRIES}, at most {LOG_LENGTH:,}]" in " ".join(page(PAGE).split())


@pytest.mark.parametrize(
    ("option", "default"),
    [
        (name, getattr(SimulatedSettings(), name))
        for name in ("slots", "blocks", "context", "prefill", "decode", "load", "speed", "seed")
    ],
)
def test_the_options_of_the_command_have_the_described_defaults(option: str, default: float) -> None:
    rows = table("reference/commands.md", "`trio-gateway simulate`")
    (meaning,) = [row["Meaning"] for row in rows if words(row["Option"]) == [f"--{option}"]]
    assert f"[{default:.0f}]" in meaning


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    text = " ".join(page(PAGE).split())
    assert f"up to {Limits().step_tokens} tokens of new prompts" in text
    assert f"blocks of {Limits().block_tokens} tokens" in text
    assert f"{SHORTEST} to {LONGEST - 1} of them" in text
    assert Speed().step(80, 3) == pytest.approx(80 / 8000 + (1 + Speed().crowding * 2) / 50)
