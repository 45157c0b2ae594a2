"""The programs in the guide to the SDKs run as they stand, with another address."""

from __future__ import annotations

import os
import sys
from typing import Final

import pytest
import trio

from tests.docs.pages import blocks, page, section, table
from tests.e2e.serving import Serving, serving, tenant
from tests.e2e.voices import TEXT, speak
from trio_gateway.testing import open_engine

PAGE: Final = "how-to/use-sdks.md"
ADDRESS: Final = "http://127.0.0.1:8080"
OVER_A_SOCKET: Final = "OpenAI's Responses over a WebSocket"
HEADINGS: Final = ("OpenAI", OVER_A_SOCKET, "Anthropic", "LangChain", "When something fails")
LIMIT: Final = 60.0  # seconds; importing an SDK takes most of it


def program(heading: str) -> str:
    (text,) = blocks(section(PAGE, heading), "python")
    return text


async def output_of(heading: str, gateway: Serving) -> str:
    """Run a program as a process of its own and read what it prints."""
    text = program(heading).replace(ADDRESS, gateway.gateway.addresses[0])
    here = {**os.environ, "NO_PROXY": "127.0.0.1", "PYTHONWARNINGS": "ignore"}
    with trio.fail_after(LIMIT):
        ran = await trio.run_process([sys.executable, "-c", text], capture_stdout=True, env=here)
    return ran.stdout.decode()


def test_every_program_of_the_page_is_run() -> None:
    assert [program(heading) for heading in HEADINGS] == blocks(page(PAGE), "python")


@pytest.mark.parametrize(
    ("heading", "printed"),
    [("OpenAI", TEXT), (OVER_A_SOCKET, TEXT), ("Anthropic", TEXT), ("LangChain", f"{TEXT}2\n")],
)
async def test_a_program_prints_the_answer(heading: str, printed: str) -> None:
    models, tenants = [{"id": "llama-3.1-8b"}], [tenant("mine", "sk-mine")]
    async with open_engine(speak) as engine, serving(engine, models=models, tenants=tenants) as gateway:
        assert await output_of(heading, gateway) == printed
        assert {record.tenant for record in gateway.records} == {"mine"}


async def test_the_program_that_fails_prints_what_the_gateway_said() -> None:
    async with open_engine() as engine, serving(engine, tenants=[tenant("mine", "sk-mine")]) as gateway:
        printed = await output_of("When something fails", gateway)
        assert printed.startswith("404 model_not_found ")
        assert gateway.turned_away() == {"model_not_found": 1}


def test_the_addresses_of_the_programs_are_those_of_the_table() -> None:
    rows = {row["SDK"].strip("`"): row["Address"] for row in table(PAGE, "Use the official SDKs")}
    for sdk, heading in (("openai", "OpenAI"), ("anthropic", "Anthropic"), ("langchain-openai", "LangChain")):
        address = rows[sdk].split("`")[1]
        assert f'base_url="{address}"' in program(heading)
